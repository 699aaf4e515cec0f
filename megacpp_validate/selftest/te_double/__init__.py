"""A folder for `sys.path`: what lies in it stands in for Transformer Engine on a CPU; see `selftest.double`."""
