"""What a run wants of Ray, and what the supervisor does next about it. No Ray is needed here.

A node of the run is an actor that runs the agent. Actors are placed by placement groups. A group
holds the nodes of one replica, so that they start together. Ray itself places a group again, and
starts its actor again, after it has lost a machine. The supervisor (`supervisor.py`) does the
rest: it makes groups, replaces those whose machine drains, and gives them back at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.core.json_parsing import JsonMessage
from holdfast.launch.owners.owner import LaunchRequest, NodeState, NodeStatus

NAMESPACE = "holdfast"
"""Ray's namespace of our actors and placement groups, and of what they store at its head."""
NODE_MARK = "{node}"  # Stands for a node's name in `RaySpec.arguments`

Group = tuple[str, ...]  # names of the nodes that start together


@dataclass(frozen=True)
class RaySpec(JsonMessage):
    """What a run wants of Ray; the commands change it, and supervisor and nodes read it.

    groups: the nodes of the run. bundle: what each takes of Ray. arguments: of `holdfast`.
    logs: folder for what nodes print; empty: the log folder of Ray's session.
    is_autoscaled: machines that are not there yet may fit. stop: all nodes leave, and the machines
    are given back.
    """

    job: str
    groups: tuple[Group, ...]
    bundle: dict[str, float]
    arguments: tuple[str, ...]
    logs: str = ""
    is_autoscaled: bool = False
    stop: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node for group in self.groups for node in group)

    def command(self, node: str) -> list[str]:
        return [word.replace(NODE_MARK, node) for word in self.arguments]


def make_groups(request: LaunchRequest) -> tuple[Group, ...]:
    """Return the nodes of the run, grouped. Each spare is a group of its own."""
    names = [f"node-{number}" for number in range(request.all_nodes)]
    config = request.config
    if config.launch.ray.groups == "run":
        size = request.nodes
    else:
        places = config.cluster.places or 1
        size = min(request.nodes, -(-config.layout.ranks // places))
    return tuple(
        tuple(names[at : min(at + size, request.nodes)]) for at in range(0, request.nodes, size)
    ) + tuple((name,) for name in names[request.nodes :])


def kept_groups(before: Sequence[Group], wanted: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups for another number of nodes, so that no group of `before` is torn apart
    that has a node which stays."""
    names = {node for group in wanted for node in group}
    kept = tuple(group for group in before if names & set(group))
    there = {node for group in kept for node in group}
    rest = (tuple(node for node in group if node not in there) for group in wanted)
    return kept + tuple(group for group in rest if group)


# --- what the supervisor sees and does -----------------------------------------------------------


@dataclass(frozen=True)
class NodeReport(JsonMessage):
    """What a node's actor has said last. machine: Ray's id of its machine. group: of its placement
    group. code: exit code of the agent, once it has ended. detail: why it could not be started."""

    group: str
    machine: str
    host: str
    process: int
    code: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class PlacedGroup:
    """A placement group that Ray knows. is_placed: each of its nodes has a machine now."""

    id: str
    is_placed: bool


@dataclass(frozen=True)
class Observation:
    """groups: of this run that Ray knows. alive, draining: Ray's ids of machines."""

    groups: Mapping[Group, PlacedGroup]
    reports: Mapping[str, NodeReport]
    alive: frozenset[str]
    draining: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Deeds:
    """What the supervisor does now. forget: reports that no longer count, so that a group of these
    nodes is made again. is_over: there is nothing left to do, and the supervisor ends."""

    create: tuple[Group, ...] = ()
    remove: tuple[Group, ...] = ()
    forget: tuple[str, ...] = ()
    is_over: bool = False


class _Stage(StrEnum):
    WAITS = "waits"
    WORKS = "works"
    ENDED = "ended"
    LEFT = "left"  # ended, because a machine drains


def decide(spec: RaySpec, seen: Observation) -> Deeds:
    """Return what brings Ray closer to what the run wants."""
    stages = {group: _stage(group, placed, seen) for group, placed in seen.groups.items()}
    wanted = () if spec.stop else spec.groups
    left = [group for group, stage in stages.items() if stage is _Stage.LEFT]
    ended = [group for group, stage in stages.items() if stage is _Stage.ENDED]
    unneeded = [
        group
        for group, stage in stages.items()
        if stage is _Stage.WAITS and not set(group) & {n for g in wanted for n in g}
    ]
    create = [
        group
        for group in wanted
        if group not in stages and not all(node in seen.reports for node in group)
    ]
    if _is_over(spec, seen, stages):
        return Deeds(remove=tuple(seen.groups), is_over=True)
    forget = [node for group in left if group in wanted for node in group]
    return Deeds(tuple(create), (*left, *ended, *unneeded), tuple(forget))


def _is_over(spec: RaySpec, seen: Observation, stages: Mapping[Group, _Stage]) -> bool:
    """Return True if no node works, and either all have ended, or one left of its own accord.

    The last holds if a run is complete while Ray still owes it a machine."""
    if any(stage is _Stage.WORKS for stage in stages.values()):
        return False
    if spec.stop:
        return True
    if any(stage is _Stage.LEFT for stage in stages.values()):
        return False
    codes = [r.code for node, r in seen.reports.items() if node in spec.nodes]
    all_ended = len(codes) == len(spec.nodes) and None not in codes
    return all_ended or any(
        report.code == 0 and report.machine in seen.alive for report in seen.reports.values()
    )


def _stage(group: Group, placed: PlacedGroup, seen: Observation) -> _Stage:
    if not placed.is_placed:
        return _Stage.WAITS
    reports = [
        report
        for node in group
        if (report := seen.reports.get(node)) is not None and report.group == placed.id
    ]
    # Ray starts the actor of a machine that it has lost again: that report is out of date.
    if len(reports) < len(group) or any(
        report.code is None or report.machine not in seen.alive for report in reports
    ):
        return _Stage.WORKS
    drains = any(report.machine in seen.draining for report in reports)
    return _Stage.LEFT if drains and all(r.code == 0 for r in reports) else _Stage.ENDED


def node_states(spec: RaySpec, seen: Observation) -> list[NodeStatus]:
    """Return the nodes of the run as people see them."""
    group_of = {node: group for group in (*seen.groups, *spec.groups) for node in group}
    return [_node_state(node, group_of[node], seen) for node in sorted(group_of, key=in_order)]


def _node_state(node: str, group: Group, seen: Observation) -> NodeStatus:
    report, placed = seen.reports.get(node), seen.groups.get(group)
    if report is not None and report.code is not None and report.machine in seen.alive:
        if report.code == 0:
            return NodeStatus(node, NodeState.FINISHED, report.host)
        why = report.detail or f"exit code {report.code}"
        return NodeStatus(node, NodeState.FAILED, f"{report.host}, {why}")
    if placed is None or not placed.is_placed:
        return NodeStatus(node, NodeState.WAITING, "Ray has no machine for it yet")
    if report is None or report.group != placed.id or report.machine not in seen.alive:
        return NodeStatus(node, NodeState.WAITING, "Ray starts it")
    drains = ", which drains" if report.machine in seen.draining else ""
    return NodeStatus(node, NodeState.RUNNING, f"{report.host}{drains}, process {report.process}")


def in_order(node: str) -> tuple[int, str]:
    """Sort node-10 after node-9."""
    return len(node), node


@dataclass(frozen=True)
class JobStatus(JsonMessage):
    """What the supervisor has stored for `holdfast status`."""

    nodes: tuple[NodeStatus, ...] = field(default=())
    is_over: bool = False
