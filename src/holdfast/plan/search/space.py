"""The degrees that a replica may have on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.layout import component_degree
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.cost.workload import Layer, Workload
from holdfast.plan.search.limits import Limits

MOST_VIRTUAL = 4
"""Stages of one rank that a search tries."""
FEW_REPLICAS = 8
"""Replicas up to which every number is tried."""
SHORT_MODEL = 16
"""Blocks up to which every length of a pipeline is tried."""


@dataclass(frozen=True)
class Site:
    """Pools that share a kind of replica: one pool, or several that a pipeline goes through."""

    pools: tuple[str, ...]
    sizes: tuple[int, ...]  # devices of each
    node: int


@dataclass(frozen=True)
class Cut:
    """How a sample and a block are cut on a site."""

    site: Site
    cp: int
    tp: int
    ep: int
    local: int  # samples that a rank computes at once


@dataclass(frozen=True)
class Shape:
    """The degrees of one replica on a site."""

    cut: Cut
    dp_shard: int
    slots: tuple[int, ...]  # indices on pp in each pool of the site
    most: int  # replicas that the site has devices for

    @property
    def site(self) -> Site:
        return self.cut.site

    @property
    def pp(self) -> int:
        return sum(self.slots) if len(self.slots) > 1 else self.slots[0]

    @property
    def cp(self) -> int:
        return self.cut.cp

    @property
    def tp(self) -> int:
        return self.cut.tp

    @property
    def ep(self) -> int:
        return self.cut.ep

    @property
    def is_sharded(self) -> bool:
        return self.dp_shard > 1

    @property
    def microbatch(self) -> int:
        return self.cut.local * self.dp_shard

    @property
    def mesh(self) -> tuple[int, int, int, int]:
        return self.pp, self.dp_shard, self.cut.cp, self.cut.tp

    @property
    def size(self) -> int:
        return prod(self.mesh)

    @cached_property
    def pools(self) -> tuple[str, ...]:
        """The pool of each index on pp; one name stands for all."""
        if len(self.site.pools) == 1:
            return self.site.pools
        pairs = zip(self.site.pools, self.slots, strict=True)
        return tuple(name for name, number in pairs for _ in range(number))

    def in_pool(self, pool: str) -> Shape:
        """The same in a pool that is like its own."""
        return replace(self, cut=replace(self.cut, site=replace(self.site, pools=(pool,))))

    def words(self, recompute: Sequence[str]) -> list[str]:
        """Words of `train.recompute`, of these, that a run file may have."""
        return [word for word in recompute if self.ep == 1 or word != "selective"]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def cuts(problem: Problem, limits: Limits, site: Site) -> Iterator[Cut]:
    """Every way to cut samples and blocks that this model and these devices allow."""
    workload, largest = problem.workload, min(site.sizes)
    locals_ = divisors(limits.microbatch or workload.batch)
    for tp in _allowed(limits.tp, tensor_degrees(workload, site.node, largest)):
        for cp in _allowed(limits.cp, context_degrees(workload, largest // tp)):
            for ep in _allowed(limits.ep, expert_degrees(workload, largest // tp)):
                for local in locals_:
                    yield Cut(site, cp, tp, ep, local)


def slots_of(problem: Problem, limits: Limits, cut: Cut) -> Iterator[tuple[int, ...]]:
    """Lengths of a pipeline of such ranks, by the part of it in each pool."""
    blocks, inner = len(problem.workload.blocks), cut.tp * cut.cp
    if len(cut.site.pools) == 1:
        for pp in _allowed(limits.pp, pipeline_degrees(blocks, cut.site.sizes[0] // inner)):
            yield (pp,)
        return
    one, other = (size // inner for size in cut.site.sizes)
    for first in range(1, min(blocks - 1, one) + 1):
        for second in range(1, min(blocks - first, other) + 1):
            if limits.pp in (0, first + second):
                yield first, second


def shapes(problem: Problem, limits: Limits, cut: Cut, slots: tuple[int, ...]) -> Iterator[Shape]:
    """Replicas with every dp_shard, the largest first."""
    batch, inner = problem.workload.batch, cut.tp * cut.cp
    wide = min(s // inner // n for s, n in zip(cut.site.sizes, slots, strict=True))
    for dp_shard in range(min(wide, (limits.microbatch or batch) // cut.local), 0, -1):
        microbatch = dp_shard * cut.local
        if batch % microbatch or limits.microbatch not in (0, microbatch):
            continue
        if limits.dp_shard not in (0, dp_shard) or dp_shard * cut.cp % cut.ep:
            continue
        most = min(s // (inner * dp_shard * n) for s, n in zip(cut.site.sizes, slots, strict=True))
        yield Shape(cut, dp_shard, slots, most)


def replica_numbers(problem: Problem, limits: Limits, shape: Shape) -> list[int]:
    """The most replicas, and the fewest that have no more than so many microbatches each. Of few
    replicas every number."""
    total = problem.workload.batch // shape.microbatch
    most = min(shape.most, total)
    if limits.replicas:
        return [limits.replicas] if limits.replicas <= most else []
    if most <= FEW_REPLICAS:
        return list(range(most, 0, -1))
    shares = {-(-total // number) for number in range(1, most + 1)}
    return sorted({most, *(-(-total // each) for each in shares)}, reverse=True)


def _allowed(fixed: int, degrees: Iterable[int]) -> list[int]:
    return [n for n in degrees if fixed in (0, n)]


@lru_cache(maxsize=4096)
def pipeline_degrees(blocks: int, most: int) -> tuple[int, ...]:
    """Lengths of a pipeline over at most `most` places. Of a long model, those that leave no place
    empty, and the shortest ones whose stages have at most so many blocks."""
    every = range(1, min(blocks, most) + 1)
    if blocks <= SHORT_MODEL:
        return tuple(every)
    return tuple(
        pp for pp in every if most % pp == 0 or -(-blocks // pp) < -(-blocks // (pp - 1 or 0.5))
    )


def tensor_degrees(workload: Workload, node: int, most: int) -> list[int]:
    """Degrees of tp that cut each product and no head, and fill nodes or parts of nodes."""
    kinds = [layer for layer in workload.kinds if layer.kind == "block"]
    return [
        tp
        for tp in range(1, most + 1)
        if (node % tp == 0 or tp % node == 0) and all(_cuts(layer, tp) for layer in kinds)
    ]


def _cuts(layer: Layer, tp: int) -> bool:
    products = layer.products + (layer.experts.products if layer.experts else ())
    for number, each in enumerate(products):
        cut = {"rows": each.inputs, "columns": each.outputs, "": 0}[each.cut]
        if cut % layer.degree(layer.part(number), tp):
            return False
    kind, tp = layer.attention, layer.degree(0, tp)
    if kind is None:
        return True
    return kind.heads % tp == 0 and (kind.kv_heads % tp == 0 or tp % kind.kv_heads == 0)


def part_degrees(problem: Problem, limits: Limits) -> Iterator[tuple[int, tuple[int, int]]]:
    """Degrees of tp with lower ones for attention or the feed-forward. Only for blocks that have
    both, without experts."""
    blocks = problem.workload.blocks
    if not limits.by_part or not limits.sequence_parallel:
        return
    if any(block.attention is None or block.experts for block in blocks):
        return
    for tp in _allowed(limits.tp, range(2, max(p.size for p in problem.cluster.pools) + 1)):
        for attention, feed in product(divisors(tp), repeat=2):
            if min(attention, feed) < tp:
                yield tp, (attention, feed)


def computes_own(choice: Choice, workload: Workload) -> bool:
    """Return True if the ranks that share a part hold just the tokens that they compute. Otherwise
    lower degrees of parts save nothing."""
    for group in choice.replicas:
        samples, tokens = choice.microbatch // group.dp_shard, workload.sequence // group.cp
        sets = group.tp // component_degree(workload.part_tp[0], group.tp)
        if samples % sets or samples * tokens % group.tp:
            return False
    return True


def context_degrees(workload: Workload, most: int) -> list[int]:
    """Degrees of cp that cut a sample into two equal chunks a rank."""
    return [n for n in range(1, most + 1) if n == 1 or workload.sequence % (2 * n) == 0]


def expert_degrees(workload: Workload, ranks: int) -> list[int]:
    counts = {layer.experts.count for layer in workload.blocks if layer.experts}
    if not counts:
        return [1]
    return [n for n in divisors(ranks) if all(count % n == 0 for count in counts)]


def virtual_stages(schedule: str, limits: Limits, blocks: int, pp: int) -> list[int]:
    """Stages of each rank under a schedule."""
    kind = SCHEDULE_KINDS[schedule]
    if pp == 1:
        return [1]
    if kind.virtual:
        return [kind.virtual] if kind.virtual * pp <= blocks else []
    if schedule == "gpipe":
        return [1]
    if limits.virtual:
        return [limits.virtual] if limits.virtual * pp <= blocks else []
    return list(range(2, min(MOST_VIRTUAL, blocks // pp) + 1))
