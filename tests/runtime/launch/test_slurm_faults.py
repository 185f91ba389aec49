"""Runs on a real Slurm of four nodes: nodes lost and drained, jobs queued again and resized, and a
slurmd that dies without its tasks. Every run ends with the bits of a run of one worker without a
fault, and with an exact ledger. Each test prints its recovery times (`-s`)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.launched_run import LaunchedRun, undisturbed_tensors
from tests.support.nodes import prepared
from tests.support.slurm_cluster import INSTALL, SlurmCluster, is_installed, slurm_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed(), reason=INSTALL)]
STEPS, FIRST = 400, 3
ALL = {"n1", "n2", "n3", "n4"}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("slurm-runs"))


@pytest.fixture(scope="module")
def undisturbed(run_file: Path) -> dict[str, bytes]:
    return undisturbed_tensors(run_file, STEPS)


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with slurm_of(4) as found:
        yield found


@pytest.fixture
def run(cluster: SlurmCluster, run_file: Path, tmp_path: Path) -> LaunchedRun:
    return LaunchedRun(cluster, run_file, tmp_path / "run", STEPS)


def report(what: str, **seconds: float) -> None:
    print(f"\n{what}: " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))


@pytest.mark.parametrize("node", ["n3", "n1"])
def test_a_lost_node_is_replaced_once_slurm_has_one(
    run: LaunchedRun, undisturbed: dict[str, bytes], node: str
) -> None:
    """n1 was given first: it has a job of its own."""
    run.launch(4, "layout.workers=4")
    run.wait_generation(ALL)
    run.do_step(ALL)
    lost = time.time()
    run.cluster.lose(node)
    run.do_step(ALL - {node})
    continued = run.first_step_of(run.newest) - lost
    run.wait_until(lambda: "Slurm:" in run.status(), f"a job in place of {node} waits")
    queued = time.time() - lost
    back = time.time()
    run.cluster.return_node(node)
    run.wait_generation(ALL, after=run.newest)
    rejoined = time.time() - back
    run.do_step(ALL)
    run.open_to_end()
    run.ends_as(undisturbed)
    report(f"{node} lost", continued=continued, replacement_queued=queued, rejoined=rejoined)


def test_requeue_saves_and_resumes(run: LaunchedRun, undisturbed: dict[str, bytes]) -> None:
    run.launch(4, "layout.workers=4")
    run.wait_step(FIRST, nodes=ALL)
    asked = time.time()
    job = run.cluster.run("squeue", "-h", "-o", "%A").split()[0]
    run.cluster.run("scontrol", "requeue", job)
    run.wait_restarted()
    run.wait_generation(ALL, after=run.newest)
    run.do_step(ALL)
    resumed = run.first_step_of(run.newest) - asked
    run.open_to_end()
    run.ends_as(undisturbed)
    report("scontrol requeue", first_step=resumed)


def test_a_drained_node_leaves_and_another_one_takes_its_place(
    run: LaunchedRun, undisturbed: dict[str, bytes]
) -> None:
    run.launch(3, "layout.workers=3")
    run.wait_step(FIRST, nodes={"n1", "n2", "n3"})
    asked = time.time()
    run.cluster.run("scontrol", "update", "NodeName=n2", "State=drain", "Reason=mend")
    run.wait_until(lambda: run.cluster.states()["n2"] == "drain", "n2 is free of the job")
    free = time.time() - asked
    run.wait_generation({"n1", "n3", "n4"})
    replaced = time.time() - asked
    run.do_step({"n1", "n3", "n4"})
    run.open_to_end()
    run.ends_as(undisturbed)
    report("drain", node_free=free, replaced=replaced)


def test_a_run_grows_and_shrinks(run: LaunchedRun, undisturbed: dict[str, bytes]) -> None:
    run.launch(2, "layout.workers=4")
    run.wait_step(FIRST, nodes={"n1", "n2"})
    asked = time.time()
    run.launch(4, "layout.workers=4")
    run.wait_generation(ALL)
    grown = time.time() - asked
    run.do_step(ALL)
    asked = time.time()
    run.launch(1, "layout.workers=4")
    run.wait_generation({"n1"})
    shrunk = time.time() - asked
    run.wait_until(
        lambda: [*run.cluster.states().values()].count("idle") == 3, "three nodes are free"
    )
    free = time.time() - asked
    run.do_step({"n1"})
    run.open_to_end()
    run.ends_as(undisturbed)
    report("resize", from_2_to_4=grown, from_4_to_1=shrunk, nodes_free=free)


def test_tasks_that_hang_without_slurmd_are_fenced(
    run: LaunchedRun, undisturbed: dict[str, bytes]
) -> None:
    """slurmd of a node dies alone, and all its tasks hang. Slurm starts the job on another node.
    Then the old tasks wake: they are members of the same run, or refused."""
    run.launch(3, "layout.workers=3")
    run.wait_generation({"n1", "n2", "n3"})
    run.do_step({"n1", "n2", "n3"})
    lost = time.time()
    old = run.cluster.tasks("n1")
    run.cluster.kill_daemon("n1")
    _signal(old, signal.SIGSTOP)
    run.wait_generation({"n2", "n3", "n4"}, after=run.newest)
    replaced = time.time() - lost
    run.do_step({"n2", "n3", "n4"})
    generation = run.newest
    _signal(old, signal.SIGCONT)
    run.cluster.return_node("n1")
    run.do_step({"n2", "n3", "n4"})
    run.open_to_end()
    run.ends_as(undisturbed)
    assert run.newest >= generation
    report("split brain: hung tasks", replaced=replaced)


def test_tasks_that_train_without_slurmd_stay_in_the_one_run(
    run: LaunchedRun, undisturbed: dict[str, bytes]
) -> None:
    """slurmd of a node dies alone, and its tasks train on. Slurm starts the job on another node,
    whose agent is one more member: no step is done by two sides."""
    run.launch(3, "layout.workers=3")
    run.wait_generation({"n1", "n2", "n3"})
    run.do_step({"n1", "n2", "n3"})
    lost = time.time()
    run.cluster.kill_daemon("n1")
    run.wait_until(lambda: run.cluster.states()["n4"] == "alloc", "the job is started on n4")
    started = time.time() - lost
    run.wait_until(lambda: "n4 has joined" in run.log_of("n4"), "n4 is in the run")
    joined = time.time() - lost
    run.do_step({"n1", "n2", "n3"})
    run.open_to_end()
    run.ends_as(undisturbed)
    report("split brain: tasks that train", job_started_again=started, joined=joined)


def test_the_time_limit_is_a_notice_and_the_job_is_queued_again(
    run: LaunchedRun, undisturbed: dict[str, bytes]
) -> None:
    run.launch(2, "layout.workers=2", "launch.slurm.time=1")
    run.wait_step(FIRST, nodes={"n1", "n2"})
    run.wait_until(
        lambda: "queued again" in (run.folder / "launch" / "slurm.log").read_text(), "requeued"
    )
    asked = time.time()
    run.wait_restarted()
    run.wait_generation({"n1", "n2"}, after=run.newest)
    resumed = time.time() - asked
    run.open_to_end()
    run.ends_as(undisturbed)
    report("time limit", next_generation=resumed)


def test_down_saves_and_launch_resumes(run: LaunchedRun, undisturbed: dict[str, bytes]) -> None:
    run.launch(2, "layout.workers=2")
    run.wait_step(FIRST, nodes={"n1", "n2"})
    asked = time.time()
    done = run.command("down", run.folder)
    assert done.code == 0, done.err
    run.wait_until(lambda: not run.cluster.run("squeue", "-h"), "the job has ended")
    left = time.time() - asked
    before = run.newest
    run.launch(3, "layout.workers=3")
    run.wait_generation({"n1", "n2", "n3"}, after=before)
    run.open_to_end()
    run.ends_as(undisturbed)
    report("down", nodes_free=left)


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        if process.is_running():
            process.send_signal(number)


# --- what a real Slurm does with a heterogeneous job, and why no run is one -----------------------
OPTIONS = ("--exclusive", "--no-kill", "--requeue")
SLEEP = ("--wrap", "sleep 3600")


def submit(cluster: SlurmCluster, *arguments: str, check: bool = True) -> str:
    return cluster.run("sbatch", "--parsable", *arguments, check=check).strip()


def jobs(cluster: SlurmCluster) -> dict[str, tuple[str, str]]:
    """Return state and nodes of each part of a job."""
    lines = cluster.run("squeue", "-h", "-r", "-o", "%i|%T|%N").splitlines()
    return {line.split("|")[0]: (line.split("|")[1], line.split("|")[2]) for line in lines}


def wait_running(cluster: SlurmCluster, *names: str) -> None:
    cluster.wait_until(
        lambda: all(jobs(cluster).get(name, ("",))[0] == "RUNNING" for name in names), f"{names}"
    )


def test_spares_of_a_het_job_start_and_end_with_the_nodes_of_the_run() -> None:
    with slurm_of(4) as cluster:
        taken = submit(cluster, "-N", "1", *OPTIONS, *SLEEP)
        wait_running(cluster, taken)
        het = submit(cluster, "-N", "3", *OPTIONS, ":", "-N", "1", *OPTIONS, *SLEEP)
        reason = ("squeue", "-h", "-j", het, "-o", "%r")
        cluster.wait_until(lambda: "Resources" in cluster.run(*reason), "Slurm looks at it")
        assert {state for name, (state, _) in jobs(cluster).items() if name != taken} == {"PENDING"}
        cluster.run("scancel", het)
        array = submit(cluster, "-N", "1", *OPTIONS, "--array=0-3", *SLEEP)
        wait_running(cluster, *(f"{array}_{number}" for number in range(3)))
        cluster.run("scancel", array)

        het = submit(cluster, "-N", "1", *OPTIONS, ":", "-N", "1", *OPTIONS, *SLEEP)
        parts = (f"{het}+0", f"{het}+1")
        wait_running(cluster, *parts)
        cluster.lose(jobs(cluster)[parts[1]][1])
        cluster.wait_until(
            lambda: {jobs(cluster)[part][0] for part in parts} == {"PENDING"},
            "the intact node is taken from the job, too",
        )
        refused = submit(cluster, "--array=0-1", "-N", "1", ":", "-N", "1", *SLEEP, check=False)
        assert not refused, "an array of them is accepted"
