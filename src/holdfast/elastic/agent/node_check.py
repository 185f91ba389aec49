"""Answers a check of `holdfast doctor`: the memory of this node, and its way to other agents."""

from __future__ import annotations

import asyncio
import time

from holdfast.elastic.agent.health import HealthStatus
from holdfast.elastic.coordinator.liveness_probe import ProbeResult, probe
from holdfast.elastic.protocol.node_check import (
    LinkResult,
    NodeCheck,
    NodeCheckReply,
    NodeMemory,
)
from holdfast.machine.hardware import detect_hardware
from holdfast.machine.limits import available_memory

LINK_PROBES = 3
"""Connections to each agent: the quickest one is the round trip."""
LINK_PROBE_TIMEOUT_S = 1.5
"""Seconds for one connection; the kernel can resend one lost packet within it."""
MAX_PROBES_AT_A_TIME = 64


async def check_node(health: HealthStatus, check: NodeCheck) -> NodeCheckReply:
    """Probe the agents that the request names, and read this node's memory meanwhile."""
    turns = asyncio.Semaphore(MAX_PROBES_AT_A_TIME)
    memory, links = await asyncio.gather(
        asyncio.to_thread(_read_memory),
        asyncio.gather(*(_probe_link(address, turns) for address in check.agents.values())),
    )
    return NodeCheckReply(
        health.state,
        health.step,
        health.committed_step,
        memory,
        dict(zip(check.agents, links, strict=True)),
    )


async def _probe_link(address: str, turns: asyncio.Semaphore) -> LinkResult:
    """Connect to an address until it fails, `LINK_PROBES` times at most."""
    quickest: float | None = None
    async with turns:
        for _ in range(LINK_PROBES):
            begun = time.perf_counter()
            found = await probe(address, LINK_PROBE_TIMEOUT_S)
            seconds = time.perf_counter() - begun
            if found is not ProbeResult.LISTENS:
                return LinkResult(found.value)
            quickest = seconds if quickest is None else min(quickest, seconds)
    return LinkResult(ProbeResult.LISTENS.value, quickest)


def _read_memory() -> NodeMemory:
    machine = detect_hardware()
    devices = tuple(one.memory_bytes for one in machine.accelerators)
    return NodeMemory(machine.memory_bytes, available_memory(), devices)
