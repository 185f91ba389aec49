"""How tensor and pipeline parallelism cut the parameters: one table, by parameter name.

Tensor parallelism follows Shoeybi et al. 2019, "Megatron-LM", section 3. Matrices that read the
residual stream are cut by columns of the product, which are rows of the stored weight. Matrices
that write it are cut by rows of the product, dim 1 of the stored weight. Attention is cut between
heads, SwiGLU by inner units, embedding and head by rows of the vocabulary. Norms act on single
tokens of the residual stream, so every rank holds all of them. Under sequence parallelism
(Korthikanti et al. 2022, section 4.2.2) a norm sees only the rank's part of the tokens.

    embed, head   [V, D]       dim 0, V units        attention.o   [D, H*h]   dim 1, H units
    score         [1, D]       dim 1, D units
    attention.q   [H*h, D]     dim 0, H units        ffn.gate, up  [F, D]     dim 0, F units
    attention.k,v [K*h, D]     dim 0, K units        ffn.down      [D, F]     dim 1, F units
    experts.gate, experts.up   [E, F, D]   dim 1, F units
    experts.down               [E, D, F]   dim 2, F units
    router        [E, D]       whole
    norms         [D]          whole                 q_norm,k_norm [h]        whole
    q, k, v bias  [H*h, K*h]   as their matrix       o bias        [D]        whole

Every rank adds its share of the bias of `attention.o`, 1 / tp. So its gradient is a sum over ranks.

A component, attention or the feed-forward, may have a lower degree n of its own. Then n neighbours
along tp have one part each. Ranks whose indices are alike modulo n hold the same part, and see
other tokens.

A layer of a new kind is one more row of `_CUTS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.core.sharding.parameters import Parameter, decoder_parameters
from holdfast.layout import component_degree

if TYPE_CHECKING:  # the mover has no use for pydantic
    from holdfast.config.sections.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Sharding:
    """One row.

    tp_dim: the dim that tp cuts; None: every tp rank holds all of it.
    tp_units: indivisible units along `tp_dim` (query heads, key/value heads, inner units, rows
        of the vocabulary); 1 without `tp_dim`.
    positions: where in the model it is used: -1 embedding, i block i, model.layers the last norm
        and the head. A tied embedding has both ends, and is held by both stages.
    per_token: acts on single tokens of the residual stream.
    """

    tp_dim: int | None
    tp_units: int
    positions: tuple[int, ...]
    per_token: bool


_CUTS: dict[str, tuple[int, str | None]] = {
    "embed": (0, None),
    "head": (0, None),
    "score": (1, None),
    "attention.q": (0, "heads"),
    "attention.k": (0, "kv_heads"),
    "attention.v": (0, "kv_heads"),
    "attention.q.bias": (0, "heads"),
    "attention.k.bias": (0, "kv_heads"),
    "attention.v.bias": (0, "kv_heads"),
    "attention.o": (1, "heads"),
    "ffn.gate": (0, None),
    "ffn.up": (0, None),
    "ffn.down": (1, None),
    "ffn.experts.gate": (1, None),
    "ffn.experts.up": (1, None),
    "ffn.experts.down": (2, None),
    "ffn.shared.gate": (0, None),
    "ffn.shared.up": (0, None),
    "ffn.shared.down": (1, None),
}
"""layer -> (dim of its weight that tp cuts, field of ModelConfig that counts the units; None: each
index of the dim is one)."""

_PER_TOKEN = ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm", "norm")


def sharding_table(model: ModelConfig) -> dict[str, Sharding]:
    """Every parameter of the decoder, in the order of `decoder_parameters`."""
    return {row.name: _row(row, model) for row in decoder_parameters(model)}


def _row(parameter: Parameter, model: ModelConfig) -> Sharding:
    layer, positions = _split_name(parameter.name, model)
    if layer not in _CUTS:
        return Sharding(None, 1, positions, layer in _PER_TOKEN)
    dim, counted_by = _CUTS[layer]
    units = parameter.shape[dim] if counted_by is None else getattr(model, counted_by)
    return Sharding(dim, units, positions, False)


def _split_name(name: str, model: ModelConfig) -> tuple[str, tuple[int, ...]]:
    """ "layers.3.ffn.up.weight" -> ("ffn.up", (3,))"""
    layer = name.removesuffix(".weight")
    if layer.startswith("layers."):
        _, number, layer = layer.split(".", 2)
        return layer, (int(number),)
    if layer == "embed":
        return layer, (-1, model.layers) if model.has_tied_head else (-1,)
    return layer, (model.layers,)


def tp_part(units: int, tp: int, index: int) -> tuple[int, int]:
    """(first unit, number of units) of tp rank `index`.

    With at least as many units as ranks, `chunk`'s rule: ceil(units / tp) each, the last ones
    fewer or none. With fewer units (grouped-query attention's key/value heads), each unit is
    held by the tp / units ranks whose query heads read it.
    """
    if units < tp:
        return index * units // tp, 1
    return chunk_range(units, tp, index)


def component_part(units: int, component: int, tp: int, index: int) -> tuple[int, int]:
    """As `tp_part`, of a component with a degree of its own."""
    degree = component_degree(component, tp)
    return tp_part(units, degree, index % degree)


def chunk_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part `index` of a dim, by `torch.chunk`'s rule, which FSDP2 follows:
    parts of ceil(length / parts), the last ones shorter or empty."""
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(start + size, length) - start


def gradient_is_partial(sharding: Sharding, sequence_parallel: bool) -> bool:
    """Return True if tp ranks with the same box of a parameter must add up their gradients.
    Otherwise each of these ranks already has the complete gradient.

    A key/value head held by several ranks gets the gradient of each rank's query heads. A router
    gets that of each rank's part of the experts. The norms of queries and keys act on each rank's
    own heads. A norm of the residual stream sees every token, unless the sequence is cut.
    """
    if sharding.tp_dim is not None:
        return True
    return sequence_parallel if sharding.per_token else True
