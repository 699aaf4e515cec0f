"""A result in Markdown: the page of a run, an issue's text, what the docs show."""
