"""Signing an image and verifying it: keys and signatures by cosign, the SBOM by syft, provenance by buildx.

No transparency log: it is on the Internet, and would list every image. SBOM: SPDX 2.3
(https://spdx.github.io/spdx-spec/v2.3/).
"""

from __future__ import annotations

import base64
import json
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

from ..errors import Exit, NoEnvironment, ToolError, exit_for
from ..evidence.values import Frozen
from ..process import Ended
from . import tools
from .locks import LockedPackage, read_image_lock
from .pins import find_digests
from .plan import ImagePlan, ImageRows, find_images

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
        """Open: what fails is an error."""
        return Exit.OPEN


class CheckOutcome(StrEnum):
    """How a check of an image went; worst first."""

    FAIL = "fail"
    NOT_RUN = "not-run"  # never a pass
    PASS = "pass"  # noqa: S105


class ImageCheck(Frozen):
    """One check ("digest", "labels", "signature", ...); `next_step` is empty where it passed."""

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
    """Run cosign without a transparency log; the caller judges its exit code.

    Args:
        words: a verb and its options.
        image: "REPOSITORY@DIGEST" that it is about; empty for none.

    Raises:
        NoEnvironment: cosign is missing.
    """
    cosign, verb = tools.require_program("cosign", variables), words[0]
    how = ["--insecure-ignore-tlog=true"] if verb.startswith("verify") else []
    if verb in ("sign", "attest", "sign-blob"):
        described = tools.call([cosign, verb, "--help"], variables)
        newer = ["--use-signing-config=false", "--new-bundle-format=false"]  # of cosign 3
        how = ["--yes", "--tlog-upload=false", *(newer if newer[0][:20] in described.words + described.errors else [])]
    if image and tools.is_plain_http(image, variables):
        how += ["--allow-http-registry", "--allow-insecure-registry"]
    return tools.call([cosign, verb, *how, *words[1:], *filter(None, [image])], variables, limit_s=_LONG_S)


def require_cosign(variables: Mapping[str, str], *words: str, image: str = "") -> str:
    """What cosign prints; arguments as `run_cosign`.

    Raises:
        NoEnvironment: cosign is missing, or fails.
    """
    done = run_cosign(variables, *words, image=image)
    if done.code:
        raise NoEnvironment(
            f"`cosign {words[0]}` failed: {done.last_words}. Likely cause: another file than a private key, not the "
            "password of the key in COSIGN_PASSWORD, or a registry that is down or full. Next step: correct that and "
            "run it again."
        )
    return done.words


def read_public_key(path: Path) -> str:
    """The text of a public key in PEM.

    Raises:
        ImageRefused: the file is missing, or not a public key.
    """
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    if "BEGIN PUBLIC KEY" not in text or "PRIVATE" in text:
        raise tools.ImageRefused(
            f"{path} is not a public key. Next step: name the cosign.pub that `cosign generate-key-pair` made."
        )
    return text


def sign_image(rows: ImageRows, image: str, key: Path, report: Callable[[str], None]) -> SignResult:
    """Attest the SBOM of an image, and sign it last: what is signed is whole.

    Raises:
        ImageRefused: an argument is wrong, or the image does not hold what the lock of its target lists.
        NoEnvironment: cosign or syft is missing, or fails.
        RegistryLies, RegistryUnreachable: as `tools.read_image`.
    """
    variables = rows.variables
    shown = tools.locate_image(image, variables)
    row = find_images(rows.images, [tools.read_image(shown, variables).labels.get(tools.TARGET_LABEL, "")])[0]
    report("listing the packages of the image")
    text = make_sbom(shown, row.platform, variables)
    packages = read_sbom(text)
    if why := compare_with_lock(packages, read_image_lock(rows.root / row.lock).packages):
        raise tools.ImageRefused(
            f"{image} does not hold what {row.lock} lists: {why}. Likely cause: it was built from another lock. Next "
            "step: build the image again."
        )
    with tempfile.TemporaryDirectory(prefix="megacpp-sign-") as room:
        file = Path(room, "sbom.json")
        file.write_text(text, encoding="utf-8")
        words = ("attest", "--key", str(key), "--type", "spdxjson", "--predicate", str(file))
        require_cosign(variables, *words, image=shown)
    require_cosign(variables, "sign", "--key", str(key), image=shown)
    return SignResult(image=image, packages=len(packages), unknown=sum(not one.licence for one in packages))


