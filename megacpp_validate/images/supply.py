"""Signing an image and verifying it: keys and signatures by cosign, the SBOM by syft, provenance by buildx.

No transparency log: it is on the Internet, and would list every image. SBOM: SPDX 2.3
(https://spdx.github.io/spdx-spec/v2.3/).
"""

from __future__ import annotations

import base64
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

from packaging.utils import canonicalize_name

from ..errors import Exit, InfrastructureFailed, NoEnvironment, ToolError, exit_for
from ..evidence.strict_json import read_json
from ..evidence.values import Frozen
from ..process import Ended
from .locks import LockedPackage, read_image_lock
from .plan import ImagePlan, ImageRows, find_images
from .tools import (
    BASE_LABEL,
    LOCK_LABEL,
    PINS_LABEL,
    TARGET_LABEL,
    ImageRefused,
    PushedImage,
    RegistryLies,
    call,
    is_plain_http,
    locate_image,
    read_image,
    require_program,
)

PASSWORD: Final = "COSIGN_PASSWORD"  # noqa: S105  the name of a variable
_LONG_S: Final = 7200.0  # of an image of NVIDIA's cosign reads 12 GB, and syft 40 GB
_REBUILD: Final = "build it with `nox -s images`, push it, and verify the digest that the push printed"
_SIGN: Final = "`nox -s image_sign -- IMAGE --key cosign.key` attests the SBOM, and signs the image"


