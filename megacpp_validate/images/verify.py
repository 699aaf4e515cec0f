"""Is an image what it says: by its digest against what is planned, who signed it, and what it was built from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from ..evidence.json_text import read_json
from .bundle.archive import Blob, ImageTree, read_tree
from .contents import Contents, Place
from .labels import LOCK_LABEL, PINS_LABEL, TARGET_LABEL, labels_of, read_config
from .licences import Licensed, canonical, read_licences
from .plan_result import ImagePlan
from .provenance import Provenance, read_provenance
from .refusals import ImageRefused, RegistryLies
from .sbom import Package, compare_sbom, read_sbom
from .signature import LICENCES, SPDX, Statement, cosign_verifies, find_cosign, find_signature, read_statements
from .verify_result import CheckOutcome, ImageCheck

_BASE: Final = "org.opencontainers.image.base.digest"
_REBUILD: Final = "build it with `nox -s images`, push it, and verify the digest that the push says"
_SIGN: Final = "`nox -s image_sign -- IMAGE --key cosign.key` signs it, and attests what is inside"
_KEY: Final = "name the public key with --key"
_ASKED: Final = 8  # blobs at a time


@dataclass(frozen=True)
class Expected:
    """What an image is held against.

    Attributes:
        plan: of its target; None where there is none.
        why_no_plan: why not.
        base_digests: digests under which the pinned base is known: of its index, and of the platform's image.
        key: public key in PEM; empty for none.
        key_file: where that lies.
        deep: every layer is read and hashed, and not only asked for.
        locked: Python packages that it must have: name -> version.
    """

    plan: ImagePlan | None = None
    why_no_plan: str = ""
    base_digests: frozenset[str] = frozenset()
    key: str = ""
    key_file: Path = field(default_factory=Path)
    deep: bool = False
    locked: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Verified:
    """What was found.

    Attributes:
        checks: in order.
        target: label.
        licences: packages with theirs.
    """

    checks: list[ImageCheck] = field(default_factory=list)
    target: str = ""
    licences: tuple[Licensed, ...] = ()

    def count_packages(self) -> dict[str, int]:
        """How many packages there are, by kind."""
        return dict(sorted(Counter(row.kind for row in self.licences).items()))


PlanFor = Callable[[str], Expected]
"""What an image is held against, once its own label has said its target; an empty text where it has none."""


def verify_image(place: Place, contents: Contents, expect: PlanFor, variables: Mapping[str, str]) -> Verified:
    """Every check of an image.

    Args:
        place, contents: the image, and where it is read.
        expect: what it is held against.
        variables: environment variables, by which cosign is found.

    Raises:
        RegistryUnreachable: the registry does not answer.
        ImageRefused: what it is held against cannot be read.
    """
    done = Verified()
    try:
        tree = read_tree(contents, place.digest)
        configs = {digest: read_config(contents.small_blob(digest), digest) for digest in tree.images}
    except (RegistryLies, ValueError) as fault:
        done.checks.append(_fail("digest", str(fault), _REBUILD))
        return done
    labels = _read_labels(configs)
    done.target = labels.get(TARGET_LABEL, "")
    expected = expect(done.target)
    done.checks.append(_pass("digest", f"{place.digest} is the hash of its manifest; {len(tree.blobs)} blobs follow"))
    done.checks.append(_check_layers(contents, tree, deep=expected.deep))
    done.checks += _check_labels(labels, configs, expected)
    done.checks.append(_check_signature(place, contents, expected, variables))
    statements = _read_attested(contents, place.digest, expected, done)
    sbom, packages = _check_sbom(tree, statements, expected)
    done.checks.append(sbom)
    done.checks += _check_provenance(contents, tree, expected)
    done.checks.append(_check_licences(place.digest, statements, expected, packages, done))
    return done


def _pass(name: str, says: str) -> ImageCheck:
    return ImageCheck(name=name, outcome=CheckOutcome.PASS, says=says)


def _fail(name: str, says: str, step: str) -> ImageCheck:
    return ImageCheck(name=name, outcome=CheckOutcome.FAIL, says=says, next_step=step)


def _not_run(name: str, says: str, step: str) -> ImageCheck:
    return ImageCheck(name=name, outcome=CheckOutcome.NOT_RUN, says=says, next_step=step)


def _read_labels(configs: Mapping[str, Any]) -> dict[str, str]:
    """Of the images of all platforms those labels in which they agree."""
    found = [labels_of(config) for config in configs.values()]
    first = found[0] if found else {}
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in found)}


def _check_layers(contents: Contents, tree: ImageTree, *, deep: bool) -> ImageCheck:
    """Every blob is there in its size; its bytes are those of its digest where they are to be read."""

    def look(blob: Blob) -> str:
        if blob.body is not None:
            return ""
        size = contents.size_of(blob.digest)
        if size is None:
            return f"{blob.digest} is not there"
        if size not in (blob.size, -1):
            return f"{blob.digest} has {size} bytes of {blob.size}"
        if deep:
            digest = sha256()
            for data in contents.blob(blob.digest):
                digest.update(data)
            if f"sha256:{digest.hexdigest()}" != blob.digest:
                return f"{blob.digest} has other bytes: they hash to sha256:{digest.hexdigest()}"
        return ""

    with ThreadPoolExecutor(_ASKED) as pool:
        wrong = [said for said in pool.map(look, tree.blobs) if said]
    if wrong:
        return _fail("layers", "; ".join(wrong), "push the image again; the registry has lost or damaged a part of it")
    how = "read and hashed" if deep else "there, in its size (--deep reads and hashes them)"
    return _pass("layers", f"each of {len(tree.blobs)} blobs, {tree.size / 1e6:.1f} MB, is {how}")


def _check_labels(labels: Mapping[str, str], configs: Mapping[str, Any], expected: Expected) -> Iterator[ImageCheck]:
    names = {
        "label target": TARGET_LABEL, "label lock": LOCK_LABEL, "label pins": PINS_LABEL,
        "label base": _BASE,
    }  # fmt: skip
    plan = expected.plan
    for name, label in names.items():
        if plan is None:
            yield _not_run(name, f"there is no plan to hold it against: {expected.why_no_plan}", "mend what that says")
        elif labels.get(label, "") != plan.labels[label]:
            seen = labels.get(label) or "nothing"
            yield _fail(name, f"{label} is {seen}, and the plan says {plan.labels[label] or 'nothing'}", _REBUILD)
        else:
            yield _pass(name, f"{label} is {plan.labels[label]}, as planned")
    if plan is not None:
        found = {f"{config.get('os')}/{config.get('architecture')}" for config in configs.values()}
        yield (
            _pass("platform", f"it is for {plan.platform}")
            if plan.platform in found
            else _fail("platform", f"it is for {', '.join(sorted(found))}, and the plan says {plan.platform}", _REBUILD)
        )


def _check_signature(place: Place, contents: Contents, expected: Expected, variables: Mapping[str, str]) -> ImageCheck:
    """By this tool's own arithmetic, and by cosign where it is there: both must say the same."""
    if not expected.key:
        return _not_run("signature", "no key was given, so nobody knows whose image it is", _KEY)
    try:
        why = find_signature(contents, place.digest, expected.key)
    except RegistryLies as fault:
        return _fail("signature", str(fault), _SIGN)
    if not find_cosign(variables):
        if why:
            return _fail("signature", f"{why}; cosign is not there to be asked too", _SIGN)
        return _pass(
            "signature", f"by {expected.key_file}, over this digest; checked by this tool, cosign is not there"
        )
    said = cosign_verifies(contents.place(place.digest), expected.key_file, variables)
    if not why and not said:
        return _pass("signature", f"by {expected.key_file}, over this digest; cosign says the same")
    if why and not said:  # in a newer form of cosign's, which this tool does not read
        return _pass("signature", f"by {expected.key_file}, says cosign; this tool does not read its form ({why})")
    return _fail("signature", f"{why or 'this tool finds it good, and cosign does not'}. {said}", _SIGN)


