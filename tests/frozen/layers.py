"""SHA-256 of what the native layers give for fixed seeds: the output and every gradient, to the last bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

import torch

from megacpp_validate.native import attention, block, grouped_gemm, mamba, mlp, norms, permute, recurrent, router

COUNTS: Final = (5, 0, 7, 3)
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def _block(dtype: Any) -> Any:
    layer, tables = block.ABlock(32, 48, 4, 8, 2, activation="swiglu", dtype=dtype), attention.rope_tables(17, 8)
    return layer, lambda rows: layer(rows, rope=tables)


def _permute(_: Any) -> Any:
    def there_and_back(rows: Any) -> Any:
        tokens = rows.flatten(0, 1)
        routing_map = torch.rand(len(tokens), 8) < 0.3
        moved, probs, ids = permute.permute(tokens, torch.rand(len(tokens), 8), routing_map)
        return permute.unpermute(moved, ids, num_tokens=len(tokens), row_probs=probs)

    return None, there_and_back


def _attention(**options: Any) -> Callable[[Any], Any]:
    def run(rows: Any) -> Any:
        heads = rows.unflatten(-1, (4, 8)).transpose(1, 2)
        return attention.attention(heads, heads[:, :2], heads[:, 2:], **options)

    return lambda _: (None, run)


def _router(dtype: Any) -> Any:
    layer = router.TopKRouter(32, 6, 2, aux_coefficient=0.1, z_coefficient=0.1, dtype=dtype)
    return layer, lambda rows: (found := layer(rows.flatten(0, 1))).probs + found.aux_loss + found.z_loss


def _experts(dtype: Any) -> Any:
    layer = grouped_gemm.ExpertBank(4, 32, 24, dtype=dtype)
    return layer, lambda rows: layer(rows.flatten(0, 1)[: sum(COUNTS)], COUNTS)


def _of(kind: Any, *sizes: int, **options: Any) -> Callable[[Any], Any]:
    return lambda dtype: (layer := kind(*sizes, dtype=dtype, **options), layer)


DOCUMENTS: Final = torch.arange(17).div(6, rounding_mode="floor").expand(2, 17)
LAYERS: Final[dict[str, Callable[[Any], Any]]] = {
    "block": _block,
    "permute": _permute,
    "router": _router,
    "experts": _experts,
    "attention.causal": _attention(),
    "attention.full": _attention(causal=False),
    "attention.window": _attention(window=5),
    "attention.softcap": _attention(softcap=3.0),
    "attention.documents": _attention(doc_ids=DOCUMENTS),
    "mlp.swiglu": _of(mlp.MLP, 32, 48),
    "mlp.gelu.norm": _of(mlp.NormMLP, 32, 48, activation="gelu"),
    "norm.rms": _of(norms.RMSNorm, 32),
    "mamba": _of(mamba.Mamba2Mixer, 32, state=8, head_dim=8, chunk=5),
    "recurrent": _of(recurrent.MatrixRecurrentBlock, 32, num_heads=2, key_dim=8, value_dim=8, chunk=5),
}


def hash_layers() -> dict[str, str]:
    """Layer and dtype -> SHA-256 of output, gradient of the input and of each parameter, in this order."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    hashes = {}
    for name, build in LAYERS.items():
        for word, dtype in DTYPES.items():
            torch.manual_seed(7)
            layer, call = build(dtype)
            rows = torch.randn(2, 17, 32).to(dtype).requires_grad_()
            out = call(rows)
            out.backward(torch.randn(out.shape).to(out.dtype))
            leaves = [out, rows.grad, *(leaf.grad for leaf in (layer.parameters() if layer is not None else ()))]
            digest = hashlib.sha256()
            for tensor in leaves:
                digest.update(b"-" if tensor is None else tensor.detach().contiguous().view(torch.uint8).numpy())
            hashes[f"{name}.{word}"] = digest.hexdigest()
    return hashes
