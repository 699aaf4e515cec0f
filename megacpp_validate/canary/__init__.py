"""The canary: which bridge module a Transformer Engine upgrade breaks, and why."""
