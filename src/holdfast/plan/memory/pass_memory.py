"""The moments of a microbatch's passes at which most memory is in use, by formulas.

Each is on top of the rank's state, and of what other microbatches in flight keep.

    head        the forward's end: the logits of a chunk, their softmax, their and the head's
                gradient
    forward     the forward's end on a stage without a head
    block       the end of the last block, before the one before it leaves the device
    norm        the backward of the last norm
    last block  the backward of the feed-forward in the last block, from which most is kept
    block norm  the backward of the norm before that feed-forward, on a CPU in bf16
    first block the same in the first block, when gradients stay where they were computed
    unit        FSDP2 reduces the gradients of the last block
    next block  the feed-forward of the block ahead, while it keeps what it reduced
    block end   the end of that block's backward: all gradients of its weights
    gather      FSDP2 gathers the last block of a forward pass
    scale       fp16 multiplies the gradients that the loss computed, in fp32
    embedding   the gradient of the embedding's rows, at the end
    root        FSDP2 reduces the gradients outside of the blocks
    input end   the end of the first half of a split backward: all that it leaves
    weights     the second half: that, and the gradients of all weights of the stage

FSDP2 keeps the buffer of the block that it gathered last until the forward pass is over. It drops
the buffer of the block before when the next one has come out of its own. In the backward pass it
gathers a block before the one after it is done. It keeps what it sends of a block's gradients until
the next block's are ready.

If activations move (`training/memory/activations.py`), those of two blocks are on the device at
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.config.run import RunConfig
from holdfast.config.sections.recompute import RecomputePolicy
from holdfast.core.devices import DEVICES, is_accelerator
from holdfast.core.schedule.table import ActionKind
from holdfast.plan.memory.activations import RankShape

FRAGMENTATION = 0.05
"""Part of what is not state that an accelerator's allocator may lose between pieces."""

_NORM_TEMPORARIES = 4
"""Wide tensors of the stream that the backward of a norm has, beyond what the norm kept."""


@dataclass(frozen=True)
class Moment:
    """Bytes at one moment, without the state."""

    name: str
    activations: int = 0  # that the pass keeps
    logits: int = 0  # of a chunk, and what the loss makes of them
    gathered: int = 0  # parameters that other ranks hold
    working: int = 0  # results that are not kept, gradients on their way among them

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.gathered + self.working


@dataclass(frozen=True)
class Stage:
    """A rank's part of the model."""

    shape: RankShape
    blocks: int
    policy: RecomputePolicy
    rows: int  # of the head that it computes with; 0 on a stage that is not the last
    held: int  # rows of the vocabulary that it holds
    embeds: bool  # it has the embedding
    tied: bool  # embedding and head are one
    is_cut: bool  # tokens are cut over tp
    edges: int  # bytes that it keeps of what came in and goes out
    unit: int  # elements of a block
    root: int  # elements outside of the blocks
    gathers: int  # FSDP2's stage of ZeRO, 2 or 3; 0 without it
    shards: int  # that it reduces to, where a sum is added to an earlier one; 0: it replaces that
    chunk: int  # tokens whose logits the loss holds at a time (`DeviceKind.chunk_tokens`)
    moved: int = 0  # bytes of a block that leave the device between its passes
    incoming: int = 0  # bytes of what comes in that stay on the device then
    cuts_vocabulary: bool = False  # ranks of tp talk in the midst of the softmax

    @property
    def is_mixed(self) -> bool:
        return self.shape.item < self.shape.wide

    @property
    def stream(self) -> int:
        return self.shape.stream()

    @property
    def wide_stream(self) -> int:
        return self.shape.wide * self.shape.stream_tokens * self.shape.model.dim

    @property
    def whole(self) -> int:
        return self.shape.item * self.shape.tokens * self.shape.model.dim

    @property
    def ffn_input(self) -> int:
        """Bytes of what a feed-forward reads."""
        return self.shape.item * self.shape.ffn.held * self.shape.model.dim

    @property
    def head_gradient(self) -> int:
        return self.shape.item * self.held * self.shape.model.dim

    def kept(self, blocks: int, here: int = 2) -> int:
        """Bytes that so many blocks keep, and the stage's ends. here: blocks of which nothing has
        left the device."""
        away = self.moved * max(0, blocks - here)
        return blocks * self.shape.block(self.policy) + self.edges + self.incoming - away

    def gathered(self, blocks: int, more: int) -> int:
        """Bytes that FSDP2 has gathered when the backward is to come of so many blocks. Stage 2
        has gathered all of them until the step's passes are over.

        more: blocks that stage 3 has gathered then.
        """
        if not self.gathers:
            return 0
        units = self.blocks if self.gathers == 2 else min(blocks, more)
        return self.shape.item * (self.root + units * self.unit)

    def reduced(self, elements: int) -> int:
        """Bytes of the sum of gradients that is added to an earlier one."""
        return self.shape.wide * elements // self.shards if self.shards else 0


