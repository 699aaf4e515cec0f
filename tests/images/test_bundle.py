"""Bundles written and restored: what is not as it was written is refused by the name of the file, before anything."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import matrix_folder
from megacpp_validate.images.bundle import BundleOptions, BundleResult, list_platforms, read_size, write_bundle
from megacpp_validate.images.restore import main as restore
from megacpp_validate.images.supply import rows_of
from megacpp_validate.images.tools import ImageRefused, RegistryLies, RegistryUnreachable
from megacpp_validate.jitcache.seal import check_sealed, is_sealed
from tests.command_line import make_run
from tests.images.fake_tools import FakeRegistry, Signer, install
from tests.images.small_project import write_wheel
from tests.running_processes import hearing_signals
from tests.sealed_caches import make_sealed

PART = 1 << 20
BASE = f"sha256:{'b' * 64}"
RESTORE = Path(restore.__code__.co_filename)


@dataclass(frozen=True)
class Site:
    """A project whose cpu image has one wheel, a registry with that image, keys, caches."""

    root: Path
    variables: dict[str, str]
    registry: FakeRegistry
    digest: str
    one: Signer
    other: Signer

    @property
    def image(self) -> str:
        return f"{self.registry.repository}@{self.digest}"

    def write(self, out: str = "bundle", **more: object) -> BundleResult:
        rows = rows_of(self.root / "matrix", "a test", self.variables)
        given = {"image": self.image, "part_size": "1MiB", "key": self.one.public, **more}
        return write_bundle(rows, BundleOptions("cpu", out=self.root / out, **given), lambda _: None)  # type: ignore[arg-type]


def make_site(root: Path) -> Site:
    shutil.copytree(matrix_folder(), root / "matrix")
    shutil.copy(matrix_folder().parent / "pyproject.toml", root)
    variables = install(root / "bin", "docker", "oras", "cosign", COSIGN_PASSWORD="right")
    wheel = write_wheel(root / "shelf", "alpha", "1.0")
    lock = root / rows_of(root / "matrix", "", variables).images.image[-1].lock
    lock.parent.mkdir(parents=True)
    lock.write_text(f"# x\n# y\nalpha==1.0 --hash=sha256:{sha256(wheel.read_bytes()).hexdigest()}\n")
    registry = FakeRegistry(Path(variables["FAKE_REGISTRY"]), "127.0.0.1:5000/small")
    labels = {"org.megacpp.target": "cpu", "org.megacpp.lock.sha256": sha256(lock.read_bytes()).hexdigest()}
    digest = registry.put_image(labels, BASE, bytes(range(256)) * 8192, b"two")
    keys = [Signer(root, name).make() for name in ("one", "other")]
    keys[0].sign_image(registry, digest)
    (root / "one.key").write_text("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\n")
    make_sealed(root / "jit", "cpu")
    make_sealed(root / "jit", "sm_90a")
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(root / "shelf"), "PIP_CONFIG_FILE": "/dev/null"}
    return Site(root, {**variables, **pip}, registry, digest, *keys)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def written(site: Site) -> Iterator[BundleResult]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FAKE_REGISTRY", "COSIGN_PASSWORD"):
            patch.setenv(name, site.variables[name])
        yield site.write(jit=site.root / "jit", sign_key=site.root / "one.key")


@pytest.fixture
def bundle(written: BundleResult, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written.folder, tmp_path / "bundle"))


def refuse(bundle: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of a bundle that is refused; nothing of it is installed."""
    target = bundle.with_name("restored")
    assert restore(["--bundle", str(bundle), "--unpack", str(target), "--jit", f"{target}-jit", *words]) == 1
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["bundle"]
    said = capsys.readouterr().err
    assert "Nothing was installed" in said
    return said


def rewrite(bundle: Path, change: dict[str, object] | None = None, **rows: dict[str, object]) -> None:
    """Change the manifest of a bundle, and its sums with it, as somebody would who knows how."""
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest.update(change or {})
    sums = dict(line.split("  ")[::-1] for line in (bundle / "SHA256SUMS").read_text().splitlines())
    for row in manifest["files"] if not change else ():
        row.update(rows.get(row["kind"], {}))
        sums |= {row["path"]: row["sha256"]} if not row["parts"] else {}
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    sums["bundle.json"] = sha256((bundle / "bundle.json").read_bytes()).hexdigest()
    (bundle / "SHA256SUMS").write_text("".join(f"{digest}  {path}\n" for path, digest in sums.items()))


