"""The planner's short memory formulas against the complete estimate of a run file.

    python -m benchmarks.runtime.plan_fidelity.stage_memory [--runs 60] [--worst 10]

The search leaves out layouts by `plan/memory/stage_bytes.py`. A run's own estimate
(`plan/memory/estimate.py`) counts tensor by tensor, and is within 5 % of real peaks
(`tests/runtime/training/test_memory_estimate.py`). Here both say the peak of the fullest rank of
drawn runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.elastic.node.launch_specs import plan_topology
from holdfast.layout import AXES, Topology
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import load_devices
from holdfast.plan.hardware.link import Link
from holdfast.plan.memory.activations import has_estimate
from holdfast.plan.memory.estimate import estimates_by_rank
from holdfast.plan.step_microbatches import microbatches

_MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "llama3.1-70b")
_SCHEDULES = ("1f1b", "1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipev")
_MOST_WORKERS = 64


@dataclass(frozen=True)
class Comparison:
    """Bytes of the fullest rank."""

    label: str
    short: float
    complete: float

    @property
    def error(self) -> float:
        """Signed, in percent."""
        return 100 * (self.short / self.complete - 1)


def drawn_runs(number: int) -> Iterator[RunConfig]:
    """Runs that the complete estimate covers, always the same."""
    found = 0
    for seed in count():
        config = RunConfig.model_validate(_drawn(random.Random(seed)))
        if has_estimate(config):
            yield config
            found += 1
        if found == number:
            return


def _drawn(draw: random.Random) -> dict[str, Any]:
    degrees = _degrees(draw)
    shards, tp = degrees["dp_shard"], degrees["tp"]
    replicas = draw.choice([1, 1, 2, 4])
    layout: dict[str, Any] = dict(degrees)
    workers = replicas
    for degree in degrees.values():
        workers *= degree
    layout["workers"] = workers
    if degrees["pp"] > 1:
        layout["schedule"] = draw.choice(_SCHEDULES)
        layout |= {"virtual_stages": 2} if layout["schedule"] == "interleaved" else {}
    if shards > 1:
        has_fsdp = layout.get("schedule", "1f1b") in ("1f1b", "gpipe")
        layout["zero"] = draw.choice([1, 2, 3]) if has_fsdp else 1
    if tp > 1:
        layout["sequence_parallel"] = draw.random() < 0.7
    size = shards * draw.choice([1, 2])
    return {
        "device": "cuda",
        "data": {"sequence_length": draw.choice([1024, 2048, 4096])},
        "model": {"preset": draw.choice(_MODELS), "vocab_size": draw.choice([32000, 128256])},
        "train": {
            "precision": draw.choice(["bf16", "bf16", "fp32"]),
            "microbatch_size": size,
            "batch_size": size * draw.choice([8, 16]) * replicas,
            "recompute": draw.choice(["none", "selective", "full"]),
        },
        "layout": layout,
    }


def _degrees(draw: random.Random) -> dict[str, int]:
    while True:
        found = {
            "pp": draw.choice([1, 1, 2, 4]),
            "tp": draw.choice([1, 1, 2, 4, 8]),
            "dp_shard": draw.choice([1, 1, 2, 4, 8]),
            "cp": draw.choice([1, 1, 1, 2]),
        }
        if found["pp"] * found["tp"] * found["dp_shard"] * found["cp"] <= _MOST_WORKERS // 4:
            return found


def compare(config: RunConfig) -> Comparison:
    """The peak of a run by both."""
    topology = plan_topology(config, 1, "here")
    pool = NodePool("here", 1, topology.world_size, "A100-80", Link(1e-5, 1e11), Link(1e-5, 1e10))
    problem = Problem(workload_of(config), Cluster((pool,)), load_devices())
    choice = choice_of(config, topology)
    cost = Evaluator(problem).cost(choice)
    complete = max(each.peak for each in estimates_by_rank(config, topology))
    return Comparison(_label(config, choice), cost.peak_bytes, complete)


def choice_of(config: RunConfig, topology: Topology) -> Choice:
    """The topology's layout; its replicas are alike."""
    replica = topology.replicas[0]
    pp, tp = replica.degree("pp"), replica.degree("tp")
    shards, cp = replica.degree("dp_shard"), replica.degree("cp")
    stages = tuple(len(replica.stage_blocks(n)) for n in range(len(replica.stages)))
    number = len(topology.replicas)
    share = max(microbatches(config).values()) // number
    words = config.train.recompute_words
    group = ReplicaChoice(
        number, pp, shards, cp, tp, stages if pp > 1 else (), ("here",), share, words
    )
    layout = config.layout
    return Choice(
        (group,),
        config.train.microbatch_size,
        layout.schedule,
        len(stages) // pp if pp > 1 else 1,
        layout.zero_in_memory if shards > 1 else 1,
        layout.ep,
        layout.sequence_parallel,
    )


def _label(config: RunConfig, choice: Choice) -> str:
    group, train = choice.replicas[0], config.train
    names = zip(AXES, group.mesh_shape, strict=True)
    degrees = f"{group.dp_replicate} x {', '.join(f'{axis} {n}' for axis, n in names)}"
    words = f"zero {choice.zero}, {choice.schedule}, {train.precision}, {group.recompute[0]}"
    return f"{config.model.preset}: {degrees}, {words}, {train.microbatch_size} samples"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runtime.plan_fidelity.stage_memory")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--worst", type=int, default=10)
    options = parser.parse_args()
    found = [compare(config) for config in drawn_runs(options.runs)]
    errors = [abs(each.error) for each in found]
    print(
        f"peak memory by the short formulas against the complete estimate, {len(found)} runs: "
        f"median {statistics.median(errors):.1f} %, mean {statistics.fmean(errors):.1f} %, "
        f"worst {max(errors):.1f} %"
    )
    for each in sorted(found, key=lambda one: -abs(one.error))[: options.worst]:
        sizes = f"{each.short / 1e9:7.1f} {each.complete / 1e9:7.1f} GB"
        print(f"  {each.error:+6.1f} %  {sizes}  {each.label}")


if __name__ == "__main__":
    main()
