"""Requirements that are new in a release: met, broken, or unknown, and the modules that an unmet one breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.canary.requirements import Requirements
from megacpp_validate.canary.static.findings import Impact, ModuleVerdict, ReleaseSource, StaticResult
from megacpp_validate.canary.static.release import Release
from megacpp_validate.canary.static.sweep import read_bridge, read_source, run_pair
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.environments.fits import FitVerdict
from megacpp_validate.errors import Exit, WrongArguments
from megacpp_validate.report.describe.static import describe_static
from megacpp_validate.report.marks import Tone
from tests.canary.static.small_sources import write_release

BROKEN, UNKNOWN, WARNED, MET = FitVerdict
H200 = "cublas=13.1,cudnn=9.14,torch=2.11"


@pytest.mark.parametrize(
    ("old", "new", "env", "found"),
    [
        ("2.12.0", "2.14.1", H200, {"cublas-grouped-layout": BROKEN}),
        ("2.12.0", "2.14.1", "cublas=13.2", {"cublas-grouped-layout": MET}),
        ("2.12.0", "2.14.1", "cublas=12.9,cuda=12.9", {}),  # the core library for CUDA 12 has no such symbol
        ("2.12.0", "2.14.1", "", {"cublas-grouped-layout": UNKNOWN}),
        ("2.12.0", "2.14.1", "torch=2.11", {"cublas-grouped-layout": UNKNOWN}),
        ("2.14.1", "2.17.1", H200, {"cudnn-reshape-mode": BROKEN, "fp8-state-pickle": WARNED}),
        ("2.14.1", "2.17.1", "26.07-py3", {"cudnn-reshape-mode": MET, "fp8-state-pickle": WARNED}),
        ("2.14.1", "2.16.1", H200, {"fp8-state-pickle": WARNED}),  # 2.14.1 has it, too
        ("2.17.1", "2.12.0", H200, {}),
        (
            "2.20.2", "2.14.1", "cublas=13.1,cudnn=9.2",
            {"cublas-grouped-layout": BROKEN, "cudnn-least-documented": BROKEN},
        ),
        ("2.20.2", "2.99.0", H200, {"release": UNKNOWN}),
        ("a-folder", "2.14.1", "cublas=13.2,cudnn=9.14,torch=2.11", {"cublas-grouped-layout": MET}),
    ],
)  # fmt: skip
def test_requirements_of_a_step(old: str, new: str, env: str, found: dict[str, FitVerdict], catalog: Catalog) -> None:
    fits = Requirements(catalog, [env] if env else []).find_new(old, new)
    assert {fit.need: fit.verdict for fit in fits}.items() >= found.items()
    if not old.startswith("a-"):
        assert {fit.need for fit in fits} == set(found)
    assert all("--env" in fit.next_step for fit in fits if fit.verdict is UNKNOWN and fit.need != "release")


def test_a_name_that_no_row_knows_is_refused(catalog: Catalog) -> None:
    with pytest.raises(WrongArguments, match=r"'cublass'.*Next step: write cublas"):
        Requirements(catalog, ["cublass=13.1"])


USER = """
import transformer_engine.pytorch as te
def build(size):
    return te.{name}(size)
"""


@pytest.fixture
def judge(catalog: Catalog, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Names that files of a project use, and an environment -> 2.14.1 to 2.17.1, of which the sources are alike."""
    write_release(
        tmp_path / "te", "class Linear:\n    def __init__(self, size): ...\nclass DotProductAttention(Linear): ...\n"
    )

    def run(names: dict[str, str], env: str) -> StaticResult:
        for file, name in names.items():
            (tmp_path / "user").mkdir(exist_ok=True)
            (tmp_path / "user" / file).write_text(USER.format(name=name))
        source = read_source([tmp_path / "user"]) if names else read_bridge(catalog)
        pair = (
            Release(ReleaseSource(version=one, wheel="", sha256=""), tmp_path / "te") for one in ("2.14.1", "2.17.1")
        )
        return run_pair(*pair, source, tool="t", requirements=Requirements(catalog, [env] if env else []))

    return run


@pytest.mark.parametrize(
    ("env", "verdict", "exits", "tone"),
    [
        ("cudnn=9.14", BROKEN, Exit.CLOSED, Tone.BAD),
        ("cudnn=9.22", MET, Exit.OPEN, Tone.GOOD),
        ("cublas=13.1", UNKNOWN, Exit.EVIDENCE_MISSING, Tone.MISSING),
        ("", UNKNOWN, Exit.OPEN, Tone.MISSING),  # nothing was named, so nothing is missing; the mark is not clean
    ],
)
def test_verdict_exit_and_mark(judge, env: str, verdict: FitVerdict, exits: Exit, tone: Tone) -> None:  # type: ignore[no-untyped-def]
    result = judge({"attn.py": "DotProductAttention", "mlp.py": "Linear"}, env)
    (fit,) = result.requirements_of(verdict)
    assert (fit.verdict, fit.breaks, result.exit) == (verdict, ("attn.py",), exits)
    rows = {row.module: row.verdict for row in result.modules}
    assert rows == {
        "attn.py": ModuleVerdict.BREAKS if verdict is BROKEN else ModuleVerdict.CLEAN,
        "mlp.py": ModuleVerdict.CLEAN,
    }
    page = describe_static(result)
    assert page.mark.tone is tone
    assert ("cudnn" in page.summary) == (verdict is not MET)
    (case,) = [case for case in page.judged() if case.code == "cudnn-reshape-mode"]
    assert str(case.place).rpartition("/")[2].startswith("attn.py:")


def test_the_bridge_breaks_at_the_first_module_and_the_others_with_it(judge) -> None:  # type: ignore[no-untyped-def]
    result = judge({}, "cudnn=9.14")
    rows = {row.module: (row.verdict, row.under) for row in result.modules}
    assert rows["attention"] == (ModuleVerdict.BREAKS, "")
    assert rows["native_block"] == (ModuleVerdict.CASCADE, "attention")
    assert rows["permute"][0] is ModuleVerdict.FAILS_BEFORE  # the small release has no permutation


@pytest.mark.parametrize(("env", "risks"), [("cudnn=9.23,nvidia-cudnn-frontend=1.30", 0), ("cublas=13.6", 1)])
def test_a_check_of_the_import_that_the_environment_meets_is_no_risk(
    env: str, risks: int, catalog: Catalog, tmp_path: Path
) -> None:
    code = "class Linear:\n    def __init__(self, size): ...\n"
    check = "cudnn_version = read_cudnn()\nif cudnn_version < (9, 12, 0):\n    raise RuntimeError('old cuDNN')\n"
    write_release(tmp_path / "2.17.1", code)
    write_release(tmp_path / "2.20.2", code + check)
    pair = (Release(ReleaseSource(version=one, wheel="", sha256=""), tmp_path / one) for one in ("2.17.1", "2.20.2"))
    (tmp_path / "user.py").write_text(USER.format(name="Linear"))
    needs = Requirements(catalog, [env])
    result = run_pair(*pair, read_source([tmp_path / "user.py"]), tool="t", requirements=needs)
    assert sum(finding.impact is Impact.RISK for finding in result.findings) == risks
