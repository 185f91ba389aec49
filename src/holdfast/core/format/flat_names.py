"""Names of parameters and of AdamW's state in other people's flat state dictionaries.

`torch.distributed.checkpoint` stores what it is given under flat names. torchtitan gives it the
model under the parameters' own names and the optimizer, flattened, under `optimizer.`:

    layers.0.feed_forward.w1.weight                        the parameter
    optimizer.state.layers.0.feed_forward.w1.weight.step   how often it was updated
    optimizer.state.layers.0.feed_forward.w1.weight.exp_avg, ...exp_avg_sq
    optimizer.param_groups.layers.0.feed_forward.w1.weight.lr, ... (no tensors)

A scheme is one way to name the parameters: ours, torchtitan's for Llama 3 (since 0.3, and as
before), or Hugging Face's. torchtitan's Llama turns neighbouring pairs of a head's rows, all other
models turn its two halves. So there the rows of q and k, and of their moments, are in another order
(`pairs` heads).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from holdfast.config.sections.model import ModelConfig
from holdfast.core.format.hf_names import huggingface_map
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZER_PREFIXES = ("optimizer.", "optim.", "")
"""Prefixes of `state.` in the dictionaries that are read; the first is written."""

_TITAN_BLOCK = {
    "attention_norm": "attention_norm",
    "attention.q": "attention.qkv_linear.wq",
    "attention.k": "attention.qkv_linear.wk",
    "attention.v": "attention.qkv_linear.wv",
    "attention.q_norm": "attention.q_norm",
    "attention.k_norm": "attention.k_norm",
    "attention.o": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "feed_forward.w1",
    "ffn.up": "feed_forward.w3",
    "ffn.down": "feed_forward.w2",
}
_TITAN_OUTSIDE = {
    "embed.weight": "tok_embeddings.weight",
    "norm.weight": "norm.weight",
    "head.weight": "lm_head.weight",
}
_UNTIL_0_2 = {"lm_head.weight": "output.weight", ".qkv_linear.": "."}
"""Names that differed before torchtitan 0.3."""


class NoSuchNameError(CheckpointError):
    """A scheme has no name for one of the model's parameters."""


@dataclass(frozen=True, slots=True)
class FlatName:
    """One parameter: our name, theirs, its shape there, and `pairs`. Ours may have padding rows at
    the end. `pairs` is the number of heads whose rows are in pairs there; 0: none."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    pairs: int = 0

    def state_name(self, moment: str, optimizer: str = OPTIMIZER_PREFIXES[0]) -> str:
        """The name of a piece of the parameter's optimizer state."""
        return f"{optimizer}state.{self.theirs}.{moment}"


def own_names(model: ModelConfig) -> tuple[FlatName, ...]:
    return tuple(FlatName(p.name, p.name, p.shape) for p in decoder_parameters(model))


def titan_names(model: ModelConfig) -> tuple[FlatName, ...]:
    return tuple(_titan(model))


def older_titan_names(model: ModelConfig) -> tuple[FlatName, ...]:
    """Up to torchtitan 0.2."""
    rows = []
    for row in _titan(model):
        name = row.theirs
        for new, old in _UNTIL_0_2.items():
            name = name.replace(new, old)
        rows.append(replace(row, theirs=name))
    return tuple(rows)


def _titan(model: ModelConfig) -> Iterator[FlatName]:
    heads = {"attention.q": model.heads, "attention.k": model.kv_heads}
    for p in decoder_parameters(model):
        shape = (p.shape[0] - p.padding, *p.shape[1:])
        if p.name in _TITAN_OUTSIDE:
            yield FlatName(p.name, _TITAN_OUTSIDE[p.name], shape)
            continue
        _, layer, inside = p.name.split(".", 2)
        inside = inside.removesuffix(".weight")
        if inside not in _TITAN_BLOCK:
            raise NoSuchNameError(f"torchtitan's Llama 3 has no parameter for {p.name}")
        pairs = heads.get(inside, 0) if model.family == "llama" else 0
        yield FlatName(p.name, f"layers.{layer}.{_TITAN_BLOCK[inside]}.weight", shape, pairs)


def huggingface_names(model: ModelConfig) -> tuple[FlatName, ...]:
    """Hugging Face's own. Raises NoSuchNameError if one of theirs holds several of ours."""
    entries = huggingface_map(model).stored_entries
    if fused := next((entry for entry in entries if len(entry.pieces) > 1), None):
        raise NoSuchNameError(f"{fused.theirs} is several parameters of the model in one tensor")
    if any(entry.pieces[0].picked is not None for entry in entries):
        raise NoSuchNameError("each expert is a tensor of its own there, and all are one here")
    return tuple(FlatName(e.pieces[0].ours, e.theirs, e.shape) for e in entries)


SCHEMES: dict[str, Callable[[ModelConfig], tuple[FlatName, ...]]] = {
    "holdfast": own_names,
    "torchtitan": titan_names,
    "torchtitan-0.2": older_titan_names,
    "huggingface": huggingface_names,
}


def recognise_scheme(model: ModelConfig, names: Collection[str]) -> tuple[str, str] | str:
    """Return (scheme, prefix) under which every parameter is among `names`. If there is none,
    return the name that the likeliest scheme misses. A prefix is what a wrapper put before the
    parameters' names."""
    there = set(names)
    missing: list[tuple[int, str]] = []
    for scheme, table in SCHEMES.items():
        try:
            rows = table(model)
        except NoSuchNameError:
            continue
        for prefix in ("", "model."):
            lacks = [prefix + row.theirs for row in rows if prefix + row.theirs not in there]
            if not lacks:
                return scheme, prefix
            missing.append((len(lacks), lacks[0]))
    return min(missing)[1]
