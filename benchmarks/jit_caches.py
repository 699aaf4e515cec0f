"""What JIT caches save: the first step cold and prewarmed, and what N processes that start together compile.

    python benchmarks/jit_caches.py storm --ranks 1 4 --output docs/benchmarks        # one GPU, shared by the processes
    python benchmarks/jit_caches.py smoke --precisions bf16 delayed --output docs/benchmarks
    python benchmarks/jit_caches.py storm --device cpu --size tiny --ranks 1 4 --output /tmp/figures
    python benchmarks/jit_caches.py tasks --ranks 4 --output docs/benchmarks          # no GPU: what an image compiles
    python benchmarks/jit_caches.py parity --receipts COLD WARM --output docs/benchmarks
    python benchmarks/jit_caches.py page --merge OTHER/jit_caches.json --output docs/benchmarks

storm: processes start their first steps together on one cache root: cold, and prewarmed by the run before; rows with
the guard are of releases whose cold ranks compiled each kernel once, under a lock. smoke: one run of `moe_smoke`'s
small model as a user starts it, on an empty root and again on what that left. tasks: prewarm tasks that need no GPU,
each by N processes at once. parity: receipts of two runs of h200_parity on one root (nox -s h200_parity -- --receipts
FOLDER, with the caches' variables), empty at first. Each verb writes its part of jit_caches.json; `page` writes the
page of all parts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.jit_caches_page import write_page  # noqa: E402
from megacpp_validate.jitcache.layout import cache_variables  # noqa: E402

FIGURES: Final = "jit_caches.json"
STEPS: Final = 6
SECONDS: Final = 240.0  # of a run
_LONG: Final = ("kernels", "phases", "late")  # not for a line of the terminal
_KEYS: Final = {
    "storm": ("ranks", "state", "guard"),
    "smoke": ("precision", "state"),
    "tasks": ("task", "ranks", "state", "guard"),
    "parity": ("probe", "state"),
}
ARCHES: Final = {"h200": "sm_90a", "b200": "sm_100a", "gb10": "sm_121a", "cpu": "cpu"}


def measure_storm(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a number of processes and state."""
    with tempfile.TemporaryDirectory(prefix="jit-", dir=asked.caches) as folder:
        for ranks in asked.ranks:
            root = Path(folder, str(ranks))
            for state in ("cold", "prewarmed"):
                yield row_of(start_ranks(asked, ranks, root), ranks, state, "without")
            if asked.rehearse:
                receipts = start_ranks(asked, ranks, root, words=("--rehearse",))
                yield row_of(receipts, ranks, "prewarmed, rehearsed", "without")
            if asked.profile:
                receipts = start_ranks(asked, ranks, root, words=("--profile",))
                print("\n".join(receipts[0]["profile"]), flush=True)


def start_ranks(
    asked: argparse.Namespace, ranks: int, root: Path, *, words: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """What each process left; ends with words where one failed."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    environment = environment_for(root, asked.target, _cores(ranks))
    command = [
        sys.executable, "-m", "benchmarks.jit_caches_rank", "--ranks", str(ranks), "--port", str(store.port),
        "--device", asked.device, "--target", asked.target, "--size", asked.size, "--steps", str(asked.steps),
        *words,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="jit-ranks-") as folder, ExitStack() as stack:
        places = [Path(folder, str(rank)) for rank in range(ranks)]
        logs = [stack.enter_context(place.with_suffix(".log").open("wb")) for place in places]
        processes = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--output", str(places[rank].with_suffix(".json"))],
                stdout=logs[rank], stderr=subprocess.STDOUT, env=environment, cwd=ROOT,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        wait_for(processes)
        for rank, place in enumerate(places):
            if not place.with_suffix(".json").exists():
                said = place.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
                sys.exit(f"not-run: process {rank} of {ranks} left nothing:\n{said[-4000:]}")
        return [json.loads(place.with_suffix(".json").read_text(encoding="utf-8")) for place in places]


def wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or for so long."""
    try:
        for process in processes:
            process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"not all processes ended within {SECONDS:g} s\n")
    finally:
        for process in processes:
            process.kill()
            process.wait()


# Without a GPU, for a named architecture: settings of one task each, as matrix/prewarm.toml has them.
TASKS: Final = {
    "inductor_cpu": ("cpu", {"rows": "64", "width": "32"}),
    "triton": ("sm_90a", {"kernels": "residual_norm rotation moe_rows block_casts", "sizes": "small"}),
    "fa4": ("sm_90a", {"head_dim": "64", "heads": "8", "groups": "2", "causal": "true"}),
}


