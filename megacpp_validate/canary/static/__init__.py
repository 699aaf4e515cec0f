"""Releases and their API, uses in a source tree, and the comparison of both."""
