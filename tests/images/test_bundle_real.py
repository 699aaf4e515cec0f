"""Bundles and the supply chain with what is real: an engine, a registry, cosign, syft, no network, a disk that is full.

Set MEGACPP_TEST_REGISTRY to a registry that may be written, as 127.0.0.1:5000, on a machine with a Docker Engine, and
MEGACPP_TEST_IMAGE to an image by digest that a build may start from. What is missing is said as not-run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacpp_validate.images.bundle.archive import read_tree
from megacpp_validate.images.bundle.evidence_files import gather_evidence
from megacpp_validate.images.bundle.write import Written, write_bundle
from megacpp_validate.images.contents import Place, open_contents, read_place
from megacpp_validate.images.licences import list_licences, write_licences
from megacpp_validate.images.refusals import ImageRefused
from megacpp_validate.images.sbom import compare_sbom, make_sbom, read_sbom
from megacpp_validate.images.signature import (
    LICENCES,
    SPDX,
    attest,
    cosign_verifies,
    find_cosign,
    find_signature,
    make_keys,
    prove_key,
    read_statements,
    sign_file,
    sign_image,
)
from tests.images.small_bundle import order_of, replace, run_restore, write_small, write_sources
from tests.images.small_registry import SmallRegistry, served

VARIABLES = {**os.environ, "COSIGN_PASSWORD": "a test"}
DOCKERFILE = "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nLABEL org.megacpp.target=cpu\nCOPY words /words\n"


@pytest.fixture(scope="module")
def docker() -> str:
    found = shutil.which("docker") or "false"
    done = subprocess.run([found, "info"], capture_output=True, check=False, timeout=60)
    if done.returncode:
        pytest.skip(f"not-run: no Docker Engine answers: {done.stderr.decode()[-300:]}")
    return found


@pytest.fixture(scope="module")
def image(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """An image that nobody else has, with provenance, in a real registry."""
    registry, base = os.environ.get("MEGACPP_TEST_REGISTRY", ""), os.environ.get("MEGACPP_TEST_IMAGE", "")
    if not registry or not base:
        pytest.skip("not-run: MEGACPP_TEST_REGISTRY and MEGACPP_TEST_IMAGE name no registry and no image by digest")
    folder = tmp_path_factory.mktemp("context")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    (folder / "words").write_text(uuid.uuid4().hex)
    name = f"{registry}/bundle-test"
    words = [docker, "buildx", "build", "--quiet", "--provenance=mode=max", "--build-arg", f"BASE_IMAGE={base}"]
    words += ["--metadata-file", str(folder / "md.json"), "--tag", f"{name}:{uuid.uuid4().hex[:8]}", "--push"]
    subprocess.run([*words, str(folder)], check=True, capture_output=True)
    return read_place(f"{name}@{json.loads((folder / 'md.json').read_text())['containerimage.digest']}")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if not find_cosign(VARIABLES):
        pytest.skip("not-run: there is no cosign on PATH, and MEGACPP_COSIGN names none")
    return make_keys(tmp_path_factory.mktemp("keys") / "mine", VARIABLES)


@pytest.fixture(scope="module")
def signed(image: Place, keys: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Place:
    """That image with an SBOM and licences, signed by cosign."""
    folder, contents = tmp_path_factory.mktemp("sbom"), open_contents(image)
    syft = shutil.which(VARIABLES.get("MEGACPP_SYFT") or "syft")
    if not syft:
        pytest.skip("not-run: there is no syft on PATH, and MEGACPP_SYFT names none")
    text = make_sbom(image, "linux/amd64", VARIABLES)
    layers = next(iter(read_tree(contents, image.digest).images.values()))
    for name, kind, body in (
        ("sbom", "spdxjson", text),
        ("licences", LICENCES, write_licences(list_licences(contents, layers, read_sbom(text), {}))),
    ):
        (folder / name).write_bytes(body)
        for _ in range(2):  # what is said again takes the place of what was said
            attest(image, kind, folder / name, keys[0], VARIABLES)
    sign_image(image, keys[0], VARIABLES)
    return image


@pytest.fixture(scope="module")
def bundle(signed: Place, keys: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder, contents = tmp_path_factory.mktemp("bundle"), open_contents(signed)
    variables = write_sources(folder)
    with served(SmallRegistry()) as unused:
        order = order_of(unused, folder)
    tree = read_tree(contents, signed.digest)
    found = gather_evidence(signed, contents, tree, {}, lambda _: b"")
    order = replace(
        order, image=signed, evidence=found.files, absent=found.absent, part_bytes=30 << 20, out=folder / "b"
    )
    return write_bundle(
        order, (contents, tree), sign=lambda path: sign_file(path, keys[0], VARIABLES), variables=variables
    )


def test_what_cosign_makes_this_tool_reads_and_the_other_way_round(
    signed: Place, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    contents, key = open_contents(signed), keys[1].read_text()
    assert find_signature(contents, signed.digest, key) == ""
    assert cosign_verifies(signed, keys[1], VARIABLES) == ""
    found = {one.kind: one for one in read_statements(contents, signed.digest, key)}
    assert set(found) == {SPDX, LICENCES}
    assert all(one.signed and one.subjects == (signed.digest,) for one in found.values())
    assert len(read_sbom(found[SPDX].predicate)) > 10
    _, other = make_keys(tmp_path / "other", VARIABLES)
    assert "none of its 1 signatures" in find_signature(contents, signed.digest, other.read_text())
    assert "cosign verify` failed" in cosign_verifies(signed, other, VARIABLES)


def test_what_syft_makes_names_the_image(signed: Place) -> None:
    """So an SBOM of another image is told from this one's, whatever digest it was attested of."""
    tree = read_tree(open_contents(signed), signed.digest)
    found = next(one for one in read_statements(open_contents(signed), signed.digest, "") if one.kind == SPDX)
    assert compare_sbom(found.predicate, (), tree.names, {"nothing": "1"}) == ""
    assert "which is another image" in compare_sbom(found.predicate, (), frozenset({f"sha256:{'0' * 64}"}), {})


