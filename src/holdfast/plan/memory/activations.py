"""Bytes of activations that a rank keeps for its backward passes, by formulas.

Korthikanti et al. (2022, section 4) count the bytes of a GPT block. Here they are counted again for
this decoder: gated feed-forward, RMSNorm, grouped keys and values, an attention kernel that keeps
no scores, no dropout.

T is the tokens of a rank's microbatch, 1 / cp of them all. R is those of its residual stream:
T / tp with sequence parallelism. D is the stream's width. Q, K, F are the widths of a rank's
queries, keys and inner units, and H is its query heads. i: bytes of an element that is computed
with. w: 4, in float64 8.

    norm         w R (2 D + 1); fused: R (i D + w)
    none         2 norms + i T (2 D + 2 Q + 2 K + 4 F) + w T H
    full         i R D
    selective    i R D, and of what `train.recompute_keep` names
    matmul       i T (2 D + Q + 2 K + 2 F)
    attention    i T Q + w T H
    activation   i T F

If a component has a degree of its own, T is the tokens that a rank computes in it. D in `none` goes
with the tokens of its input that are held (`ComponentTokens`).

With `train.partition_activations` each i R D of a block's input is i T D / tp. The first block of a
later stage is left out: its input came from another stage, and is held complete.

A CPU's norm keeps wide copies of what came in and of the result without gain. An accelerator has a
fused kernel, which keeps the input as it is and one number a token. Counted for these formulas on
an H100 they are within 2 % of the peak (`benchmarks.runtime.gpu --only 1b-memory`).

A block's regions under tp read all T tokens, so `none` keeps 2 D of them on each rank. (Korthikanti
et al., section 4.2.2, keep a part and gather it again.) The last stage adds the final norm. It also
adds the gradients of the norm's result and of the head's rows, which the loss computes at once.
Another stage adds its output. `none` adds i T Q if cp swaps heads: attention's result is kept
before and after the second swap. A stage whose input comes from a stage of the same rank holds that
once.

The first half of a split backward leaves the inputs of linear layers and the gradients of their
outputs. They are i T (4 D + 2 Q + 2 K + 3 F) a block. It also leaves gradients of the embedding
and of the head, i D for each row. How much a rank keeps then follows from its row of the schedule's
table (`pass_order.py`). 1F1B keeps min(m, stages - stage) microbatches of the m that a replica has.
GPipe keeps all of them.

How many tokens an expert gets is known in the run alone. Here each expert gets as many as any
other: the expected load, not a bound. T tokens of a rank make N = T k choices, and as many arrive
at its experts under `layout.ep`. E is all experts, F their inner width, and S that of the shared
expert. A forward pass through them keeps

    experts      i N (2 D + 4 F), and 16 bytes for each choice; with ep 32
    shared       4 i T S
    router       T (w E + w k + 8 k), and w T (k + 1) where weights are normalised. With a z loss
                 w T (E + 1) more; in bf16 w T D for a wide copy of the input, and i T k

The products of a loop over experts have their gradients in a list. So the end of the backward has
the gradients of three matrices of all experts, and one of them twice. A grouped product (bf16) has
one matrix at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ExpertsConfig, ModelConfig
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.config.sections.recompute import RecomputePolicy
from holdfast.core.sharding.reduction_tree import deal
from holdfast.core.sharding.sharding_table import component_part, tp_part
from holdfast.layout import Coordinate, Replica, Topology
from holdfast.options.registry import option_costs
from holdfast.options.tp_by.cost import ComponentTokens, attention_tokens, components, ffn_tokens
from holdfast.plan.memory.block_parts import (
    GATE_UP,
    PLAIN,
    QUERY_KEY_VALUE,
    Adapters,
    BlockOptions,
    clashing_options,
    options_of_attention,
)
from holdfast.plan.memory.pass_order import StageBytes, fullest_forward
from holdfast.plan.step_microbatches import microbatches

_GROUPED_MULTIPLE = 8  # as `model/experts.py`


@dataclass(frozen=True)
class ExpertShape:
    """What the formulas need of a rank's feed-forward of experts (`model/experts.py`)."""

    config: ExpertsConfig
    dim: int
    here: int  # experts on the rank
    inner: int  # width on the rank
    shared: int  # width on the rank
    tokens: int
    item: int
    wide: int
    is_spread: bool  # tokens travel to experts of other ranks

    @staticmethod
    def of(
        model: ModelConfig, tokens: int, item: int, wide: int, *, tp: int, ep: int
    ) -> ExpertShape | None:
        """Return None without experts. tp, ep: degrees of the replica."""
        config = model.experts
        if config is None:
            return None
        inner, here = model.inner_dim // tp, config.count // ep
        shared = inner * config.shared
        return ExpertShape(config, model.dim, here, inner, shared, tokens, item, wide, ep > 1)

    @property
    def choices(self) -> int:
        """Of the rank's tokens, and by expectation of those that its experts compute."""
        return self.tokens * self.config.top_k

    @property
    def kept(self) -> int:
        """Bytes that a forward pass keeps, beyond the feed-forward's input."""
        rows = self.item * self.choices * (2 * self.dim + 4 * self.inner)
        numbers = self.choices * (32 if self.is_spread else 16)
        shared = 4 * self.item * self.tokens * self.shared
        config, k = self.config, self.config.top_k
        width = self.wide * (config.count + k) + 8 * k
        width += self.wide * (k + 1) * config.normalise
        width += self.wide * (config.count + 1) * (config.z_loss > 0)
        if self.item < self.wide:
            width += self.wide * self.dim + self.item * k
        return rows + numbers + shared + (self.tokens * width)

    @property
    def working(self) -> int:
        """Most bytes of a backward pass through it, beyond what is kept."""
        rows = self.item * self.choices * self.dim
        matrix = self.item * self.here * self.inner * self.dim
        matrices = 1 if self._is_grouped else 4
        return max(2 * rows, matrices * matrix + 2 * rows - self.kept)

    @property
    def _is_grouped(self) -> bool:
        return self.item == 2 and not (
            self.inner % _GROUPED_MULTIPLE or self.dim % _GROUPED_MULTIPLE
        )


