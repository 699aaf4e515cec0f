"""What an image of ours starts with, at once and on the standard library alone: `docker run IMAGE SESSION [...]`."""
