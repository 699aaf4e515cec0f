"""The watch as a person or a schedule runs it, against a small index and the real te-canary."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.canary.dynamic.upgrade_result import Change, Culprit, ModuleChange, StepResult, UpgradeResult
from megacpp_validate.canary.static.sources import CACHE_VARIABLE
from megacpp_validate.catalog.bridge import matrix_folder, read_catalog
from megacpp_validate.cli.app import TOOL
from megacpp_validate.cli.canary import te_watch_verbs
from megacpp_validate.cli.canary.watch_folder import StateDamaged, WatchFolder
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.values import Cause
from tests.canary.static.small_index import PACKAGE, UNREACHABLE, serve, use_index, write_index
from tests.command_line import Run, make_run

assert te_watch_verbs  # its import makes the verb known

LINEAR = """
class Linear:
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device='cuda', eps=1e-5, name=None): ...
"""
GOOD = PACKAGE | {"transformer_engine/pytorch/__init__.py": LINEAR}
BROKEN = PACKAGE | {"transformer_engine/pytorch/__init__.py": LINEAR.replace("in_features", "width", 1)}
OPEN, CLOSED, WRONG, MISSING, NO_ENVIRONMENT, INFRASTRUCTURE = 0, 1, 2, 4, 5, 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    use_index(monkeypatch, UNREACHABLE)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The matrix, pinned at 2.9.0, with the tier that needs no torch."""
    copy = Path(shutil.copytree(matrix_folder(), tmp_path_factory.mktemp("matrix") / "matrix"))
    (copy / "stacks.toml").write_text('pinned = "pin"\n[[stack]]\nid = "pin"\nte = "2.9.0"\n')
    text = (copy / "pipelines.toml").read_text()
    (copy / "pipelines.toml").write_text(text.replace('tiers = ["static", "firewall"]', 'tiers = ["static"]'))
    return copy


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def watch(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, matrix: Path, state: Path) -> Run:
    """The verb in this process; te-canary is a process of its own."""
    return make_run(capfd, monkeypatch, "te-watch", "--matrix", matrix, "--state", state, "--format", "json")


def offer(folder: Path, monkeypatch: pytest.MonkeyPatch, *, broken: str = "2.10.0", marks: str = "") -> Path:
    """An index of 2.8.0, 2.9.0, a pre-release, and one that breaks the bridge's linear layer."""
    url = write_index(folder, {"2.8.0": GOOD, "2.9.0": GOOD, "2.11.0rc1": GOOD, **({broken: BROKEN} if broken else {})})
    page = folder / "simple" / "transformer-engine" / "index.html"
    page.write_text(page.read_text().replace(f'-{broken}-py3-none-any.whl"', f'-{broken}-py3-none-any.whl" {marks}'))
    use_index(monkeypatch, url)
    return page


def kept(state: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(state)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in state.rglob("*")
        if path.is_file() and path.name not in {".lock", "state.json"}
    }


