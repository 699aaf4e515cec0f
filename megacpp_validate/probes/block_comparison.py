"""A pass of an A-block beside its fp64 reference: output and every gradient, and which layers ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..native.mlp import is_gated
from .bench import Bench
from .native_block_samples import HEADS, Sample
from .observe import graph_nodes
from .references.block import block_step
from .references.block_roundings import block_roundings
from .references.layer_roundings import Precision


def compare_block(
    bench: Bench, path: str, sample: Sample, seen: dict[str, Any], native: dict[str, Any] | None, precision: Precision,
    *, shown: Callable[[str], str] = str,
) -> dict[str, Any]:  # fmt: skip
    """Output and every gradient against fp64, which is given back by native names.

    Args:
        bench: where checks go.
        path: of their names.
        sample: that the pass was of.
        seen: output "out", gradients of "rows" and of weights, by native names.
        native: the same of plain torch in the same precision, where there is one.
        precision: of the pass.
        shown: native name of a gradient -> how a check names it.
    """
    wanted = block_step(sample.rows, sample.weights, sample.gradient, sample.sizes, sample.seen(), sample.rope)
    batch, length, hidden = sample.rows.shape
    ffn, joint = sample.weights["mlp.fc2_weight"].shape[1], HEADS * sample.case.width
    bounds = partial(
        block_roundings,
        shares=wanted.shares,
        precision=precision,
        length=max(joint, batch * length, hidden, ffn),
        gated=is_gated(sample.case.activation),
    )
    smallest = batch * length * min(hidden, ffn, sample.case.groups * sample.case.width)
    # What the rounded output moves in the scores' gradients is one number a query and head, <dO, O>.
    independent = {"qkv.weight.query": batch * length * HEADS, "qkv.weight.key": batch * length * HEADS}
    out = seen["out"]
    bench.check(f"{path}.dtype", out.dtype == sample.rows.dtype, f"{out.dtype} from {sample.rows.dtype}")
    found = {"out": wanted.out, **wanted.gradients}
    reference = _parted(found, sample)
    seen, native = _parted(seen, sample), None if native is None else _parted(native, sample)
    # The weight of a single key is 1, so its score has no gradient: what is left is small beside that of the values.
    alone = float(reference["qkv.weight.value"].norm()) if length == 1 else None
    for name, tensor in reference.items():
        bench.compare(
            f"{path}.forward" if name == "out" else f"{path}.grad.{shown(name)}",
            seen[name],
            tensor,
            roundings=bounds(name, independent=independent.get(name, smallest)),
            native=None if native is None else native[name],
            scale=alone if name in ("qkv.weight.query", "qkv.weight.key") else None,
        )
    return found


def _parted(tensors: dict[str, Any], sample: Sample) -> dict[str, Any]:
    """The gradient of the joint QKV weight in its three parts, each held to its own norm."""
    joint = tensors["qkv.weight"]
    width, groups = sample.case.width, sample.case.groups
    parts = (None,) * 3 if joint is None else joint.split([HEADS * width, groups * width, groups * width])
    rest = {name: tensor for name, tensor in tensors.items() if name != "qkv.weight"}
    return rest | dict(zip((f"qkv.weight.{part}" for part in ("query", "key", "value")), parts, strict=True))


def check_layers_ran(bench: Bench, path: str, out: Any, layers: Sequence[str]) -> None:
    """Every one of the layers is Transformer Engine's: one that is not hides behind the others."""
    ran = {name.rpartition(".")[2] for name in graph_nodes(out) if name.startswith("transformer_engine.")}
    missing = [name for name in layers if name not in ran]
    bench.check(f"{path}.layers", not missing, f"not seen: {', '.join(missing)}" if missing else ", ".join(layers))
