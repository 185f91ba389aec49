"""Not a training loop: a step times the layers of the decoder alone, forward and backward.

All ranks do so at the same time, as the ranks of a run do. The notes of a step are seconds, by
samples of a microbatch, layer and pass. The head computes its gradient in its forward pass
(`training/engine/objective.py`), so its backward pass is short.
"""

from __future__ import annotations

import time

import torch

from benchmarks.peers.work import Bench, Work
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.engine.precision import same_products_on_any_threads
from holdfast.training.memory.malloc import keep_freed_memory

SAMPLES = (1, 2, 4, 8)


def run(bench: Bench) -> None:
    same_products_on_any_threads()
    keep_freed_memory()
    objective = NextTokenObjective(bench.work.decoder())
    bench.ready()
    while True:
        notes: dict[str, float] = {}
        for samples in SAMPLES:
            for name, seconds in _times(objective, bench.work, samples).items():
                notes[f"{samples}.{name}"] = seconds
        bench.done(None, notes)


def _times(objective: NextTokenObjective, work: Work, samples: int) -> dict[str, float]:
    decoder, found = objective.decoder, dict[str, float]()
    whole = work.tokens[0][:1].expand(samples, -1)
    tokens, targets = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    def clocked(name: str, begin: float) -> float:
        now = time.perf_counter()
        found[name] = now - begin
        return time.perf_counter()

    begin = time.perf_counter()
    x = decoder.embed_tokens(tokens)
    begin = clocked("embedding.forward", begin)
    torch.autograd.backward(x, torch.zeros_like(x))
    clocked("embedding.backward", begin)
    x = x.detach().requires_grad_()
    begin = time.perf_counter()
    y = decoder.blocks(x, decoder.attention_context(tokens, x, None))
    begin = clocked("block.forward", begin)
    torch.autograd.backward(y, torch.zeros_like(y))
    clocked("block.backward", begin)
    begin = time.perf_counter()
    loss = objective(tokens, targets)
    begin = clocked("all.forward", begin)
    loss.backward()
    clocked("all.backward", begin)
    for part in ("forward", "backward"):
        others = found[f"embedding.{part}"] + found[f"block.{part}"]
        found[f"head.{part}"] = max(0.0, found.pop(f"all.{part}") - others)
        found[f"block.{part}"] /= work.config.layers
    return found
