"""Bundles: what is written is whole, and what is not as it was written is refused by the name of the file.

With a real engine, a real registry and a real virtual environment: `test_bundle_real.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.images.bundle.restore import door
from megacpp_validate.images.bundle.restore.door import main
from megacpp_validate.images.bundle.restore.engines import push_image
from megacpp_validate.images.bundle.restore.folders import NotTaken
from megacpp_validate.images.bundle.restore.listing import read_bundle, stored_files
from megacpp_validate.images.bundle.script import FILES, FOLDER, compose_restore
from megacpp_validate.images.bundle.write import BundleOrder, Written
from megacpp_validate.images.refusals import ImageRefused
from tests.images.small_bundle import PART, order_of, run_restore, write_small, write_sources
from tests.images.small_registry import SmallRegistry, digest_of, served
from tests.images.small_signer import Signer

ONE, OTHER = Signer(0xFACE), Signer(0xFEED)


@pytest.fixture(scope="module")
def registry() -> Iterator[SmallRegistry]:
    with served(SmallRegistry()) as one:
        yield one


@pytest.fixture(scope="module")
def written(registry: SmallRegistry, tmp_path_factory: pytest.TempPathFactory) -> tuple[BundleOrder, Written]:
    folder = tmp_path_factory.mktemp("bundle")
    order = order_of(registry, folder)
    return order, write_small(order, write_sources(folder), sign=lambda path: ONE.sign(path.read_bytes()))


@pytest.fixture
def bundle(written: tuple[BundleOrder, Written], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written[1].folder, tmp_path / "bundle"))


def restore(bundle: Path, *words: str) -> int:
    return main(["--bundle", str(bundle), *words])


def refused(bundle: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of a bundle that is refused, after which nothing of it is there."""
    target = bundle.with_name("restored")
    assert restore(bundle, "--unpack", str(target), "--jit", f"{target}-jit", *words) == 1
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["bundle"]
    said = capsys.readouterr().err
    assert "Nothing was installed" in said
    return said


def rewrite(bundle: Path, change: dict[str, object] | None = None, **rows: object) -> None:
    """Change the manifest of a bundle, and its sums with it, as somebody would who knows how."""
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest.update(change or {})
    for row in manifest["files"]:
        row.update(rows.get(row["kind"], {}))  # type: ignore[call-overload]
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    lines = [f"{row['sha256']}  {path}" for path, row in stored_files(manifest).items()]
    own = ("bundle.json", "bundle.json.sig")
    lines += [f"{sha256((bundle / name).read_bytes()).hexdigest()}  {name}" for name in own]
    (bundle / "SHA256SUMS").write_text("\n".join(lines) + "\n")