def test_what_is_written_is_restored_as_it_was(site: Site, written: BundleResult, tmp_path: Path) -> None:
    folder = Path(written.folder)
    whole, caches = tmp_path / "whole", tmp_path / "caches"
    words = ["--bundle", str(folder), "--unpack", str(whole), "--jit", str(caches), "--id", written.id]
    for _ in range(2):  # what is there, and is the same, stays
        assert restore([*words, "--key", str(site.one.public)]) == 0
    archive = b"".join(path.read_bytes() for path in sorted(folder.glob("image.tar.part*")))
    assert (whole / "image.tar").read_bytes() == archive
    assert check_sealed(caches / "cpu").manifest.architecture == "cpu"
    assert is_sealed(caches / "cpu")
    assert not (caches / "sm_90a").exists()  # an image has caches of its own architecture alone
    kept = [path for path in caches.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o444}
    assert all(
        path.stat().st_mtime_ns == (site.root / "jit" / path.relative_to(caches)).stat().st_mtime_ns for path in kept
    )
    assert max(path.stat().st_size for path in folder.rglob("*")) <= PART
    assert {row.kind for row in written.kinds} >= {
        "image",
        "signature",
        "wheel",
        "jit",
        "provenance",
        "licences",
        "key",
    }
    assert set(written.absent) == {"SBOM"}
    (whole / "image.tar").write_bytes(archive[:-1] + b"x")  # damaged since: not overwritten, and not taken
    assert restore(words) == 5
    assert subprocess.run(["sha256sum", "--quiet", "--check", "SHA256SUMS"], cwd=folder, check=False).returncode == 0


