"""Bundles written and restored: what is not as it was written is refused by the name of the file, before anything."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import matrix_folder, read_catalog
from megacpp_validate.images.bundle import BundleOptions, BundleResult, write_bundle, write_sums
from megacpp_validate.images.locks import gather_inputs, seal_lock
from megacpp_validate.images.plan import ImageRows
from megacpp_validate.images.restore import main as restore
from megacpp_validate.images.supply import run_cosign
from megacpp_validate.images.tools import RegistryLies
from megacpp_validate.jitcache.cache import check_sealed
from tests.command_line import make_run
from tests.images.fake_tools import FakeRegistry, install, make_key
from tests.images.small_project import write_wheel
from tests.sealed_caches import make_sealed

BASE = f"sha256:{'b' * 64}"
RESTORE = Path(restore.__code__.co_filename)


@dataclass(frozen=True)
class Site:
    """A project whose cpu image has one wheel, a registry with that image, keys, caches."""

    root: Path
    variables: dict[str, str]
    registry: FakeRegistry
    digest: str

    @property
    def image(self) -> str:
        return f"{self.registry.repository}@{self.digest}"

    def write(self, out: str = "bundle", **more: object) -> BundleResult:
        rows = ImageRows(read_catalog(self.root / "matrix"), self.variables)
        given = {"image": self.image, "key": self.root / "one.pub", **more}
        return write_bundle(rows, BundleOptions("cpu", out=self.root / out, **given), lambda _: None)  # type: ignore[arg-type]


def make_project(root: Path) -> dict[str, str]:
    """A checkout whose cpu image has one wheel; the labels of that image."""
    shutil.copytree(matrix_folder(), root / "matrix")
    shutil.copy(matrix_folder().parent / "pyproject.toml", root)
    wheel, images = write_wheel(root / "shelf", "alpha", "1.0"), ImageRows(read_catalog(root / "matrix"), {}).images
    inputs, lock = gather_inputs(images, images.image[-1], root), root / images.image[-1].lock
    lock.parent.mkdir(parents=True)
    hashed = sha256(wheel.read_bytes()).hexdigest()
    lock.write_text(seal_lock(f"# x\n# inputs: sha256:{inputs.hash}\nalpha==1.0 --hash=sha256:{hashed}\n"))
    make_sealed(root / "jit", "cpu")
    make_sealed(root / "jit", "sm_90a")
    return {"org.megacpp.target": "cpu", "org.megacpp.lock.sha256": sha256(lock.read_bytes()).hexdigest()}


def make_site(root: Path) -> Site:
    labels = make_project(root)
    variables = install(root / "bin", "docker", "cosign", COSIGN_PASSWORD="right")
    registry = FakeRegistry(Path(variables["FAKE_REGISTRY"]), "127.0.0.1:5000/small")
    site = Site(root, variables, registry, registry.put_image(labels, BASE, bytes(range(256)) * 8192, b"two"))
    one, _ = make_key(root, "one"), make_key(root, "other")
    (root / "sbom").write_text("{}")
    for words in (("sign",), ("attest", "--predicate", str(root / "sbom"))):
        assert not run_cosign(variables, *words, "--key", str(one), image=site.image).code
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def written(site: Site) -> BundleResult:
    return site.write(jit=site.root / "jit", sign_key=site.root / "one.key")


@pytest.fixture
def bundle(written: BundleResult, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written.folder, tmp_path / "bundle"))


def refuse(bundle: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message where a bundle is refused; nothing of it is installed."""
    assert restore(["--bundle", str(bundle), "--jit", str(bundle.with_name("jit")), *words]) == 1
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["bundle"]
    said = capsys.readouterr().err
    assert "Nothing was installed" in said
    return said


