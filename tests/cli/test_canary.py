"""The static tier from the command line: exit codes by class of outcome, and what each refusal names."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.canary.static.sources import CACHE_VARIABLE
from tests.canary.static.small_index import BROKEN, LINEAR, UNREACHABLE, use_index
from tests.canary.static.small_sources import write_files, write_release
from tests.catalog.refusals import copy_matrix
from tests.command_line import Run, make_run

OPEN, CLOSED, MISSING, NO_ENVIRONMENT = 0, 1, 4, 5


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, no index, and a terminal that is wide and plain."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    use_index(monkeypatch, UNREACHABLE)
    return tmp_path / "cache"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process."""
    return make_run(capfd, monkeypatch)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Three releases as folders: one, the same again, and one that breaks the bridge's linear layer."""
    for name, code in {"old": LINEAR, "same": LINEAR, "broken": BROKEN}.items():
        write_release(tmp_path / name, code)
    return {name: tmp_path / name for name in ("old", "same", "broken")}


def test_a_step_that_breaks_is_closed_and_names_module_symbol_and_line(run: Run, folders: dict[str, Path]) -> None:
    said = run("canary", folders["old"], folders["broken"])
    assert said.code == CLOSED
    for word in ("linear_walker", "in_features", "Linear", "pytorch/__init__.py:"):
        assert word in said.out, word
    assert said.err == ""


def test_without_arguments_it_goes_from_the_pin_to_the_newest(run: Run, index: None, tmp_path: Path) -> None:
    def versions(*arguments: object) -> list[str]:
        said = run("canary", *arguments, "--format", "json")
        assert said.code == CLOSED
        return [said.told[side]["version"] for side in ("old", "new")]

    assert versions("2.8.0") == ["2.8.0", "2.13.0"]
    matrix = copy_matrix(tmp_path / "matrix")
    (matrix / "stacks.toml").write_text('pinned = "pin"\n[[stack]]\nid = "pin"\nte = "2.9.0"\n')
    assert versions("--matrix", matrix) == ["2.9.0", "2.13.0"]


def test_an_unreachable_index_and_an_empty_cache(run: Run, own_cache: Path) -> None:
    said = run("canary", "2.8.0", "2.9.0")
    assert said.code == NO_ENVIRONMENT
    for word in ("transformer-engine 2.8.0", "Likely cause", "Next step"):
        assert word in said.err
    assert not [path for path in own_cache.rglob("*") if path.is_file()]
    assert run("canary").code == NO_ENVIRONMENT
    assert run("canary", "--list").code == NO_ENVIRONMENT


# --- anyone's code ---------------------------------------------------------------------------------------------------

TRAIN = "import transformer_engine.pytorch as te\nlayer = te.Linear(in_features=8, out_features=8)\n"
OTHER = "import transformer_engine.pytorch as te\nkind = te.Linear\n"
RISKY = LINEAR.replace("bias=True", "bias=False")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that uses Transformer Engine in two files, as the current folder."""
    for name, text in {"src/train.py": TRAIN, "src/other.py": OTHER, "src/plain.py": "x = 1\n"}.items():
        file = tmp_path / "mine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("form", "words"),
    [("github", ["::error file=src/train.py,line=2,"]), ("sarif", ['"uri": "src/train.py"', '"startLine": 2']),
     ("junit", ["src/train.py:2"]), ("html", ["src/train.py", "train.py:2"])],
)  # fmt: skip
def test_every_format_names_the_line_below_the_current_folder(
    form: str, words: list[str], run: Run, folders: dict[str, Path], project: Path
) -> None:
    said = run("canary", folders["old"], folders["broken"], "--source", project / "src", "--format", form)
    assert (said.code, [word for word in words if word not in said.out.replace("<wbr>", "")]) == (CLOSED, [])


def test_the_only_file_that_uses_it_is_no_python(run: Run, folders: dict[str, Path], project: Path) -> None:
    (project / "src" / "other.py").unlink()
    (project / "src" / "train.py").write_text(f"{TRAIN}layer = (\n")
    said = run("canary", folders["old"], folders["broken"], "--source", project / "src")
    assert (said.code, "'(' was never closed (" in said.err, "train.py, line 3)" in said.err) == (MISSING, True, True)


def test_a_library_that_is_named_is_the_one_that_is_judged(run: Run, tmp_path: Path) -> None:
    for side, code in (("old", "new = 1\nalias = new"), ("new", "new = 1"), ("src", "from deep_gemm import alias")):
        write_files(tmp_path / side, {"deep_gemm/__init__.py" if side != "src" else "train.py": code})
    pair = ("canary", tmp_path / "old", tmp_path / "new", "--source", tmp_path / "src")
    said = run(*pair, "--library", "deep-gemm")
    assert (said.code, "DeepGEMM" in said.out, "train.py:1" in said.out) == (CLOSED, True, True)


def test_a_risk_closes_where_risks_do(run: Run, folders: dict[str, Path], project: Path, tmp_path: Path) -> None:
    write_release(tmp_path / "risky", RISKY)
    pair = ("canary", folders["old"], tmp_path / "risky")
    assert [run(*pair).code, run(*pair, "--fail-on", "risk").code] == [OPEN, CLOSED]
    assert run(*pair, "--tiers", "static", "--fail-on", "risk").code == CLOSED
    assert run("canary", folders["old"], folders["same"], "--fail-on", "risk").code == OPEN
