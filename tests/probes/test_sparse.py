"""The cell of DSA and MoBA passes, and each planted fault fails the check that is meant for it."""

from __future__ import annotations

import pytest

from megacpp_validate.bridge import attention as wrapper
from megacpp_validate.native import sparse_attention as native
from megacpp_validate.probes import sparse
from tests.probes.planting import Plant, after, changing, check_caught, failed, new_bench, putting

STANDS_ON = ("attention", "linear_walker")


def test_every_layer_is_its_formula() -> None:
    bench = new_bench("smoke_sparse", stands_on=STANDS_ON)
    sparse.probe(bench)
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends} == {"sdpa"}
    assert all(any("native.sparse_attention" in why for why in row.reasons) for row in bench.backends[:10])


PLANTED: dict[str, tuple[Plant, list[str]]] = {
    "window-lost": (changing(native, "pick_tokens", lambda f: lambda s, k, window=1, **o: f(s, k, **o)), ["*k7.picks"]),
    "lowest-scores": (changing(native, "pick_tokens", lambda f: lambda s, *a, **o: f(-s, *a, **o)), ["*.dsa.k7.picks"]),
    "one-token-less": (changing(native, "pick_tokens", lambda f: lambda *a, **o: f(*a, **o)[..., :-1]), ["*k1.picks"]),
    "borders-ignored": (putting(native, "forbidden_rows", lambda indices, _: indices[..., 0] < -1), ["dsa.closed.*"]),
    "output-scaled": (after(wrapper, "sampled_attention", lambda r: (r[0] * 1.01, r[1])), ["*.dsa.k7.forward"]),
    "own-block-lost": (after(native, "route_blocks", lambda one: one.roll(1, 2)), ["*.moba.k1.picks"]),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "wanted"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_seen(plant: Plant, wanted: list[str]) -> None:
    check_caught(new_bench("smoke_sparse", stands_on=STANDS_ON), sparse.probe, plant, wanted)