def test_a_release_is_judged_once_and_has_one_issue_text(
    watch: Run, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path / "index", monkeypatch)
    first = watch()
    assert first.code == CLOSED, first.err
    rows = {row["version"]: row for row in first.told["changed"]}
    assert (rows["2.10.0"]["standing"], rows["2.10.0"]["against"], rows["2.10.0"]["code"]) == ("judged", "2.9.0", 1)
    assert rows["2.11.0rc1"]["standing"] == "left-out"
    assert first.told["gpu"] == [{"old": "2.9.0", "new": "2.10.0", "target": "h200"}]
    text = (state / "issues" / "2.10.0.md").read_text()
    for words in (
        'title: "Transformer Engine 2.10.0 breaks linear_walker (from 2.9.0)"',
        '"te-watch", "breaks"',
        "<!-- megacpp-validate/te-watch release=2.10.0 -->",
        "| linear_walker | ✗ breaks | ○ not run |",
        "in_features",
        "not run**: a machine with that label",
        "nox -s te_canary -- 2.9.0 2.10.0",
    ):
        assert words in text, words

    before = kept(state)
    again = watch()  # nothing is new: nothing is judged, and nothing is written
    assert (again.code, again.told["changed"], again.told["issues"]) == (OPEN, [], [])
    assert kept(state) == before

    # A run that was killed between the answer and its record: the answer is taken, and nothing runs again. te-canary
    # could not: there is no wheel any more.
    known = json.loads((state / "state.json").read_text())
    known["releases"] = [row for row in known["releases"] if row["version"] != "2.10.0"]
    (state / "state.json").write_text(json.dumps(known))
    (state / "issues" / "2.10.0.md").unlink()
    shutil.rmtree(tmp_path / "cache")
    for wheel in (tmp_path / "index").rglob("*.whl"):
        wheel.unlink()
    assert watch().code == CLOSED
    assert (state / "issues" / "2.10.0.md").read_text() == text
    assert kept(state)["results/2.10.0.json"] == before["results/2.10.0.json"]


def test_a_damaged_answer_is_made_again(
    watch: Run, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = offer(tmp_path / "index", monkeypatch)
    shutil.move(page.parent / "transformer_engine-2.10.0-py3-none-any.whl", tmp_path)
    (state / "results").mkdir(parents=True)
    (state / "results" / "2.10.0.json").write_text('{"schema_id": "megacpp-validate/upgr')
    # It has to be made, and cannot be: no verdict, no issue, and tried again next time.
    broken = watch()
    assert broken.code == MISSING
    (row,) = [row for row in broken.told["changed"] if row["version"] == "2.10.0"]
    assert (row["standing"], row["code"]) == ("waiting", NO_ENVIRONMENT)
    assert "could not be fetched" in row["reason"]
    assert not (state / "issues").exists()

    shutil.move(tmp_path / "transformer_engine-2.10.0-py3-none-any.whl", page.parent)
    assert watch().code == CLOSED
    assert "breaks linear_walker" in (state / "issues" / "2.10.0.md").read_text()


def gpu_answer(release: str, *, lost: bool = False, red: bool = True, **changes: object) -> str:
    modules = tuple(
        ModuleChange(module=module.id, before=Outcome.PASS, after=Outcome.PASS, change=Change.UNCHANGED)
        for module in read_catalog().modules
    )
    culprit = Culprit(
        module="attention", cause=Cause.ENVIRONMENT, component="cuDNN", signature="s", summary="cuDNN is too old",
        next_step="install cuDNN 9.12",
    )  # fmt: skip
    step = StepResult(
        target="h200", before="te2.9.0", after=f"te{release}", modules=modules,
        culprits=(culprit,) if red and not lost else (), lost={"a-cell": "timeout"} if lost else {},
    ).model_copy(update=changes.pop("step", {}))  # fmt: skip
    result = UpgradeResult(tool=TOOL, target="h200", tiers=("gpu",), steps=(step,))
    return result.model_copy(update=changes).model_dump_json()


def judged(state: Path, matrix: Path) -> None:
    """A state in which 2.10.0 was judged and nothing of it breaks; without a process."""
    row = {"version": "2.10.0", "standing": "judged", "first_seen": "2026-11-22", "against": "2.9.0", "code": 0}
    known = [{"version": name, "standing": "known", "first_seen": "2026-11-22"} for name in ("2.8.0", "2.9.0")]
    (state / "results").mkdir(parents=True)
    (state / "state.json").write_text(json.dumps({"distribution": "transformer-engine", "releases": [*known, row]}))
    result = UpgradeResult(tool="t", target="", tiers=("static",))
    (state / "results" / "2.10.0.json").write_text(result.model_dump_json())


def test_what_a_gpu_saw_goes_into_the_same_issue(watch: Run, state: Path, matrix: Path, tmp_path: Path) -> None:
    judged(state, matrix)
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "2.10.0.json").write_text(gpu_answer("2.10.0"))
    (folder / "2.12.0.json").write_text(gpu_answer("2.12.0"))  # nobody has judged it
    (folder / "notes.json").write_text("{}")
    said = watch("--gpu-results", folder)  # the index is not asked: it cannot be reached here
    assert said.code == CLOSED
    assert sum("is no answer of the gpu tier" in reason for reason in said.told["left"]) == 2
    text = (state / "issues" / "2.10.0.md").read_text()
    for words in ("breaks attention", "cuDNN is too old", "install cuDNN 9.12", "release=2.10.0"):
        assert words in text, words
    assert said.told["gpu"] == []

    judged_again = json.loads((state / "state.json").read_text())
    assert [row["gpu_code"] for row in judged_again["releases"]] == [None, None, CLOSED]


