"""Membership: the coordinator's part, as a state machine without clock, network or store.

A `CoordinatorState` is what the coordinator of one term knows. Its inputs are messages (`came`,
`heard`, `gone`, `warned`), the run store's answers (`opened`, `taken`) and the time (`tick`). Each
call returns the next value. The value alone decides what is to be done: `directive` says what a
node is to do, `opening` which generation is to be made. Both may be asked again and again, so a
lost message costs a repetition and nothing else.

    gathering --enough nodes--> opening --object made--> starting --all work--> training
        ^                          ^                        |                      |
        |                          |                        '-------- fault -------+-- change
        '--- too few nodes ----- halting <-----------------------------------------'

    any --a newer term--> fenced                     any --done, or no hope--> ended

A node holds its generation and its workers' progress there, its *stage*. The next generation begins
when every node of the last has halted or is lost, so two never work at once. Its number in the run
store is unique, so two coordinators that do not know of each other cannot both continue. The other
part, the election of the coordinator, is `election`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from holdfast.policy.membership.queries import (
    are_all_in_stage,
    are_all_leaving,
    awaited_members,
    directive_for,
    has_spare_workers,
    has_unreachable_pair,
    is_staying,
    is_unchanged,
    next_deadline,
    settled_at,
)
from holdfast.policy.membership.state import (
    PHASE_TRANSITIONS,
    STAGE_TRANSITIONS,
    STOPPED_STAGES,
    TERMINAL_PHASES,
    WORKER_JOINED_REASON,
    CoordinatorState,
    Directive,
    MembershipRules,
    NodeCommand,
    NodeRecord,
    NodeStage,
    Phase,
    SelectNodes,
    StageReport,
    UnreachablePair,
    begin_term,
)

__all__ = [
    "PHASE_TRANSITIONS",
    "STAGE_TRANSITIONS",
    "STOPPED_STAGES",
    "TERMINAL_PHASES",
    "WORKER_JOINED_REASON",
    "CoordinatorState",
    "Directive",
    "MembershipRules",
    "NodeCommand",
    "NodeRecord",
    "NodeStage",
    "Phase",
    "SelectNodes",
    "StageReport",
    "UnreachablePair",
    "are_all_leaving",
    "awaited_members",
    "begin_term",
    "directive_for",
    "next_deadline",
]
"""Of `state` and `queries`, for modules that import them too."""


# --- what happens ---------------------------------------------------------------------------
def node_joined(
    state: CoordinatorState, node: NodeRecord, now: float, rules: MembershipRules
) -> CoordinatorState:
    """A node has joined, or speaks again after it was given up."""
    if state.phase in TERMINAL_PHASES:
        return state
    old = state.node(node.name)
    if old is not None and old.incarnation not in ("", node.incarnation):
        state = _remove_node(state, old, "its agent was started anew", now)
        old = None
    known = replace(node, joined_at=now, generation=0, stage=NodeStage.IDLE) if old is None else old
    known = replace(known, incarnation=node.incarnation, places=node.places, last_heard=now)
    ready = node.ready_workers
    report = StageReport(node.name, node.incarnation, node.generation, node.stage, ready)
    return reports_received(state.with_node(known), [report], now, rules)


def reports_received(
    state: CoordinatorState, reports: Iterable[StageReport], now: float, rules: MembershipRules
) -> CoordinatorState:
    """Take the nodes' reports of their generation and stage. A node that is unknown, or speaks for
    another process, must join first: nothing changes."""
    beating: dict[str, NodeRecord] = {}
    news = []
    for report in reports:
        node = state.node(report.name)
        if node is not None and is_unchanged(node, report):
            beating[node.name] = replace(node, last_heard=now)
        else:
            news.append(report)
    # A heartbeat changes nothing but when it was heard: thousands come without being weighed.
    state = state.with_nodes(beating)
    for report in news:
        state = _apply_report(state, report, now)
    return _advance(state, now, rules) if news else state


def _apply_report(state: CoordinatorState, report: StageReport, now: float) -> CoordinatorState:
    node, at, stage = state.node(report.name), report.generation, report.stage
    if node is None or node.incarnation != report.incarnation or state.phase in TERMINAL_PHASES:
        return state
    if at > state.generation:
        # Made by another coordinator: an older one, before it knew of us, or a newer one. Whether
        # there is a newer term the run store says when the next is made.
        state = replace(halt(state, "overtaken", now), generation=at)
    if at < node.generation:  # held up on the way: what it says is older than what is known
        return state.with_node(replace(node, last_heard=now))
    grew = now if report.ready_workers != node.ready_workers else node.ready_changed_at
    node = replace(node, last_heard=now, generation=at, stage=stage, must_report=False)
    node = replace(node, ready_workers=report.ready_workers, ready_changed_at=grew)
    state = state.with_node(node)
    current = at == state.generation and report.name in state.members
    if current and stage is NodeStage.BROKEN:
        return halt(state, "worker_lost", now)
    if current and stage is NodeStage.HELD and state.phase is not Phase.HALTING:
        return halt(state, "halted", now)  # another coordinator has halted it
    return state  # a node that holds after its step does not hurry the rest


def node_lost(
    state: CoordinatorState, name: str, cause: str, now: float, rules: MembershipRules
) -> CoordinatorState:
    """A node is known to be dead, or has left."""
    node = state.node(name)
    if node is None or state.phase in TERMINAL_PHASES:
        return state
    return _advance(_remove_node(state, node, cause, now), now, rules)


def node_leaving(
    state: CoordinatorState, name: str, leaving_at: float, now: float, rules: MembershipRules
) -> CoordinatorState:
    """Take a node's notice that it leaves by `leaving_at`: the next generation excludes it. If all
    members leave, that generation is made of them, saves the state and ends. Nodes that stay
    continue from there."""
    node = state.node(name)
    if node is None:
        return state
    state = state.with_node(replace(node, leaving_at=min(node.leaving_at, leaving_at)))
    last = node.leaving_at == inf and not any(is_staying(other) for other in state.nodes)
    goes_on = name in state.members and _can_continue_without_leavers(state, now, rules)
    if (last or goes_on) and not state.is_saving_last:
        state = halt(state, "notice", now, at_step_end=True)
    return _advance(state, now, rules)


def node_suspected(
    state: CoordinatorState, name: str, now: float, rules: MembershipRules
) -> CoordinatorState:
    """Leave a node a third of the silence limit to be heard. The agents that elected this
    coordinator in its place report that it has been silent for its time."""
    node = state.node(name)
    if node is None or not node.must_report:
        return state
    return state.with_node(
        replace(node, last_heard=min(node.last_heard, now - rules.node_timeout_s * 2 / 3))
    )


def clock_jumped(state: CoordinatorState, now: float, rules: MembershipRules) -> CoordinatorState:
    """The coordinator was suspended: leave every node a third of the limit to be heard."""
    since = now - rules.node_timeout_s * 2 / 3
    return replace(
        state, nodes=tuple(replace(n, last_heard=max(n.last_heard, since)) for n in state.nodes)
    )


def ban_node(
    state: CoordinatorState, name: str, reason: str, now: float, rules: MembershipRules
) -> CoordinatorState:
    """Exclude a node until a new term: it is sick, or slows all the rest down."""
    node = state.node(name)
    if node is None:
        return state
    state = state.with_node(replace(node, is_banned=True))
    if name in state.members and _can_continue_without_leavers(state, now, rules):
        state = halt(state, reason, now)
    return _advance(state, now, rules)


def link_failed(
    state: CoordinatorState, one: str, other: str, now: float, rules: MembershipRules
) -> CoordinatorState:
    """Keep two nodes apart that do not reach each other, though both are heard. The pair is tried
    again later; that wait doubles each time. If it is reported again shortly before, it is not
    tried."""
    known = state.node(one) is not None and state.node(other) is not None
    if state.phase in TERMINAL_PHASES or one == other or not known:
        return state
    pair = {one, other}
    old = next((a for a in state.unreachable_pairs if {a.one, a.other} == pair), None)
    if old is None or now >= old.retry_at - rules.node_timeout_s:
        tried = old is not None and pair <= state.members
        wait = rules.retry_pair_after_s if old is None else old.wait * (2 if tried else 1)
        until = now + (wait if old is None or tried else rules.retry_pair_after_s)
        rest = (a for a in state.unreachable_pairs if a is not old)
        state = replace(
            state, unreachable_pairs=(*rest, UnreachablePair(min(pair), max(pair), until, wait))
        )
    if pair <= state.members:
        state = halt(state, "link_cut", now)
        if state.phase is Phase.HALTING and state.reason == "hang":  # that is why all waited
            state = replace(state, reason="link_cut")
    return _advance(state, now, rules)


def halt(
    state: CoordinatorState, reason: str, now: float, *, at_step_end: bool = False
) -> CoordinatorState:
    """End the generation. at_step_end: at the end of the current step; a fault meanwhile ends it at
    once."""
    if state.phase is Phase.HALTING:
        return replace(state, at_step_end=state.at_step_end and at_step_end)
    if state.phase not in (Phase.STARTING, Phase.TRAINING):
        return state
    # A node that has not begun may have its order already, or be dead: ask before counting on it.
    nodes = tuple(
        replace(node, must_report=True)
        if node.name in state.members and node.generation != state.generation
        else node
        for node in state.nodes
    )
    halting = _enter_phase(state, Phase.HALTING, now)
    again = state.phase is Phase.STARTING and state.reason == WORKER_JOINED_REASON
    misgrown = state.failed_growths + 1 if again else state.failed_growths
    return replace(
        halting, nodes=nodes, reason=reason, at_step_end=at_step_end, failed_growths=misgrown
    )


def generation_created(
    state: CoordinatorState,
    generation: int,
    names: frozenset[str],
    now: float,
    rules: MembershipRules,
    used_places: Mapping[str, int] | None = None,
    *,
    is_saving_last: bool = False,
) -> CoordinatorState:
    """The run store has made the object of `generation`, of these nodes. A node that was lost
    meanwhile, or leaves without having been expected to, ends it at once.

    used_places: places that it uses of each; None: as many as are ready. is_saving_last: it was
    planned to save the state and to end, because all its nodes leave."""
    if state.pending_generation is None or generation != state.generation + 1:
        return state
    if used_places is None:
        used_places = {node.name: node.ready_workers or 0 for node in state.nodes}
    nodes = tuple(replace(n, used_places=used_places.get(n.name, 0)) for n in state.nodes)
    started = replace(
        _enter_phase(state, Phase.STARTING, now),
        generation=generation,
        members=names,
        pending_nodes=frozenset(),
        nodes=nodes,
        lost_members=(),
        at_step_end=False,
        is_saving_last=is_saving_last,
    )
    there = {node.name for node in state.nodes if node.joined_at <= state.phase_since}
    is_there = names <= there  # not lost, nor another process of that name by now
    if not is_there or has_unreachable_pair(started, names, now):
        reason = "link_cut" if is_there else "node_lost"
        started = replace(_enter_phase(started, Phase.HALTING, now), reason=reason)
    elif are_all_leaving(started, names) and not is_saving_last:
        started = halt(started, "notice", now, at_step_end=True)
    return _advance(started, now, rules)


def creation_rejected(
    state: CoordinatorState, newest_term: int, newest_generation: int, now: float
) -> CoordinatorState:
    """The object could not be made: there is a newer term, or an older coordinator that did not
    know of this one used the number. Then the next number is tried."""
    if newest_term > state.term:
        return _enter_phase(state, Phase.FENCED, now) if state.phase is not Phase.ENDED else state
    if state.phase is Phase.OPENING and newest_generation > state.generation:
        return replace(state, generation=newest_generation, members=frozenset())
    return state


def term_superseded(state: CoordinatorState, now: float) -> CoordinatorState:
    """The run store shows a newer term."""
    if state.phase in TERMINAL_PHASES:
        return state
    return _enter_phase(state, Phase.FENCED, now)


def finish(state: CoordinatorState, end_reason: str, now: float) -> CoordinatorState:
    """End the run: training is complete (`end_reason` ""), or cannot continue."""
    if state.phase in TERMINAL_PHASES:
        return state
    return replace(_enter_phase(state, Phase.ENDED, now), end_reason=end_reason)


def tick(state: CoordinatorState, now: float, rules: MembershipRules) -> CoordinatorState:
    """Time has passed."""
    if state.phase in TERMINAL_PHASES:
        return state
    for node in state.nodes:
        if now - node.last_heard > rules.node_timeout_s:
            state = _remove_node(state, node, f"not heard for {now - node.last_heard:.1f} s", now)
        elif now >= node.leaving_at:
            state = _remove_node(state, node, "its time was up", now)
    return _advance(state, now, rules)


# --- the rest --------------------------------------------------------------------------------
def usable_nodes(state: CoordinatorState) -> tuple[NodeRecord, ...]:
    """Return the nodes for a next generation. A node that still holds an older generation's work
    must let go of it first."""
    return tuple(node for node in state.nodes if is_staying(node) and _is_stopped(node))


def _is_stopped(node: NodeRecord) -> bool:
    """Return True if it is known that no worker works there."""
    return node.stage in STOPPED_STAGES and not node.must_report


def _can_continue_without_leavers(
    state: CoordinatorState, now: float, rules: MembershipRules
) -> bool:
    """Return True if the nodes that stay are enough. A node that leaves is better than too few."""
    return bool(_select_nodes(state, list(filter(is_staying, state.nodes)), now, rules))


def _select_nodes(
    state: CoordinatorState, nodes: Sequence[NodeRecord], now: float, rules: MembershipRules
) -> frozenset[str]:
    """Return which of these nodes a generation would use. If two do not reach each other, one is
    left out. It is the one that misses the most nodes, then a non-member, then the last by name."""
    pairs = [(pair.one, pair.other) for pair in state.unreachable_pairs if now < pair.retry_at]
    left = {node.name for node in nodes}
    while pairs := [(one, other) for one, other in pairs if one in left and other in left]:
        missed = Counter(name for pair in pairs for name in pair)
        left.remove(max(missed, key=lambda name: (missed[name], name not in state.members, name)))
    return frozenset(rules.select_nodes([node for node in nodes if node.name in left]))


def _advance(state: CoordinatorState, now: float, rules: MembershipRules) -> CoordinatorState:
    """Take every transition that follows from what is known."""
    match state.phase:
        case Phase.STARTING if are_all_in_stage(state, NodeStage.WORKING):
            misgrown = 0 if state.reason == WORKER_JOINED_REASON else state.failed_growths
            training = replace(_enter_phase(state, Phase.TRAINING, now), failed_growths=misgrown)
            return _advance(training, now, rules)
        case Phase.STARTING | Phase.TRAINING if are_all_in_stage(state, NodeStage.DONE):
            if state.is_saving_last and _can_continue_without_leavers(state, now, rules):
                return _advance(halt(state, "notice", now), now, rules)
            return finish(state, "", now)
        case Phase.TRAINING:
            return _halt_for_newcomers(state, now, rules)
        case Phase.HALTING if _is_halted(state):
            return _open_next_generation(state, now, rules)
        case Phase.GATHERING:
            waited = now - state.phase_since
            if _choose_nodes(state, now, rules) and (
                state.generation
                or rules.is_full(usable_nodes(state))
                or waited >= rules.gather_wait_s
            ):
                return _open_next_generation(state, now, rules)
            if waited >= rules.gather_timeout_s:
                return finish(state, f"too few nodes for {waited:.0f} s", now)
            return state
        case Phase.OPENING if not _can_still_create(state) or has_unreachable_pair(
            state, state.pending_nodes, now
        ):
            return _open_next_generation(state, now, rules)
    return state


def _can_still_create(state: CoordinatorState) -> bool:
    """Return True if the generation that is being made is still possible."""
    if are_all_leaving(state, state.pending_nodes):
        return not _is_state_saved(state) and all(
            (node := state.node(name)) is not None and _is_stopped(node)
            for name in state.pending_nodes
        )
    return state.pending_nodes <= {node.name for node in usable_nodes(state)}


def _is_halted(state: CoordinatorState) -> bool:
    """Return True if no worker works in the generation any more, nor in one before it."""
    return all(_is_stopped(node) for node in state.nodes if node.name in state.members)


def _halt_for_newcomers(
    state: CoordinatorState, now: float, rules: MembershipRules
) -> CoordinatorState:
    """End a generation for settled newcomers that the planner would use: nodes and, on nodes that
    take part already, processes."""
    if state.is_saving_last:
        return state
    inside = [n for n in state.nodes if n.name in state.members]
    came = [
        n for n in state.nodes if has_spare_workers(state, n) and now >= settled_at(state, n, rules)
    ]
    outside = [n for n in came if n.name not in state.members and is_staying(n) and _is_stopped(n)]
    if outside and not _select_nodes(state, [*inside, *outside], now, rules) <= state.members:
        return halt(state, "node_joined", now, at_step_end=True)
    staying = [n for n in inside if is_staying(n)]
    if len(outside) < len(came) and len(staying) == len(inside) and rules.can_add_workers(staying):
        return halt(state, WORKER_JOINED_REASON, now, at_step_end=True)
    return state


def _open_next_generation(
    state: CoordinatorState, now: float, rules: MembershipRules
) -> CoordinatorState:
    """Begin the next generation with the nodes that are there; no worker works now."""
    if names := _choose_nodes(state, now, rules):
        if state.phase is not Phase.OPENING:
            state = _enter_phase(state, Phase.OPENING, now)
        return replace(state, pending_nodes=names, phase_since=now)
    if _is_state_saved(state) and not any(map(is_staying, state.nodes)):
        return finish(state, "", now)
    return replace(_enter_phase(state, Phase.GATHERING, now), pending_nodes=frozenset())


def _choose_nodes(state: CoordinatorState, now: float, rules: MembershipRules) -> frozenset[str]:
    """Return the nodes of a next generation, () if none is possible. These are nodes that leave, if
    no node that stays holds the state and it is not saved."""
    if are_all_leaving(state, state.members) and not _is_state_saved(state):
        leaving = (node for node in state.nodes if node.leaving_at < inf and not node.is_banned)
        if names := _select_nodes(state, [*filter(_is_stopped, leaving)], now, rules):
            return names
    return _select_nodes(state, usable_nodes(state), now, rules)


def _is_state_saved(state: CoordinatorState) -> bool:
    """Return True if the generation was the last one of its nodes, and has done its work."""
    return state.is_saving_last and are_all_in_stage(state, NodeStage.DONE)


def _remove_node(
    state: CoordinatorState, node: NodeRecord, cause: str, now: float
) -> CoordinatorState:
    rest = tuple(other for other in state.nodes if other.name != node.name)
    apart = tuple(
        pair for pair in state.unreachable_pairs if node.name not in (pair.one, pair.other)
    )
    state = replace(state, nodes=rest, node_names=(), unreachable_pairs=apart)
    if node.name not in state.members:
        return state
    # it had nothing left to do
    if node.stage is NodeStage.DONE and node.generation == state.generation:
        return replace(state, members=state.members - {node.name})
    state = replace(state, lost_members=(*state.lost_members, (node.name, cause)))
    return halt(state, "notice" if node.leaving_at < inf else "node_lost", now)


def _enter_phase(state: CoordinatorState, phase: Phase, now: float) -> CoordinatorState:
    if phase not in PHASE_TRANSITIONS[state.phase]:
        raise ValueError(f"a reign that is {state.phase} cannot become {phase}")
    return replace(state, phase=phase, phase_since=now)
