"""A result as annotations of a continuous integration that reads workflow commands."""
