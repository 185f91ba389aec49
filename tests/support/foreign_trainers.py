"""Checkpoints of other trainers, made by the real libraries, with the losses of what they do next.

    python tests/support/foreign_trainers.py trainer OUT
    python tests/support/foreign_trainers.py deepspeed OUT STAGE      (in an environment with it)
    python tests/support/foreign_trainers.py universal OUT            (of a folder of stage 1)

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
        case "universal":
            make_universal(Path(place))
