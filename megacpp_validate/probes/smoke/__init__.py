"""The cells of the smoke run: what training on several ranks must hold, beyond what single modules do."""