_SCHEDULES = ("interleaved", "zb-h1", "zbv", "dualpipev")
_COMPUTE_BYTES = {"float64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class RankActivations:
    """Bytes on one rank."""

    kept: int  # by all passes in flight, at the end of the forward pass at which that is most
    in_flight: int  # passes, of one stage and one microbatch each
    waiting: int = 0  # what the last collective has sent, which stays until the next one

    @property
    def per_microbatch(self) -> int:
        """Bytes of one pass in flight, on average."""
        return self.kept // max(1, self.in_flight)

    @property
    def total(self) -> int:
        return self.kept + self.waiting


def device_kind(config: RunConfig) -> str:
    """Return "cpu", or "accelerator" for a run file that names one."""
    return "cpu" if config.device in ("cpu", "auto") else "accelerator"


def has_formula(config: RunConfig) -> bool:
    """Return True for a run whose activations the formulas cover."""
    return not without_formula(config)


def has_estimate(config: RunConfig) -> bool:
    """Return True for a run whose peak of memory the formulas know."""
    return not without_estimate(config)


def without_estimate(config: RunConfig) -> str:
    """Return the keys for which no formula says the peak of memory; "" if one does. What FSDP2
    gathers of experts that are spread over ranks is not among the formulas."""
    return without_formula(config) or (f"layout.ep {config.layout.ep}" * (config.layout.ep > 1))


def without_formula(config: RunConfig) -> str:
    """Return the keys for which no formula says the activations, with their values; "" if one
    does."""
    if config.task.name:
        return f"task {config.task.name}"
    if config.computes_apart:
        return config.apart_key
    if config.train.precision not in _COMPUTE_BYTES:
        return f"train.precision {config.train.precision}"
    option = next((each for each in option_costs() if not each.has_formula(config)), None)
    if option is not None:
        return option.unmodelled(config) or option.formula_key
    layout, degrees = config.layout, [each for _, each in config.layout.kinds]
    if any(each.pp > 1 for each in degrees):
        name, is_moved = layout.schedule, config.train.memory.moves_activations
        if name not in ("1f1b", "gpipe") and (name not in _SCHEDULES or is_moved):
            return f"layout.schedule {name}" + " with train.memory.activations" * is_moved
    if any(each.cp > 1 for each in degrees):
        words, kept = config.train.recompute_words, config.train.recompute_keep
        if "selective" in words and "attention" in kept:
            return "layout.cp with train.recompute_keep attention"
        if options := options_of_attention(config):
            return f"layout.cp with {options[0]}"
    return _unknown_experts(config) or clashing_options(config)


def _unknown_experts(config: RunConfig) -> str:
    """Return the key for which no formula covers the experts; "" without experts, or with one. A
    formula has all blocks with some, drops no choice, keeps nothing of them by name, and splits no
    backward."""
    experts, train = config.model.experts, config.train
    if experts is None:
        return ""
    is_split = any(degrees.pp > 1 for _, degrees in config.layout.kinds)
    is_split &= SCHEDULE_KINDS[config.layout.schedule].splits_backward
    for is_used, key in (
        (experts.first, "experts.first"),
        (experts.capacity, "experts.capacity"),
        (is_split, f"experts with layout.schedule {config.layout.schedule}"),
        (train.memory.moves_activations, "experts with train.memory.activations"),
        ("selective" in train.recompute_words, "experts with train.recompute selective"),
        (train.compile, "experts with train.compile"),
        (config.lora.rank, "experts with lora"),
        (options_of_attention(config), "experts with another attention"),
    ):
        if is_used:
            return f"model.{key}"
    return ""


def activations_of(
    config: RunConfig, topology: Topology, at: Coordinate, device: str = "cpu"
) -> RankActivations:
    """Return the activations of a run that `has_formula`, at its largest batch. device: "cpu", or
    "accelerator"."""
    replica = topology.replicas[at.replica]
    share = deal(max(microbatches(config).values()), len(topology.replicas))[at.replica]
    numbers = stages_on(replica, at)
    stages = {number: stage_bytes(config, replica, at, device, number) for number in numbers}
    schedule = config.layout.schedule
    kept, in_flight = fullest_forward(schedule, replica, at.pp, len(share), stages)
    return RankActivations(kept, in_flight, _waiting(config, replica, at, device))


def stages_on(replica: Replica, at: Coordinate) -> tuple[int, ...]:
    """The numbers of a rank's pipeline stages."""
    return replica.stages_at(at.pp) if replica.degree("pp") > 1 else (0,)


def stage_bytes(
    config: RunConfig, replica: Replica, at: Coordinate, device: str, number: int
) -> StageBytes:
    """Return what a microbatch keeps on stage `number` of a rank."""
    ranks, tp = replica.degree("pp"), replica.degree("tp")
    rank = RankShape.of(config, replica, at, device)
    policy = config.recompute_policy(at.pp, ranks, tp)
    blocks, is_last = blocks_of(config, replica, number), is_last_stage(replica, number)
    rows = tp_part(config.model.vocab_rows, tp, at.tp)[1]
    head = 0 if rank.options.adapters else rank.item * rows * config.model.dim
    kept = len(blocks) * rank.block(policy)
    if is_last:
        kept += rank.last_norm() + rank.item * rank.tokens * config.model.dim + head
    else:
        kept += rank.stream()
    kept += rank.extra_of_first(policy, number, tp)
    own = stages_on(replica, at)
    if number - 1 in own:
        kept -= rank.stream()
    late = len(blocks) * rank.late_block() + head * ((number == 0) + is_last)
    is_carried = is_last and len(own) > 1 and 0 in own and config.model.has_tied_head
    return StageBytes(kept, late, head if is_carried else 0)


def blocks_of(config: RunConfig, replica: Replica, number: int) -> range:
    """The blocks of a stage."""
    is_whole = replica.degree("pp") == 1
    return range(config.model.layers) if is_whole else replica.stage_blocks(number)


def is_last_stage(replica: Replica, number: int) -> bool:
    """Return True for the stage with the head."""
    return replica.degree("pp") == 1 or number == len(replica.stages) - 1


def _waiting(config: RunConfig, replica: Replica, at: Coordinate, device: str) -> int:
    """Bytes that the last collective has sent, which stay until the next one."""
    tp, rank = replica.degree("tp"), RankShape.of(config, replica, at, device)
    policy = config.recompute_policy(at.pp, replica.degree("pp"), tp)
    waiting = 0
    if tp > 1 and any(is_last_stage(replica, number) for number in stages_on(replica, at)):
        waiting = 2 * rank.wide * rank.tokens  # of the loss, two a token
    elif tp > 1 and config.layout.sequence_parallel:
        whole = rank.item * rank.tokens * config.model.dim
        if rank.attention.is_own and rank.ffn.is_own:  # nothing but the embedding is of all ranks
            waiting = whole if 0 in stages_on(replica, at) else 0
        else:
            waiting = 0 if policy.keeps("matmul") else whole  # 0: it is a product that is kept
    elif policy.input_parts > 1:
        waiting = rank.kept_input(policy)
    if not policy.keeps("matmul"):  # what sets of ranks have sent among themselves
        found = components(config, replica, at.tp)
        own = (each for each in found if each.is_own and each.parts > 1)
        waiting += sum(rank.item * each.computed * config.model.dim for each in own)
    return waiting + _context_messages(config, replica.degree("cp"), rank)


def _context_messages(config: RunConfig, ranks: int, rank: RankShape) -> int:
    """Bytes of the last messages along cp, which stay until it is known that they arrived."""
    if ranks == 1:
        return 0
    head = rank.model.head_size
    one = rank.item * rank.attention.computed * head
    keys, results = one * 2 * rank.kv_heads, one * rank.heads
    method, ring = config.layout.cp_method, config.layout.cp_ring
    if method == "allgather":
        return keys
    if method == "ring":
        return keys * (ranks - 1)
    return results + (keys * (ring - 1) if method == "ulysses-ring" else 0)


@dataclass(frozen=True)
class RankShape:
    """What the formulas need of one rank: see the module."""

    model: ModelConfig
    tokens: int
    stream_tokens: int
    attention: ComponentTokens
    ffn: ComponentTokens
    heads: int
    kv_heads: int
    inner: int
    item: int
    wide: int
    swaps: bool = False
    device: str = "cpu"  # or "accelerator"
    experts: ExpertShape | None = None
    options: BlockOptions = PLAIN

    @staticmethod
    def of(config: RunConfig, replica: Replica, at: Coordinate, device: str = "cpu") -> RankShape:
        model, tp = config.model, replica.degree("tp")
        samples = config.train.microbatch_size // replica.degree("dp_shard")
        tokens = samples * config.data.sequence_length // replica.degree("cp")
        item, parts = _COMPUTE_BYTES[config.train.precision], config.layout.tp_parts(tp)
        return RankShape(
            model,
            tokens,
            -(-tokens // tp) if config.layout.sequence_parallel else tokens,
            attention_tokens(config, replica, at.tp),
            ffn_tokens(config, replica, at.tp),
            component_part(model.heads, parts[0], tp, at.tp)[1],
            component_part(model.kv_heads, parts[0], tp, at.tp)[1],
            component_part(model.ffn_dim, parts[1], tp, at.tp)[1],
            item,
            max(4, item),
            replica.degree("cp") > 1 and config.layout.cp_method.startswith("ulysses"),
            device,
            ExpertShape.of(
                model, tokens, item, max(4, item), tp=tp, ep=replica.expert_degree(config.layout.ep)
            ),
            BlockOptions.of(config, device),
        )

    @property
    def fuses_norms(self) -> bool:
        """Its device has one kernel for a norm."""
        return self.device != "cpu"

    @property
    def copies_input(self) -> bool:
        """A norm keeps a wide copy of its input."""
        return self.item < self.wide and not self.fuses_norms

    def norm(self) -> int:
        return self.stream_tokens * self._norm_of(self.model.dim)

    def _norm_of(self, elements: int) -> int:
        """Bytes that the norm of one vector keeps."""
        if self.fuses_norms:
            return self.item * elements + self.wide
        return self.wide * (2 * elements + 1)

    def stream(self) -> int:
        """Bytes of the residual stream."""
        return self.item * self.stream_tokens * self.model.dim

    def moved(self, policy: RecomputePolicy) -> int:
        """Bytes of a block that hooks of autograd see: with recomputation, its input, unless that
        is cut."""
        if policy.word == "none":
            return self.block(policy)
        return self.kept_input(policy) if policy.input_parts == 1 else 0

    def kept_input(self, policy: RecomputePolicy) -> int:
        """Bytes of a block's input that are kept, where a block is run again."""
        return self.item * -(-self.stream_tokens * self.model.dim // policy.input_parts)

    def extra_of_first(self, policy: RecomputePolicy, stage: int, tp: int) -> int:
        """Bytes that a stage keeps at its beginning, beyond those of a block. Under tp the
        embedding keeps a row's number and whether it is here, 9 bytes a token."""
        if stage == 0:
            return 9 * self.tokens if tp > 1 else 0
        stream = self.stream()
        if policy.word == "none":  # the norm keeps a wide copy of what came in
            return stream if self.copies_input and not self.options.is_compiled else 0
        return stream - self.kept_input(policy)

    def late_block(self) -> int:
        """Bytes that the first half of a split backward leaves of a block. These are the inputs of
        linear layers, of which some have one in common, and the gradients of their outputs."""
        dim, head = self.model.dim, self.model.head_size
        query, key = self.heads * head, self.kv_heads * head
        attention = self.attention.held * dim + self.attention.computed * (dim + 2 * (query + key))
        ffn = self.ffn.held * dim + self.ffn.computed * (dim + 3 * self.inner)
        return self.item * (attention + ffn)

    def block(self, policy: RecomputePolicy) -> int:
        """Bytes that a block keeps; but see `extra_of_first`."""
        dim, head = self.model.dim, self.model.head_size
        query, key = self.heads * head, self.kv_heads * head
        if policy.word != "none":
            width = self.item * (dim + query + 2 * key) * policy.keeps("matmul")
            width += (self.item * query + self.wide * self.heads) * policy.keeps("attention")
            inner = self.item * (dim + 2 * self.inner) * policy.keeps("matmul")
            inner += self.item * self.inner * policy.keeps("activation")
            kept = self.attention.computed * width + self.ffn.computed * inner
            return self.kept_input(policy) + kept
        if self.options.adapters is not None:
            return self._adapted(self.options.adapters)
        if self.options.is_compiled:
            return self._compiled()
        inner = (
            self.experts.kept if self.experts else self.item * self.ffn.computed * 4 * self.inner
        )
        inputs = self.item * dim * (self.attention.held + self.ffn.held)
        return self.options.norms * self.norm() + inputs + self._scores() + inner

    def _scores(self) -> int:
        """Bytes that attention keeps between its products with weights."""
        options, head = self.options, self.model.head_size
        query, key = self.heads * head, self.kv_heads * head
        width = self.item * (2 * query + 2 * key) + self.wide * self.heads
        if options.softcap:
            scores = self.item + self.wide + (self.item if self.item < self.wide else 0)
            width = self.item * 4 * query + scores * self.heads * options.sequence
        width += self.item * query * (self.swaps + options.has_documents)
        if self.model.qk_norm:
            width += (self.heads + self.kv_heads) * self._norm_of(head)
        mask = options.sequence**2
        masks = int(options.masked * self.item * mask) + mask * options.softcap
        return self.attention.computed * width + masks

    def _compiled(self) -> int:
        """Bytes that a compiled block keeps."""
        product = self.item * self.ffn.computed * 3 * self.inner
        inputs = self.item * self.model.dim * (self.attention.held + self.ffn.held)
        streams = 2 * self.stream() + 2 * self.wide * self.stream_tokens
        return streams + inputs + self._scores() + product

    def _adapted(self, adapters: Adapters) -> int:
        """Bytes that a block with frozen weights keeps, as a mean of all blocks."""
        found = zip(adapters.blocks, adapters.starts(), strict=True)
        kept = [self._frozen_block(adapters, *each) for each in found]
        return sum(kept) // len(kept)

    def _frozen_block(self, adapters: Adapters, names: frozenset[str], has_gradient: bool) -> int:
        """names: layers with an adapter. has_gradient: what comes in has one."""
        dim, query = self.model.dim, self.heads * self.model.head_size
        before = [name for name in QUERY_KEY_VALUE if name in names]
        joins = has_gradient or bool(before)
        kept = (
            has_gradient * self._frozen_norm()
            + bool(before) * self.item * dim * self.attention.held
        )
        rows = self._adapter_rows(adapters, len(before), dim)
        joined = self.options.has_documents and "attention.o" not in names
        if joins:  # what is joined of documents is the input of a frozen product
            kept += self._scores() - joined * self.item * query * self.attention.computed
        if "attention.o" in names:
            rows += self._adapter_rows(adapters, 1, query)
            kept += 0 if joins else self.item * query * self.attention.computed
        joins |= "attention.o" in names
        kept += self.attention.computed * rows
        gates = [name for name in GATE_UP if name in names]
        kept += joins * self._frozen_norm() + bool(gates) * self.item * dim * self.ffn.held
        rows = self._adapter_rows(adapters, len(gates), dim)
        inner = 3 * self.item * self.inner if joins or gates else 0
        if "ffn.down" in names:
            inner += self.item * self.inner
            rows += self._adapter_rows(adapters, 1, self.inner)
        return kept + self.ffn.computed * (inner + rows)

    def last_norm(self) -> int:
        """Bytes that the norm before the head keeps."""
        return self.norm() if self.options.adapters is None else self._frozen_norm()

    def _frozen_norm(self) -> int:
        if self.fuses_norms:
            return self.norm()
        return self.stream_tokens * self.wide * (self.model.dim + 1)

    def _adapter_rows(self, adapters: Adapters, number: int, inputs: int) -> int:
        """Bytes of a token that so many adapters keep, beyond the layer's input."""
        dropped = (self.item + 1) * inputs if adapters.has_dropout else 0
        return number * (self.item * adapters.rank + dropped)
