"""Claims of surveys and papers, next to what was measured here or what the model says.

`claims.csv` has the claims. A measured row names a page of docs, the text there that proves it, and
the command that measured it. A modelled row names one of `MODELS`, a function that computes
the value and the verdict when it is asked.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast, get_args

from holdfast.config.loading.load import load_config
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.timing import Durations, time_schedule
from holdfast.plan.catalogue import load_catalogue
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.cost.workload import Workload
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.hardware.cluster_file import read_cluster
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.hardware.distance import hundredfold_gbit_s, times_dearer
from holdfast.plan.memory.stage_bytes import kept_elements
from holdfast.plan.objective.energy import usd_per_hour
from holdfast.plan.objective.goodput import GoodputModel

Verdict = Literal["better", "as claimed", "worse", "not comparable", "not measured"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
RANKS, MICROBATCHES = 4, 8
"""Of the pipelines whose bubbles are computed."""
SPOT_LOSSES_PER_DAY = 14.7  # of one node: p3 of AWS, the trace of Bamboo


@dataclass(frozen=True)
class Said:
    """What the model says about a claim."""

    verdict: Verdict
    ours: str  # the value, and the assumption that decides the verdict


def _said(
    holds: bool, ours: str, yes: Verdict = "as claimed", otherwise: Verdict = "worse"
) -> Said:
    return Said(yes if holds else otherwise, ours)


# --- bubbles ------------------------------------------------------------------------------------
def _waits(name: str, virtual: int = 1) -> float:
    """Time that the first rank waits in a step, in forwards of a complete rank. Forward, gradient
    of the input and gradient of the weights take as long each."""
    table = build_schedule(name, RANKS, MICROBATCHES, virtual)
    each = RANKS / table.stages
    found = time_schedule(table, Durations.uniform(table.stages, each, 2 * each))
    return found.makespan - 3 * MICROBATCHES


def bubble_1f1b() -> Said:
    share = _waits("1f1b") / (_waits("1f1b") + 3 * MICROBATCHES)
    formula = (RANKS - 1) / (MICROBATCHES + RANKS - 1)
    return _said(abs(share - formula) < 1e-9, f"{share:.1%} of a step, the table timed")


def bubble_interleaved() -> Said:
    ratio = _waits("interleaved", 2) / _waits("1f1b")
    return _said(abs(ratio - 1 / 2) < 0.01, f"{ratio:.2f} of 1F1B's, the table timed")


def bubble_zb_h1() -> Said:
    ratio = _waits("zb-h1") / _waits("1f1b")
    return _said(abs(ratio - 1 / 3) < 0.01, f"{ratio:.2f} of 1F1B's, the table timed")


def bubble_zbv() -> Said:
    waits = _waits("zbv", 2)
    share = waits / (waits + 3 * MICROBATCHES)
    words = "as long as a step fills and empties the pipeline, some ranks wait"
    return _said(share < 0.01, f"{share:.1%} of a step at p 4, m 8: {words}")


def bubble_dualpipev() -> Said:
    ratio = _waits("dualpipev", 2) / _waits("1f1b")
    return _said(ratio < 0.5, f"{ratio:.2f} of 1F1B's at p 4, m 8, with no transfer to hide")


# --- memory -------------------------------------------------------------------------------------
def _workload(preset: str, sequence: int, batch: int) -> Workload:
    asked = [
        f"model.preset={preset}",
        f"data.sequence_length={sequence}",
        f"train.batch_size={batch}",
        "train.precision=bf16",
    ]
    return workload_of(load_config(None, asked).config)


def activations_selective() -> Said:
    workload = _workload("175b", 2048, 64)
    block = workload.blocks[0]
    without = kept_elements(workload, block, 8, False, "none")
    share = kept_elements(workload, block, 8, True, "selective") / without
    words = "fused attention keeps no scores, so selective recomputation has less to save"
    return _said(share < 0.22, f"{share:.1%} of what tp 8 alone keeps: {words}")


def zero_state() -> Said:
    """Of one replica on 64 devices, against one device."""
    workload = _workload("350m", 1024, 64)
    found = []
    for ranks in (1, 64):
        problem = Problem(workload, read_cluster(f"{ranks}x1xA100-80"), load_devices())
        group = ReplicaChoice(1, 1, ranks, 1, 1, (), (problem.cluster.pools[0].name,), 1)
        memory = Evaluator(problem).cost(Choice((group,), 64, zero=3)).groups[0].memory[0]
        found.append(memory.weights + memory.gradients + memory.optimizer)
    each = found[0] / workload.parameters
    words = f"{each:.0f} bytes of a parameter become {each * found[1] / found[0]:.2f}"
    return _said(abs(64 * found[1] / found[0] - 1) < 0.01, f"{words}: gradients are fp32 here")


# --- links --------------------------------------------------------------------------------------
def tp_over_nodes() -> Said:
    """The sums of a tensor group of 8 on H100 over one node, and over eight nodes, as `layout
    distance --cluster 8x8xH100-80 --ranks 8 --size 100663296` prints them."""
    pool, size, ranks = read_cluster("8x8xH100-80").pools[0], 4096 * 12_288 * 2, 8
    near, far = pool.inside, pool.outside
    most = hundredfold_gbit_s(near, far, size, ranks, pool.devices)
    nodes_gbit_s = far.bandwidth * pool.devices * 8 / 1e9
    return _said(
        nodes_gbit_s <= most,
        f"the link decides: it does up to {most:,.0f} Gbit/s of a node. InfiniBand of "
        f"{nodes_gbit_s:,.0f} is {times_dearer(near, far, size, ranks):,.1f} x",
        otherwise="not comparable",
    )


# --- money and goodput --------------------------------------------------------------------------
def spot_price() -> Said:
    """Eight nodes of eight A100, at on-demand and at spot prices, with Bamboo's losses."""
    machine = next(
        row for row in load_catalogue() if (row.region, row.type) == ("us-east-1", "p4d.24xlarge")
    )
    workload = _workload("llama3.2-1b", 2048, 512)
    name = "nodes"
    choice = Choice((ReplicaChoice(8, 1, 8, 1, 1, (), (name,), 8, ("full",)),), 8, zero=3)
    usd = {}
    for market, price in (("kept", machine.on_demand), ("spot", machine.spot)):
        pool = replace(read_cluster("8x8xA100-40").pools[0], name=name, usd_per_hour=price)
        if market == "spot":
            pool = replace(pool, is_spot=True, losses_per_day=SPOT_LOSSES_PER_DAY, burst=2.1)
        problem = Problem(workload, Cluster((pool,)), load_devices())
        model = GoodputModel(problem)
        expected = model.expected(choice, model.evaluator.cost(choice))
        paid = usd_per_hour(problem.cluster, choice, expected.present)
        usd[market] = paid / expected.tokens_per_s
    ratio = usd["kept"] / usd["spot"]
    words = f"{machine.type}, ${machine.on_demand:.2f} and ${machine.spot:.2f} an hour"
    found = f"{ratio:.1f} x a token with {SPOT_LOSSES_PER_DAY} losses a day: {words}"
    return _said(ratio >= 2.4, found, "better")