def forward_moments(stage: Stage) -> Iterator[Moment]:
    """The moments of a forward pass."""
    gathered = stage.gathered(stage.blocks, 0)
    if stage.gathers:
        before, buffer = stage.kept(stage.blocks - 1, 1), stage.shape.item * stage.unit
        buffers = buffer + (buffer if stage.blocks > 1 else stage.shape.item * stage.root)
        yield Moment("gather", before, 0, stage.gathered(stage.blocks, 1) + buffers)
        gathered += buffer
    if not stage.rows:
        yield Moment("forward", stage.kept(stage.blocks), 0, gathered)
        return
    if stage.moved:
        yield Moment("block", stage.kept(stage.blocks), 0, gathered, 2 * stage.whole)
    kept = stage.kept(stage.blocks, 1) + stage.shape.last_norm()
    working = 2 * stage.whole + stage.is_mixed * stage.stream
    yield Moment("head", kept, _logits(stage), gathered, working)


def backward_moments(stage: Stage, *, stays: bool) -> Iterator[Moment]:
    """The moments of a backward pass. stays: its gradients stay where they are computed."""
    shape, blocks = stage.shape, stage.blocks
    has_head = stage.rows > 0
    waits = stays or bool(stage.gathers) or (stage.tied and stage.embeds)
    head = stage.head_gradient if has_head and waits else 0
    if has_head:
        yield _norm(stage, head, stage.gathered(blocks, 1))
        if shape.options.scales_loss:
            yield _scaled(stage, stage.gathered(blocks, 1))
    again = _again(stage)
    working = head + stage.stream + _feed_forward(stage, stays=stays or bool(stage.gathers))
    yield Moment("last block", stage.kept(blocks) + again, 0, stage.gathered(blocks, 2), working)
    if stage.is_mixed and not shape.fuses_norms:
        done = shape.item * shape.ffn.computed * (shape.model.dim + 4 * shape.inner)
        kept = stage.kept(blocks) + again - done
        inside = head + stage.stream + _NORM_TEMPORARIES * stage.wide_stream
        yield Moment("block norm", kept, 0, stage.gathered(blocks, 2), inside)
    if stays:
        grown = (blocks - 1) * shape.item * stage.unit
        yield Moment("first block", stage.kept(1) + again, 0, 0, working + grown)
    if stage.gathers:
        last = shape.inner * shape.model.dim
        working = head + stage.stream + _reduce(stage, stage.unit, last)
        kept, gathered = stage.kept(blocks - 1, 1), stage.gathered(blocks - 1, 1)
        yield Moment("unit", kept, 0, gathered, working)
    if stage.gathers and blocks > 1:
        held = head + shape.wide * stage.unit + stage.reduced(stage.unit)
        kept, gathered = stage.kept(blocks - 1), stage.gathered(blocks - 1, 2)
        working = held + stage.stream + _feed_forward(stage, stays=True)
        yield Moment("next block", kept + again, 0, gathered, working)
        working = held + 3 * stage.stream + stage.whole + shape.item * stage.unit
        kept = stage.kept(blocks - 2, 1) + shape.norm() + stage.stream
        yield Moment("block end", kept, 0, gathered, working)
    if stage.embeds:
        grown = blocks * shape.item * stage.unit if stays else 0
        sent = shape.wide * stage.unit + stage.reduced(stage.unit) if stage.gathers else 0
        rows = 3 if stage.tied and has_head else 1
        working = grown + sent + rows * stage.head_gradient
        yield Moment("embedding", 0, 0, stage.gathered(0, 0), working)
    if stage.gathers and stage.root:
        yield Moment("root", 0, 0, stage.gathered(0, 0), _reduce(stage, stage.root))


def moments_of(stage: Stage, kind: ActionKind, *, stays: bool) -> Iterator[Moment]:
    """The moments of a pass. stays: the gradients of weights stay where they are computed."""
    if kind is ActionKind.BACKWARD:
        return backward_moments(stage, stays=stays)
    if kind is ActionKind.FORWARD:
        return forward_moments(stage)
    return (input_moments if kind is ActionKind.BACKWARD_INPUT else weight_moments)(stage)


def _norm(stage: Stage, head: int, gathered: int) -> Moment:
    """The backward of the last norm. head: bytes of the head's gradient that wait."""
    working = stage.whole + stage.stream * (stage.is_cut + stage.is_mixed) + head
    working += 0 if stage.shape.fuses_norms else 2 * stage.wide_stream
    kept = stage.kept(stage.blocks, 1) + stage.shape.last_norm()
    return Moment("norm", kept, 0, gathered, working)


def _scaled(stage: Stage, gathered: int) -> Moment:
    """The gradients that the loss has computed are multiplied in fp32 by the scale of fp16."""
    head, hidden = stage.head_gradient, stage.whole
    narrow = stage.shape.item
    working = head + hidden + 2 * stage.shape.wide * max(head, hidden) // narrow
    kept = stage.kept(stage.blocks, 1) + stage.shape.last_norm()
    return Moment("scale", kept, 0, gathered, working)


