"""Sampling from a model on one device, with cached keys and values.

The prompt is read once; after that each step feeds one token per row, whose query meets the keys
of all tokens before it. Sampling is nucleus sampling (Holtzman et al. 2020): the smallest set of
tokens whose probability reaches `top_p`, renormalised. The draw for token n comes from a
generator keyed by (seed, "generate", n), so that the same call gives the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from holdfast.core.seeds import key_seed
from holdfast.errors import UserError
from holdfast.model.decoder import Decoder


class KeyValueCache:
    """Keys and values of one layer, in memory set aside for `capacity` tokens."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._length = 0
        self._key = self._value = torch.empty(0)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take keys and values of new tokens, give those of all.  [B, S, K, h] each."""
        batch, new, *rest = key.shape
        if self._length == 0:
            self._key = key.new_empty(batch, self._capacity, *rest)
            self._value = torch.empty_like(self._key)
        end = self._length + new
        self._key[:, self._length : end] = key
        self._value[:, self._length : end] = value
        self._length = end
        return self._key[:, :end], self._value[:, :end]


class TextSession(Protocol):
    """A model and the tokens it has read."""

    def read(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S], following those read before -> logits of the last one: [B, V]"""
        ...


OpenSession = Callable[[int], TextSession]
"""Opens a session of at most so many tokens. Raises UserError for more than the model's."""


def refuse_long_text(capacity: int, limit: int) -> None:
    """Raises UserError for more tokens than the model has positions."""
    if capacity > limit:
        raise UserError(
            f"{capacity} tokens are more than the model's {limit} positions",
            remedy=f"ask for at most {limit}, the prompt's included",
        )


class DecodingSession:
    """A decoder and the tokens it has read; `read` continues the text of every row."""

    def __init__(self, model: Decoder, capacity: int):
        refuse_long_text(capacity, model.config.max_position)
        self._model = model
        self._caches = [KeyValueCache(capacity) for _ in range(model.config.layers)]
        self._tokens_read = 0

    def read(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S], following those read before -> logits of the last one: [B, V]"""
        length, device = tokens.shape[1], tokens.device
        own = torch.arange(self._tokens_read, self._tokens_read + length, device=device)
        mask = None
        # A lone new token sees every key, unless some are outside of a window.
        if self._tokens_read and (length > 1 or self._model.config.window):
            keys = torch.arange(self._tokens_read + length, device=device)
            mask = (keys <= own[:, None])[None, None]  # [1, 1, S, S']
        positions = own.expand(tokens.shape) if self._tokens_read else None
        hidden = self._model.hidden(tokens, None, positions, self._caches, mask)
        self._tokens_read += length
        return self._model.unembed(hidden[:, -1])


@torch.no_grad()
def generate(
    model: Decoder | OpenSession,
    tokens: Tensor,
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Continue each row of `tokens` [B, S >= 1] by at most `new_tokens` -> [B, S + n].

    `temperature` 0 takes the likeliest token. `on_token` is given each step's tokens [B] at once,
    for streaming. After a row has drawn one of `stop`, it continues with it. When every row has
    drawn one, generation ends. Raises UserError if the text would outgrow the model's positions or
    a setting is out of range.
    """
    refuse_sampling(temperature, top_p)
    if tokens.shape[1] == 0:
        raise UserError("the prompt is empty", remedy="give at least one token of text")
    open_session = partial(DecodingSession, model) if isinstance(model, Decoder) else model
    session = open_session(tokens.shape[1] + new_tokens)
    ends = torch.tensor(sorted(stop), dtype=torch.long, device=tokens.device)
    drawn = tokens[:, -1]
    ended = torch.zeros_like(drawn, dtype=torch.bool)
    text, fresh = [tokens], tokens
    for index in range(new_tokens):
        logits = session.read(fresh)
        chosen = sample(logits, temperature, top_p, key_seed(seed, "generate", index))
        drawn = torch.where(ended, drawn, chosen)
        ended = ended | torch.isin(drawn, ends)
        fresh = drawn[:, None]
        text.append(fresh)
        if on_token is not None:
            on_token(drawn)
        if bool(ended.all()):
            break
    return torch.cat(text, dim=1)


def continue_tokens(
    model: Decoder | OpenSession,
    tokens: Sequence[int],
    new_tokens: int,
    *,
    on_token: Callable[[int], None] | None = None,
    **how: Any,
) -> list[int]:
    """Continue one text as `generate` does, and return the tokens that it adds."""

    def take(drawn: Tensor) -> None:
        if on_token is not None:
            on_token(int(drawn))

    text = torch.tensor([tokens], dtype=torch.long).reshape(1, -1)
    found = generate(model, text, new_tokens, on_token=take, **how)
    added: list[int] = found[0, len(tokens) :].tolist()
    return added


def refuse_sampling(temperature: float, top_p: float) -> None:
    """Raises UserError for settings that are out of range."""
    if not (0 <= temperature < float("inf") and 0 < top_p <= 1):
        raise UserError(
            f"temperature {temperature} with top_p {top_p} cannot be sampled from",
            remedy="use a temperature of at least 0 and a top_p above 0 and at most 1",
        )


def sample(logits: Tensor, temperature: float, top_p: float, seed: int) -> Tensor:
    """One token per row.  logits: [B, V] -> [B]"""
    if temperature == 0:
        return logits.argmax(dim=-1)
    # On the CPU in float32: one generator, whatever device and precision the model has.
    probabilities = (logits.float().cpu() / temperature).softmax(dim=-1)
    probabilities = nucleus(probabilities, top_p)
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(logits.device)


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The likeliest tokens that reach `top_p` together; the rest get 0.  [B, V] -> [B, V]"""
    if top_p == 1:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    # A token stays while those before it fall short of top_p: the likeliest always does.
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered)
