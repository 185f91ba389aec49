"""torchtitan's own Llama 3 model with our weights, under its plan for tensor and sequence
parallelism or in its pipeline.

Two changes let it run on a CPU. Its language models no longer offer plain causal attention, so the
class for it (`ScaledDotProductAttention`) is named by hand with the kernels that a CPU has. Its
`parallelize_llama` always adds FSDP2 over one rank, which is set to sum (gloo cannot reduce with a
factor inside).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend

from benchmarks.peers.work import Bench, Work
from holdfast.config.sections.model import ModelConfig

RENAMED = {
    "embed": "tok_embeddings",
    "head": "lm_head",
    "attention.q": "attention.qkv_linear.wq",
    "attention.k": "attention.qkv_linear.wk",
    "attention.v": "attention.qkv_linear.wv",
    "attention.o": "attention.wo",
    "ffn.gate": "feed_forward.w1",
    "ffn.down": "feed_forward.w2",
    "ffn.up": "feed_forward.w3",
}


@contextmanager
def without_triton() -> Iterator[None]:
    """Replace triton by a stand-in while torchtitan is imported. Its package imports triton for
    kernels of experts, and this model has none. (torch itself has looked for triton before.)"""
    importlib.import_module("torch._inductor.compile_fx")
    names = ("triton", "triton.language")
    sys.modules |= {name: MagicMock() for name in names}
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def their_name(name: str) -> str:
    """What torchtitan calls a parameter of ours."""
    for ours, theirs in RENAMED.items():
        if name == f"{ours}.weight" or name.endswith(f".{ours}.weight"):
            return name.replace(f"{ours}.weight", f"{theirs}.weight")
    return name


def build(work: Work) -> nn.Module:
    """Its model of our shape, holding our weights."""
    from torchtitan.models.common.rope import CosSinRoPE

    model = shaped(work.config, work.sequence, CosSinRoPE)  # pairs as ours are: by halves
    weights = {their_name(name): value for name, value in work.decoder().state_dict().items()}
    model.load_state_dict(weights)
    return model


def shaped(shape: ModelConfig, sequence: int, rope: Any) -> nn.Module:
    """Its model of some shape, its weights yet to come. rope: its class for rotary positions."""
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    ScaledDotProductAttention.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    start = {"weight": nn.init.zeros_}

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=shape.dim, eps=shape.norm_eps, param_init=start)

    def block() -> Any:
        return Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=shape.dim,
                n_heads=shape.heads,
                n_kv_heads=shape.kv_heads,
                wqkv_param_init=start,
                wo_param_init=start,
                inner_attention=ScaledDotProductAttention.Config(),
                rope=rope.Config(dim=shape.head_size, max_seq_len=sequence, theta=shape.rope_theta),
            ),
            feed_forward=make_ffn_config(
                dim=shape.dim, hidden_dim=shape.ffn_dim, w1_param_init=start, w2w3_param_init=start
            ),
        )

    config = Llama3Model.Config(
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=shape.dim, param_init=start
        ),
        norm=norm(),
        lm_head=Linear.Config(
            in_features=shape.dim, out_features=shape.vocab_size, param_init=start
        ),
        layers=[block() for _ in range(shape.layers)],
    )
    set_llama3_sharding_config(config, enable_sp=True)
    model: nn.Module = config.build()
    return model


@dataclass
class Titan:
    """Its settings and functions, imported once."""

    parallelism: Any
    dims: Any
    parallelize: Callable[..., nn.Module]
    loss: Callable[..., Any]
    arguments: dict[str, Any]


def prepare(bench: Bench, **degrees: Any) -> Titan:
    """Its mesh for some degrees, and what its functions are called with."""
    import torchtitan.distributed.utils as titan
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig

    with without_triton():
        from torchtitan.distributed import ParallelDims, parallel_dims
        from torchtitan.models.llama3.parallelize import parallelize_llama
    parallel_dims.device_type = "cpu"  # it takes "cuda" where it finds no accelerator
    bench.join()
    # Its default back-end wants an FSDP2 newer than this torch's.
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **degrees)
    titan.set_spmd_backend(parallelism.spmd_backend)
    dims = ParallelDims.from_config(parallelism, bench.world)
    dims.build_mesh()
    work = bench.work

    def parallelize(*args: Any, **kwargs: Any) -> nn.Module:
        made: nn.Module = parallelize_llama(*args, **kwargs)
        for module in made.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return made

    arguments = {
        "parallel_dims": dims,
        "parallelism": parallelism,
        "ac_config": None,
        "dump_folder": "",
        "training": TrainingConfig(mixed_precision_param="float32", local_batch_size=work.batch),
        "compile_config": CompileConfig(enable=False),
    }
    config = CrossEntropyLoss.Config(global_vocab_size=work.vocabulary)
    return Titan(parallelism, dims, parallelize, CrossEntropyLoss(config), arguments)


def run(bench: Bench) -> None:
    """Tensor and sequence parallelism."""
    titan = prepare(bench, tensor_parallel_degree=bench.world)
    model = titan.parallelize(build(bench.work), **titan.arguments)
    optimizer = adamw(bench.work, model)
    tokens = torch.tensor(float(bench.work.batch * bench.work.sequence))
    bench.ready()
    for parts in bench.microbatches(replicas=1):
        total = torch.zeros(())
        for inputs, targets in parts:
            loss, _ = titan.loss(model(inputs), targets, tokens)
            loss.backward()
            total += loss.detach()
        finish(bench.work, model, optimizer)
        bench.done(total)


def pipeline(bench: Bench) -> None:
    """Its `pipeline_llm`: 1F1B over torch's stages, which find their shapes by asking."""
    from torchtitan.distributed.pipeline_parallel import pipeline_llm

    work = bench.work
    titan = prepare(
        bench,
        pipeline_parallel_degree=bench.world,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=work.batch // work.microbatches,
    )
    model = build(work)
    tokens = torch.tensor(float(work.batch * work.sequence))
    schedule, (part,), first, last = pipeline_llm(
        model,
        device=torch.device("cpu"),
        model_config=model.config,
        parallelize_fn=titan.parallelize,
        **titan.arguments,
        loss_fn=lambda out, targets: titan.loss(out, targets, tokens),
    )
    optimizer = adamw(work, part)
    bench.ready()
    for parts in bench.microbatches(replicas=1):
        losses: list[Tensor] = []
        inputs = [torch.cat([x for x, _ in parts])] if first else []
        targets = torch.cat([y for _, y in parts]) if last else None
        schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        finish(work, part, optimizer, titan.dims.get_mesh("pp"))
        bench.done(torch.stack(losses).sum().detach() if last else None)


def finish(
    work: Work, model: nn.Module, optimizer: torch.optim.Optimizer, pp: DeviceMesh | None = None
) -> None:
    """Its clipping, and the update."""
    from torchtitan.distributed.utils import clip_grad_norm_

    clip_grad_norm_(model.parameters(), work.clip_norm, foreach=True, pp_mesh=pp)
    optimizer.step()
    optimizer.zero_grad()


def adamw(work: Work, model: nn.Module) -> torch.optim.AdamW:
    """As `Work.adamw`: in this model too, matrices decay and gains do not."""
    groups = [
        {
            "params": [p for p in model.parameters() if (p.ndim == 2) == decay],
            "weight_decay": work.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    return torch.optim.AdamW(
        groups, lr=work.learning_rate, betas=work.betas, eps=work.eps, fused=True
    )