def _read_attested(contents: Contents, digest: str, expected: Expected, done: Verified) -> tuple[Statement, ...] | None:
    """None where what is there cannot be read, which is not that nothing is there."""
    try:
        return read_statements(contents, digest, expected.key)
    except RegistryLies as fault:
        done.checks.append(_fail("attestations", str(fault), _SIGN))
        return None


def _find_statement(
    name: str, kind: str, digest: str, statements: tuple[Statement, ...] | None, expected: Expected
) -> Statement | ImageCheck:
    """What was attested of a kind last, of this digest and by this key; else the check that fails by it."""
    if statements is None:
        return _not_run(name, "the attestations cannot be read, so nobody knows", "mend what the check before says")
    found = [one for one in statements if one.kind == kind]
    if not found:
        return _fail(name, f"nothing of the kind {kind} was attested of this image", _SIGN)
    bound = [one for one in found if digest in one.subjects]
    if not bound:
        about = ", ".join(subject for one in found for subject in one.subjects)
        return _fail(name, f"what was attested is about {about}, and not about this image", _SIGN)
    if not expected.key:
        return _not_run(name, "it is there, and about this digest; no key was given, so nobody knows whose it is", _KEY)
    signed = [one for one in bound if one.signed]
    return signed[-1] if signed else _fail(name, f"it is not signed by {expected.key_file}", _SIGN)


