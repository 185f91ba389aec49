"""DeepSpeed's engine on the CPU: ZeRO stage 2 or 3, torch's fused AdamW, its own clipping."""

from __future__ import annotations

import os

import torch

from benchmarks.peers.work import Bench, MeanLoss, compiled


def run(bench: Bench, stage: int) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    work = bench.work
    bench.join()
    deepspeed.init_distributed(dist_backend="gloo")
    module = MeanLoss(compiled(work.decoder(), work))  # type: ignore[arg-type]
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=work.adamw(module),
        config={
            "train_micro_batch_size_per_gpu": work.batch // bench.world // work.microbatches,
            "gradient_accumulation_steps": work.microbatches,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": work.clip_norm,
            "zero_allow_untested_optimizer": True,
        },
    )
    bench.ready()
    for parts in bench.microbatches():
        total = torch.zeros(())
        for inputs, targets in parts:
            loss = engine(inputs, targets)
            engine.backward(loss)  # divides by the number of microbatches
            engine.step()
            total += loss.detach() / len(parts)
        bench.done(total)
