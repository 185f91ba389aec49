"""Checkpoints of other trainers, made by the real libraries, with the losses of what they do next.

    python tests/support/foreign_trainers.py trainer OUT
    python tests/support/foreign_trainers.py deepspeed OUT STAGE      (in an environment with it)
    python tests/support/foreign_trainers.py universal OUT            (of a folder of stage 1)
    python tests/support/foreign_trainers.py torchtitan OUT           (in an environment with it)

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

    torch.manual_seed(1)
    with torch.device("meta"):
        model = torchtitan_model().build()
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
    schedule = LRSchedulersContainer.Config(warmup_steps=4, min_lr_factor=0.1)
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
        case "universal":
            make_universal(Path(place))
