"""Zeros in the matrices of a trained decoder, or fewer blocks.

magnitude: the smallest weights of a matrix (Han et al., 2015). wanda: in each row the smallest
products of a weight and the norm of its input (Sun et al., 2024, algorithm 1). It takes block after
block, each with the inputs that the pruned blocks before it give. layers: the blocks that turn the
residual stream least (block influence: Men et al., 2024, equation 1).

All of it runs on one device, with the complete model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.sections.model import ModelConfig
from holdfast.core.data.target_weights import target_ids
from holdfast.data.stream.batch import Microbatch
from holdfast.errors import ConfigError
from holdfast.model.decoder import AttentionContext, Decoder
from holdfast.training.engine.objective import NextTokenObjective


@dataclass(frozen=True)
class Sparsity:
    """Which weights become zero.

    fraction: of each matrix, or row. keep, of_each: of so many inputs in a row, so many stay; 0 of
    0: anywhere.
    """

    fraction: float
    keep: int = 0
    of_each: int = 0


@dataclass(frozen=True)
class Sample:
    """A microbatch of calibration data."""

    tokens: Tensor  # [B, S] int64
    targets: Tensor  # [B, S] int64, -100 without loss
    documents: Tensor | None  # [B, S] int32

    @classmethod
    def of(cls, read: Microbatch) -> Sample:
        """Return what a run reads."""
        documents = None if read.documents is None else torch.from_numpy(read.documents)
        targets = torch.from_numpy(target_ids(read.targets))
        return cls(torch.from_numpy(read.inputs), targets, documents)


def least(scores: Tensor, how: Sparsity, *, by_row: bool) -> Tensor:
    """Return a mask [o, i] of the weights that become zero: those of the lowest scores [o, i].
    Equal scores go in the order of their places."""
    groups = scores
    if how.of_each:
        groups, count = scores.reshape(-1, how.of_each), how.of_each - how.keep
    else:
        groups = scores if by_row else scores.reshape(1, -1)
        count = int(how.fraction * groups.shape[1])
    order = groups.argsort(dim=1, stable=True)[:, :count]
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order, True)
    return mask.view_as(scores)


def prunable_layers(decoder: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the blocks, by name."""
    found = decoder.named_modules()
    return {name: part for name, part in found if isinstance(part, nn.Linear)}


def refuse_sparsity(model: ModelConfig, decoder: Decoder, how: Sparsity) -> None:
    """Raises ConfigError for a model that cannot have such zeros."""
    if model.experts is not None:
        raise ConfigError(
            "experts cannot be pruned",
            where="model.experts",
            remedy="use a model without experts, or --method layers",
        )
    for name, layer in prunable_layers(decoder.layers).items():
        if how.of_each and layer.in_features % how.of_each:
            raise ConfigError(
                f"layer {name} has {layer.in_features} inputs, no multiple of {how.of_each}",
                where="--pattern",
                remedy="use --sparsity",
            )


@torch.no_grad()
def prune_by_magnitude(decoder: Decoder, how: Sparsity) -> None:
    """Set the smallest weights of each matrix in the blocks to zero."""
    for layer in prunable_layers(decoder.layers).values():
        layer.weight.masked_fill_(least(layer.weight.abs(), how, by_row=False), 0.0)


@torch.no_grad()
def prune_by_wanda(decoder: Decoder, samples: Sequence[Sample], how: Sparsity) -> None:
    """Set the weights of the least effect on the samples to zero, row by row."""
    streams = _Streams(decoder, samples)
    for position, block in decoder.layers.items():
        layers = prunable_layers(block)
        squares = {name: torch.zeros(part.in_features).double() for name, part in layers.items()}

        def add(name: str, x: Tensor, squares: dict[str, Tensor] = squares) -> None:
            squares[name] += x.double().square().flatten(0, -2).sum(0)

        with _watched(layers, add):
            streams.run(position)
        for name, layer in layers.items():
            scores = layer.weight.abs().double() * squares[name].sqrt()
            layer.weight.masked_fill_(least(scores, how, by_row=True), 0.0)
        streams.advance(position)


@torch.no_grad()
def influences(decoder: Decoder, samples: Sequence[Sample]) -> list[float]:
    """Return by block 1 minus the mean cosine between what goes in and what comes out."""
    streams, found = _Streams(decoder, samples), []
    for position in decoder.layers.positions:
        before = streams.values
        streams.advance(position)
        cosines = [
            F.cosine_similarity(x.double(), y.double(), dim=-1).flatten()
            for x, y in zip(before, streams.values, strict=True)
        ]
        found.append(1.0 - float(torch.cat(cosines).mean()))
    return found


def without_blocks(
    model: ModelConfig, state: Mapping[str, Tensor], dropped: Sequence[int]
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the shape and the weights without some blocks, the rest numbered from 0."""
    kept = [number for number in range(model.layers) if number not in dropped]
    numbers = {old: new for new, old in enumerate(kept)}
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        first, _, rest = name.partition(".")
        if first != "layers":
            out[name] = value
            continue
        number, _, rest = rest.partition(".")
        if int(number) in numbers:
            out[f"layers.{numbers[int(number)]}.{rest}"] = value
    places = {
        key: tuple(numbers[n] for n in getattr(model, key) if n in numbers)
        for key in ("window_layers", "no_rope_layers")
    }
    if model.window_layers and not places["window_layers"]:
        places["window"] = 0  # type: ignore[assignment]
    changes = {**places, "layers": len(kept), "preset": None}
    return ModelConfig.model_validate(model.model_dump() | changes), out


def decoder_of(model: ModelConfig, state: Mapping[str, Tensor]) -> Decoder:
    """Return a decoder with these weights."""
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.load_state_dict(state, strict=True, assign=True)
    return decoder.eval()


@torch.no_grad()
def mean_loss(decoder: Decoder, samples: Sequence[Sample]) -> float:
    """The mean cross entropy of the samples' targets."""
    objective = NextTokenObjective(decoder)
    total = sum(float(objective(s.tokens, s.targets, s.documents)) for s in samples)
    return total / max(1, sum(int((s.targets >= 0).sum()) for s in samples))


class _Streams:
    """The residual streams of all samples, block after block."""

    def __init__(self, decoder: Decoder, samples: Sequence[Sample]) -> None:
        self._decoder = decoder
        self.values = [decoder.embed_tokens(sample.tokens) for sample in samples]
        self._contexts: list[AttentionContext] = [
            decoder.attention_context(sample.tokens, x, sample.documents)
            for sample, x in zip(samples, self.values, strict=True)
        ]

    def run(self, position: int) -> list[Tensor]:
        """Return what a block gives; the streams stay."""
        both = zip(self.values, self._contexts, strict=True)
        return [self._decoder.blocks(x, c, positions={position}) for x, c in both]

    def advance(self, position: int) -> None:
        self.values = self.run(position)


@contextmanager
def _watched(layers: Mapping[str, nn.Linear], see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `see` with the name and the input of each pass through a layer."""

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, given: see(name, given[0])

    hooks = [part.register_forward_pre_hook(watch(name)) for name, part in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
