"""The estimate of memory in `holdfast layout show`: a row for each rank."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.layout import Topology
from holdfast.options.protocols import PicturePart
from holdfast.options.registry import keys_without_formula, option_costs
from holdfast.plan.memory.activations import device_kind, has_estimate, has_formula
from holdfast.plan.memory.communicators import BYTES_EACH, communicators_by_rank
from holdfast.plan.memory.estimate import RankEstimate, estimates_by_rank
from holdfast.report import formatting
from holdfast.report.formatting import format_bytes
from holdfast.show.output import print_table

_NO_FORMULA = (
    "activations: no formula covers this model, precision, mask, task, kept result, schedule or "
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
        print(_NO_FORMULA + keys_without_formula())
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


def print_options(config: RunConfig, topology: Topology, part: PicturePart) -> None:
    """Print the costs of options that follow this part of the picture."""
    for option in option_costs():
        if option.shown_after != part:
            continue
        for block in option.describe(config, topology, formatting):
            if isinstance(block, str):
                print(block)
            else:
                print_table(*block)


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
