"""Slow workers, and what slows a placement from the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast.events import WorkerPaced, WorkerReady
from holdfast.report.causes.finding import Evidence, Finding, Mode, evidence_of
from holdfast.report.causes.story import GenerationStory, make_finding

_MIN_SHARE = 0.5
"""Of a slowdown: a cause that explains this much of it is named."""
_INNER_AXES = {"tp": 3, "cp": 2}
"""Axes that exchange in every layer, and their places in a mesh's shape."""


def explain_slowness(story: GenerationStory) -> Iterator[Finding]:
    """Yield the workers that were found to be slow, each once, with what made them slow."""
    seen: set[tuple[str, int]] = set()
    for record, paced in story.of(WorkerPaced):
        place = (paced.node, paced.pid)
        if paced.pace not in ("slow", "out") or place in seen:
            continue
        seen.add(place)
        rank = story.pids.get(place)
        who = f"rank {rank} of {paced.node}" if rank is not None else f"a worker of {paced.node}"
        mode, why = _reason(paced)
        cause = f"{who} took {paced.slower:.2g} times as long as the rest: {why}."
        evidence = (evidence_of(record, paced.why),)
        yield make_finding(story, mode, cause, rank, record, evidence, node=paced.node)


def _reason(paced: WorkerPaced) -> tuple[Mode, str]:
    """Return what made a worker slow. Data comes first: on a busy node more work waits longer."""
    beyond = paced.slower - 1.0
    if beyond > 0 and paced.work_ratio - 1.0 >= _MIN_SHARE * beyond:
        return Mode.DATA_SKEW, f"its data is {paced.work_ratio:.2g} times as large"
    if paced.waited_share >= _MIN_SHARE:
        share = f"{100 * paced.waited_share:.0f} %"
        return Mode.CONTENTION, f"{share} of that it was ready, and other work had the processor"
    return Mode.STRAGGLER, "it has no more data, and nothing else had its processor"


def explain_topology(story: GenerationStory) -> Iterator[Finding]:
    """Yield what is wrong with the placement of the generation: replicas that exchange in every
    layer over several nodes, and ranks on unlike processors."""
    yield from _split_replicas(story)
    yield from _unlike_processors(story)


def _split_replicas(story: GenerationStory) -> Iterator[Finding]:
    topology = story.topology
    if story.start is None or topology is None:
        return
    places = Counter(story.nodes)
    for replica in topology.replicas:
        inner = {axis: replica.mesh_shape[at] for axis, at in _INNER_AXES.items()}
        size = max(inner.values(), default=1)
        nodes = Counter(story.node_of(rank) for rank in replica.ranks)
        if size < 2 or len(nodes) < 2 or max(places.values()) < size:
            continue
        axis = next(axis for axis, degree in inner.items() if degree == size)
        names = " and ".join(sorted(nodes))
        rank = next(r for r in replica.ranks if story.node_of(r) != story.node_of(replica.ranks[0]))
        cause = (
            f"replica {replica.index} has {axis} {size} over {names}, so each layer exchanges "
            "between nodes, though a node has places enough."
        )
        text = f"ranks {', '.join(map(str, replica.ranks))} on {names}"
        evidence = (evidence_of(story.start, text),)
        yield make_finding(story, Mode.WRONG_TOPOLOGY, cause, rank, story.start, evidence)


def _unlike_processors(story: GenerationStory) -> Iterator[Finding]:
    ready = story.of(WorkerReady)
    kinds = Counter(e.processor for _, e in ready if e.processor)
    if len(kinds) < 2:
        return
    usual = kinds.most_common(1)[0][0]
    for record, one in ready:
        if one.processor not in ("", usual):
            cause = f"rank {one.rank} computes on {one.processor}, and most ranks on {usual}."
            evidence: tuple[Evidence, ...] = (evidence_of(record, one.processor),)
            yield make_finding(story, Mode.WRONG_TOPOLOGY, cause, one.rank, record, evidence)
