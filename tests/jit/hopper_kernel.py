"""A Triton kernel with an instruction that Hopper alone has."""

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

FENCED = tl.constexpr("wgmma.fence.sync.aligned; mov.b32 $0, $1;")


@triton.jit
def hopper_kernel(x, n: tl.constexpr):
    at = x + tl.arange(0, n)
    tl.store(at, tl.inline_asm_elementwise(FENCED, "=r,r", [tl.load(at)], dtype=tl.int32, is_pure=False, pack=1))