def test_a_gpu_run_without_evidence_is_still_to_be_done(watch: Run, state: Path, matrix: Path, tmp_path: Path) -> None:
    judged(state, matrix)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "2.10.0.json").write_text(gpu_answer("2.10.0", lost=True))
    said = watch("--gpu-results", tmp_path / "gpu")
    assert said.code == MISSING
    assert [step["new"] for step in said.told["gpu"]] == ["2.10.0"]
    for name in (".2.10.0.md.77", ".keep"):  # half a file of a killed run, and one of somebody else's
        (state / "issues" / name).write_text("---")
    missing = watch("--gpu-results", tmp_path / "nothing-there")
    assert missing.code == WRONG
    assert "there is no folder" in missing.err
    assert sorted(path.name for path in (state / "issues").iterdir()) == [".keep", "2.10.0.md"]


FOREIGN = {
    "another release": {"step": {"after": "te2.20.2"}},
    "against another": {"step": {"before": "te2.8.0"}},
    "on another target": {"step": {"target": "b200"}},
    "no step": {"steps": ()},
    "of no module": {"step": {"modules": ()}},
    "of another tool": {"tool": "megacpp-validate 0.0.0"},
    "without the tier": {"tiers": ("static",)},
}


@pytest.mark.parametrize("changes", FOREIGN.values(), ids=FOREIGN)
def test_an_answer_on_something_else_opens_nothing(
    changes: dict[str, Any], watch: Run, state: Path, matrix: Path, tmp_path: Path
) -> None:
    judged(state, matrix)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "2.10.0.json").write_text(gpu_answer("2.10.0", red=False, **changes))
    said = watch("--gpu-results", tmp_path / "gpu")
    assert said.code == MISSING, said.out
    assert "2.10.0.json is no answer on 2.9.0 -> 2.10.0: " in said.told["left"][0]
    assert [step["new"] for step in said.told["gpu"]] == ["2.10.0"]
    assert not (state / "results" / "2.10.0.gpu.json").exists()
    (tmp_path / "gpu" / "2.10.0.json").write_text(gpu_answer("2.10.0", red=False))
    assert watch("--gpu-results", tmp_path / "gpu").code == OPEN


