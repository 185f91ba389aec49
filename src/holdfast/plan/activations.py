"""Bytes of activations that a rank keeps for its backward passes, by formulas.

Korthikanti et al. (2022, section 4) count the bytes of a GPT block. Here they are counted again for
this decoder: gated feed-forward, RMSNorm, grouped keys and values, an attention kernel that keeps
no scores, no dropout.

T is the tokens of a rank's microbatch, R those of its residual stream: T / tp with sequence
parallelism. D is the stream's width. Q, K, F are the widths of a rank's queries, keys and inner
units, and H is its query heads. i: bytes of an element that is computed with. w: 4, in float64 8.

    norm         w R (2 D + 1)
    none         2 norms + i T (2 D + 2 Q + 2 K + 4 F) + w T H
    selective    i R D + i T (2 D + Q + 2 K + 2 F)
    full         i R D

A block's regions under tp read all T tokens, so `none` keeps 2 D of them on each rank. (Korthikanti
et al., section 4.2.2, keep a part and gather it again.) The last stage adds the final norm. It also
adds the gradients of the norm's result and of the head's rows, which the loss computes at once.
Another stage adds its output. 1F1B keeps min(m, stages - stage) microbatches of the m that a
replica has, GPipe all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.config.model import ModelConfig
from holdfast.config.pipeline_schedules import SCHEDULE_KINDS
from holdfast.config.run import RunConfig
from holdfast.core.sharding.reduction_tree import deal
from holdfast.core.sharding.sharding_table import tp_part
from holdfast.layout import Coordinate, Replica, Topology
from holdfast.plan.layouts import microbatches

_COMPUTE_BYTES = {"float64": 8, "fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class RankActivations:
    """Bytes on one rank. per_microbatch: of one in flight. waiting: what the last collective has
    sent, which stays until the next one."""

    per_microbatch: int
    in_flight: int
    waiting: int = 0

    @property
    def total(self) -> int:
        return self.per_microbatch * self.in_flight + self.waiting


def has_formula(config: RunConfig) -> bool:
    """Return True for a run that the formulas cover. They know no task, no adapters, no masks of
    documents or windows, no limits of scores, and norms before attention and feed-forward alone."""
    model = config.model
    plain = model.norms == "pre" and not (model.attention_softcap or model.windowed)
    trained = not (config.task.name or config.lora.rank)
    known = config.train.precision in _COMPUTE_BYTES
    if any(degrees.pp > 1 for _, degrees in config.layout.kinds):
        kind = SCHEDULE_KINDS[config.layout.schedule]
        known = known and not kind.splits_backward and config.layout.stages_a_worker == 1
    return trained and plain and known and config.data.attention == "full"


def activations_of(config: RunConfig, topology: Topology, at: Coordinate) -> RankActivations:
    """Return the activations of a run that `has_formula`, at its largest batch."""
    replica = topology.replicas[at.replica]
    share = deal(max(microbatches(config).values()), len(topology.replicas))[at.replica]
    stages, tp = replica.degree("pp"), replica.degree("tp")
    rank = RankShape.of(config, replica, at)
    is_last, is_cut = at.pp == stages - 1, tp > 1 and config.layout.sequence_parallel
    blocks = replica.blocks(at.pp) or range(config.model.layers)
    kept = len(blocks) * rank.block(config.train.recompute)
    stream = rank.item * rank.stream_tokens * config.model.dim
    whole = rank.item * rank.tokens * config.model.dim
    if is_last:
        rows = tp_part(config.model.vocab_rows, tp, at.tp)[1]
        kept += rank.norm() + whole + rank.item * rows * config.model.dim
    else:
        kept += stream
    if at.pp > 0 and config.train.recompute == "none" and rank.item < rank.wide:
        kept += stream  # the norm keeps a wide copy of what came in
    waiting = 0
    if is_cut:
        waiting = 2 * rank.wide * rank.tokens if is_last else whole  # of the loss, two a token
        if config.train.recompute == "selective" and not is_last:
            waiting = 0  # it is a product that is kept
    return RankActivations(kept, _in_flight(config, stages, at.pp, len(share)), waiting)


def _in_flight(config: RunConfig, stages: int, stage: int, number: int) -> int:
    """Microbatches whose backward is still to come."""
    if stages == 1:
        return min(number, 1)
    if config.layout.schedule == "gpipe" or number < stages:
        return number
    return min(number, stages - stage)


@dataclass(frozen=True)
class RankShape:
    """What the formulas need of one rank: see the module."""

    model: ModelConfig
    tokens: int
    stream_tokens: int
    heads: int
    kv_heads: int
    inner: int
    item: int
    wide: int

    @staticmethod
    def of(config: RunConfig, replica: Replica, at: Coordinate) -> RankShape:
        model, tp = config.model, replica.degree("tp")
        samples = config.train.microbatch_size // replica.degree("dp_shard")
        tokens = samples * config.data.sequence_length
        item = _COMPUTE_BYTES[config.train.precision]
        return RankShape(
            model,
            tokens,
            -(-tokens // tp) if config.layout.sequence_parallel else tokens,
            tp_part(model.heads, tp, at.tp)[1],
            tp_part(model.kv_heads, tp, at.tp)[1],
            tp_part(model.ffn_dim, tp, at.tp)[1],
            item,
            max(4, item),
        )

    def norm(self) -> int:
        return self.wide * self.stream_tokens * (2 * self.model.dim + 1)

    def block(self, recompute: str) -> int:
        dim, head = self.model.dim, self.model.head_size
        query, key = self.heads * head, self.kv_heads * head
        stream = self.item * self.stream_tokens * dim
        if recompute == "full":
            return stream
        if recompute == "selective":
            return stream + self.item * self.tokens * (2 * dim + query + 2 * key + 2 * self.inner)
        width = self.item * (2 * dim + 2 * query + 2 * key + 4 * self.inner)
        width += self.wide * self.heads
        if self.model.qk_norm:
            width += self.wide * (2 * (query + key) + self.heads + self.kv_heads)
        return 2 * self.norm() + self.tokens * width
