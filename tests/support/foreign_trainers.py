"""Checkpoints of other trainers, made by the real libraries, with the losses of what they do next.

    python tests/support/foreign_trainers.py trainer OUT
    python tests/support/foreign_trainers.py deepspeed OUT STAGE      (in an environment with it)
    python tests/support/foreign_trainers.py universal OUT            (of a folder of stage 1)
    python tests/support/foreign_trainers.py torchtitan OUT           (in an environment with it)
    python tests/support/foreign_trainers.py megatron OUT             (in an environment with it)

A tiny Llama trains 30 steps on random tokens. The checkpoint is that after step 10. OUT has
`batches.npz` and `losses.json` next to it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

STEPS, SAVED, BATCH, LENGTH, VOCABULARY = 30, 10, 4, 12, 32
SHAPE = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
RATE, BETAS, DECAY = 0.01, (0.9, 0.98), 0.05
MEGATRON_SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
MEGATRON_SHAPE += ("num_query_groups", "kv_channels")
MEGATRON_ARGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 4,
    "padded_vocab_size": VOCABULARY,
    "seq_length": LENGTH,
    "max_position_embeddings": 32,
    "rotary_base": 10000,
    "norm_epsilon": 1e-5,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_qkv_bias": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "global_batch_size": BATCH,
    "train_iters": STEPS,
    "clip_grad": 0.0,
    "bf16": False,
}
TITAN_RATE = 0.002  # in float32, a higher rate makes more of each rounding


def batches(out: Path) -> np.ndarray[Any, Any]:
    """[STEPS, BATCH, LENGTH + 1]: the inputs, and the targets one further. `batches.npz` in OUT may
    give other ones, with their vocabulary."""
    if (out / "batches.npz").is_file():
        given = np.load(out / "batches.npz")
        SHAPE["vocab_size"] = int(given.get("vocabulary", VOCABULARY))
        return np.array(given["tokens"], dtype=np.int64)
    return np.random.default_rng(7).integers(0, VOCABULARY, (STEPS, BATCH, LENGTH + 1))


def train_with_trainer(out: Path) -> None:
    import torch
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.set_num_threads(1)
    torch.manual_seed(1)
    given = batches(out)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).double()
    rows = given.reshape(-1, given.shape[-1])
    targets = rows
    if (out / "batches.npz").is_file():  # the first of a row has no input before it
        targets = np.load(out / "batches.npz")["labels"].reshape(rows.shape)
    data = [
        {"input_ids": torch.tensor(row), "labels": torch.tensor(labels)}
        for row, labels in zip(rows, targets, strict=True)
    ]

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

    arguments = TrainingArguments(
        str(out / "work"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        lr_scheduler_type="cosine",
        warmup_steps=4,
        max_grad_norm=1.0,
        save_steps=SAVED,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    losses: list[float] = []

    class Kept(InOrder):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            losses.append(float(loss))
            return loss

    trainer = Kept(model, arguments, train_dataset=data)
    trainer.train()
    shutil.copytree(out / "work" / f"checkpoint-{SAVED}", out / "checkpoint")
    shutil.rmtree(out / "work")
    _write(out, losses, transformers=transformers.__version__, torch=torch.__version__)


def train_with_deepspeed(out: Path, stage: int) -> None:
    environ = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + stage)}
    command = [sys.executable, __file__, "rank", str(out), str(stage)]
    ranks = [
        subprocess.Popen(command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    for script in out.glob("checkpoint/*.py"):
        script.unlink()


def train_rank(out: Path, stage: int) -> None:
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)
    settings = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    losses = []
    for step, rows in enumerate(batches(out)):
        if step == SAVED:
            engine.save_checkpoint(str(out / "checkpoint"), tag=f"global_step{step}")
        mine = torch.from_numpy(rows[rank * BATCH // 2 : (rank + 1) * BATCH // 2])
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().double().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / 2)
    if rank == 0:
        _write(out, losses, deepspeed=deepspeed.__version__, torch=torch.__version__)


def train_with_torchtitan(out: Path) -> None:
    """Train with two ranks. torchtitan's Trainer asks a GPU for its memory. So its parts are called
    here, in the order of its train_step: model, FSDP, optimizer, scheduler, loader, checkpoints."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    command = [sys.executable, __file__, "titan-rank", str(out)]
    ranks = [
        subprocess.Popen(command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]
    shutil.move(out / "work" / f"step-{SAVED}", out / "checkpoint")
    shutil.move(out / "work" / "config.json", out / "checkpoint")
    shutil.rmtree(out / "work")


def torchtitan_model() -> Any:
    """The configuration of torchtitan's Llama 3 of this shape; FlexAttention needs a GPU."""
    from functools import partial

    from torch import nn
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

    dim, heads = int(SHAPE["hidden_size"]), int(SHAPE["num_attention_heads"])
    random = {"weight": partial(nn.init.normal_, std=0.3)}
    ones = {"weight": nn.init.ones_}
    rope = ComplexRoPE.Config(dim=dim // heads, max_seq_len=32, theta=10000.0, scaling="none")
    norm = RMSNorm.Config(normalized_shape=dim, param_init=ones)
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm,
            ffn_norm=norm,
            attention=make_gqa_config(
                dim=dim,
                n_heads=heads,
                n_kv_heads=int(SHAPE["num_key_value_heads"]),
                wqkv_param_init=random,
                wo_param_init=random,
                inner_attention=ScaledDotProductAttention.Config(),
                fuse_qkv=True,  # as all flavors of its Llama 3 have it
                rope=rope,
            ),
            feed_forward=make_ffn_config(
                dim=dim,
                hidden_dim=int(SHAPE["intermediate_size"]),
                w1_param_init=random,
                w2w3_param_init=random,
            ),
        )
        for _ in range(int(SHAPE["num_hidden_layers"]))
    ]
    size = int(SHAPE["vocab_size"])
    return Llama3Model.Config(
        dim=dim,
        vocab_size=size,
        tok_embeddings=Embedding.Config(num_embeddings=size, embedding_dim=dim, param_init=random),
        norm=norm,
        lm_head=Linear.Config(in_features=dim, out_features=size, param_init=random),
        layers=layers,
    )