def test_a_known_break_that_is_withdrawn_is_no_new_one(
    watch: Run, state: Path, matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(state, matrix)
    text = (state / "state.json").read_text()
    (state / "state.json").write_text(text.replace('"code": 0', '"code": 1'))
    offer(tmp_path / "index", monkeypatch, broken="")
    said = watch("--format", "markdown")
    assert said.code == OPEN
    assert "no release judged; 1 withdrawn; 2.9.0 is pinned." in said.out


def test_the_pinned_release_that_is_withdrawn_is_said_and_has_an_issue(
    watch: Run, state: Path, matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(state, matrix)
    page = offer(tmp_path / "index", monkeypatch, marks='data-yanked=""')
    whole = page.read_text()
    page.write_text(whole.replace('-2.9.0-py3-none-any.whl"', '-2.9.0-py3-none-any.whl" data-yanked="bad sums"'))
    said = watch("--format", "markdown")
    assert "2.9.0 is pinned, and the index has withdrawn it" in said.out
    issue = (state / "issues" / "2.9.0.md").read_text()
    assert "which is pinned, was withdrawn" in issue
    assert "bad sums" in issue
    page.write_text(whole)
    watch()
    assert "is back on the index" in (state / "issues" / "2.9.0.md").read_text()


def test_a_release_that_was_deleted_or_yanked_is_said_in_its_issue(
    watch: Run, state: Path, matrix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(state, matrix)
    offer(tmp_path / "index", monkeypatch, broken="")
    said = watch()
    assert said.code == OPEN
    assert said.told["gpu"] == []
    text = (state / "issues" / "2.10.0.md").read_text()
    assert "2.10.0 was withdrawn" in text
    assert "deleted from the index" in text
    offer(tmp_path / "other", monkeypatch, marks='data-yanked="&lt;script&gt;wrong&lt;/script&gt; | sums"')
    watch()
    text = (state / "issues" / "2.10.0.md").read_text()
    assert "yanked: &#60;script&#62;wrong" in text  # words of others are no markup
    assert "<script>" not in text


def test_an_index_that_is_down_or_answers_garbage_changes_nothing(
    watch: Run, state: Path, matrix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(state, matrix)
    before = (state / "state.json").read_bytes()
    said = watch()
    assert said.code == NO_ENVIRONMENT
    assert "cannot be reached" in said.err
    page = b'<a href="transformer_engine-2.10.0-py3-none-any.whl">x</a>'  # without the pinned one: cut short
    with serve({"/transformer-engine/": (200, "text/html", page)}) as url:
        use_index(monkeypatch, url)
        said = watch()
    assert said.code == NO_ENVIRONMENT
    assert "not 2.9.0, which is pinned" in said.err
    assert (state / "state.json").read_bytes() == before
    assert not (state / "issues").exists()


DAMAGED = {
    "empty": "",
    "cut short": '{"distribution": "transformer-engine", "releases": [{"versi',
    "of a later schema": '{"schema_id": "megacpp-validate/te-watch-state/2", "distribution": "transformer-engine"}',
    "of another package": '{"distribution": "torch"}',
    "a key twice": '{"distribution": "transformer-engine", "distribution": "transformer-engine"}',
    "a path for a version": '{"distribution": "transformer-engine", "releases": [{"version": "../../x", '
    '"standing": "known", "first_seen": ""}]}',
    "no version": '{"distribution": "transformer-engine", "releases": [{"version": "2x!", "standing": "known", '
    '"first_seen": ""}]}',
    "a release twice": '{"distribution": "transformer-engine", "releases": [{"version": "2.9.0", "standing": "known", '
    '"first_seen": ""}, {"version": "2.9.0", "standing": "known", "first_seen": ""}]}',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_state_is_refused(text: str, state: Path) -> None:
    state.mkdir()
    (state / "state.json").write_text(text)
    with pytest.raises(StateDamaged, match="no state of the watch"):
        WatchFolder(state).read_state("transformer-engine")


def test_a_damaged_state_is_left_as_it_is(watch: Run, state: Path) -> None:
    state.mkdir()
    (state / "state.json").write_text(text := DAMAGED["cut short"])
    said = watch()
    assert said.code == INFRASTRUCTURE
    assert "no issue is opened twice" in said.err
    assert (state / "state.json").read_text() == text


def test_a_second_run_at_the_same_time_is_refused(watch: Run, state: Path) -> None:
    state.mkdir()
    with (state / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = watch()
    assert said.code == INFRASTRUCTURE
    assert "another run of the watch holds" in said.err


def test_a_state_that_cannot_be_written_is_told(watch: Run, state: Path) -> None:
    state.write_text("a file")
    assert watch().code == WRONG
    assert state.read_text() == "a file"
