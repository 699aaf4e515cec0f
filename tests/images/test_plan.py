"""What would be built: from which digest, with which arguments and labels; what is refused; what bake reads."""

from __future__ import annotations

import re

import pytest

from megacpp_validate.catalog.bridge import Catalog, matrix_folder, read_catalog
from megacpp_validate.errors import WrongArguments
from megacpp_validate.images.build import ImageOptions, plan_all
from megacpp_validate.images.locks import read_image_lock
from megacpp_validate.images.plan import DOCKERFILE, ImagePlan, ImageRows, describe_target
from megacpp_validate.images.tools import ImageRefused, use_mirror
from megacpp_validate.jitcache.layout import cache_variables

ROOT = matrix_folder().parent
DIGEST = "sha256:" + "c" * 64
OWN_BASE = f"127.0.0.1:5000/base@{DIGEST}"
RECIPE = (ROOT / DOCKERFILE).read_text()
ARGUMENTS = set(re.findall(r"^ARG (\w+)", RECIPE, re.MULTILINE))
ROWS = ImageRows(read_catalog(), {})


def read_plans(*targets: str) -> tuple[ImagePlan, ...]:
    """The plans of targets, or of all."""
    return tuple(ROWS.plan(image.target) for image in ROWS.find(targets))


@pytest.fixture(scope="module")
def plans() -> tuple[ImagePlan, ...]:
    return read_plans()


def test_every_target_is_planned(catalog: Catalog) -> None:
    plans = [ROWS.plan(target.id, revision="1234") for target in catalog.targets]
    assert [(one.target, one.cache_arch) for one in plans] == [
        ("h200", "sm_90a"), ("b200", "sm_100a"), ("gb10", "sm_121a"), ("cpu", "cpu"),
    ]  # fmt: skip
    for one, target in zip(plans, catalog.targets, strict=True):
        name, _, digest = one.reference.partition("@")
        assert one.arguments["BASE_IMAGE"] == one.pulled == one.reference
        expected = {
            "org.opencontainers.image.base.digest": digest, "org.opencontainers.image.base.name": name,
            "org.opencontainers.image.revision": "1234", "org.megacpp.lock.sha256": one.lock_hash,
        }  # fmt: skip
        assert expected.items() <= one.labels.items()
        assert one.arguments["LOCK_HASH"] == one.lock_hash
        assert [len(address.partition("#")[2]) for address in one.contexts.values()] == [40] * len(one.sources)
        assert {source.replace("-", "_") for source in one.sources} <= set(one.steps)
        # What a target can do is in its image.
        assert ("fa3" in target.attention) == ("flash-attention-3" in one.sources)
        assert target.deep_gemm == ("deep-gemm" in one.sources)
        if target.arch:  # a build that fetches a wheel which no lock knows is not pinned
            assert "NVTE_PYTORCH_FORCE_BUILD=TRUE" in one.arguments["TRANSFORMER_ENGINE_TORCH_VARIABLES"]


@pytest.mark.parametrize("te", ["2.12.0", "2.14.1", "2.17.1", "2.19.0"])
def test_an_image_a_release(te: str) -> None:
    """The same image with another release: its lock differs in what that release brings, and is as the matrix is."""
    rows = ImageRows(read_catalog(), {}, te)
    planned = plan_all(rows, ImageOptions())
    assert not planned.refused
    *gpu, cpu = planned.plans
    assert [(plan.target, plan.arguments["TE_VERSION"]) for plan in gpu] == [
        (target, te) for target in ("h200", "b200", "gb10")
    ]
    before, after = (read_image_lock(ROOT / one.lock).packages for one in (ROWS.plan("cpu"), cpu))
    assert {name: after[name].version for name in after if before.get(name) != after[name]} == {
        "transformer-engine": te
    }
    for plan, pinned in zip(gpu, read_plans(), strict=False):
        before, after = (read_image_lock(ROOT / one.lock).packages for one in (pinned, plan))
        brought = {name for name in before | after if before.get(name) != after.get(name)}
        assert {"transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"} <= brought
        assert brought <= {"transformer-engine", "transformer-engine-cu13", "transformer-engine-torch",
                           "nvidia-cudnn-frontend"}  # fmt: skip
        assert (plan.reference, plan.contexts, plan.lock_hash != pinned.lock_hash) == (
            pinned.reference, pinned.contexts, True
        )  # fmt: skip
    assert ImageRows(read_catalog(), {}, "2.20.2").plan("h200") == ROWS.plan("h200"), "the pinned release"
    for wrong in ("2.18.9", "latest"):
        with pytest.raises(WrongArguments, match=r"no compiled release.*choose from 2\.19\.0, .*, 2\.12\.0\."):
            ImageRows(read_catalog(), {}, wrong).plan("h200")


