"""Images in words: plans, builds, proofs, locks, fits, verdicts, bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from ...images.build import ImageBuild, ImagePlans
from ...images.bundle import BundleResult
from ...images.fits import FitResult, FitVerdict, StackFit
from ...images.lint import LintOutcome
from ...images.locking import LockResult, PackageLine
from ...images.pins import PinLine, PinNews
from ...images.plan import ImagePlan
from ...images.prove import ImageProof
from ...images.supply import KeysResult, SignResult
from ...images.verify import CheckOutcome, ImageVerdict
from ...text import count
from ..document import Block, Bullets, Details, Diagnostic, Document, Heading, Inline, Paragraph, Table
from ..marks import Mark, bad, good, missing, quiet, risk

_PINS: Final = {
    PinNews.SAME: good("verified"), PinNews.NEW: good("new, verified"), PinNews.ACCEPTED: risk("changed, accepted"),
    PinNews.CHANGED: bad("changed: refused"), PinNews.KEPT: quiet("kept"),
    PinNews.CLAIMED: missing("new, as others say"),
    PinNews.MISSING: bad("no digest"),
}  # fmt: skip
_FITS: Final = {
    FitVerdict.REFUSED: bad("does not fit"), FitVerdict.UNKNOWN: missing("unknown"),
    FitVerdict.WARNED: risk("fits with less"), FitVerdict.FITS: good("fits"),
}  # fmt: skip
_CHECKS: Final = {CheckOutcome.FAIL: bad("fails"), CheckOutcome.NOT_RUN: missing(), CheckOutcome.PASS: good("passes")}
_LINTS: Final = {LintOutcome.FAULTS: bad("faults"), LintOutcome.NOT_RUN: missing(), LintOutcome.CLEAN: good("clean")}
_KINDS: Final = {
    "image": "image, an OCI archive", "wheel": "wheelhouse", "jit": "JIT caches",
    "signature": "signatures of the image",
    "sbom": "SBOM, SPDX", "provenance": "provenance, SLSA", "key": "public key", "restore": "restore command",
    "words": "how to restore",
}  # fmt: skip


def _join_same(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Names and a reason; a reason that holds for several names is there once."""
    found: dict[str, list[str]] = {}
    for name, why in rows:
        found.setdefault(why, []).append(name)
    for why, names in found.items():
        yield ", ".join(dict.fromkeys(names)), why


def describe_plans(plans: ImagePlans) -> Document:
    """What would be built for each target, what is refused, and what linters say of the recipe."""
    faults = sum(len(lint.faults) for lint in plans.lints if lint.outcome is LintOutcome.FAULTS)
    words = [f"{count(plans.plans, 'image')} can be built"]
    words += [f"{len({row.target for row in plans.refused})} cannot"] if plans.refused else []
    words.append(f"the recipe has {count(faults, 'fault')}" if faults else "no linter that ran finds a fault")
    blocks: list[Block] = [_table_of_plan(plan) for plan in plans.plans]
    unverified = (
        (plan.target, plan.unverified.removeprefix("not verified: ")) for plan in plans.plans if not plan.verified
    )
    rows = [
        *((risk("not verified"), names, f"the base: {why}") for names, why in _join_same(unverified)),
        *((bad("refused"), names, why) for names, why in _join_same((row.target, row.why) for row in plans.refused)),
        *((risk("with less"), names, why) for names, why in _join_same((row.target, row.why) for row in plans.warned)),
    ]  # fmt: skip
    cases = [Diagnostic(name=names, mark=mark, group="images", message=why) for mark, names, why in rows]
    for outcome in LintOutcome:
        lints = [lint for lint in plans.lints if lint.outcome is outcome]
        said = ((f"{lint.linter} of {lint.subject}", "; ".join(lint.faults) or "clean") for lint in lints)
        cases += [
            Diagnostic(name=names, mark=_LINTS[outcome], group="recipe", message=why) for names, why in _join_same(said)
        ]
    return Document("Images", f"{'; '.join(words)}.", _mark_exit(plans.exit), (*blocks, *cases))


def _mark_exit(code: int) -> Mark:
    return {0: good("open"), 1: bad("closed"), 4: missing("incomplete")}.get(code, bad("incomplete"))


def _table_of_plan(plan: ImagePlan) -> Table:
    rows: list[tuple[Inline, ...]] = [("base", f"`{plan.reference}`")]
    rows += [("pulled", f"`{plan.pulled}`")] if plan.pulled != plan.reference else []
    rows += [("digest", f"verified on {plan.verified}")] if plan.verified else []
    rows += [("lock", f"`{plan.lock}` (SHA-256 {plan.lock_hash[:12]})"), ("steps", ", ".join(plan.steps))]
    for source in plan.sources:
        name = source.upper().replace("-", "_")
        commit, repository = (plan.arguments.get(f"{name}_{key}", "") for key in ("COMMIT", "REPOSITORY"))
        rows.append(("source", f"{source} at `{commit[:12]}` of {repository}"))
    return Table((plan.target, f"{plan.platform}, {plan.cache_arch}"), tuple(rows))