def _write_titan_job(out: Path, training: Any, schedule: Any) -> None:
    """Write the job's configuration as torchtitan does for `debug.save_config_file`."""
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config.configs import DebugConfig
    from torchtitan.models.llama3 import parallelize_llama
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

    spec = ModelSpec(
        name="llama3",
        flavor="tiny",
        model=torchtitan_model(),
        parallelize_fn=parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    Trainer.Config(
        model_spec=spec,
        dump_folder=str(out / "work"),
        optimizer=default_adamw(TITAN_RATE, betas=BETAS, weight_decay=DECAY),
        lr_scheduler=schedule,
        training=training,
        debug=DebugConfig(save_config_file="config.json"),
    ).maybe_log()


def train_titan_rank(out: Path) -> None:
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"  # else torchtitan takes CUDA
    from importlib.metadata import version

    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.llama3 import parallelize_llama

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, given = torch.distributed.get_rank(), batches(out)
    training = TrainingConfig(
        local_batch_size=BATCH // 2,
        seq_len=given.shape[-1] - 1,
        steps=STEPS,
        mixed_precision_param="float32",
        global_batch_size=BATCH,
        disable_cuda_graphs=True,
    )
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, 2)
    dims.build_mesh()

    class Rows(torch.utils.data.IterableDataset):  # type: ignore[misc]
        """This rank's rows; its state is called as torchtitan's text dataset calls it."""

        sample_idx = 0

        def __iter__(self) -> Any:
            for step in given:
                for row in step[rank * BATCH // 2 : (rank + 1) * BATCH // 2]:
                    self.sample_idx += 1
                    yield {"input": torch.from_numpy(row[:-1])}, torch.from_numpy(row[1:])

        def state_dict(self) -> dict[str, Any]:
            return {"sample_idx": self.sample_idx, "epoch": 0, "inputs_buffer": []}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.sample_idx = state["sample_idx"]

    class TrainState:
        step, ntokens_seen = 0, 0

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.step, "ntokens_seen": self.ntokens_seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    schedule = LRSchedulersContainer.Config(warmup_steps=4, min_lr_factor=0.1)
    torch.manual_seed(1)
    with torch.device("meta"):
        model = torchtitan_model().build()
    if rank == 0:
        _write_titan_job(out, training, schedule)
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder=str(out),
    )
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no factor before a sum
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    optimizers = default_adamw(TITAN_RATE, betas=BETAS, weight_decay=DECAY)
    optimizers.implementation = "for-loop"
    optimizer = optimizers.build(model_parts=[model])
    scheduler = schedule.build(optimizers=optimizer, training_steps=STEPS)
    loader = ParallelAwareDataloader(Rows(), rank, 2, batch_size=BATCH // 2)
    state = TrainState()
    checkpoints = CheckpointManager.Config(
        enable=True, interval=SAVED, folder="work", last_save_model_only=False
    ).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizer,
        lr_schedulers=scheduler,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=str(out),
    )
    loss_of = CrossEntropyLoss.Config().build(compile_config=CompileConfig())
    data, losses = iter(loader), []
    for step in range(1, STEPS + 1):
        state.step = step
        optimizer.zero_grad()
        inputs, labels = next(data)
        state.ntokens_seen += labels.numel()
        count = torch.tensor(labels.numel())
        torch.distributed.all_reduce(count)
        loss, _ = loss_of(model(inputs["input"]), labels, count)
        loss.backward()
        dist_utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
        optimizer.step()
        scheduler.step()
        total = loss.detach().double()
        torch.distributed.all_reduce(total)
        losses.append(float(total))
        if step == SAVED:
            checkpoints.save(step)
    if rank == 0:
        _write(out, losses, torchtitan=version("torchtitan"), torch=torch.__version__)
    torch.distributed.destroy_process_group()