def test_a_key_is_tried_before_it_signs(keys: tuple[Path, Path], tmp_path: Path) -> None:
    prove_key(keys[0], VARIABLES, keys[1].read_text())
    with pytest.raises(ImageRefused, match=r"COSIGN_PASSWORD does not open the key"):
        prove_key(keys[0], {**VARIABLES, "COSIGN_PASSWORD": "another"})
    _, other = make_keys(tmp_path / "other", VARIABLES)
    with pytest.raises(ImageRefused, match=r"of different pairs"):
        prove_key(keys[0], VARIABLES, other.read_text())


def test_an_engine_has_the_digest_that_was_bundled(
    bundle: Written, docker: str, signed: Place, keys: tuple[Path, Path]
) -> None:
    subprocess.run([docker, "image", "rm", "--force", signed.shown], capture_output=True, check=False)
    words = ("--load", "--key", str(keys[1]), "--id", bundle.id)
    first, second = (run_restore(bundle.folder, *words, env=dict(os.environ)) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert f"loaded {signed.repository}:cpu-{signed.digest[7:19]} ({signed.digest})" in first.stdout
    assert "is in the engine already" in second.stdout
    seen = [docker, "image", "inspect", "--format", "{{.Id}}", signed.shown]
    if "by this digest" in first.stdout:
        assert subprocess.run(seen, capture_output=True, text=True, check=True).stdout.strip() == signed.digest


def test_a_registry_has_image_and_signatures_as_they_were(
    bundle: Written, signed: Place, keys: tuple[Path, Path]
) -> None:
    copy = Place(signed.host, f"restored-{uuid.uuid4().hex[:8]}", signed.digest)
    done = run_restore(bundle.folder, "--push", copy.repository)
    assert done.returncode == 0, done.stderr
    contents = open_contents(copy)
    assert read_tree(contents, copy.digest) == read_tree(open_contents(signed), signed.digest)
    assert find_signature(contents, copy.digest, keys[1].read_text()) == ""
    assert cosign_verifies(copy, keys[1], VARIABLES) == ""
    assert all(one.signed for one in read_statements(contents, copy.digest, keys[1].read_text()))


def test_a_flipped_bit_reaches_no_engine(bundle: Written, docker: str, signed: Place, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle.folder, tmp_path / "copy"))
    part = copy / "image.tar.part0001"
    data = bytearray(part.read_bytes())
    data[12345] ^= 1
    part.write_bytes(data)
    name = f"{signed.repository}:cpu-{signed.digest[7:19]}"
    subprocess.run([docker, "image", "rm", "--force", name], capture_output=True, check=False)
    done = run_restore(copy, "--load", env=dict(os.environ))
    assert done.returncode == 1
    assert "image.tar.part0001: its sha256" in done.stderr
    assert subprocess.run([docker, "image", "inspect", name], capture_output=True, check=False).returncode


