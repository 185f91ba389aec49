"""torchtitan's FSDP plan, gradient clipping and loss convention around our decoder's blocks.

Its Trainer needs triton and an accelerator and does not start on a CPU, so the loop is its
trainer's step written out: embedding, each block, and norm with head as units of FSDP2, losses
summed and divided by the global token count, its `clip_grad_norm_`. One patch: gloo cannot
reduce with a factor inside, so FSDP2 is told to sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from benchmarks.peers.work import Bench, compiled, mean_loss
from holdfast.model.decoder import Decoder


class Adapted(nn.Module):
    """Our decoder under the names that torchtitan's plan looks for."""

    enable_weight_tying = False

    def __init__(self, decoder: Decoder):
        super().__init__()
        if decoder.head is None:
            raise ValueError("the adapter is for untied embeddings")
        self.tok_embeddings, self.norm, self.lm_head = decoder.embed, decoder.norm, decoder.head
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(decoder.layers)})
        self.rotary = decoder.rotary

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [B, S] -> logits: [B, S, V]"""
        x = self.tok_embeddings(tokens)
        rotary = self.rotary(tokens.shape[1], None, x)
        for block in self.layers.values():
            x = block(x, rotary, None)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def run(bench: Bench) -> None:
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.distributed.utils import clip_grad_norm_

    work = bench.work
    bench.join()
    decoder = work.decoder()
    compiled(decoder, work)
    groups = work.groups(decoder)  # by our names: taken before the adapter renames
    model = Adapted(decoder)
    names = {id(p): name for name, p in model.named_parameters()}
    order = [[names[id(p)] for p in group["params"]] for group in groups]
    mesh = init_device_mesh("cpu", (bench.world,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    # Sharding replaced the parameters: the same groups, by name.
    sharded = dict(model.named_parameters())
    for group, inside in zip(groups, order, strict=True):
        group["params"] = [sharded[name] for name in inside]
    optimizer = torch.optim.AdamW(
        groups, lr=work.learning_rate, betas=work.betas, eps=work.eps, fused=True
    )
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
