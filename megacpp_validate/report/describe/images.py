"""Images in words: plans, builds, proofs, locks, fits, verdicts, bundles."""

from __future__ import annotations

from collections.abc import Iterator

from ...environments.fits import FitVerdict, StackFit
from ...images.build import ImageBuild, ImagePlans, ImageProof
from ...images.bundle import BundleResult
from ...images.locking import LockResult
from ...images.pins import PinNews
from ...images.plan import FitResult, ImagePlan
from ...images.supply import ImageVerdict, SignResult
from ...text import count
from ..document import Block, Bullets, Details, Diagnostic, Document, Paragraph, Table
from ..marks import Mark, bad, good, mark_exit, mark_of, risk
from .words import join_same, tabulate_facts, tally


def describe_plans(plans: ImagePlans) -> Document:
    """What would be built for each target, and what is refused."""
    tables = [_tabulate_plan(plan) for plan in plans.plans]
    groups: list[tuple[Mark, list[tuple[str, str]]]] = [
        (risk("not verified"), [(plan.target, plan.unverified) for plan in plans.plans if not plan.verified]),
        (bad("refused"), [(row.target, row.why) for row in plans.refused]),
        (risk("with less"), [(row.target, row.why) for row in plans.warned]),
    ]
    cases = [Diagnostic(names, mark, "images", why) for mark, rows in groups for names, why in join_same(rows)]
    refused = len({row.target for row in plans.refused})
    summary = f"Images that can be built: {len(plans.plans)}; refused: {refused}."
    return Document("Images", summary, mark_exit(plans.exit), (*tables, *cases))


def _tabulate_plan(plan: ImagePlan) -> Table:
    sources = []
    for source in plan.sources:
        name = source.upper().replace("-", "_")
        commit, repository = (plan.arguments.get(f"{name}_{key}", "") for key in ("COMMIT", "REPOSITORY"))
        sources.append(f"{source} at `{commit[:12]}` of {repository}")
    facts = {
        "base": f"`{plan.reference}`",
        "pulled": f"`{plan.pulled}`" if plan.pulled != plan.reference else "",
        "digest verified on": plan.verified,
        "lock": f"`{plan.lock}` (SHA-256 {plan.lock_hash[:12]})",
        "steps": ", ".join(plan.steps),
        "sources": tuple(sources),
    }
    return tabulate_facts(facts, (plan.target, f"{plan.platform}, {plan.cache_arch}"))


def describe_build(build: ImageBuild) -> Document:
    """An image that was built."""
    plan = build.plan
    facts = {
        "image": f"`{build.name}`",
        "digest": f"`{build.reference}`",
        "place": "its registry" if build.pushed else "the engine of this host",
        "base": f"`{plan.reference}`",
        "base verified on": plan.verified or "never: no registry has confirmed its digest",
        "lock": f"`{plan.lock}` (SHA-256 {plan.lock_hash[:12]})",
        "commit": plan.labels.get("org.opencontainers.image.revision") or "unknown",
        "engine": f"Docker Engine {build.engine}, buildx {build.buildx}, {plan.platform}",
        "time": f"{build.seconds:.1f} s",
    }
    title = f"Image for {plan.target}"
    return Document(title, "The image is built.", good("built"), (tabulate_facts(facts),))


def describe_proof(proof: ImageProof) -> Document:
    """What was done with an image, and whether it holds."""
    failed = sum(not one.holds for one in proof.proofs)
    cases = tuple(
        Diagnostic(
            one.deed, good("holds") if one.holds else bad("does not hold"), "proof", one.seen, seconds=one.seconds
        )
        for one in proof.proofs
    )
    answer = f"Proofs that do not hold: {failed} of {len(proof.proofs)}."
    return Document("Proof of an image", answer, mark_exit(proof.exit), (*describe_build(proof.build).blocks, *cases))


def describe_lock(result: LockResult) -> Document:
    """The state of every pin and lock, and the packages that changed."""
    rows = [
        (mark_of(pin.news), pin.reference, pin.before, pin.after or "none", _join(pin.how, pin.verified))
        for pin in result.pins
    ]
    rows += [
        (risk("to be written") if lock.stale else good("as it should be"), lock.file, "", count(lock.count, "package"),
         lock.stale)
        for lock in result.locks
    ]  # fmt: skip
    blocks: list[Block] = [Table(("state", "what", "before", "after", "how"), tuple(rows))]
    for stack in result.fits:
        blocks += _describe_stack(stack, (FitVerdict.REFUSED,))
    blocks += [Diagnostic("refusal", bad("refused"), "lock", why) for why in result.refusals]
    return Document("Pins and locks", _summarize_lock(result), mark_exit(result.exit), tuple(blocks))


