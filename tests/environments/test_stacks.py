"""Stacks: what a person writes, the releases of a host, and what is wrong with one stack costs no other anything."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.environments import stacks
from megacpp_validate.environments.fleet import Room
from megacpp_validate.environments.interpreter import Facts, InterpreterEnvironment
from megacpp_validate.environments.plan import choose_target
from megacpp_validate.environments.stacks import (
    Found,
    RanStack,
    Spec,
    Stack,
    StackOptions,
    find_environments,
    prepare_stack,
    read_spec,
    resolve_environment,
    run_stacks,
)
from megacpp_validate.errors import NoEnvironment, WrongArguments
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.store import read_receipts
from megacpp_validate.process import Processes
from tests.environments.places import H200_HOST, LAPTOP, make_probes, target_of
from tests.environments.site_folders import make_package, make_te


def options(tmp_path: Path, *, times: bool = True) -> StackOptions:
    return StackOptions(
        times, Room(2), probes=("attention", "permute"), seed=3, receipts=tmp_path / "receipts", limit_s=30.0
    )


@pytest.fixture
def run(catalog: Catalog, tmp_path: Path) -> Callable[..., dict[str, RanStack]]:
    def call(target: str, *given: Stack) -> dict[str, RanStack]:
        found = run_stacks(catalog, target_of(catalog, target), given, options(tmp_path), Processes())
        return {stack.run.stack: stack for stack in found}

    return call


def stack(folder: Path, name: str, facts: Facts = H200_HOST, main: str = "write(reason=json.dumps(order))") -> Stack:
    return Stack(name, make_probes(folder, main), facts)


def test_every_stack_has_its_cells_and_the_first_is_timed_twice(
    run: Callable[..., dict[str, RanStack]], tmp_path: Path
) -> None:
    found = run("h200", stack(tmp_path, "te2.12.0"), stack(tmp_path, "te2.20.2"))
    first, second = found["te2.12.0"], found["te2.20.2"]
    assert first.run.ran == (
        "te2.12.0-h200-attention", "te2.12.0-h200-permute",
        "again/te2.12.0-h200-attention", "again/te2.12.0-h200-permute",
    )  # fmt: skip
    assert second.run.ran == ("te2.20.2-h200-attention", "te2.20.2-h200-permute")
    assert (set(first.again), set(second.again)) == ({"attention", "permute"}, set())
    orders = {name: json.loads(receipt.reason) for name, receipt in first.receipts.items()}
    again = {name: json.loads(receipt.reason) for name, receipt in first.again.items()}
    other = json.loads(second.receipts["permute"].reason)
    assert {(o["times"], o["only_times"], o["seed"], o["requested"]) for o in orders.values()} == {
        (True, False, 3, "te")
    }
    assert {(o["times"], o["only_times"]) for o in again.values()} == {(True, True)}
    # One device, one turnstile, for all of them; and it is gone after the run.
    assert len({o["turnstile"] for o in (*orders.values(), *again.values(), other)}) == 1
    assert not Path(other["turnstile"]).parent.exists()
    assert set(read_receipts(tmp_path / "receipts" / "te2.12.0" / "again").found) == {
        "te2.12.0-h200-attention", "te2.12.0-h200-permute",
    }  # fmt: skip


def test_a_stack_that_cannot_be_made_is_not_run_and_the_others_are(
    run: Callable[..., dict[str, RanStack]], tmp_path: Path
) -> None:
    found = run("h200", Stack("te2.14.1", problem="the wheel is damaged"), stack(tmp_path, "te2.20.2"))
    bad, good = found["te2.14.1"], found["te2.20.2"]
    assert (bad.run.problem, bad.run.ran, bad.run.folder) == ("the wheel is damaged", (), "")
    assert {(r.outcome, r.reason) for r in bad.receipts.values()} == {(Outcome.NOT_RUN, "the wheel is damaged")}
    assert all(receipt.outcome is Outcome.PASS for receipt in good.receipts.values())
    assert set(good.again) == {"attention", "permute"}  # the first that can be run gives the noise
    assert not (tmp_path / "receipts" / "te2.14.1").exists()


def test_a_stack_that_has_nothing_to_probe_has_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> InterpreterEnvironment:
        raise NoEnvironment("there is no such folder")

    environment = make_probes(tmp_path, "")
    for torch, make, problem in (
        ("2.11.0", lambda: environment, ""),
        ("", lambda: environment, "has no torch"),
        ("2.11.0", fail, "no such folder"),
    ):
        monkeypatch.setattr(stacks, "read_facts", lambda *_, t=torch: H200_HOST.model_copy(update={"torch": t}))
        made = prepare_stack("one", make, {"A": "b"}, Processes())
        assert (problem in made.problem, bool(made.problem)) == (True, bool(problem))
        assert bool(made.shown) == (not problem)


def test_the_target_is_that_of_the_gpu(catalog: Catalog) -> None:
    b200 = {"gpu": H200_HOST.gpu and H200_HOST.gpu.model_copy(update={"capability": "10.0"})}
    assert choose_target(catalog, [H200_HOST]).id == "h200"
    assert choose_target(catalog, [LAPTOP, H200_HOST.model_copy(update=b200)]).id == "b200"
    assert choose_target(catalog, [LAPTOP]).id == "h200"  # the reference; it says then that there is no GPU
    with pytest.raises(WrongArguments, match=r"sm_90, aarch64.*Next step"):
        choose_target(catalog, [H200_HOST.model_copy(update={"machine": "aarch64"})])


def test_another_row_of_the_target_makes_old_receipts_no_answer(catalog: Catalog, tmp_path: Path) -> None:
    """The row says what a probe is judged by; a matrix of one's own changes it without another commit."""
    row = target_of(catalog, "h200")
    other = row.model_copy(update={"deep_gemm": not row.deep_gemm})
    one, running = stack(tmp_path, "te2.12.0", main="write()"), options(tmp_path, times=False)
    ran = [len(run_stacks(catalog, target, [one], running, Processes())[0].run.ran) for target in (row, row, other)]
    assert ran == [2, 0, 2]


