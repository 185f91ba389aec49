"""The nodes of a run, the links between them, and their memory: part of `holdfast doctor RUN`.

Each agent connects to the published address of every other one. So a link that is cut between two
nodes is seen, although this machine reaches both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.core.devices import is_accelerator
from holdfast.core.sharding.ownership import Ownership
from holdfast.core.sharding.run_table import run_state_table
from holdfast.core.sharding.state_table import ITEM_BYTES
from holdfast.doctor.checks import Check
from holdfast.elastic.agent.health import MINORITY
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.node_check import LISTENS, LinkResult, NodeMemory
from holdfast.errors import HoldfastError, LayoutError
from holdfast.launch.run.node_checks import AgentAnswer
from holdfast.layout import Topology
from holdfast.plan.memory.memory_use import contents_by_rank
from holdfast.report.formatting import format_bytes, format_duration, format_plural
from holdfast.wire.secret import SECRET_FILE_VARIABLE
from holdfast.wire.term import HolderReply

ADVICE = (
    "continue or restart the agents that do not answer, or mend the network. If their "
    "processes end, or after cluster.alone_seconds, this node continues without them"
)
NAMED_LINKS = 6  # Links of one node that a line names; of more nodes it names the slowest
SLOW_LINK_S = 0.1
FULL_SHARE = 0.8  # Share of a node's memory that the state may fill: activations come on top


@dataclass(frozen=True)
class NodeNeed:
    """Bytes that a run puts on one node.

    ranks: how many. state: parameters, gradients and moments of all of them. largest: of one rank.
    snapshots: of the memory for them, which is the node's, whatever computes.
    """

    ranks: int
    state: int
    largest: int
    snapshots: int


# --- nodes and links -------------------------------------------------------------------------
def check_nodes(record: GenerationRecord | None, answers: Mapping[str, AgentAnswer]) -> list[Check]:
    """Return a check for each node that was asked."""
    return [_node_check(name, answer, record) for name, answer in answers.items()]


def _node_check(name: str, answer: AgentAnswer, record: GenerationRecord | None) -> Check:
    topology = None if record is None else record.topology
    ranks = [] if topology is None else [r for r, n in enumerate(topology.nodes) if n == name]
    has = f"rank {', '.join(map(str, ranks))}" if ranks else "no rank"
    title, where = f"node {name}", answer.address
    match answer.reply:
        case HolderReply.LIVES:
            trip = answer.round_trip_s
            took = "" if trip is None else f", round trip {format_duration(trip)}"
            if answer.check is None:
                found = f"{has}{took}; its version cannot check its memory and links"
                return Check(title, "weak", found, where=where)
            health = answer.check.health
            where += f", /healthz at {health}" if health else ""
            found = f"{has}, {answer.check.state}{took}"
            if answer.check.state == MINORITY:
                found = f"{has}; it misses the coordinator and reaches no majority of the nodes"
                return Check(title, "fails", f"{found}: nothing is committed", ADVICE, where)
            return Check(title, "good", found, where=where)
        case HolderReply.REFUSED:
            found = f"{has}; its agent has ended, and the run continues without it"
            remedy = f"start it again on its machine: holdfast join RUN_FOLDER --node {name}"
        case HolderReply.UNSIGNED:
            found = f"{has}; what answers there does not accept the run's secret"
            remedy = f"name the run's secret in {SECRET_FILE_VARIABLE}, as on that node"
        case _:
            found = f"{has}; no answer reaches this machine"
            remedy = "see that this machine has a route to the address and no firewall drops it"
    return Check(title, "fails", found, remedy, where)


def check_links(answers: Mapping[str, AgentAnswer]) -> list[Check]:
    """Return the ways between the agents: a line a node, and one for each link that is cut."""
    checks: list[Check] = []
    for name, answer in answers.items():
        if answer.check is None or not answer.check.links:
            continue
        links = answer.check.links
        good = {n: link.seconds for n, link in links.items() if link.seconds is not None}
        checks += [
            _cut_link(name, other, link, answers[other].address)
            for other, link in links.items()
            if link.outcome != LISTENS
        ]
        if good:
            checks.append(_good_links(name, good))
    return checks


def _good_links(name: str, seconds: Mapping[str, float]) -> Check:
    slowest = max(seconds, key=lambda other: seconds[other])
    if len(seconds) <= NAMED_LINKS:
        found = ", ".join(f"{other} {format_duration(s)}" for other, s in seconds.items())
    else:
        quick = format_duration(min(seconds.values()))
        slow = format_duration(seconds[slowest])
        found = f"{format_plural(len(seconds), 'node')}, {quick} to {slow} ({slowest})"
    if seconds[slowest] > SLOW_LINK_S:
        remedy = f"ranks of {name} and {slowest} wait for each other: place them nearer"
        return Check(f"links of {name}", "weak", found, remedy)
    return Check(f"links of {name}", "good", found)


def _cut_link(name: str, other: str, link: LinkResult, address: str) -> Check:
    words = {"refused": "the connection is refused", "silent": "no packet arrives"}
    found = words.get(link.outcome, "it cannot connect")
    remedy = f"open all ports from {name} to {other}, or name another cluster.interface on {other}"
    return Check(f"link {name} to {other}", "fails", found, remedy, address)


# --- memory ----------------------------------------------------------------------------------
def needs_by_node(config: RunConfig, topology: Topology) -> dict[str, NodeNeed]:
    """Return what `holdfast layout show` knows of each node, and the snapshots."""
    table = run_state_table(config)
    sizes = {row.name: ITEM_BYTES[row.dtype] for row in table}
    owned = {
        rank: sum(box.size * sizes[box.name] for box in boxes)
        for rank, boxes in Ownership(topology, table).by_rank()
    }
    slots = config.checkpoint.most_slots
    held: dict[str, list[int]] = {}
    copies: dict[str, int] = {}
    for rank in contents_by_rank(config, topology):
        held.setdefault(rank.node, []).append(rank.held.total)
        copies[rank.node] = copies.get(rank.node, 0) + slots * owned.get(rank.rank, 0)
    return {
        node: NodeNeed(len(each), sum(each), max(each), copies[node]) for node, each in held.items()
    }


def check_memory(
    config: RunConfig, topology: Topology, memories: Mapping[str, NodeMemory], lives: bool
) -> list[Check]:
    """Compare what each node has with what the run puts there.

    Args:
        memories: by node; a node that is not in it is not known.
        lives: the run has taken its memory already, so what is free now is what is left.
    """
    try:
        needs = needs_by_node(config, topology)
    except (HoldfastError, ValueError, KeyError) as error:
        reason = error.message if isinstance(error, LayoutError) else str(error)
        return [Check("memory", "weak", f"what the run needs cannot be computed: {reason}")]
    shared = config.cluster.workers_per_device if is_accelerator(config.device) else 0
    return [
        _memory_check(name, need, memories[name], shared, lives)
        for name, need in needs.items()
        if name in memories
    ]


def _memory_check(name: str, need: NodeNeed, memory: NodeMemory, shared: int, lives: bool) -> Check:
    """shared: workers on each device; 0: the CPU computes."""
    state, copies = format_bytes(need.state), format_bytes(need.snapshots)
    found = (
        f"{format_plural(need.ranks, 'rank')} with {state} of parameters, gradients and moments, "
        f"{copies} for snapshots; {'it' if lives else 'this machine'} has "
        f"{format_bytes(memory.total)}, {format_bytes(memory.available)} free"
    )
    title, where = f"memory of {name}", "holdfast layout show"
    if shared and memory.accelerators:
        least = min(memory.accelerators) // shared
        found += f", {format_bytes(least)} on a device"
        found += f" for each of {shared} workers" if shared > 1 else ""
        if need.largest > FULL_SHARE * least:
            over = need.largest > least
            remedy = "activations come on top: use more ranks for a replica (layout.dp_shard, pp)"
            return Check(title, "fails" if over else "weak", found, remedy, where)
    on_node = need.snapshots if shared else need.state + need.snapshots
    if on_node > memory.total:
        return Check(title, "fails", found, "use more nodes, or a layout that shards more", where)
    if on_node > FULL_SHARE * memory.total or (not lives and on_node > memory.available):
        remedy = "activations come on top: free memory there, or use more nodes"
        return Check(title, "weak", found, remedy, where)
    return Check(title, "good", found)


def nodes_to_json(answers: Mapping[str, AgentAnswer], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the nodes for `--json`. names: of the newest generation, in order."""
    rows = []
    for name in dict.fromkeys([*names, *answers]):
        answer = answers.get(name)
        check = None if answer is None else answer.check
        rows.append(
            {
                "node": name,
                "address": "" if answer is None else answer.address,
                "reply": "" if answer is None else answer.reply.value,
                "round_trip_seconds": None if answer is None else answer.round_trip_s,
                "check": None if check is None else check.to_json(),
            }
        )
    return rows
