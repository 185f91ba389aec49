"""The tokens of a microbatch that a rank computes in each component of a block.

They are all of the rank's tokens, T, unless `layout.tp_by` cuts a component in d parts where tp has
n ranks. Then each of n / d sets of d ranks computes its own samples or tokens
(`apply.py`). With sequence parallelism a set gathers those alone, if they are
the tokens of its ranks. Otherwise all T are there, and a part of them is computed.

    a region of degree d sends     4 (d - 1) / n * T * D elements if a set gathers its own
                                   4 (n - 1) / n * T * D otherwise
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.config.run import RunConfig
from holdfast.layout import Replica, Topology, component_degree, set_share
from holdfast.options.protocols import Cost, Formatting, Table

_UNITS = {"attention": "sample", "ffn": "token"}


class OptionCost(Cost):
    def describe(
        self, config: RunConfig, topology: Topology, formatting: Formatting
    ) -> Iterable[str | Table]:
        """Return a table of the components, if tp does not cut all of them alike."""
        kinds = {each.kind: each for each in topology.replicas}.values()
        rows = [row for replica in kinds for row in _rows(config, replica, formatting)]
        if not rows:
            return
        yield rows, ("replica", "component", "parts", "tp", "each computes", "each sends")
        yield (
            "each sends: for a block and a microbatch, in elements; and the same without "
            "layout.tp_by"
        )
        if any(str(row[-2]).startswith("0 of") for row in rows):
            yield "what has 0 samples computes one for nothing: raise train.microbatch_size"


@dataclass(frozen=True)
class ComponentTokens:
    """One component of a block, on one rank."""

    name: str  # its key in `layout.tp_by`
    parts: int  # that tp makes of it
    sets: int  # of ranks that hold the same
    counted: int  # samples or tokens, of `shared`, that this one computes
    shared: int
    computed: int  # its tokens
    held: int  # tokens of its input that are kept
    is_own: bool  # it gathers its tokens alone

    def sent(self, tokens: int, dim: int) -> float:
        """Elements that a rank sends for one region, of a microbatch of so many tokens."""
        ranks = self.parts * self.sets
        return 4 * ((self.parts if self.is_own else ranks) - 1) / ranks * tokens * dim


def attention_tokens(config: RunConfig, replica: Replica, tp: int) -> ComponentTokens:
    """Sets share samples. tp: the rank's index."""
    return _tokens(config, replica, tp, "attention", by_sample=True)


def ffn_tokens(config: RunConfig, replica: Replica, tp: int) -> ComponentTokens:
    """Sets share tokens. tp: the rank's index."""
    return _tokens(config, replica, tp, "ffn", by_sample=False)


def components(config: RunConfig, replica: Replica, tp: int) -> Iterator[ComponentTokens]:
    """Those that are cut in fewer parts than tp has ranks. tp: the rank's index."""
    for find in (attention_tokens, ffn_tokens):
        if (found := find(config, replica, tp)).sets > 1:
            yield found


def _tokens(
    config: RunConfig, replica: Replica, index: int, name: str, *, by_sample: bool
) -> ComponentTokens:
    tp = replica.degree("tp")
    samples = config.train.microbatch_size // replica.degree("dp_shard")
    length = config.data.sequence_length // replica.degree("cp")
    tokens, shared = samples * length, samples if by_sample else samples * length
    parts = component_degree(config.layout.tp_by.degrees.get(name, 0), tp)
    sets = tp // parts
    share, counted = set_share(shared, sets, index // parts)
    computed = (share.stop - share.start) * (length if by_sample else 1)
    is_own = config.layout.sequence_parallel and sets > 1
    if by_sample:
        is_own = is_own and shared % sets == 0 and tokens % tp == 0
    elif is_own:
        computed = -(-tokens // tp) * parts
    held = computed if is_own else tokens
    return ComponentTokens(name, parts, sets, counted, shared, computed, held, is_own)


def _rows(config: RunConfig, replica: Replica, formatting: Formatting) -> Iterator[list[object]]:
    """One for each component and each share. Each set of ranks holds all of the component."""
    tokens = config.train.microbatch_size // replica.degree("dp_shard")
    tokens *= config.data.sequence_length // replica.degree("cp")
    tp, dim = replica.degree("tp"), config.model.dim
    ranks: dict[ComponentTokens, list[str]] = {}
    for first in range(tp):
        for each in components(config, replica, first):
            if first % each.parts == 0:
                last = first + each.parts - 1
                ranks.setdefault(each, []).append(f"{first}-{last}" if last > first else f"{first}")
    for each in sorted(ranks, key=lambda each: each.name):
        yield [
            replica.index,
            each.name,
            each.parts,
            ", ".join(ranks[each]),
            f"{each.counted} of {formatting.format_plural(each.shared, _UNITS[each.name])}",
            f"{each.sent(tokens, dim):,.0f} of {4 * (tp - 1) / tp * tokens * dim:,.0f}",
        ]
