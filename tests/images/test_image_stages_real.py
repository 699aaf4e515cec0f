"""The stages of GPU targets, built for real without a GPU: small packages stand in for what is compiled.

Run where there is an engine and a base: `eval "$(containers/docker_engine up)"`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.images.build import BuildOrder, Told, build_image
from megacpp_validate.images.build_settings import read_build_settings
from megacpp_validate.images.engine import Engine, NoEngine, find_engine
from tests.images.image_plans import ROOT, read_plans

# Makes a wheel by hand, and says in it what its build was told.
SETUP = """
import json, os, sys, zipfile
assert "bdist_wheel" in sys.argv
place = sys.argv[sys.argv.index("--dist-dir") + 1]
os.makedirs(place, exist_ok=True)
told = {name: value for name, value in os.environ.items() if name.startswith(("DG_", "FLASH_", "MAX_"))}
with zipfile.ZipFile(os.path.join(place, "NAME-1.0-py3-none-any.whl"), "w") as wheel:
    wheel.writestr("NAME.py", f"TOLD = {json.dumps(told)}")
    wheel.writestr("NAME-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: NAME\\nVersion: 1.0\\n")
    wheel.writestr("NAME-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr("NAME-1.0.dist-info/RECORD", "")
"""


@pytest.fixture(scope="module")
def engine() -> Engine:
    if not os.environ.get("MEGACPP_BASE"):
        pytest.skip("not-run: MEGACPP_BASE names no Debian base by digest")
    try:
        return find_engine(os.environ)
    except NoEngine as fault:
        pytest.skip(f"not-run: {fault}")


def make_clone(folder: Path, name: str, subdirectory: str) -> Path:
    place = folder / name / subdirectory
    place.mkdir(parents=True)
    (place / "setup.py").write_text(SETUP.replace("NAME", name))
    return folder / name


def test_what_is_compiled_is_installed_and_was_told_its_variables(
    engine: Engine, catalog: Catalog, tmp_path: Path
) -> None:
    gpu = read_plans(catalog, "h200")[0]
    plan = read_plans(catalog, "cpu", own_base=os.environ["MEGACPP_BASE"])[0]
    sources = {name: value for name, value in gpu.arguments.items() if name.startswith(("FLASH_", "DEEP_GEMM_"))}
    steps = (*plan.steps, "flash_attention_3", "deep_gemm")
    plan = replace(plan, steps=steps, sources=gpu.sources, arguments={**plan.arguments, **sources})
    settings = read_build_settings(os.environ, has_bridge=engine.has_bridge)
    clones = {
        "flash-attention-3": make_clone(tmp_path, "flash_attn_3", "hopper"),
        "deep-gemm": make_clone(tmp_path, "deep_gemm", ""),
    }
    settings = replace(settings, sources=clones, jobs="3")
    order = BuildOrder(plan, tag="stages")
    build_image(engine, order, settings, Told("test", "", ""), ROOT, tmp_path / "build.log", lambda _: None)
    script = (
        "import json, deep_gemm, flash_attn_3; print(json.dumps([deep_gemm.TOLD, flash_attn_3.TOLD, "
        "open('/opt/megacpp/record/built.txt').read()]))"
    )
    done = engine.ask("run", "--rm", "--network", "none", order.name, "python", "-c", script)
    engine.ask("image", "rm", "--force", order.name)
    assert done.returncode == 0, done.stderr
    deep_gemm, flash, record = json.loads(done.stdout)
    assert deep_gemm["DG_FORCE_BUILD"] == "1"
    assert deep_gemm["MAX_JOBS"] == "3"
    assert "DG_JIT_CACHE_DIR" not in deep_gemm, "it would be kept for ever"
    assert flash["FLASH_ATTENTION_DISABLE_FP8"] == "TRUE"
    assert flash["FLASH_ATTENTION_OFFLINE_BUILD"] == "TRUE", "no other nvcc is fetched"
    assert [line.split("/")[-1] for line in record.split("\n")] == [
        "deep_gemm-1.0-py3-none-any.whl", "flash_attn_3-1.0-py3-none-any.whl", "",
    ]  # fmt: skip


STACK = """
FROM {base}
RUN apt-get -qq update \\
    && apt-get -qq install -y --no-install-recommends python3 python3-pip python3-venv python3-six
COPY gone-1.0-py3-none-any.whl /tmp/
RUN pip install --quiet --break-system-packages --no-index /tmp/gone-1.0-py3-none-any.whl
"""


def test_a_base_with_a_stack_is_seen_and_not_written_to(engine: Engine, catalog: Catalog, tmp_path: Path) -> None:
    """As on NGC: its pip serves, its packages are seen, and what an image must not have is taken out by name."""
    plan = read_plans(catalog, "cpu", own_base=os.environ["MEGACPP_BASE"])[0]
    clone = make_clone(tmp_path, "gone", "")
    words = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(tmp_path)]
    subprocess.run(words, cwd=clone, check=True, timeout=60)
    (tmp_path / "Dockerfile").write_text(STACK.format(base=os.environ["MEGACPP_BASE"]))
    network = ("--network", "host") if not engine.has_bridge else ()
    done = engine.ask("buildx", "build", *network, "--tag", "megacpp/base:stack", str(tmp_path), limit_s=600)
    assert done.returncode == 0, done.stderr
    own = {"BASE_IMAGE": "megacpp/base:stack", "SYSTEM_SITE_PACKAGES": "1", "REMOVES": "gone none"}
    plan = replace(plan, arguments={**plan.arguments, **own})
    settings = read_build_settings(os.environ, has_bridge=engine.has_bridge)
    order = BuildOrder(plan, tag="stack")
    build_image(engine, order, settings, Told("test", "", ""), ROOT, tmp_path / "build.log", lambda _: None)
    script = (
        "import six, torch; print(six.__file__, torch.__file__); print(open('/opt/megacpp/record/removed.txt').read())"
    )
    done = engine.ask("run", "--rm", "--network", "none", order.name, "python", "-c", script)
    for name in (order.name, "megacpp/base:stack"):
        engine.ask("image", "rm", "--force", name)
    assert done.returncode == 0, done.stderr
    seen, removed = done.stdout.split("\n", 1)
    assert seen.startswith("/usr/lib/python3/dist-packages/six.py /opt/megacpp/venv/lib/")
    assert removed.strip() == "gone==1.0"
