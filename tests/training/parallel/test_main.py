"""Numbers that cannot be launched are refused before a rank is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megacpp_validate.training.parallel.__main__ import main

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--nnodes 2 --nproc-per-node 2 --world 8", "the plan's world is 8.*make 4: ranks are missing"),
        ("--nnodes 2 --nproc-per-node 2 --world 2", "ranks would be idle"),
        ("--nnodes 2 --nproc-per-node 2", "2 hosts need an --rdzv-endpoint"),
        ("--nproc-per-node 2 --rdzv-endpoint nowhere", "and not HOST:PORT"),
        ("--nproc-per-node 0", "cannot be launched"),
        ("--slurm --nnodes 2 --nproc-per-node 2 --world 8", "ranks are missing"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert main([*options.split(), "--folder", str(tmp_path), "nothing"]) == 2
    assert re.search(words, capsys.readouterr().err)