def llama3_goodput() -> Said:
    """tp 8, pp 16, 32 replicas of dp_shard 4, at 3.8 losses of 1,000 nodes a day. With less
    sharding the state of 405 G parameters does not fit once a replica is lost."""
    workload = _workload("llama3.1-405b", 8192, 2048)
    cluster = read_cluster("2048x8xH100-80")
    pool = cluster.pools[0]
    stages = (7, 7, *(8 for _ in range(14)))
    group = ReplicaChoice(32, 16, 4, 1, 8, stages, (pool.name,), 16, ("full",))
    choice = Choice((group,), 4, zero=2)
    problem = Problem(workload, cluster, load_devices())
    found = GoodputModel(problem).expected(choice, Evaluator(problem).cost(choice))
    words = f"{found.interruptions_per_day:.1f} interruptions a day, of {found.losses_per_day:.1f} "
    words += "lost nodes; the other replicas continue at once, and a node returns after 2 h"
    return _said(found.availability > 0.9, f"{found.availability:.3f} expected: {words}", "better")


MODELS: Mapping[str, Callable[[], Said]] = {
    each.__name__: each
    for each in (
        bubble_1f1b,
        bubble_interleaved,
        bubble_zb_h1,
        bubble_zbv,
        bubble_dualpipev,
        activations_selective,
        zero_state,
        tp_over_nodes,
        spot_price,
        llama3_goodput,
    )
}

CLAIMS_FILE = Path(__file__).with_name("claims.csv")


@dataclass(frozen=True)
class Claim:
    """One row. ours: the value here, and why the verdict is what it is. basis: measured, modelled
    or not measured. evidence: text of the page that has the number, or the model's name."""

    topic: str
    claim: str
    source: str
    claimed: str
    basis: str
    page: str
    evidence: str
    command: str
    verdict: Verdict
    ours: str


def load_claims() -> tuple[Claim, ...]:
    """All claims in the order of the file, the modelled ones computed."""
    with CLAIMS_FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_claim(row) for row in csv.DictReader(file))


def _claim(row: dict[str, str]) -> Claim:
    verdict, ours, command = row["verdict"], row["why"], row["command"]
    if row["basis"] == "modelled":
        said = MODELS[row["evidence"]]()
        verdict, ours, command = said.verdict, said.ours, "holdfast claims"
    return Claim(
        row["topic"],
        row["claim"],
        row["source"],
        row["claimed"],
        row["basis"],
        row["page"],
        row["evidence"],
        command,
        cast("Verdict", verdict),
        ours,
    )
