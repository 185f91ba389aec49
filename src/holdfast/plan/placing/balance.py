"""Which blocks each stage of a pipeline has: `layout.balance`.

    time     the slowest stage is as fast as it can be. Recomputation of a stage counts. Measured
             costs may stand in for FLOPs (`layout.balance_costs`)
    memory   the worker that holds most at its fullest moment holds as little as it can

One stage a worker: dynamic programming over (stages, blocks given out), which finds the best split
whatever the blocks cost (`core/sharding/pipeline_stages.py`).

Several stages a worker: what counts is a worker's stages together. A block goes to the worker that
then costs least, until all are given out. That is the best split if all blocks are alike. Then
blocks change stages one by one, while the slowest workers and stages get faster. No worker may cost
more than the worst did. If a few first blocks have no experts, the result need not be the best.

The split is a function of the run file and of the mesh of one replica. It is the same in every
process and after a restore, and it does not change when a replica is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, permutations

from holdfast.config.run import RunConfig
from holdfast.core.sharding.pipeline_stages import (
    BlockCosts,
    StageCost,
    best_split,
    block_costs,
    check_number_of_stages,
    times_again,
)
from holdfast.core.sharding.run_table import count_blocks, run_block_costs
from holdfast.layout import MeshShape, Replica, Stages
from holdfast.plan.memory.stage_memory import PipelineMemory

Held = tuple[tuple[int, int], ...]
"""(stage, blocks) of each stage of a worker."""

WorkerCost = Callable[[int, Held], float]
"""(worker, blocks of its stages) -> what it costs."""


def planned_stages(config: RunConfig, mesh_shape: MeshShape) -> Stages:
    """Blocks of each stage of a replica; () where there is no pipeline, or a task was not asked
    yet.

    Raises LayoutError for more stages than blocks, or if `memory` has no formula for the run.
    """
    pp, layout = mesh_shape[0], config.layout
    if pp == 1 or (config.task.name and not config.task.parameters):
        return ()
    number, blocks = pp * layout.stages_a_worker, count_blocks(config)
    check_number_of_stages(blocks, number)
    time = stage_times(config, pp)
    by_memory = layout.balance == "memory"
    if layout.stages_a_worker > 1:
        workers = _Workers(tuple(_places(config, pp).stages_at(w) for w in range(pp)), blocks, time)
        return workers.share_out(_peaks(config, mesh_shape) if by_memory else workers.mean_time)
    if by_memory:
        return best_split(blocks, number, _stage_peaks(config, mesh_shape), time)
    costs = _costs(config)

    def parameters(stage: int, start: int, stop: int) -> float:
        return costs.cost(1, number, stage, start, stop)

    return best_split(blocks, number, time, parameters)


def _peaks(config: RunConfig, mesh_shape: MeshShape) -> WorkerCost:
    """Return the peak memory of a worker."""
    memory = PipelineMemory(config, mesh_shape)
    return cache(lambda worker, held: memory.peak(worker, dict(held)))


def _stage_peaks(config: RunConfig, mesh_shape: MeshShape) -> StageCost:
    """Return the peak memory of a stage that has its worker alone. It is infinite where it is
    above the worst of equal stages, and not computed there."""
    peaks, pp = _peaks(config, mesh_shape), mesh_shape[0]
    each, more = divmod(config.model.layers, pp)
    bound = max(peaks(stage, ((stage, each + (stage < more)),)) for stage in range(pp))
    too_many: dict[int, int] = {}

    def peak(stage: int, start: int, stop: int) -> float:
        held = stop - start
        if held >= too_many.get(stage, held + 1):
            return float("inf")
        found = peaks(stage, ((stage, held),))
        if found > bound:
            too_many[stage] = held
            return float("inf")
        return found

    return peak


def _places(config: RunConfig, pp: int) -> Replica:
    """A pipeline that says which worker has which stage."""
    layout = config.layout
    stages = (1,) * (pp * layout.stages_a_worker)
    return Replica(0, tuple(range(pp)), (pp, 1, 1, 1), stages, is_folded=layout.is_folded)


def stage_times(config: RunConfig, pp: int) -> StageCost:
    """Return the time of a stage of a pipeline over `pp` workers. It is in FLOPs per token,
    with what the stage runs again. The run file's own costs have that in them."""
    layout, length = config.layout, config.data.sequence_length
    costs, number = _costs(config), pp * layout.stages_a_worker
    if layout.balance_costs:
        return lambda stage, start, stop: costs.cost(0, number, stage, start, stop)
    workers = [config.recompute_policy(worker, pp, 1) for worker in range(pp)]
    again = {policy: (0.0,) * count_blocks(config) for policy in set(workers)}
    if config.has_decoder:
        again = {policy: times_again(config.model, length, policy) for policy in again}
    sums = {policy: list(accumulate(row, initial=0.0)) for policy, row in again.items()}
    places = _places(config, pp)
    of_stages = [sums[workers[places.pp_of(stage)]] for stage in range(number)]

    def time(stage: int, start: int, stop: int) -> float:
        more = of_stages[stage]
        return costs.cost(0, number, stage, start, stop) + more[stop] - more[start]

    return time


