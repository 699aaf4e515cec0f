"""Where the dispatcher stays in bf16: by what was measured, by word, and by the environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.errors import UnknownName
from megacpp_validate.bridge.expert_gemm import SOURCE, SWITCH, read_when, why_bf16_is_faster

ROOT = Path(__file__).parents[2]
FIGURES = (ROOT / SOURCE).with_suffix(".json")


@pytest.mark.parametrize(
    ("counts", "kept", "code"),
    [
        ((1024,) * 8, False, None),
        ((1024, 0, 1024, 0), False, None),
        ((512,) * 8, False, "few-rows"),
        ((1,), False, "few-rows"),
        ((0, 0, 100, 0), False, "few-rows"),
        ((512,) * 8, True, None),
        ((256,) * 8, True, "few-rows"),
    ],
)
def test_few_rows_stay_in_bf16(counts: tuple[int, ...], kept: bool, code: str | None) -> None:
    refusal = why_bf16_is_faster(counts, kept=kept)
    assert (refusal and refusal.code) == code
    assert refusal is None or (SOURCE in refusal.reason and SWITCH in refusal.reason)


def test_the_word_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert read_when(None) == "faster"
    monkeypatch.setenv(SWITCH, " Always ")
    assert read_when(None) == "always"
    assert read_when("faster") == "faster", "what is written in the code goes first"
    monkeypatch.setenv(SWITCH, "sometimes")
    with pytest.raises(UnknownName, match="faster, always"):
        read_when(None)


@pytest.mark.skipif(not FIGURES.exists(), reason="not-run: there are no figures")
def test_the_rule_is_what_was_measured() -> None:
    """FP8 is taken where it wins, weights rounded in every call; where it is not, it wins nothing worth having."""
    for table in json.loads(FIGURES.read_text(encoding="utf-8"))["tables"]:
        gains = {row["path"]: row["step"]["gain"] for row in table["paths"]}
        gain = gains["DeepGEMM, weights each call"]
        if why_bf16_is_faster(table["counts"]) is None:
            assert gain >= 1.0, table["what"]
        else:
            assert gain < 1.15, table["what"]
