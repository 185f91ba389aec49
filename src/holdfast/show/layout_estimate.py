"""The estimate of memory in `holdfast layout show`: a row for each rank."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.core.schedule.asynchronous import versions_under
from holdfast.core.sharding.reduction_tree import deal
from holdfast.layout import Topology
from holdfast.plan.memory.activations import device_kind, has_estimate, has_formula
from holdfast.plan.memory.communicators import BYTES_EACH, communicators_by_rank
from holdfast.plan.memory.estimate import RankEstimate, estimates_by_rank
from holdfast.plan.memory.zero2_cost import zero2_costs
from holdfast.plan.step_microbatches import microbatches
from holdfast.report.formatting import format_bytes
from holdfast.show.output import print_table

NO_FORMULA = (
    "activations: no formula covers this model, precision, mask, task, kept result, schedule or "
    "layout.quantized"
)
_COLUMNS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "moments": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "gathered": "gathered",
    "communication": "messages",
    "working": "working",
    "fragmentation": "fragments",
    "peak": "peak",
}
_EXPERTS = "experts: each with as many tokens as any other; the run's routing decides"
_SPREAD = (
    "no estimate of each rank's memory with layout.ep: activations take an even load of experts"
)
_CPU = "no fragmentation is added on a CPU; with device=cuda 5 % of what is not state is"
_DEVICE = (
    "fragments: 5 % of what is not state, for the device's allocator (an allowance, not measured)"
)


def print_estimate(config: RunConfig, topology: Topology) -> None:
    """Print what each rank holds at its fullest moment, or that no formula says it."""
    if not has_formula(config):
        print(NO_FORMULA)
        return
    if not has_estimate(config):
        print(_SPREAD)
        return
    if not config.model.vocab_size:
        print("an estimate of each rank's memory needs model.vocab_size=N")
        return
    print("estimate of each rank's memory at the fullest moment of a step")
    found = estimates_by_rank(config, topology)
    rows = [[rank, *_figures(each), each.moment] for rank, each in enumerate(found)]
    print_table(rows, ["rank", *_COLUMNS.values(), "moment"])
    if config.model.experts is not None:
        print(_EXPERTS)
    print(_CPU if device_kind(config) == "cpu" else _DEVICE)


def print_zero2(config: RunConfig, topology: Topology) -> None:
    """Print what both values of `layout.zero2_reduce` cost the first rank that they concern."""
    ranks = range(topology.world_size)
    rank = next((r for r in ranks if topology.replica_of(r).degree("dp_shard") > 1), None)
    if config.layout.zero != 2 or rank is None:
        return
    used, other = zero2_costs(config, topology, rank)
    print(
        f"layout.zero2_reduce {used.word}: rank {rank} sends {format_bytes(used.sent)} a step for "
        f"dp_shard and replicas, and holds sums of gradients of {format_bytes(used.held)}; with "
        f"{other.word}: {format_bytes(other.sent)} and {format_bytes(other.held)}"
    )


def print_versions(config: RunConfig, topology: Topology) -> None:
    """Print how many versions of the weights each stage holds under an asynchronous schedule."""
    if not config.layout.is_asynchronous:
        return
    replica, name = topology.replicas[0], config.layout.schedule
    share = len(deal(max(microbatches(config).values()), len(topology.replicas))[0])
    stages = replica.degree("pp")
    print(
        f"versions of the weights under {name}, on top, each in the dtype of the computation; and "
        "gradients of early backwards"
    )
    rows = [[s, versions_under(name, stages, s, share), s] for s in range(stages)]
    print_table(rows, ["stage", "versions", "gradients"])


def print_communicators(config: RunConfig, topology: Topology) -> None:
    """Print how many groups of the device's backend each rank has, if there are any."""
    counts = communicators_by_rank(config, topology)
    if not any(counts):
        return
    print(
        "communicators of the device's backend, not in the peak: "
        f"{format_bytes(BYTES_EACH)} each is a report on an old NCCL, not measured here"
    )
    rows = [[r, count, format_bytes(count * BYTES_EACH)] for r, count in enumerate(counts)]
    print_table(rows, ["rank", "communicators", "bytes"])


def _figures(estimate: RankEstimate) -> list[str]:
    return [format_bytes(getattr(estimate, field)) for field in _COLUMNS]


def estimates_as_json(config: RunConfig, topology: Topology) -> list[dict[str, Any] | None]:
    """A value for each rank; None where no formula says it."""
    if not has_estimate(config) or not config.model.vocab_size:
        return [None] * topology.world_size
    return [asdict(each) | {"peak": each.peak} for each in estimates_by_rank(config, topology)]
