"""Actions on a node, its processes, its disk or its line, from outside.

Each action takes the scene and a node, and returns its target. It also returns the function that
undoes it, if it is to be undone, and after how many seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.launch.node.fleet import Fleet
from holdfast.wire.store.run_location import store_of_run
from holdfast.wire.term import newest_term
from holdfast_lab.chaos.network import Network

# bytes from one turned bit to the next: so that some lie in every snapshot
_FLIP_STRIDE_BYTES = 10007
_FULL_DISK_FILE_BYTES = 4096  # bytes: no blob fits
_LONG_OUTAGE_S = 120.0  # seconds
_IDLE_TIMEOUT_S = 1.0
_IDLE_LOOKS = 5  # looks in a row at which nothing runs


class NotPossibleNowError(Exception):
    """What the deed is done to is not there at this moment."""


@dataclass
class ChaosEnvironment:
    """run_folder: the run folder, which is a link to `real_folder`. outage_s: seconds that
    something stays bad."""

    fleet: Fleet
    run_folder: Path
    real_folder: Path
    notices_folder: Path
    network: Network | None
    heartbeat_s: float
    outage_s: float

    @property
    def leader_node(self) -> str:
        _, holder = newest_term(store_of_run(self.run_folder))
        return "" if holder is None else str(holder.get("node", ""))


@dataclass(frozen=True)
class FaultAction:
    """An action that was done. target: its object. heal: undoes it, after `seconds`.
    nodes_to_restart: nodes that are to come back. holds_starts: an agent that starts before it is
    undone ends with a sentence, so none is started."""

    target: str
    heal: Callable[[], None] | None = None
    seconds: float = 0.0
    nodes_to_restart: tuple[str, ...] = ()
    on_tick: Callable[[float], None] | None = None  # told the seconds since, until it is healed
    holds_starts: bool = False


def _kill_agent(at: ChaosEnvironment, node: str) -> FaultAction:
    at.fleet.kill(node)
    return FaultAction(f"the agent of {node}", nodes_to_restart=(node,))


def _kill_leader(at: ChaosEnvironment, node: str) -> FaultAction:
    leader = at.leader_node
    if leader not in at.fleet.alive_nodes:
        raise NotPossibleNowError("no node leads")
    return _kill_agent(at, leader)


def _kill_all_agents(at: ChaosEnvironment, node: str) -> FaultAction:
    gone = tuple(at.fleet.alive_nodes)
    for each in gone:
        at.fleet.kill(each)
    return FaultAction("all agents", nodes_to_restart=gone)


def _worker_pids(at: ChaosEnvironment) -> list[int]:
    return [pid for each in at.fleet.alive_nodes for pid in at.fleet.worker_pids(each)]


def _kill_all_workers(at: ChaosEnvironment, node: str) -> FaultAction:
    pids = _worker_pids(at)
    if not pids:
        raise NotPossibleNowError("there is no worker")
    for pid in pids:
        _send_signal(pid, signal.SIGKILL)
    return FaultAction("all workers")


def _child_pid(at: ChaosEnvironment, node: str, what: str) -> int:
    pid = at.fleet.child_pid(node, what)
    if pid is None:
        raise NotPossibleNowError(f"{node} has no {what}")
    return pid


def _kill_child(what: str) -> Callable[[ChaosEnvironment, str], FaultAction]:
    def kill(at: ChaosEnvironment, node: str) -> FaultAction:
        os.kill(_child_pid(at, node, what), signal.SIGKILL)
        return FaultAction(f"the {what} of {node}")

    return kill


def _stop_mover(at: ChaosEnvironment, node: str) -> FaultAction:
    pid = _child_pid(at, node, "mover")
    os.kill(pid, signal.SIGSTOP)
    return FaultAction(
        f"the mover of {node}", lambda: _send_signal(pid, signal.SIGCONT), at.outage_s
    )


def _slow_down_disk(at: ChaosEnvironment, node: str) -> FaultAction:
    """The mover alone writes blobs: it is let run for a tenth of the time."""
    pid = _child_pid(at, node, "mover")

    def tick(seconds: float) -> None:
        _send_signal(pid, signal.SIGCONT if int(seconds * 20) % 10 == 0 else signal.SIGSTOP)

    return FaultAction(
        f"the disk of {node}", lambda: _send_signal(pid, signal.SIGCONT), at.outage_s, on_tick=tick
    )


def _fill_disk(at: ChaosEnvironment, node: str) -> FaultAction:
    pid = _child_pid(at, node, "mover")
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (_FULL_DISK_FILE_BYTES, before[1]))

    def heal() -> None:
        with suppress(psutil.Error, OSError):
            process.rlimit(psutil.RLIMIT_FSIZE, before)

    return FaultAction(f"the disk of {node}", heal, at.outage_s)


def _break_run_folder(at: ChaosEnvironment, node: str) -> FaultAction:
    """The run folder is a link, which leads to itself for a while. So every open below it fails,
    and files that are open already stay open."""
    _point_link(at.run_folder, at.run_folder.name)
    return FaultAction(
        "the run folder",
        lambda: _point_link(at.run_folder, at.real_folder.name),
        at.outage_s,
        holds_starts=True,
    )


def _break_run_folder_long(at: ChaosEnvironment, node: str) -> FaultAction:
    return replace(_break_run_folder(at, node), seconds=_LONG_OUTAGE_S)


def _point_link(link: Path, to: str) -> None:
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(to)
    new.replace(link)


def _ask_to_leave(at: ChaosEnvironment, node: str) -> FaultAction:
    at.fleet.expect_end(node)
    os.kill(at.fleet.agent_pid(node), signal.SIGTERM)
    return FaultAction(f"node {node}", nodes_to_restart=(node,))


def _give_notice(at: ChaosEnvironment, node: str) -> FaultAction:
    at.fleet.expect_end(node)
    (at.notices_folder / node).write_text("60")
    return FaultAction(f"node {node}", nodes_to_restart=(node,))


def _give_notice_then_kill(at: ChaosEnvironment, node: str) -> FaultAction:
    """The machine goes when it was said to, whether it has left by then or not."""
    _give_notice(at, node)
    (at.notices_folder / node).write_text("2")
    pid = at.fleet.agent_pid(node)
    return FaultAction(f"node {node}", lambda: _send_signal(pid, signal.SIGKILL), 2.0, (node,))


def _freeze_node(at: ChaosEnvironment, node: str) -> FaultAction:
    at.fleet.send_signal(node, signal.SIGSTOP)
    # also where it leads: another leader is chosen first
    seconds = 10 * at.heartbeat_s + at.outage_s
    return FaultAction(
        f"all processes of {node}", lambda: at.fleet.send_signal(node, signal.SIGCONT), seconds
    )


def _corrupt_memory(at: ChaosEnvironment, node: str) -> FaultAction:
    """Change bytes that have been hashed. A change between a worker's copy and the hash would look
    like the copied state. So the workers are stopped first, and the mover finishes its hashing."""
    mover = _child_pid(at, node, "mover")
    workers, changed = _worker_pids(at), 0
    if not workers:
        raise NotPossibleNowError("there is no worker")
    for pid in workers:
        _send_signal(pid, signal.SIGSTOP)
    with suppress(OSError, psutil.Error):  # the mover has ended meanwhile
        # Until all threads of a process sleep, each time one looks.
        end, looks = time.monotonic() + _IDLE_TIMEOUT_S, 0
        while looks < _IDLE_LOOKS and time.monotonic() < end:
            time.sleep(_IDLE_TIMEOUT_S / 100)
            threads = psutil.Process(mover).threads()
            states = {psutil.Process(thread.id).status() for thread in threads}
            looks = looks + 1 if states == {psutil.STATUS_SLEEPING} else 0
        changed = flip_memory_bits(mover)
    if not changed:
        for pid in workers:
            _send_signal(pid, signal.SIGCONT)
        raise NotPossibleNowError(f"{node} keeps nothing in memory")
    _kill_all_workers(at, node)
    return FaultAction(f"{changed} bytes of {node}, and all workers")


def flip_memory_bits(pid: int, stride: int = _FLIP_STRIDE_BYTES) -> int:
    """Turn a bit here and there in each memory file of a process; how many. A file that is mapped
    has a second descriptor: turned once more, its bits would be as they were."""
    seen, changed = set[tuple[int, int]](), 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if not os.readlink(link).startswith("/memfd:"):
                continue
            file = os.stat(link)
            if (file.st_dev, file.st_ino) in seen:
                continue
            seen.add((file.st_dev, file.st_ino))
            for at_byte in range(stride, file.st_size, stride):
                changed += _flip_bit(link, at_byte)
    return changed


Damage = Callable[[Path, Path], object]
"""Damages a checkpoint's file, given the file and the same writer's file of an older step."""


def _corrupt(file: Path, older: Path) -> None:
    _flip_bit(file, file.stat().st_size - 100)


def _cut(file: Path, older: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _remove(file: Path, older: Path) -> None:
    file.unlink()


def _replay(file: Path, older: Path) -> None:
    file.write_bytes(older.read_bytes())


def damage_newest(folder: Path, damage: Damage) -> str:
    """Damage all files of a run folder's newest checkpoint and return the checkpoint's key."""
    found = list_commits(store_of_run(folder))
    steps = sorted({step_of(key) for key in found}, reverse=True)
    if len(steps) < 2:
        raise NotPossibleNowError("there is no older checkpoint")
    newest, older = (
        {file.name[10:]: file for file in (folder / "data").rglob(f"{step:010d}-*")}
        for step in steps[:2]
    )
    for name, file in newest.items():
        damage(file, older.get(name, file))
    return found[0]


def _damaged_checkpoint(damage: Damage) -> Callable[[ChaosEnvironment, str], FaultAction]:
    def act(at: ChaosEnvironment, node: str) -> FaultAction:
        key = damage_newest(at.run_folder, damage)
        return FaultAction(
            f"{key}, and all agents", nodes_to_restart=_kill_all_agents(at, node).nodes_to_restart
        )

    return act


def _rotten_disk(at: ChaosEnvironment, node: str) -> FaultAction:
    key = damage_newest(at.run_folder, _corrupt)
    _kill_all_workers(at, node)
    return FaultAction(f"{key}, and all workers")


def _flip_bit(path: Path, position: int) -> int:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        if not byte:
            return 0
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))
    return 1


def _require_network(at: ChaosEnvironment) -> Network:
    if at.network is None:
        raise NotPossibleNowError("the nodes have no network of their own")
    return at.network


def _cut_off_node(at: ChaosEnvironment, node: str) -> FaultAction:
    network = _require_network(at)
    network.cut(node)
    return FaultAction(
        f"the line of {node}", lambda: network.heal(node), 3 * at.heartbeat_s + at.outage_s
    )


def _delay_packets(at: ChaosEnvironment, node: str) -> FaultAction:
    network = _require_network(at)
    network.set_delay(node, 20.0)
    return FaultAction(f"the line of {node}", lambda: network.heal(node), at.outage_s)


def _drop_packets(at: ChaosEnvironment, node: str) -> FaultAction:
    network = _require_network(at)
    network.set_loss(node, 2.0)
    return FaultAction(f"the line of {node}", lambda: network.heal(node), at.outage_s)


def _send_signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


FAULT_ACTIONS: Mapping[str, Callable[[ChaosEnvironment, str], FaultAction]] = {
    "agent": _kill_agent,
    "coordinator": _kill_leader,
    "everything": _kill_all_agents,
    "workers": _kill_all_workers,
    "mover": _kill_child("mover"),
    "template": _kill_child("template"),
    "mover-stop": _stop_mover,
    "slow-disk": _slow_down_disk,
    "full-disk": _fill_disk,
    "run-store": _break_run_folder,
    "run-store-long": _break_run_folder_long,
    "leave": _ask_to_leave,
    "notice": _give_notice,
    "notice-kill": _give_notice_then_kill,
    "zombie": _freeze_node,
    "rotten-memory": _corrupt_memory,
    "rotten-disk": _rotten_disk,
    "rotten-checkpoint": _damaged_checkpoint(_corrupt),
    "cut-checkpoint": _damaged_checkpoint(_cut),
    "lost-checkpoint": _damaged_checkpoint(_remove),
    "replayed-checkpoint": _damaged_checkpoint(_replay),
    "partition": _cut_off_node,
    "delay": _delay_packets,
    "loss": _drop_packets,
}
