"""Bytes that the two values of `layout.zero2_reduce` cost: sent in a step, and held for gradients.

P elements on a rank that dp_shard cuts n times, m microbatches of its replica in k pieces of the
reduction tree, R replicas. Both gather parameters once, (n - 1) / n P. What else a rank sends, in
elements of the sum:

    microbatch   m (n - 1) / n P + (k + 1) (R - 1) / R P / n
    step         k (1 - 1 / (R n)) P + (R - 1) / R P / n

With one replica and one piece that is (n - 1) / n P for `step`, the volume of data parallelism
(Rajbhandari et al., 2020, section 7). `step` holds sums of P elements, `microbatch` of P / n.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast.config.run import RunConfig
from holdfast.core.sharding.reduction_tree import ReductionTree, deal, maximal_subtrees
from holdfast.core.sharding.state_table import ITEM_BYTES, MIXED, STATE_DTYPE, mesh_box
from holdfast.layout import Topology
from holdfast.options.protocols import Cost, Formatting
from holdfast.plan.memory.gradient_buffers import gradient_buffers
from holdfast.plan.memory.memory_use import known_parameters
from holdfast.plan.step_microbatches import microbatches


@dataclass(frozen=True)
class Zero2Cost:
    """Bytes of one rank."""

    word: str
    sent: int  # in a step, for gradients and parameters
    held: int  # sums of gradients, with partial ones


class OptionCost(Cost):
    def describe(
        self, config: RunConfig, topology: Topology, formatting: Formatting
    ) -> Iterable[str]:
        """Return what both values cost the first rank that they concern."""
        ranks = range(topology.world_size)
        rank = next((r for r in ranks if topology.replica_of(r).degree("dp_shard") > 1), None)
        if config.layout.zero != 2 or rank is None:
            return
        (used, *costs), (other, *more) = (
            (cost.word, *map(formatting.format_bytes, (cost.sent, cost.held)))
            for cost in zero2_costs(config, topology, rank)
        )
        yield (
            f"layout.zero2_reduce {used}: rank {rank} sends {costs[0]} a step for dp_shard and "
            f"replicas, and holds sums of gradients of {costs[1]}; with {other}: {more[0]} and "
            f"{more[1]}"
        )


def zero2_costs(config: RunConfig, topology: Topology, rank: int) -> tuple[Zero2Cost, Zero2Cost]:
    """Return the cost of the value in use, and then of the other one, at the largest batch."""
    words = ["microbatch", "step"]
    if config.layout.zero2_reduce == "step":
        words.reverse()
    first, second = (_cost(config, topology, rank, word) for word in words)
    return first, second


def _cost(config: RunConfig, topology: Topology, rank: int, word: str) -> Zero2Cost:
    layout = config.layout.model_copy(update={"zero2_reduce": word})
    config = config.model_copy(update={"layout": layout})
    replica, at = topology.replica_of(rank), topology.coordinate(rank)
    shares = deal(max(microbatches(config).values()), len(topology.replicas))
    share = shares[at.replica]
    rows = (replace(row, shard_dim=None) for row in known_parameters(config))
    elements = sum(mesh_box(row, replica, at).size for row in rows)
    n, r = replica.degree("dp_shard"), len(topology.replicas)
    k = len(maximal_subtrees(ReductionTree(sum(map(len, shares))), share))
    if word == "step":
        sums = k * (1 - 1 / (r * n)) + (r - 1) / r / n
    else:
        sums = len(share) * (n - 1) / n + (k + 1) * (r - 1) / r / n
    state = ITEM_BYTES[STATE_DTYPE[config.train.precision]]
    computed = 2 if config.train.precision in MIXED else state
    sent = elements * (sums * state + (n - 1) / n * computed)
    return Zero2Cost(word, round(sent), gradient_buffers(config, topology, rank, shares).sums)
