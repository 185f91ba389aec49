"""The best layout of a small problem, by costing every layout; and small problems by chance.

Nothing here is shared with `plan/search/` but the limits and the evaluator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import gcd, inf, prod
from random import Random

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.cost.workload import Attention, Layer, Product, Workload
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import DeviceType, Efficiency
from holdfast.plan.hardware.link import Link
from holdfast.plan.search.search import Limits

Mesh = tuple[int, int, int, int]


def least_step(problem: Problem, limits: Limits) -> float:
    """Seconds of the fastest layout that fits; infinite if none does."""
    evaluator, best = Evaluator(problem), inf
    every = (replace(c, host=h) for c in every_choice(problem, limits) for h in limits.offloads)
    for choice in every:
        cost = evaluator.cost(choice)
        if cost.fits:
            best = min(best, cost.step_s)
    if limits.by_part:
        for choice in choices_by_part(problem, limits):
            cost = evaluator.cost(choice)
            if cost.fits:
                best = min(best, cost.step_s)
    return best


def choices_by_part(problem: Problem, limits: Limits) -> Iterator[Choice]:
    """All layouts with every pair of degrees of attention and feed-forward, of which one at least
    is lower than tp. Each set of ranks must hold the tokens that it computes."""
    most = max(pool.size for pool in problem.cluster.pools)
    sequence = problem.workload.sequence
    for pair in product(range(1, most + 1), repeat=2):
        cut = replace(problem, workload=problem.workload.with_part_tp(pair))
        for choice in every_choice(cut, limits):
            groups = choice.replicas
            if all(
                group.tp > min(pair)
                and group.tp % pair[0] == group.tp % pair[1] == 0
                and choice.microbatch // group.dp_shard % (group.tp // pair[0]) == 0
                and choice.microbatch // group.dp_shard * sequence // group.cp % group.tp == 0
                for group in groups
            ):
                yield replace(choice, part_tp=pair)


def every_choice(problem: Problem, limits: Limits) -> Iterator[Choice]:
    """All layouts: one kind of replica, or one kind for each of two pools."""
    pools = problem.cluster.pools
    for microbatch in _divisors(problem.workload.batch):
        if limits.microbatch not in (0, microbatch):
            continue
        for schedule, virtual in _schedules(limits):
            for zero in limits.zero:
                shared = microbatch, schedule, virtual, zero
                for pool in pools:
                    yield from _alone(problem, limits, shared, pool)
                if len(pools) > 1:
                    yield from _chained(problem, limits, shared)
                    yield from _together(problem, limits, shared)


Shared = tuple[int, str, int, int]


def _choice(shared: Shared, groups: tuple[ReplicaChoice, ...]) -> Choice:
    microbatch, schedule, virtual, zero = shared
    return Choice(groups, microbatch, schedule, virtual, zero)


def _schedules(limits: Limits) -> Iterator[tuple[str, int]]:
    for name in limits.schedules:
        own = SCHEDULE_KINDS[name].virtual
        if own:
            yield name, own
        elif name == "gpipe":
            yield name, 1
        else:
            yield from ((name, number) for number in (2, 3, 4))


def _alone(problem: Problem, limits: Limits, shared: Shared, pool: NodePool) -> Iterator[Choice]:
    total = problem.workload.batch // shared[0]
    for mesh in _meshes(problem, shared, pool.size, pool.devices):
        for count in range(1, min(total, pool.size // prod(mesh)) + 1):
            for group in _groups(problem, limits, shared, mesh, count, total, (pool.name,)):
                yield _choice(shared, group)


def _chained(problem: Problem, limits: Limits, shared: Shared) -> Iterator[Choice]:
    """Pipelines through both pools, in either order."""
    total = problem.workload.batch // shared[0]
    for one, other in (problem.cluster.pools, problem.cluster.pools[::-1]):
        for mesh in _meshes(problem, shared, one.size + other.size, 10**6):
            inner = prod(mesh[1:])
            if not _fills(mesh[3], one.devices) or not _fills(mesh[3], other.devices):
                continue
            for first in range(1, mesh[0]):
                most = min(one.size // inner // first, other.size // inner // (mesh[0] - first))
                pools = (one.name,) * first + (other.name,) * (mesh[0] - first)
                for count in range(1, min(most, total) + 1):
                    for group in _groups(problem, limits, shared, mesh, count, total, pools):
                        yield _choice(shared, group)


def _together(problem: Problem, limits: Limits, shared: Shared) -> Iterator[Choice]:
    one, other = problem.cluster.pools
    total = problem.workload.batch // shared[0]
    for given in range(1, total):
        found = []
        for pool, own in ((one, given), (other, total - given)):
            found.append(
                [
                    group
                    for mesh in _meshes(problem, shared, pool.size, pool.devices)
                    for count in range(1, min(own, pool.size // prod(mesh)) + 1)
                    for group in _groups(problem, limits, shared, mesh, count, own, (pool.name,))
                ]
            )
        for first, second in product(*found):
            yield _choice(shared, first + second)


def _meshes(problem: Problem, shared: Shared, size: int, node: int) -> Iterator[Mesh]:
    microbatch, schedule, virtual, zero = shared
    is_split = SCHEDULE_KINDS[schedule].splits_backward or virtual > 1
    for mesh in product(range(1, size + 1), repeat=4):
        pp, dp_shard, cp, tp = mesh
        if prod(mesh) > size or microbatch % dp_shard:
            continue
        if pp > 1 and pp * virtual > len(problem.workload.blocks):
            continue
        if cp > 1 and problem.workload.sequence % (2 * cp):
            continue
        if not _fills(tp, node) or not all(_cuts(each, tp) for each in problem.workload.blocks):
            continue
        if pp > 1 and is_split and dp_shard > 1 and zero > 1:
            continue
        yield mesh


def _fills(tp: int, node: int) -> bool:
    return node % tp == 0 or tp % node == 0 or node == 10**6


def _cuts(layer: Layer, tp: int) -> bool:
    assert layer.attention is not None
    attention, feed = (gcd(degree, tp) for degree in layer.part_tp or (tp, tp))
    sizes = [p.inputs if p.cut == "rows" else p.outputs for p in layer.products if p.cut]
    first, second = sizes[: layer.mixer], sizes[layer.mixer :]
    return (
        layer.attention.heads % attention == 0
        and all(size % attention == 0 for size in first)
        and all(size % feed == 0 for size in second)
    )


def _groups(
    problem: Problem,
    limits: Limits,
    shared: Shared,
    mesh: Mesh,
    count: int,
    microbatches: int,
    pools: tuple[str, ...],
) -> Iterator[tuple[ReplicaChoice, ...]]:
    """`count` replicas with so many microbatches in all, split and recomputed in every way."""
    each, more = divmod(microbatches, count)
    pp, (_, schedule, virtual, _) = mesh[0], shared
    if each < SCHEDULE_KINDS[schedule].least_microbatches(pp):
        return
    splits = _splits(len(problem.workload.blocks), pp * virtual) if pp > 1 else [()]
    for stages in splits:
        for words in product(limits.recompute, repeat=pp):
            yield tuple(
                ReplicaChoice(number, *mesh, stages, pools, own, words)
                for number, own in ((more, each + 1), (count - more, each))
                if number
            )


def _splits(blocks: int, stages: int) -> list[tuple[int, ...]]:
    edges = [(0, *cuts, blocks) for cuts in combinations(range(1, blocks), stages - 1)]
    return [tuple(b - a for a, b in pairwise(each)) for each in edges]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def small_problem(seed: int) -> tuple[Problem, Limits]:
    """A model of a few unlike blocks on one pool, or on two pools of unlike devices. Memory is such
    that some layouts fit."""
    chance = Random(seed)
    is_mixed = chance.random() < 0.4
    workload = _workload(chance, chance.choice((2, 3) if is_mixed else (2, 3, 4, 5)), is_mixed)
    devices = {name: _device(chance, name, workload) for name in ("one", "other")}
    pools = [_pool(chance, "one", (1, 2, 3) if is_mixed else (1, 2, 3, 4, 6, 8))]
    if is_mixed:
        pools.append(_pool(chance, "other", (1, 2)))
    schedules = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev")
    limits = Limits(
        microbatch=chance.choice((0, 1, 2)) if not is_mixed else chance.choice((1, 2)),
        zero=tuple(sorted(chance.sample((1, 2, 3), 2))),
        schedules=tuple(chance.sample(schedules, 2)),
        recompute=chance.choice((("none", "full"), ("none", "selective", "full"))),
    )
    return Problem(workload, Cluster(tuple(pools)), devices), limits


def _workload(chance: Random, blocks: int, is_mixed: bool) -> Workload:
    width = chance.choice((256, 512))
    kinds = [_block(chance, width) for _ in range(2)]
    ends = (
        Layer("embedding", width, table_parameters=1000 * width, whole_moved=2.0 * width),
        Layer("head", width, (Product(width, 1000, "columns"),), whole_kept=2.0 * width),
    )
    body = tuple(chance.choice(kinds) for _ in range(blocks))
    batch = chance.choice((4, 6) if is_mixed else (4, 6, 8, 12))
    return Workload("small", (ends[0], *body, ends[1]), 128, batch, vocabulary=1000)


def _block(chance: Random, width: int) -> Layer:
    inner = width * chance.choice((2, 4, 6))
    products = (
        Product(width, 3 * width, "columns"),
        Product(width, width, "rows"),
        Product(width, inner, "columns"),
        Product(inner, width, "rows"),
    )
    return Layer(
        "block",
        width,
        products,
        Attention(4, 4, width // 4),
        whole_parameters=2 * width,
        whole_moved=10.0 * width,
        cut_moved=4.0 * width + 3 * inner,
        kernels=chance.choice((4, 12)),
        reductions=2,
        whole_kept=4.0 * width,
        cut_kept=4.0 * width + 2 * inner,
        mixer=2,
    )


def _device(chance: Random, name: str, workload: Workload) -> DeviceType:
    state = 18 * sum(layer.parameters for layer in workload.layers)
    efficiency = Efficiency(0.7, 0.8, chance.choice((1e-6, 2e-5)), 2e-6)
    return DeviceType(
        name,
        {"bf16": 1e12 * chance.choice((1, 2, 5))},
        state * chance.choice((0.3, 0.6, 1.2, 4)),
        1e11 * chance.choice((1, 3)),
        1e10,
        300,
        50,
        {"bf16": efficiency},
    )


def _pool(chance: Random, name: str, sizes: tuple[int, ...]) -> NodePool:
    size = chance.choice(sizes)
    node = chance.choice([n for n in (1, 2, 4) if size % n == 0])
    inside = Link(1e-6, 1e9 * chance.choice((1, 10)))
    outside = Link(1e-5, 1e8 * chance.choice((1, 10)))
    return NodePool(name, size // node, node, name, inside, outside, zone=chance.choice(("", name)))