def test_what_is_written_is_restored_as_it_was(
    written: tuple[BundleOrder, Written], registry: SmallRegistry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order, made = written
    whole, caches = tmp_path / "whole", tmp_path / "caches"
    assert restore(made.folder, "--unpack", str(whole), "--jit", str(caches), "--id", made.id) == 0
    assert "all 15 files are as they were written" in capsys.readouterr().out
    archive = b"".join(path.read_bytes() for path in sorted(made.folder.glob("image.tar.part*")))
    assert (whole / "image.tar").read_bytes() == archive
    assert all(body in archive for body in registry.blobs.values())
    assert (whole / "wheelhouse/beta-1.0-py3-none-any.whl").stat().st_size > PART
    assert order.jit is not None
    for path in (path for path in order.jit.rglob("*") if path.is_file()):
        copy = caches / path.relative_to(order.jit)
        assert copy.read_bytes() == path.read_bytes()
        assert copy.stat().st_mtime_ns == path.stat().st_mtime_ns  # ninja builds again what is older than its source
    assert max(path.stat().st_size for path in made.folder.rglob("*")) <= PART
    sums = run_restore(made.folder)
    assert sums.returncode == 0, sums.stderr


def test_a_restore_can_be_repeated(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".caches.restoring").mkdir()  # of one that was killed
    for _ in range(2):
        assert restore(bundle, "--jit", str(tmp_path / "caches")) == 0
    assert not (tmp_path / ".caches.restoring").exists()
    kept = [path for path in (tmp_path / "caches").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o444}
    (tmp_path / "caches/cpu/manifest.json").chmod(0o644)
    (tmp_path / "caches/cpu/manifest.json").write_text("[]")
    assert restore(bundle, "--jit", str(tmp_path / "caches")) == 5
    assert "is not what the bundle holds: cpu/manifest.json. Nothing" in capsys.readouterr().err
    assert (tmp_path / "caches/cpu/manifest.json").read_text() == "[]"


def test_a_large_file_that_was_damaged_since_is_not_restored(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--unpack", str(tmp_path / "whole"))
    assert restore(bundle, *words) == restore(bundle, *words) == 0
    with (tmp_path / "whole/image.tar").open("r+b") as file:
        file.seek(PART + 5)
        flipped = bytes([file.read(1)[0] ^ 4])
        file.seek(PART + 5)
        file.write(flipped)
    capsys.readouterr()
    assert restore(bundle, *words) == 5
    assert "is not what the bundle holds: image.tar. Nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "image.tar.part0001", "wheelhouse/alpha-1.0-py3-none-any.whl", "wheelhouse/beta-1.0-py3-none-any.whl.part0001",
        "jit/cpu/triton/ab/kernel.so", "matrix/targets.toml", "lock.txt", "sbom.spdx.json", "licences.json",
        "restore.py", "README.txt", "bundle.json", "bundle.json.sig", "SHA256SUMS",
    ],
)  # fmt: skip
def test_one_flipped_bit(name: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((bundle / name).read_bytes())
    data[len(data) // 2] ^= 4
    (bundle / name).write_bytes(data)
    assert name in refused(bundle, capsys)


def test_every_bit_of_the_sums_counts(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (bundle / "SHA256SUMS").read_bytes()
    for place in range(0, len(whole), 37):
        data = bytearray(whole)
        data[place] ^= 1
        (bundle / "SHA256SUMS").write_bytes(data)
        assert restore(bundle) == 1, place


def test_a_part_that_is_shorter_missing_or_another(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = bundle / "image.tar.part0000", bundle / "image.tar.part0001"
    whole = one.read_bytes()
    one.write_bytes(whole[:-1])
    assert f"image.tar.part0000: has {PART - 1} bytes of {PART}" in refused(bundle, capsys)
    one.unlink()
    assert "image.tar.part0000: is missing" in refused(bundle, capsys)
    one.write_bytes(other.read_bytes())
    other.write_bytes(whole)
    said = refused(bundle, capsys)
    assert "image.tar.part0000: its sha256" in said
    assert "image.tar.part0001: its sha256" in said


def test_what_does_not_belong_there(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = bundle / "wheelhouse/torch-9.9-py3-none-any.whl"
    extra.touch()
    assert "wheelhouse/torch-9.9-py3-none-any.whl: does not belong" in refused(bundle, capsys)
    extra.unlink()
    extra.symlink_to("/etc/passwd")
    assert "torch-9.9-py3-none-any.whl: is no plain file" in refused(bundle, capsys)
    extra.unlink()
    (bundle / "lock.txt").rename(bundle.with_name("elsewhere"))
    (bundle / "lock.txt").symlink_to(bundle.with_name("elsewhere"))
    assert restore(bundle) == 1
    assert "lock.txt: is no plain file" in capsys.readouterr().err
    shutil.move(bundle / "matrix", bundle.with_name("matrix"))
    (bundle / "matrix").symlink_to(bundle.with_name("matrix"))
    assert restore(bundle) == 1
    assert "matrix: is no plain file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../etc/cron.d/x", "/etc/x", "a/./b", "a//b", "a\\b", "a\x1bb", "", "a/../b"])
def test_a_name_that_leads_out(name: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(bundle, licences={"path": name})
    assert restore(bundle, "--unpack", str(bundle.with_name("out"))) == 1
    assert "leads out of the bundle" in capsys.readouterr().err or not name.isprintable()
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["bundle"]


def test_a_name_that_is_there_twice_and_another_schema(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(bundle, licences={"path": "lock.txt"})
    assert "lock.txt: is named twice" in refused(bundle, capsys)
    rewrite(bundle, {"schema": "megacpp-validate/bundle/2"})
    said = refused(bundle, capsys)
    assert "has the schema 'megacpp-validate/bundle/2'" in said
    assert "another release of the tool wrote it" in said


@pytest.mark.parametrize(
    "change",
    [
        {"files": None}, {"files": [1]}, {"files": [{}]}, {"image": 1}, {"absent": []}, {"wheels_absent": None},
        {"lock": None}, {"python": 3}, {"made": None}, {"target": 1}, {"platform": []}, {"image": None}, {"image": {}},
        {"image": {"name": "a:b", "digest": "sha256:1", "configs": []}}, {"wheels_absent": [1]}, {"absent": {"a": 1}},
    ],
)  # fmt: skip
def test_a_manifest_of_another_shape(
    change: dict[str, object], bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((bundle / "bundle.json").read_text())
    refuse_manifest(bundle, {**manifest, **change}, capsys)


@pytest.mark.parametrize("time", [1e30, 10**30, -1, "1"])
def test_a_manifest_with_an_odd_time_or_no_table(
    time: object, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["files"][-1]["mtime_ns"] = time
    refuse_manifest(bundle, manifest, capsys)
    refuse_manifest(bundle, [], capsys)
    del manifest["made"]
    refuse_manifest(bundle, manifest, capsys)


def refuse_manifest(bundle: Path, manifest: object, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest that its sums agree with, and that is refused."""
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    sums = (bundle / "SHA256SUMS").read_text().splitlines()
    sums = [line for line in sums if not line.endswith("  bundle.json")]
    sums.append(f"{sha256((bundle / 'bundle.json').read_bytes()).hexdigest()}  bundle.json")
    (bundle / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    assert "is not of this schema" in refused(bundle, capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["--push", "127.0.0.1:xx/x"], ["--push", "127.0.0.1:70000/x"], ["--push", "a..b/x"], ["--key", "/nonexistent"],
        ["--unpack", "{0}/a", "--jit", "{0}/a"], ["--unpack", "{0}/a", "--jit", "{0}/a/b"],
        ["--jit", "{0}/a", "--unpack", "{0}/b/../a/c"], ["--unpack", "{0}/bundle/x"],
    ],
)  # fmt: skip
def test_wrong_arguments_install_nothing(words: list[str], bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        restore(bundle, *(word.format(bundle.parent) for word in words))
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("note", ["", "[]", "{}", "{", "\xff"])
def test_an_environment_whose_note_is_damaged(
    note: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/restored-from.json").write_text(note, "latin-1")
    assert restore(bundle, "--venv", str(tmp_path / "venv")) == 5
    assert "was not made from this bundle" in capsys.readouterr().err


def test_parts_that_are_not_all_of_a_file(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(bundle, image={"bytes": 5})
    assert "image.tar, whose parts are not all of it" in refused(bundle, capsys)


@pytest.mark.parametrize("name", ["SHA256SUMS", "bundle.json"])
def test_a_list_that_is_not_there(name: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / name).unlink()
    assert "is no whole bundle" in refused(bundle, capsys)


def test_who_signed_it(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key tells what sums cannot: somebody who changed a file and all the sums with it."""
    keys = tmp_path / "keys"
    keys.mkdir()
    for name, signer in (("one", ONE), ("other", OTHER)):
        (keys / name).write_text(signer.key)
    assert restore(bundle, "--key", str(keys / "one")) == 0
    assert restore(bundle, "--key", str(keys / "other")) == 1
    assert "is not a signature of" in capsys.readouterr().err
    (bundle / "lock.txt").write_text("evil==1.0")
    rewrite(bundle, lock={"sha256": sha256(b"evil==1.0").hexdigest(), "bytes": 9})
    assert restore(bundle) == 0
    assert restore(bundle, "--key", str(keys / "one")) == 1
    assert restore(bundle, "--id", "0" * 64) == 1
    assert f"and not {'0' * 64}" in capsys.readouterr().err


def test_an_unsigned_bundle_is_not_signed_by_a_key(
    registry: SmallRegistry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sources(tmp_path)
    order = order_of(registry, tmp_path)
    order.lock.write_text("# no wheels, so no pip")
    made = write_small(order, {})
    (tmp_path / "key").write_text(ONE.key)
    assert restore(made.folder) == 0
    assert restore(made.folder, "--key", str(tmp_path / "key")) == 1
    assert "it has no bundle.json.sig" in capsys.readouterr().err


def test_an_image_is_pushed_digest_by_digest(
    written: tuple[BundleOrder, Written], capsys: pytest.CaptureFixture[str]
) -> None:
    order, made = written
    assert order.image is not None
    with served(SmallRegistry()) as other:
        assert restore(made.folder, "--push", f"{other.host}/copy") == 0
        assert "5 blobs sent, 0 were there" in capsys.readouterr().out
        assert digest_of(other.manifests[order.image.digest]) == order.image.digest
        assert other.manifests[f"cpu-{order.image.digest[7:19]}"] == other.manifests[order.image.digest]
        assert restore(made.folder, "--push", f"{other.host}/copy") == 0
        assert "0 blobs sent, 5 were there" in capsys.readouterr().out
    assert restore(made.folder, "--push", f"{other.host}/copy") == 5
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("index", ["", "[]", '{"manifests": [{"digest": 3}]}', '{"manifests": [{}]}'])
def test_signatures_that_lead_nowhere_are_told_before_anything_is_pushed(bundle: Path, index: str) -> None:
    (bundle / "signatures").mkdir(exist_ok=True)
    (bundle / "signatures/index.json").write_text(index)
    with pytest.raises(NotTaken, match=r"signatures/index.json is no index .*nothing was pushed"):
        push_image(bundle, json.loads((bundle / "bundle.json").read_text()), "127.0.0.1:1/copy")


def test_what_takes_nothing_says_why(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is verified, and before a folder is there that was asked for beside it."""
    monkeypatch.setattr(door, "verify", lambda *_: pytest.fail("it was verified first"))
    monkeypatch.setenv("PATH", str(tmp_path))
    beside = ("--unpack", str(tmp_path / "unpacked"))
    assert restore(bundle, "--load", *beside) == 5
    assert "no docker on PATH" in capsys.readouterr().err
    (tmp_path / "docker").write_text("#!/bin/sh\necho Cannot connect to the Docker daemon >&2\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    assert restore(bundle, "--load", *beside) == 5
    assert "the engine does not answer: Cannot connect" in capsys.readouterr().err
    assert restore(bundle, "--venv", str(tmp_path / "venv"), "--python", "/bin/false") == 5
    assert "it is no Python" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    for place in (tmp_path / "full", tmp_path / "full/mine"):
        assert restore(bundle, "--venv", str(place), *beside) == 5
        assert "was not made from this bundle" in capsys.readouterr().err
    assert not (tmp_path / "unpacked").exists()
    rewrite(bundle, {"wheels_absent": ["transformer-engine-torch"], "python": "3.1"})
    assert restore(bundle, "--venv", str(tmp_path / "venv")) == 5
    assert "lacks transformer-engine-torch" in capsys.readouterr().err
    rewrite(bundle, {"wheels_absent": []})
    assert restore(bundle, "--venv", str(tmp_path / "venv")) == 5
    assert "the wheels are for 3.1" in capsys.readouterr().err


def test_a_part_too_small_and_a_folder_that_is_there(written: tuple[BundleOrder, Written], tmp_path: Path) -> None:
    order, _ = written
    with pytest.raises(ImageRefused, match="is there already"):
        write_small(order, {})
    with pytest.raises(ImageRefused, match="too small"):
        write_small(replace(order, out=tmp_path / "new", part_bytes=100), {})


def test_the_one_file_is_all_of_the_files() -> None:
    """Names of two files meet in one: a second of the same name would take the place of the first."""
    text = compose_restore()
    names = [
        line.split("(")[0].split(":")[0].split()[-1]
        for line in text.splitlines()
        if line.startswith(("def ", "class "))
    ]
    assert len(names) == len(set(names))
    assert set(FILES) == {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert "megacpp_validate" not in text.replace("megacpp-validate", "")
    assert "from ." not in text


def test_the_bundle_says_what_it_is(written: tuple[BundleOrder, Written]) -> None:
    order, made = written
    assert order.image is not None
    bundle = read_bundle(made.folder)
    assert bundle["image"]["digest"] == order.image.digest
    assert bundle["absent"] == {"signature": "a test signs nothing"}
    assert {row["kind"] for row in bundle["files"]} == {
        "image", "wheel", "jit", "matrix", "lock", "sbom", "licences", "restore", "words",
    }  # fmt: skip
    assert sha256((made.folder / "bundle.json").read_bytes()).hexdigest() == made.id