FILES = ["image.tar.part0001", "signatures.tar", "wheelhouse/alpha-1.0-py3-none-any.whl", "jit/cpu/manifest.json",
         "matrix/targets.toml", "lock.txt", "licences.json", "restore.py", "bundle.json", "bundle.json.sig", "SHA256SUMS"]  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit(name: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((bundle / name).read_bytes())
    data[len(data) // 2] ^= 4
    (bundle / name).write_bytes(data)
    assert name in refuse(bundle, capsys)


def test_files_that_are_short_gone_swapped_or_too_many(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = bundle / "image.tar.part0000", bundle / "image.tar.part0001"
    whole = one.read_bytes()
    one.write_bytes(whole[:-1])
    assert f"image.tar.part0000: has {PART - 1} bytes of {PART}" in refuse(bundle, capsys)
    one.unlink()
    assert "image.tar.part0000: is missing" in refuse(bundle, capsys)
    one.write_bytes(other.read_bytes()[:PART].ljust(PART, b"\0"))
    assert "image.tar.part0000: its sha256" in refuse(bundle, capsys)
    one.write_bytes(whole)
    extra = bundle / "wheelhouse/torch-9.9-py3-none-any.whl"
    extra.touch()
    assert "torch-9.9-py3-none-any.whl: does not belong" in refuse(bundle, capsys)
    extra.unlink()
    extra.symlink_to("/etc/passwd")
    assert "torch-9.9-py3-none-any.whl: is no plain file" in refuse(bundle, capsys)
    extra.unlink()
    (bundle / "SHA256SUMS").unlink()
    assert "is no whole bundle" in refuse(bundle, capsys)


@pytest.mark.parametrize("name", ["../../etc/cron.d/x", "/etc/x", "a/./b", "a\\b", "a\x1bb", "", "lock.txt"])
def test_a_name_that_leads_out_or_is_there_twice(name: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(bundle, licences={"path": name})
    assert "is named twice" in refuse(bundle, capsys) if name == "lock.txt" else "leads out" in refuse(bundle, capsys)


@pytest.mark.parametrize(
    "change",
    [{"schema": "megacpp-validate/bundle/2"}, {"files": None}, {"files": [1]}, {"files": [{}]}, {"image": 1},
     {"absent": []}, {"wheels_absent": None}, {"python": 3}, {"image": None}, {"image": {}}, {"wheels_absent": [1]},
     {"image": {"name": "a:b", "digest": "sha256:1", "configs": [], "signatures": []}}],
)  # fmt: skip
def test_a_manifest_of_another_shape(
    change: dict[str, object], bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(bundle, change)
    refuse(bundle, capsys)


def test_parts_and_times_that_cannot_be(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(bundle, image={"bytes": 5})
    assert "image.tar, whose parts are not all of it" in refuse(bundle, capsys)
    rewrite(bundle, image={"bytes": 5}, jit={"mtime_ns": -1})
    refuse(bundle, capsys)


def test_who_signed_it(site: Site, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key finds what sums cannot: somebody who changed a file and all the sums with it."""
    key, other = (["--bundle", str(bundle), "--key", str(one.public)] for one in (site.one, site.other))
    assert (restore(key), restore(other)) == (0, 1)
    assert "is not signed by" in capsys.readouterr().err
    (bundle / "lock.txt").write_text("evil==1.0")
    rewrite(bundle, lock={"sha256": sha256(b"evil==1.0").hexdigest(), "bytes": 9})
    assert (restore(["--bundle", str(bundle)]), restore(key)) == (0, 1)
    assert restore(["--bundle", str(bundle), "--id", "0" * 64]) == 1
    assert f"and not {'0' * 64}" in capsys.readouterr().err


WORDS = [
    ["--push", "a..b"], ["--push", "127.0.0.1:1/UP"], ["--key", "/nonexistent"], ["--key", ""], ["--id", "12"],
    ["--unpack", "{0}/a", "--jit", "{0}/a"], ["--unpack", "{0}/a", "--jit", "{0}/a/b"], ["--unpack", "{0}/bundle/x"],
]  # fmt: skip


@pytest.mark.parametrize("words", WORDS)
def test_wrong_arguments_install_nothing(words: list[str], bundle: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        restore(["--bundle", str(bundle), *(word.format(bundle.parent) for word in words)])
    assert ended.value.code == 2
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


DOCKER = """#!/bin/sh
echo "$*" >>{0}/calls
case "$1 $2" in
  "load ") cat >{0}/loaded ;;
  "image inspect") cat {0}/id ;;
  push*) echo "pushed: digest: $(cat {0}/pushed) size: 1" ;;
esac
"""


def test_an_image_is_loaded_and_held_to_its_digest(
    site: Site, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "docker").write_text(DOCKER.format(engine))
    (engine / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine}:/usr/bin:/bin")
    (engine / "id").write_text(site.digest)
    assert restore(["--bundle", str(bundle), "--load"]) == 0
    archive = b"".join(path.read_bytes() for path in sorted(bundle.glob("image.tar.part*")))
    assert (engine / "loaded").read_bytes() == archive
    (engine / "pushed").write_text(site.digest)
    assert restore(["--bundle", str(bundle), "--push", "127.0.0.1:5000/copy"]) == 5  # the signatures have another one
    assert f"copy:sha256-{site.digest[7:]}.sig is not" in capsys.readouterr().err
    (engine / "id").write_text("sha256:other")
    assert restore(["--bundle", str(bundle), "--load"]) == 5
    (engine / "docker").unlink()
    assert restore(["--bundle", str(bundle), "--load"]) == 5
    assert "no Docker Engine is installed" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_virtual_environment_is_filled_from_the_wheelhouse(bundle: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    words = ["--bundle", str(bundle), "--venv", str(venv)]
    manifest = json.loads((bundle / "bundle.json").read_text())
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if manifest["python"] == here:
        assert (restore(words), restore(words)) == (0, 0)
        assert "alpha" in subprocess.run([venv / "bin/pip", "list"], capture_output=True, text=True, check=True).stdout
    rewrite(bundle, {"python": "2.7"})
    assert restore([*words[:3], str(tmp_path / "other")]) == 5
    rewrite(bundle, {"python": here, "wheels_absent": ["torch"]})
    assert restore([*words[:3], str(tmp_path / "other")]) == 5
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine").touch()
    assert restore([*words[:3], str(tmp_path / "other")]) == 5


def test_the_restore_command_needs_nothing_beside_itself(bundle: Path) -> None:
    assert (bundle / "restore.py").read_bytes() == RESTORE.read_bytes()
    assert len(RESTORE.read_text().splitlines()) <= 400
    words = [sys.executable, "-I", "-S", str(bundle / "restore.py")]
    assert subprocess.run(words, cwd="/", env={}, capture_output=True, check=False).returncode == 0


def test_being_asked_to_end_leaves_nothing_half_done(bundle: Path, tmp_path: Path) -> None:
    waits = RESTORE.read_text().replace(
        '    _say(f"verifying', "    import time; _say('up'); time.sleep(60)\n    _say(f\"verifying"
    )
    (tmp_path / "waits.py").write_text(waits)
    words = [
        sys.executable,
        "-I",
        str(tmp_path / "waits.py"),
        "--bundle",
        str(bundle),
        "--unpack",
        str(tmp_path / "there"),
    ]
    with (
        hearing_signals(),
        subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, "interrupted" in said) == (130, True), said
    assert not (tmp_path / "there").exists()


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    site = make_site(tmp_path / "site")
    for name, value in site.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_COLOR", "1")
    return site


def test_a_bundle_that_cannot_be(
    fresh: Site, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, root = make_run(capfd, monkeypatch, "bundle", "cpu", "--matrix", fresh.root / "matrix"), fresh.root
    h200 = f"{fresh.registry.repository}@{fresh.registry.put_image({'org.megacpp.target': 'h200'})}"
    bare = f"{fresh.registry.repository}@{fresh.registry.put_image({})}"
    config = fresh.registry.put_blob(b"[]")
    none = f"{fresh.registry.repository}@{fresh.registry.put_manifest({'config': config, 'layers': []})}"
    wrong = Signer(root, "other")
    cases: list[tuple[tuple[object, ...], int, str]] = [
        (("--image", h200), 2, "says org.megacpp.target=h200"),
        (("--image", bare), 2, "has no label org.megacpp.target"),
        (("--image", none), 2, "is no image"),
        (("--image", f"{fresh.registry.repository}:1"), 2, "has no digest"),
        (("--image", ""), 2, "has no digest"),  # a variable without a value is not a bundle without an image
        (("--image", f"{fresh.registry.repository}@sha256:{'0' * 64}"), 1, "the registry has no"),
        (("--out", root / "matrix/targets.toml/out"), 2, "cannot be written"),
        (("--part-size", "a lot"), 2, "is no size"),
        (("--part-size", "1"), 2, "too small"),
        (("--jit", root / "nowhere"), 2, "there is no"),
        (("--jit", root / "shelf"), 2, "no JIT caches of cpu"),
        (("--key", root / "one.key"), 2, "is no public key"),  # a private key never goes into a bundle
        (("--key", root / "one.pem"), 2, "is no public key"),
        (("--sign-key", fresh.one.public), 2, "is no private key"),
        (("--sign-key", root / "one.key", "--key", wrong.public), 2, "of different pairs"),
    ]
    for more, code, text in cases:
        said = run("--out", root / "out", *more)
        assert (said.code, text in said.err) == (code, True), (more, said)
        assert not (root / "out").exists()
    monkeypatch.setenv("COSIGN_PASSWORD", "wrong")
    assert "does not open the key" in run("--out", root / "out", "--sign-key", root / "one.key").err
    Path(fresh.registry.root, "down").touch()
    assert run("--out", root / "out", "--image", fresh.image).code == 6
    said = run("--out", root / "out", "--format", "markdown")
    assert (said.code, "no image: none was named" in said.out) == (0, True), said
    assert run("--out", root / "out").code == 2  # it is there already


def test_a_registry_that_lies_or_stops(fresh: Site) -> None:
    large = max((fresh.registry.folder / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    whole = large.read_bytes()
    large.write_bytes(whole[:-1] + b"x")
    with pytest.raises(RegistryLies, match="mismatched digest"):
        fresh.write()
    assert restore(["--bundle", str(fresh.root / ".bundle.writing")]) == 1  # no bundle
    large.write_bytes(whole)
    assert restore(["--bundle", fresh.write().folder]) == 0  # goes on
    Path(fresh.registry.root, "down").touch()
    with pytest.raises(RegistryUnreachable):
        fresh.write("other")


def test_wheels_are_those_of_the_lock(fresh: Site) -> None:
    write_wheel(fresh.root / "shelf", "alpha", "1.0", "evil")
    with pytest.raises(ImageRefused, match=r"(?s)DO NOT MATCH THE HASHES.*nox -s lock"):
        fresh.write()
    (fresh.root / "shelf/alpha-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ImageRefused, match="has no wheel of a package"):
        fresh.write()
    assert not (fresh.root / "bundle").exists()


def test_a_link_among_the_caches_is_refused(fresh: Site) -> None:
    (fresh.root / "jit/cpu/locks").mkdir(exist_ok=True)
    fresh.root.joinpath("jit/cpu").chmod(0o755)
    (fresh.root / "jit/cpu/out").symlink_to("/etc")
    with pytest.raises(ImageRefused, match=r"no JIT caches|is a link"):
        fresh.write(jit=fresh.root / "jit")


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("700MB", 700 * 10**6), ("1500k", 1500000), ("64 MiB", 64 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4TiB", "1e9", "0x10", "12"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ImageRefused):
        read_size(text)


def test_platforms_of_wheels() -> None:
    found = list_platforms("2.17", "x86_64")
    assert found[:2] == ["manylinux_2_17_x86_64", "manylinux2014_x86_64"]
    assert found[-1] == "linux_x86_64"