def _check_sbom(
    tree: ImageTree, statements: tuple[Statement, ...] | None, expected: Expected
) -> tuple[ImageCheck, tuple[Package, ...]]:
    """The check, and the packages of the SBOM that was taken."""
    found = _find_statement("sbom", SPDX, tree.digest, statements, expected)
    if isinstance(found, ImageCheck):
        return found, ()
    try:
        packages = read_sbom(found.predicate)
    except ImageRefused as fault:
        return _fail("sbom", str(fault), _SIGN), ()
    if why := compare_sbom(found.predicate, packages, tree.names, expected.locked):
        return _fail("sbom", f"it was attested of this digest, and {why}", _SIGN), packages
    return _pass("sbom", f"SPDX, signed, about this digest: {len(packages)} packages"), packages


def _check_provenance(contents: Contents, tree: ImageTree, expected: Expected) -> Iterator[ImageCheck]:
    step = "build it with `nox -s images`, which asks buildx for provenance, and push the index as it is"
    try:
        found = read_provenance(contents, read_json(tree.find(tree.digest).body or b"{}"))
    except RegistryLies as fault:
        yield _fail("provenance", str(fault), step)
        return
    about: list[Provenance] = [
        row for row in found if row.subject in row.statement.subjects and row.subject in tree.runs
    ]
    if not found:
        yield _fail("provenance", "there is none beside the image", step)
    elif {one.subject for one in about} != tree.runs:
        yield _fail("provenance", "it is about other images than those of this index", step)
    else:
        kinds = ", ".join(sorted({one.statement.kind.removeprefix("https://") for one in about}))
        yield _pass("provenance", f"{kinds}, about each image of this index")
    images = {digest: uri for one in about for uri, digest in one.images.items()}
    if expected.plan is None:
        yield _not_run("base", f"there is no plan to hold it against: {expected.why_no_plan}", "mend what that says")
    elif not images:
        yield _fail("base", "no provenance says what it was built on", step)
    elif expected.base_digests & images.keys():
        yield _pass("base", f"built on {', '.join(expected.base_digests & images.keys())}, as pinned")
    else:
        seen = ", ".join(f"{uri} ({digest})" for digest, uri in images.items())
        yield _fail("base", f"built on {seen}, and pinned is {expected.plan.reference}", _REBUILD)


def _check_licences(
    digest: str,
    statements: tuple[Statement, ...] | None,
    expected: Expected,
    packages: tuple[Package, ...],
    done: Verified,
) -> ImageCheck:
    found = _find_statement("licences", LICENCES, digest, statements, expected)
    if isinstance(found, ImageCheck):
        return found
    try:
        done.licences = read_licences(found.predicate)
    except ValueError as fault:
        return _fail("licences", str(fault), _SIGN)
    known = {(row.kind, row.name) for row in done.licences}
    missing = sorted({one.name for one in packages if (one.kind, canonical(one.kind, one.name)) not in known})
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        return _fail("licences", f"the SBOM has packages that are not listed: {', '.join(missing[:5])}{more}", _SIGN)
    unknown = sum(not row.known for row in done.licences)
    return _pass("licences", f"{len(done.licences)} packages listed; of {unknown} nothing says the licence")
