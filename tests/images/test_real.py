"""A tiny image built, signed, verified, bundled and restored by the real programs: no double stands for any of them.

Needs Docker Engine with buildx, a registry on 127.0.0.1:5000 (`containers/docker_engine up` starts both), cosign, syft.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.errors import NoEnvironment
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.images.build import Engine, bake, find_engine
from megacpp_validate.images.bundle import BundleOptions, BundleResult, write_bundle
from megacpp_validate.images.plan import ImagePlan, ImageRows, name_image
from megacpp_validate.images.supply import run_cosign, sign_image, verify_image
from megacpp_validate.images.tools import call, find_program, read_digest
from megacpp_validate.process import Ended
from tests.images.test_bundle import make_project

REGISTRY = os.environ.get("MEGACPP_TEST_REGISTRY", "127.0.0.1:5000")
RECIPE = "ARG BASE_IMAGE\nFROM ${BASE_IMAGE} AS image\nCOPY matrix/site /site\n"


@dataclass(frozen=True)
class Site:
    """A project with one wheel, whose image is in a real registry, signed."""

    root: Path
    engine: Engine
    variables: dict[str, str]
    rows: ImageRows
    image: str
    base: str

    def ask(self, *words: str) -> Ended:
        return call([self.engine.docker, *words], self.engine.variables)

    def bake(self, tag: str, plan: ImagePlan | None = None) -> str:
        """Build and push; the image by its digest."""
        name, log = name_image("cpu", f"{REGISTRY}/tests{self.root.name}", tag), self.root / "log"
        chosen = plan or self.rows.plan("cpu", self.base)
        digest = bake(self.engine, chosen, name, self.root, log, push=True)
        return f"{name.rpartition(':')[0]}@{digest}"

    def verify(self, name: str) -> dict[str, str]:
        """Each check that does not pass -> what it reports."""
        verdict = verify_image(self.rows, self.image, self.root / f"{name}.pub", base=self.base)
        return {one.name: one.says for one in verdict.checks if one.outcome is not Outcome.PASS}


def require_tools() -> Engine:
    for name in ("cosign", "syft"):
        if find_program(name, os.environ) is None:
            pytest.skip(f"not-run: {name} is missing")
    try:
        with urllib.request.urlopen(f"http://{REGISTRY}/v2/", timeout=5):
            return find_engine(os.environ)
    except (NoEnvironment, OSError) as fault:
        pytest.skip(f"not-run: no Docker Engine with a registry at {REGISTRY}: {fault}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    engine = require_tools()
    root = tmp_path_factory.mktemp(f"real{time.time_ns()}")
    make_project(root)
    shutil.unpack_archive(root / "shelf/alpha-1.0-py3-none-any.whl", root / "matrix/site", "zip")
    (root / "containers/Dockerfile").write_text("FROM scratch\nCOPY pyproject.toml /\n")
    base = f"{REGISTRY}/tests{root.name}/base"
    words = ("buildx", "build", "--push", "--provenance=false", "--tag", base, "--file", "containers/Dockerfile", ".")
    assert call([engine.docker, *words], os.environ, limit_s=300, folder=root).code == 0
    digest = read_digest(f"{base}:latest", os.environ)
    (root / "containers/Dockerfile").write_text(RECIPE)
    variables = {**os.environ, "COSIGN_PASSWORD": "right", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(root / "shelf")}
    variables.pop("MEGACPP_REGISTRY_MIRROR", None)
    rows = ImageRows(read_catalog(root / "matrix"), variables)
    made = Site(root, engine, variables, rows, "", f"{base}@{digest}")
    for name in ("one", "other"):
        run_cosign(variables, "generate-key-pair", "--output-key-prefix", str(root / name))
    image = made.bake("real")
    sign_image(rows, image, root / "one.key", lambda _: None)
    return replace(made, image=image)


@pytest.fixture(scope="module")
def written(site: Site) -> BundleResult:
    keys = {"key": site.root / "one.pub", "sign_key": site.root / "one.key", "jit": site.root / "jit"}
    return write_bundle(site.rows, BundleOptions("cpu", site.image, site.root / "bundle", **keys), lambda _: None)


def restore(bundle: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`restore.py` in a network of its own, where that is allowed: nothing but the engine's socket answers there."""
    alone = ["unshare", "--net"] if os.geteuid() == 0 and shutil.which("unshare") else []
    command = [*alone, sys.executable, "-I", "-S", str(bundle / "restore.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_a_signed_image_is_verified_and_another_key_is_not(site: Site) -> None:
    assert site.verify("one") == {}
    assert set(site.verify("other")) == {"signature", "sbom"}
    sign_image(site.rows, site.image, site.root / "other.key", lambda _: None)
    assert site.verify("one") == site.verify("other") == {}  # a second signer takes nothing of the first away


def test_a_build_that_fails_sets_no_tag(site: Site) -> None:
    file = site.root / "containers/Dockerfile"
    file.write_text(f"{RECIPE}COPY matrix/nowhere /\n")
    try:
        with pytest.raises(NoEnvironment, match="nowhere"):
            site.bake("broken")
    finally:
        file.write_text(RECIPE)
    assert site.ask("buildx", "imagetools", "inspect", f"{site.image.partition('@')[0]}:broken").code
    assert not site.ask("buildx", "imagetools", "inspect", f"{site.image.partition('@')[0]}:real").code


def test_a_bundle_restores_with_no_network(site: Site, written: BundleResult) -> None:
    bundle, digest = Path(written.folder), site.image.partition("@")[2]
    assert written.absent == {}
    key = ("--key", str(site.root / "one.pub"), "--id", written.id)
    names = [line.split()[0] for line in site.ask("image", "ls", "--quiet", "--no-trunc").words.splitlines()]
    for name in {*names} & {digest}:
        site.ask("image", "rm", "--force", name)
    done = restore(bundle, *key, "--load", "--jit", str(site.root / "restored"))
    assert (done.returncode, digest in done.stdout) == (0, True), done
    name = f"{site.image.partition('@')[0]}:cpu-{digest[7:19]}"
    assert site.ask("image", "inspect", "--format", "{{.Id}}", name).words.strip() == digest
    assert (site.root / "restored/cpu/manifest.json").is_file()
    copied = f"{REGISTRY}/copies/{site.root.name}"
    done = restore(bundle, *key, "--push", copied)
    assert done.returncode == 0, done
    verdict = verify_image(site.rows, f"{copied}@{digest}", site.root / "one.pub", base=site.base)
    assert verdict.exit == 0, verdict  # digest, signature, SBOM and provenance came along
