"""The caches of what is compiled just in time: prewarmed, sealed, carried elsewhere, and proven warm.

One folder an architecture under one root. Nothing here imports torch: what compiles is a process of its own
(`megacpp_validate.jit`).
"""
