"""Bytes of a stage by short formulas, against published sizes and the complete estimate."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from benchmarks.runtime.plan_fidelity.mixers import with_biases
from benchmarks.runtime.plan_fidelity.stage_memory import compare, drawn_runs

from holdfast.core.sharding.reduction_tree import ReductionTree, deal, plan_accumulation
from holdfast.plan.cost.blocks import FeedForward, Heads, KeptByRuntime, block, embedding, head
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.cost.pipeline_time import in_flight
from holdfast.plan.cost.workload import Workload
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.hardware.link import Link
from holdfast.plan.memory.stage_bytes import (
    GradientCopies,
    gradient_copies,
    kept_elements,
    late_at,
    rank_parameters,
)

GIB = 2**30
SEQUENCE, TP = 2048, 8
A100 = Cluster((NodePool("a100", 128, 8, "A100-80", Link(5e-6, 235e9), Link(1e-5, 25e9)),))

# Korthikanti et al. 2022: layers, width, heads, microbatch, pp, stages of a rank
MODELS = {
    "22B": (48, 6144, 64, 4, 1, 1),
    "175B": (96, 12288, 96, 1, 8, 3),
    "530B": (105, 20480, 128, 1, 35, 3),
    "1T": (128, 25600, 160, 1, 64, 1),
}


def gpt(layers: int, width: int, heads: int, *, is_fused: bool = False) -> Workload:
    """A GPT with dropout, as Megatron trains it."""
    kind = Heads(heads, heads, width // heads, is_fused=is_fused)
    feed = FeedForward(4 * width, is_gated=False)
    one = with_biases(block(width, kind, feed, KeptByRuntime(masks=0.5)))
    ends = embedding(width, 51200, SEQUENCE), head(width, 51200)
    layers_of = (ends[0], *(one,) * layers, ends[1])
    return Workload("gpt", layers_of, SEQUENCE, 1536, vocabulary=51200, is_tied=True)


def activations(model: str, word: str, is_cut: bool) -> float:
    """GiB of the blocks of the first stage."""
    layers, width, heads, microbatch, pp, virtual = MODELS[model]
    workload = gpt(layers, width, heads)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    kept = in_flight(schedule, pp, virtual, 8 * pp)[0]
    of_token = kept_elements(workload, workload.blocks[0], TP, is_cut, word)
    return of_token * 2 * microbatch * SEQUENCE * kept * layers / pp / GIB


@pytest.mark.parametrize(
    ("model", "none", "selective"),
    [("22B", 59.25, 9.56), ("175B", 66.84, 12.35), ("530B", 114.02, 23.08), ("1T", 131.25, 26.56)],
)
def test_activations_of_published_models(model: str, none: float, selective: float) -> None:
    assert activations(model, "none", is_cut=False) == pytest.approx(none, rel=0.02)
    assert activations(model, "selective", is_cut=True) == pytest.approx(selective, rel=0.02)


@pytest.mark.parametrize(
    ("word", "is_cut", "percent"),
    [
        ("none", True, (66.84, 62.04, 58.31, 58.31)),
        ("selective", False, (49.42, 56.53, 62.04, 62.04)),
        ("selective", True, (16.18, 18.49, 20.27, 20.27)),
        ("full", False, (7.64, 8.71, 9.42, 9.42)),
    ],
)
def test_activations_relative_to_none(word: str, is_cut: bool, percent: tuple[float, ...]) -> None:
    for model, published in zip(MODELS, percent, strict=True):
        found = 100 * activations(model, word, is_cut) / activations(model, "none", is_cut=False)
        assert found == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize(
    ("model", "published"), [("22B", 45.56), ("175B", 45.56), ("530B", 31.64), ("1T", 32.96)]
)
def test_parameters_and_optimizer_of_published_models(model: str, published: float) -> None:
    layers, width, heads, _, pp, _ = MODELS[model]
    workload = gpt(layers, width, heads)
    held = [(workload.blocks[0], layers // pp)]
    state = workload.state.weights + workload.state.gradients + workload.state.optimizer
    found = rank_parameters(held, TP, 1) * state / GIB
    assert found == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("number", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_short_formulas_are_near_the_complete_estimate(number: int) -> None:
    """Drawn runs over all axes, schedules, ZeRO stages, precisions and recomputations."""
    errors = [abs(compare(config).error) for config in drawn_runs(number)]
    assert statistics.median(errors) < 2
    assert max(errors) < 10


def choice_of(pp: int, stages: tuple[int, ...], replicas: int, word: str = "none") -> Choice:
    group = ReplicaChoice(replicas, pp, 1, 1, TP, stages, ("a100",), 1536 // replicas, (word,))
    return Choice((group,), 1)


def test_175b_on_128_nodes_of_eight_a100_fits() -> None:
    """TP 8, PP 16, DP 8 with sequence parallelism (row P9)."""
    problem = Problem(gpt(96, 12288, 96, is_fused=True), A100, load_devices())
    layout = choice_of(16, (6,) * 16, 8)
    cost = Evaluator(problem).cost(layout)
    assert cost.fits
    assert 30e9 < cost.peak_bytes < 45e9
    without = Evaluator(problem).cost(replace(layout, sequence_parallel=False))
    assert without.peak_bytes > cost.peak_bytes + 10e9
    unfused = replace(problem, workload=gpt(96, 12288, 96))
    assert not Evaluator(unfused).cost(replace(layout, sequence_parallel=False)).fits


def test_175b_with_partial_sums_of_gradients_needs_more() -> None:
    """A run whose sums do not depend on its layout holds partial sums of 192 microbatches."""
    workload = gpt(96, 12288, 96, is_fused=True)
    plain, tree = (
        Evaluator(Problem(replace(workload, sums_in_tree=is_tree), A100, load_devices())).cost(
            choice_of(16, (6,) * 16, 8)
        )
        for is_tree in (False, True)
    )
    assert tree.peak_bytes > plain.peak_bytes + 7 * 4 * 1.3e9


def peaks(problem: Problem, stages: tuple[int, ...]) -> list[float]:
    cost = Evaluator(problem).cost(choice_of(len(stages), stages, 96))
    return [stage.peak for stage in cost.groups[0].memory]


def fill(problem: Problem, pp: int, limit: float) -> tuple[int, ...]:
    """As many blocks on each stage as stay below a limit, the last one with the rest."""
    rest = len(problem.workload.blocks)
    stages: list[int] = []
    for index in range(pp - 1):
        most = max(
            n
            for n in range(1, rest - (pp - index - 1) + 1)
            if n == 1 or peaks(problem, (*stages, n, *(1,) * (pp - index - 2), 1))[index] <= limit
        )
        stages.append(most)
        rest -= most
    return (*stages, rest)


def test_stages_of_a_model_with_heavy_ends_can_be_balanced() -> None:
    """The first stage has the embedding and most microbatches in flight, the last one the logits
    (row P10). Equal stages differ by much; stages chosen by these formulas by less than 10 %."""
    one = block(4096, Heads(32, 8, 128), FeedForward(14336))
    layers = (embedding(4096, 256_000), *(one,) * 64, head(4096, 256_000))
    workload = Workload("heavy ends", layers, 4096, 1536, vocabulary=256_000)
    problem = Problem(workload, A100, load_devices())
    equal = peaks(problem, (16,) * 4)
    low, high = min(equal), max(equal)
    assert high > 1.25 * low
    for _ in range(12):
        middle = (low + high) / 2
        stages = fill(problem, 4, middle)
        low, high = (low, middle) if peaks(problem, stages)[-1] <= middle else (middle, high)
    found = peaks(problem, fill(problem, 4, high))
    assert max(found) < 1.1 * min(found)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 8, 16, 24, 37, 96])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_copies_of_gradients_are_those_of_the_tree(microbatches: int, replicas: int) -> None:
    if microbatches < replicas:
        return
    tree, most = ReductionTree(microbatches), 0
    for share in deal(microbatches, replicas):
        slots = {(0, 0)}
        for turn in plan_accumulation(tree, share):
            slots.add((turn.piece, 0) if turn.depth == 0 else (0, turn.depth))
        most = max(most, len(slots))
    assert gradient_copies(microbatches, replicas, 1).sums == pytest.approx(most, abs=1)


def test_copies_of_gradients_of_many_replicas() -> None:
    """Shares of so many microbatches that each is a subtree: one piece, and its partial sums."""
    assert gradient_copies(4096, 1024, 1) == GradientCopies(2.0, 1 - 1 / 1024)
    assert gradient_copies(1, 1000, 1).sums == 1


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_peak_alone_is_that_of_all_parts(schedule: str, zero: int) -> None:
    """A search asks for the peak alone, and prints the parts."""
    group = ReplicaChoice(2, 4, 2, 1, 8, (24, 24, 24, 24), ("a100",), 16)
    choice = Choice((group,), 2, schedule, zero=zero)
    evaluator = Evaluator(Problem(gpt(96, 12288, 96), A100, load_devices()))
    for index, counts in enumerate(evaluator.counts_of_ranks(choice, group)):
        held, late = evaluator.bytes_of(choice, group, index, counts), late_at(choice, group, index)
        for number in (0.5, 1.0, 4.0, 16.0):
            assert held.peak(number, late) == held.at(number, late).peak


def test_one_evaluator_tells_numbers_of_replicas_apart() -> None:
    workload = replace(gpt(96, 12288, 96, is_fused=True), sums_in_tree=True)
    problem = Problem(workload, A100, load_devices())
    both = Evaluator(problem)
    for replicas in (8, 96):
        choice = choice_of(16, (6,) * 16, replicas)
        assert both.cost(choice).peak_bytes == Evaluator(problem).cost(choice).peak_bytes
