"""A result as a page that works from disk."""
