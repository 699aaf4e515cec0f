"""The verbs of the JIT caches: prewarm, seal and carry, verify."""
