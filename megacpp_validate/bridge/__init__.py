"""The bridge: how a hybrid model uses Transformer Engine, and what it falls back to without it.

Importing any module of this package never raises and never imports a vendor library: the first call of
`is_te_available()` or of an entry point does. The package imports nothing of the project but `native`, so it
can be copied into a training tree as it is.
"""
