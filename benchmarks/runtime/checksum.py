"""The check of replicas' states against a memcpy of the same bytes.

    python -m benchmarks.runtime.checksum               256 MiB of parameters and moments, 40 rounds
    python -m benchmarks.runtime.checksum --mib 64 --rounds 5

One rank's part of it on one thread: every byte is hashed once, in place. The exchange is 8 bytes a
rank where replicas are alike. Between two rounds of one thing stands one of the other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.runtime.paired import estimate
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.parameters import count_parameters
from holdfast.core.sharding.state_table import state_table
from holdfast.layout import Layout, place_layout
from holdfast.training.engine.replica_check import ReplicaChecker
from holdfast.training.engine.state import LocalTensor


def model_of(mib: int) -> ModelConfig:
    """A decoder whose state takes at least so much, in matrices of 1 to 4 MiB."""
    shape = {
        "preset": None,
        "dim": 512,
        "heads": 8,
        "kv_heads": 8,
        "ffn_dim": 2048,
        "vocab_size": 2048,
    }
    for layers in range(1, 1000):
        model = ModelConfig.model_validate({**shape, "layers": layers})
        if 12 * count_parameters(model) >= mib << 20:
            return model
    raise SystemExit(f"{mib} MiB are too many")


def cpu_seconds(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(asked.mib)
    table = state_table(model)
    state = [
        LocalTensor(spec.name, torch.rand(spec.shape), (0,) * len(spec.shape), spec.shape)
        for spec in table
    ]
    copies = [torch.zeros_like(local.tensor) for local in state]
    checks = ReplicaChecker(place_layout(Layout(dp_replicate=2), 1, ("a", "b")), table)

    def copy() -> None:
        for into, local in zip(copies, state, strict=True):
            into.copy_(local.tensor)

    def check() -> None:
        checks.hashes(0, state)

    copy()
    check()
    pairs = [(cpu_seconds(check), cpu_seconds(copy)) for _ in range(asked.rounds)]
    nbytes = sum(local.tensor.nbytes for local in state)
    checked, copied = (estimate([pair[i] for pair in pairs]).median for i in (0, 1))
    print(f"{nbytes / 2**20:.0f} MiB in {len(state)} tensors, {asked.rounds} rounds, CPU seconds")
    print(f"check   {checked:.4f}  {nbytes / checked / 1e9:.1f} GB/s")
    print(f"memcpy  {copied:.4f}  {nbytes / copied / 1e9:.1f} GB/s")
    print(f"ratio   {estimate([a / b for a, b in pairs])}")


if __name__ == "__main__":
    main()
