"""Every stage of containers/Dockerfile for one GPU image, on a base of the same layout: how far it gets, in seconds.

Where only package registries answer, no NGC image can be pulled. `--make-base` builds containers/stand_in/Dockerfile,
which has the interpreter, compilers, libraries, constraint file, variables and users of that base. Then each stage runs
with the committed lock, unchanged; a stage that does not end within `--limit` is stopped, and the page says where.

    eval "$(MEGACPP_ENGINE_BASE=trixie containers/docker_engine up)"
    python -m benchmarks.image_stages --make-base --python DIR --sources DIR --limit 300

Writes docs/benchmarks/image_stages.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.images.build import Engine, find_engine, plan_build
from megacpp_validate.images.plan import ImagePlan, ImageRows
from megacpp_validate.images.tools import call, read_digest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/benchmarks/image_stages.json"
STAND_IN = "127.0.0.1:5000/stand-in"
COMPILED = {"te-build": "TE", "flash-attention-3-build": "FLASH_ATTENTION_3", "deep-gemm-build": "DEEP_GEMM"}
# The last stages once more without what is compiled for hours, so that the steps after it run too.
STAGES = ("system", "packages", *COMPILED, "stack", "jit-build", "image")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def make_base(engine: Engine, python: Path) -> None:
    """Build and push the stand-in base; `python` is the prefix of a Python 3.12."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as settings:
        settings.write("[global]\ntimeout = 180\n")
        settings.flush()
        words = [
            *(
                "buildx",
                "build",
                "--network",
                "host",
                "--allow",
                "network.host",
                "--push",
                "--tag",
                f"{STAND_IN}:26.07",
            ),
            *("--build-arg", f"BASE_IMAGE={os.environ['MEGACPP_BASE']}", "--build-context", f"python={python}"),
            *("--secret", f"id=pip_conf,src={settings.name}", "--secret", f"id=ca_bundle,src={CERTIFICATES}"),
            "containers/stand_in",
        ]
        done = call([engine.docker, *words], engine.variables, limit_s=1800, folder=ROOT)
    if done.code:
        raise SystemExit(f"the stand-in base is not built: {done.last_words}")


def build_stage(engine: Engine, plan: ImagePlan, stage: str, sources: Path | None, limit_s: float) -> dict[str, Any]:
    """One stage, up to its end or the limit: outcome, seconds, and the last lines of its log."""
    name = plan.target
    with tempfile.TemporaryDirectory(prefix="megacpp-stage-") as room:
        words = plan_build(plan, "stage", engine, Path(room))
        file, log = Path(room, "bake.json"), Path(room, "log")
        target = json.loads(file.read_text())["target"][name]
        target |= {"target": stage, "output": ["type=cacheonly"], "attest": [], "no-cache-filter": [stage]}
        for source in plan.sources if sources else ():
            target["contexts"][f"{source}-source"] = str(sources / source)
        if stage not in COMPILED:
            target["args"] |= {argument: f"{step.removesuffix('build')}without" for step, argument in COMPILED.items()}
            target["contexts"] = {key: value for key, value in target["contexts"].items() if key == "wheels"}
        file.write_text(json.dumps({"target": {name: target}}))
        words[2:2] = ["--allow", f"fs.read={sources}"] if sources else []
        started = time.monotonic()
        ended = call(
            ["sh", "-c", 'exec >"$0" 2>&1 "$@"', str(log), engine.docker, *words], engine.variables,
            limit_s=limit_s, folder=ROOT,
        )  # fmt: skip
        seconds = round(time.monotonic() - started, 1)
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    stopped = f"stopped by the limit of {limit_s:g} s"
    outcome = "built" if ended.code == 0 else stopped if seconds >= limit_s else "failed"
    return {"stage": stage, "outcome": outcome, "seconds": seconds, "last": [] if outcome == "built" else lines[-12:]}


def write_page(data: dict[str, Any]) -> None:
    """The JSON and its table in Markdown."""
    PAGE.write_text(json.dumps(data, indent=2) + "\n")
    lines = [
        "<!-- written by benchmarks/image_stages.py -->",
        f"Stages of containers/Dockerfile for {data['target']}, {data['date']}, on the stand-in base "
        f"`{data['base']}` ([its recipe](../../containers/stand_in/Dockerfile)), lock `{data['lock_hash'][:12]}`, "
        f"{os.cpu_count()} cores. Stages after the compiled ones are built "
        "without them. NVIDIA's own image was not used: no registry that has it can be reached.",
        "",
        "| stage | outcome | s | load before | where it ended |",
        "|---|---|---:|---:|---|",
    ]
    for row in data["stages"]:
        last = next((line for line in reversed(row["last"]) if line.startswith("#") and "CANCELED" not in line), "")
        shown = f"`{last[-160:].replace('|', '/')}`" if last else ""
        lines.append(f"| {row['stage']} | {row['outcome']} | {row['seconds']:g} | {row['load']:g} | {shown} |")
    PAGE.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Build the base where asked, then every stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--make-base", action="store_true")
    parser.add_argument("--python", type=Path, help="prefix of a Python 3.12, for --make-base")
    parser.add_argument("--sources", type=Path, help="folder with flash-attention-3 and deep-gemm at their commits")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each stage")
    parser.add_argument("--stages", nargs="*", default=list(STAGES))
    asked = parser.parse_args()
    engine = find_engine(os.environ)
    if asked.make_base:
        make_base(engine, asked.python)
    base = f"{STAND_IN}@{read_digest(f'{STAND_IN}:26.07', os.environ)}"
    plan = ImageRows(read_catalog(), os.environ).plan(asked.target, base)
    head = {"target": plan.target, "date": f"{datetime.now(UTC):%Y-%m-%d}", "base": base, "lock_hash": plan.lock_hash}
    earlier = json.loads(PAGE.read_text())["stages"] if PAGE.is_file() else []
    rows = {row["stage"]: row for row in earlier}
    for stage in asked.stages:
        load = round(os.getloadavg()[0], 2)
        rows[stage] = {**build_stage(engine, plan, stage, asked.sources, asked.limit), "load": load}
        print(json.dumps(rows[stage]), flush=True)
        write_page({**head, "stages": [rows[name] for name in STAGES if name in rows]})


if __name__ == "__main__":
    main()