def _join(*words: str) -> str:
    return "; ".join(filter(None, words))


def _summarize_lock(result: LockResult) -> str:
    if result.refusals:
        return f"Nothing was written: {count(result.refusals, 'refusal')}."
    absent = [pin.base for pin in result.pins if pin.news is PinNews.MISSING]
    stale = [lock.file for lock in result.locks if lock.stale] if result.check else []
    parts = [f"Older than the matrix: {', '.join(stale)}. Next step: `nox -s lock`"] if stale else []
    if absent:
        names = f"There is no digest of {', '.join(absent)}, because no registry answered"
        parts.append(f"{names}. Next step: run it where one answers, or name a mirror (MEGACPP_REGISTRY_MIRROR)")
    if unverified := [pin.base for pin in result.pins if not pin.verified]:
        parts.append(f"No registry has confirmed the digest of {', '.join(unverified)} yet")
    if not result.check:
        parts.insert(0, f"Written: {', '.join(result.written) or 'nothing'}")
    return f"{'. '.join(parts) or 'Pins and locks are what the matrix says'}."


def describe_fits(result: FitResult) -> Document:
    """Whether stacks fit: every need that is not met or unknown; the others are folded."""
    shown = (FitVerdict.REFUSED, FitVerdict.UNKNOWN)
    blocks = tuple(block for stack in result.stacks for block in _describe_stack(stack, shown))
    refused = [stack.name for stack in result.stacks if stack.refused]
    answer = f"Stacks that do not fit: {', '.join(refused) or 'none'}."
    return Document("Whether stacks fit", answer, mark_exit(result.exit), blocks)


def _describe_stack(stack: StackFit, shown: tuple[FitVerdict, ...]) -> Iterator[Block]:
    numbers = tally(mark_of(fit.verdict).word for fit in stack.fits) or "no row of the matrix applies"
    worst = mark_of(stack.fits[0].verdict if stack.fits else FitVerdict.FITS)
    answer = "does not fit" if stack.refused else "is not refused"
    yield Paragraph(f"{stack.name}: Transformer Engine {stack.te or '(absent)'} {answer}: {numbers}.", worst)
    cases = [
        Diagnostic(
            name=fit.component, mark=mark_of(fit.verdict), group=stack.name, code=fit.need, help=fit.next_step,
            message=f"{fit.seen}, wanted {fit.wanted}: {fit.says}",
            fields=(("breaks", ", ".join(fit.breaks)), ("source", fit.source)),
        )
        for fit in stack.fits
    ]  # fmt: skip
    yield from (case for case, fit in zip(cases, stack.fits, strict=True) if fit.verdict in shown)
    rest = tuple(case for case, fit in zip(cases, stack.fits, strict=True) if fit.verdict not in shown)
    yield Details(f"{stack.name}: {count(rest, 'other need')}", rest)


def describe_verdict(verdict: ImageVerdict) -> Document:
    """Every check of an image, and what to do where one does not pass."""
    checks = tuple(
        Diagnostic(one.name, mark_of(one.outcome), "image", one.says, help=one.next_step) for one in verdict.checks
    )
    packages = ", ".join(f"{number} {kind}" for kind, number in verdict.packages.items())
    blocks: tuple[Block, ...] = (
        *checks,
        Paragraph(f"Packages inside: {packages or 'unknown'}."),
        Details("Packages without a known licence", (Paragraph(", ".join(verdict.unknown_licences)),)),
    )
    summary = f"Checks: {tally(one.mark.word for one in checks)}."
    return Document(verdict.image, summary, mark_exit(verdict.exit), blocks)


def describe_bundle(result: BundleResult) -> Document:
    """What is in a bundle, what is not, and its id."""
    rows = tuple((name, f"{size / 1e6:,.1f}") for name, size in result.sizes.items())
    absent = {**result.absent, **dict.fromkeys(result.wheels_absent, "the image compiles and holds this wheel")}
    size = sum(result.sizes.values()) / 1e6
    signed = f"signed by {result.signed_by}" if result.signed_by else "not signed (--sign-key signs it)"
    answer = (
        f"{result.folder}: {size:,.1f} MB, {signed}. Its id is {result.id}: give it to whoever restores the "
        "bundle (`python3 restore.py --id`)."
    )
    lacking = Bullets(tuple(f"not inside: {names}: {why}" for names, why in join_same(absent.items())))
    table = Table(("what", "MB"), rows, numeric=frozenset({1}))
    return Document(f"Bundle of {result.target}", answer, good("written"), (table, lacking))


def describe_signing(result: SignResult) -> Document:
    """What was attested of an image."""
    answer = f"The SBOM lists {count(result.packages, 'package')}; {result.unknown} of them declare no licence."
    return Document(f"Signed: {result.image}", answer, good("signed"))
