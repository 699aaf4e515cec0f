"""What a folder of receipts holds, in the lines that `sha256sum` writes, and a signature over them.

Signed with `ssh-keygen -Y`: OpenSSH is on every machine that runs git, an Ed25519 key needs no service and no network,
and who may sign is one file (`allowed_signers`) that is reviewed like any other. Format:
https://github.com/openssh/openssh-portable/blob/master/PROTOCOL.sshsig
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from .whole_file import write_whole

MANIFEST: Final = "receipts.sha256"
SIGNATURE: Final = "receipts.sha256.sig"
NAMESPACE: Final = "receipts@megacpp-validate"  # so that no signature of another purpose serves here
_LINE: Final = re.compile(r"(\\?)([0-9a-f]{64})  (\S.*)")
_ESCAPED: Final = {"n": "\n", "r": "\r", "\\": "\\"}
_ESCAPE: Final = re.compile(r"\\([nr\\])")
_LIMIT_S: Final = 60.0
_MOST_BYTES: Final = 64 * 2**20  # of a manifest: far more than a store has lines for


class ManifestInvalid(ValueError):
    """A folder that is not signed as it is asked for; the text has the cause and the next step."""


class NoSshKeygen(OSError):
    """There is no ssh-keygen, or it cannot be run."""


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
        NoSshKeygen: there is none.
        ManifestInvalid: it takes no such key.
        OSError: the folder cannot be written.
    """
    text = render_manifest(hashes)
    if odd := [file for file in hashes if not file.isprintable()]:
        raise ManifestInvalid(
            f"{folder} was not signed: {odd[0]!r} is no name of a receipt. Next step: rename the file."
        )
    if os.path.exists(key) and not os.path.isfile(key):  # noqa: PTH110, PTH113 - a pipe would wait for who writes
        raise ManifestInvalid(f"{folder} was not signed: {key} is no file of a key. Next step: name the file of one.")
    words = [_find(variables), "-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE]
    done = _run(words, text.encode(), variables)
    if done.returncode:
        raise ManifestInvalid(
            f"{folder} was not signed: {_said(done)}. Likely cause: there is no key {key}, it asks for a passphrase, "
            "or others may read it. Next step: `ssh-keygen -t ed25519 -f KEY` makes one; one with a passphrase belongs "
            "in ssh-agent, and its .pub is named here."
        )
    # The signature first: a manifest that no signature fits yet is refused, and so is a folder half signed.
    write_whole(folder / SIGNATURE, done.stdout.decode("ascii"))
    write_whole(folder / MANIFEST, text)


def verify_folder(
    folder: Path, signers: Path, at: datetime, variables: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Who signed the manifest of a folder, and what it says the folder holds.

    Args:
        signers: who may sign, as ssh-keygen(1) describes under ALLOWED SIGNERS.
        at: time at which a signer's dates are held.

    Raises:
        NoSshKeygen: there is none.
        ManifestInvalid: there is no manifest or signature, or none by one of the signers.
    """
    manifest = _read(folder / MANIFEST)
    _read(folder / SIGNATURE)
    if not os.path.isfile(signers):  # noqa: PTH113 - what cannot be asked is none
        raise ManifestInvalid(f"there is no file {signers} of those who may sign. Next step: name another.")
    asked = _Asked(folder / SIGNATURE, manifest, f"-Overify-time={at.astimezone(UTC):%Y%m%d%H%M%SZ}", variables)
    principal, done = asked.verify(signers)
    if principal and done.returncode:
        # A key may stand in several rows, for several purposes, and ssh-keygen tells of the first row alone.
        principal, done = asked.verify_rows(signers) or (principal, done)
    if not principal:
        raise ManifestInvalid(
            f"{SIGNATURE} is by none of {signers}: {_said(done)}. Likely cause: it was signed by another key, or is "
            "no signature. Next step: have one of them sign the folder with `nox -s receipts_sign`."
        )
    if done.returncode:
        raise ManifestInvalid(
            f"{MANIFEST} is not what {principal} signed: {_said(done)}. Likely cause: it was edited since, or signed "
            "for another purpose. Next step: find out by whom, and sign the folder again with `nox -s receipts_sign`."
        )
    return principal, read_manifest_text(manifest.decode("utf-8", "surrogateescape"))


@dataclass(frozen=True)
class _Asked:
    """What ssh-keygen is asked of a signature."""

    signature: Path
    manifest: bytes
    when: str
    variables: Mapping[str, str]

    def verify(self, signers: Path) -> tuple[str, subprocess.CompletedProcess[bytes]]:
        """Whose key it is by the first row that has it, and whether it is theirs; empty where it is nobody's."""
        asked = ["find-principals", self.when, "-s", str(self.signature), "-f", str(signers)]
        done = self._ask(asked, b"")
        principal = done.stdout.decode("utf-8", "replace").strip().partition("\n")[0]
        if done.returncode or not principal:
            return "", done
        words = ["verify", self.when, "-n", NAMESPACE, "-I", principal, "-f", str(signers), "-s", str(self.signature)]
        return principal, self._ask(words, self.manifest)

    def verify_rows(self, signers: Path) -> tuple[str, subprocess.CompletedProcess[bytes]] | None:
        """As `verify`, each row by itself, as it is judged among others too; None where it fits none of them."""
        with tempfile.TemporaryDirectory() as folder:
            for row in signers.read_bytes().splitlines():
                if row.strip() and not row.lstrip().startswith(b"#"):
                    (alone := Path(folder) / "row").write_bytes(row + b"\n")
                    principal, done = self.verify(alone)
                    if principal and not done.returncode:
                        return principal, done
        return None

    def _ask(self, words: Iterable[str], given: bytes) -> subprocess.CompletedProcess[bytes]:
        return _run([_find(self.variables), "-Y", *words], given, self.variables)


def _read(path: Path) -> bytes:
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):  # a pipe would wait for who writes to it
            raise ManifestInvalid(f"{path.name} is no regular file. Next step: remove it, and sign the folder again.")
        if state.st_size > _MOST_BYTES:
            raise ManifestInvalid(f"{path.name} has {state.st_size} bytes, which no manifest has")
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


def _find(variables: Mapping[str, str]) -> str:
    found = shutil.which("ssh-keygen", path=variables.get("PATH"))
    if not found:
        raise NoSshKeygen(
            "there is no ssh-keygen, which signs receipts and looks at who did. Likely cause: OpenSSH is not "
            "installed, or not on PATH. Next step: install openssh-client."
        )
    return found


def _run(words: Iterable[str], given: bytes, variables: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    with tempfile.TemporaryDirectory() as empty:
        quiet = {"SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C", "HOME": empty}
        try:
            return subprocess.run(
                list(words),
                input=given,
                env={**variables, **quiet},
                capture_output=True,
                check=False,
                timeout=_LIMIT_S,
                start_new_session=True,  # no terminal, so that nobody is asked for a passphrase
            )
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise NoSshKeygen(f"ssh-keygen cannot be run: {fault}. Next step: look at it by hand.") from fault


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    return " | ".join(line.strip() for line in lines if line.strip())[-300:] or f"exit code {done.returncode}"


__all__ = ["MANIFEST", "SIGNATURE", "ManifestInvalid", "NoSshKeygen", "hash_manifest", "sign_folder", "verify_folder"]
