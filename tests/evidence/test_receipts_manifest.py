"""A folder of receipts signed with ssh-keygen: who signed it, and what is no signature.

Other keys, dates, purposes and edits are scenarios of `tests.replay`.
"""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from megacpp_validate.errors import InfrastructureFailed
from megacpp_validate.evidence.receipts_manifest import NAMESPACE, ManifestInvalid, sign_folder, verify_folder

AT = datetime(2026, 11, 22, 12, tzinfo=UTC)
HASHES = {"run/a.json": "0" * 64, "run/b c.json": "1" * 64}
needs_ssh = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="not-run: there is no ssh-keygen")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two key pairs, `team` and `other`, and a file of signers that has the first."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("team", "other"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    public = (folder / "team.pub").read_text()
    (folder / "signers").write_text(f'ci@team namespaces="{NAMESPACE}" {public}')
    return folder


@needs_ssh
def test_a_key_in_several_rows_may_sign_by_any_of_them(tmp_path: Path, keys: Path) -> None:
    sign_folder(tmp_path, HASHES, keys / "team")
    public, rows = (keys / "team.pub").read_text(), (keys / "signers").read_text()
    signers = tmp_path / "signers"
    signers.write_text(f'# of git\n\nalice namespaces="git" {public}{rows}')
    assert verify_folder(tmp_path, signers, AT) == ("ci@team", HASHES)
    signers.write_text(f'alice namespaces="git" {public}bob {(keys / "other.pub").read_text()}')
    with pytest.raises(ManifestInvalid, match="is not what one of"):
        verify_folder(tmp_path, signers, AT)


@needs_ssh
def test_an_invalid_key_signs_nothing(tmp_path: Path, keys: Path) -> None:
    with pytest.raises(ManifestInvalid, match="Next step"):
        sign_folder(tmp_path, HASHES, keys / "nobody")
    assert not list(tmp_path.iterdir())


def test_without_ssh_keygen_nothing_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InfrastructureFailed, match="openssh-client"):
        sign_folder(tmp_path, HASHES, tmp_path / "key")
