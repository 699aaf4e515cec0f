"""What results of images say, in one snapshot each."""

from __future__ import annotations

from syrupy.assertion import SnapshotAssertion

from megacpp_validate.environments.fits import stack_of_words
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.images.build import ImageBuild, ImagePlans, Refused
from megacpp_validate.images.bundle import BundleResult
from megacpp_validate.images.locks import LockLine, LockResult, PinLine, PinNews
from megacpp_validate.images.plan import FitResult
from megacpp_validate.images.supply import ImageCheck, ImageVerdict
from megacpp_validate.report.describe import images as describe
from megacpp_validate.report.render.markdown import render_markdown
from tests.images.test_plan import ROWS, read_plans


def test_a_plan_says_a_thing_once(snapshot: SnapshotAssertion) -> None:
    why = Refused(target="h200", why="a reason that holds of two targets")
    plans = tuple(plan.model_copy(update={"lock_hash": "0" * 64}) for plan in read_plans())
    refused = (why, why.model_copy(update={"target": "b200"}))
    result = ImagePlans(tool="t", plans=plans, refused=refused, warned=())
    text = render_markdown(describe.describe_plans(result))
    assert text.count("a reason that holds") == 1
    assert text == snapshot


def test_the_others(snapshot: SnapshotAssertion) -> None:
    pin = PinLine(
        base="b", reference="r:1", before="", after="sha256:1", news=PinNews.VERIFIED, verified="2026-11-22", how="x"
    )
    line = LockLine(target="cpu", file="cpu.txt", stale="it was not there", count=2)
    lock = LockResult(tool="t", check=False, pins=(pin,), locks=(line,), written=("cpu.txt",))
    stacks = (ROWS.judge_stack(stack_of_words("2.14.1", ["cublas=13.1"], ROWS.needs)),)
    check = ImageCheck(name="signature", outcome=Outcome.FAIL, says="none", next_step="sign it")
    verdict = ImageVerdict(tool="t", image="r@sha256:1", target="cpu", key="", checks=(check,))
    bundle = BundleResult(
        tool="t", target="cpu", folder="out", id="1", image="", signed_by="", absent={"image": "none"},
        sizes={"image.tar": 2_500_000},
    )  # fmt: skip
    plan = read_plans("cpu")[0].model_copy(update={"lock_hash": "0" * 64})
    build = ImageBuild(
        tool="t", plan=plan, name="r:1", digest="sha256:1", pushed=True, engine="28", buildx="0.29", started="",
        seconds=1,
    )  # fmt: skip
    documents = (
        describe.describe_lock(lock), describe.describe_fits(FitResult(tool="t", stacks=stacks)),
        describe.describe_verdict(verdict), describe.describe_bundle(bundle), describe.describe_build(build),
    )  # fmt: skip
    assert "\n\n".join(map(render_markdown, documents)) == snapshot