def times_of_stages(config: RunConfig, replica: Replica) -> tuple[float, ...]:
    """The time of each stage of a pipeline, in the unit of its costs."""
    time, stages = stage_times(config, replica.degree("pp")), replica.stages
    starts = list(accumulate(stages, initial=0))
    return tuple(time(stage, starts[stage], starts[stage + 1]) for stage in range(len(stages)))


def _costs(config: RunConfig) -> BlockCosts:
    """The costs of blocks and ends, with the run file's own times if it has some."""
    found = run_block_costs(config)
    if config.has_decoder:  # the base of adapters needs time and memory, too
        found = block_costs(config.model, config.data.sequence_length)
    if not (given := config.layout.balance_costs):
        return found
    first, *times, last = given
    ends = (first, found.first[1]), (last, found.last[1])
    return BlockCosts(tuple(times), found.parameters, *ends)


@dataclass(frozen=True)
class _Workers:
    """Workers with several stages each. stages_at: those of each worker."""

    stages_at: tuple[tuple[int, ...], ...]
    blocks: int
    time: StageCost

    def mean_time(self, worker: int, held: Held) -> float:
        """The time of a worker whose blocks are as long as the model's are on average."""
        assert all(stage in self.stages_at[worker] for stage, _ in held)
        ends = [self.time(stage, 0, 0) for stage, _ in held]
        whole = [self.time(stage, 0, self.blocks) for stage, _ in held]
        return sum(
            end + number * (all_blocks - end) / self.blocks
            for (_, number), end, all_blocks in zip(held, ends, whole, strict=True)
        )

    def share_out(self, cost: WorkerCost) -> Stages:
        """The split whose worst worker costs least, and whose workers are fast then."""
        # Give every stage a block, and each further block to the worker that then costs least.
        held: list[Held] = [tuple((stage, 1) for stage in own) for own in self.stages_at]
        grown = [_one_more(cost, worker, each) for worker, each in enumerate(held)]
        for _ in range(self.blocks - sum(map(len, held))):
            worker = min(range(len(held)), key=lambda w: grown[w][0])
            held[worker] = grown[worker][1]
            grown[worker] = _one_more(cost, worker, held[worker])
        start = tuple(number for _, number in sorted(pair for own in held for pair in own))
        most = self._worst(cost, start) * (1 + 1e-12)

        def merit(stages: Stages) -> tuple[float, ...]:
            """Times of workers, then of stages, the slowest first."""
            ends = list(accumulate(stages, initial=0))
            times = [self.time(s, ends[s], ends[s + 1]) for s in range(len(stages))]
            workers = [sum(times[stage] for stage in own) for own in self.stages_at]
            return (*sorted(workers, reverse=True), *sorted(times, reverse=True))

        found, best = start, merit(start)
        while True:
            allowed = (s for s in _moves(found) if self._worst(cost, s) <= most)
            merits = ((merit(stages), stages) for stages in allowed)
            better, stages = min(merits, default=(best, found))
            if better >= best:
                return found
            found, best = stages, better

    def _worst(self, cost: WorkerCost, stages: Stages) -> float:
        return max(
            cost(worker, tuple((stage, stages[stage]) for stage in own))
            for worker, own in enumerate(self.stages_at)
        )


def _one_more(cost: WorkerCost, worker: int, held: Held) -> tuple[float, Held]:
    """(cost, blocks of each stage) of a worker with one more block, at the stage where it adds
    least. Blocks then change stages as long as the cost falls."""
    numbers = [number for _, number in held]

    def of(numbers: Sequence[int]) -> tuple[float, Held]:
        own = tuple((stage, n) for (stage, _), n in zip(held, numbers, strict=True))
        return cost(worker, own), own

    places = range(len(numbers))
    best = min(of([n + (place == at) for place, n in enumerate(numbers)]) for at in places)
    while True:
        moved = min(map(of, _moves(tuple(n for _, n in best[1]))), default=best)
        if moved[0] >= best[0]:
            return best
        best = moved


def _moves(numbers: Stages) -> Iterator[Stages]:
    """The same numbers of blocks, with one block at another stage."""
    for a, b in permutations(range(len(numbers)), 2):
        if numbers[a] > 1:
            yield tuple(n - (s == a) + (s == b) for s, n in enumerate(numbers))
