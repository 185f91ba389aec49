"""What a step waits for on the degraded link of F9 (`holdfast score`).

    python -m benchmarks.runtime.slow_link gloo       # collectives of gloo on four processes
    python -m benchmarks.runtime.slow_link holdfast   # steps of Holdfast at 0 and 4 times the delay

The delay is that of F9 at k = 20: 3.8 ms one way, between two pairs of nodes. Needs what F9 needs
(docs/studies/score.md).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from holdfast_lab.chaos.network import DEVICE, Network
from holdfast_lab.chaos.relay import LinkShape
from holdfast_lab.score.harness.harness import RunOptions, run_scenario
from holdfast_lab.score.harness.trainer import trainer_named
from holdfast_lab.score.scenarios import LEVEL_1, draw_scenario, scoring_seeds

K = 20.0
ONE_WAY_S = 0.153 / 2 / K
FACTORS = (0.0, 4.0)
"""Of the round trip, for Holdfast's steps."""
_STEADY_FROM = 4
WORKER = """\
import sys, time
import torch, torch.distributed as dist
rank, address = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://{address}:7000", rank=rank, world_size=4)
gradient, word = torch.zeros(577), torch.zeros(())
def median_ms(call):
    times = []
    for _ in range(40):
        dist.barrier()
        time.sleep(0.02)
        began = time.monotonic()
        call()
        times.append(time.monotonic() - began)
    return 1000 * sorted(times)[20]
reduced = median_ms(lambda: dist.all_reduce(gradient))
sent = median_ms(lambda: dist.broadcast(word, 0))
if rank == 0:
    print(reduced, sent)
"""


def gloo_times(delay_s: float) -> tuple[float, float]:
    """Milliseconds of an all-reduce of 2.3 kB, and of a broadcast (as its sender and the rest see
    it, on rank 0)."""
    names = ["a", "b", "c", "d"]
    with Network() as network:
        network.up(names)
        network.split(names[:2]).shape(LinkShape(delay_s))
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [
                    *network.command(name),
                    *(sys.executable, "-c", WORKER, str(rank), network.address("a")),
                ],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank, name in enumerate(names)
        ]
        said = [rank.communicate()[0] for rank in ranks]
    reduced, sent = map(float, said[0].split())
    return reduced, sent


def step_ms(factor: float, folder: Path) -> float:
    """Milliseconds of a step of Holdfast, the mean, with so many times the round trip of F9."""
    (seed,) = scoring_seeds(1)
    drawn = draw_scenario("F9", seed, LEVEL_1)
    extra = {"rtt_ms": factor * 153.0}
    events = (
        replace(e, t_s=0.01 * drawn.seconds, extra=extra) if e.kind == "net" else e
        for e in drawn.events
    )
    run = replace(drawn, events=tuple(events))
    record = run_scenario(trainer_named("holdfast"), run, folder / "run", RunOptions(K))
    times = [later.t_s - earlier.t_s for earlier, later in pairwise(record.commits)]
    return 1000 * statistics.mean(times[_STEADY_FROM:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("gloo", "holdfast"))
    part = parser.parse_args().part
    if part == "gloo":
        plain, slow = gloo_times(0.0), gloo_times(ONE_WAY_S)
        for name, before, after in zip(("all-reduce", "broadcast"), plain, slow, strict=True):
            longer = (after - before) / (1000 * ONE_WAY_S)
            print(f"{name:<12}{before:7.1f} ms {after:7.1f} ms: {longer:.1f} times one way")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        plain_ms, slow_ms = (step_ms(factor, Path(folder)) for factor in FACTORS)
    waits = (slow_ms - plain_ms) / (1000 * ONE_WAY_S * FACTORS[1])
    print(f"a step {plain_ms:.0f} ms, {slow_ms:.0f} ms: {waits:.1f} times one way")
    return 0


if __name__ == "__main__":
    sys.exit(main())
