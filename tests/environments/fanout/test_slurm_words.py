"""What Slurm is told and what it answers, and the settings of a site."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megacpp_validate.environments.fanout.cluster import Cluster, ClusterInvalid, read_cluster
from megacpp_validate.environments.fanout.faults import name_fault
from megacpp_validate.environments.fanout.launcher import (
    BATCH_LOG,
    JobRefused,
    Phase,
    SchedulerAbsent,
    SchedulerDown,
    Seen,
    Try,
    Work,
)
from megacpp_validate.environments.fanout.pyxis import PyxisEnvironment, has_pyxis, name_for_enroot, open_pyxis
from megacpp_validate.environments.fanout.slurm import SlurmLauncher
from megacpp_validate.environments.fanout.slurm_words import (
    choose_options,
    is_for_later,
    is_not_there,
    read_account,
    read_queue,
    render_script,
)
from megacpp_validate.environments.interpreter import InterpreterEnvironment
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.process import NotStarted, Processes

DIGEST = "sha256:" + "a" * 64
SITE = """
retries = 3
poll_s = 2
[all]
partition = "gpu"
account = "team"
extra = ["--exclusive"]
[target.h200]
constraint = "h200&nvlink"
gres = "gpu:h200:{gpus}"
minutes = 45
"""


def asked(cluster: Cluster, target: str, gpus: int, limit_s: float = 900) -> set[str]:
    name, folder = "cell.run.1", Path("/shared/a b")
    return set(choose_options(cluster, target=target, gpus=gpus, limit_s=limit_s, name=name, folder=folder))


def settings(folder: Path, text: str) -> Path:
    path = folder / "site.toml"
    path.write_text(text)
    return path


def test_what_a_site_says_is_what_slurm_is_told(tmp_path: Path) -> None:
    cluster = read_cluster(settings(tmp_path, SITE))
    plain = {
        "--parsable", "--no-requeue", "--job-name=cell.run.1", "--nodes=1", "--ntasks=1", "--chdir=/shared/a b",
        f"--output={BATCH_LOG}", "--export=ALL", "--open-mode=truncate",
    }  # fmt: skip
    assert asked(Cluster(), "cpu", 0) == plain | {"--time=30"}
    assert asked(Cluster(), "h200", 4, 3600) == plain | {"--time=75", "--gres=gpu:4"}
    more = {"--partition=gpu", "--account=team", "--exclusive"}
    assert asked(cluster, "cpu", 0) == plain | more | {"--time=30"}
    assert asked(cluster, "h200", 2) == plain | more | {
        "--constraint=h200&nvlink", "--gres=gpu:h200:2", "--time=45",
    }  # fmt: skip
    assert (cluster.retries, cluster.poll_s) == (3, 2.0)


def test_every_fault_of_a_sites_settings_is_named_at_once(tmp_path: Path) -> None:
    text = '[all]\npartition = "a b"\nqueue = "x"\nextra = ["oops"]\n[target.h200]\ngres = "gpu:{n}"\n'
    with pytest.raises(ClusterInvalid) as refused:
        read_cluster(settings(tmp_path, text))
    for said in ("4 fault(s)", "all.partition", "all.queue", "all.extra.0", "target.h200.gres"):
        assert said in str(refused.value)
    with pytest.raises(ClusterInvalid, match=r"all\.extra: --output=x is set by this tool itself"):
        read_cluster(settings(tmp_path, '[all]\nextra = ["--output=x"]\n'))
    with pytest.raises(ClusterInvalid, match="cannot be read"):
        read_cluster(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "text",
    ["client_s = inf", "poll_s = nan", f"grace_s = 1{'0' * 400}", f"start_minutes = 1{'0' * 400}",
     f"[all]\nminutes = 1{'0' * 400}"],
)  # fmt: skip
def test_a_time_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ClusterInvalid, match=text.partition(" =")[0].rpartition("\n")[2]):
        read_cluster(settings(tmp_path, text))


def test_the_script_is_one_that_a_shell_takes() -> None:
    script = render_script(Path("/shared/it's here"), "/opt/py thon")
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
    assert script.endswith(
        "exec '/opt/py thon' -P -u -m megacpp_validate.environments.fanout.one_cell '/shared/it'\"'\"'s here/job'\n"
    )


@pytest.mark.parametrize("name", ["100%", "a%j", "a\\x", "a\\%j", "a [1],'b"])
def test_a_path_that_slurm_would_take_for_a_pattern_is_kept_from_it(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    options = choose_options(Cluster(), target="cpu", gpus=0, limit_s=60, name="JOB", folder=folder)
    (output,) = (option.removeprefix("--output=") for option in options if option.startswith("--output="))
    # Slurm puts the folder of a relative output before it, and reads the whole as a pattern.
    assert not {"%", "\\"} & set(str(folder / output))
    script = render_script(folder, "/nowhere/python")
    done = subprocess.run(["sh"], input=script, cwd=folder, capture_output=True, text=True, check=False)
    said = done.stderr if output == BATCH_LOG else (folder / BATCH_LOG).read_text()
    assert "/nowhere/python" in said


def test_the_queue_is_read() -> None:
    seen = read_queue("7|a.r.1|PENDING||Resources\n8|b.r.1|NODE_FAIL|n1|NodeDown\n9|c|RUNNING|n0|None\nnoise\n")
    assert seen["a.r.1"] == Seen(Phase.QUEUED, "PENDING", "Resources", "", "7")
    assert seen["b.r.1"] == Seen(Phase.OVER, "NODE_FAIL", "NodeDown", "n1", "8")
    assert seen["c"].phase is Phase.RUNS
    refused = "2|a.r.2|FAILED||BadConstraints", "10|a.r.2|RUNNING|n0|None"
    for lines in (refused, refused[::-1]):  # in whatever order they are listed
        assert read_queue("\n".join(lines))["a.r.2"].id == "10"
    told = read_account("7|a.r.1|CANCELLED by 1000|n1|None\n8|b|COMPLETED|None assigned|None\n")
    assert (told["a.r.1"].word, told["a.r.1"].phase, told["a.r.1"].id) == ("CANCELLED", Phase.OVER, "7")
    assert told["b"].node == ""


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("NODE_FAIL", "node-fail"), ("CANCELLED by 0", "cancelled"), ("PREEMPTED", "preempted"),
        ("TIMEOUT", "job-time-limit"), ("OUT_OF_MEMORY", "out-of-memory"), ("FAILED", "no-receipt"),
    ],
)  # fmt: skip
def test_faults_have_names(word: str, name: str, tmp_path: Path) -> None:
    (tmp_path / BATCH_LOG).write_text("slurmstepd-n1: error: *** JOB 2 ON n1 CANCELLED AT 20 ***\nno such file\n")
    fault = name_fault(Seen(Phase.OVER, word, node="n1"), tmp_path)
    assert fault.name == name
    assert fault.says.endswith("(node n1); its last words: no such file")


@pytest.mark.parametrize(
    ("said", "not_there", "later"),
    [
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", 1, 0),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", 1, 0),
        ("squeue: fatal: Could not establish a configuration source", 1, 0),
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", 0, 0),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Job violates accounting/QOS policy", 0, 1),
        ("sbatch: error: AssocMaxSubmitJobLimit", 0, 1),
    ],
)
def test_a_silent_controller_a_full_queue_and_a_refused_job_are_told_apart(
    said: str, not_there: int, later: int
) -> None:
    assert (is_not_there(said), is_for_later(said)) == (bool(not_there), bool(later))


def tools(folder: Path, **scripts: str) -> dict[str, str]:
    """Variables whose PATH has these tools, and what a shell needs."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def launcher(folder: Path, client_s: float = 10.0, **scripts: str) -> SlurmLauncher:
    return SlurmLauncher(Cluster(client_s=client_s), tools(folder, **scripts))


