"""Time and memory of `train.recompute`: none, full, and selective with kept operations.

One process computes forward and backward of one microbatch, on one thread, in float32. Each round
times all policies, in an order that rotates. The table has medians, the counted bytes that a
forward pass leaves, and what the formulas of `holdfast.plan.memory.activations` say.

    python -m benchmarks.runtime.recompute [--rounds 15] [--shape 15m] [--batch 2] [--sequence 512]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks.runtime.activation_meter import ActivationMeter
from holdfast.config.run import RunConfig
from holdfast.config.sections.recompute import RecomputePolicy
from holdfast.layout import Layout, place_layout
from holdfast.model.decoder import Decoder
from holdfast.model.init import initialise
from holdfast.plan.memory.activations import activations_of
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.memory.recompute import apply_recompute

POLICIES = {
    "none": RecomputePolicy(),
    "selective matmul": RecomputePolicy("selective"),
    "selective attention": RecomputePolicy("selective", ("attention",)),
    "selective matmul attention": RecomputePolicy("selective", ("matmul", "attention")),
    "selective all three": RecomputePolicy("selective", ("matmul", "attention", "activation")),
    "full": RecomputePolicy("full"),
}
VOCABULARY = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", default="15m", help="a preset of model.preset")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=512)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tokens = torch.randint(VOCABULARY, (given.batch, given.sequence))
    objectives = {policy: build(given.shape, policy) for policy in POLICIES}
    times: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    for number in range(given.rounds + 1):
        at, names = number % len(POLICIES), list(POLICIES)
        for policy in (*names[at:], *names[:at]):
            found = timed(objectives[policy], tokens)
            if number:  # the first one warms up
                times[policy].append(found)
    print(f"{'policy':<27}  wall s   CPU s   counted MB   formula MB")
    for policy, objective in objectives.items():
        wall, cpu = (statistics.median(column) for column in zip(*times[policy], strict=True))
        meter = ActivationMeter(objective)
        objective(tokens, tokens).backward()
        meter.close()
        said = formula(given.shape, policy, given.batch, given.sequence)
        print(f"{policy:<27}{wall:8.3f}{cpu:8.3f}{meter.peak / 1e6:13.2f}{said / 1e6:13.2f}")


def config_of(shape: str, policy: str, batch: int = 2, sequence: int = 512) -> RunConfig:
    """A run of one process."""
    return RunConfig.model_validate(
        {
            "model": {"preset": shape, "vocab_size": VOCABULARY},
            "data": {"sequence_length": sequence},
            "train": {
                "recompute": POLICIES[policy].word,
                "recompute_keep": POLICIES[policy].keep,
                "microbatch_size": batch,
                "batch_size": batch,
            },
        }
    )


def build(shape: str, policy: str) -> NextTokenObjective:
    """The decoder with its loss."""
    with torch.device("meta"):
        decoder = Decoder(config_of(shape, policy).model)
    decoder.to_empty(device="cpu")
    initialise(decoder, 1)
    if policy != "none":
        blocks = list(decoder.layers)
        apply_recompute(blocks, POLICIES[policy], is_random=False, is_compiled=False)
    return NextTokenObjective(decoder)


def timed(objective: NextTokenObjective, tokens: torch.Tensor) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of the two passes."""
    cpu, wall = time.process_time(), time.perf_counter()
    objective(tokens, tokens).backward()
    found = time.perf_counter() - wall, time.process_time() - cpu
    objective.zero_grad()
    return found


def formula(shape: str, policy: str, batch: int, sequence: int) -> int:
    """Bytes that the formulas say."""
    topology = place_layout(Layout(), 1, ("here",))
    config = config_of(shape, policy, batch, sequence)
    return activations_of(config, topology, topology.coordinate(0)).total


if __name__ == "__main__":
    main()
