"""Kernels of the bridge, in Triton: a module here is loaded by the accessor that guards Triton, and only there."""