# --- what a person writes, and which releases a host has ---

SPECS: dict[str, tuple[str, Spec]] = {
    "overlay": ("new=overlay:/a:/b", Spec("new", "overlay", "/a:/b")),
    "image": (f"ngc=image:a@sha256:{'b' * 64}", Spec("ngc", "image", f"a@sha256:{'b' * 64}")),
    "interpreter": ("mine=python:/opt/a=b/bin/python3", Spec("mine", "python", "/opt/a=b/bin/python3")),
}


@pytest.mark.parametrize(("text", "spec"), SPECS.values(), ids=SPECS)
def test_what_a_person_writes(text: str, spec: Spec) -> None:
    assert read_spec(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2.20.2",
        "overlay:/a",
        "=overlay:/a",
        "x=overlay:",
        "x=conda:env",
        "a/b=python:p",
        "x=",
        "../x=python:p",
        "x=image:nvcr.io/nvidia/pytorch:26.09-py3",
        "x=image:a@sha256:123",
    ],
)
def test_what_is_no_environment_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(WrongArguments, match=r"NAME=overlay:DIR.*NAME=image:REPOSITORY@sha256.*NAME=python:PATH"):
        read_spec(text)


# --- which releases a host has, read from folders as packers and installers leave them ---


def find(roots: Sequence[Path], tmp_path: Path, **variables: str) -> tuple[Found, ...]:
    variables = {"PATH": os.defpath, **variables}
    return find_environments(roots, variables, sys.executable)


def test_a_release_that_the_host_has_is_taken(tmp_path: Path) -> None:
    te = make_te(tmp_path / "te", "2.14.1")
    assert resolve_environment("2.14.1", find([te], tmp_path)).folders == (te,)


def test_a_release_that_nothing_provides_says_what_there_is_and_how_to_provide_it(tmp_path: Path) -> None:
    damaged = make_te(tmp_path / "te-2.20.2", "2.20.2")
    shutil.rmtree(next(damaged.glob("*.dist-info")))
    roots = [make_te(tmp_path / "te", "2.14.1"), damaged]
    with pytest.raises(NoEnvironment) as told:
        resolve_environment("2.20.2", find(roots, tmp_path))
    for word in ("2.14.1", str(damaged), "names no release", "--overlays", "NAME=python:PATH"):
        assert word in str(told.value)


def usable(found: Sequence[Found]) -> list[str]:
    return [place.release for place in found if place.environment is not None]


def reasons(found: Sequence[Found]) -> dict[str, str]:
    return {Path(place.place).name: place.reason for place in found if place.environment is None}


def make_host(root: Path) -> Path:
    """As `install.py` of a packer leaves it: releases, common packages, and what it works with."""
    for version in ("2.20.2", "2.9.0", "2.12.0"):
        make_te(root / f"te-{version}", version)
    make_package(root / "base", "einops", "0.8.2")
    make_package(root / "fa4", "flash_attn", "4.0.0b36")
    make_package(root / "zstandard", "zstandard", "0.25.0")
    (root / "inbox").mkdir()
    (root / "inbox" / "zstandard-0.25.0-cp312-cp312-manylinux2014_x86_64.whl").write_bytes(b"")
    (root / "README").write_text("")
    return root


def test_the_releases_of_a_root_oldest_first_each_over_the_common_folders(tmp_path: Path) -> None:
    root = make_host(tmp_path / "gpu-host")
    found = find([root], tmp_path)
    assert usable(found) == ["2.9.0", "2.12.0", "2.20.2"]
    assert reasons(found) == {}
    middle = found[1].environment
    assert middle is not None
    assert [folder.name for folder in middle.folders] == ["te-2.12.0", "base", "fa4", "zstandard"]
    assert "2.12.0" in middle.because
    assert len({place.environment.identity for place in found if place.environment}) == 3


EXTENSION = "transformer_engine_torch.cpython-39-aarch64-linux-gnu.so"
UNREADABLE = "names no release"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no-metadata": (lambda site: shutil.rmtree(next(site.glob("*.dist-info"))), UNREADABLE),
    "another-python": (lambda site: (site / EXTENSION).touch(), "built for .cpython-39-aarch64-linux-gnu.so"),
    "pth-that-ends-python": (lambda site: (site / "a.pth").write_text("import os; os._exit(1)\n"), r".pth files"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_told_and_hides_no_other(
    damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    root = make_host(tmp_path / "host")
    damage(root / "te-2.12.0")
    found = find([root], tmp_path)
    assert usable(found) == ["2.9.0", "2.20.2"]
    assert list(reasons(found)) == ["te-2.12.0"]
    assert reason in reasons(found)["te-2.12.0"]
