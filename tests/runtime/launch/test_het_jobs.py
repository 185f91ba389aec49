"""What a real Slurm does with a heterogeneous job, and why no run is one: see
docs/guide/slurm.md."""

from __future__ import annotations

import pytest

from tests.support.slurm_cluster import INSTALL, SlurmCluster, is_installed, slurm_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed(), reason=INSTALL)]
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
