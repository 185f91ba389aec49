"""What is left of a run's nodes after each likely loss: of a node, a rack, a zone, half of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.plan.placing.interface import NodePlaces

_DOMAINS = ("rack", "power", "zone")


def kinds_of(nodes: Sequence[NodePlaces]) -> tuple[tuple[int, float], ...]:
    """Places and speed of each node, in order: nodes with the same ones are alike."""
    return tuple(sorted((node.places, round(node.speed, 2)) for node in nodes))


def nodes_left(nodes: Sequence[NodePlaces], is_spot: bool) -> Iterator[list[NodePlaces]]:
    """Yield the nodes left after each likely loss. Of losses that leave like nodes, the first."""
    seen = {kinds_of(nodes), ()}
    for lost in _losses(nodes, is_spot):
        left = [node for node in nodes if node.name not in lost]
        if kinds_of(left) not in seen:
            seen.add(kinds_of(left))
            yield left


def _losses(nodes: Sequence[NodePlaces], is_spot: bool) -> Iterator[set[str]]:
    yield from ({node.name} for node in nodes)
    for kind in _DOMAINS:
        found: dict[str, set[str]] = {}
        for node in nodes:
            if node.machine is not None and (name := node.machine.domain(kind)):
                found.setdefault(name, set()).add(node.name)
        yield from found.values()
    if is_spot:
        yield {node.name for node in nodes[: -(-len(nodes) // 2)]}
