"""Losses and adapters of a LoRA run, next to PEFT's and TRL's on the same batches and weights.

    python -m benchmarks.runtime.lora_parity             prints one row for each of PEFT and TRL
    python -m benchmarks.runtime.lora_parity --golden
        prints what tests/golden/expected/lora.json holds

A tiny Llama with random weights is written as a folder, and `holdfast train` trains adapters of it
on packed rows of chat data. The reference reads the same batches out of the prepared dataset, and
the same initial adapters out of a PEFT folder. PEFT is trained by a plain loop of torch, TRL by its
SFTTrainer. Needs both, which no other part of Holdfast does: `pip install peft trl datasets`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from tests.support.adapters import BATCH, DECAY, MICROBATCH, RATE, STEPS, write_run
from tests.support.commands import within
from tests.support.models import document_mask
from torch import Tensor

from holdfast.config.loading.load import load_config
from holdfast.config.run import RunConfig
from holdfast.core.sharding.adapters import lora_parameters
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset import Dataset
from holdfast.events import StepDone
from holdfast.model.documents import document_positions
from holdfast.model.init import initial_tensor
from holdfast.model.peft_folder import read_adapter, write_adapter
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore

BETAS = (0.9, 0.95)


def our_losses(path: Path) -> list[float]:
    """Train the run, and return the loss of each step."""
    done = within("train", path)
    if done.code:
        raise SystemExit(done.err)
    return losses_of(path.parent / "run")


def losses_of(folder: Path) -> list[float]:
    events = [record.event for record in read_journal(FolderStore(folder))]
    found = {event.step: event.loss for event in events if isinstance(event, StepDone)}
    return [found[step] for step in sorted(found)]


def our_adapter(path: Path, to: Path) -> dict[str, Tensor]:
    """The run's adapters, by way of an export."""
    done = within("export", path, "--to", to, "--format", "peft")
    if done.code:
        raise SystemExit(done.err)
    config = load_config(path).config
    return read_adapter(to, config.model, config.lora)


def initial_adapter(config: RunConfig, folder: Path) -> None:
    """A PEFT folder with the adapters that the run begins with."""
    rows = lora_parameters(config.model, config.lora)
    values = {row.name: initial_tensor(row, config.seed) for row in rows}
    write_adapter(folder, config.model, config.lora, values, {})


def peft_model(path: Path, folder: Path) -> Any:
    """The base with these adapters, which are trained."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(
        path.parent / "base", dtype=torch.float32, attn_implementation="sdpa"
    )
    return PeftModel.from_pretrained(base, folder, is_trainable=True)


def microbatches(config: RunConfig, step: int) -> list[dict[str, Tensor]]:
    """The run's own microbatches, as a model of transformers takes them: with one more token, whose
    labels it shifts."""
    batches = Batches(Dataset.open(config.data.folder), config.data, config.train, config.seed)
    return [_as_theirs(batches.microbatch(step, i)) for i in range(batches.microbatches(step))]


def _as_theirs(read: Any) -> dict[str, Tensor]:
    inputs, targets = torch.from_numpy(read.inputs), torch.from_numpy(read.targets)
    documents = torch.from_numpy(read.documents)
    documents = torch.cat((documents, documents[:, -1:]), 1)
    return {
        "input_ids": torch.cat((inputs, targets[:, -1:].clamp_min(0)), 1),
        "labels": torch.cat((torch.full_like(targets[:, :1], -100), targets), 1),
        "attention_mask": document_mask(documents),
        "position_ids": document_positions(documents),
    }


def train_peft(path: Path, root: Path) -> tuple[list[float], Path]:
    """Train PEFT's model by a plain loop. Return the losses and the folder of the adapters."""
    config = load_config(path).config
    initial_adapter(config, root / "start")
    model = peft_model(path, root / "start")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, BETAS, 1e-8, DECAY)
    losses = []
    for step in range(1, STEPS + 1):
        batch = microbatches(config, step)
        tokens = sum(int((m["labels"] != -100).sum()) for m in batch)
        total = 0.0
        for one in batch:
            loss = model(**one, num_items_in_batch=tokens).loss
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    model.save_pretrained(root / "end")
    return losses, root / "end"


def train_trl(path: Path, root: Path) -> tuple[list[float], Path]:
    """The same by TRL's SFTTrainer, whose samples are numbers of our microbatches."""
    from datasets import Dataset as Rows
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    config = load_config(path).config
    initial_adapter(config, root / "start")
    model = peft_model(path, root / "start")
    numbers = list(range(STEPS * BATCH // MICROBATCH))
    known = [one for step in range(1, STEPS + 1) for one in microbatches(config, step)]
    settings = SFTConfig(
        output_dir=str(root / "trainer"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=BATCH // MICROBATCH,
        max_steps=STEPS,
        logging_steps=1,
        logging_nan_inf_filter=False,
        max_grad_norm=0.0,
        disable_tqdm=True,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], RATE, BETAS, 1e-8, DECAY
    )
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1)
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Rows.from_dict({"number": numbers, "input_ids": [[0] for _ in numbers]}),
        data_collator=lambda rows: known[rows[0]["number"]],
        processing_class=AutoTokenizer.from_pretrained(path.parent / "base"),
        optimizers=(optimizer, constant),
    )
    with redirect_stdout(StringIO()):  # its log
        trainer.train()
    model.save_pretrained(root / "end")
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], root / "end"


def rows(root: Path) -> Iterator[dict[str, Any]]:
    """A row for each reference: the largest differences."""
    path = write_run(root)
    config, ours = load_config(path).config, our_losses(path)
    adapter = our_adapter(path, root / "ours")
    for name, train in (("peft", train_peft), ("trl", train_trl)):
        losses, end = train(path, root / name)
        theirs = read_adapter(end, config.model, config.lora)
        yield {
            "reference": name,
            "version": version(name),
            "steps": STEPS,
            "loss_first": ours[0],
            "loss_last": ours[-1],
            "loss_difference": max(abs(a - b) for a, b in zip(ours, losses, strict=True)),
            "adapter_difference": max(
                float((adapter[key] - theirs[key]).abs().max()) for key in adapter
            ),
            "losses": losses,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--golden", action="store_true")
    is_golden = parser.parse_args().golden
    with tempfile.TemporaryDirectory() as name:
        found = list(rows(Path(name)))
    if is_golden:
        golden = {f"{row['reference']} {row['version']}": row["losses"] for row in found}
        print(json.dumps(golden, indent=1))
        return
    for row in found:
        print(json.dumps({key: value for key, value in row.items() if key != "losses"}), flush=True)


if __name__ == "__main__":
    main()
