"""Membership: the coordinator's part, as a state machine without clock, network or store.

A `Reign` is what the coordinator of one term knows. Its inputs are messages (`came`, `heard`,
`gone`, `warned`), the run store's answers (`opened`, `taken`) and the time (`tick`). Each call
returns the next value. The value alone decides what is to be done: `directive` says what a node is
to do, `opening` which generation is to be made. Both may be asked again and again, so a lost
message costs a repetition and nothing else.

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

from holdfast.policy.membership.state import (
    LET_GO,
    OVER,
    STAGES,
    TRANSITIONS,
    WORKER_JOINED,
    Apart,
    Directive,
    Fits,
    Node,
    Order,
    Phase,
    Reign,
    Report,
    Rules,
    Stage,
)

__all__ = [
    "LET_GO",
    "OVER",
    "STAGES",
    "TRANSITIONS",
    "WORKER_JOINED",
    "Apart",
    "Directive",
    "Fits",
    "Node",
    "Order",
    "Phase",
    "Reign",
    "Report",
    "Rules",
    "Stage",
]
"""Of `state`, for modules that import both."""


def begin(
    term: int, now: float, generation: int = 0, members: Sequence[Node] = (), reason: str = "start"
) -> Reign:
    """Begin a term. `generation` is the newest in the run store, with its nodes as stored there;
    these have the usual time to be heard."""
    expected = tuple(
        replace(node, came=now, heard=now, at=0, stage=Stage.IDLE, expected=True)
        for node in members
    )
    return Reign(
        term,
        Phase.STARTING if expected else Phase.GATHERING,
        generation,
        frozenset(node.name for node in expected),
        tuple(sorted(expected, key=lambda node: node.name)),
        since=now,
        reason=reason,
    )


def directive(reign: Reign, name: str) -> Directive:
    """Return what a node is to do now."""
    node = reign.node(name)
    if reign.phase is Phase.FENCED:
        return Directive(Order.REFUSE)
    if reign.phase is Phase.ENDED:
        return Directive(Order.LEAVE, reign.generation)
    if node is None:
        return Directive(Order.WAIT)
    inside = name in reign.members
    if node.at and (node.at < reign.generation or not inside):  # left over from an older one
        if node.stage not in LET_GO:
            return Directive(Order.HALT, node.at)
        starts = inside and reign.phase in (Phase.STARTING, Phase.TRAINING)
        return Directive(Order.START, reign.generation) if starts else Directive(Order.WAIT)
    if not inside:
        return Directive(Order.WAIT)
    match reign.phase:
        case Phase.STARTING | Phase.TRAINING:
            began = node.at == reign.generation
            return Directive(Order.WORK if began else Order.START, reign.generation)
        case Phase.HALTING:
            if node.at != reign.generation:
                return Directive(Order.WAIT)  # it never began it
            return Directive(Order.PAUSE if reign.gentle else Order.HALT, reign.generation)
        case Phase.GATHERING if node.at and node.stage not in LET_GO:
            # All had been given up, as after a sleep of the coordinator's own, and speak again.
            return Directive(Order.HALT, reign.generation)
    return Directive(Order.WAIT, reign.generation)


# --- what happens ---------------------------------------------------------------------------
def came(reign: Reign, new: Node, now: float, rules: Rules) -> Reign:
    """A node has joined, or speaks again after it was given up."""
    if reign.phase in OVER:
        return reign
    old = reign.node(new.name)
    if old is not None and old.mark not in ("", new.mark):
        reign = _lose(reign, old, "its agent was started anew", now)
        old = None
    known = replace(new, came=now, at=0, stage=Stage.IDLE) if old is None else old
    known = replace(known, mark=new.mark, places=new.places, heard=now)
    report = Report(new.name, new.mark, new.at, new.stage, new.ready)
    return heard(reign.put(known), [report], now, rules)


def heard(reign: Reign, reports: Iterable[Report], now: float, rules: Rules) -> Reign:
    """Take the nodes' reports of their generation and stage. A node that is unknown, or speaks for
    another process, must join first: nothing changes."""
    beating: dict[str, Node] = {}
    news = []
    for report in reports:
        node = reign.node(report.name)
        if node is not None and _as_before(node, report):
            beating[node.name] = replace(node, heard=now)
        else:
            news.append(report)
    # A heartbeat changes nothing but when it was heard: thousands come without being weighed.
    reign = reign.put_all(beating)
    for report in news:
        reign = _heard(reign, report, now)
    return _go_on(reign, now, rules) if news else reign


def _as_before(node: Node, report: Report) -> bool:
    """Return True if nothing has changed at the node since its last report."""
    return (
        node.mark == report.mark
        and (node.at, node.stage, node.ready) == (report.at, report.stage, report.ready)
        and not node.expected
        and node.stage in (Stage.IDLE, Stage.BUILDING, Stage.WORKING)
    )


def _heard(reign: Reign, report: Report, now: float) -> Reign:
    node, at, stage = reign.node(report.name), report.at, report.stage
    if node is None or node.mark != report.mark or reign.phase in OVER:
        return reign
    if at > reign.generation:
        # Made by another coordinator: an older one, before it knew of us, or a newer one. Whether
        # there is a newer term the run store says when the next is made.
        reign = replace(halt(reign, "overtaken", now), generation=at)
    if at < node.at:  # held up on the way: what it says is older than what is known
        return reign.put(replace(node, heard=now))
    grew = now if report.ready != node.ready else node.grew
    reign = reign.put(
        replace(node, heard=now, at=at, stage=stage, expected=False, ready=report.ready, grew=grew)
    )
    current = at == reign.generation and report.name in reign.members
    if current and stage is Stage.BROKEN:
        return halt(reign, "worker_lost", now)
    if current and stage is Stage.HELD and reign.phase is not Phase.HALTING:
        return halt(reign, "halted", now)  # another coordinator has halted it
    return reign  # a node that holds after its step does not hurry the rest


def gone(reign: Reign, name: str, cause: str, now: float, rules: Rules) -> Reign:
    """A node is known to be dead, or has left."""
    node = reign.node(name)
    if node is None or reign.phase in OVER:
        return reign
    return _go_on(_lose(reign, node, cause, now), now, rules)


def warned(reign: Reign, name: str, until: float, now: float, rules: Rules) -> Reign:
    """Take a node's notice that it leaves by `until`: the next generation excludes it. If all nodes
    leave, that generation is their last one (`leaving_all`)."""
    node = reign.node(name)
    if node is None:
        return reign
    reign = reign.put(replace(node, until=min(node.until, until)))
    last = node.until == inf and not any(_stays(other) for other in reign.nodes)
    if name in reign.members and (last or _without(reign, now, rules)):
        reign = halt(reign, "notice", now, gentle=True)
    return _go_on(reign, now, rules)


def doubted(reign: Reign, name: str, now: float, rules: Rules) -> Reign:
    """Leave a node a third of the silence limit to be heard. The agents that elected this
    coordinator in its place report that it has been silent for its time."""
    node = reign.node(name)
    if node is None or not node.expected:
        return reign
    return reign.put(replace(node, heard=min(node.heard, now - rules.lost_after * 2 / 3)))


def overslept(reign: Reign, now: float, rules: Rules) -> Reign:
    """The coordinator was suspended: leave every node a third of the limit to be heard."""
    since = now - rules.lost_after * 2 / 3
    return replace(reign, nodes=tuple(replace(n, heard=max(n.heard, since)) for n in reign.nodes))


def ban(reign: Reign, name: str, reason: str, now: float, rules: Rules) -> Reign:
    """Exclude a node until a new term: it is sick, or slows all the rest down."""
    node = reign.node(name)
    if node is None:
        return reign
    reign = reign.put(replace(node, banned=True))
    if name in reign.members and _without(reign, now, rules):
        reign = halt(reign, reason, now)
    return _go_on(reign, now, rules)


def parted(reign: Reign, one: str, other: str, now: float, rules: Rules) -> Reign:
    """Keep two nodes apart that do not reach each other, though both are heard. The pair is tried
    again later; that wait doubles each time. If it is reported again shortly before, it is not
    tried."""
    known = reign.node(one) is not None and reign.node(other) is not None
    if reign.phase in OVER or one == other or not known:
        return reign
    pair = {one, other}
    old = next((a for a in reign.apart if {a.one, a.other} == pair), None)
    if old is None or now >= old.until - rules.lost_after:
        tried = old is not None and pair <= reign.members
        wait = rules.apart if old is None else old.wait * (2 if tried else 1)
        until = now + (wait if old is None or tried else rules.apart)
        rest = (a for a in reign.apart if a is not old)
        reign = replace(reign, apart=(*rest, Apart(min(pair), max(pair), until, wait)))
    if pair <= reign.members:
        reign = halt(reign, "link_cut", now)
        if reign.phase is Phase.HALTING and reign.reason == "hang":  # that is why all waited
            reign = replace(reign, reason="link_cut")
    return _go_on(reign, now, rules)


def halt(reign: Reign, reason: str, now: float, *, gentle: bool = False) -> Reign:
    """End the generation. gentle: at the end of the current step; a fault meanwhile ends it at
    once."""
    if reign.phase is Phase.HALTING:
        return replace(reign, gentle=reign.gentle and gentle)
    if reign.phase not in (Phase.STARTING, Phase.TRAINING):
        return reign
    # A node that has not begun may have its order already, or be dead: ask before counting on it.
    nodes = tuple(
        replace(node, expected=True)
        if node.name in reign.members and node.at != reign.generation
        else node
        for node in reign.nodes
    )
    halting = _become(reign, Phase.HALTING, now)
    again = reign.phase is Phase.STARTING and reign.reason == WORKER_JOINED
    misgrown = reign.misgrown + 1 if again else reign.misgrown
    return replace(halting, nodes=nodes, reason=reason, gentle=gentle, misgrown=misgrown)


def opened(
    reign: Reign, generation: int, names: frozenset[str], now: float, rules: Rules,
    taken: Mapping[str, int] | None = None,
) -> Reign:  # fmt: skip
    """The run store has made the object of `generation`, of these nodes. A node lost meanwhile ends
    it at once. taken: places that it uses of each; None: as many as are ready."""
    if reign.opening is None or generation != reign.generation + 1:
        return reign
    nodes = tuple(
        replace(node, taken=(node.ready or 0) if taken is None else taken.get(node.name, 0))
        for node in reign.nodes
    )
    started = replace(
        _become(reign, Phase.STARTING, now), generation=generation, members=names,
        wanted=frozenset(), nodes=nodes, lost=(), gentle=False,
    )  # fmt: skip
    there = {node.name for node in reign.nodes if node.came <= reign.since}
    if not names <= there:  # lost, or another process of that name by now
        started = replace(_become(started, Phase.HALTING, now), reason="node_lost")
    elif _split(started, names, now):
        started = replace(_become(started, Phase.HALTING, now), reason="link_cut")
    return _go_on(started, now, rules)


def taken(reign: Reign, newest_term: int, newest_generation: int, now: float) -> Reign:
    """The object could not be made: there is a newer term, or an older coordinator that did not
    know of this one used the number. Then the next number is tried."""
    if newest_term > reign.term:
        return _become(reign, Phase.FENCED, now) if reign.phase is not Phase.ENDED else reign
    if reign.phase is Phase.OPENING and newest_generation > reign.generation:
        return replace(reign, generation=newest_generation, members=frozenset())
    return reign


def fenced(reign: Reign, now: float) -> Reign:
    """The run store shows a newer term."""
    if reign.phase in OVER:
        return reign
    return _become(reign, Phase.FENCED, now)


def done(reign: Reign, verdict: str, now: float) -> Reign:
    """End the run: training is complete (`verdict` ""), or cannot continue."""
    if reign.phase in OVER:
        return reign
    return replace(_become(reign, Phase.ENDED, now), verdict=verdict)


def tick(reign: Reign, now: float, rules: Rules) -> Reign:
    """Time has passed."""
    if reign.phase in OVER:
        return reign
    for node in reign.nodes:
        if now - node.heard > rules.lost_after:
            reign = _lose(reign, node, f"not heard for {now - node.heard:.1f} s", now)
        elif now >= node.until:
            reign = _lose(reign, node, "its time was up", now)
    return _go_on(reign, now, rules)


def deadline(reign: Reign, rules: Rules, now: float) -> float:
    """Return when, after `now`, `tick` may change something if no message comes before."""
    times = [min(node.heard + rules.lost_after, node.until) for node in reign.nodes]
    if reign.phase is Phase.GATHERING:
        times += [reign.since + rules.gather, reign.since + rules.patience]
    if reign.phase is Phase.TRAINING:
        times += [_settled(reign, n, rules) for n in reign.nodes if _offers(reign, n)]
        times += [pair.until for pair in reign.apart]
    return min((time for time in times if time > now), default=inf)


# --- the rest --------------------------------------------------------------------------------
def usable(reign: Reign) -> tuple[Node, ...]:
    """Return the nodes for a next generation. A node that still holds an older generation's work
    must let go of it first."""
    return tuple(node for node in reign.nodes if _stays(node) and _free(node))


def leaving_all(reign: Reign, names: frozenset[str]) -> bool:
    """Return True if all nodes will be lost, with these: what they hold is to be saved."""
    there = {node.name for node in reign.nodes}
    return bool(names & there) and all(node.until < inf for node in reign.nodes)


def awaited(reign: Reign) -> tuple[str, ...]:
    """Return the members whose report is needed before the generation continues."""
    due = (Stage.WORKING, Stage.DONE) if reign.phase is Phase.STARTING else LET_GO
    return tuple(
        node.name
        for node in reign.nodes
        if node.name in reign.members
        and (node.expected or node.stage not in due or node.at != reign.generation)
    )


def _free(node: Node) -> bool:
    """Return True if it is known that no worker works there."""
    return node.stage in LET_GO and not node.expected


def _stays(node: Node) -> bool:
    return node.until == inf and not node.banned


def _without(reign: Reign, now: float, rules: Rules) -> bool:
    """Return True if the nodes that stay are enough. A node that leaves is better than too few."""
    return bool(_fitting(reign, [node for node in reign.nodes if _stays(node)], now, rules))


def _fitting(reign: Reign, nodes: Sequence[Node], now: float, rules: Rules) -> frozenset[str]:
    """Return which of these nodes a generation would use. If two do not reach each other, one is
    left out. It is the one that misses the most nodes, then a non-member, then the last by name."""
    pairs = [(pair.one, pair.other) for pair in reign.apart if now < pair.until]
    left = {node.name for node in nodes}
    while pairs := [(one, other) for one, other in pairs if one in left and other in left]:
        missed = Counter(name for pair in pairs for name in pair)
        left.remove(max(missed, key=lambda name: (missed[name], name not in reign.members, name)))
    return frozenset(rules.fits([node for node in nodes if node.name in left]))


def _go_on(reign: Reign, now: float, rules: Rules) -> Reign:
    """Take every transition that follows from what is known."""
    match reign.phase:
        case Phase.STARTING if _all(reign, Stage.WORKING):
            misgrown = 0 if reign.reason == WORKER_JOINED else reign.misgrown
            training = replace(_become(reign, Phase.TRAINING, now), misgrown=misgrown)
            return _go_on(training, now, rules)
        case Phase.STARTING | Phase.TRAINING if _all(reign, Stage.DONE):
            return done(reign, "", now)
        case Phase.TRAINING:
            return _grow(reign, now, rules)
        case Phase.HALTING if _halted(reign):
            return _next(reign, now, rules)
        case Phase.GATHERING:
            return _gather(reign, now, rules)
        case Phase.OPENING if not _as_wanted(reign) or _split(reign, reign.wanted, now):
            return _next(reign, now, rules)
    return reign


def _split(reign: Reign, names: frozenset[str], now: float) -> bool:
    """Return True if two of these nodes do not reach each other."""
    return any({pair.one, pair.other} <= names for pair in reign.apart if now < pair.until)


def _as_wanted(reign: Reign) -> bool:
    """Return True if the generation that is being made is still possible."""
    if leaving_all(reign, reign.wanted):
        return all((node := reign.node(name)) is not None and _free(node) for name in reign.wanted)
    return reign.wanted <= {node.name for node in usable(reign)}


def _all(reign: Reign, stage: Stage) -> bool:
    nodes = [reign.node(name) for name in reign.members]
    return all(n is not None and n.at == reign.generation and n.stage is stage for n in nodes)


def _halted(reign: Reign) -> bool:
    """Return True if no worker works in the generation any more, nor in one before it."""
    return all(_free(node) for node in reign.nodes if node.name in reign.members)


def _grow(reign: Reign, now: float, rules: Rules) -> Reign:
    """End a generation for settled newcomers that the planner would use: nodes and, on nodes that
    take part already, processes."""
    inside = [n for n in reign.nodes if n.name in reign.members]
    came = [n for n in reign.nodes if _offers(reign, n) and now >= _settled(reign, n, rules)]
    outside = [n for n in came if n.name not in reign.members and _stays(n) and _free(n)]
    if outside and not _fitting(reign, [*inside, *outside], now, rules) <= reign.members:
        return halt(reign, "node_joined", now, gentle=True)
    staying = [n for n in inside if _stays(n)]
    if len(outside) < len(came) and len(staying) == len(inside) and rules.more(staying):
        return halt(reign, WORKER_JOINED, now, gentle=True)
    return reign


def _offers(reign: Reign, node: Node) -> bool:
    """Return True if the node has processes, or room for them, that the generation does not use."""
    if node.name in reign.members:
        return node.ready is not None and node.ready > node.taken
    return node.ready is None or node.ready > 0


def _settled(reign: Reign, node: Node, rules: Rules) -> float:
    """Return the time from which the node is reason enough to end a generation."""
    if node.name not in reign.members:
        return max(node.came, node.grew) + rules.settle
    return max(node.grew, reign.since) + rules.settle * 2.0 ** min(reign.misgrown, 10)


def _next(reign: Reign, now: float, rules: Rules) -> Reign:
    """Begin the next generation with the nodes that are there; no worker works now."""
    names = _fitting(reign, _next_of(reign), now, rules)
    if names:
        if reign.phase is not Phase.OPENING:
            reign = _become(reign, Phase.OPENING, now)
        return replace(reign, wanted=names, since=now)
    return replace(_become(reign, Phase.GATHERING, now), wanted=frozenset())


def _next_of(reign: Reign) -> tuple[Node, ...]:
    """Return the nodes that a next generation may be made of, even if it is the last one of all."""
    if leaving_all(reign, reign.members):
        return tuple(node for node in reign.nodes if _free(node) and not node.banned)
    return usable(reign)


def _gather(reign: Reign, now: float, rules: Rules) -> Reign:
    nodes = _next_of(reign)
    waited = now - reign.since
    if _fitting(reign, nodes, now, rules) and (
        reign.generation or rules.full(nodes) or waited >= rules.gather
    ):
        return _next(reign, now, rules)
    if waited >= rules.patience:
        return done(reign, f"too few nodes for {waited:.0f} s", now)
    return reign


def _lose(reign: Reign, node: Node, cause: str, now: float) -> Reign:
    rest = tuple(other for other in reign.nodes if other.name != node.name)
    apart = tuple(pair for pair in reign.apart if node.name not in (pair.one, pair.other))
    reign = replace(reign, nodes=rest, names=(), apart=apart)
    if node.name not in reign.members:
        return reign
    if node.stage is Stage.DONE and node.at == reign.generation:  # it had nothing left to do
        return replace(reign, members=reign.members - {node.name})
    reign = replace(reign, lost=(*reign.lost, (node.name, cause)))
    return halt(reign, "notice" if node.until < inf else "node_lost", now)


def _become(reign: Reign, phase: Phase, now: float) -> Reign:
    if phase not in TRANSITIONS[reign.phase]:
        raise ValueError(f"a reign that is {reign.phase} cannot become {phase}")
    return replace(reign, phase=phase, since=now)
