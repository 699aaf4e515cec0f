"""A bundle that is being written: what kills it, what it goes on with, and that nothing half written passes for one."""

from __future__ import annotations

import fcntl
import os
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from megacpp_validate.images.bundle import write
from megacpp_validate.images.bundle.archive import FILE
from megacpp_validate.images.bundle.restore.door import main
from megacpp_validate.images.bundle.wheels import Machine, _require_source, fetch_wheels
from megacpp_validate.images.bundle.write import BundleOrder
from megacpp_validate.images.locks import LockedPackage
from megacpp_validate.images.refusals import ImageRefused, RegistryLies, RegistryUnreachable
from tests.images.small_bundle import PART, order_of, write_small, write_sources
from tests.images.small_registry import SmallRegistry, served

ASIDE = ".bundle.writing"


@pytest.fixture
def registry() -> Iterator[SmallRegistry]:
    with served(SmallRegistry()) as one:
        yield one


def order_without_wheels(registry: SmallRegistry, folder: Path) -> tuple[dict[str, str], BundleOrder]:
    """What is about the image alone, and needs no pip."""
    variables, order = write_sources(folder), order_of(registry, folder)
    order.lock.write_text("# nothing\n")
    return variables, order


def is_no_bundle(folder: Path) -> bool:
    return not (folder / "bundle").exists() and main(["--bundle", str(folder / ASIDE)]) == 1


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_registry_that_stops_half_way(registry: SmallRegistry, tmp_path: Path, *, knows_ranges: bool) -> None:
    variables, order = order_without_wheels(registry, tmp_path)
    registry.knows_ranges, registry.stops_after = knows_ranges, PART + 4000
    with pytest.raises(RegistryUnreachable, match=r"ended after \d+ of \d+ bytes|IncompleteRead"):
        write_small(order, variables)
    assert is_no_bundle(tmp_path)
    left = sum(path.stat().st_size for path in (tmp_path / ASIDE).glob(f"{FILE}*"))
    assert left > PART
    registry.stops_after = -1
    registry.asked.clear()
    first = write_small(order, variables)
    assert sum("/blobs/" in line for line in registry.asked) <= 4  # nothing that was there is asked for again
    other = write_small(replace(order, out=tmp_path / "fresh"), variables)
    images = [[row for row in one.files if row.kind == "image"] for one in (first, other)]
    assert images[0] == images[1]
    assert not list(tmp_path.glob(".*"))


def test_what_a_power_cut_left_is_fetched_again(registry: SmallRegistry, tmp_path: Path) -> None:
    """A file of the right size full of zeros: names without contents."""
    variables, order = order_without_wheels(registry, tmp_path)
    registry.stops_after = PART + 4000
    with pytest.raises(RegistryUnreachable):
        write_small(order, variables)
    part = tmp_path / ASIDE / f"{FILE}.part0000"
    part.write_bytes(bytes(part.stat().st_size))
    registry.stops_after = -1
    assert main(["--bundle", str(write_small(order, variables).folder)]) == 0


def test_another_order_does_not_go_on_with_it(registry: SmallRegistry, tmp_path: Path) -> None:
    variables, order = order_without_wheels(registry, tmp_path)
    registry.stops_after = PART + 4000
    with pytest.raises(RegistryUnreachable):
        write_small(order, variables)
    registry.stops_after = -1
    made = write_small(replace(order, part_bytes=2 * PART), variables)
    assert main(["--bundle", str(made.folder)]) == 0


def test_a_registry_that_lies(registry: SmallRegistry, tmp_path: Path) -> None:
    variables, order = order_without_wheels(registry, tmp_path)
    assert order.image is not None
    large = max(registry.blobs, key=lambda digest: len(registry.blobs[digest]))
    whole = registry.blobs[large]
    registry.blobs[large] = whole[:-1] + bytes([whole[-1] ^ 1])
    with pytest.raises(RegistryLies, match=f"for {large}"):
        write_small(order, variables)
    assert is_no_bundle(tmp_path)
    assert not list((tmp_path / ASIDE).glob(f"{FILE}*"))
    registry.blobs[large] = whole
    registry.manifests[order.image.digest] += b" "
    with pytest.raises(RegistryLies, match=f"for {order.image.digest}"):
        write_small(order, variables)


