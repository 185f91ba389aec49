"""Remedies of messages about torchrun, mpirun and srun. Their processes are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from re import Match

import pytest

from holdfast.config.loading.load import load_config
from holdfast.launch.ranks import roll_call
from holdfast.launch.ranks.launched_config import by_launcher
from holdfast.launch.ranks.launchers import LauncherPlace, read_launcher
from holdfast.launch.ranks.local_ranks import agent_socket, as_one_node
from holdfast.launch.start.facts import Facts
from holdfast.machine.hardware import detect_hardware
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.runtime.cli.remedies.of_others import values

LOCAL = "launch/ranks/local_ranks.py: "


def environ(lab: Lab, rank: int, local_rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": str(lab.folder),
    }


def start_processes(lab: Lab) -> None:
    """Start processes of a node, (rank, local rank) each; the error of the last one comes out."""
    timeout = lab.settings.get("timeout_s", 10.0)

    def start(place: LauncherPlace | None) -> int:
        return 0

    def agent(one: tuple[int, int]) -> None:
        try:
            as_one_node(start, environ(lab, *one), timeout)
        except Exception:
            return

    *before, last = lab.settings["processes"]
    threads = [threading.Thread(target=agent, args=(one,)) for one in before if one[1] == 0]
    for thread in threads:
        thread.start()
    try:
        as_one_node(start, environ(lab, *last), timeout)
    finally:
        for thread in threads:
            thread.join()


def start_together(lab: Lab) -> None:
    """As `start_processes`, where the agent's error comes out, and the rest waits in a process."""
    if lab.settings["ranks"] == (0, 1):
        lab.settings["processes"] = [(0, 0), (1, 1)]
        start_processes(lab)
        return
    seen: list[Exception] = []

    def agent() -> None:
        try:
            as_one_node(lambda place: 0, environ(lab, 0, 0), 10.0)
        except Exception as error:
            seen.append(error)

    thread = threading.Thread(target=agent)
    thread.start()
    as_one_node(lambda place: 0, environ(lab, 0, 1), 10.0)
    thread.join()
    raise seen[0]


def processes(*them: tuple[int, int], timeout_s: float = 0.05) -> Callable[[Lab], None]:
    return values(processes=list(them), timeout_s=timeout_s)


ALL = fixed(processes=[(0, 0), (1, 1)], timeout_s=10.0)


def read_it(lab: Lab) -> None:
    read_launcher(lab.settings["environ"])


def unset(lab: Lab, found: Match[str]) -> None:
    del lab.settings["environ"][found[2]]


def two_agents(lab: Lab) -> None:
    """Start a node while another process of its start is the agent."""
    with ExitStack() as at_once:
        if lab.settings["at_once"]:
            place = read_launcher(environ(lab, 0, 0))
            assert place is not None
            at_once.enter_context(agent_socket(place))
        lab.settings.update(processes=[(0, 0), (1, 1)], timeout_s=10.0)
        if lab.settings["at_once"]:
            lab.settings["processes"] = [(0, 0)]
        start_processes(lab)


def call_roll(lab: Lab) -> None:
    """Node a calls the roll; node b was there before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roll_call, "RETRY_S", 0.001)
        store, place = FolderStore(lab.folder), read_launcher(environ(lab, 0, 0))
        assert place is not None
        place = replace(place, nodes=2, local_world=1)
        own = replace(place, node="a", ranks=(0,))
        if not lab.settings["together"]:
            roll_call.call_roll(store, own, 0.01)
        other = replace(place, node="b", ranks=(1,))
        thread = threading.Thread(target=lambda: roll_call.call_roll(store, other, 10.0))
        thread.start()
        roll_call.call_roll(store, own, 10.0)
        thread.join()


def plan(lab: Lab) -> None:
    path = lab.write("run.yaml", "name: tiny\n")
    place = read_launcher(environ(lab, 0, 0))
    by_launcher(load_config(path, [lab.settings["said"]]), Facts(detect_hardware(), launcher=place))


CASES: list[Case] = [
    case(
        "launch/ranks/launchers.py: the variables of … contradict each other: …",
        values(environ={"RANK": "2", "WORLD_SIZE": "2"}),
        read_it,
        r"start all processes with (\w+), or unset (\w+) to start one",
        unset,
    ),
    case(
        LOCAL + "two processes of this node have local rank 0 under …",
        values(at_once=True),
        two_agents,
        r"start one set of processes at a time",
        fixed(at_once=False),
    ),
    case(
        LOCAL + "… has … processes on this node, and only … of them came within … s",
        processes((0, 0)),
        start_processes,
        r"start the same command in all of them",
        ALL,
    ),
    case(
        LOCAL + "no process of local rank 0 came within … s, which would be this node's agent",
        processes((1, 1)),
        start_processes,
        r"start all processes with one torchrun",
        ALL,
    ),
    case(
        LOCAL + "the processes of … do not fit together: …",
        values(ranks=(0, 0)),
        start_together,
        r"start all of them with one torchrun",
        fixed(ranks=(0, 1)),
    ),
    case(
        "launch/ranks/roll_call.py: the nodes of … do not fit together: …",
        values(together=False),
        call_roll,
        r"start all of them with one torchrun",
        fixed(together=True),
    ),
    case(
        "launch/ranks/launched_config.py: … is …, and … says …",
        values(said="layout.workers=3"),
        plan,
        r"leave it out, or use (\d+)",
        lambda lab, found: lab.settings.update(said=f"layout.workers={found[1]}"),
    ),
]
