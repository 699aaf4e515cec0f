"""Images: plans, builds, locks, fits, verdicts, bundles."""

from __future__ import annotations

from collections.abc import Iterator

from ...environments.fits import FitVerdict, StackFit
from ...images.build import ImageBuild, ImagePlans
from ...images.bundle import BundleResult
from ...images.locks import LockResult, name_command
from ...images.plan import FitResult
from ...images.supply import ImageVerdict
from ...text import count
from ..document import Block, Bullets, Details, Diagnostic, Document, Paragraph, Table
from ..marks import Mark, bad, good, mark_exit, mark_of, risk
from .words import describe_fit, join_same, list_fields, sum_up, tabulate, tabulate_facts, tally

_BUILT = "name digest pushed engine buildx seconds"
_PLANNED = "reference pulled verified lock lock_hash steps sources"


def describe_plans(plans: ImagePlans) -> Document:
    """What would be built for each target, and what is refused."""
    tables = [
        tabulate_facts(list_fields(plan, _PLANNED), (plan.target, f"{plan.platform}, {plan.cache_arch}"))
        for plan in plans.plans
    ]
    why = "no registry has confirmed that the tag of its base has the digest"
    unverified = [(plan.target, why) for plan in plans.plans if not plan.verified]
    groups: list[tuple[Mark, list[tuple[str, str]]]] = [
        (risk("not verified"), unverified),
        (bad("refused"), [(row.target, row.why) for row in plans.refused]),
        (risk("unknown"), [(row.target, row.why) for row in plans.unknown]),
        (risk("with less"), [(row.target, row.why) for row in plans.warned]),
    ]
    cases = [Diagnostic(names, mark, "images", why) for mark, rows in groups for names, why in join_same(rows)]
    refused = len({row.target for row in plans.refused})
    summary = f"Images that can be built: {len(plans.plans)}; refused: {refused}."
    return Document("Images", summary, mark_exit(plans.exit), (*tables, *cases))


def describe_build(build: ImageBuild) -> Document:
    """An image that was built."""
    facts = tabulate_facts(list_fields(build, _BUILT) | list_fields(build.plan, _PLANNED))
    return Document(f"Image for {build.plan.target}", "The image is built.", good("built"), (facts,))


def describe_lock(result: LockResult) -> Document:
    """The state of every pin and lock, and the packages that changed."""
    stale = [lock for lock in result.locks if lock.stale and result.check]
    commands = " && ".join(dict.fromkeys(name_command(lock.file) for lock in stale))
    unknown = dict.fromkeys(one.name for one in result.fits if one.of(FitVerdict.UNKNOWN))
    blocks: list[Block] = [
        tabulate(result.pins, "news reference before after how verified"),
        tabulate(result.locks, "file count stale"),
    ]
    blocks += [part for one in result.fits if one.refused for part in _describe_stack(one, (FitVerdict.REFUSED,))]
    blocks += [Diagnostic("refusal", bad("refused"), "lock", why) for why in result.refusals]
    parts = {
        "Compared with the matrix": "all match" if result.check and not (stale or result.refusals) else "",
        "Nothing was written, refused": str(len(result.refusals) or ""),
        "Written": "" if result.check or result.refusals else ", ".join(result.written) or "nothing",
        **{f"{why[0].upper()}{why[1:]}": files for files, why in join_same((one.file, one.stale) for one in stale)},
        "Next step": f"`{commands}`; commit what it writes" if stale else "",
        "Not known to fit (next step: `./nox -s fits`)": ", ".join(unknown),
        "No registry has confirmed": ", ".join(pin.base for pin in result.pins if not pin.verified),
    }
    answers = [f"{label}: {text}." for label, text in parts.items() if text]
    return Document("Pins and locks", " ".join(answers), mark_exit(result.exit), tuple(blocks))


def describe_fits(result: FitResult) -> Document:
    """Whether stacks fit: every need that is not met or unknown; the others are folded."""
    shown = (FitVerdict.REFUSED, FitVerdict.UNKNOWN)
    blocks = tuple(block for stack in result.stacks for block in _describe_stack(stack, shown))
    worst = {verdict: ", ".join(one.name for one in result.stacks if one.of(verdict)) or "none" for verdict in shown}
    summary = f"Stacks that do not fit: {worst[FitVerdict.REFUSED]}; with unknown needs: {worst[FitVerdict.UNKNOWN]}."
    return Document("Whether stacks fit", summary, mark_exit(result.exit), blocks)


def _describe_stack(stack: StackFit, shown: tuple[FitVerdict, ...]) -> Iterator[Block]:
    numbers = tally(mark_of(fit.verdict).word for fit in stack.fits) or "no row of the matrix applies"
    worst = stack.fits[0].verdict if stack.fits else FitVerdict.FITS
    answer = {FitVerdict.REFUSED: "does not fit", FitVerdict.UNKNOWN: "is not known to fit"}.get(worst, "fits")
    yield Paragraph(f"{stack.name}: Transformer Engine {stack.te or '(absent)'} {answer}: {numbers}.", mark_of(worst))
    yield from (describe_fit(fit, stack.name) for fit in stack.fits if fit.verdict in shown)
    folded = [describe_fit(fit, stack.name) for fit in stack.fits if fit.verdict not in shown]
    yield Details(f"{stack.name}: {count(folded, 'other need')}", tuple(folded))


def describe_verdict(verdict: ImageVerdict) -> Document:
    """Every check of an image, and what to do where one does not pass."""
    checks = tuple(
        Diagnostic(one.name, mark_of(one.outcome), "image", one.says, help=one.next_step) for one in verdict.checks
    )
    return Document(verdict.image, f"Checks: {sum_up(checks)}.", mark_exit(verdict.exit), checks)


def describe_bundle(result: BundleResult) -> Document:
    """What is in a bundle, what is not, and its id."""
    rows = tuple((name, f"{size / 1e6:,.1f}") for name, size in result.sizes.items())
    size = sum(result.sizes.values()) / 1e6
    signed = f"signed by {result.signed_by}" if result.signed_by else "not signed (--sign-key signs it)"
    answer = (
        f"{result.folder}: {size:,.1f} MB, {signed}. Its id is {result.id}: give it to whoever restores the "
        "bundle (`python3 restore.py --id`)."
    )
    lacking = Bullets(tuple(f"not inside: {names}: {why}" for names, why in join_same(result.absent.items())))
    table = Table(("what", "MB"), rows, numeric=frozenset({1}))
    return Document(f"Bundle of {result.target}", answer, good("written"), (table, lacking))