def test_a_mirror_stands_in_and_the_digest_stays() -> None:
    one = ImageRows(read_catalog(), {"MEGACPP_REGISTRY_MIRROR": "mirror.invalid:5000/ngc"}).plan("h200")
    assert one.pulled == one.reference.replace("nvcr.io/", "mirror.invalid:5000/ngc/")
    assert one.arguments["BASE_IMAGE"] == one.pulled
    assert "mirror.invalid" not in " ".join(one.labels.values())
    assert use_mirror("docker.io/library/debian", "") == "docker.io/library/debian"


def test_a_base_of_one_s_own() -> None:
    one = ROWS.plan("cpu", OWN_BASE)
    assert (one.base, one.verified, one.arguments["BASE_IMAGE"]) == ("own", "", OWN_BASE)
    assert one.labels["org.opencontainers.image.base.name"] == "127.0.0.1:5000/base"
    assert one.labels["org.opencontainers.image.base.digest"] == DIGEST
    for wrong in ("127.0.0.1:5000/base:bookworm", f"base@{DIGEST[:-1]}"):
        with pytest.raises(ImageRefused, match=r"has no digest.*Next step"):
            ROWS.plan("cpu", wrong)


def test_a_base_is_known_by_its_digest() -> None:
    """A copy under another name has the contents of the row."""
    row = ROWS.images.find_base("ngc-26.08")
    plans = plan_all(ROWS, ImageOptions(("h200",), f"mirror.invalid/copy@{row.digest}"))
    assert ([one.base for one in plans.plans], plans.refused) == ([row.id], ())
    assert {one.why.split()[0] for one in plans.unknown} == {"onnx", "pip", "protobuf"}


# --- what bake reads --------------------------------------------------------------------------------------------------


def test_what_the_recipe_takes_comes_from_somewhere(plans: tuple[ImagePlan, ...]) -> None:
    """An argument that is never given keeps its default for ever, whatever the matrix says."""
    targets = {plan.target: describe_target(plan) for plan in plans}
    for target in targets.values():
        assert re.search(r"@sha256:[0-9a-f]{64}$", target["args"]["BASE_IMAGE"])
        assert set(target["args"]) <= ARGUMENTS
    assert all(re.fullmatch(r"https://\S+\.git#[0-9a-f]{40}", one) for one in targets["h200"]["contexts"].values())
    assert {name for target in targets.values() for name in target["args"]} >= ARGUMENTS - {"JOBS"}
    stages = {
        name: sorted(value for value in row["args"].values() if value.endswith("-build"))
        for name, row in targets.items()
    }
    assert stages["h200"] == ["deep-gemm-build", "flash-attention-3-build", "jit-build", "te-build"]
    assert (stages["gb10"], stages["cpu"]) == (["jit-build", "te-build"], [])
    assert all(stage in RECIPE for stage in stages["h200"])


# --- the recipe itself ------------------------------------------------------------------------------------------------


def test_the_caches_of_the_image_are_where_the_layout_says(plans: tuple[ImagePlan, ...]) -> None:
    said = dict(re.findall(r"^(?:ENV|   ) (\w+)=(\S+)", RECIPE, re.MULTILINE))
    for plan in plans:
        for name, value in cache_variables("/opt/megacpp/jit", plan.cache_arch).items():
            assert said[name].replace("${CACHE_ARCH}", plan.cache_arch) == value, name
