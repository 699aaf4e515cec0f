"""The JIT caches from inside an environment: what was compiled, that ranks compile it once, and tasks that compile.

Where no library is imported nothing is imported here either: each is hooked when it is loaded (`late`).
"""
