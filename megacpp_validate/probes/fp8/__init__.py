"""What FP8 must hold beyond single bridge modules: a file a kind of cell of `matrix/fp8.toml`."""