def test_what_is_written_is_restored_as_it_was(site: Site, written: BundleResult, tmp_path: Path) -> None:
    folder, caches = Path(written.folder), tmp_path / "caches"
    words = ["--bundle", str(folder), "--jit", str(caches), "--id", written.id]
    assert restore([*words, "--key", str(site.root / "one.pub")]) == 0
    assert not (caches / "sm_90a").exists()  # an image has caches of its own architecture alone
    for file in check_sealed(caches / "cpu")[0].files:
        status = (caches / "cpu" / file.path).stat()
        assert (status.st_mode & 0o777, abs(status.st_mtime_ns - file.mtime_ns) < 1000) == (0o444, True)
    names = {"image.tar", "jit.tar", "provenance.json", "sbom.spdx.json", "cosign.pub", "lock.txt"}
    assert set(written.sizes) == names | {"matrix", "restore.py", "bundle.json", "SHA256SUMS", "SHA256SUMS.sig"}
    assert written.absent == {}
    assert restore(words) == 5  # what is there is not overwritten
    with tarfile.open(folder / "image.tar") as archive:
        index = json.load(archive.extractfile("./index.json"))  # type: ignore[arg-type]
    tags = {row["annotations"]["io.containerd.image.name"].rpartition(":")[2] for row in index["manifests"]}
    assert tags == {f"cpu-{site.digest[7:19]}", f"sha256-{site.digest[7:]}.sig"}  # where cosign looks for them
    assert subprocess.run(["sha256sum", "--quiet", "--check", "SHA256SUMS"], cwd=folder, check=False).returncode == 0