def describe_build(build: ImageBuild) -> Document:
    """What is known of an image that was built."""
    where = "pushed; whoever reaches its registry pulls it by its digest" if build.pushed else "in this host's engine"
    slow = sorted((step for step in build.steps if step.seconds >= 1), key=lambda step: -step.seconds)
    verified = f"verified on {build.base_verified}" if build.base_verified else "no registry has confirmed its digest"
    rows: list[tuple[Inline, ...]] = [
        ("image", f"`{build.name}`"),
        ("digest", f"`{build.reference}`"),
        ("base", f"`{build.base}`, {verified}"),
        ("lock", f"`{build.lock}` (SHA-256 {build.lock_hash[:12]})"),
        ("commit", build.revision or "unknown"),
        ("engine", f"Docker Engine {build.engine}, buildx {build.buildx}, {build.platform}"),
        ("time", ", ".join([f"{build.seconds:.1f} s", *(f"{step.name} {step.seconds:.1f}" for step in slow)])),
    ]
    table = Table(("what", "value"), tuple(rows))
    return Document(f"Image for {build.target}", f"The image for {build.target} is {where}.", good("built"), (table,))


def describe_proof(proof: ImageProof) -> Document:
    """What was done with an image, and whether it holds."""
    failed = sum(not one.holds for one in proof.proofs)
    cases = tuple(
        Diagnostic(
            name=one.deed, mark=good("holds") if one.holds else bad("does not hold"), group="proof", message=one.seen,
            seconds=one.seconds,
        )
        for one in proof.proofs
    )  # fmt: skip
    answer = f"{failed} of {count(proof.proofs, 'proof')} do not hold." if failed else "Every proof holds."
    return Document("Proof of an image", answer, _mark_exit(proof.exit), (*describe_build(proof.build).blocks, *cases))


def describe_lock(result: LockResult) -> Document:
    """What became of every pin and lock, and the packages that changed."""
    rows: list[tuple[Inline, ...]] = [(_PINS[pin.news], pin.reference, _explain_pin(pin)) for pin in result.pins]
    blocks: list[Block] = []
    for lock in result.locks:
        changes = Counter(_name_change(package) for package in lock.packages)
        words = [count(lock.count, "package"), *(f"{number} {kind}" for kind, number in sorted(changes.items()))]
        said = ", ".join(words) + (f"; {lock.stale}" if lock.stale else "")
        rows.append((risk("to be written") if lock.stale else good("as it should be"), lock.file, said))
        if lock.packages:
            blocks += [Heading(lock.file), Bullets(tuple(_render_package(package) for package in lock.packages))]
    table = Table(("state", "what", "how"), tuple(rows))
    fits = [block for stack in result.fits for block in _describe_stack(stack, shown=(FitVerdict.REFUSED,))]
    refusals = [Diagnostic(name="refusal", mark=bad("refused"), group="lock", message=why) for why in result.refusals]
    return Document(
        "Pins and locks", _summarize_lock(result), _mark_exit(result.exit), (table, *blocks, *fits, *refusals)
    )


def _summarize_lock(result: LockResult) -> str:
    absent = [line.base for line in result.pins if line.news is PinNews.MISSING]
    unverified = [line.base for line in result.pins if not line.verified]
    tail = f" No registry has confirmed the digest of {', '.join(unverified)} yet." if unverified else ""
    if result.refusals:
        return f"Nothing was written: {count(result.refusals, 'refusal')}."
    if result.check:
        stale = [line.file for line in result.locks if line.stale] + [f"the pin of {name}" for name in absent]
        if stale:
            return f"Older than the matrix: {', '.join(stale)}.{tail} Next step: `nox -s lock`."
        return f"Pins and locks are what the matrix says.{tail}"
    if absent:
        tail = (
            f" There is no digest of {', '.join(absent)}: no registry answered, and the matrix claims none. Next step: "
            "run it where one answers, or name a mirror (MEGACPP_REGISTRY_MIRROR)."
        )
    return (f"Written: {', '.join(result.written)}." if result.written else "Nothing to write.") + tail


def _explain_pin(line: PinLine) -> str:
    how = f"{line.how} on {line.verified}" if line.verified else line.how
    how += f". This time: {line.silence}" if line.silence else ""
    changed = line.news is PinNews.CHANGED or (line.before and line.before != line.after)
    return f"{f'{line.before or None} became ' if changed else ''}{line.after or 'none'}; {how}"


def _name_change(line: PackageLine) -> str:
    return "added" if not line.before else "removed" if not line.after else "other files" if line.files else "changed"


def _render_package(line: PackageLine) -> str:
    versions = " -> ".join(dict.fromkeys(filter(None, (line.before, line.after))))
    return f"{line.name} {versions} ({_name_change(line)})"


def describe_fits(result: FitResult) -> Document:
    """Whether stacks fit: every need that is not met or unknown; the others are folded."""
    blocks = tuple(
        block
        for stack in result.stacks
        for block in _describe_stack(stack, shown=(FitVerdict.REFUSED, FitVerdict.UNKNOWN))
    )
    refused = [stack.name for stack in result.stacks if stack.refused]
    answer = f"{', '.join(refused)}: does not fit." if refused else "Nothing is refused."
    return Document("Whether stacks fit", answer, _mark_exit(result.exit), blocks)


