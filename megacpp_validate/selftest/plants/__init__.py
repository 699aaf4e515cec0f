"""The code that plants each kind of fault; which ones are planted where is data, in `matrix/mutants.toml`."""