def make_sbom(shown: str, platform: str, variables: Mapping[str, str]) -> str:
    """The SBOM of "REPOSITORY@DIGEST", by syft, in SPDX.

    Raises:
        NoEnvironment: syft is missing, or fails.
    """
    syft = tools.require_program("syft", variables)
    plain = {"SYFT_REGISTRY_INSECURE_USE_HTTP": "true"} if tools.is_plain_http(shown, variables) else {}
    words = [syft, "scan", "--quiet", "--platform", platform, f"registry:{shown}", "--output", "spdx-json"]
    done = tools.call(words, {**variables, **plain, "SYFT_CHECK_FOR_APP_UPDATE": "false"}, limit_s=_LONG_S)
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
        body = json.loads(body) if isinstance(body, str) else body
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
        raise tools.ImageRefused(
            f"this is not an SBOM in SPDX 2 that lists packages: {fault!r}. Next step: sign with `nox -s image_sign`."
        ) from fault
    return tuple(found)


def compare_with_lock(packages: tuple[Package, ...], locked: Mapping[str, LockedPackage]) -> str:
    """Why a list of packages is not of an image of this lock; empty where every locked package is in it."""
    found: dict[str, set[str]] = {}
    for one in packages:
        if one.kind == "pypi":
            found.setdefault(str(canonicalize_name(one.name)), set()).update((one.version, one.version.split("+")[0]))
    wrong = [
        f"{name} is {' and '.join(sorted(found.get(name, ()))) or 'not in it'}, locked is {row.version}"
        for name, row in locked.items()
        if row.version not in found.get(name, ())
    ]
    return "; ".join(wrong[:5])


def find_signature(shown: str, key: Path, variables: Mapping[str, str]) -> str:
    """Empty where cosign verifies a signature by this key over "REPOSITORY@DIGEST"; else what cosign reports."""
    done = run_cosign(variables, "verify", "--key", str(key), image=shown)
    return done.last_words if done.code else ""


def read_attested_sbom(shown: str, key: Path, variables: Mapping[str, str]) -> Any:
    """The SBOM that a key attested last of "REPOSITORY@DIGEST", as cosign verifies it.

    Raises:
        NoEnvironment: cosign is missing.
        RegistryLies: there is none by this key.
    """
    done = run_cosign(variables, "verify-attestation", "--type", "spdxjson", "--key", str(key), image=shown)
    try:
        if done.code:
            raise ValueError(done.last_words)
        envelope = json.loads(done.words.strip().splitlines()[-1])  # of several, the last one counts
        return json.loads(base64.b64decode(envelope["payload"]).decode())["predicate"]
    except (ValueError, KeyError, IndexError, TypeError) as fault:
        raise tools.RegistryLies(f"no SBOM of this image is attested by {key}: {fault}") from fault


def list_materials(image: tools.PushedImage) -> dict[str, str]:
    """Images that an image was built on, digest -> address: provenance of SLSA 1 or of 0.2."""
    found: dict[str, str] = {}
    slsa = image.provenance
    for row in slsa.get("buildDefinition", {}).get("resolvedDependencies", slsa.get("materials", ())):
        if str(row.get("uri", "")).startswith(("pkg:docker/", "pkg:oci/")):
            found |= {f"{kind}:{value}": str(row["uri"]) for kind, value in row.get("digest", {}).items()}
    return found


def _check(name: str, why: str, passed: str, step: str, *, ran: bool = True) -> ImageCheck:
    """A check that fails, or that did not run, where there is a reason."""
    bad = CheckOutcome.FAIL if ran else CheckOutcome.NOT_RUN
    return ImageCheck(
        name=name, outcome=bad if why else CheckOutcome.PASS, says=why or passed, next_step=step if why else ""
    )


