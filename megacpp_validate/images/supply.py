"""Signing an image and verifying it: keys and signatures by cosign, the SBOM by syft, provenance by buildx.

No transparency log: it is on the Internet, and would list every image. SBOM: SPDX, attested as syft writes it.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from ..errors import Exit, NoEnvironment, exit_for
from ..evidence.receipt import Outcome
from ..evidence.values import Frozen, Result
from ..process import Ended
from . import tools
from .plan import ImagePlan, ImageRows

_LONG_S: Final = 7200.0  # of an image of NVIDIA's cosign reads 12 GB, and syft 40 GB
_REBUILD: Final = "build the image with `nox -s images --push`, and verify the digest that the push printed"
_SIGN: Final = "`nox -s image_sign -- IMAGE --key cosign.key` attests the SBOM, and signs the image"


class ImageCheck(Frozen):
    """One check ("digest", "labels", "signature", ...); `next_step` is empty where it passed."""

    name: str
    outcome: Outcome
    says: str
    next_step: str = ""


class ImageVerdict(Result):
    """An image, verified.

    Attributes:
        target: what its label names.
        key: file of the key that should have signed it; empty where none was given.
        checks: in the order in which they depend on each other.
    """

    schema_id: Literal["megacpp-validate/image-verify/4"] = "megacpp-validate/image-verify/4"
    image: str
    target: str
    key: str
    checks: tuple[ImageCheck, ...]

    @property
    def exit(self) -> Exit:
        """Closed where a check fails, incomplete where one was not run."""
        outcomes = {check.outcome for check in self.checks}
        return exit_for(breaks=Outcome.FAIL in outcomes, lacks=Outcome.NOT_RUN in outcomes)


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
    if image and tools.is_plain_http(image):
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
            "run the command again."
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


def sign_image(rows: ImageRows, image: str, key: Path, report: Callable[[str], None]) -> str:
    """Attest the SBOM of an image, and sign it last: what is signed is whole. What was done, in words.

    Raises:
        ImageRefused: an argument is wrong.
        NoEnvironment: cosign or syft is missing, or fails.
        RegistryLies, RegistryUnreachable: as `tools.read_image`.
    """
    variables = rows.variables
    shown = tools.locate_image(image, variables)
    platform = tools.read_image(shown, variables).platform
    report("listing the packages of the image")
    with tempfile.TemporaryDirectory(prefix="megacpp-sign-") as room:
        file = Path(room, "sbom.json")
        file.write_text(make_sbom(shown, platform, variables), encoding="utf-8")
        words = ("attest", "--key", str(key), "--type", "spdxjson", "--predicate", str(file))
        require_cosign(variables, *words, image=shown)
    require_cosign(variables, "sign", "--key", str(key), image=shown)
    return f"{image}: SBOM attested, image signed, with {key}"


def make_sbom(shown: str, platform: str, variables: Mapping[str, str]) -> str:
    """The SBOM of "REPOSITORY@DIGEST", by syft, in SPDX.

    Raises:
        NoEnvironment: syft is missing, or fails.
    """
    syft = tools.require_program("syft", variables)
    plain = {"SYFT_REGISTRY_INSECURE_USE_HTTP": "true"} if tools.is_plain_http(shown) else {}
    words = [syft, "scan", "--quiet", "--platform", platform, f"registry:{shown}", "--output", "spdx-json"]
    done = tools.call(words, {**variables, **plain, "SYFT_CHECK_FOR_APP_UPDATE": "false"}, limit_s=_LONG_S)
    if done.code:
        raise NoEnvironment(
            f"syft failed: {done.last_words}. Likely cause: the registry is not reached, or the disk for temporary "
            "files is full. Next step: correct that and run the command again."
        )
    return done.words


def check_signature(shown: str, key: Path, variables: Mapping[str, str]) -> str:
    """Empty where cosign verifies a signature by this key over "REPOSITORY@DIGEST"; else what cosign reports."""
    done = run_cosign(variables, "verify", "--key", str(key), image=shown)
    return done.last_words if done.code else ""


def check_sbom(shown: str, key: Path, variables: Mapping[str, str]) -> tuple[str, Any]:
    """Why cosign verifies no SBOM that this key attested of "REPOSITORY@DIGEST", and the one attested last.

    Raises:
        NoEnvironment: cosign is missing.
    """
    done = run_cosign(variables, "verify-attestation", "--type", "spdxjson", "--key", str(key), image=shown)
    if done.code:
        return done.last_words, None
    envelope = json.loads(done.words.strip().splitlines()[-1])
    return "", json.loads(base64.b64decode(envelope["payload"]))["predicate"]


# --- verified ---------------------------------------------------------------------------------------------------------


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
    labelled = ""
    shown = tools.locate_image(image, rows.variables)
    rows.find([target] if target else [])
    if key:
        read_public_key(key)
    try:
        found = tools.read_image(shown, rows.variables)
        labelled = found.labels.get(tools.TARGET_LABEL, "")
        checks = [
            _check("digest", "", f"{shown.partition('@')[2]} is the hash of its manifest", ""),
            *_check_plan(rows, found, target or labelled, base),
            *_check_signed(rows, shown, key),
        ]
    except (tools.RegistryLies, tools.ImageRefused) as fault:
        checks = [_check("digest", str(fault), "", _REBUILD)]
    return ImageVerdict(image=shown, target=labelled, key=str(key or ""), checks=tuple(checks))


def _check(name: str, why: str, passed: str, step: str, *, ran: bool = True) -> ImageCheck:
    """A check that fails, or that did not run, where there is a reason."""
    bad = Outcome.FAIL if ran else Outcome.NOT_RUN
    return ImageCheck(
        name=name, outcome=bad if why else Outcome.PASS, says=why or passed, next_step=step if why else ""
    )


def _check_plan(rows: ImageRows, found: tools.PushedImage, target: str, base: str) -> Iterator[ImageCheck]:
    """Labels, platform, provenance and base, compared with the plan of the target."""
    try:
        plan = rows.plan(target, base)
    except tools.ImageRefused as fault:
        why = f"there is no plan to compare the image with: {fault}"
        yield _check("plan", why, "", "name its --target", ran=False)
        return
    differ = [
        f"{label} is {found.labels.get(label) or 'absent'}, and the plan has {plan.labels[label] or 'none'}"
        for label in (tools.TARGET_LABEL, tools.LOCK_LABEL, tools.BASE_LABEL)
        if found.labels.get(label, "") != plan.labels[label]
    ]
    yield _check("labels", "; ".join(differ), "target, lock and base are as planned", _REBUILD)
    other = "" if plan.platform == found.platform else f"built for {found.platform}, and the plan has {plan.platform}"
    yield _check("platform", other, f"built for {found.platform}", _REBUILD)
    yield _check("provenance", "" if found.provenance else "buildx attached none to the image", "SLSA", _REBUILD)
    yield _check("base", _compare_base(found.provenance, plan), f"built on {plan.reference}, as pinned", _REBUILD)


def _compare_base(slsa: Mapping[str, Any], plan: ImagePlan) -> str:
    """Why an image was not built on the base of its plan, by the materials in its provenance: SLSA 1 or 0.2."""
    materials = slsa.get("buildDefinition", {}).get("resolvedDependencies", slsa.get("materials", ()))
    built_on = {f"{kind}:{value}": row["uri"] for row in materials for kind, value in row.get("digest", {}).items()}
    if plan.reference.partition("@")[2] in built_on:
        return ""
    return f"built on {', '.join(built_on.values()) or 'nothing that its provenance names'}, and not {plan.reference}"


def _check_signed(rows: ImageRows, shown: str, key: Path | None) -> Iterator[ImageCheck]:
    """Signature and SBOM, as cosign judges them."""
    passed = {"signature": f"by {key}, over this digest", "sbom": f"SPDX, attested by {key}"}
    if key is None or tools.find_program("cosign", rows.variables) is None:
        why = "cosign is missing" if key else "no key was given, so its signer is unknown"
        step = "install cosign" if key else "name the public key with --key"
        yield from (_check(name, why, "", step, ran=False) for name in passed)
        return
    yield _check("signature", check_signature(shown, key, rows.variables), passed["signature"], _SIGN)
    yield _check("sbom", check_sbom(shown, key, rows.variables)[0], passed["sbom"], _SIGN)
