"""Updates by parameter servers under injected delays, against synchronous ones at equal tokens.

    python -m benchmarks.runtime.server_updates

A simulated clock gives each microbatch of each worker a time: most are alike, some workers stall.
The rules of `policy/server_updates.py` then say which update lacks which, and one process computes
the updates in that order, as `holdfast audit replay` does. So the delays cost no time here. A byte
model of 60 thousand parameters trains on this repository's docs. The loss is that of texts that it
has not seen. A difference is that of a seed's loss from the same seed's synchronous run.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Iterator, Mapping
from functools import cache
from math import inf
from typing import Any

import torch

from benchmarks.runtime.outer_rounds import DOCS, SEEDS, _interval
from holdfast.config.run import RunConfig
from holdfast.errors import NonFiniteError
from holdfast.events import ServerUpdates
from holdfast.layout import Layout, place_layout
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.torch_compat import memory_store
from holdfast.policy.server_updates import UpdateRule, straggling_of
from holdfast.training.engine.build import build_engine
from holdfast.training.engine.server_steps import ServerExecutor

LENGTH, BATCH, MICRO, WORKERS, USUAL = 64, 128, 4, 4, 4
STALL_PART, STALL_TIMES = 0.05, 20.0


def _config(seed: int, steps: int, server: dict[str, Any]) -> RunConfig:
    shape = {"layers": 2, "dim": 48, "heads": 2, "kv_heads": 2, "ffn_dim": 96, "vocab_size": 256}
    return RunConfig.model_validate(
        {
            "seed": seed,
            "data": {"sequence_length": LENGTH},
            "model": {"preset": None, "tied_embeddings": True, **shape},
            "train": {
                "steps": steps,
                "batch_size": BATCH,
                "microbatch_size": MICRO,
                "optimizer": {"name": "adamw", "learning_rate": 4e-3},
                "schedule": {"kind": "cosine", "warmup_steps": max(1, steps // 10)},
            },
            "server": {"update_microbatches": USUAL, **server},
        }
    )


class _Schedule(Mapping[int, ServerUpdates]):
    """What the journal would have of each step, by a simulated clock."""

    def __init__(self, config: RunConfig, executor: ServerExecutor) -> None:
        self._config, self._executor = config, executor
        self.staleness: list[int] = []
        self.modes: list[bool] = []

    def __getitem__(self, step: int) -> ServerUpdates:
        before, server = self._executor.adaptation, self._config.server
        count = BATCH // MICRO
        rule = UpdateRule(count, before.is_synchronous, before.width, server.staleness)
        chooser = random.Random(f"{self._config.seed} {step}")
        third = 3 * (step - 1) // self._config.train.steps
        part = 0.0 if server.mode == "switching" and third != 1 else STALL_PART
        each = count // WORKERS
        orders = [rule.order(range(k * each, (k + 1) * each)) for k in range(WORKERS)]
        seconds = [
            [
                chooser.uniform(0.9, 1.1) * (STALL_TIMES if chooser.random() < part else 1.0)
                for _ in range(each)
            ]
            for _ in range(WORKERS)
        ]
        if rule.is_synchronous:
            order = sorted(range(count), key=lambda j: (rule.update_of(j), j))
            rows = [[j // each, j, 0] for j in order]
            rows = [[before.updates + at // rule.width + 1, *r] for at, r in enumerate(rows)]
        else:
            rows = [
                [before.updates + at + 1, *row]
                for at, row in enumerate(_arrivals(rule, orders, seconds))
            ]
        self.staleness += [row[3] for row in rows]
        self.modes.append(rule.is_synchronous)
        updates = [[[*row, MICRO * LENGTH] for row in rows] for _ in range(WORKERS)]
        straggling = straggling_of(seconds)
        return ServerUpdates(rule.is_synchronous, rule.width, updates, straggling, step=step)

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, self._config.train.steps + 1))

    def __len__(self) -> int:
        return self._config.train.steps


def _arrivals(
    rule: UpdateRule, orders: list[list[int]], seconds: list[list[float]]
) -> Iterator[list[int]]:
    """Worker, microbatch and staleness of each update, as they come."""
    done, base, version = [0] * len(orders), [0] * len(orders), 0
    ends = [(seconds[k][0], k) for k in range(len(orders))]
    heapq.heapify(ends)
    waiting: set[int] = set()
    while ends:
        now, worker = heapq.heappop(ends)
        yield [worker, orders[worker][done[worker]], version - base[worker]]
        version += 1
        done[worker] += 1
        waiting.add(worker)
        for other in sorted(waiting):
            if done[other] == len(orders[other]):
                waiting.discard(other)
                continue
            rest = [d for k, d in enumerate(done) if k != other and d < len(orders[k])]
            if rule.may_continue(orders[other], done[other], version, rest):
                waiting.discard(other)
                base[other] = version
                heapq.heappush(ends, (now + seconds[other][done[other]], other))


def _train(config: RunConfig) -> tuple[float, _Schedule, ServerExecutor]:
    """Train from initial weights; the loss on texts that were not trained on."""
    topology = place_layout(Layout(), 1, ("here",))
    groups = connect(ConnectSettings(memory_store(), torch.device("cpu")), topology, 0)
    engine = build_engine(config, groups, torch.device("cpu"))
    engine.initialise(config.seed)
    executor = engine.learners
    assert isinstance(executor, ServerExecutor)
    schedule = _Schedule(config, executor)
    executor.recorded = schedule
    try:
        for step in range(1, config.train.steps + 1):
            first = (step - 1) * BATCH
            share = engine.begin(step)
            engine.compute(
                [DOCS.samples(config.seed, first + k * MICRO, MICRO, LENGTH) for k in share]
            )
            engine.apply(engine.reduce())
    except NonFiniteError:
        return inf, schedule, executor
    held_out = DOCS.held_out(512, LENGTH)
    with torch.no_grad():
        loss = engine.executor.evaluate([held_out], lambda: None)
    return float(loss[0].flatten()[0]) / held_out.tokens, schedule, executor


def _cells(scalings: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and keys of what is compared."""
    for scaling in scalings:
        more = {"rate_scaling": scaling}
        yield (
            f"growing from 2 to 16, {scaling}",
            {
                "mode": "synchronous",
                "update_microbatches": 2,
                "max_update_microbatches": 16,
                **more,
            },
        )
        yield f"switching, {scaling}", {"mode": "switching", "staleness": 2, **more}
        for bound in (2, 0, 8):
            stale = {"mode": "bounded_stale", "staleness": bound, **more}
            yield f"bounded_stale, staleness {bound}, {scaling}", stale


@cache
def _synchronous(seed: int, steps: int, width: int) -> float:
    fixed = {"mode": "synchronous", "update_microbatches": width}
    return _train(_config(seed, steps, fixed))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--scaling", nargs="+", default=["sqrt", "linear"])
    parser.add_argument("--only", default="", help="cells whose name begins with it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| updates | loss | staleness | at the end |\n|---|---|---|---|", flush=True)
    for name, server in _cells(arguments.scaling):
        if not name.startswith(arguments.only):
            continue
        found, staleness, ends = [], list[int](), []
        for seed in SEEDS:
            base = _synchronous(seed, arguments.steps, server.get("update_microbatches", USUAL))
            loss, schedule, executor = _train(_config(seed, arguments.steps, server))
            found.append(100 * (loss / base - 1))
            staleness += schedule.staleness
            width, synchronous = executor.adaptation.width, sum(schedule.modes)
            ends.append(f"{width} microbatches, {synchronous} synchronous steps")
        mean = sum(staleness) / len(staleness)
        largest = f"{mean:.1f}, at most {max(staleness)}"
        print(f"| {name} | {_interval(found)} | {largest} | {'; '.join(ends)} |", flush=True)


if __name__ == "__main__":
    main()