class SignResult(Frozen):
    """An image that was signed: how many packages its SBOM lists, and how many of them declare no licence."""

    schema_id: Literal["megacpp-validate/image-signed/2"] = "megacpp-validate/image-signed/2"
    image: str
    packages: int
    unknown: int

    @property
    def exit(self) -> Exit:
        """It is signed."""
        return Exit.OPEN


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
        target: what its label names.
        key: file of the key that should have signed it; empty where none was given.
        checks: in the order in which they depend on each other.
        packages: how many it holds, by kind.
        unknown_licences: packages that declare no licence.
    """

    schema_id: Literal["megacpp-validate/image-verify/2"] = "megacpp-validate/image-verify/2"
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
class Package:
    """A package as the package URL of an SBOM names it, and its declared licence; empty where there is none."""

    kind: str
    name: str
    version: str
    licence: str


def run_cosign(variables: Mapping[str, str], *words: str, image: str = "") -> Ended:
    """Run cosign without a transparency log; its exit code is for the caller.

    Args:
        words: a verb and its options.
        image: "REPOSITORY@DIGEST" that it is about; empty for none.

    Raises:
        NoEnvironment: cosign is missing.
        ImageRefused: there is no password for a private key, or a wrong one.
    """
    cosign, verb = require_program("cosign", variables), words[0]
    how = ["--insecure-ignore-tlog=true"] if verb.startswith("verify") else []
    if verb in ("sign", "attest", "sign-blob"):
        told = call([cosign, verb, "--help"], variables)
        newer = ["--use-signing-config=false", "--new-bundle-format=false"]  # of cosign 3
        how = ["--yes", "--tlog-upload=false", *(newer if newer[0][:20] in told.words + told.errors else [])]
    if verb in ("sign", "attest", "sign-blob", "public-key") and PASSWORD not in variables:
        raise ImageRefused(
            f"the variable {PASSWORD} is not set, and cosign would ask for it. Next step: set it to the password of "
            "the key; empty for a key without one."
        )
    plain = ["--allow-http-registry", "--allow-insecure-registry"] if image and is_plain_http(image, variables) else []
    more = [*words[1:], *([image] if image else [])]
    done = call([cosign, verb, *how, *plain, *more], variables, limit_s=_LONG_S)
    if done.code and "decryption failed" in done.errors:  # of cosign 2 and 3
        raise ImageRefused(
            f"the password in {PASSWORD} does not open the key. Likely cause: it is of another key. Next step: set it "
            "to the password that the key was made with."
        )
    return done


def _require_cosign(variables: Mapping[str, str], *words: str, image: str = "") -> str:
    """The same; what it prints. Raises NoEnvironment where it fails."""
    done = run_cosign(variables, *words, image=image)
    if done.code:
        raise NoEnvironment(
            f"`cosign {words[0]}` failed: {done.last_words}. Likely cause: a registry that cannot be written, or a "
            "cosign that this tool does not know (it knows 2 and 3). Next step: correct that and run it again."
        )
    return done.words


def check_private_key(key: Path, variables: Mapping[str, str], public: str = "") -> None:
    """Open a private key before anything that takes long.

    Args:
        public: text of the public key that must belong to it; empty for any.

    Raises:
        NoEnvironment: cosign is missing.
        ImageRefused: no private key, no password, a wrong one, or a key of another pair.
    """
    require_program("cosign", variables)
    if not key.is_file() or b"PRIVATE KEY-----" not in key.read_bytes():
        raise ImageRefused(
            f"{key} is not a private key. Likely cause: it is missing, the public one, or another file. Next step: "
            "name the cosign.key that `cosign generate-key-pair` made."
        )
    printed = _require_cosign(variables, "public-key", "--key", str(key))
    if public and printed.split() != public.split():
        raise ImageRefused(
            f"the public key does not belong to {key}. Likely cause: the two are of different pairs. Next step: name "
            "the cosign.pub and the cosign.key that `cosign generate-key-pair` made together."
        )


def read_public_key(path: Path) -> str:
    """The text of a public key in PEM.

    Raises:
        ImageRefused: it is none, or a private one.
    """
    text = read_text_file(path)
    if "BEGIN PUBLIC KEY" not in text or "PRIVATE" in text:
        raise ImageRefused(
            f"{path} is not a public key. Likely cause: it is another file, or the private key. Next step: name the "
            "cosign.pub that `cosign generate-key-pair` made."
        )
    return text


def read_text_file(file: Path) -> str:
    """The text of a file that the caller named; raises ImageRefused where it cannot be read."""
    try:
        return file.read_text("utf-8", "replace")
    except OSError as fault:
        raise ImageRefused(f"{file} cannot be read: {fault.strerror}. Next step: check the name.") from fault


def sign_file(path: Path, key: Path, variables: Mapping[str, str]) -> str:
    """A signature over a file, in base64; raises as `check_private_key`, or NoEnvironment."""
    return _require_cosign(variables, "sign-blob", "--key", str(key), str(path)).strip()


def sign_image(
    rows: ImageRows, image: str, key: Path, sbom: Path | None, target: str, say: Callable[[str], None]
) -> SignResult:
    """Attest the SBOM of an image, and sign it last: what is signed is whole.

    Args:
        sbom: in SPDX, in place of syft's.
        target: what the image is for; empty takes its label.

    Raises:
        ImageRefused: an argument is wrong, or the SBOM is not of what the lock of the target holds.
        NoEnvironment: cosign or syft is missing, or fails.
        RegistryLies, RegistryUnreachable: as `tools.read_image`.
    """
    variables = rows.variables
    shown = locate_image(image, variables)
    check_private_key(key, variables)  # a wrong argument is reported before minutes of work
    given = read_text_file(sbom) if sbom else ""
    if not given:
        require_program("syft", variables)
    target = target or read_image(shown, variables).labels.get(TARGET_LABEL, "")
    if not target:
        raise ImageRefused(f"{image} has no label with its target. Next step: name it with --target.")
    row = find_images(rows.images, [target])[0]
    say("listing what is inside")
    text = given or make_sbom(shown, row.platform, variables)
    packages = read_sbom(text)
    if why := compare_with_lock(packages, read_image_lock(rows.root / row.lock).packages):
        raise ImageRefused(
            f"{sbom or 'the SBOM'} is not of an image for {target}: {why}. Likely cause: the SBOM or the image is of "
            "another lock. Next step: leave --sbom out, and syft makes one; or build the image again."
        )
    with tempfile.TemporaryDirectory(prefix="megacpp-sign-") as room:
        file = Path(room, "sbom.json")
        file.write_text(text, encoding="utf-8")
        words = ("attest", "--key", str(key), "--type", "spdxjson", "--predicate", str(file))
        _require_cosign(variables, *words, image=shown)
    _require_cosign(variables, "sign", "--key", str(key), image=shown)
    return SignResult(image=image, packages=len(packages), unknown=sum(not one.licence for one in packages))


def make_sbom(shown: str, platform: str, variables: Mapping[str, str]) -> str:
    """The SBOM of "REPOSITORY@DIGEST", by syft, in SPDX.

    Raises:
        NoEnvironment: syft is missing, or fails.
    """
    syft = require_program("syft", variables)
    settings = {**variables, "SYFT_CHECK_FOR_APP_UPDATE": "false"}
    if is_plain_http(shown, variables):
        settings["SYFT_REGISTRY_INSECURE_USE_HTTP"] = "true"
    words = [syft, "scan", "--quiet", "--platform", platform, f"registry:{shown}", "--output", "spdx-json"]
    done = call(words, settings, limit_s=_LONG_S)
    if done.code:
        raise NoEnvironment(
            f"syft failed: {done.last_words}. Likely cause: the registry is not reached, or the disk for temporary "
            "files is full. Next step: correct that and run it again."
        )
    return done.words


def read_sbom(body: Any) -> tuple[Package, ...]:
    """The packages of an SBOM: its text, or its JSON.

    Raises:
        ImageRefused: it is no SPDX, or names no package.
    """
    found = []
    try:
        body = read_json(body) if isinstance(body, str) else body
        for row in body["packages"]:
            links = [one["referenceLocator"] for one in row.get("externalRefs", ()) if one["referenceType"] == "purl"]
            kind, _, rest = links[0].removeprefix("pkg:").partition("?")[0].partition("/") if links else ("oci", "", "")
            if kind != "oci":  # the image itself, which is no package in it
                name, _, version = rest.rpartition("@") if "@" in rest else (rest, "", "")
                licence = str(row.get("licenseDeclared", "")).removeprefix("NOASSERTION").removeprefix("NONE")
                found.append(Package(kind, unquote(name.rpartition("/")[2]), unquote(version), licence))
        if not found or not str(body["spdxVersion"]).startswith("SPDX-2."):
            raise ValueError(f"{body['spdxVersion']} with {len(found)} packages")
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise ImageRefused(
            f"this is not an SBOM in SPDX 2 that lists packages: {fault!r}. Likely cause: another form, or it was cut "
            "off. Next step: make it with `nox -s image_sign`."
        ) from fault
    return tuple(found)


def compare_with_lock(packages: tuple[Package, ...], locked: Mapping[str, LockedPackage]) -> str:
    """Why a list of packages is not of an image of this lock; empty where every locked package is in it."""
    found: dict[str, set[str]] = {}
    for one in packages:
        if one.kind == "pypi":
            found.setdefault(str(canonicalize_name(one.name)), set()).add(one.version)
    wrong = [
        f"{name} is {' and '.join(sorted(found.get(name, ()))) or 'not in it'}, locked is {row.version}"
        for name, row in locked.items()
        if not {row.version} & {part for one in found.get(name, ()) for part in (one, one.partition("+")[0])}
    ]
    return "; ".join(wrong[:5])


def find_signature(shown: str, key: Path, variables: Mapping[str, str]) -> str:
    """Empty where cosign verifies a signature by this key over "REPOSITORY@DIGEST"; else what cosign reports.

    Raises:
        NoEnvironment: cosign is missing.
    """
    done = run_cosign(variables, "verify", "--key", str(key), image=shown)
    return done.last_words if done.code else ""


def read_attested_sbom(shown: str, key: Path, variables: Mapping[str, str]) -> Any:
    """The SBOM that a key attested last of "REPOSITORY@DIGEST", as cosign verifies it.

    Raises:
        NoEnvironment: cosign is missing.
        RegistryLies: there is none by this key.
    """
    done = run_cosign(variables, "verify-attestation", "--type", "spdxjson", "--key", str(key), image=shown)
    if done.code:
        raise RegistryLies(f"no SBOM of this image is attested by {key}: {done.last_words}")
    try:
        envelope = read_json(done.words.strip().splitlines()[-1])  # of several, the last one counts
        return read_json(base64.b64decode(envelope["payload"]).decode())["predicate"]
    except (ValueError, KeyError, IndexError, TypeError) as fault:
        raise RegistryLies(f"the SBOM that {key} attested cannot be read: {fault!r}") from fault


def list_materials(image: PushedImage) -> dict[str, str]:
    """Images that an image was built on, digest -> address: provenance of SLSA 1 or of 0.2."""
    found: dict[str, str] = {}
    for predicate in image.provenance.values():
        rows = predicate.get("buildDefinition", {}).get("resolvedDependencies", predicate.get("materials", ()))
        for row in rows:
            if str(row.get("uri", "")).startswith(("pkg:docker/", "pkg:oci/")):
                found |= {f"{kind}:{value}": str(row["uri"]) for kind, value in row.get("digest", {}).items()}
    return found


def _check(name: str, why: str, passed: str, step: str) -> ImageCheck:
    """A check that fails where there is a reason."""
    outcome = CheckOutcome.FAIL if why else CheckOutcome.PASS
    return ImageCheck(name=name, outcome=outcome, says=why or passed, next_step=step if why else "")


def _not_run(name: str, why: str, step: str) -> ImageCheck:
    return ImageCheck(name=name, outcome=CheckOutcome.NOT_RUN, says=why, next_step=step)


def verify_image(
    rows: ImageRows, image: str, key: Path | None = None, target: str = "", base: str = "", *, deep: bool = False
) -> ImageVerdict:
    """Every check of an image.

    Args:
        key: public key that must have signed it.
        target: what it must be for; empty takes its label.
        base: "REPOSITORY@sha256:..." that it was built on; empty for the pinned one.
        deep: cosign fetches every layer, and compares its digest.

    Raises:
        RegistryUnreachable: the registry does not answer.
        ImageRefused: an argument is wrong.
    """
    started = time.monotonic()
    shown = locate_image(image, rows.variables)
    if target:
        find_images(rows.images, [target])
    if key:
        read_public_key(key)
    packages: tuple[Package, ...] = ()
    labelled, checks = "", list[ImageCheck]()
    try:
        found = read_image(shown, rows.variables)
        labelled = found.labels.get(TARGET_LABEL, "")
        plan, why = _plan(rows, target or labelled, base)
        checks.append(_check("digest", "", f"{shown.partition('@')[2]} is the hash of its manifest", ""))
        if deep:
            checks.append(_check_layers(shown, rows.variables))
        checks += _check_plan(rows, found, plan, why, base)
        signature, packages = _check_signed(rows, shown, key, plan, why)
        checks += signature
    except (RegistryLies, ImageRefused) as fault:
        checks = [_check("digest", str(fault), "", _REBUILD)]
    return ImageVerdict(
        tool=rows.tool, image=shown, target=labelled, key=str(key or ""), checks=tuple(checks),
        packages=dict(sorted(Counter(one.kind for one in packages).items())),
        unknown_licences=tuple(sorted({f"{one.kind} {one.name}" for one in packages if not one.licence})),
        seconds=round(time.monotonic() - started, 2),
    )  # fmt: skip


def _plan(rows: ImageRows, target: str, base: str) -> tuple[ImagePlan | None, str]:
    """What an image is compared with; None and why where no plan can be made."""
    if not target:
        return None, "no label names its target, and none was given (--target)"
    try:
        find_images(rows.images, [target])
        return rows.plan(target, base), ""
    except ImageRefused as fault:
        return None, str(fault)


def _check_layers(shown: str, variables: Mapping[str, str]) -> ImageCheck:
    with tempfile.TemporaryDirectory(prefix="megacpp-verify-") as room:
        try:
            save_image(shown, Path(room, "layout"), variables)
        except RegistryLies as fault:
            return _check("layers", str(fault), "", "push the image again")
        except NoEnvironment as fault:
            return _not_run("layers", str(fault), "install cosign, or leave --deep out")
    return _check("layers", "", "each blob is there, and hashes to its digest", "")


def save_image(shown: str, layout: Path, variables: Mapping[str, str]) -> None:
    """Save "REPOSITORY@DIGEST" with its signatures and attestations as an OCI layout, each blob held to its digest.

    Raises:
        RegistryLies: a blob is absent, or has other bytes.
        InfrastructureFailed: the disk is full.
        NoEnvironment: cosign is missing.
    """
    done = run_cosign(variables, "save", "--dir", str(layout), image=shown)
    if done.code:
        raise (InfrastructureFailed if "no space left" in done.errors else RegistryLies)(
            f"{shown} cannot be fetched: {done.last_words}. Likely cause: the registry lost or damaged a part of it, "
            "or the disk is full. Next step: push the image again, or make room."
        )


def _check_plan(
    rows: ImageRows, found: PushedImage, plan: ImagePlan | None, why: str, base: str
) -> Iterator[ImageCheck]:
    """Labels, platform, provenance and base, compared with the plan of the target."""
    names = {"target": TARGET_LABEL, "lock": LOCK_LABEL, "pins": PINS_LABEL, "base": BASE_LABEL}
    step = "build it with `nox -s images`, which asks buildx for provenance, and push the index as it is"
    lacking = [name for name in found.platforms if name not in found.provenance]
    provenance = _check("provenance", f"there is none beside {', '.join(lacking)}" if lacking else "", "SLSA", step)
    if plan is None:
        for name in (*(f"label {one}" for one in names), "platform", "base"):
            yield _not_run(name, f"there is no plan to compare it with: {why}", "correct what that names")
        yield provenance
        return
    for name, label in names.items():
        seen, wanted = found.labels.get(label, "") or "absent", plan.labels[label] or "absent"
        differ = f"{label} is {seen}, and the plan has {wanted}" if seen != wanted else ""
        yield _check(f"label {name}", differ, f"{label} is {wanted}, as planned", _REBUILD)
    shown = ", ".join(found.platforms)
    other = "" if plan.platform in found.platforms else f"it is for {shown}, and the plan has {plan.platform}"
    yield _check("platform", other, f"it is for {shown}", _REBUILD)
    yield provenance
    pin, built_on = None if base else rows.pins.find(plan.base), list_materials(found)
    pinned = {plan.reference.partition("@")[2], *(pin.digests.values() if pin else ())}
    other = ", ".join(f"{uri} ({digest})" for digest, uri in built_on.items()) or "nothing that its provenance names"
    differ = "" if pinned & built_on.keys() else f"built on {other}, and pinned is {plan.reference}"
    yield _check("base", differ, f"built on {', '.join(sorted(pinned & built_on.keys()))}, as pinned", _REBUILD)


def _check_signed(
    rows: ImageRows, shown: str, key: Path | None, plan: ImagePlan | None, why: str
) -> tuple[list[ImageCheck], tuple[Package, ...]]:
    """Signature and SBOM, and the packages of the SBOM."""
    if key is None:
        words = "no key was given, so its signer is unknown"
        return [_not_run(name, words, "name the public key with --key") for name in ("signature", "sbom")], ()
    try:
        unsigned = find_signature(shown, key, rows.variables)
        signature = _check("signature", unsigned, f"by {key}, over this digest", _SIGN)
        packages = read_sbom(read_attested_sbom(shown, key, rows.variables))
    except NoEnvironment as fault:
        return [_not_run(name, str(fault), "install cosign") for name in ("signature", "sbom")], ()
    except ToolError as fault:
        return [signature, _check("sbom", str(fault), "", _SIGN)], ()
    if plan is None:
        return [signature, _not_run("sbom", f"there is no lock to compare it with: {why}", "see above")], packages
    differ = compare_with_lock(packages, read_image_lock(rows.root / plan.lock).packages)
    passed = f"SPDX, signed, {len(packages)} packages, with every package of {plan.lock}"
    return [signature, _check("sbom", differ, passed, _SIGN)], packages
