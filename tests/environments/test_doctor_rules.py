"""The judgement of the doctor on the recorded facts of every host, without a process; and rules that no host shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.images import read_needs
from megacpp_validate.environments.doctor_rules import Difference, Host, Weight, judge_host
from megacpp_validate.environments.fits import TE
from megacpp_validate.environments.plan import find_arch, find_target
from megacpp_validate.evidence.doctor_look import Distribution, PackageLook, PathLook, Wanted
from tests.replay.harness import Ended, differences, read_recording
from tests.replay.hosts import FACTS, _facts, read_doctor

RECORDED = read_recording("doctor")
HOSTS = [name for name in json.loads(FACTS.read_text()) if RECORDED.get(name, {}).get("exit") in (0, 1, 4)]


def read_host(catalog: Catalog, name: str, target: str = "") -> Host:
    facts: dict[str, Any] = dict(_facts()[name])
    path = TypeAdapter(PathLook).validate_json(json.dumps(facts.pop("path")))
    looks = (TypeAdapter(PackageLook).validate_json(json.dumps({"package": key, **row})) for key, row in facts.items())
    modules = [module.id for module in catalog.modules]
    if target or not path.gpu:
        row = find_target(catalog, target or "cpu")
    else:
        row = find_arch(catalog, path.gpu, f"sm_{path.capability.replace('.', '')}", "")
    return Host(path, tuple(looks), tuple(modules), row, None, catalog.pinned, read_needs(catalog))


def with_te(host: Host, **more: Any) -> Host:
    looks = (replace(look, **more) if look.package == TE else look for look in host.packages)
    return replace(host, packages=tuple(looks))


def weights(found: tuple[Difference, ...]) -> list[str]:
    return [f"{one.weight} {one.aspect}" for one in found]


@pytest.mark.parametrize("name", HOSTS)
def test_each_host_is_judged_as_recorded_and_the_worst_comes_first(name: str, catalog: Catalog) -> None:
    host = read_host(catalog, name)
    found = judge_host(host)
    rows = [one.model_dump(mode="json") for one in found]
    data = {"target": host.target.id, "stack": f"{catalog.pinned.id} (pinned)", "differences": rows}
    decided = read_doctor(Ended(0, data, Path(), ""))
    recorded = {key: value for key, value in RECORDED[name].items() if key != "exit"}
    assert not differences({name: recorded}, {name: decided})
    ranks = [list(Weight).index(one.weight) for one in found]
    assert ranks == sorted(ranks)


def test_what_a_target_without_a_gpu_has_no_use_for_breaks_nothing(catalog: Catalog) -> None:
    for name in ("import aborts", "old driver", "two runtimes, TE that throws", "reads tensors wrongly"):
        assert Weight.BREAKS in {one.weight for one in judge_host(read_host(catalog, name))}
        assert {one.weight for one in judge_host(read_host(catalog, name, "cpu"))} <= {Weight.NOTE}


GROUPED = "cublasLtGroupedMatrixLayoutInit_internal"


def test_a_known_need_stands_for_its_missing_symbol(catalog: Catalog) -> None:
    """2.14.1 as it was seen: the symbol and the cuBLAS that lacks it are one finding, the import error another."""
    found = judge_host(read_host(catalog, "2.14.1 as it was seen"))
    assert [one for one in weights(found) if one.startswith("breaks")] == ["breaks import", "breaks library"]
    host = read_host(catalog, "2.14.1 as it was seen")
    (look,) = (look for look in host.packages if look.package == TE)
    lazy = tuple(replace(one, wanted=(Wanted(GROUPED, GROUPED, lazy=True),)) for one in look.extensions)
    newer = with_te(host, version="2.20.2", failure=None, extensions=lazy)
    assert "breaks symbol" not in weights(judge_host(newer))  # 2.20.2 looks at the version before it calls


@pytest.mark.parametrize(("half", "torch_cuda", "count"), [("cu12", "12.8", 0), ("cu13", "13.0", 1), ("", "12.8", 0)])
def test_the_core_library_for_cuda_12_has_no_grouped_layout(
    catalog: Catalog, half: str, torch_cuda: str, count: int
) -> None:
    host = with_te(read_host(catalog, "clean"), version="2.14.1")
    halves = (Distribution(f"transformer-engine-{half}", "2.14.1", "/site"),) if half else ()
    path = replace(host.path, torch_cuda=torch_cuda, distributions=(*halves, *host.path.distributions))
    found = judge_host(replace(host, path=path))
    assert sum("cuBLAS" in one.wanted for one in found) == count
