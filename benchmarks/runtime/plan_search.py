"""The search for a layout: against every layout, by the clock, and against other ways to search.

python -m benchmarks.runtime.plan_search exact [N]
    N small problems (500), from a seed (exact 9 491).
python -m benchmarks.runtime.plan_search times
    seconds of one core, and of a loop of plain Python.
python -m benchmarks.runtime.plan_search cache
    the same from the plan cache, and from like plans.
python -m benchmarks.runtime.plan_search baselines
    20 large problems at equal time (pip install deap).
python -m benchmarks.runtime.plan_search wide
    175 B on 1,024 devices; tp inside and across nodes.
python -m benchmarks.runtime.plan_search replan
    a node goes: with the next plans and without.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, log, prod, sqrt
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

from tests.support.plan_brute_force import least_step, small_problem

from benchmarks.runtime.children import ROOT
from holdfast.config.loading.load import load_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.errors import LayoutError
from holdfast.plan.auto.choices import given_choice
from holdfast.plan.auto.plan_cache import PlanCache, Rules
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.cost.workload import Workload
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.cluster_file import read_cluster
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.hardware.distance import hundredfold_gbit_s
from holdfast.plan.hardware.link import Link
from holdfast.plan.placing.interface import NodePlaces, PresentPlacement
from holdfast.plan.placing.searched import SearchedPlanner
from holdfast.plan.placing.topology_cost import Fleet
from holdfast.plan.search.limits import Limits, SearchResult, step_seconds
from holdfast.plan.search.search import search
from holdfast.plan.search.space import divisors, tensor_degrees
from holdfast.plan.search.splits import even_split

NVLINK, PCIE_NODE = Link(10e-6, 195e9), Link(20e-6, 3.1e9)
INFINIBAND = Link(20e-6, 22.5e9)
WORDS = ("none", "selective", "full")
LEAST_SECONDS = 0.3
"""Of a baseline: a search of less is not compared."""


def workload(layers: int, dim: int, heads: int, vocab: int, batch: int) -> Workload:
    model = {
        "layers": layers,
        "dim": dim,
        "heads": heads,
        "kv_heads": heads,
        "vocab_size": vocab,
        "ffn_dim": round(8 * dim / 3 / 256) * 256,  # three matrices, as large as two of 4 x dim
    }
    train = {"batch_size": batch, "precision": "bf16"}
    values = {"model": model, "data": {"sequence_length": 2048}, "train": train}
    return workload_of(RunConfig.model_validate(values))


MODELS = {
    "350M": workload(24, 1024, 16, 50_272, 1024),
    "2.7B": workload(32, 2560, 32, 128_256, 2048),
    "175B": workload(96, 12_288, 96, 51_200, 1536),
    "1T": workload(128, 25_600, 160, 51_200, 3072),
}


def pool(name: str, devices: int, device: str, zone: str = "z") -> NodePool:
    """As in the published traces: nodes of four."""
    return NodePool(name, devices // 4, 4, device, NVLINK, PCIE_NODE, zone=zone)


def large(nodes: int) -> tuple[NodePool, ...]:
    return (NodePool("a", nodes, 8, "A100-80", NVLINK, INFINIBAND),)


TIMED = (
    ("128 equal", "350M", (pool("a", 128, "A100-40"),), 0.3),
    ("128 equal", "2.7B", (pool("a", 128, "A100-40"),), 0.3),
    ("5 zones of 128", "350M", tuple(pool(f"p{n}", 128, "A100-40", f"z{n}") for n in range(5)), 2),
    ("5 zones of 128", "2.7B", tuple(pool(f"p{n}", 128, "A100-40", f"z{n}") for n in range(5)), 2),
    ("128 and 384", "350M", (pool("a", 128, "A100-40"), pool("v", 384, "V100-16")), 10),
    ("128 and 384", "2.7B", (pool("a", 128, "A100-40"), pool("v", 384, "V100-16")), 10),
    ("1,024 equal", "175B", large(128), 2),
    ("16,384 equal", "1T", large(2048), 10),
)


def loop_seconds() -> float:
    """Of a loop of plain Python, by which machines compare."""
    begin, total = process_time(), 0
    for number in range(3_000_000):
        total += number % 7
    return process_time() - begin


def exact(number: int, begin: int = 0) -> bool:
    """begin: the first seed."""
    wrong, fitting = [], 0
    for seed in range(begin, begin + number):
        problem, limits = small_problem(seed)
        try:
            found = search(problem, limits).best.score
        except LayoutError:
            found = inf
        least = least_step(problem, limits)
        fitting += least < inf
        if found != least and abs(found - least) > 1e-9 * least:
            wrong.append(seed)
    print(f"{number} problems, {fitting} with a layout that fits, {len(wrong)} not equal {wrong}")
    return not wrong


def times() -> bool:
    print(f"a loop of plain Python: {loop_seconds():.3f} s")
    devices = load_devices()
    for name, model, pools, goal in TIMED:
        begin = process_time()
        found = search(Problem(MODELS[model], Cluster(pools), devices))
        seconds = process_time() - begin
        print(
            f"{name:16} {model:5} {seconds:6.2f} s (goal {goal} s)  step {found.best.score:.3f} s  "
            f"gap {found.gap:.1%}  executed {found.tried}  bounds {found.bounded}"
        )
    return True


def cache() -> bool:
    """Seconds of a search, of the same one from the cache, and of one that begins with a plan. That
    plan is for a cluster with a node less in each pool. Return True if the answers are the same."""
    print(f"a loop of plain Python: {loop_seconds():.3f} s")
    devices, same = load_devices(), True
    rules = Rules(step_seconds, lambda choice: True, "time")
    for name, model, pools, _ in TIMED:
        problem = Problem(MODELS[model], Cluster(pools), devices)
        fewer = Cluster(tuple(replace(pool, nodes=pool.nodes - 1) for pool in pools))
        found, seconds = list[SearchResult](), list[float]()
        with TemporaryDirectory() as one, TemporaryDirectory() as other:
            PlanCache(Path(other)).search(replace(problem, cluster=fewer), Limits(), rules)
            for folder in (one, one, other):
                begin = process_time()
                found.append(PlanCache(Path(folder)).search(problem, Limits(), rules))
                seconds.append(process_time() - begin)
        cold, again, warm = found
        same = same and again.best == cold.best and warm.best.score <= cold.best.score
        print(
            f"{name:16} {model:5} {cold.source} {seconds[0]:.2f} s, {again.source} "
            f"{seconds[1]:.3f} s, {warm.source} {seconds[2]:.2f} s; step {cold.best.score:.4f} s, "
            f"{again.best.score:.4f} s, {warm.best.score:.4f} s",
            flush=True,
        )
    print(f"the cache's answers are {'the same, others no worse' if same else 'NOT THE SAME'}")
    return same


@dataclass
class Genes:
    """A layout as numbers between 0 and 1, one for each choice."""

    problem: Problem
    evaluator: Evaluator
    count: int = 9

    def choice(self, genes: list[float]) -> Choice | None:
        one, work = self.problem.cluster.pools[0], self.problem.workload
        blocks = len(work.blocks)
        tp = _pick([n for n in tensor_degrees(work, one.devices, one.size) if n <= 64], genes[0])
        cp = _pick([1, 2, 4, 8], genes[1])
        pp = _pick(list(range(1, min(blocks, one.size // tp) + 1)), genes[2])
        local = _pick(divisors(work.batch), genes[3])
        wide = one.size // (tp * cp * pp)
        shards = [n for n in range(1, wide + 1) if work.batch % (n * local) == 0]
        if not shards:
            return None
        dp_shard = _pick(shards, genes[4])
        schedule = _pick(["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev"], genes[5])
        kind = SCHEDULE_KINDS[schedule]
        virtual = kind.virtual or (_pick([2, 3, 4], genes[6]) if schedule != "gpipe" else 1)
        zero, word = _pick([1, 2, 3], genes[7]), _pick(list(WORDS), genes[8])
        microbatch = local * dp_shard
        total, most = work.batch // microbatch, wide // dp_shard
        number = max((n for n in range(1, min(most, total) + 1) if total % n == 0), default=0)
        is_split = kind.splits_backward or virtual > 1
        if not number or (pp > 1 and pp * virtual > blocks):
            return None
        if total // number < kind.least_microbatches(pp):
            return None
        if pp > 1 and is_split and zero > 1 and dp_shard > 1:
            return None
        stages = even_split(blocks, pp * virtual) if pp > 1 else ()
        group = ReplicaChoice(
            number, pp, dp_shard, cp, tp, stages, (one.name,), total // number, (word,)
        )
        return Choice((group,), microbatch, schedule, virtual if pp > 1 else 1, zero)

    def score(self, genes: list[float]) -> float:
        choice = self.choice(genes)
        if choice is None or prod(choice.replicas[0].mesh_shape) > self.problem.cluster.size:
            return inf
        cost = self.evaluator.least(choice)
        return self.evaluator.cost(choice).step_s if cost.fits else inf


def _pick(options: list[Any], gene: float) -> Any:
    return options[min(len(options) - 1, int(gene * len(options)))]


def evolve(genes: Genes, seconds: float, seed: int) -> float:
    """DEAP's evolution with its own operators: two-point crossover, mutation, tournaments."""
    from deap import tools

    chance, best, end = Random(seed), inf, process_time() + seconds
    import random

    random.seed(seed)

    def scored(one: list[float]) -> tuple[float, list[float]]:
        return genes.score(one), one

    crowd = [scored([chance.random() for _ in range(genes.count)]) for _ in range(60)]
    while process_time() < end:
        children = []
        for _ in range(30):
            parents = [list(min(chance.sample(crowd, 3))[1]) for _ in range(2)]
            tools.cxTwoPoint(*parents)
            for child in parents:
                tools.mutGaussian(child, 0, 0.2, 0.3)
                children.append(scored([min(0.999, max(0.0, gene)) for gene in child]))
                if process_time() > end:
                    break
        crowd = sorted(crowd + children)[:60]
        best = min(best, crowd[0][0])
    return min(best, crowd[0][0])