def _describe_stack(stack: StackFit, shown: tuple[FitVerdict, ...]) -> Iterator[Block]:
    counts = Counter(fit.verdict for fit in stack.fits)
    numbers = ", ".join(f"{counts[one]} {_FITS[one].word}" for one in FitVerdict if counts[one])
    answer = "does not fit" if stack.refused else "is not refused" if counts[FitVerdict.UNKNOWN] else "fits"
    if not stack.te:
        yield Paragraph(f"{stack.name}: no Transformer Engine in it, and nothing to fit.", good("fits"))
        return
    worst = stack.fits[0].verdict if stack.fits else FitVerdict.FITS
    yield Paragraph(
        f"{stack.name}: Transformer Engine {stack.te} {answer}: {numbers or 'no row knows it'}.", _FITS[worst]
    )
    cases = [
        Diagnostic(
            name=fit.component, mark=_FITS[fit.verdict], group=stack.name, code=fit.need, help=fit.next_step,
            message=f"{fit.seen}, wanted {fit.wanted}: {fit.says}",
            fields=(*((("breaks", ", ".join(fit.breaks)),) if fit.breaks else ()), ("source", fit.source)),
        )
        for fit in stack.fits
    ]  # fmt: skip
    told = [case for case, fit in zip(cases, stack.fits, strict=True) if fit.verdict in shown]
    yield from told
    if rest := [case for case in cases if case not in told]:
        yield Details(f"{stack.name}: {count(rest, 'other need')}", tuple(rest))


def describe_verdict(verdict: ImageVerdict) -> Document:
    """Every check of an image, and what to do where one does not pass."""
    named = {one: [check.name for check in verdict.checks if check.outcome is one] for one in CheckOutcome}
    words = [f"{count(named[CheckOutcome.PASS], 'check')} of {len(verdict.checks)} pass"]
    words += [f"failed: {', '.join(named[CheckOutcome.FAIL])}"] if named[CheckOutcome.FAIL] else []
    words += [f"not run: {', '.join(named[CheckOutcome.NOT_RUN])}"] if named[CheckOutcome.NOT_RUN] else []
    blocks: list[Block] = [
        Diagnostic(name=one.name, mark=_CHECKS[one.outcome], group="image", message=one.says, help=one.next_step)
        for one in verdict.checks
    ]
    if verdict.packages:
        kinds = ", ".join(f"{number} {kind}" for kind, number in verdict.packages.items())
        blocks.append(Paragraph(f"Inside: {kinds}."))
    if verdict.unknown_licences:
        names = Paragraph(", ".join(verdict.unknown_licences))
        blocks.append(Details(f"{count(verdict.unknown_licences, 'unknown licence')}", (names,)))
    return Document(verdict.image, f"{'; '.join(words)}.", _mark_exit(verdict.exit), tuple(blocks))


def describe_bundle(result: BundleResult) -> Document:
    """What is in a bundle, what is not, and its id."""
    rows: list[tuple[Inline, ...]] = []
    for row in result.kinds:
        parts = f" in {count(row.parts, 'part')}" if row.parts else ""
        rows.append((_KINDS.get(row.kind, row.kind), f"{count(row.files, 'file')}{parts}", _render_size(row.bytes)))
    absent = [f"no {what}: {why}" for what, why in result.absent.items()]
    if result.wheels_absent:
        absent.append(f"no wheel of {', '.join(result.wheels_absent)}: the image compiles them, and has them")
    whose = f"signed by {result.signed_by}" if result.signed_by else "not signed (--sign-key)"
    files = sum(row.files for row in result.kinds)
    answer = (
        f"{result.folder}: {count(files, 'file')}, {_render_size(result.bytes)}, {whose}; read back whole. Its id is "
        f"{result.id}: give it to whoever restores the bundle (`python3 restore.py --id`)."
    )
    table = Table(("what", "files", "size"), tuple(rows), numeric=frozenset({2}))
    return Document(
        f"Bundle of {result.target}", answer, good("written"), (table, *([Bullets(tuple(absent))] if absent else []))
    )


def _render_size(size: int) -> str:
    unit, factor = next((one for one in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)) if size >= one[1]), ("B", 1))
    return f"{size / factor:.{0 if factor == 1 else 1}f} {unit}"


def describe_keys(result: KeysResult) -> Document:
    """Which half of a pair of keys goes where."""
    answer = f"{result.private} signs: keep it. {result.public} verifies: give it away, by another way than the images."
    return Document("Keys", answer, good("made"))


def describe_signing(result: SignResult) -> Document:
    """What was attested of an image."""
    packages, licences = count(result.packages, "package"), count(result.licences, "package")
    answer = f"The SBOM lists {packages}; licences are listed of {licences}, and unknown of {result.unknown}."
    return Document(f"Signed: {result.image}", answer, good("signed"))
