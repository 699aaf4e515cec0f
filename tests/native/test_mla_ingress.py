"""What goes into latent attention: both forms alike, positions in the right slice, refusals."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.native.attention import apply_rope, rope_tables  # noqa: E402
from megacpp_validate.native.block import LatentIngress  # noqa: E402
from megacpp_validate.native.norms import RMSNorm  # noqa: E402

HIDDEN, HEADS, WIDTH, LATENT, ROPE, LENGTH = 20, 3, 10, 12, 4, 9
SHAPE = {"num_heads": HEADS, "head_dim": WIDTH, "latent": LATENT, "rope_dim": ROPE}


def turn_plainly(given: Any, cos: Any, sin: Any) -> Any:
    return apply_rope(given.transpose(1, 2), cos, sin).transpose(1, 2)


def make(*, fused: bool = False) -> Any:
    made = LatentIngress(
        HIDDEN, **SHAPE, fused=fused, latent_norm=RMSNorm(LATENT, dtype=torch.float64), dtype=torch.float64
    )
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.named_weights().values():
            drawn = torch.randn(weight.shape, generator=source, dtype=torch.float64)
            weight.copy_(drawn / weight.shape[-1] ** 0.5 if weight.dim() == 2 else 1 + 0.3 * drawn)
    return made


def rows(length: int = LENGTH) -> Any:
    return torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tables(length: int = LENGTH) -> Any:
    return rope_tables(length, ROPE, dtype=torch.float64)


def test_both_forms_have_the_same_weights_and_numbers() -> None:
    plain, fused = make(), make(fused=True)
    assert list(plain.named_weights()) != []
    assert plain.named_weights().keys() == fused.named_weights().keys()
    assert [name for name, _ in fused.named_parameters()] == ["weight", "latent_norm.weight", "up.weight"]
    for name, weight in plain.named_weights().items():
        assert torch.equal(weight, fused.named_weights()[name]), name
    for one, other in zip(
        plain(rows(), *tables(), turn=turn_plainly), fused(rows(), *tables(), turn=turn_plainly), strict=True
    ):
        # The same sums of HIDDEN and LATENT products, perhaps blocked differently, of values not above 10.
        torch.testing.assert_close(one, other, rtol=0, atol=10 * (HIDDEN + LATENT) * 2**-52)


def scores(ingress: Any, given: Any, first: int) -> Any:
    """Of every query and key, where position 0 of the rows has the angle of `first`."""
    cos, sin = (table[first:] for table in tables(2 * LENGTH))
    query, key, _ = ingress(given, cos, sin, turn=turn_plainly)
    return query @ key.transpose(-1, -2)


def test_positions_are_relative_and_turn_one_slice_alone() -> None:
    ingress, given = make(), rows()
    torch.testing.assert_close(scores(ingress, given, 0), scores(ingress, given, 5), rtol=0, atol=1e-12)
    first, later = (ingress(given, *(table[start:] for table in tables(2 * LENGTH)), turn=turn_plainly)
                    for start in (0, 5))  # fmt: skip
    for before, after in zip(first[:2], later[:2], strict=True):
        assert torch.equal(before[..., : WIDTH - ROPE], after[..., : WIDTH - ROPE])
        assert bool((before[..., WIDTH - ROPE :] != after[..., WIDTH - ROPE :]).any())
    assert torch.equal(first[2], later[2])
    shared = first[1][..., WIDTH - ROPE :]
    assert torch.equal(shared, shared[:, :1].expand_as(shared)), "one slice for all heads"
