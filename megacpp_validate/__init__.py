"""megacpp-validate: which part of the bridge to Transformer Engine does an upgrade break, and why."""

__version__ = "0.1.0"

TOOL = f"megacpp-validate {__version__}"
"""As it stands in every result."""
