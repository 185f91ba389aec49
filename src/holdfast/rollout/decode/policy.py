"""Completions of a policy, many at a time, whose bits do not depend on each other.

Slots hold the texts that are generated. Each step draws one token in every slot, and a slot whose
completion has ended takes the next request (continuous batches). docs/internals/post-training.md
says which kernels keep the bits, and what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.sections.lora import LoraConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.adapters import adapted_layers
from holdfast.errors import UserError
from holdfast.model.decoder import AttentionContext, Decoder
from holdfast.model.experts import ExpertMatrices, Experts, RoutedFeedForward, Router
from holdfast.model.feed_forward import Linear
from holdfast.model.generate import nucleus, refuse_sampling
from holdfast.model.lora import LoraLinear, adapters_off, add_adapters, set_base
from holdfast.rollout.decode.attention import BLOCK, TILE, CachedAttention, Place, TileCache
from holdfast.rollout.decode.source import CompletionSource
from holdfast.rollout.decode.threads import serial_kernels
from holdfast.rollout.messages import Begun, Completion, CompletionRequest, Finish, Sampling

PREFILL = 32  # tokens of a prompt that are read together
_VECTOR = 64  # elements that a kernel may compute in another way at a tensor's end
_MIN_OUTPUTS = (
    16  # of a product. With 11 or fewer, MKL computes odd rows otherwise on some AMD CPUs
)


@dataclass
class _Slot:
    """One text: the completion that grows in it, and the prompt whose keys are cached."""

    request: CompletionRequest | None = None  # None: the slot is free
    run_seed: int = 0
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    next_token: int = 0  # is read in the next step
    position: int = 0  # of `next_token`
    prompt: tuple[int, ...] = ()  # whose keys are cached; it outlives the request
    first_logits: Tensor | None = None  # [1, V] after that prompt, on the CPU

    def take(self, request: CompletionRequest, token: int, logp: float) -> Completion | None:
        """Add a token. Return the completion if it has ended."""
        self.tokens.append(token)
        self.logps.append(logp)
        self.next_token = token
        self.position = len(request.prompt) + len(self.tokens) - 1
        finish: Finish = "stop" if token in request.sampling.stop else "length"
        if finish == "length" and len(self.tokens) < request.sampling.max_tokens:
            return None
        self.request = None
        return Completion(request.key, tuple(self.tokens), tuple(self.logps), finish)


class PolicyDecoder(CompletionSource):
    """A decoder that generates the completions of requests.

    Args:
        model: the decoder's shape.
        device: where it computes.
        slots: completions that are generated at a time.
        max_length: most tokens of a prompt and its completion.
        dtype: of weights, keys and values.
        lora: of a policy that is a base with adapters; `load_base` gives the base's weights.
    """

    def __init__(
        self,
        model: ModelConfig,
        device: torch.device,
        *,
        slots: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        lora: LoraConfig | None = None,
    ):
        if slots < 1 or max_length > model.max_position:
            raise UserError(
                f"{slots} slots of {max_length} tokens do not suit the model",
                remedy=f"use at least 1 slot and at most {model.max_position} tokens",
            )
        self.config, self.max_length, self._device = model, max_length, device
        self._model = _build(model, device, dtype, lora)
        self._rows = _tile_rows(model)
        for part in self._model.modules():
            if isinstance(part, RoutedFeedForward):
                part.run_experts = partial(_run_experts, part.config.top_k)
            elif isinstance(part, Router | LoraLinear):
                part.product = _product
        self._dtype = dtype
        self._tiles = [self._new_tile() for _ in range(math.ceil(slots / TILE))]
        self._slots = [_Slot() for _ in range(slots)]
        self._reading = list[TileCache]()  # keys of a text that is only read; empty: none was

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a policy's weights into the memory that is there: all parameters, or those of the
        adapters if the decoder has them. No completion may be under way."""
        assert self.free == len(self._slots), "completions of the older weights are under way"
        _copy_all(dict(self._model.named_parameters()), weights)
        self._forget()

    def load_base(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the frozen weights under the adapters."""
        _copy_all(dict(self._model.named_buffers()), weights)
        self._forget()

    @property
    def slots(self) -> int:
        """Completions that are generated at a time."""
        return len(self._slots)

    @property
    def free(self) -> int:
        """Slots without a completion."""
        return sum(slot.request is None for slot in self._slots)

    def cancel(self) -> None:
        """Drop the completions that are under way."""
        for slot in self._slots:
            slot.request = None

    @torch.inference_mode()
    def start(
        self, request: CompletionRequest, run_seed: int, begun: Begun | None = None
    ) -> Completion | None:
        """Read the prompt into a free slot and draw the first token. Return the completion if it
        has ended. begun: tokens that another decoder drew, from which this one continues. Raises
        UserError for a request that cannot be generated."""
        self._refuse(request)
        free = [number for number, slot in enumerate(self._slots) if slot.request is None]
        same = [number for number, slot in enumerate(self._slots) if slot.prompt == request.prompt]
        number = next((number for number in free if number in same), free[0])
        slot = self._slots[number]
        if number not in same:
            with serial_kernels():
                if same:
                    self._copy_prompt(same[0], number, len(request.prompt))
                else:
                    slot.prompt = ()
                    slot.first_logits = self._read_prompt(number, request.prompt)
            slot.prompt = request.prompt
        slot.request, slot.run_seed = request, run_seed
        slot.tokens, slot.logps, slot.position = [], [], len(request.prompt)
        assert slot.first_logits is not None
        if begun is not None and begun.tokens:
            slot.tokens, slot.logps = list(begun.tokens), list(begun.logps)
            slot.next_token, slot.position = slot.tokens[-1], slot.position + len(slot.tokens) - 1
            self._read_again(number, len(request.prompt), slot.tokens[:-1])
            return None
        return next(iter(self._draw([slot], slot.first_logits)), None)

    def begun(self) -> list[Begun]:
        """Return what there is of each completion under way."""
        return [
            Begun(slot.request.key, tuple(slot.tokens), tuple(slot.logps))
            for slot in self._slots
            if slot.request is not None
        ]

    @property
    def drawn(self) -> int:
        """Tokens of all completions under way."""
        return sum(len(slot.tokens) for slot in self._slots if slot.request is not None)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Draw one token of each completion under way. Return those that ended."""
        ended = []
        for number, tile in enumerate(self._tiles):
            slots = self._slots[number * TILE : (number + 1) * TILE]
            if all(slot.request is None for slot in slots):
                continue
            with serial_kernels():
                logits = self._read_tile(tile, slots)
            ended += self._draw(slots, logits)
        return ended

    @torch.inference_mode()
    def read(
        self,
        request: CompletionRequest,
        tokens: Sequence[int],
        *,
        score: Tensor | None = None,
        of_base: bool = False,
    ) -> tuple[float, ...]:
        """Return the log-probability of each token of a completion, as `Sampling` says. The bits
        are a function of weights and text, which is read in chunks of a fixed size.

        Args:
            score: [1, D] of a head: return its value before each token instead.
            of_base: read without the adapters.
        """
        self._refuse(request)
        self._reading = self._reading or self._new_tile()
        first, text = len(request.prompt) - 1, [*request.prompt, *tokens]
        temperature, found = request.sampling.temperature or 1.0, list[Tensor]()
        with serial_kernels(), adapters_off(self._model) if of_base else nullcontext():
            for start, hidden in self._chunks(self._reading, 0, text[:-1]):
                if start + PREFILL <= first:
                    continue
                if score is not None:
                    values = F.linear(self._model.head_input(hidden), score)
                    found.append(values[:, 0].float().cpu())
                    continue
                logps = (self._model.unembed(hidden).float().cpu() / temperature).log_softmax(-1)
                after = (text[start + 1 : start + 1 + PREFILL] + [0] * PREFILL)[:PREFILL]
                found.append(logps.gather(1, torch.tensor(after)[:, None])[:, 0])
        skipped = first % PREFILL
        read: list[float] = torch.cat(found)[skipped : skipped + len(tokens)].tolist()
        return tuple(read)

    def _new_tile(self) -> list[TileCache]:
        capacity = math.ceil(self.max_length / BLOCK) * BLOCK
        with torch.inference_mode(False):  # `load` zeroes it, outside of that mode
            like = torch.empty(0, dtype=self._dtype, device=self._device)
            return [TileCache(self.config, capacity, like) for _ in range(self.config.layers)]

    def _refuse(self, request: CompletionRequest) -> None:
        """Raises UserError for a request that does not fit."""
        prompt, how = request.prompt, request.sampling
        if not prompt or how.max_tokens < 1:
            raise UserError(
                f"prompt {request.key.prompt} has {len(prompt)} tokens and asks for "
                f"{how.max_tokens}",
                remedy="give at least one token of text, and ask for at least one",
            )
        refuse_sampling(how.temperature, how.top_p)
        if len(prompt) + how.max_tokens > self.max_length:
            raise UserError(
                f"prompt {request.key.prompt} has {len(prompt)} tokens, and with a completion of "
                f"{how.max_tokens} they are more than {self.max_length}",
                remedy="use shorter prompts or completions",
            )

    def _draw(self, slots: Sequence[_Slot], logits: Tensor) -> list[Completion]:
        """Draw the next token of each slot from its row of logits [n, V] on the CPU. Return the
        completions that ended."""
        drawing = [(slot, slot.request) for slot in slots if slot.request is not None]
        keep = [row for row, slot in enumerate(slots) if slot.request is not None]
        tokens, logps = _draw_tokens(
            logits[keep],
            [request.sampling for _, request in drawing],
            [request.key.seed(slot.run_seed, len(slot.tokens)) for slot, request in drawing],
        )
        ended = []
        for (slot, request), token, logp in zip(drawing, tokens, logps, strict=True):
            if not math.isfinite(logp):
                raise UserError(
                    f"the policy of step {request.key.policy} gives logits that are not finite",
                    where=f"prompt {request.key.prompt}",
                    remedy="train from an older checkpoint with a lower learning rate",
                )
            if done := slot.take(request, token, logp):
                ended.append(done)
        return ended

    def _copy_prompt(self, source: int, number: int, length: int) -> None:
        """Take the prompt that another slot has read."""
        blocks = math.ceil(length / BLOCK)
        there, here = self._tiles[source // TILE], self._tiles[number // TILE]
        for old, new in zip(there, here, strict=True):
            new.copy_text(old, source % TILE, number % TILE, blocks)
        self._slots[number].first_logits = self._slots[source].first_logits

    def _read_prompt(self, number: int, prompt: Sequence[int]) -> Tensor:
        """Read a prompt in chunks of a fixed size -> logits after it: [1, V] on the CPU"""
        hidden = torch.empty(0)
        for _, chunk in self._chunks(self._tiles[number // TILE], number % TILE, prompt):
            hidden = chunk
        last = hidden[(len(prompt) - 1) % PREFILL]
        # A fixed number of equal rows: the product of one row has other bits on other devices.
        return self._model.unembed(last.expand(self._rows, -1))[:1].float().cpu()

    def _read_again(self, number: int, start: int, tokens: Sequence[int]) -> None:
        """Read tokens of a completion, the first one at place `start`, with the bits of `step`.
        Products have the shape of a step, and their rows are tokens of one text."""
        caches, rest = self._tiles[number // TILE], [0] * (self._rows - TILE)
        slots = torch.full((TILE,), number % TILE, device=self._device)
        with serial_kernels():
            for first in range(0, len(tokens), TILE):
                # The last token fills the rest of a tile: it writes the same keys again.
                at = [min(first + row, len(tokens) - 1) for row in range(TILE)]
                read = torch.tensor([tokens[one] for one in at] + rest, device=self._device)
                positions = torch.tensor(at, device=self._device)[:, None] + start
                place = Place(slots, positions, (start + at[-1]) // BLOCK + 1)
                self._hidden(caches, read[:, None], place)

    def _chunks(
        self, caches: Sequence[TileCache], row: int, text: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the first place of each chunk of a text, and what the head reads of it:
        [PREFILL, D]"""
        for start in range(0, len(text), PREFILL):
            chunk = list(text[start : start + PREFILL])
            chunk += [0] * (PREFILL - len(chunk))
            tokens = torch.tensor([chunk], device=self._device)
            at = torch.arange(start, start + PREFILL, device=self._device)[None]
            blocks = math.ceil((start + PREFILL) / BLOCK)
            yield start, self._hidden(caches, tokens, Place(slice(row, row + 1), at, blocks))[0]

    def _read_tile(self, caches: Sequence[TileCache], slots: Sequence[_Slot]) -> Tensor:
        """Read the next token of each slot of a tile -> logits [TILE, V] on the CPU. Free slots
        compute too: their token overwrites none of a prompt."""
        padding = [0] * (TILE - len(slots))
        rest = [0] * (self._rows - TILE)
        tokens = [slot.next_token for slot in slots] + padding + rest
        at = [slot.position for slot in slots] + padding
        longest = max(slot.position for slot in slots if slot.request is not None)
        positions = torch.tensor(at, device=self._device)[:, None]
        place = Place(slice(0, TILE), positions, longest // BLOCK + 1)
        hidden = self._hidden(caches, torch.tensor(tokens, device=self._device)[:, None], place)
        return self._model.unembed(hidden[:, 0])[:TILE].float().cpu()

    def _hidden(self, caches: Sequence[TileCache], tokens: Tensor, place: Place) -> Tensor:
        """tokens: [N + padding, C] -> what the head reads: [N + padding, C, D]"""
        model, rows = self._model, tokens.shape[0]
        assert model.norm is not None
        for cache in caches:
            cache.place = place
        x = model.embed_tokens(tokens)
        at = F.pad(place.positions, (0, 0, 0, rows - place.positions.shape[0]))
        at = at.clamp_max(self.config.max_position - 1)  # of tokens that fill a prompt's last chunk
        angles = model.attention_context(tokens, x, positions=at)
        far = near = CachedAttention(self.config, place, 0, rows)
        if self.config.windowed:
            near = CachedAttention(self.config, place, self.config.window, rows)
        context = AttentionContext(angles.rotary, far, angles.window_rotary, near)
        return model.norm(model.blocks(x, context, caches))  # type: ignore[no-any-return]

    def _forget(self) -> None:
        """Forget what older weights have read. A key that is not finite would spread."""
        for slot in self._slots:
            slot.prompt, slot.first_logits = (), None
        for cache in (cache for tile in (*self._tiles, self._reading) for cache in tile):
            cache.key.zero_()
            cache.value.zero_()


def _draw_tokens(
    logits: Tensor, how: Sequence[Sampling], seeds: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Draw a token from each row of logits [n, V] by its seed: the first one whose cumulated
    probability is above a uniform number. Return tokens and log-probabilities."""
    temperatures = torch.tensor([each.temperature for each in how])[:, None]
    greedy = temperatures == 0
    scaled = logits / torch.where(greedy, 1.0, temperatures)
    rows = scaled.softmax(-1)
    if any(each.top_p < 1 for each in how):
        parts = zip(torch.split(rows, 1), how, strict=True)
        rows = torch.cat([nucleus(row, each.top_p) for row, each in parts])
    cumulated = rows.double().cumsum(-1)
    uniform = torch.tensor([(seed >> 11) * 2.0**-52 for seed in seeds], dtype=torch.float64)
    drawn = torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)
    if bool(greedy.any()):
        drawn = torch.where(greedy, logits.argmax(-1, keepdim=True), drawn)
    drawn = drawn.clamp_max(logits.shape[1] - 1)  # of a row that is not finite
    logps = scaled.log_softmax(-1).gather(1, drawn)[:, 0]
    return drawn[:, 0].tolist(), logps.tolist()


def _build(
    model: ModelConfig, device: torch.device, dtype: torch.dtype, lora: LoraConfig | None
) -> Decoder:
    """A decoder with memory for its weights."""
    with torch.device("meta"):
        decoder = Decoder(model)
        shapes = {name: tuple(value.shape) for name, value in decoder.named_parameters()}
        columns = {
            f"{name}.weight"
            for name, part in decoder.named_modules()
            if isinstance(part, (Linear, ExpertMatrices))
        } | ({"embed.weight"} if model.tied_embeddings else set())
        if lora is not None and lora.rank:
            add_adapters(decoder, adapted_layers(model, lora), lora)
    memory = {
        name: _memory(shape, name in columns, dtype, device) for name, shape in shapes.items()
    }
    adapters = {
        name: nn.Parameter(_memory(tuple(value.shape), True, dtype, device), requires_grad=False)
        for name, value in decoder.named_parameters()
        if name not in memory
    }
    if adapters:
        set_base(decoder, memory)
    else:
        memory = {name: nn.Parameter(value, requires_grad=False) for name, value in memory.items()}
    decoder.load_state_dict(adapters or memory, strict=True, assign=True)
    return decoder.eval()


def _memory(
    shape: tuple[int, ...], is_by_column: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Memory of a weight. A matrix lies with its inputs first. Then the product's sums do not
    depend on the number of rows, and a few rows cost little more than one."""
    if not is_by_column or len(shape) < 2:
        return torch.zeros(shape, dtype=dtype, device=device)
    *outer, outputs, inputs = shape
    return torch.zeros(*outer, inputs, outputs, dtype=dtype, device=device).transpose(-1, -2)


def _copy_all(into: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy each weight in place. Raises ValueError unless names and shapes are those of `into`."""
    if into.keys() != weights.keys():
        odd = sorted(into.keys() ^ weights.keys())
        raise ValueError(f"weights of another model: {len(odd)} names differ, such as {odd[0]}")
    for name, memory in into.items():
        if memory.shape != weights[name].shape:
            raise ValueError(f"{name}: {tuple(weights[name].shape)} is not {tuple(memory.shape)}")
        memory.detach().copy_(weights[name])


def _tile_rows(model: ModelConfig) -> int:
    """Rows of a tile's tensors. A kernel may compute the last elements of a tensor in another way
    than those before. If a width leaves such elements, rows without a text come last."""
    widths = [model.dim, model.inner_dim, model.ffn_dim, model.vocab_size]
    if model.experts is not None:
        widths += [model.experts.count, model.experts.width * model.experts.shared or _VECTOR]
    if not any(TILE * width % _VECTOR for width in widths):
        return TILE
    return TILE + math.ceil(_VECTOR / min(widths))


def _product(input: Tensor, weight: Tensor) -> Tensor:
    """As `F.linear`, with outputs of zeros if there are few: then a row's place changes no bit.
    input: [..., inputs]; weight: [outputs, inputs] -> [..., outputs]"""
    outputs, inputs = weight.shape
    if outputs >= _MIN_OUTPUTS:
        return F.linear(input, weight)
    columns = weight.new_zeros(inputs, _MIN_OUTPUTS)
    columns[:, :outputs] = weight.T
    return F.linear(input, columns.T)[..., :outputs].contiguous()


def _run_experts(top_k: int, experts: Experts, tokens: Tensor, counts: Tensor) -> Tensor:
    """Compute each expert on as many rows as there are tokens, whatever the number of its own.
    tokens: [N, D], top_k times each, sorted by expert -> [N, D]"""
    all_rows, results = tokens.shape[0] // top_k, []
    matrices = zip(experts.gate.weight, experts.up.weight, experts.down.weight, strict=True)
    for x, (gate, up, down) in zip(torch.split(tokens, counts.tolist()), matrices, strict=True):
        if not x.shape[0]:
            continue
        rows = F.pad(x, (0, 0, 0, all_rows - x.shape[0]))
        inner = experts.activation(F.linear(rows, gate)) * F.linear(rows, up)
        results.append(F.linear(inner, down)[: x.shape[0]])
    return torch.cat(results)
