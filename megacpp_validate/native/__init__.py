"""Plain PyTorch layers: the reference of every parity check, and the path a wrapper falls back to.

Nothing here imports the rest of the project or a vendor library. Every function is differentiable, runs on CPU and GPU,
and takes fp64, fp32, bf16 and fp16.
"""