# --- without an engine


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with served(SmallRegistry()) as registry:
        yield write_small(order_of(registry, tmp_path), write_sources(tmp_path)).folder


def test_the_wheels_are_installed_without_a_network(small: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    bare = (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"])
    alone = next(
        (words for words in bare if not subprocess.run([*words, "true"], capture_output=True, check=False).returncode),
        None,
    )
    if alone is None:
        pytest.skip("not-run: this user cannot have a network of their own (unshare --net)")
    words = [*alone, sys.executable, "-I", str(small / "restore.py"), "--venv", str(venv)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = subprocess.run(
        [str(venv / "bin/python"), "-c", "import alpha, beta; print(alpha.WHO, beta.WHO)"],
        capture_output=True,
        check=True,
    )
    assert said.stdout == b"alpha beta\n"
    assert "has the wheels of this bundle already" in run_restore(small, "--venv", str(venv)).stdout
    (venv / "restored-from.json").unlink()
    (venv / ".restoring").touch()  # of a restore that was killed
    assert run_restore(small, "--venv", str(venv)).returncode == 0


def test_the_oldest_python_restores(small: Path, tmp_path: Path) -> None:
    named = [shutil.which(f"python3.{minor}") for minor in (9, 10)]
    named += [str(path) for path in Path.home().glob(".pyenv/versions/3.9*/bin/python")]
    works = [
        one for one in named if one and not subprocess.run([one, "-V"], capture_output=True, check=False).returncode
    ]
    python = works[0] if works else None
    if python is None:
        pytest.skip("not-run: there is no Python 3.9 or 3.10 here")
    done = run_restore(small, "--unpack", str(tmp_path / "out"), python=python)
    assert done.returncode == 0, done.stderr


def test_sha256sum_says_the_same(small: Path) -> None:
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=small, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout


KILLED = """
import sys
sys.path[:0] = [{tests!r}, {project!r}]
from pathlib import Path
from small_bundle import order_of, replace, write_small
from small_registry import SmallRegistry, served
from megacpp_validate.images.contents import Contents
real = Contents.blob
def slow(self, digest, start=0):
    import time
    for data in real(self, digest, start):
        for place in range(0, len(data), 65536):
            yield data[place : place + 65536]
            time.sleep(0.01)
Contents.blob = slow
with served(SmallRegistry()) as registry:
    order = order_of(registry, Path({folder!r}))
    order.lock.write_text("# nothing")
    write_small(replace(order, image=replace(order.image, host=registry.host)), {{}})
"""


def test_a_writer_that_is_killed_outright(tmp_path: Path) -> None:
    write_sources(tmp_path)
    project = Path(__file__).parents[2]
    code = KILLED.format(tests=str(Path(__file__).parent), project=str(project), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code])
    aside = tmp_path / ".bundle.writing"
    until = time.monotonic() + 30
    while time.monotonic() < until and not list(aside.glob("image.tar.part0001")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "bundle").exists()
    left = sum(path.stat().st_size for path in aside.glob("image.tar*"))
    assert left >= 1 << 20
    with served(SmallRegistry()) as registry:
        order = order_of(registry, tmp_path)
        order.lock.write_text("# nothing")
        assert run_restore(write_small(order, {}).folder).returncode == 0


FULL = "mount -t tmpfs -o size={size} tmpfs {place} && exec {words}"


def test_a_disk_that_is_really_full(small: Path, tmp_path: Path) -> None:
    """One that is too small is told before; one that takes whole pages for small files is full half way."""
    place = tmp_path / "disk"
    place.mkdir()
    total = sum(row["bytes"] for row in json.loads((small / "bundle.json").read_text())["files"])
    enough = -(-total // 4096) * 4096 + 4096
    script = f"{sys.executable} -I {small}/restore.py --unpack {place}/out; echo code $?; ls -A {place}"
    for size, told in ((1 << 20, "bytes free of the"), (enough, "No space left on device")):
        command = FULL.format(size=size, place=place, words=f"sh -c '{script}'")
        done = subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, check=False)
        if "code" not in done.stdout:
            pytest.skip(f"not-run: this user cannot mount a disk of their own: {done.stderr[-200:]}")
        assert done.stdout.endswith("code 6\n"), done.stdout + done.stderr
        assert told in done.stderr
