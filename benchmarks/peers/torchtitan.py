"""torchtitan's FSDP plan, gradient clipping and loss convention around our decoder's blocks.

Its Trainer needs triton and an accelerator and does not start on a CPU, so the loop is its
trainer's step written out. Embedding, each block, and norm with head are units of FSDP2. Losses are
summed and divided by the global token count, and its `clip_grad_norm_` clips. One patch: gloo
cannot reduce with a factor inside, so FSDP2 is set to sum.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from benchmarks.peers.parts import Parts
from benchmarks.peers.work import Bench, compiled, mean_loss


class Adapted(Parts):
    """The decoder with the attributes that torchtitan's plan looks for."""

    enable_weight_tying = False

    @property
    def tok_embeddings(self) -> nn.Module | None:
        return self.embed

    @property
    def lm_head(self) -> nn.Module | None:
        return self.head


def run(bench: Bench) -> None:
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.distributed.utils import clip_grad_norm_

    work = bench.work
    bench.join()
    model = compiled(Adapted(work.decoder()), work)
    mesh = init_device_mesh("cpu", (bench.world,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    optimizer = work.adamw(model)
    bench.ready()
    for parts in bench.microbatches():
        total = torch.zeros(())
        for index, (inputs, targets) in enumerate(parts):
            model.set_requires_gradient_sync(index == len(parts) - 1)  # type: ignore[operator]
            loss = mean_loss(model(inputs), targets) / len(parts)
            (loss / bench.world).backward()  # shards are summed
            total += loss.detach()
        clip_grad_norm_(model.parameters(), work.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        bench.done(total)
