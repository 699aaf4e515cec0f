"""A stack made usable: how a probe process is started in it, what it has, and what its processes wrote."""
