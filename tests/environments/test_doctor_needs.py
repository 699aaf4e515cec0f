"""What the doctor holds against a core library is what the library for its own CUDA needs, and beside what is there."""

from __future__ import annotations

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.environments.doctor import judge
from megacpp_validate.environments.doctor_result import Aspect
from tests.environments.doctor_hosts import SITE, TE, host, look, rows, with_distributions, with_path


@pytest.mark.parametrize(("half", "torch_cuda", "told"), [("cu12", "12.8", 0), ("cu13", "13.0", 1), ("", "12.8", 0)])
def test_the_core_library_for_cuda_12_has_no_grouped_layout(
    catalog: Catalog, half: str, torch_cuda: str, told: int
) -> None:
    seen = with_path(host("2.14.1", transformer_engine=look(TE, "2.14.1")), torch_cuda=torch_cuda)
    if half:
        seen = with_distributions(seen, (f"transformer-engine-{half}", "2.14.1", SITE))
    found = [one for one in judge(seen, rows(catalog)) if one.aspect is Aspect.LIBRARY and "cuBLAS" in one.wanted]
    assert len(found) == told


@pytest.mark.parametrize(
    ("flash", "cute", "told"),
    [
        ("4.0.0b36", "4.6.1", ">=4.6.2"), ("4.0.0b36", "4.6.2", ""), ("4.0.0b11", "4.4.2", ""),
        ("4.0.0b11", "4.4.1", ">=4.4.2"),
    ],
)  # fmt: skip
def test_flash_attention_4_asks_for_the_cute_dsl_of_its_own_day(
    catalog: Catalog, flash: str, cute: str, told: str
) -> None:
    seen = with_distributions(host(), ("flash-attn-4", flash, SITE), ("nvidia-cutlass-dsl", cute, SITE))
    found = [one.next_step for one in judge(seen, rows(catalog)) if one.seen.startswith("nvidia-cutlass-dsl")]
    assert [told in step for step in found] == ([True] if told else [])
