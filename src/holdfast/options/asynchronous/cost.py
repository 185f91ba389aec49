"""What a pipeline holds that is not emptied between steps: versions of its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from holdfast.config.run import RunConfig
from holdfast.core.sharding.reduction_tree import deal
from holdfast.layout import Topology
from holdfast.options.protocols import Cost, Formatting, PicturePart, Table
from holdfast.plan.step_microbatches import microbatches


class OptionCost(Cost):
    shown_after: ClassVar[PicturePart] = "estimate"

    def describe(
        self, config: RunConfig, topology: Topology, formatting: Formatting
    ) -> Iterable[str | Table]:
        """Return how many versions of the weights each stage holds."""
        if not config.layout.is_asynchronous:
            return
        replica, name = topology.replicas[0], config.layout.schedule
        share = len(deal(max(microbatches(config).values()), len(topology.replicas))[0])
        stages = replica.degree("pp")
        yield (
            f"versions of the weights under {name}, on top, each in the dtype of the computation; "
            "and gradients of early backwards"
        )
        rows = [[s, versions_under(name, stages, s, share), s] for s in range(stages)]
        yield rows, ["stage", "versions", "gradients"]


def weight_versions(ranks: int, stage: int, microbatches: int) -> int:
    """The versions of its weights that a stage holds if each backward uses those of its forward.

    2 (p - 1 - s) microbatches are between their forward and their backward at the end of a step,
    and a step has `microbatches`. The newest weights are one version more.
    """
    return 1 + -(-2 * (ranks - 1 - stage) // microbatches)


def versions_under(name: str, ranks: int, stage: int, microbatches: int) -> int:
    """The versions that a stage holds under one of these schedules."""
    if name == "pipedream":
        return weight_versions(ranks, stage, microbatches)
    return 2 if name == "pipedream-2bw" else 1
