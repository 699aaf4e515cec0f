"""A result in a terminal: any width, with or without colour, on a screen or in a pipe."""
