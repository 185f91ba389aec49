"""One rank of one loop: `python -m benchmarks.peers.worker NAME RANK WORLD MEETING WORK`.

Orders come as JSON lines on standard input, answers go to standard output; whatever the
framework prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

NAMES: dict[str, tuple[str, dict[str, object]]] = {
    "holdfast": ("ours", {}),
    "holdfast-zero1": ("ours", {"shards": 2, "zero": 1}),
    "holdfast-zero2": ("ours", {"shards": 2, "zero": 2}),
    "holdfast-zero2-step": ("ours", {"shards": 2, "zero": 2, "zero2_reduce": "step"}),
    "holdfast-zero3": ("ours", {"shards": 2}),
    "holdfast-tp2": ("ours", {"tp": 2}),
    "holdfast-tp2-whole": ("ours", {"tp": 2, "sequence_parallel": False}),
    "holdfast-cp2": ("ours", {"cp": 2}),
    "holdfast-cp2-ring": ("ours", {"cp": 2, "cp_method": "ring"}),
    "holdfast-cp2-ulysses": ("ours", {"cp": 2, "cp_method": "ulysses"}),
    "holdfast-ep2": ("ours", {"shards": 2, "ep": 2}),
    "holdfast-ep2-copies": ("ours", {"shards": 2, "ep": 2, "copies": "auto"}),
    "holdfast-pp2": ("ours", {"pp": 2}),
    "holdfast-pp2-gpipe": ("ours", {"pp": 2, "schedule": "gpipe"}),
    **{
        f"holdfast-pp2-{name}": ("ours", {"pp": 2, "schedule": name})
        for name in ("interleaved", "zb-h1", "zbv", "dualpipev")
    },
    "profile": ("profile", {}),
    "rebuild": ("rebuild", {}),
    "recover": ("recover", {}),
    "floor-dp2": ("floor", {}),
    "floor-tp2": ("floor", {"tp": 2}),
    "floor-pp2": ("floor", {"pp": 2}),
    "tensor": ("tensor", {}),
    "context": ("context", {}),
    "ulysses": ("ulysses", {}),
    "experts": ("experts", {}),
    "pipeline-1f1b": ("pipeline", {"schedule": "1f1b"}),
    "pipeline-gpipe": ("pipeline", {"schedule": "gpipe"}),
    **{
        f"pipeline-{name}": ("pipeline", {"schedule": name})
        for name in ("interleaved", "zb-h1", "zbv", "dualpipev")
    },
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "fsdp-zero2": ("fsdp", {"zero": 2}),
    "accelerate": ("accelerate", {}),
    "hf-trainer": ("hf_trainer", {}),
    "deepspeed-zero2": ("deepspeed", {"stage": 2}),
    "deepspeed-zero3": ("deepspeed", {"stage": 3}),
    "deepspeed-tp2": ("deepspeed.tensor", {}),
    "deepspeed-pp2": ("deepspeed.pipeline", {"stage": 0}),
    "torchtitan": ("torchtitan", {}),
    "torchtitan-tp2": ("torchtitan_llama", {}),
    "torchtitan-pp2": ("torchtitan_llama.pipeline", {}),
}


def main() -> None:
    name, rank, world, meeting, work = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # What torchrun would set; accelerate, the Trainer and DeepSpeed look at it.
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "MASTER_PORT": "0",
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "ACCELERATE_USE_CPU": "true",
    }
    import torch

    from benchmarks.peers.work import Bench, Work

    torch.set_num_threads(1)
    name, _, layouts = name.partition(":")
    module, settings = NAMES[name]
    settings |= {"layouts": layouts} if layouts else {}
    module, _, function = module.partition(".")
    run: Callable[[Bench], None] = getattr(
        import_module(f"benchmarks.peers.{module}"), function or "run"
    )
    bench = Bench(Work(**json.loads(work)), int(rank), int(world), meeting, replies)
    partial(run, **settings)(bench)


if __name__ == "__main__":
    main()
