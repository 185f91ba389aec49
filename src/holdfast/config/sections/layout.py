"""The section `layout:` of a run file: how many workers, and what each holds.

It may change between restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from holdfast.config.sections.base import Section
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.layout import MeshShape
from holdfast.options.async_tp.keys import AsyncTp
from holdfast.options.asynchronous.keys import PipemareDecay, PipemareSteps
from holdfast.options.expert_copies.keys import ExpertReplicas
from holdfast.options.quantized.keys import Quantized
from holdfast.options.tp_by.keys import ComponentDegrees, TpBy
from holdfast.options.zero2_reduce.keys import SumInterval


class DegreesConfig(Section):
    """Degrees of one replica if replicas differ. It has pp x dp_shard x cp x tp workers."""

    pp: int = Field(1, ge=1, description="stages of the pipeline")
    dp_shard: int = Field(1, ge=1)
    """workers that share one copy of the state, each with other samples"""
    cp: int = Field(1, ge=1)
    """workers that share every sample, each with other tokens of it"""
    tp: int = Field(1, ge=1, description="workers that share every block, each with other heads")
    stages: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """blocks of each stage of the pipeline; []: balanced by cost"""

    @property
    def mesh_shape(self) -> MeshShape:
        """The mesh of a replica with these degrees."""
        return self.pp, self.dp_shard, self.cp, self.tp

    @property
    def ranks(self) -> int:
        """Workers of one replica."""
        return self.pp * self.dp_shard * self.cp * self.tp


PART_KEYS = ("tp_by.attention", "tp_by.ffn")
"""Keys of `layout` with the degrees of a block's parts, in the order of `LayoutConfig.part_tp`."""


def part_section(degrees: Sequence[int]) -> dict[str, ComponentDegrees]:
    """The section of these keys. degrees: in their order."""
    return {"tp_by": ComponentDegrees(attention=degrees[0], ffn=degrees[1])}


