"""Asks the agents of a live run what they have, and how long their answers take."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.protocol.node_check import NODE_CHECK_PATH, NodeCheck, NodeCheckReply
from holdfast.errors import HoldfastError
from holdfast.launch.run.holder import MAX_PROBED_NODES
from holdfast.wire.http.client import NO_GENERATION, Client
from holdfast.wire.secret import Secret
from holdfast.wire.term import TERM_PATH, HolderReply, probe_holder

ROUND_TRIPS = 5  # Signed requests to each agent; the median of their times is its round trip
ANSWER_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 60.0
"""Seconds that an agent may take to connect to the rest: one that is unreachable takes 1.5 s."""


@dataclass(frozen=True)
class AgentAnswer:
    """What one agent answered.

    reply: whether it lives. round_trip_s: of a signed request; None without an answer. check: None
    if it does not live, or is of a version that knows no such request.
    """

    address: str
    reply: HolderReply
    round_trip_s: float | None = None
    check: NodeCheckReply | None = None


def agent_addresses(
    record: GenerationRecord | None, holder: Mapping[str, Any] | None
) -> Mapping[str, str]:
    """Return the published address of each agent, and of the one that leads."""
    known = {} if record is None else dict(record.addresses)
    holder = holder or {}
    name, address = str(holder.get("node", "")), str(holder.get("address", ""))
    if address and address not in known.values():
        known[name if name not in known else f"{name} (leads)"] = address
    return known


def ask_agents(addresses: Mapping[str, str], secrets: Sequence[Secret]) -> dict[str, AgentAnswer]:
    """Ask the agents all at once. addresses: "host:port" by node."""
    chosen = dict(list(addresses.items())[:MAX_PROBED_NODES])
    if not chosen:
        return {}

    def ask(name: str) -> AgentAnswer:
        others = {other: at for other, at in chosen.items() if other != name}
        address = chosen[name]
        reply = HolderReply.UNSIGNED
        for secret in secrets:
            reply = probe_holder(address, secret, ANSWER_TIMEOUT_S)
            if reply is HolderReply.LIVES:
                return _ask_live_agent(address, secret, others)
            if reply is not HolderReply.UNSIGNED:
                break
        return AgentAnswer(address, reply)

    with ThreadPoolExecutor(len(chosen), "ask") as threads:
        return dict(zip(chosen, threads.map(ask, chosen), strict=True))


def _ask_live_agent(address: str, secret: Secret, others: Mapping[str, str]) -> AgentAnswer:
    client = Client(address, secret, NO_GENERATION, connect_retry_s=0.0)
    seconds: list[float] = []
    check = None
    try:
        with suppress(HoldfastError):  # it has just ended, or does not know the request
            client.post(TERM_PATH, {}, ANSWER_TIMEOUT_S)  # connects, and learns its identity
            for _ in range(ROUND_TRIPS):
                begun = time.perf_counter()
                client.post(TERM_PATH, {}, ANSWER_TIMEOUT_S)
                seconds.append(time.perf_counter() - begun)
            found = client.post(NODE_CHECK_PATH, NodeCheck(others).to_json(), CHECK_TIMEOUT_S)
            check = NodeCheckReply.from_json(found)
    finally:
        client.close()
    return AgentAnswer(address, HolderReply.LIVES, median(seconds) if seconds else None, check)
