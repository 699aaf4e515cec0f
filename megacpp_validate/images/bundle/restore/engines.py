"""An image of a bundle into an engine or a registry, and its wheels into a virtual environment: with no network."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .folders import NotTaken
from .listing import Refused
from .reading import CHUNK, Whole

LOOPBACK = ("127.", "localhost", "[::1]")  # a registry here speaks HTTP, as docker takes it to
DONE = "restored-from.json"


def find_image(bundle: dict[str, Any]) -> dict[str, Any]:
    """The row of the image's archive.

    Raises:
        NotTaken: the bundle holds none.
    """
    for row in bundle["files"]:
        if row["kind"] == "image":
            found: dict[str, Any] = row
            return found
    raise NotTaken("the bundle holds no image. Next step: leave --load and --push out.")


def find_docker() -> str:
    """The engine's client, whose engine answers.

    Raises:
        NotTaken: there is none, or it does not.
    """
    docker = shutil.which("docker")
    if docker is None:
        raise NotTaken(
            "there is no docker on PATH, so the image was not loaded. Next step: install Docker Engine, or take --push "
            "REGISTRY/REPOSITORY or --unpack FOLDER, whose image.tar is an OCI archive."
        )
    done = subprocess.run([docker, "version"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotTaken(
            f"the engine does not answer: {done.stderr.strip()[-300:]}. Likely cause: it does not run, or is not "
            "yours. Next step: `docker info` says more; then run this again."
        )
    return docker


def load_image(root: Path, bundle: dict[str, Any]) -> str:
    """Give the archive to `docker load`, and ask the engine for the digest of what it has now.

    Raises:
        NotTaken: there is no engine, it does not take it, or what it has then is not the image of the bundle.
    """
    image, row, docker = bundle["image"], find_image(bundle), find_docker()
    known = (image["digest"], *image["configs"])
    if _ask_engine(docker, image["name"]) in known:
        return f"{image['name']} ({image['digest']}) is in the engine already"
    with (
        Whole(root, row) as stream,
        subprocess.Popen(
            [docker, "load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its own words say why
            shutil.copyfileobj(stream, process.stdin, CHUNK)
        said = process.communicate()[0].decode(errors="replace").strip()
    if process.returncode:
        raise NotTaken(
            f"docker load failed ({process.returncode}): {said[-600:]}. Likely cause: the engine does not run, is not "
            "yours, or its disk is full. Next step: `docker info` and `docker system df` say more; then run this again."
        )
    found = _ask_engine(docker, image["name"])
    if found not in known:
        raise NotTaken(
            f"the engine has {found or 'nothing'} as {image['name']}, and the bundle holds {image['digest']}. Likely "
            "cause: another process gave that name away meanwhile. Next step: remove that image and run this again."
        )
    how = "by this digest" if found == image["digest"] else f"as {found}: this engine keeps images by their config"
    return f"loaded {image['name']} ({image['digest']}), {how}"


def _ask_engine(docker: str, name: str) -> str:
    words = [docker, "image", "inspect", "--format", "{{.Id}}", name]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def push_image(root: Path, bundle: dict[str, Any], place: str) -> str:
    """Put the image and its signatures into a registry, every digest as it is.

    Args:
        root, bundle: the folder, and its manifest.
        place: `HOST[:PORT]/REPOSITORY`.

    Raises:
        NotTaken: the registry does not answer, or does not take it.
        Refused: the archive has not all that the image is made of.
    """
    host, _, repository = place.partition("/")
    image = bundle["image"]
    signatures = root / "signatures"
    rows = _read_signatures(signatures)  # before anything is sent
    with Whole(root, find_image(bundle)) as stream, tarfile.open(fileobj=io.BufferedReader(stream, CHUNK)) as archive:
        blobs = {member.name.rpartition("/")[2]: member for member in archive if member.name.startswith("blobs/")}

        def read(digest: str) -> Any:
            return archive.extractfile(blobs[digest.partition(":")[2]])

        if lost := sorted(_find_lost(image["digest"], blobs, read)):
            raise Refused(
                f"{root} is refused:\n  image.tar: does not hold {', '.join(lost[:3])}, of which the image is made\n"
                "Nothing was pushed. Likely cause: the bundle was changed by hand, or put together by another tool. "
                "Next step: write it again."
            )
        registry = _Registry(host, repository)
        registry.push({"digest": image["digest"]}, read, (image["name"].rpartition(":")[2],))
    for row, tag in rows:
        registry.push(row, lambda digest: (signatures / "blobs/sha256" / digest.partition(":")[2]).open("rb"), (tag,))
    return f"pushed {place}@{image['digest']}; {registry.sent} blobs sent, {registry.kept} were there"


def _find_lost(digest: str, blobs: dict[str, Any], read: Any) -> set[str]:
    """What a manifest leads to and the archive has not."""
    if digest.partition(":")[2] not in blobs:
        return {digest}
    manifest = json.loads(read(digest).read())
    below = (manifest["config"], *manifest["layers"]) if "layers" in manifest else ()
    lost = {row["digest"] for row in below if row["digest"].partition(":")[2] not in blobs}
    return lost.union(*(_find_lost(child["digest"], blobs, read) for child in manifest.get("manifests", ())))


def _read_signatures(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """What the index of an OCI layout leads to, with its tag; nothing where there are no signatures."""
    if not folder.is_dir():
        return []
    try:
        found = json.loads((folder / "index.json").read_bytes())["manifests"]
        rows = [(row, str(row["annotations"]["org.opencontainers.image.ref.name"])) for row in found]
        lost = [row["digest"] for row, _ in rows if not (folder / "blobs/sha256" / row["digest"][7:]).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        lost = [f"{type(fault).__name__}: {fault}"]
    if lost:
        raise NotTaken(
            f"signatures/index.json is no index of an OCI layout ({', '.join(lost)}); nothing was pushed. Likely "
            "cause: the bundle was put together by another tool. Next step: write the bundle again."
        )
    return rows


class _Registry:
    """A repository of a registry that speaks the distribution API."""

    def __init__(self, host: str, repository: str) -> None:
        self.host, self.path = host, f"/v2/{repository}"
        self.sent = self.kept = 0

    def push(self, row: dict[str, Any], read: Any, tags: tuple[str, ...]) -> None:
        """Everything that a manifest leads to, then the manifest itself, by its digest and under tags."""
        digest = row["digest"]
        body = read(digest).read()
        manifest = json.loads(body)
        for child in manifest.get("manifests", ()):
            self.push(child, read, ())
        for blob in (manifest["config"], *manifest["layers"]) if "layers" in manifest else ():
            self._send_blob(blob, read)
        kind = manifest.get("mediaType") or row.get("mediaType") or "application/vnd.oci.image.manifest.v1+json"
        for name in (digest, *tags):
            self._ask("PUT", f"{self.path}/manifests/{name}", (201,), body, {"Content-Type": kind})
        answered = self._ask("HEAD", f"{self.path}/manifests/{digest}", (200,), None, {"Accept": kind})
        if answered not in ("", digest) or f"sha256:{hashlib.sha256(body).hexdigest()}" != digest:
            raise NotTaken(f"{self.host} answers {answered} for {digest}. Next step: ask who runs that registry.")

    def _send_blob(self, blob: dict[str, Any], read: Any) -> None:
        digest = blob["digest"]
        if self._ask("HEAD", f"{self.path}/blobs/{digest}", (200, 404), None, {}) is not None:
            self.kept += 1
            return
        place = self._ask("POST", f"{self.path}/blobs/uploads/", (202,), b"", {}) or ""
        pieces = urlsplit(place)
        path = f"{pieces.path}?{pieces.query + '&' if pieces.query else ''}digest={digest}"
        headers = {"Content-Length": str(blob["size"]), "Content-Type": "application/octet-stream"}
        self._ask("PUT", path, (201,), read(digest), headers)
        self.sent += 1

    def _ask(self, verb: str, path: str, wanted: tuple[int, ...], body: Any, headers: dict[str, str]) -> str | None:
        """Where an upload goes on, or the digest that was answered; None for 404."""
        plain = self.host.startswith(LOOPBACK)
        line: Any = (http.client.HTTPConnection if plain else http.client.HTTPSConnection)(self.host, timeout=600)
        line.blocksize = CHUNK
        try:
            line.request(verb, path, body, headers)
            answer = line.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as fault:
            raise NotTaken(
                f"the registry {self.host} does not answer: {fault}. Likely cause: it does not run, or is reached by "
                "another name. Next step: open its /v2/ by hand, then run this again: what it has is not sent twice."
            ) from fault
        finally:
            line.close()
        if answer.status not in wanted:
            raise NotTaken(
                f"the registry {self.host} answers {answer.status} to {verb} {path}: "
                f"{text[-300:].decode(errors='replace')}. Likely cause: it wants a login, or may not be "
                "written. Next step: --load it, and docker push it."
            )
        if answer.status == 404:
            return None
        return answer.getheader("Location") or answer.getheader("Docker-Content-Digest") or ""


def is_venv_filled(bundle: dict[str, Any], venv: Path, python: str, name: str) -> bool:
    """Whether an environment was finished from this bundle; where it was not, one can be made there.

    Args:
        bundle: its manifest.
        venv: folder for the environment.
        python: the interpreter that it is made with.
        name: of the bundle.

    Raises:
        NotTaken: something else is there, wheels are lacking, or it is another Python.
    """
    if _read_done(venv) == name:
        return True
    if venv.exists() and (not venv.is_dir() or any(venv.iterdir())) and not (venv / ".restoring").exists():
        raise NotTaken(f"{venv} is there and was not made from this bundle. Next step: name another folder.")
    if lacking := bundle["wheels_absent"]:
        raise NotTaken(
            f"the wheelhouse lacks {', '.join(sorted(lacking))}, which are built from source: the image has them. Next "
            "step: take --load."
        )
    script = 'import sys; print("%d.%d" % sys.version_info[:2])'
    version = _run([python, "-c", script], _variables(), "it is no Python").strip()
    if version != bundle["python"]:
        raise NotTaken(
            f"{python} is Python {version}, and the wheels are for {bundle['python']}. Next step: name one with "
            "--python."
        )
    return False


def fill_venv(root: Path, bundle: dict[str, Any], venv: Path, python: str, joined: Path | None, name: str) -> str:
    """Make a virtual environment, and install the wheelhouse into it: no index, every hash that of the lock.

    Args:
        root, bundle: the folder, and its manifest.
        venv: folder for it.
        python: the interpreter that it is made with.
        joined: folder of the wheels that lie in parts; None where none does.
        name: of the bundle: an environment that was finished from it is left as it is.

    Raises:
        NotTaken: as `is_venv_filled`; there is no venv module, or pip refuses a wheel.
    """
    if is_venv_filled(bundle, venv, python, name):
        return f"{venv} has the wheels of this bundle already"
    variables = _variables()
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    (venv / ".restoring").touch()
    _run([python, "-m", "venv", str(venv)], variables, "Debian has venv in a package of its own: python3-venv")
    links = [word for folder in (root / "wheelhouse", joined) if folder for word in ("--find-links", str(folder))]
    how = ("--no-index", *links, "--require-hashes", "--no-deps", "--no-cache-dir", "--quiet")
    words = [str(venv / "bin/python"), "-m", "pip", "install", *how, "--requirement", str(root / "lock.txt")]
    _run(words, variables, "a wheel is for another machine than this")
    (venv / DONE).write_text(json.dumps({"bundle": name, "lock": bundle["lock"]}))
    (venv / ".restoring").unlink()
    return f"installed {sum(row['kind'] == 'wheel' for row in bundle['files'])} wheels into {venv}"


def _variables() -> dict[str, str]:
    """The environment without what would tell Python or pip another place than this."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "PYTHON"))}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def _read_done(venv: Path) -> str:
    """The bundle that an environment was finished from; a note that cannot be read is of none."""
    try:
        said = json.loads((venv / DONE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    return str(said.get("bundle", "")) if isinstance(said, dict) else ""


def _run(words: list[str], variables: dict[str, str], cause: str) -> str:
    try:
        done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    except OSError as fault:
        raise NotTaken(f"{words[0]} cannot be started: {fault}. Next step: name a Python with --python.") from fault
    if done.returncode:
        raise NotTaken(
            f"`{' '.join(words)}` failed: {(done.stderr or done.stdout)[-800:].strip()}. Likely cause: {cause}. Next "
            "step: mend that and run this again."
        )
    return done.stdout