def test_tools_that_are_absent_slow_or_wrong_are_told(tmp_path: Path) -> None:
    attempt = Try("cell.run.1", "7", tmp_path / "attempt")
    order = Order("a", "te1", Target("cpu", ""), "native")
    work = Work(order, InterpreterEnvironment(("python3",), {}), 60.0, 0)
    nobody = SlurmLauncher(Cluster(), {"PATH": str(tmp_path)})
    with pytest.raises(SchedulerDown, match="no Slurm here: squeue is not on the PATH"):
        nobody.look([attempt])
    with pytest.raises(SchedulerDown, match=r"nothing within 0\.2 s"):
        launcher(tmp_path, 0.2, squeue="exec sleep 20").look([attempt])
    with pytest.raises(SchedulerDown, match="nothing within"):
        launcher(tmp_path, 0.2, sbatch="exec sleep 20").submit(work, attempt)
    with pytest.raises(JobRefused, match="sbatch refused a job: error: invalid partition"):
        launcher(tmp_path, sbatch="echo error: invalid partition >&2; exit 1").submit(work, attempt)
    # Slurm's own accounts are switched off, or slow: what the queue has forgotten is gone.
    for sacct in ("echo Slurm accounting storage is disabled >&2; exit 1", "exec sleep 20"):
        seen = launcher(tmp_path, 0.2, squeue="true", sacct=sacct).look([attempt])
        assert seen["cell.run.1"].phase is Phase.GONE
    told = launcher(tmp_path, squeue="true", sacct="echo '7|cell.run.1|NODE_FAIL|n3|None'").look([attempt])
    assert (told["cell.run.1"].word, told["cell.run.1"].node) == ("NODE_FAIL", "n3")
    assert launcher(tmp_path, sbatch="echo '12;cluster'").submit(work, attempt) == "12"


