"""Is an image what it says: by its digest against what is planned, who signed it, and what it was built from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from ..errors import Exit, exit_for
from ..evidence.strict_json import read_json
from ..evidence.values import Frozen
from .build import ImageRows
from .plan import ImagePlan, find_images, plan_images
from .supply import (
    LICENCES,
    SPDX,
    UNKNOWN,
    Licensed,
    Package,
    Statement,
    canonical,
    compare_sbom,
    find_signature,
    read_licences,
    read_public_key,
    read_sbom,
    read_statement,
    read_statements,
)
from .tools import (
    BASE_LABEL,
    LOCK_LABEL,
    PINS_LABEL,
    TARGET_LABEL,
    ImageRefused,
    ImageTree,
    Registry,
    RegistryLies,
    call,
    find_program,
    read_tree,
    split_reference,
)

_REBUILD: Final = "build it with `nox -s images`, push it, and verify the digest that the push printed"
_SIGN: Final = "`nox -s image_sign -- IMAGE --key cosign.key` signs it, and attests what is inside"
_KEY: Final = "name the public key with --key"
_SLSA: Final = "https://slsa.dev/provenance/"


class CheckOutcome(StrEnum):
    """How a check of an image went; worst first."""

    FAIL = "fail"
    NOT_RUN = "not-run"  # never a pass
    PASS = "pass"  # noqa: S105


class ImageCheck(Frozen):
    """One check ("digest", "layers", "signature", ...); `next_step` is empty where it passed."""

    name: str
    outcome: CheckOutcome
    says: str
    next_step: str = ""


class ImageVerdict(Frozen):
    """An image, verified.

    Attributes:
        target: what its label says it is for.
        key: file of the key that should have signed it; empty where none was given.
        checks: in the order in which they depend on each other.
        packages: how many it holds, by kind.
    """

    schema_id: Literal["megacpp-validate/image-verify/1"] = "megacpp-validate/image-verify/1"
    tool: str
    image: str
    target: str
    key: str
    checks: tuple[ImageCheck, ...]
    packages: dict[str, int]
    unknown_licences: tuple[str, ...]
    seconds: float

    @property
    def exit(self) -> Exit:
        """Closed where a check fails, incomplete where one was not run."""
        outcomes = {check.outcome for check in self.checks}
        return exit_for(breaks=CheckOutcome.FAIL in outcomes, lacks=CheckOutcome.NOT_RUN in outcomes)


@dataclass(frozen=True)
class VerifyOptions:
    """Arguments of the verb; what is empty was not given."""

    image: str
    key: Path | None = None
    target: str = ""
    base: str = ""
    deep: bool = False


@dataclass(frozen=True)
class _Expected:
    """What an image is compared with: a plan or why there is none, and digests of its base."""

    plan: ImagePlan | None = None
    why_no_plan: str = ""
    base_digests: frozenset[str] = frozenset()


def _pass(name: str, says: str) -> ImageCheck:
    return ImageCheck(name=name, outcome=CheckOutcome.PASS, says=says)


def _fail(name: str, says: str, step: str) -> ImageCheck:
    return ImageCheck(name=name, outcome=CheckOutcome.FAIL, says=says, next_step=step)


def _not_run(name: str, says: str, step: str) -> ImageCheck:
    return ImageCheck(name=name, outcome=CheckOutcome.NOT_RUN, says=says, next_step=step)


def verify_image(rows: ImageRows, options: VerifyOptions) -> ImageVerdict:
    """Every check of an image.

    Raises:
        RegistryUnreachable: the registry does not answer.
        ImageRefused: an argument is wrong.
        NoEnvironment: oras or openssl is missing.
    """
    started = time.monotonic()
    repository, digest = split_reference(options.image)
    if options.target:
        find_images(rows.images, [options.target])
    if options.key:
        read_public_key(options.key, rows.variables)
    registry, labels, listed = Registry.open(repository, rows.variables), dict[str, str](), tuple[Licensed, ...]()
    try:
        tree = read_tree(registry, digest)
        labels = tree.labels
        expected = _expect(rows, options, labels.get(TARGET_LABEL, ""))
        checks = [_pass("digest", f"{digest} is the hash of its manifest; {len(tree.blobs)} blobs follow")]
        checks.append(_check_layers(registry, tree, deep=options.deep))
        checks += _check_labels(tree, expected)
        checks.append(_check_signature(registry, digest, options.key))
        more, listed = _check_contents(registry, tree, expected, options.key)
        checks += more
    except (RegistryLies, ImageRefused) as fault:
        checks = [_fail("digest", str(fault), _REBUILD)]
    unknown = (f"{row.kind} {row.name}" for row in listed if row.licences == (UNKNOWN,))
    return ImageVerdict(
        tool=rows.tool,
        image=f"{repository}@{digest}",
        target=labels.get(TARGET_LABEL, ""),
        key=str(options.key or ""),
        checks=tuple(checks),
        packages=dict(sorted(Counter(row.kind for row in listed).items())),
        unknown_licences=tuple(dict.fromkeys(unknown)),
        seconds=round(time.monotonic() - started, 2),
    )


def _expect(rows: ImageRows, options: VerifyOptions, labelled: str) -> _Expected:
    """What an image of this target is compared with; where no plan can be made, checks are not run."""
    target = options.target or labelled
    if not target:
        return _Expected(why_no_plan="no label says its target, and none was named (--target)")
    try:
        image = find_images(rows.images, [target])[0]
        chosen = [row for row in rows.catalog.targets if row.id == target]
        plan = plan_images(rows.images, rows.pins, chosen, root=rows.root, own_base=options.base)[0]
    except ImageRefused as fault:
        return _Expected(why_no_plan=str(fault))
    pin = None if options.base else rows.pins.find(image.base)
    digests = {
        plan.reference.partition("@")[2],
        *((pin.index_digest, pin.platform_digests.get(plan.platform, "")) if pin else ()),
    }
    return _Expected(plan, "", frozenset(filter(None, digests)))


def _check_layers(registry: Registry, tree: ImageTree, *, deep: bool) -> ImageCheck:
    """Every blob is there in its size; with `deep` its bytes are those of its digest."""

    def check(blob: tuple[str, int]) -> str:
        digest, size = blob
        try:
            if deep:
                registry.hash_blob(digest)
                return ""
        except RegistryLies as fault:
            return f"{digest} has other bytes: {fault}"
        found = registry.find_size(digest)
        return (
            f"{digest} is not there"
            if found is None
            else ""
            if found == size
            else f"{digest} has {found} bytes of {size}"
        )

    with ThreadPoolExecutor(8) as pool:
        wrong = [why for why in pool.map(check, tree.blobs.items()) if why]
    if wrong:
        return _fail("layers", "; ".join(wrong), "push the image again; the registry lost or damaged a part of it")
    how = "read and hashed" if deep else "there, in its size (--deep reads and hashes them)"
    return _pass("layers", f"each of {len(tree.blobs)} blobs, {sum(tree.blobs.values()) / 1e6:.1f} MB, is {how}")


def _check_labels(tree: ImageTree, expected: _Expected) -> Iterator[ImageCheck]:
    plan, labels = expected.plan, tree.labels
    rows = (("target", TARGET_LABEL), ("lock", LOCK_LABEL), ("pins", PINS_LABEL), ("base", BASE_LABEL))
    for name, label in rows:
        if plan is None:
            why = f"there is no plan to compare it with: {expected.why_no_plan}"
            yield _not_run(f"label {name}", why, "mend what that says")
        elif labels.get(label, "") != plan.labels[label]:
            why = f"{label} is {labels.get(label) or 'nothing'}, and the plan says {plan.labels[label] or 'nothing'}"
            yield _fail(f"label {name}", why, _REBUILD)
        else:
            yield _pass(f"label {name}", f"{label} is {plan.labels[label]}, as planned")
    if plan is not None:
        found = {f"{config.get('os')}/{config.get('architecture')}" for config in tree.configs.values()}
        why = f"it is for {', '.join(sorted(found))}, and the plan says {plan.platform}"
        yield (
            _pass("platform", f"it is for {plan.platform}")
            if plan.platform in found
            else _fail("platform", why, _REBUILD)
        )


def _check_signature(registry: Registry, digest: str, key: Path | None) -> ImageCheck:
    if not key:
        return _not_run("signature", "no key was given, so its signer is unknown", _KEY)
    try:
        why = find_signature(registry, digest, key)
    except RegistryLies as fault:
        return _fail("signature", str(fault), _SIGN)
    if not why:
        return _pass("signature", f"by {key}, over this digest")
    if cosign := find_program("cosign", registry.variables):  # cosign 3 has a newer form, which openssl cannot read
        plain = ["--allow-http-registry", "--allow-insecure-registry"] if registry.plain else []
        words = [cosign, "verify", "--key", str(key), "--insecure-ignore-tlog=true", *plain]
        if not call([*words, f"{registry.repository}@{digest}"], registry.variables).code:
            return _pass("signature", f"by {key}, as cosign says; it is in another form than this tool reads ({why})")
    return _fail("signature", why, _SIGN)


def _check_contents(
    registry: Registry, tree: ImageTree, expected: _Expected, key: Path | None
) -> tuple[list[ImageCheck], tuple[Licensed, ...]]:
    """SBOM, provenance, base and licences; and the packages with their licences."""
    checks, packages, listed = list[ImageCheck](), tuple[Package, ...](), tuple[Licensed, ...]()
    statements: tuple[Statement, ...] | None = None
    try:
        statements = read_statements(registry, tree.digest, key)
    except RegistryLies as fault:  # what cannot be read is not absent
        checks.append(_fail("attestations", str(fault), _SIGN))
    sbom = _find_statement("sbom", SPDX, tree.digest, statements, key)
    if isinstance(sbom, Statement):
        sbom, packages = _check_sbom(sbom, tree)
    checks += [sbom, *_check_provenance(registry, tree, expected)]
    licences = _find_statement("licences", LICENCES, tree.digest, statements, key)
    if isinstance(licences, Statement):
        licences, listed = _check_licences(licences, packages)
    return [*checks, licences], listed


def _find_statement(
    name: str, kind: str, digest: str, statements: tuple[Statement, ...] | None, key: Path | None
) -> Statement | ImageCheck:
    """What was attested of a kind last, of this digest and by this key; else the check that fails by it."""
    if statements is None:
        return _not_run(name, "the attestations cannot be read", "mend what the check before says")
    found = [one for one in statements if one.kind == kind]
    bound = [one for one in found if digest in one.subjects]
    if not found:
        return _fail(name, f"nothing of the kind {kind} was attested of this image", _SIGN)
    if not bound:
        about = ", ".join(subject for one in found for subject in one.subjects)
        return _fail(name, f"what was attested is about {about}, and not about this image", _SIGN)
    if not key:
        return _not_run(name, "it is there, and about this digest; no key was given, so its signer is unknown", _KEY)
    signed = [one for one in bound if one.signed]
    return signed[-1] if signed else _fail(name, f"it is not signed by {key}", _SIGN)


def _check_sbom(found: Statement, tree: ImageTree) -> tuple[ImageCheck, tuple[Package, ...]]:
    try:
        packages = read_sbom(found.predicate)
    except ImageRefused as fault:
        return _fail("sbom", str(fault), _SIGN), ()
    if why := compare_sbom(found.predicate, tree.names):
        return _fail("sbom", f"it was attested of this digest, and {why}", _SIGN), packages
    return _pass("sbom", f"SPDX, signed, about this digest: {len(packages)} packages"), packages


def read_provenance(registry: Registry, tree: ImageTree) -> dict[str, Statement]:
    """The SLSA provenance that buildx puts beside each image of an index: manifest -> statement.

    https://docs.docker.com/build/metadata/attestations/attestation-storage/

    Raises:
        RegistryUnreachable, RegistryLies: as `tools.Registry.read_blob`; or a statement cannot be read.
    """
    found = {}
    for about, manifest in tree.witnesses.items():
        try:
            for layer in manifest["layers"]:
                if "in-toto" in layer["mediaType"]:
                    statement = read_statement(read_json(registry.read_blob(layer["digest"])))
                    if statement.kind.startswith(_SLSA):
                        found[about] = statement
        except (KeyError, TypeError, AttributeError, ValueError) as fault:
            raise RegistryLies(
                f"the provenance of {about} cannot be read: {fault!r}. Likely cause: another builder made it. Next "
                "step: build the image anew with `nox -s images`."
            ) from fault
    return found


def _list_materials(predicate: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Images that were built on, digest and address; of SLSA 1 or of 0.2."""
    rows = predicate.get("buildDefinition", {}).get("resolvedDependencies", predicate.get("materials", ()))
    for row in rows:
        if str(row.get("uri", "")).startswith(("pkg:docker/", "pkg:oci/")):
            yield from ((f"{kind}:{value}", str(row["uri"])) for kind, value in row.get("digest", {}).items())


