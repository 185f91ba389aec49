"""Hugging Face accelerate's loop, as its documentation writes it."""

from __future__ import annotations

import torch

from benchmarks.peers.work import Bench, compiled, mean_loss


def run(bench: Bench) -> None:
    from accelerate import Accelerator

    work = bench.work
    bench.join()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.microbatches)
    if accelerator.num_processes != bench.world:
        raise RuntimeError(f"accelerate sees {accelerator.num_processes} processes")
    decoder = compiled(work.decoder(), work)
    model, optimizer = accelerator.prepare(decoder, work.adamw(decoder))
    bench.ready()
    for parts in bench.microbatches():
        total = torch.zeros(())
        for inputs, targets in parts:
            with accelerator.accumulate(model):
                loss = mean_loss(model(inputs), targets)
                accelerator.backward(loss)  # divides by the number of microbatches
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), work.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / len(parts)
        bench.done(total)