def test_a_job_that_sbatch_took_is_never_called_refused_whatever_else_a_site_says(tmp_path: Path) -> None:
    attempt = Try("cell.run.1", "", tmp_path / "attempt")
    work = Work(Order("a", "te1", Target("cpu", ""), "native"), InterpreterEnvironment(("python3",), {}), 60.0, 0)
    notice = "echo Your project has used 90 % of its hours"
    assert launcher(tmp_path, sbatch=f"{notice}; echo 12; {notice}").submit(work, attempt) == "12"
    there = launcher(tmp_path, sbatch=notice, squeue="echo '34|cell.run.1|PENDING||None'")
    assert there.submit(work, attempt) == "34"  # found by its name
    with pytest.raises(SchedulerDown, match="told no number of it: Your project"):
        launcher(tmp_path, sbatch=notice, squeue="true").submit(work, attempt)
    (tmp_path / "squeue").unlink()
    with pytest.raises(SchedulerDown) as silent:  # it may have taken the job: its name stays known
        SlurmLauncher(Cluster(), {"PATH": str(tmp_path)}).submit(work, attempt)
    assert not isinstance(silent.value, SchedulerAbsent)
    (tmp_path / "sbatch").unlink()
    with pytest.raises(SchedulerAbsent):
        SlurmLauncher(Cluster(), {"PATH": str(tmp_path)}).submit(work, attempt)


def test_a_node_is_avoided_where_there_is_another(tmp_path: Path) -> None:
    attempt = Try("cell.run.2", "", tmp_path / "attempt", ("n1", "n2"))
    work = Work(Order("a", "te1", Target("cpu", ""), "native"), InterpreterEnvironment(("python3",), {}), 60.0, 0)
    seen = tmp_path / "seen"
    taken = launcher(tmp_path, sbatch=f'echo "$*" >> {seen}; echo 7')
    assert taken.submit(work, attempt) == "7"
    assert "--exclude=n1,n2" in seen.read_text()
    only = 'case "$*" in *--exclude*) echo Requested node configuration is not available >&2; exit 1;; esac; echo 8'
    assert launcher(tmp_path, sbatch=only).submit(work, attempt) == "8"


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (f"nvcr.io/nvidia/pytorch@{DIGEST}", f"nvcr.io#nvidia/pytorch:{DIGEST}"),
        (f"localhost:5000/a/b@{DIGEST}", f"localhost:5000#a/b:{DIGEST}"),
        (f"team/image:tag@{DIGEST}", f"team/image:{DIGEST}"),
        (f"ubuntu@{DIGEST}", f"ubuntu:{DIGEST}"),
    ],
)
def test_a_pinned_image_in_enroots_words(image: str, said: str) -> None:
    assert name_for_enroot(image) == said


def test_a_container_of_the_scheduler_is_a_step_of_the_job(tmp_path: Path) -> None:
    """`srun` here does what pyxis would: it drops its own options, and runs the rest."""
    srun = 'while case "$1" in --*) true;; *) false;; esac; do echo "$1" >> "$0.seen"; shift; done; exec "$@"'
    variables = {**tools(tmp_path, srun=srun), "PYTHONPATH": "/of/the/host", "SLURM_CPUS_PER_TASK": "3"}
    environment = open_pyxis(f"nvcr.io/nvidia/pytorch@{DIGEST}", "python3", variables)
    assert "PYTHONPATH" not in environment.variables
    share = tmp_path / "share"
    share.mkdir()
    call = environment.call("this", "1", shares=(share,))
    # The module is no matter here: -c in its place, to see the variables.
    words = (*call.words[: call.words.index("-P")], "-c", "import os; print(os.environ['PYTHONPATH'])")
    ended = Processes().run(
        type(call)(words, call.variables, not_started=call.not_started), folder=share, limit_s=20, log=tmp_path / "log"
    )
    assert (ended.code, ended.words) == (0, "/opt/megacpp-validate\n")
    seen = (tmp_path / "srun.seen").read_text().split()
    assert f"--container-image=nvcr.io#nvidia/pytorch:{DIGEST}" in seen
    assert "--cpus-per-task=3" in seen
    assert f",{share}:{share}" in "".join(seen)


def test_an_image_that_cannot_be_pulled_is_no_fault_of_the_cell(tmp_path: Path) -> None:
    variables = tools(tmp_path, srun="echo pyxis: failed to import docker image >&2; exit 1")
    environment = PyxisEnvironment(f"a/b@{DIGEST}", "python3", variables)
    with pytest.raises(NotStarted, match="failed to import"):
        Processes().run(environment.call("this", shares=(tmp_path,)), folder=tmp_path, limit_s=20, log=tmp_path / "l")
    with pytest.raises(OSError, match="a name has a space, a comma or a colon"):
        environment.call("this", shares=(tmp_path / "a,b",))


def test_the_plugin_is_where_srun_lists_it(tmp_path: Path) -> None:
    assert has_pyxis(tools(tmp_path, srun="echo '  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'"))
    assert not has_pyxis(tools(tmp_path, srun="echo usage"))
    assert not has_pyxis({"PATH": str(tmp_path / "none")})
