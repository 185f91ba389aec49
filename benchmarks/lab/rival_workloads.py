"""The workloads of the comparison: measured grids and one from a closed form, with sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from holdfast.policy.saving.tiers import MEMORY, PEERS
from holdfast_lab.engine.interfaces import Costs, OperatingPoint
from holdfast_lab.rivals.acute import ACUTE, COPY_PAUSE, LINK, MEMCPY, STORE, Hierarchy, Level
from holdfast_lab.rivals.grid_cost import Shape

BERT_LARGE, GPT_6_7B = "bert", "gpt-6.7b"
_ADAM_BYTES = 12
"""Of a parameter and its two moments in fp32, as Parcae counts them."""

P3_SPOT, A100_SPOT = 0.91, 1.1020155
"""Dollars an hour of a spot node. p3.2xlarge: the constant of Bamboo's simulator. a2-highgpu-1g:
us-central1 in May 2023, the first price that is known; the trace is of 2021."""

_BATCHES: Mapping[str, tuple[int, int, int]] = {BERT_LARGE: (1024, 512, 8), GPT_6_7B: (64, 1024, 1)}
"""Samples of a step, tokens of a sample, samples of a microbatch. Source: JF-D/Parcae,
liveput/model.py."""
_PARAMETERS = {BERT_LARGE: 366e6, GPT_6_7B: 7.68e9}


@dataclass(frozen=True)
class GridCost:
    """Tokens a second by (dp, pp), with the constants that all policies pay alike.

    batch_tokens: of a step, whatever the layout. microbatches: of a step, over all replicas.
    """

    rates: Mapping[Shape, float]
    batch_tokens: float
    microbatches: int
    costs: Costs = field(default_factory=Costs)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(sorted(self.rates))

    @cached_property
    def wanted(self) -> int:
        """Nodes of the fastest layout."""
        replicas, stages = max(self.rates, key=lambda shape: self.rates[shape])
        return replicas * stages

    @cached_property
    def _points(self) -> Mapping[Shape, OperatingPoint]:
        return {
            (dp, pp): OperatingPoint(
                f"{dp} x {pp}",
                dp * pp,
                rate,
                self.batch_tokens / rate,
                dp,
                dp * pp * self.costs.busy_watts,
            )
            for (dp, pp), rate in self.rates.items()
        }

    @cached_property
    def _best(self) -> tuple[OperatingPoint | None, ...]:
        """The fastest layout on at most so many nodes; of equal ones that on the fewest nodes."""
        best: list[OperatingPoint | None] = [None]
        for nodes in range(1, max(dp * pp for dp, pp in self.rates) + 1):
            found = best[-1]
            for (dp, pp), rate in sorted(self.rates.items()):
                if dp * pp == nodes and (found is None or rate > found.tokens_per_s):
                    found = self._points[dp, pp]
            best.append(found)
        return tuple(best)

    def point(self, nodes: int) -> OperatingPoint | None:
        return self._best[max(0, min(nodes, len(self._best) - 1))]

    def shaped(self, replicas: int, nodes_per_replica: int) -> OperatingPoint | None:
        return self._points.get((replicas, nodes_per_replica))

    def idle_share(self, dp: int, pp: int) -> float:
        return (pp - 1) / (ceil(self.microbatches / dp) + pp - 1)


def p3_costs(model: str) -> Costs:
    """One V100 a node. peer_bandwidth: 1 GiB in 1.198 s, as Parcae measured; the store likewise,
    and 2 GB/s in all: assumed."""
    return Costs(
        state_bytes=_PARAMETERS[model] * _ADAM_BYTES,
        store_bandwidth=2e9,
        node_store_bandwidth=0.9e9,
        peer_bandwidth=0.9e9,
        usd_per_node_hour=P3_SPOT,
    )


def measured_grid(rows: Iterable[Mapping[str, str]], model: str) -> GridCost:
    """A model of `parcae_throughput.csv`, from its rows."""
    batch, tokens, microbatch = _BATCHES[model]
    rates = {
        (int(row["dp"]), int(row["pp"])): float(row["samples_per_s"]) * tokens
        for row in rows
        if row["model"] == model
    }
    return GridCost(rates, float(batch * tokens), batch // microbatch, p3_costs(model))


@dataclass(frozen=True)
class PipelineModel:
    """What the closed form needs. Times in seconds, sizes in bytes.

    layers: equal ones. layer_s: forward and backward pass of one layer over one microbatch.
    layer_state, layer_gradient: bytes of the state and of the gradient of a layer. node_memory: for
    the state. boundary: bytes between two stages for one microbatch. bandwidth: between two nodes.
    """

    layers: int
    layer_s: float
    layer_state: float
    layer_gradient: float
    node_memory: float
    boundary: float
    bandwidth: float
    microbatches: int
    batch_tokens: float


def pipeline_rate(model: PipelineModel, dp: int, pp: int) -> float:
    """Tokens a second of a 1F1B pipeline, 0 if a stage does not fit on a node.

    A step is (m + pp - 1) times the largest stage with its send, for m microbatches of a replica.
    Then comes a ring all-reduce of that stage's gradient over the replicas. (Narayanan et al.,
    SC 2021, section 2.2.)
    """
    largest = ceil(model.layers / pp)
    if (
        pp > model.layers
        or dp > model.microbatches
        or largest * model.layer_state > (model.node_memory)
    ):
        return 0.0
    rounds = ceil(model.microbatches / dp) + pp - 1
    send = model.boundary / model.bandwidth if pp > 1 else 0.0
    reduce = 2 * (dp - 1) / dp * largest * model.layer_gradient / model.bandwidth
    return model.batch_tokens / (rounds * (largest * model.layer_s + send) + reduce)


def pipeline_grid(model: PipelineModel, nodes: int, costs: Costs) -> GridCost:
    """All layouts of the closed form on at most so many nodes."""
    rates = {
        (dp, pp): rate
        for pp in range(1, min(nodes, model.layers) + 1)
        for dp in range(1, nodes // pp + 1)
        if (rate := pipeline_rate(model, dp, pp)) > 0
    }
    return GridCost(rates, model.batch_tokens, model.microbatches, costs)


V100_PIPELINE = PipelineModel(
    layers=36,
    layer_s=0.0325,
    layer_state=201.4e6 * _ADAM_BYTES,
    layer_gradient=201.4e6 * 2,
    node_memory=16e9 * 0.46,
    boundary=1024 * 4096 * 2,
    bandwidth=0.9e9,
    microbatches=64,
    batch_tokens=64 * 1024,
)
"""GPT-6.7B on p3.2xlarge, to check the closed form. layer_s is fitted to the ten measured rows."""

A100_PIPELINE = PipelineModel(
    layers=36,
    layer_s=6 * 201.4e6 * 1024 / (0.4 * 312e12),
    layer_state=201.4e6 * _ADAM_BYTES,
    layer_gradient=201.4e6 * 2,
    node_memory=40e9 * 0.8,
    boundary=1024 * 4096 * 2,
    bandwidth=2.5e9,
    microbatches=1024,
    batch_tokens=1024 * 1024,
)
"""GPT-6.7B on a2-highgpu-1g: one A100 of 40 GB a node at 40 % of its peak (assumed), 2.5 GB/s
between two of them (Sailor's measurement)."""


def a100_grid(nodes: int = 64) -> GridCost:
    """GPT-6.7B on up to so many nodes of one A100."""
    costs = Costs(
        state_bytes=_PARAMETERS[GPT_6_7B] * _ADAM_BYTES,
        store_bandwidth=5e9,
        node_store_bandwidth=1e9,
        peer_bandwidth=2.5e9,
        usd_per_node_hour=A100_SPOT,
    )
    return pipeline_grid(A100_PIPELINE, nodes, costs)


# --- migrations and hierarchies -------------------------------------------------------------------
@dataclass(frozen=True)
class PublishedMigration:
    """The constants of Parcae's own cost model (liveput/cost.py), seconds.

    build_s: of a model by pipeline depth. groups: a rate for each communicator, or the steps by dp
    that the code has for BERT. state_bytes: of all layers.
    """

    state_bytes: float
    build_s: Mapping[int, float]
    process_s: float
    extra_s: float = 0.0
    group_s: tuple[float, float] | None = None  # of each group, on growth and otherwise
    rendezvous_s: float = 6.6
    bandwidth: float = 0.9e9  # its measurement of 1 GiB between two nodes: 1.198 s

    def _groups(self, dp: int, pp: int, grows: bool) -> float:
        if self.group_s is not None:
            return 0.035 + (dp + pp + 1 + dp * pp) * self.group_s[0 if grows else 1]
        steps = 2.0 if dp >= 12 else 1.5 if dp >= 6 else 1.0
        return 0.035 + steps * (1.5 if grows else 1.0)

    def _restart(self, dp: int, pp: int, grows: bool) -> float:
        joining = self.rendezvous_s + self.extra_s if grows else 0.0
        build = self.build_s.get(pp, max(self.build_s.values()))
        return joining + self._groups(dp, pp, grows) + self.process_s + build

    def intra_s(self, dp: int, pp: int) -> float:
        return self._groups(dp, pp, False) + self.process_s

    def inter_s(self, dp: int, pp: int, grows: bool) -> float:
        return self.state_bytes / pp / self.bandwidth + self._restart(dp, pp, grows)

    def repartition_s(self, dp: int, pp: int, grows: bool) -> float:
        moved = (2 if dp > 1 else 1) * self.state_bytes / pp / self.bandwidth
        return moved + self._restart(dp, pp, grows)


_BERT_STAGES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_BERT_BUILD_S = (1.752, 1.123, 1.095, 0.854, 0.86, 0.767, 0.754, 0.633, 0.626, 0.505, 0.531)
BERT_MIGRATION = PublishedMigration(
    366e6 * 12, dict(zip(_BERT_STAGES, _BERT_BUILD_S, strict=True)), process_s=0.03
)
GPT_MIGRATION = PublishedMigration(
    7.68e9 * 12,
    {12: 7.961, 13: 6.911, 14: 6.926, 15: 7.002, 16: 7.195},
    process_s=0.24,
    extra_s=2.0,
    group_s=(0.5, 0.1156),
)

OVERLAPPED_PAUSE_S = 0.4e-3
"""Of a capture behind the step, at any size (`benchmarks.lab.acute`, ours)."""

STORAGE_ONLY = Hierarchy("storage only", (STORE,), COPY_PAUSE)
MULTI_LEVEL = Hierarchy(
    "own memory, then storage",
    (Level("own memory", MEMORY, MEMCPY, survives=False), STORE),
    COPY_PAUSE,
)
OVERLAPPED = Hierarchy(
    "stable node and storage at once, capture behind the step (Holdfast)",
    (Level("stable node", PEERS, LINK), STORE),
    0.0,
    OVERLAPPED_PAUSE_S,
    at_once=True,
)
HIERARCHIES = (STORAGE_ONLY, MULTI_LEVEL, ACUTE, OVERLAPPED)
