"""A document in a format: one renderer a format, and each cleans the text of other people that it shows."""
