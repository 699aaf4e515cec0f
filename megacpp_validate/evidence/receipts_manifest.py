"""What a folder of receipts holds, in the lines that `sha256sum` writes, and a signature over them.

Signed with `ssh-keygen -Y`: OpenSSH is on every machine that runs git, an Ed25519 key needs no service and no network,
and who may sign is one file (`allowed_signers`) that is reviewed like any other. Format:
https://github.com/openssh/openssh-portable/blob/master/PROTOCOL.sshsig
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..errors import InfrastructureFailed, WrongArguments
from ..process import Ended, run_command
from .whole_file import write_whole

MANIFEST: Final = "receipts.sha256"
SIGNATURE: Final = "receipts.sha256.sig"
NAMESPACE: Final = "receipts@megacpp-validate"  # so that no signature of another purpose serves here
_LINE: Final = re.compile(r"(\\?)([0-9a-f]{64})  (\S.*)")
_ESCAPED: Final = {"n": "\n", "r": "\r", "\\": "\\"}
_ESCAPE: Final = re.compile(r"\\([nr\\])")
_LIMIT_S: Final = 60.0
_MOST_BYTES: Final = 64 * 2**20  # of a manifest: far more than a store has lines for


class ManifestInvalid(WrongArguments):
    """A folder that is not signed as it must be; the text has the cause and the next step."""


def render_manifest(hashes: Mapping[str, str]) -> str:
    """Lines of `sha256sum`, sorted by file.

    Args:
        hashes: file, relative to the folder with `/` between its parts -> SHA-256 in hexadecimal.
    """
    return "".join(_line(file, hashes[file]) for file in sorted(hashes))


def hash_manifest(hashes: Mapping[str, str]) -> str:
    """SHA-256 of the manifest: one number for all that a folder holds."""
    return hashlib.sha256(render_manifest(hashes).encode("utf-8", "surrogateescape")).hexdigest()


def read_manifest_text(text: str) -> dict[str, str]:
    """File -> SHA-256.

    Raises:
        ManifestInvalid: a line is none of a manifest, or a file is there twice.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ManifestInvalid(f"line {number} of {MANIFEST} is none that `sha256sum` writes: {line[:80]!r}")
        escaped, sha256, file = match.groups()
        # At once: a backslash that is there twice escapes no letter behind it.
        name = _ESCAPE.sub(lambda one: _ESCAPED[one[1]], file) if escaped else file
        if name in found:
            raise ManifestInvalid(f"{MANIFEST} names {name!r} twice")
        found[name] = sha256
    return found


def sign_folder(folder: Path, hashes: Mapping[str, str], key: Path, variables: Mapping[str, str]) -> None:
    """Write the manifest of a folder, and its signature beside it.

    Args:
        folder: of the receipts.
        hashes: what is in it, as for `render_manifest`.
        key: private key in a file, or a public one whose private half an agent holds.
        variables: environment variables of the user.

    Raises:
        InfrastructureFailed: there is no ssh-keygen.
        ManifestInvalid: the key cannot sign, or the folder cannot be written.
    """
    text = render_manifest(hashes)
    if odd := [file for file in hashes if not file.isprintable()]:
        raise ManifestInvalid(f"{folder} was not signed: the file {odd[0]!r} has an odd name. Next step: rename it.")
    if not key.is_file():  # a pipe would wait for who writes to it
        raise ManifestInvalid(
            f"{folder} was not signed: there is no key in {key}. Next step: name the file of a key; "
            "`ssh-keygen -t ed25519 -f KEY` makes one."
        )
    done = _ask(["sign", "-q", "-f", str(key), "-n", NAMESPACE], text.encode(), variables)
    if done.code:
        raise ManifestInvalid(
            f"{folder} was not signed: {done.last_words}. Likely cause: {key} is no key, has a passphrase, or others "
            "may read it. Next step: load a key with a passphrase into ssh-agent and name its .pub here."
        )
    try:
        # The signature first: a manifest that no signature fits yet is refused, and so is a folder half signed.
        write_whole(folder / SIGNATURE, done.words)
        write_whole(folder / MANIFEST, text)
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # a full disk ends every verb in one way
        raise ManifestInvalid(
            f"{folder} was not signed: {fault.strerror or fault}. Likely cause: the folder is not "
            "yours. Next step: sign a copy that is yours."
        ) from fault


