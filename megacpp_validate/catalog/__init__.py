"""The only reader of `matrix/`: data as typed values."""
