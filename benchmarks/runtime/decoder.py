"""Forward and backward of our decoder against `transformers`' Llama of the same shape and weights.

One process runs both, on one thread, in float32, interleaved and paired. Each round times both, in
an order that alternates. The ratio (theirs / ours, above 1 is faster) is taken within a round. The
table gives medians with a bootstrap interval of the median ratio, for CPU seconds and for wall
seconds. Both losses and every gradient are compared before anything is timed.

    python -m benchmarks.runtime.decoder [--rounds 30] [--shape 15m]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.runtime.paired import estimate
from holdfast.config.sections.model import ModelConfig
from holdfast.model.decoder import Decoder
from holdfast.model.huggingface import export_folder
from holdfast.model.init import initialise

BATCH, SEQUENCE, VOCABULARY = 2, 256, 4096


def build(shape: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Our decoder and theirs, holding the same numbers."""
    from transformers import LlamaForCausalLM

    config = ModelConfig.model_validate({"preset": shape, "vocab_size": VOCABULARY})
    with torch.device("meta"):
        ours = Decoder(config)
    ours.to_empty(device="cpu")
    initialise(ours, 1)
    with tempfile.TemporaryDirectory() as folder:
        export_folder(Path(folder), config, ours.state_dict(), None)
        theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.train()
    return ours, theirs


def step(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy, and its backward.  logits: [B, S, V], targets: [B, S]"""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    loss.backward()
    return loss.detach()


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shape", default="15m", help="a Llama preset")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ours, theirs = build(arguments.shape)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def run_ours() -> torch.Tensor:
        ours.zero_grad(set_to_none=True)
        return step(ours(inputs), targets)

    def run_theirs() -> torch.Tensor:
        theirs.zero_grad(set_to_none=True)
        return step(theirs(input_ids=inputs, use_cache=False).logits, targets)

    torch.testing.assert_close(run_ours(), run_theirs(), rtol=1e-5, atol=0)
    sums = [
        sum(float(p.grad.double().square().sum()) for p in m.parameters() if p.grad is not None)
        for m in (ours, theirs)
    ]
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=0)

    runs = {"ours": run_ours, "theirs": run_theirs}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for index in range(arguments.rounds):
        for name in sorted(runs, reverse=bool(index % 2)):
            times[name].append(timed(runs[name]))
    print(f"{arguments.shape}, batch {BATCH} x {SEQUENCE}, vocabulary {VOCABULARY}, one thread")
    for column, clock in enumerate(("CPU", "wall")):
        mine, other = ([t[column] for t in times[name]] for name in ("ours", "theirs"))
        ratios = [b / a for a, b in zip(mine, other, strict=True)]
        print(
            f"{clock:>5}: ours {statistics.median(mine) * 1e3:8.2f} ms, transformers "
            f"{statistics.median(other) * 1e3:8.2f} ms, ratio {estimate(ratios)}"
        )


if __name__ == "__main__":
    main()