def input_moments(stage: Stage) -> Iterator[Moment]:
    """The moments of the first half of a split backward. What it leaves grows block by block."""
    shape, blocks = stage.shape, stage.blocks
    head = stage.head_gradient if stage.rows else 0
    if stage.rows:
        yield _norm(stage, head, 0)
        if shape.options.scales_loss:
            yield _scaled(stage, 0)
    again, late = _again(stage), shape.late_block()
    inner = shape.item * shape.ffn.computed * shape.inner
    working = head + stage.stream + 3 * inner + (stage.ffn_input if stage.is_cut else 0)
    yield Moment("last block", stage.kept(blocks) + again, 0, 0, working)
    done = (blocks - 1) * late
    yield Moment("first block", stage.kept(1) + again + done, 0, 0, working)
    rows = stage.head_gradient if stage.embeds else 0
    yield Moment("input end", blocks * late, 0, 0, head + rows + 3 * stage.stream)


def weight_moments(stage: Stage) -> Iterator[Moment]:
    """The moment of the second half: what the first one left, and all gradients of weights."""
    rows = stage.head_gradient * (stage.embeds + (stage.rows > 0))
    late, weights = stage.blocks * stage.shape.late_block(), stage.blocks * stage.unit
    yield Moment("weights", late, 0, 0, rows + stage.shape.item * weights)


def _again(stage: Stage) -> int:
    """Bytes that a block has once it is run again, on top of what it kept."""
    shape, policy = stage.shape, stage.policy
    if policy.word == "none":
        return 0
    again = shape.block(RecomputePolicy()) - shape.block(policy) + stage.is_mixed * stage.stream
    if policy.input_parts > 1:  # of the input, a part and what was gathered
        again += shape.kept_input(policy)
    return again + (stage.whole if policy.keeps("matmul") else 0)


def _feed_forward(stage: Stage, *, stays: bool) -> int:
    """Bytes of gradients inside a feed-forward. The product that it keeps is dropped on the way.
    Compiled code writes the gradients of gate and up over what was kept of them."""
    shape = stage.shape
    if shape.experts is not None:
        return shape.experts.working
    inner = shape.item * shape.ffn.computed * shape.inner
    adapters = shape.options.adapters
    weight = shape.item * shape.inner * (adapters.rank if adapters else shape.model.dim)
    gathered = stage.ffn_input if stage.is_cut else 0
    if adapters:  # two gradients of the product, and their sum; or it is not kept, so not dropped
        return 3 * inner + weight
    results = inner if shape.options.is_compiled else 2 * inner
    return max(results + (weight if stays else 0), inner + weight + gathered)


def _reduce(stage: Stage, elements: int, last: int = 0) -> int:
    """Bytes while FSDP2 reduces gradients. last: elements of the unit's last gradient, which a
    variable of FSDP2 holds meanwhile."""
    return int(reduce_bytes(elements, stage.shape.item, stage.shape.wide, stage.shards, last))


def reduce_bytes(
    elements: float, item: float, wide: float, shards: int, last: float = 0.0
) -> float:
    """Return the bytes of gradients, of what is sent, and of as much that comes. wide: bytes of an
    element that is sent. shards: see `Stage`."""
    sent = wide * elements
    reduced = sent // shards if shards else 0
    return sent + max(item * elements, sent + reduced + item * last)


def loss_chunk(config: RunConfig, device: str) -> int:
    """Return the tokens whose logits the loss holds at a time. device: "cpu" or "accelerator"."""
    first = next(name for name in DEVICES if is_accelerator(name))
    name = config.device if is_accelerator(config.device) else first
    kind = DEVICES["cpu" if device == "cpu" else name]
    return kind.chunk_tokens(max(1, config.model.vocab_size), config.train.loss_chunk)


def _logits(stage: Stage) -> int:
    shape = stage.shape
    head = stage.held * shape.model.dim
    is_fused = shape.options.is_compiled and not stage.cuts_vocabulary
    return int(
        logits_bytes(shape.tokens, stage.chunk, stage.rows, head, shape.item, is_fused=is_fused)
    )


def logits_bytes(
    tokens: float, chunk: float, rows: float, head: float, item: float, *, is_fused: bool = False
) -> float:
    """Return the most bytes of a chunk of logits, with what is made of it, and the head's gradient.

    Args:
        tokens: of the rank.
        chunk: tokens of a chunk.
        rows: of the vocabulary that it computes with.
        head: elements of the head's gradient.
        item: bytes of an element that is computed with.
        is_fused: the compiler has made one pass of the softmax and its gradient.
    """
    wide, is_mixed, again = max(4.0, item), item < 4, tokens > chunk
    number = min(tokens, chunk) * rows
    narrow, broad, gradient = number * item, number * wide, head * (wide if again else item)
    softmax = 2 * narrow if is_fused else narrow + broad + (broad if is_mixed else 0)
    if again and is_fused:
        softmax += gradient + narrow
    elif again:
        softmax += gradient + (narrow if is_mixed else broad)
    slope = 2 * narrow if is_mixed else narrow + broad  # as much if it is fused
    return max(softmax, slope + gradient + (head * item if again and is_mixed else 0))