def bandit(genes: Genes, seconds: float, seed: int) -> float:
    """Each choice is a bandit with eight arms (UCB1, Auer et al. 2002); the reward is speed."""
    chance, best, end = Random(seed), inf, process_time() + seconds
    tries = [[0] * 8 for _ in range(genes.count)]
    sums = [[0.0] * 8 for _ in range(genes.count)]
    rounds = 0
    while process_time() < end:
        rounds += 1
        arms = []
        for place in range(genes.count):
            worth = [
                inf if not n else total / n + 0.5 * sqrt(log(rounds) / n)
                for n, total in zip(tries[place], sums[place], strict=True)
            ]
            most = max(worth)
            arms.append(chance.choice([arm for arm in range(8) if worth[arm] == most]))
        score = genes.score([(arm + chance.random()) / 8 for arm in arms])
        best = min(best, score)
        for place, arm in enumerate(arms):
            tries[place][arm] += 1
            sums[place][arm] += best / score if score < inf else 0.0
    return best


def baselines() -> bool:
    devices, ahead, better = load_devices(), 0, 0
    for number in range(20):
        chance = Random(number)
        model = MODELS[chance.choice(["350M", "2.7B", "175B"])]
        batch = chance.choice((256, 512, 1024, 1536))
        work = replace(model, batch=batch)
        nodes = chance.choice((16, 32, 64)) * (4 if len(model.blocks) > 90 else 1)
        device = chance.choice(("A100-80", "H100-80"))
        problem = Problem(
            work, Cluster((NodePool("a", nodes, 8, device, NVLINK, INFINIBAND),)), devices
        )
        begin = process_time()
        found = search(problem).best.score
        seconds = max(LEAST_SECONDS, process_time() - begin)
        rest: list[Callable[[Genes, float, int], float]] = [evolve, bandit]
        scores = [run(Genes(problem, Evaluator(problem)), seconds, number) for run in rest]
        is_ahead = found <= min(scores) * (1 + 1e-9)
        ahead, better = ahead + is_ahead, better + (found < min(scores) * (1 - 1e-9))
        print(
            f"{len(work.blocks)} blocks, batch {batch}, {nodes * 8} {device}: {seconds:.2f} s; "
            f"search {found:.3f} s, evolution {scores[0]:.3f} s, bandit {scores[1]:.3f} s",
            flush=True,
        )
    print(f"the search is ahead in {ahead} of 20, strictly better in {better}")
    return ahead == 20


