"""Many cells on a real Slurm of two virtual nodes, and everything that happens to clusters; nothing lost or twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
from megacpp_validate.evidence.store import read_receipts
from tests import slurm_cluster
from tests.environments.fanout.matrix_show import Show, run_show, until

MODULES = "imports,attention,linear_walker,permute,expert_gemm,native_block,layer_spec"
TWO_STACKS = [
    "--targets", "cpu", "--probes", MODULES, "--python", sys.executable,
    "--environment", f"one=python:{sys.executable}", "--environment", f"two=python:{sys.executable}",
]  # fmt: skip
ONE = ["--targets", "cpu", "--probes", "imports,permute,layer_spec", "--python", sys.executable]


@pytest.fixture(autouse=True)
def _slurm_is_here() -> None:
    if missing := slurm_cluster.why_no_slurm():
        pytest.skip(f"not-run: {missing}")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    if missing := slurm_cluster.why_no_slurm():
        pytest.skip(f"not-run: {missing}")
    with slurm_cluster.run_cluster(2) as variables:
        yield variables


def test_a_job_cancelled_a_node_lost_the_tool_killed_a_process_killed(tmp_path: Path) -> None:
    show, code = run_show(tmp_path, TWO_STACKS, 14)
    said = "\n".join(show.said)
    assert code == 0, said
    found = read_receipts(tmp_path / "receipts").found
    faults = Counter(fault.partition(":")[0] for receipt in found.values() for fault in receipt.retries)
    assert faults["killed"] == 1, said
    assert faults["cancelled"] == 1, said
    assert faults["node-fail"] >= 1, said
    assert "on its way" in said
    assert len(show.names) == 14 + faults.total()


def test_an_interrupt_leaves_nothing_in_the_queue_and_the_same_command_goes_on(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    show = Show(slurm, tmp_path, ONE)
    tool = show.start()
    until(show.running)
    tool.send_signal(signal.SIGINT)
    assert tool.wait(timeout=60) == 130
    until(lambda: all(row[2] not in ("PENDING", "RUNNING", "COMPLETING") for row in show.jobs()))
    show.take_words()
    assert "interrupted" in "\n".join(show.said)
    again = show.start()
    assert again.wait(timeout=200) == 0, (tmp_path / "said").read_text()
    receipts = read_receipts(show.receipts).found
    assert len(receipts) == 3
    assert not any(receipt.retries for receipt in receipts.values())


def test_two_at_once_are_refused(slurm: dict[str, str], tmp_path: Path) -> None:
    first = Show(slurm, tmp_path, ONE)
    tool = first.start()
    until(first.running)
    second = subprocess.run(tool.args, env={**first.variables}, capture_output=True, text=True, check=False, timeout=60)
    assert (second.returncode, "another run writes its receipts" in second.stderr) == (6, True)
    tool.send_signal(signal.SIGINT)
    assert tool.wait(timeout=60) == 130


def test_a_controller_that_is_not_there_is_infrastructure(slurm: dict[str, str], tmp_path: Path) -> None:
    configuration = Path(slurm["SLURM_CONF"]).read_text()
    lines = ["SlurmctldPort=1" if line.startswith("SlurmctldPort=") else line for line in configuration.splitlines()]
    (tmp_path / "slurm.conf").write_text("\n".join([*lines, "MessageTimeout=2", ""]))
    show = Show({**slurm, "SLURM_CONF": str(tmp_path / "slurm.conf")}, tmp_path, ONE)
    started = time.monotonic()
    assert show.start().wait(timeout=120) == 6
    assert "the scheduler does not answer: sbatch says" in (tmp_path / "said").read_text()
    assert time.monotonic() - started < 100


def test_a_folder_whose_name_slurm_would_read_as_a_pattern(slurm: dict[str, str], tmp_path: Path) -> None:
    show = Show(slurm, tmp_path / "100%j [1], it's\\x", ["--targets", "cpu", "--probes", "imports", *ONE[-2:]])
    assert show.start().wait(timeout=200) == 0, (show.folder / "said").read_text()
    (receipt,) = read_receipts(show.receipts).found.values()
    assert receipt.retries == ()


def test_a_partition_that_there_is_not_is_told_in_slurms_words(slurm: dict[str, str], tmp_path: Path) -> None:
    show = Show(slurm, tmp_path, ONE, more='[all]\npartition = "nowhere"\n')
    assert show.start().wait(timeout=120) == 6
    assert "sbatch refused a job:" in (said := (tmp_path / "said").read_text())
    assert "invalid partition" in said
    assert "--partition=nowhere" in said