def verify_folder(
    folder: Path, signers: Path, at: datetime, variables: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Who signed the manifest of a folder, and what it says the folder holds.

    Args:
        signers: who may sign, as ssh-keygen(1) describes under ALLOWED SIGNERS.
        at: time at which a signer's dates are held.

    Raises:
        InfrastructureFailed: there is no ssh-keygen.
        ManifestInvalid: there is no manifest or signature, or none by one of the signers.
    """
    manifest = _read(folder / MANIFEST)
    _read(folder / SIGNATURE)
    if not signers.is_file():
        raise ManifestInvalid(f"there is no file {signers} of those who may sign. Next step: give another --signers.")
    when = f"-Overify-time={at.astimezone(UTC):%Y%m%d%H%M%SZ}"
    principal, done = _verify(folder / SIGNATURE, manifest, signers, when, variables)
    if principal and done.code:
        # A key may stand in several rows, for several purposes, and ssh-keygen reports the first row alone.
        with tempfile.TemporaryDirectory() as name:
            for row in signers.read_text().splitlines():
                if done.code and row.strip() and not row.lstrip().startswith("#"):
                    (alone := Path(name, "row")).write_text(row + "\n")
                    found, verified = _verify(folder / SIGNATURE, manifest, alone, when, variables)
                    if found and not verified.code:
                        principal, done = found, verified
    if not principal:
        raise ManifestInvalid(
            f"{SIGNATURE} is by none of {signers}: {done.last_words}. Likely cause: another key signed, or it "
            "is not a signature. Next step: have one of them sign the folder with `nox -s receipts_sign`."
        )
    if done.code:
        raise ManifestInvalid(
            f"{MANIFEST} is not what {principal} signed: {done.last_words}. Likely cause: it was edited, or signed "
            "for another purpose. Next step: find out by whom, and sign the folder again with `nox -s receipts_sign`."
        )
    return principal, read_manifest_text(manifest.decode("utf-8", "surrogateescape"))


def _verify(
    signature: Path, manifest: bytes, signers: Path, when: str, variables: Mapping[str, str]
) -> tuple[str, Ended]:
    """Whose key it is by the first row that has it, and whether it signed this; empty where it is nobody's."""
    done = _ask(["find-principals", when, "-s", str(signature), "-f", str(signers)], b"", variables)
    principal = done.words.strip().partition("\n")[0]
    if done.code or not principal:
        return "", done
    words = ["verify", when, "-n", NAMESPACE, "-I", principal, "-f", str(signers), "-s", str(signature)]
    return principal, _ask(words, manifest, variables)


def _read(path: Path) -> bytes:
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode) or state.st_size > _MOST_BYTES:  # a pipe would wait for who writes to it
            raise ManifestInvalid(f"{path.name} is no regular file. Next step: remove it, and sign the folder again.")
        return path.read_bytes()
    except OSError as fault:
        raise ManifestInvalid(
            f"the folder has no {path.name} that can be read: {fault.strerror or fault}. Likely cause: it was never "
            "signed. Next step: `nox -s receipts_sign -- FOLDER --key KEY`."
        ) from fault


def _line(file: str, sha256: str) -> str:
    if "\n" in file or "\\" in file:
        escaped = file.replace("\\", "\\\\").replace("\n", "\\n")
        return f"\\{sha256}  {escaped}\n"
    return f"{sha256}  {file}\n"


def _ask(words: list[str], given: bytes, variables: Mapping[str, str]) -> Ended:
    """One command of `ssh-keygen -Y`, which asks nobody for a passphrase."""
    found = shutil.which("ssh-keygen", path=variables.get("PATH"))
    if not found:
        raise InfrastructureFailed(
            "there is no ssh-keygen, which signs receipts and verifies signatures. Likely cause: OpenSSH is not "
            "installed, or not on PATH. Next step: install openssh-client."
        )
    with tempfile.TemporaryDirectory() as empty:
        quiet = {"SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C", "HOME": empty}
        return run_command(
            [found, "-Y", *words], limit_s=_LIMIT_S, variables={**variables, **quiet}, given=given, apart=True
        )