def measure_tasks(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a task and state: N processes that are given the same task at once."""
    with tempfile.TemporaryDirectory(prefix="jit-", dir=asked.caches) as folder:
        for code in asked.codes:
            for ranks in asked.ranks:
                for state in ("cold", "prewarmed"):
                    place = Path(folder, f"{code}-{ranks}")
                    row = {"task": code, "ranks": ranks, "state": state, "guard": "without"}
                    yield row | run_tasks(code, ranks, place)


def run_tasks(code: str, ranks: int, root: Path) -> dict[str, Any]:
    """What N processes compiled; ends with words where one could not."""
    arch, settings = TASKS[code]
    order = json.dumps({"task": code, "code": code, "arch": arch, "settings": settings, "root": str(root)})
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    given = {**os.environ, "PYTHONPATH": path, **cache_variables(root.absolute(), arch)}

    def run(_: int) -> dict[str, Any]:
        ended = subprocess.run(
            [sys.executable, "-m", "megacpp_validate.jit"], input=order, check=False, capture_output=True, text=True,
            env={**given, **_cores(ranks)}, timeout=SECONDS,
        )  # fmt: skip
        answer: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
        if why := answer["missing"] or answer["failure"]:
            sys.exit(f"not-run: {code}: {why}")
        return answer

    began, load = time.monotonic(), os.getloadavg()[0]
    with ThreadPoolExecutor(ranks) as pool:
        answers = list(pool.map(run, range(ranks)))
    seen = Counter(one["cached"] for answer in answers for one in answer["compiled"])
    return {
        "compiled": seen[False],
        "hits": seen[True],
        "seconds": time.monotonic() - began,
        "load": load,
        "cores": len(os.sched_getaffinity(0)),
        "versions": answers[0]["versions"],
        "notes": [],
    }


def row_of(receipts: Sequence[Mapping[str, Any]], ranks: int, state: str, guard: str) -> dict[str, Any]:
    """Compiles and hits in sum over the processes; times of the slowest."""
    kernels = Counter(map(_key_of, (one for each in receipts for one in each["compiled"])))
    compiled = Counter(one["library"] for each in receipts for one in each["compiled"])
    hits: Counter[str] = Counter()
    for each in receipts:
        hits.update(each["hits"])
    steps = [each["steps"] for each in receipts]
    return {
        "ranks": ranks,
        "state": state,
        "guard": guard,
        "compiled": dict(sorted(compiled.items())),
        "distinct": dict(sorted(Counter(library for library, *_ in kernels).items())),
        "more_than_once": sum(1 for number in kernels.values() if number > 1),
        "hits": dict(sorted(hits.items())),
        "compile_s": sum(one["seconds"] for each in receipts for one in each["compiled"]),
        "started_s": max(each["started_s"] for each in receipts),
        "rehearsed_s": max(each["rehearsed_s"] for each in receipts),
        "first_step_s": max(each["steps"][0] for each in receipts),
        "to_first_step_s": max(each["first_step_s"] for each in receipts),
        "second_step_s": max(each[1] for each in steps),
        "median_step_s": statistics.median(step for each in steps for step in each[1:]),
        "waited_s": 0.0,
        "deep_gemm": receipts[0]["deep_gemm"],
        "unwatched": receipts[0]["unwatched"],
        "notes": [],
        "gpu": receipts[0]["gpu"],
        "torch": receipts[0]["torch"],
        "late": [one for each in receipts for one in each["compiled"]][:40] if state != "cold" else [],
    }


def _key_of(one: Mapping[str, Any]) -> tuple[str, ...]:
    """What makes two compiles the same: the cache's own key, since configurations of one kernel share a name."""
    return one["library"], *((one["looked_for"],) if one["looked_for"] else (one["kernel"], one["shape"]))


def measure_smoke(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The small smoke run as its launcher starts it, on an empty root and on what that left."""
    with tempfile.TemporaryDirectory(prefix="jit-", dir=asked.caches) as folder:
        for precision in asked.precisions:
            root = asked.root or Path(folder, precision)
            states = ("prewarmed",) if asked.root else ("cold", "prewarmed")
            for state in (*states, *(["prewarmed, rehearsed"] if asked.rehearse else [])):
                seen = run_smoke(asked, precision, root, "rehearsed" in state)
                yield {"precision": precision, "state": state, **seen}


def run_smoke(asked: argparse.Namespace, precision: str, root: Path, rehearse: bool) -> dict[str, Any]:
    """One run: seconds of its steps, and what was compiled."""
    order = {
        "size": asked.size, "steps": asked.steps, "precision": precision, "device": asked.device,
        "target": asked.target, "limit_s": SECONDS, "learning_rate": 1e-3, "rehearse": rehearse,
        "folder": tempfile.mkdtemp(prefix="jit-run-", dir=asked.caches),
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "megacpp_validate.training.smoke"], input=json.dumps(order), check=False,
        capture_output=True, text=True, env=environment_for(root, asked.target, _cores(1)), cwd=ROOT,
    )  # fmt: skip
    with suppress(ValueError, IndexError):
        answer = json.loads(ended.stdout.strip().splitlines()[-1])
        if answer["ending"] == "done":
            return row_of_smoke(answer)
        sys.exit(f"not-run: the smoke run ended as {answer['ending']}: {answer['words']}")
    sys.exit(f"not-run: the smoke run left nothing: {(ended.stderr or ended.stdout)[-3000:]}")


def row_of_smoke(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Of rank 0."""
    rank = answer["ranks"][0]
    seconds = [float(step["seconds"]) for step in rank["steps"]]
    compiled = rank["jit"]["compiled"]
    return {
        "first_step_s": seconds[0],
        "second_step_s": seconds[1],
        "median_step_s": statistics.median(seconds[1:]),
        "losses": [float(step["loss"]) for step in rank["steps"][:5]],  # that of step 0 is alike, rehearsed or not
        "whole_s": float(answer["seconds"]),
        "phases": {name: spent / 1e9 for name, spent in rank["goodput"]["phases_ns"].items()},
        "compiled": dict(sorted(Counter(one["library"] for one in compiled).items())),
        "compile_s": sum(one["seconds"] for one in compiled),
        "after_warm_up": [one for one in compiled if one["when"] == "after"],
        "hits": rank["jit"]["hits"],
        "unwatched": rank["jit"]["unwatched"],
        "kernels": compiled[:60],
    }


def measure_parity(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a probe and state, from receipts."""
    for state, folder in zip(("cold", "prewarmed"), asked.receipts, strict=True):
        for place in sorted(folder.glob("*.json")):
            receipt = json.loads(place.read_text(encoding="utf-8"))
            seconds, jit = receipt["seconds"], receipt["jit"]
            if receipt["outcome"] != "pass" or "second-use" not in seconds:
                sys.exit(f"not-run: {place}: {receipt['outcome']}: {receipt['reason']}")
            yield {
                "probe": receipt["probe"],
                "state": state,
                "first_use_s": seconds["probe"],
                "second_use_s": seconds["second-use"],
                "whole_s": seconds["total"],
                "compiled": dict(sorted(Counter(one["library"] for one in jit["compiled"]).items())),
                "hits": jit["hits"],
                "commit": receipt["commit"],
                "gpu": receipt["machine"]["gpu"],
            }


def environment_for(root: Path, target: str, more: Mapping[str, str]) -> dict[str, str]:
    """Every cache below a root of its own."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": path, **cache_variables(root.absolute(), ARCHES[target]), **more}


def _cores(ranks: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}


def write_part(output: Path, part: str, rows: list[dict[str, Any]]) -> None:
    """Put rows into the figures, in the place of those that measured the same, and write the page anew."""
    output.mkdir(parents=True, exist_ok=True)
    place = output / FIGURES
    figures: dict[str, Any] = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    figures["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    names = _KEYS[part]
    new = {tuple(row[name] for name in names) for row in rows}
    kept = [row for row in figures.get(part, ()) if tuple(row[name] for name in names) not in new]
    figures[part] = sorted(kept + rows, key=lambda row: str(row[names[0]]))
    place.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    place.with_suffix(".md").write_text(write_page(figures), encoding="utf-8")


def main() -> None:
    """One verb."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("storm", "smoke", "tasks", "parity", "page"))
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of figures and page")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--target", default="", help="h200 without it, or cpu with that device")
    parser.add_argument("--size", default="small")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--precisions", nargs="+", default=["bf16"])
    parser.add_argument("--codes", nargs="+", choices=tuple(TASKS), default=list(TASKS), help="tasks: which")
    parser.add_argument("--caches", type=Path, help="folder of the cache roots; a temporary one without it")
    parser.add_argument("--root", type=Path, help="smoke: a root that is prewarmed already")
    parser.add_argument("--merge", type=Path, help="page: figures of another machine, to be put beside those of output")
    parser.add_argument("--receipts", type=Path, nargs=2, help="parity: of the cold run and of the one after it")
    parser.add_argument("--rehearse", action="store_true", help="once more, with a pass before step 0")
    parser.add_argument(
        "--profile", action="store_true", help="storm: print the first step on warm caches, by function"
    )
    asked = parser.parse_args()
    asked.target = asked.target or ("cpu" if asked.device == "cpu" else "h200")
    if asked.verb == "page":
        given = json.loads((asked.merge or asked.output / FIGURES).read_text(encoding="utf-8"))
        for part in set(given) & set(_KEYS):
            write_part(asked.output, part, given[part])
        return
    measures = {
        "storm": measure_storm, "smoke": measure_smoke, "tasks": measure_tasks, "parity": measure_parity
    }  # fmt: skip
    measure = measures[asked.verb]
    for row in measure(asked):  # each is kept at once: a run that is cut short loses the rest only
        print(json.dumps({name: value for name, value in row.items() if name not in _LONG}), flush=True)
        write_part(asked.output, asked.verb, [row])
    print((asked.output / FIGURES).with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