def _check_provenance(registry: Registry, tree: ImageTree, expected: _Expected) -> Iterator[ImageCheck]:
    step = "build it with `nox -s images`, which asks buildx for provenance, and push the index as it is"
    try:
        found = read_provenance(registry, tree)
        about = {one: row for one, row in found.items() if one in row.subjects and one in tree.configs}
        images = {digest: uri for row in about.values() for digest, uri in _list_materials(row.predicate)}
    except (RegistryLies, AttributeError, TypeError) as fault:
        yield _fail("provenance", str(fault), step)
        return
    if not found:
        yield _fail("provenance", "there is none beside the image", step)
    elif set(about) != set(tree.configs):
        yield _fail("provenance", "it is about other images than those of this index", step)
    else:
        kinds = ", ".join(sorted({row.kind.removeprefix("https://") for row in about.values()}))
        yield _pass("provenance", f"{kinds}, about each image of this index")
    if expected.plan is None:
        why = f"there is no plan to compare it with: {expected.why_no_plan}"
        yield _not_run("base", why, "mend what that says")
    elif not images:
        yield _fail("base", "no provenance says what it was built on", step)
    elif expected.base_digests & images.keys():
        yield _pass("base", f"built on {', '.join(expected.base_digests & images.keys())}, as pinned")
    else:
        shown = ", ".join(f"{uri} ({digest})" for digest, uri in images.items())
        yield _fail("base", f"built on {shown}, and pinned is {expected.plan.reference}", _REBUILD)


def _check_licences(found: Statement, packages: tuple[Package, ...]) -> tuple[ImageCheck, tuple[Licensed, ...]]:
    try:
        listed = read_licences(found.predicate)
    except ValueError as fault:
        return _fail("licences", str(fault), _SIGN), ()
    known = {(row.kind, row.name) for row in listed}
    missing = sorted({one.name for one in packages if (one.kind, canonical(one.kind, one.name)) not in known})
    if missing:
        return _fail("licences", f"the SBOM has packages that are not listed: {', '.join(missing[:5])}", _SIGN), listed
    unknown = sum(row.licences == (UNKNOWN,) for row in listed)
    return _pass("licences", f"{len(listed)} packages listed; the licence of {unknown} is unknown"), listed
