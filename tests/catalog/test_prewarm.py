"""The tasks of prewarm: the project's own file holds, and every fault of another is named."""

from __future__ import annotations

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.prewarm import read_prewarm
from megacpp_validate.jit.tasks import TASKS


def test_the_projects_own_file(catalog: Catalog) -> None:
    tasks = read_prewarm(catalog).task
    codes = {task.code for task in tasks}
    assert codes == {"inductor_cpu", "fa4", "triton", "expert_rows", "probe", "smoke"}
    probes = {task.cell for task in tasks if task.code == "probe"}
    assert probes == {module.id for module in catalog.modules} - {"imports"}, "imports compiles nothing"
    assert {task.code for task in tasks if not task.is_cell} <= set(TASKS)
    cells = {row.id for row in (*catalog.modules, *catalog.compositions, *catalog.smoke)}
    assert {task.cell for task in tasks if task.is_cell} <= cells


def test_a_cell_that_trains_with_one_scale_a_tensor_has_the_kernels_of_every_routing(catalog: Catalog) -> None:
    """Those recipes cast experts' rows by kernels that are chosen by how many rows the router gave them: on Hopper."""
    every = read_prewarm(catalog).task
    tasks = [task for task in every if "h200" in task.targets]
    assert not any(task.code == "expert_rows" for task in every if "b200" in task.targets)
    cells = {cell.id: cell.settings for cell in catalog.smoke}
    trained = {(cells[task.cell]["size"], cells[task.cell]["precision"]) for task in tasks if task.code == "smoke"}
    swept = {
        (task.settings["size"], recipe)
        for task in tasks
        if task.code == "expert_rows"
        for recipe in task.settings["recipes"].split()
    }
    assert swept == {(size, precision) for size, precision in trained if precision in {"delayed", "current"}} != set()


def test_the_kernels_that_no_cache_keeps(catalog: Catalog) -> None:
    """As the monitor named it on one H200, whose name is cut where a receipt cuts it; the same into BF16 is kept."""
    name = (
        "_ZN18transformer_engine13normalization24rmsnorm_fwd_tuned_kernelINS0_13Kernel_traitsI13__nv_bfloat16S3_13__nv_"
        "fp8_e4m3fjLj512ELj1ELj4ELj1ELj16ENS0_18Kernel_trait"
    )
    rows = read_prewarm(catalog).unkept
    assert any(row.fits("cuda", name, "2.20.2") for row in rows)
    assert not any(row.fits("cuda", name, "2.21.0") for row in rows)
    assert not any(row.fits("cuda", name.replace("13__nv_fp8_e4m3", "S3_"), "2.20.2") for row in rows)