def train_with_megatron(out: Path) -> None:
    """Train with two tensor-parallel ranks. All but `args`, which Megatron's own script keeps next
    to it, is made by megatron-core: model, optimizer, schedule and checkpoint."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    command = [sys.executable, __file__, "megatron-rank", str(out)]
    ranks = [
        subprocess.Popen(command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0]


def train_megatron_rank(out: Path) -> None:
    import argparse
    import contextlib
    from importlib.metadata import version

    import torch
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.set_num_threads(1)
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None

    class OnCpu(torch.overrides.TorchFunctionMode):
        """What megatron makes on "cuda" lies on the CPU."""

        def __torch_function__(
            self, called: Any, _: Any, given: Any = (), named: Any = None
        ) -> Any:
            named = dict(named or {})
            if str(named.get("device")).startswith("cuda"):
                named["device"] = "cpu"
            return given[0] if called is torch.Tensor.cuda else called(*given, **named)

    OnCpu().__enter__()
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    parallel_state.initialize_model_parallel(2)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.fork = lambda *_: contextlib.nullcontext()  # it holds states of GPUs; no dropout here
    torch.manual_seed(1)
    config = TransformerConfig(
        **{key: MEGATRON_ARGS[key] for key in MEGATRON_SHAPE},
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=2,
        gradient_accumulation_fusion=False,
        init_method_std=0.3,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=32,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=False,
        fp16_lm_cross_entropy=False,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=TITAN_RATE,
        min_lr=TITAN_RATE / 10,
        weight_decay=DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=1e-8,
        clip_grad=0.0,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=TITAN_RATE,
        min_lr=TITAN_RATE / 10,
        lr_warmup_steps=4 * BATCH,
        lr_decay_steps=STEPS * BATCH,
        lr_decay_style="cosine",
        start_wd=DECAY,
        end_wd=DECAY,
        wd_incr_steps=STEPS * BATCH,
        wd_incr_style="constant",
    )
    losses = []
    for step, rows in enumerate(batches(out), 1):
        tokens = torch.from_numpy(rows)
        positions = torch.arange(tokens.shape[1] - 1).expand(BATCH, -1)
        length = tokens.shape[1] - 1
        mask = torch.ones(1, 1, length, length).triu(1).bool()
        optimizer.zero_grad()
        model.zero_grad_buffer()
        loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        scheduler.step(BATCH)
        losses.append(float(loss.detach().double()))
        if step == SAVED:
            folder = out / "checkpoint" / f"iter_{step:07}"
            folder.mkdir(parents=True, exist_ok=True)
            sharded = model.module.sharded_state_dict()
            args = argparse.Namespace(
                **MEGATRON_ARGS,
                attention_backend=AttnBackend.auto,
                consumed_train_samples=step * BATCH,
            )
            state = {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": step,
                "model": sharded,
                "optimizer": optimizer.sharded_state_dict(sharded),
                "opt_param_scheduler": scheduler.state_dict(),
            }
            dist_checkpointing.save(state, str(folder))
    if rank == 0:
        (out / "checkpoint" / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
        _write(out, losses, megatron_core=version("megatron-core"), torch=torch.__version__)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def make_universal(out: Path) -> None:
    folder = out / "checkpoint" / f"global_step{SAVED}"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(folder), "--output_folder", f"{folder}_universal"]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    subprocess.run(command, check=True, env=os.environ | {"DS_ACCELERATOR": "cpu"})


def _write(out: Path, losses: list[float], **versions: str) -> None:
    if not (out / "batches.npz").is_file():
        np.savez_compressed(out / "batches.npz", tokens=batches(out).astype(np.uint8))
    (out / "losses.json").write_text(json.dumps({"losses": losses, "versions": versions}))


if __name__ == "__main__":
    kind, place, *more = sys.argv[1:]
    match kind:
        case "trainer":
            train_with_trainer(Path(place))
        case "deepspeed":
            train_with_deepspeed(Path(place), int(more[0]))
        case "rank":
            train_rank(Path(place), int(more[0]))
        case "torchtitan":
            train_with_torchtitan(Path(place))
        case "titan-rank":
            train_titan_rank(Path(place))
        case "megatron":
            train_with_megatron(Path(place))
        case "megatron-rank":
            train_megatron_rank(Path(place))
        case "universal":
            make_universal(Path(place))
