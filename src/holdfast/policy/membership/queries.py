"""What follows from a coordinator's state: functions that read it and change nothing.

`transitions` changes the state, and asks these functions what it means.
"""

from __future__ import annotations

from math import inf

from holdfast.policy.membership.state import (
    STOPPED_STAGES,
    CoordinatorState,
    Directive,
    MembershipRules,
    NodeCommand,
    NodeRecord,
    NodeStage,
    Phase,
    StageReport,
)


def directive_for(state: CoordinatorState, node_name: str) -> Directive:
    """Return what a node is to do now."""
    node = state.node(node_name)
    if state.phase is Phase.FENCED:
        return Directive(NodeCommand.REFUSE)
    if state.phase is Phase.ENDED:
        return Directive(NodeCommand.LEAVE, state.generation)
    if node is None:
        return Directive(NodeCommand.WAIT)
    inside = node_name in state.members
    # left over from an older one
    if node.generation and (node.generation < state.generation or not inside):
        if node.stage not in STOPPED_STAGES:
            return Directive(NodeCommand.HALT, node.generation)
        if inside and state.phase in (Phase.STARTING, Phase.TRAINING):
            return Directive(NodeCommand.START, state.generation)
        return Directive(NodeCommand.WAIT)
    if not inside:
        return Directive(NodeCommand.WAIT)
    match state.phase:
        case Phase.STARTING | Phase.TRAINING:
            began = node.generation == state.generation
            return Directive(NodeCommand.WORK if began else NodeCommand.START, state.generation)
        case Phase.HALTING:
            if node.generation != state.generation:
                return Directive(NodeCommand.WAIT)  # it never began it
            command = NodeCommand.PAUSE if state.at_step_end else NodeCommand.HALT
            return Directive(command, state.generation)
        case Phase.GATHERING if node.generation and node.stage not in STOPPED_STAGES:
            # All had been given up, as after a sleep of the coordinator's own, and speak again.
            return Directive(NodeCommand.HALT, state.generation)
    return Directive(NodeCommand.WAIT, state.generation)


def next_deadline(state: CoordinatorState, rules: MembershipRules, now: float) -> float:
    """Return when, after `now`, `tick` may change something if no message comes before."""
    times = [min(node.last_heard + rules.node_timeout_s, node.leaving_at) for node in state.nodes]
    if state.phase is Phase.GATHERING:
        times += [state.phase_since + s for s in (rules.gather_wait_s, rules.gather_timeout_s)]
    if state.phase is Phase.TRAINING:
        times += [settled_at(state, n, rules) for n in state.nodes if has_spare_workers(state, n)]
        times += [pair.retry_at for pair in state.unreachable_pairs]
    return min((time for time in times if time > now), default=inf)


def are_all_leaving(state: CoordinatorState, names: frozenset[str]) -> bool:
    """Return True if all of these nodes that are left will be lost: they are to save the state.

    A node that stays and is not one of them, such as a spare, holds no state."""
    left = [node for node in state.nodes if node.name in names]
    return bool(left) and all(node.leaving_at < inf for node in left)


def awaited_members(state: CoordinatorState) -> tuple[str, ...]:
    """Return the members whose report is needed before the generation continues."""
    due = (NodeStage.WORKING, NodeStage.DONE) if state.phase is Phase.STARTING else STOPPED_STAGES
    return tuple(
        node.name
        for node in state.nodes
        if node.name in state.members
        and (node.must_report or node.stage not in due or node.generation != state.generation)
    )


def is_unchanged(node: NodeRecord, report: StageReport) -> bool:
    """Return True if nothing has changed at the node since its last report."""
    return (
        node.incarnation == report.incarnation
        and (node.generation, node.stage, node.ready_workers)
        == (report.generation, report.stage, report.ready_workers)
        and not node.must_report
        and node.stage in (NodeStage.IDLE, NodeStage.BUILDING, NodeStage.WORKING)
    )


def is_staying(node: NodeRecord) -> bool:
    return node.leaving_at == inf and not node.is_banned


def has_replacement(state: CoordinatorState, name: str) -> bool:
    """Return True if free places on other nodes can take the workers of a node."""
    node = state.node(name)
    if node is None or name not in state.members:
        return False
    free = state.all_free_places - state.free_places.get(name, 0)
    return 0 < node.used_places <= free


def has_unreachable_pair(state: CoordinatorState, names: frozenset[str], now: float) -> bool:
    """Return True if two of these nodes do not reach each other."""
    return any(
        {pair.one, pair.other} <= names for pair in state.unreachable_pairs if now < pair.retry_at
    )


def are_all_in_stage(state: CoordinatorState, stage: NodeStage) -> bool:
    nodes = [state.node(name) for name in state.members]
    return all(
        n is not None and n.generation == state.generation and n.stage is stage for n in nodes
    )


def has_spare_workers(state: CoordinatorState, node: NodeRecord) -> bool:
    """Return True if the node has processes, or room for them, that the generation does not use."""
    if node.name in state.members:
        return node.ready_workers is not None and node.ready_workers > node.used_places
    return node.ready_workers is None or node.ready_workers > 0


def settled_at(state: CoordinatorState, node: NodeRecord, rules: MembershipRules) -> float:
    """Return the time from which the node is reason enough to end a generation."""
    if node.name not in state.members:
        return max(node.joined_at, node.ready_changed_at) + rules.settle_time_s
    wait_s = rules.settle_time_s * 2.0 ** min(state.failed_growths, 10)
    return max(node.ready_changed_at, state.phase_since) + wait_s
