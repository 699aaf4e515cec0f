"""What a folder of receipts holds, in the lines that `sha256sum` writes, and a signature over them.

Signed with `ssh-keygen -Y`: OpenSSH is on every machine that runs git, an Ed25519 key needs no service and no network,
and who may sign is one file (`allowed_signers`) that is reviewed like any other. Format:
https://github.com/openssh/openssh-portable/blob/master/PROTOCOL.sshsig
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..errors import InfrastructureFailed, WrongArguments, writing_to
from ..process import Ended, run_command
from .receipt import write_whole

MANIFEST: Final = "receipts.sha256"
SIGNATURE: Final = "receipts.sha256.sig"
NAMESPACE: Final = "receipts@megacpp-validate"  # so that no signature of another purpose serves here
_LIMIT_S: Final = 60.0


class ManifestInvalid(WrongArguments):
    """A folder that is not signed as it must be; the text has the cause and the next step."""


def render_manifest(hashes: Mapping[str, str]) -> str:
    """Lines of `sha256sum`, sorted by file.

    Args:
        hashes: file, relative to the folder with `/` between its parts -> SHA-256 in hexadecimal.
    """
    return "".join(f"{hashes[file]}  {file}\n" for file in sorted(hashes))


def hash_manifest(hashes: Mapping[str, str]) -> str:
    """SHA-256 of the manifest: one number for all that a folder holds."""
    return hashlib.sha256(render_manifest(hashes).encode()).hexdigest()


def sign_folder(folder: Path, hashes: Mapping[str, str], key: Path) -> None:
    """Write the manifest of a folder, and its signature beside it.

    Args:
        folder: of the receipts.
        hashes: what is in it, as for `render_manifest`.
        key: private key in a file, or a public one whose private half an agent holds.

    Raises:
        InfrastructureFailed: there is no ssh-keygen.
        ManifestInvalid: the key cannot sign.
        WrongArguments: the folder cannot be written.
    """
    text = render_manifest(hashes)
    done = _ask(["sign", "-q", "-f", str(key), "-n", NAMESPACE], text.encode())
    if done.code:
        raise ManifestInvalid(
            f"{folder} was not signed: {done.last_words}. Likely cause: {key} is missing, is not a key, has a "
            "passphrase, or is readable by other users. Next step: make a key with `ssh-keygen -t ed25519 -f KEY`; "
            "load a key with a passphrase into ssh-agent and name its .pub here."
        )
    with writing_to(folder, "a signature", "FOLDER"):
        # The signature first: a manifest that no signature fits yet is refused, and so is a folder half signed.
        write_whole(folder / SIGNATURE, done.words)
        write_whole(folder / MANIFEST, text)


def verify_folder(folder: Path, signers: Path, at: datetime) -> tuple[str, dict[str, str]]:
    """Who signed the manifest of a folder, and what it says the folder holds.

    Args:
        signers: who may sign, as ssh-keygen(1) describes under ALLOWED SIGNERS.
        at: time at which a signer's dates are held.

    Raises:
        InfrastructureFailed: there is no ssh-keygen.
        ManifestInvalid: there is no manifest or signature, or none by one of the signers.
        WrongArguments: there is no file of signers.
    """
    manifest = _read(folder / MANIFEST)
    _read(folder / SIGNATURE)
    if not signers.is_file():
        raise WrongArguments(f"there is no file of allowed signers {signers}. Next step: give another --signers.")
    rows = [row.split()[0] for row in signers.read_text().splitlines() if row.strip() and not row.startswith("#")]
    words = [f"-Overify-time={at.astimezone(UTC):%Y%m%d%H%M%SZ}", "-n", NAMESPACE, "-f", str(signers)]
    last = f"{signers} has no row"
    for principal in dict.fromkeys(row.partition(",")[0] for row in rows):
        done = _ask(["verify", *words, "-I", principal, "-s", str(folder / SIGNATURE)], manifest)
        if not done.code:
            lines = (line.split("  ", 1) for line in manifest.decode().splitlines())
            return principal, {file: digest for digest, file in lines}
        last = done.last_words
    raise ManifestInvalid(
        f"{MANIFEST} is not what one of {signers} signed: {last}. Likely cause: another key signed, its date has "
        "passed, or the folder was edited since. Next step: sign the folder again with `nox -s receipts_sign`."
    )


def _read(path: Path) -> bytes:
    if not path.is_file():  # to open a pipe would wait for who writes to it
        raise ManifestInvalid(
            f"the folder has no file {path.name}. Likely cause: it was never signed. Next step: `nox -s receipts_sign "
            "-- FOLDER --key KEY`."
        )
    return path.read_bytes()


def _ask(words: list[str], given: bytes) -> Ended:
    """One command of `ssh-keygen -Y`, which asks nobody for a passphrase."""
    found = shutil.which("ssh-keygen")
    if not found:
        raise InfrastructureFailed(
            "there is no ssh-keygen, which signs receipts and verifies signatures. Likely cause: OpenSSH is not "
            "installed, or not on PATH. Next step: install openssh-client."
        )
    with tempfile.TemporaryDirectory() as empty:
        quiet = {"SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C", "HOME": empty}
        return run_command(
            [found, "-Y", *words], limit_s=_LIMIT_S, variables={**os.environ, **quiet}, given=given, apart=True
        )