def verify_image(
    rows: ImageRows, image: str, key: Path | None = None, target: str = "", base: str = ""
) -> ImageVerdict:
    """Every check of an image.

    Args:
        key: public key that must have signed it.
        target: what it must be for; empty takes its label.
        base: "REPOSITORY@sha256:..." that it was built on; empty for the pinned one.

    Raises:
        RegistryUnreachable: the registry does not answer.
        ImageRefused: an argument is wrong.
    """
    started = time.monotonic()
    shown = tools.locate_image(image, rows.variables)
    if target:
        find_images(rows.images, [target])
    if key:
        read_public_key(key)
    packages, labelled, plan = tuple[Package, ...](), "", None
    try:
        found = tools.read_image(shown, rows.variables)
        labelled = found.labels.get(tools.TARGET_LABEL, "")
        checks = [_check("digest", "", f"{shown.partition('@')[2]} is the hash of its manifest", "")]
        try:
            plan = rows.plan(target or labelled, base)
            checks += _check_plan(rows, found, plan, base)
        except tools.ImageRefused as fault:
            why = f"there is no plan to compare it with: {fault}"
            checks.append(_check("plan", why, "", "name its --target", ran=False))
        signed, packages = _check_signed(rows, shown, key, plan)
        checks += signed
    except (tools.RegistryLies, tools.ImageRefused) as fault:
        checks = [_check("digest", str(fault), "", _REBUILD)]
    return ImageVerdict(
        tool=rows.tool, image=shown, target=labelled, key=str(key or ""), checks=tuple(checks),
        packages=dict(sorted(Counter(one.kind for one in packages).items())),
        unknown_licences=tuple(sorted({f"{one.kind} {one.name}" for one in packages if not one.licence})),
        seconds=round(time.monotonic() - started, 2),
    )  # fmt: skip


def _check_plan(rows: ImageRows, found: tools.PushedImage, plan: ImagePlan, base: str) -> Iterator[ImageCheck]:
    """Labels, platform, provenance and base, compared with the plan of the target."""
    differ = [
        f"{label} is {found.labels.get(label) or 'absent'}, and the plan has {plan.labels[label] or 'none'}"
        for label in (tools.TARGET_LABEL, tools.LOCK_LABEL, tools.PINS_LABEL, tools.BASE_LABEL)
        if found.labels.get(label, "") != plan.labels[label]
    ]
    yield _check("labels", "; ".join(differ), "target, lock, pins and base are as planned", _REBUILD)
    other = "" if plan.platform == found.platform else f"it is for {found.platform}, and the plan has {plan.platform}"
    yield _check("platform", other, f"it is for {found.platform}", _REBUILD)
    yield _check("provenance", "" if found.provenance else "there is none beside the image", "SLSA", _REBUILD)
    built_on, pinned = list_materials(found), {plan.reference.partition("@")[2]}
    if not base:
        pinned.update(find_digests(rows.images, rows.images.find_base(plan.base), rows.pins).digests.values())
    other = ", ".join(f"{uri} ({digest})" for digest, uri in built_on.items()) or "nothing that its provenance names"
    why = "" if pinned & built_on.keys() else f"built on {other}, and pinned is {plan.reference}"
    yield _check("base", why, f"built on {', '.join(sorted(pinned & built_on.keys()))}, as pinned", _REBUILD)


def _check_signed(
    rows: ImageRows, shown: str, key: Path | None, plan: ImagePlan | None
) -> tuple[list[ImageCheck], tuple[Package, ...]]:
    """Signature and SBOM, and the packages of the SBOM."""
    if key is None:
        why, step = "no key was given, so its signer is unknown", "name the public key with --key"
        return [_check(name, why, "", step, ran=False) for name in ("signature", "sbom")], ()
    try:
        signature = _check(
            "signature", find_signature(shown, key, rows.variables), f"by {key}, over this digest", _SIGN
        )
        packages = read_sbom(read_attested_sbom(shown, key, rows.variables))
    except NoEnvironment as fault:
        return [_check(name, str(fault), "", "install cosign", ran=False) for name in ("signature", "sbom")], ()
    except ToolError as fault:
        return [signature, _check("sbom", str(fault), "", _SIGN)], ()
    if plan is None:
        why = "there is no lock to compare it with"
        return [signature, _check("sbom", why, "", "name its --target", ran=False)], packages
    differ = compare_with_lock(packages, read_image_lock(rows.root / plan.lock).packages)
    passed = f"SPDX, signed, {len(packages)} packages, with every package of {plan.lock}"
    return [signature, _check("sbom", differ, passed, _SIGN)], packages
