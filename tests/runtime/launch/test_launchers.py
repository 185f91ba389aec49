"""What torchrun, mpirun and srun say, and how processes that do not fit together are refused.

The real launchers: `tests/system/test_launchers.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.errors import ConfigError, UserError
from holdfast.launch.ranks import launchers, roll_call
from holdfast.launch.ranks.launchers import LauncherPlace, read_launcher
from holdfast.launch.ranks.local_ranks import agent_socket, as_one_node
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.machine import by_launcher
from holdfast.machine.hardware import detect_hardware
from holdfast.wire.store.run_store import FolderStore

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "POD_NAME": "pod",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "1234",
    "POD_NAME": "pod",
}
SRUN = {
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURMD_NODENAME": "n3",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "POD_NAME": "pod",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "RETRY_S", 0.02)


def place(environ: dict[str, str]) -> LauncherPlace:
    found = read_launcher(environ)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "world", "local", "nodes", "node"),
    [
        (TORCHRUN, "torchrun", 3, 4, (1, 2), 2, "pod-1"),
        (OPEN_MPI, "mpirun", 3, 4, (1, 2), 0, "pod"),
        (SRUN, "srun", 4, 5, (0, 1), 3, "n3"),
        (MPICH, "mpirun", 1, 2, (1, 2), 0, "pod"),
        (SRUN | TORCHRUN, "torchrun", 3, 4, (1, 2), 2, "n3-1"),
        (SRUN | OPEN_MPI, "mpirun", 3, 4, (1, 2), 0, "n3"),
    ],
    ids=["torchrun", "open-mpi", "srun", "mpich", "torchrun-under-srun", "mpirun-in-a-job"],
)
def test_each_launcher_is_read(
    environ: dict[str, str],
    launcher: str,
    rank: int,
    world: int,
    local: tuple[int, int],
    nodes: int,
    node: str,
) -> None:
    found = place(environ)
    assert (found.launcher, found.rank, found.world) == (launcher, rank, world)
    assert (found.local_rank, found.local_world) == local
    assert (found.nodes, found.node) == (nodes, node)


def test_without_a_launcher_and_for_one_process_a_run_starts_alone() -> None:
    batch_script = {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}
    one_pod = {"RANK": "0", "WORLD_SIZE": "1"}
    for environ in ({}, batch_script, one_pod, {"WORLD_SIZE": "4"}):
        assert read_launcher(environ) is None
        assert as_one_node(lambda none: 7 if none is None else 1, environ) == 7


@pytest.mark.parametrize(
    ("parents", "is_shell"),
    [(["bash", "sshd"], True), (["slurmstepd"], False), (["bash", "slurmstepd"], False)],
    ids=["a-shell", "a-task-of-srun-in-it", "a-script-of-such-a-task"],
)
def test_a_shell_of_srun_is_refused_at_once_and_what_srun_starts_in_it_is_not(
    parents: list[str], is_shell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process:
        def parents(self) -> list[Any]:
            return [SimpleNamespace(name=lambda each=each: each) for each in parents]

        def terminal(self) -> str | None:
            return None

    monkeypatch.setattr(launchers.psutil, "Process", Process)
    shell = SRUN | {"SLURM_PTY_PORT": "40001", "PMI_RANK": "4", "PMI_SIZE": "5"}
    if not is_shell:
        launchers.refuse_shell(place(shell), shell)
        return
    with pytest.raises(ConfigError, match=r"shell of srun.* 5 tasks.*unset SLURM_PROCID PMI_RANK"):
        as_one_node(never, shell)
    alone = {k: v for k, v in shell.items() if k not in ("SLURM_PROCID", "PMI_RANK")}
    assert as_one_node(lambda none: 7 if none is None else 1, alone) == 7


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (TORCHRUN | {"RANK": "4"}, "RANK is 4, and WORLD_SIZE is 4"),
        (TORCHRUN | {"RANK": "x"}, "RANK is 'x', which is no number"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK is set, and LOCAL_RANK is missing"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, and LOCAL_WORLD_SIZE is 2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is 8, and WORLD_SIZE is 4"),
        (TORCHRUN | {"GROUP_RANK": "2"}, "GROUP_RANK is 2, and GROUP_WORLD_SIZE is 2"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "4"}, "GROUP_WORLD_SIZE is 4, and 2 processes are else"),
        (OPEN_MPI | {"PMIX_RANK": "1"}, "OMPI_COMM_WORLD_RANK is 3, and PMIX_RANK is 1"),
        (SRUN | {"SLURM_NODEID": "3"}, "SLURM_NODEID is 3, and SLURM_STEP_TASKS_PER_NODE"),
        (SRUN | {"PMI_RANK": "0"}, "SLURM_PROCID is 4, and PMI_RANK is 0"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(
    environ: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_launcher(environ)
    assert words in str(refused.value)
    assert refused.value.exit_code == 2


def with_launcher(loaded: LoadedConfig, place: LauncherPlace | None) -> LoadedConfig:
    return loaded.with_values(by_launcher(loaded, Facts(detect_hardware(), launcher=place)))


def test_the_run_file_and_the_launcher_must_agree(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: tiny\n")
    found = with_launcher(load_config(path), place(TORCHRUN)).config
    assert (found.layout.workers, found.cluster.places, found.cluster.node) == (4, 2, "pod-1")
    alone = with_launcher(load_config(path), place(MPICH)).config
    assert (alone.layout.workers, alone.cluster.places, alone.cluster.node) == (2, 0, "")
    for key, said, wanted in (
        ("layout.workers", "2", "4"),
        ("cluster.places", "1", "2"),
        ("cluster.node", "other", "pod-1"),
    ):
        with pytest.raises(ConfigError, match=f"{key} is {said}, and torchrun says {wanted}"):
            with_launcher(load_config(path, [f"{key}={said}"]), place(TORCHRUN))


# --- the processes of a node --------------------------------------------------------------------
def environ_of(local_rank: int, tmp_path: Path, **more: str) -> dict[str, str]:
    own = {"LOCAL_RANK": str(local_rank), "RANK": str(2 + local_rank)}
    return TORCHRUN | own | {"TORCHELASTIC_RUN_ID": str(tmp_path)} | more


def as_agent(
    tmp_path: Path, start: Callable[[LauncherPlace | None], int], timeout_s: float = 60.0
) -> tuple[threading.Thread, list[object]]:
    """Start the process of local rank 0, as a thread. Its exit code, or its error, is noted."""
    ended: list[object] = []

    def run() -> None:
        try:
            ended.append(as_one_node(start, environ_of(0, tmp_path), timeout_s))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def never(found: LauncherPlace | None) -> int:
    raise AssertionError("this process is not the agent")


def test_one_process_of_a_node_is_the_agent_and_the_rest_end_with_its_exit_code(
    tmp_path: Path,
) -> None:
    started: list[LauncherPlace | None] = []

    def start(found: LauncherPlace | None) -> int:
        started.append(found)
        return 3

    thread, ended = as_agent(tmp_path, start)
    assert as_one_node(never, environ_of(1, tmp_path)) == 3
    thread.join()
    assert ended == [3]
    assert started[0] is not None
    assert started[0].ranks == (2, 3)


@pytest.mark.parametrize(("error", "code"), [(UserError("no"), 2), (RuntimeError("a bug"), 1)])
def test_an_agent_that_cannot_start_ends_the_rest(
    tmp_path: Path, error: Exception, code: int
) -> None:
    def start(found: LauncherPlace | None) -> int:
        raise error

    thread, ended = as_agent(tmp_path, start)
    assert as_one_node(never, environ_of(1, tmp_path)) == code
    thread.join()
    assert ended == [error]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"RANK": "2"}, "two processes of this node have rank 2"),
        ({"WORLD_SIZE": "5", "GROUP_WORLD_SIZE": "2"}, "WORLD_SIZE is 4 here and 5 there"),
    ],
)
def test_two_processes_that_do_not_fit_together(
    tmp_path: Path, more: dict[str, str], words: str
) -> None:
    thread, ended = as_agent(tmp_path, never)
    assert as_one_node(never, environ_of(1, tmp_path, **more)) == 2
    thread.join()
    assert words in str(ended[0])


def test_a_process_that_does_not_come(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no process of local rank 0 came within"):
        as_one_node(never, environ_of(1, tmp_path), 0.1)
    with pytest.raises(ConfigError, match="has 2 processes on this node, and only 1 of them"):
        as_one_node(never, environ_of(0, tmp_path), 0.1)


def test_two_processes_with_local_rank_0(tmp_path: Path) -> None:
    environ = environ_of(0, tmp_path)
    with agent_socket(place(environ)), pytest.raises(ConfigError, match="have local rank 0"):
        as_one_node(never, environ)


# --- the nodes of a start -----------------------------------------------------------------------
def roll(tmp_path: Path, *places: LauncherPlace, timeout_s: float = 60.0) -> list[str]:
    """Let nodes call the roll at once; return what each hears, "" for nothing."""

    def call(one: LauncherPlace) -> str:
        try:
            roll_call.call_roll(FolderStore(tmp_path), one, timeout_s)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(call, places))


A = replace(place(TORCHRUN), node="a", ranks=(0, 1))
B = replace(place(TORCHRUN), node="b", ranks=(2, 3))


def test_nodes_that_have_all_ranks_begin_also_after_a_start_that_was_cut_short(
    tmp_path: Path,
) -> None:
    assert roll(tmp_path, A, timeout_s=0.1) != [""]
    assert roll(tmp_path, A, B) == ["", ""]
    assert roll(tmp_path, A, B) == ["", ""], "its notes are there: the same nodes, the same ranks"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(B, ranks=(1, 2)), "both have rank 1"),
        (replace(B, world=5), "WORLD_SIZE is "),
        (replace(B, ranks=(2, 3, 4)), "the nodes that came (a, b) have 5 processes"),
    ],
    ids=["rank", "world", "more"],
)
def test_nodes_that_do_not_fit_together_are_all_refused(
    tmp_path: Path, other: LauncherPlace, words: str
) -> None:
    for told in roll(tmp_path, A, other):
        assert words in told, told


def test_a_number_of_hosts_that_differs_is_refused(tmp_path: Path) -> None:
    (told,) = roll(tmp_path, A, timeout_s=0.1)
    assert "WORLD_SIZE is 4, and the nodes that came (a) have 2 processes" in told
    all_on_one = replace(A, ranks=(0, 1, 2, 3))
    (told,) = roll(tmp_path, all_on_one)
    assert "2 nodes were to come, and these came: a" in told