def test_a_disk_that_is_full(registry: SmallRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the first byte where it is known; with a disk that is really full: `test_bundle_real.py`."""
    variables, order = order_without_wheels(registry, tmp_path)
    monkeypatch.setattr(write, "_SPARE", 1 << 60)
    with pytest.raises(OSError, match="No space left"):
        write_small(order, variables)
    assert is_no_bundle(tmp_path)


def test_two_do_not_write_the_same(registry: SmallRegistry, tmp_path: Path) -> None:
    order = order_of(registry, tmp_path)
    with (tmp_path / f"{ASIDE}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ImageRefused, match="somebody else writes"):
            write_small(order, {})


def test_a_wheel_that_is_not_the_locked_one(registry: SmallRegistry, tmp_path: Path) -> None:
    variables, order = write_sources(tmp_path), order_of(registry, tmp_path)
    with zipfile.ZipFile(tmp_path / "index/alpha-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("evil.py", "")
    with pytest.raises(ImageRefused, match=r"(?s)DO NOT MATCH THE HASHES.*alpha.*nox -s lock"):
        write_small(order, variables)
    assert is_no_bundle(tmp_path)


def test_a_package_without_a_wheel_is_told(registry: SmallRegistry, tmp_path: Path) -> None:
    variables, order = write_sources(tmp_path), order_of(registry, tmp_path)
    with order.lock.open("a") as file:
        file.write(f"only-source==1.0 --hash=sha256:{sha256(b'source').hexdigest()}\n")
    (tmp_path / "index/only_source-1.0.1.tar.gz").touch()
    with pytest.raises(ImageRefused, match=r"neither a wheel of only-source .* nor its source release.*Next step"):
        write_small(order, variables)  # another version is no more than an index that answers 404
    assert is_no_bundle(tmp_path)
    (tmp_path / "index/only_source-1.0.tar.gz").write_bytes(b"another")
    with pytest.raises(ImageRefused, match=r"another source release of only-source .*nox -s lock"):
        write_small(order, variables)
    (tmp_path / "index/only_source-1.0.tar.gz").write_bytes(b"source")
    made = write_small(order, variables)
    assert made.wheels_absent == ("only-source",)
    assert main(["--bundle", str(made.folder), "--venv", str(tmp_path / "venv")]) == 5


def test_a_source_release_is_held_to_the_lock_by_what_the_index_says_of_it(tmp_path: Path) -> None:
    one, other = (sha256(content).hexdigest() for content in (b"one", b"other"))
    row = LockedPackage("1.0", frozenset({one}))

    def say(*fragments: str) -> str:
        link = "No sources permitted for only-source: https://index.invalid/only_source-1.0.tar.gz"
        return "\n".join(f"Skipping link: {link}{fragment} (from https://index.invalid/)" for fragment in fragments)

    with pytest.raises(ImageRefused, match=f"another source release of only-source .*{other}"):
        _require_source("only-source", row, say(f"#sha256={other}"), tmp_path)
    for other_release in ("", say("").replace("-1.0.", "-1.0.1.")):
        with pytest.raises(ImageRefused, match=r"neither a wheel of only-source .*answers 404"):
            _require_source("only-source", row, other_release, tmp_path)
    for fragments in ([f"#sha256={one}"], [f"#sha256={other}", f"#egg=x&sha256={one}"], [""]):
        _require_source("only-source", row, say(*fragments), tmp_path)


@pytest.mark.parametrize(
    ("given", "cut", "taken"), [(b"source", 0, True), (b"another", 0, False), (b"source", 3, True)]
)
def test_a_source_release_whose_hash_the_index_gives_apart_is_asked_itself(
    tmp_path: Path, given: bytes, cut: int, *, taken: bool
) -> None:
    """PEP 691: pip's words have the link alone. A file that does not come whole says nothing of its hash."""

    class Index(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(given)))
            self.end_headers()
            self.wfile.write(given[: len(given) - cut])

    row = LockedPackage("1.0", frozenset({sha256(b"source").hexdigest()}))
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        link = f"http://127.0.0.1:{server.server_port}/only_source-1.0.tar.gz"
        said = f"Skipping link: No sources permitted for only-source: {link} (from {link}/simple/)"
        if taken:
            _require_source("only-source", row, said, tmp_path)
        else:
            with pytest.raises(ImageRefused, match=f"another source release .*{sha256(given).hexdigest()}"):
                _require_source("only-source", row, said, tmp_path)
        server.shutdown()


def test_an_index_that_knows_nothing(registry: SmallRegistry, tmp_path: Path) -> None:
    """It answers 404 to everything, as a mirror does whose address is wrong: that is no lock without wheels."""
    write_sources(tmp_path)
    variables = {"PIP_INDEX_URL": f"http://{registry.host}/simple", "PIP_CONFIG_FILE": "/dev/null"}
    with pytest.raises(ImageRefused, match=r"neither a wheel of alpha .*answers 404.*Next step"):
        fetch_wheels(tmp_path / "lock.txt", Machine("3.12", "x86_64", "2.36"), tmp_path / "wheels", variables)


def test_a_link_among_the_caches_is_refused(registry: SmallRegistry, tmp_path: Path) -> None:
    variables, order = order_without_wheels(registry, tmp_path)
    (tmp_path / "jit/cpu/out").symlink_to("/etc")
    with pytest.raises(ImageRefused, match=r"jit/cpu/out is a link"):
        write_small(order, variables)


def test_caches_in_one_archive(registry: SmallRegistry, tmp_path: Path) -> None:
    variables, order = order_without_wheels(registry, tmp_path)
    archive = tmp_path / "cpu.tar"
    archive.write_bytes(os.urandom(100))
    made = write_small(replace(order, jit=archive), variables)
    assert [row.path for row in made.files if row.kind == "jit"] == ["jit/cpu.tar"]
