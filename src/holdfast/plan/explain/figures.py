"""The figures of one layout: speed, utilisation, memory, money and energy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import chain
from math import ceil
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.core.flops import flops_per_token
from holdfast.layout import AXES
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost
from holdfast.plan.hardware.cluster import Cluster

HOUR_S = 3600.0
TOKENS = 1e9
"""Tokens that money and energy are stated for."""


@dataclass(frozen=True)
class Figures:
    """Of one layout."""

    step_s: float
    tokens_per_second: float
    mfu: float  # model FLOPs (attention halved) over the dense peak; 0 if no peak is known
    devices: int
    nodes: int
    memory: tuple[tuple[float, ...], ...]  # bytes of the fullest rank, by replica and pp
    rooms: tuple[tuple[float, ...], ...]  # bytes that their devices have
    usd_per_hour: float | None  # of all nodes used; None if a price is unknown
    kwh_per_hour: float  # at the devices' limits of power
    grams_co2_per_hour: float | None  # None if an intensity is unknown

    @property
    def peak_bytes(self) -> float:
        return max(peak for replica in self.memory for peak in replica)

    @property
    def room(self) -> float:
        """Bytes that the device with most in use has."""
        peaks, rooms = chain.from_iterable(self.memory), chain.from_iterable(self.rooms)
        return max(zip(peaks, rooms, strict=True))[1]

    @property
    def hours_per_tokens(self) -> float:
        """Hours for 1e9 tokens."""
        return TOKENS / self.tokens_per_second / HOUR_S

    @property
    def usd_per_tokens(self) -> float | None:
        """US dollars for 1e9 tokens; None if a price is unknown."""
        return None if self.usd_per_hour is None else self.usd_per_hour * self.hours_per_tokens

    @property
    def kwh_per_tokens(self) -> float:
        return self.kwh_per_hour * self.hours_per_tokens

    def usd_of(self, steps: int) -> float:
        """US dollars for so many steps; 0 if a price is unknown."""
        return (self.usd_per_hour or 0.0) * self.step_s * steps / HOUR_S

    def to_json(self) -> dict[str, Any]:
        """The same, with what follows from it. What is unknown is None."""
        return asdict(self) | {
            "mfu": self.mfu or None,
            "peak_bytes": self.peak_bytes,
            "room": self.room,
            "usd_per_1e9_tokens": self.usd_per_tokens,
            "kwh_per_1e9_tokens": self.kwh_per_tokens,
        }


def figures_of(problem: Problem, choice: Choice, cost: StepCost, flops_per_token: float) -> Figures:
    """flops_per_token: model FLOPs, forward and backward."""
    workload, devices = problem.workload, problem.devices
    used = choice.devices_by_pool
    peak = usd = watts = grams = 0.0
    nodes, is_priced, has_grams = 0, True, True
    for pool in (each for each in problem.cluster.pools if used.get(each.name)):
        device, count = pool.device_type(devices), used[pool.name]
        number = ceil(count / pool.devices)
        nodes += number
        peak += count * device.flops.get(workload.precision, 0.0)
        usd += number * (pool.usd_per_hour or 0.0)
        is_priced = is_priced and pool.usd_per_hour is not None
        has_grams = has_grams and pool.grams_co2_per_kwh is not None
        watts += count * device.power_w
        grams += count * device.power_w / 1000 * (pool.grams_co2_per_kwh or 0.0)
    tokens, rooms = workload.step_tokens / cost.step_s, Evaluator(problem).room
    return Figures(
        cost.step_s,
        tokens,
        tokens * flops_per_token / peak if peak else 0.0,
        choice.devices,
        nodes,
        tuple(tuple(stage.peak for stage in group.memory) for group in cost.groups),
        tuple(tuple(rooms(each.pool_at(n)) for n in range(each.pp)) for each in choice.replicas),
        usd if is_priced else None,
        watts / 1000,
        grams if has_grams else None,
    )


def model_flops(config: RunConfig) -> float:
    """FLOPs of a token, with causal attention halved."""
    return flops_per_token(config.model, config.data.sequence_length, "causal")


def words_of_degrees(group: ReplicaChoice) -> str:
    """`8 x pp 4, tp 2`: replicas, and degrees above 1; `2 replicas` of one device each."""
    names = zip(AXES, group.mesh_shape, strict=True)
    degrees = ", ".join(f"{axis} {n}" for axis, n in names if n > 1)
    if not degrees:
        return f"{group.dp_replicate} replica{'s' if group.dp_replicate > 1 else ''}"
    return f"{group.dp_replicate} x {degrees}"


def words_of_layout(choice: Choice, cluster: Cluster | None = None) -> str:
    """All kinds of replicas, and experts. cluster: for the pools of each, if it has several."""
    counts: dict[ReplicaChoice, int] = {}
    for group in choice.replicas:  # microbatches and recompute make no other kind
        kind = replace(group, dp_replicate=1, stages=(), microbatches=0, recompute=())
        counts[kind] = counts.get(kind, 0) + group.dp_replicate
    has_pools = cluster is not None and len(cluster.pools) > 1
    words = " + ".join(
        words_of_degrees(replace(kind, dp_replicate=count))
        + (f" on {' and '.join(dict.fromkeys(kind.pools))}" if has_pools else "")
        for kind, count in counts.items()
    )
    words += f", ep {choice.ep}" if choice.ep > 1 else ""
    for part, degree in zip(("attention", "ffn"), choice.part_tp, strict=False):
        words += f", {part} {degree}" if any(degree < g.tp for g in choice.replicas) else ""
    return f"{words}, optimizer on the host" if "optimizer" in choice.host else words


def words_of_way(choice: Choice) -> tuple[str, str, str]:
    """Schedule, ZeRO stage and recompute, in words; "-" where there is none to choose."""
    is_cut = any(group.pp > 1 for group in choice.replicas)
    schedule = choice.schedule + (f" x{choice.virtual}" if choice.virtual > 1 else "")
    words = dict.fromkeys(word for group in choice.replicas for word in group.recompute)
    zero = str(choice.zero) if choice.is_sharded else "-"
    return schedule if is_cut else "-", zero, "/".join(words)