class LayoutConfig(DegreesConfig):
    """Replicas of pp x dp_shard x cp x tp workers, as many as the number of workers allows."""

    mode: Literal["given", "auto"] = "given"
    """auto, or `layout: auto` for short: the planner chooses workers, degrees, schedule,
    virtual_stages, zero, train.recompute and train.microbatch_size. Those that are given are its
    limits"""
    fixed: tuple[Literal["pp", "dp_shard", "cp", "tp", "workers"], ...] = ()
    """with mode auto: degrees that no change of nodes changes. workers: so many are used while they
    are there (planned: those that the run file gives)"""
    workers: int = Field(0, ge=0, le=2**20)
    """workers; 0: one copy of the model, on cuda one for each device (planned)"""
    zero: Literal[1, 2, 3] = 3
    """what dp_shard cuts: 1 optimizer state; 2 gradients too; 3 parameters too, gathered for each
    use"""
    zero2_reduce: SumInterval = "microbatch"
    ep: int = Field(1, ge=1)
    """workers of dp_shard x cp that share the experts of model.experts"""
    expert_replicas: ExpertReplicas = "off"
    sequence_parallel: bool = True
    """with tp: cut norms and residuals by tokens, at the same traffic"""
    async_tp: AsyncTp = False
    tp_by: TpBy = ComponentDegrees()
    cp_method: Literal["allgather", "ring", "ulysses", "ulysses-ring"] = "allgather"
    """with cp: how attention gets at other workers' tokens. allgather: keys and values are
    gathered; ring: they travel from worker to worker. ulysses: tokens and heads are swapped;
    ulysses-ring: rings of cp_ring workers, and swaps between them"""
    cp_ring: int = Field(2, ge=2, description="with cp_method ulysses-ring: workers of a ring")
    schedule: Literal[
        "1f1b",
        "gpipe",
        "interleaved",
        "zb-h1",
        "zbv",
        "dualpipev",
        "pipedream",
        "pipedream-2bw",
        "pipemare",
    ] = "1f1b"
    """with pp: order of the passes. gpipe takes fewer microbatches than 1f1b, and keeps more
    activations. interleaved has several stages a worker. zb-h1, zbv and dualpipev fill bubbles with
    gradients of weights. pipedream, pipedream-2bw and pipemare have no bubble; their gradients are
    of older weights, so the curve is another one"""
    pipemare_steps: PipemareSteps = 0
    pipemare_decay: PipemareDecay = 0.135
    balance: Literal["time", "memory"] = "time"
    """with pp and stages []: what stages get blocks by. time: the slowest stage is as fast as can
    be; memory: the fullest worker holds as little as can be"""
    balance_costs: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = ()
    """with balance time: measured times, of the embedding, each block, and the last norm with the
    head and the loss; in any unit. []: FLOPs"""
    virtual_stages: int = Field(0, ge=0)
    """stages of each worker under schedule interleaved; 0: 2"""
    replicas: tuple[DegreesConfig, ...] = ()
    """replicas that differ; []: all have the degrees above"""
    reduction: Literal["tree", "fast"] = "tree"
    """tree: bit-equal on any number of replicas; fast: the backend's own"""
    exchange: Literal["auto", "direct", "gathered"] = "auto"
    """how gradients travel between replicas: direct, messages from worker to worker; gathered,
    collectives, which any backend has; auto: direct on a CPU. Same bits"""
    quantized: Quantized = "none"
    allow_tcp: bool = False
    """train on devices whose data goes over TCP or the host's memory although a faster link is
    there; false: refuse that"""
    trace_step: int = Field(0, ge=0)
    """step in which each worker records what it does when; `holdfast report RUN --trace FILE`
    writes it; 0: none"""
    trace_every: int = Field(0, ge=0)
    """steps between two of which each worker records what it does when, for `holdfast trace
    timeline RUN --to FILE`; 0: none"""
    bucket_mb: float = Field(6.6, gt=0, description="gradient bytes reduced at a time, in MB")

    @property
    def has_traces(self) -> bool:
        """True if some step is traced."""
        return bool(self.trace_step or self.trace_every)

    def is_traced(self, step: int) -> bool:
        """Return True if each worker records what it does in that step."""
        return step == self.trace_step or bool(self.trace_every and step % self.trace_every == 0)

    @property
    def kinds(self) -> tuple[tuple[str, DegreesConfig], ...]:
        """(key in the run file, degrees) of every kind of replica."""
        if not self.replicas:
            return (("layout", self),)
        return tuple((f"layout.replicas.{i}", each) for i, each in enumerate(self.replicas))

    @property
    def stages_a_worker(self) -> int:
        """Pipeline stages that each worker has, where pp is above 1."""
        kind = SCHEDULE_KINDS[self.schedule]
        return kind.virtual or self.virtual_stages or kind.usual_virtual

    @property
    def is_folded(self) -> bool:
        """Return True if stages go down the workers and up again."""
        return SCHEDULE_KINDS[self.schedule].is_folded

    @property
    def is_asynchronous(self) -> bool:
        """Return True if the pipeline is not emptied between steps."""
        is_cut = any(degrees.pp > 1 for _, degrees in self.kinds)
        return is_cut and SCHEDULE_KINDS[self.schedule].is_asynchronous

    @property
    def keeps_velocity(self) -> bool:
        """Return True if the mean movement of the weights is a part of the state. It is with any
        degrees, so that they may change."""
        return self.schedule == "pipemare"

    @property
    def zero_in_memory(self) -> int:
        """The stage of ZeRO that a worker's memory shows. A stage 2 that adds up gradients once a
        step needs complete sums until then. So it is stage 1, which gathers nothing."""
        return 1 if self.zero == 2 and self.zero2_reduce == "step" else self.zero

    @property
    def shards_add_each(self) -> str:
        """What shards add up their gradients after, under ZeRO 2: a microbatch or a step."""
        return self.zero2_reduce

    @property
    def complete_setting(self) -> str:
        """The setting closest to this one that keeps parameters and sums complete."""
        return "layout.zero2_reduce step" if self.zero == 2 else "layout.zero 1"

    @property
    def component_degrees(self) -> dict[str, int]:
        """The components of a block that have a degree of their own along tp."""
        return self.tp_by.degrees

    def tp_parts(self, tp: int) -> tuple[int, int]:
        """The parts of attention and of the feed-forward in a replica with this tp."""
        return self.tp_by.at(tp)

    @property
    def part_tp(self) -> tuple[int, ...]:
        """The degrees of attention and of the feed-forward; () if they are those of tp."""
        return (self.tp_by.attention, self.tp_by.ffn) if self.tp_by.degrees else ()

    def component_keys(self, tp: int) -> dict[str, ComponentDegrees]:
        """The keys of the components' degrees, for a replica with this tp."""
        return {"tp_by": self.tp_by.within(tp)}

    @property
    def cuts_parameters(self) -> bool:
        """Return True if some kind of replica keeps its parameters in shards."""
        return self.zero_in_memory > 1 and any(degrees.dp_shard > 1 for _, degrees in self.kinds)

    @property
    def least_workers(self) -> int:
        """Workers of the smallest world: one replica, or all the unlike ones."""
        return sum(degrees.ranks for _, degrees in self.kinds)