def wide() -> bool:
    """The layout of `examples/175b` and the best found, and tp = 8 inside a node and over eight
    nodes."""
    config = load_config(ROOT / "examples/175b/run.yaml").config
    cluster = read_cluster("128x8xA100-80")
    problem = Problem(workload_of(config), cluster, load_devices())
    known, found = given_choice(config, cluster.pools[0].name), search(problem)
    [group] = known.replicas
    for name, choice in (("TP 8, PP 16, DP 8", known), ("the search", found.best.choice)):
        cost = Evaluator(problem).cost(choice)
        parts = ", ".join(f"{part} {s:.2f}" for part, s in cost.parts.items() if s >= 0.005)
        one = choice.replicas[0]
        print(
            f"{name}: {one.dp_replicate} x {one.mesh_shape}, {choice.schedule}, microbatch "
            f"{choice.microbatch}, zero {choice.zero}, recompute {one.recompute[0]}: "
            f"{cost.step_s:.2f} s, fits {cost.fits}, {cost.peak_bytes / 1e9:.1f} GB; {parts}"
        )
        fullest = max(cost.groups[0].memory, key=lambda stage: stage.peak)
        print(f"  fullest rank: {fullest}")
    print("Gbit/s of a node | a block's tp collectives, over nodes against inside | complete pass")
    size = 4096 * 12_288 * 2
    limit = hundredfold_gbit_s(NVLINK, Link(20e-6, 1.0), size, 8, 8)
    print(f"a ring of 8 with {size} bytes is a hundred times dearer up to {limit:.0f} Gbit/s")
    for gbit in (10, 25, 100, 400):
        sent, passes = [], []
        for node in (8, 1):
            outside = Link(20e-6, gbit / 8 * 1e9 / 8)  # eight devices of a node send at once
            pool = NodePool(cluster.pools[0].name, 1024 // node, node, "A100-80", NVLINK, outside)
            evaluator = Evaluator(replace(problem, cluster=Cluster((pool,))))
            times = evaluator.layer_times(known, group, 0, 1, "none")
            sent.append((times.communication or {}).get("tp", 0.0))
            passes.append(times.forward + times.backward)
        print(f"{gbit:4} | {sent[1] / sent[0]:6.1f} | {passes[1] / passes[0]:6.1f}")
    return True


_GPT_125M = {"layers": 12, "dim": 768, "heads": 12, "kv_heads": 12, "vocab_size": 50_304}
REPLANNED = (
    ("120 workers", 60, 2, _GPT_125M, 480, "A100-80"),
    (
        "128 workers",
        16,
        8,
        {"layers": 96, "dim": 12_288, "heads": 96, "kv_heads": 96, "vocab_size": 51_200},
        1536,
        "H200",
    ),
)
"""Name, nodes, places of each, model, batch, device."""


def replan() -> bool:
    """A node goes: wall seconds of the next plan, prepared and without them."""
    print(f"a loop of plain Python: {loop_seconds():.3f} s")
    slowest = 0.0
    for name, number, places, model, batch, device in REPLANNED:
        config = RunConfig.model_validate(
            {
                "model": model,
                "data": {"sequence_length": 2048},
                "train": {"batch_size": batch, "microbatch_size": 4, "precision": "bf16"},
                "layout": {"workers": 0},
            }
        )
        nodes = [NodePlaces(f"node{index:02}", places) for index in range(number)]
        one = NodePool("a", 1, places, device, NVLINK, INFINIBAND)
        for lost in (0, number // 2, number - 1):
            planner = SearchedPlanner(Fleet(load_devices(), one), limit_s=inf)
            before = planner(config, nodes, 1).topology
            left, present = nodes[:lost] + nodes[lost + 1 :], PresentPlacement(before)
            begin = perf_counter()
            searched = planner(config, left, 2, present)
            middle = perf_counter()
            ready = SearchedPlanner(Fleet(load_devices(), one), limit_s=inf)
            ready.prepare(config, nodes, before)
            prepared = perf_counter()
            found = ready(config, left, 2, present)
            seconds = perf_counter() - prepared
            slowest = max(slowest, seconds)
            print(
                f"{name}, node {lost} goes: {seconds:.3f} s (goal 0.1 s), without them "
                f"{middle - begin:.2f} s, all next plans {prepared - middle:.2f} s; step "
                f"{found.step_s:.3f} s, searched {searched.step_s:.3f} s; "
                f"{found.topology.world_size} of {number * places - places} workers",
                flush=True,
            )
    return slowest < 0.1


def main(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "times"
    if name == "exact":
        return not exact(*(map(int, arguments[1:]) if len(arguments) > 1 else (500,)))
    parts = {"times": times, "cache": cache, "baselines": baselines, "wide": wide, "replan": replan}
    return not parts[name]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
