"""The program of a job's batch step, next to commands of Slurm that are scripts. Real Slurm:
`test_slurm_faults.py`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.launch.owners.slurm.job import parse_fields
from holdfast.wire.child_command import module_command
from tests.support.fake_slurm import JOB, FakeSlurm
from tests.support.ranks import DEADLINE_S, wait_until


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin")


@contextmanager
def keeper_of(slurm: FakeSlurm, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [*more, "--script", "/s.sh", "--logs", "/logs", "--replace", "--requeue", "--"]
    environment = os.environ | {
        "PATH": f"{slurm.folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_NODELIST": "n[1-9]",  # of the job's start
    }
    process = subprocess.Popen(
        module_command(
            "holdfast.launch.owners.slurm.job", *command, "holdfast", "join", "--node", "{node}"
        ),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        for node in ("n1", "n2", "n3"):
            slurm.end_step(node, 9)
        process.communicate(timeout=DEADLINE_S)


def started(slurm: FakeSlurm, node: str) -> int:
    """Return how often the agent of a node was started."""
    calls = slurm.calls("srun")
    return sum("--job-name=agent" in call and f"--nodelist={node}" in call for call in calls)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out


def test_each_node_has_a_step_of_its_own_and_the_run_ends_with_them(slurm: FakeSlurm) -> None:
    with keeper_of(slurm) as process:
        slurm.wait_started("n1", "n2", "n3")
        step = slurm.wait_call("srun", "--output=/logs/n2.log")
        assert "--jobid=7 --nodes=1 --ntasks=1 --nodelist=n2" in step
        assert step.endswith("--output=/logs/n2.log holdfast join --node n2")
        for node in ("n1", "n2", "n3"):
            slurm.end_step(node, 0)
        code, out = ended(process)
    assert code == 0, out
    assert not slurm.calls("sbatch")


def test_a_lost_node_is_replaced_by_a_job_of_one_node(slurm: FakeSlurm) -> None:
    with keeper_of(slurm) as process:
        slurm.wait_started("n1", "n2", "n3")
        slurm.set_job(["n1", "n3"])
        slurm.end_step("n2", 1)
        call = slurm.wait_call("sbatch", "--nodes=1")
        assert call == "--parsable --nodes=1 --comment=in place of n2 of job 7 /s.sh"
        slurm.end_step("n1", 0)
        slurm.end_step("n3", 0)
        code, out = ended(process)
    assert code == 0, out
    assert slurm.calls("scancel") == ["--state=PENDING 8"], "the run is over"


def test_an_agent_that_is_killed_is_started_again_and_one_that_refuses_is_not(
    slurm: FakeSlurm,
) -> None:
    with keeper_of(slurm) as process:
        slurm.wait_started("n1", "n2", "n3")
        slurm.end_step("n2", 137)
        code_of_others = 2
        # It is killed again at once each time, and started three times.
        wait_until(lambda: started(slurm, "n2") == 4)
        slurm.end_step("n1", code_of_others)
        slurm.end_step("n3", code_of_others)
        code, out = ended(process)
    assert code in (code_of_others, 137), out  # of the agent that ended last
    assert started(slurm, "n3") == 1


def test_a_drained_node_leaves_and_is_replaced(slurm: FakeSlurm) -> None:
    slurm.say("sinfo", "n1|allocated", "n2|draining", "n3|allocated")
    with keeper_of(slurm) as process:
        assert slurm.wait_call("scancel", "--signal=TERM") == "--signal=TERM 7.1"
        slurm.wait_call("sbatch", "--nodes=1", "place of n2")
        for node in ("n1", "n2", "n3"):
            slurm.end_step(node, 0)
        code, out = ended(process)
    assert code == 0, out


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_agents_are_asked_to_leave(slurm: FakeSlurm, number: signal.Signals) -> None:
    with keeper_of(slurm) as process:
        slurm.wait_started("n1", "n2", "n3")
        process.send_signal(number)
        assert slurm.wait_call("scancel") == "--signal=TERM 7.0 7.1 7.2"
        for node in ("n1", "n2", "n3"):
            slurm.end_step(node, 0)
        code, out = ended(process)
    assert code == 0, out
    again = [call for call in slurm.calls("scontrol") if call == "requeue 7"]
    assert len(again) == (number == signal.SIGUSR1), "only after the time limit"


def test_a_signal_of_slurm_is_not_sent_a_second_time(slurm: FakeSlurm) -> None:
    with keeper_of(slurm) as process:
        slurm.wait_started("n1", "n2", "n3")
        process.send_signal(signal.SIGTERM)
        for node in ("n1", "n2", "n3"):
            slurm.end_step(node, 0)
        code, out = ended(process)
    assert code == 0, out
    assert not slurm.calls("scancel")


@pytest.mark.parametrize(("nodes", "restarts"), [(["n2", "n3"], 0), (["n1", "n2", "n3"], 1)])
def test_a_node_that_slurm_has_given_up_ends_its_own_agent_alone(
    slurm: FakeSlurm, nodes: list[str], restarts: int
) -> None:
    with keeper_of(slurm) as process:
        slurm.wait_started("n1", "n2", "n3")
        slurm.wait_call("srun", "--job-name=deputy")
        slurm.set_job(nodes, restarts=restarts)
        slurm.end_step("n3", 1)
        assert process.wait(DEADLINE_S) == 0
    assert not slurm.calls("sbatch")
    assert not slurm.calls("scancel")


def test_a_deputy_on_another_node_has_the_job_queued_again(slurm: FakeSlurm) -> None:
    with keeper_of(slurm):
        call = slurm.wait_call("srun", "--job-name=deputy")
    assert "--nodelist=n2" in call
    assert call.endswith("--replace --requeue -- holdfast join --node {node}")
    slurm.set_job(["n2", "n3"])  # of the node n1
    with keeper_of(slurm, "--deputy") as deputy:
        code, out = ended(deputy)
    assert code == 0, out
    assert slurm.calls("sbatch") == [
        "--parsable --nodes=1 --comment=in place of n1 of job 7 --begin=now+60 /s.sh"
    ]
    assert slurm.calls("scontrol")[-2:] == ["requeue 7", "update JobId=7 NumTasks=2 NumNodes=2-2"]


def test_the_fields_of_a_job() -> None:
    fields = parse_fields(JOB.format(nodes="n[1-3]", state="RUNNING", restarts=2, host="n1"))
    assert fields["NodeList"] == "n[1-3]"
    assert fields["JobState"] == "RUNNING"
    assert fields["Restarts"] == "2"
    assert fields["TRES"] == "cpu=8,node=4,billing=8"