FILES = ["image.tar", "jit.tar", "matrix/targets.toml", "bundle.json"]


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit(name: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((bundle / name).read_bytes())
    data[len(data) // 2] ^= 4
    (bundle / name).write_bytes(data)
    assert f"{name}: does not hash" in refuse(bundle, capsys)


def test_files_that_are_gone_or_too_many(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, extra = bundle / "image.tar", bundle / "matrix/torch-9.9-py3-none-any.whl"
    whole = one.read_bytes()
    one.unlink()
    assert "image.tar: is missing" in refuse(bundle, capsys)
    one.write_bytes(whole)
    extra.touch()
    assert "torch-9.9-py3-none-any.whl: does not belong" in refuse(bundle, capsys)
    extra.unlink()
    extra.symlink_to("/etc/passwd")
    assert "torch-9.9-py3-none-any.whl: is a link or a device" in refuse(bundle, capsys)
    extra.unlink()
    sums = (bundle / "SHA256SUMS").read_text()
    (bundle / "SHA256SUMS").write_text(f"{sums}{'0' * 64}  ../../etc/passwd\n")
    assert "../../etc/passwd: is missing" in refuse(bundle, capsys)
    (bundle / "SHA256SUMS").unlink()
    assert "is not a complete bundle" in refuse(bundle, capsys)


@pytest.mark.parametrize("name", ["../evil", "link", "no tar"])
def test_an_archive_of_caches_that_is_not_files_inside(
    name: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(bundle / "jit.tar", "w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = (tarfile.SYMTYPE, "/etc/passwd") if name == "link" else (tarfile.REGTYPE, "")
        archive.addfile(info)
    if name == "no tar":
        (bundle / "jit.tar").write_bytes(b"x" * 1024)
    (bundle / "SHA256SUMS").unlink()
    write_sums(bundle)
    sums = [line for line in (bundle / "SHA256SUMS").read_text().splitlines() if not line.endswith(".sig")]
    (bundle / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    assert ("is not a tar archive" if name == "no tar" else "is not a file inside of it") in refuse(bundle, capsys)


def test_who_signed_it(site: Site, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key finds what sums cannot: somebody who changed a file and all the sums with it."""
    key, other = (["--bundle", str(bundle), "--key", str(site.root / f"{one}.pub")] for one in ("one", "other"))
    assert (restore(key), restore(other)) == (0, 1)
    assert "is not signed by" in capsys.readouterr().err
    before = sha256((bundle / "lock.txt").read_bytes()).hexdigest()
    (bundle / "lock.txt").write_text("evil==1.0")
    sums = (bundle / "SHA256SUMS").read_text()
    (bundle / "SHA256SUMS").write_text(sums.replace(before, sha256(b"evil==1.0").hexdigest()))
    assert (restore(["--bundle", str(bundle)]), restore(key)) == (0, 1)
    assert restore(["--bundle", str(bundle), "--id", "0" * 64]) == 1
    assert f"and not {'0' * 64}" in capsys.readouterr().err
    (bundle / "SHA256SUMS.sig").unlink()
    assert restore(key) == 1


DOCKER = """#!/bin/sh
case "$1 $2" in
  "image inspect") cat {0}/id ;;
  push*) echo "pushed: digest: $(cat {0}/pushed) size: 1" ;;
esac
"""


def test_a_loaded_image_must_have_its_digest(
    site: Site, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "docker").write_text(DOCKER.format(engine))
    (engine / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine}:/usr/bin:/bin")
    (engine / "id").write_text(site.digest)
    assert restore(["--bundle", str(bundle), "--load"]) == 0
    (engine / "pushed").write_text(site.digest)
    assert restore(["--bundle", str(bundle), "--push", "127.0.0.1:5000/copy"]) == 5  # the signatures have another one
    assert f"copy:sha256-{site.digest[7:]}.sig is not" in capsys.readouterr().err
    (engine / "id").write_text("sha256:other")
    assert restore(["--bundle", str(bundle), "--load"]) == 5
    (engine / "docker").unlink()
    assert restore(["--bundle", str(bundle), "--load"]) == 5


def test_the_restore_command_needs_nothing_beside_itself(bundle: Path) -> None:
    assert (bundle / "restore.py").read_bytes() == RESTORE.read_bytes()
    words = [sys.executable, "-I", "-S", str(bundle / "restore.py")]
    assert subprocess.run(words, cwd="/", env={}, capture_output=True, check=False).returncode == 0


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = make_site(tmp_path / "site")
    for name, value in {**site.variables, "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    yield site
    assert not list(site.root.glob(".*"))  # nothing lies beside the bundle, whatever happened


def test_a_bundle_that_cannot_be(
    fresh: Site, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, root = make_run(capfd, monkeypatch, "bundle", "cpu", "--matrix", fresh.root / "matrix"), fresh.root
    h200 = f"{fresh.registry.repository}@{fresh.registry.put_image({'org.megacpp.target': 'h200'})}"
    cases: list[tuple[tuple[object, ...], int, str]] = [
        (("--image", h200), 2, "org.megacpp.target of 127.0.0.1:5000/small@"),
        (("--image", ""), 2, "has no digest"),  # a variable without a value is not a bundle without an image
        (("--image", f"{fresh.registry.repository}@sha256:{'0' * 64}"), 1, "the registry has no"),
        (("--out", root / "matrix/targets.toml/out"), 2, "cannot be written"),
        (("--jit", root / "nowhere"), 4, "has no sealed cache"),
        (("--key", root / "one.key"), 2, "is not a public key"),  # a private key never goes into a bundle
    ]
    for more, code, text in cases:
        said = run("--out", root / "out", *more)
        assert (said.code, text in said.err) == (code, True), (more, said)
        assert not (root / "out").exists()
    said = run("--out", root / "out", "--format", "markdown")
    assert (said.code, "image: none was named" in said.out) == (0, True), said
    assert run("--out", root / "out").code == 2  # it is there already


def test_without_a_key_or_another_one_the_bundle_has_less(fresh: Site) -> None:
    told = fresh.write(key=fresh.root / "other.pub").absent
    assert (set(told), "no matching attestations" in told["SBOM"]) == ({"JIT caches", "SBOM", "signature"}, True)
    assert set(fresh.write("second", key=None).absent) == {"JIT caches", "SBOM"}


def test_layers_are_those_of_the_digest(fresh: Site) -> None:
    large = max((fresh.registry.folder / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    whole = large.read_bytes()
    large.write_bytes(whole[:-1] + b"x")
    with pytest.raises(RegistryLies, match="verifying sha256"):
        fresh.write()
    assert not (fresh.root / "bundle").exists()
