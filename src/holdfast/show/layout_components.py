"""The table of `holdfast layout show` for components that `layout.tp_by` cuts in fewer parts."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.config.run import RunConfig
from holdfast.layout import Replica, Topology
from holdfast.plan.memory.component_tokens import ComponentTokens, components
from holdfast.report.formatting import format_plural
from holdfast.show.output import print_table

_UNITS = {"attention": "sample", "ffn": "token"}


def print_components(config: RunConfig, topology: Topology) -> None:
    """Print nothing if tp cuts all components alike."""
    kinds = {each.kind: each for each in topology.replicas}.values()
    rows = [row for replica in kinds for row in _rows(config, replica)]
    if not rows:
        return
    print_table(rows, ("replica", "component", "parts", "tp", "each computes", "each sends"))
    print(
        "each sends: for a block and a microbatch, in elements; and the same without layout.tp_by"
    )
    if any(str(row[-2]).startswith("0 of") for row in rows):
        print("what has 0 samples computes one for nothing: raise train.microbatch_size")


def _rows(config: RunConfig, replica: Replica) -> Iterator[list[object]]:
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
            f"{each.counted} of {format_plural(each.shared, _UNITS[each.name])}",
            f"{each.sent(tokens, dim):,.0f} of {4 * (tp - 1) / tp * tokens * dim:,.0f}",
        ]
