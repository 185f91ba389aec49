"""Hugging Face's Trainer, with what a run does not need (logging, saving, bars) switched off."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler

from benchmarks.peers.work import Bench, MeanLoss, Work, compiled


class Samples(Dataset[dict[str, Tensor]]):
    """The work's samples in order, over and over. With several microbatches a rank, samples are
    arranged so that each rank's are those that the other loops give it."""

    def __init__(self, work: Work, world: int):
        share = work.batch // world
        size = share // work.microbatches
        order = [
            rank * share + part * size + i
            for part in range(work.microbatches)
            for rank in range(world)
            for i in range(size)
        ]
        self._samples = work.tokens[:, order].flatten(0, 1)

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._samples[index % len(self._samples)]
        return {"inputs": row[:-1], "targets": row[1:]}


def run(bench: Bench) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import Trainer, TrainerCallback, TrainingArguments

    work = bench.work
    bench.join()

    class Turns(TrainerCallback):  # type: ignore[misc]
        loss = torch.zeros(())

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            bench.ready()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            loss, self.loss = self.loss, torch.zeros(())
            bench.done(loss)

    turns = Turns()

    class Loop(Trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any
        ) -> Tensor:
            loss: Tensor = model(**inputs)
            turns.loss = turns.loss + loss.detach() / work.microbatches
            return loss

        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    model = MeanLoss(compiled(work.decoder(), work))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=10**6,
            per_device_train_batch_size=work.batch // bench.world // work.microbatches,
            gradient_accumulation_steps=work.microbatches,
            lr_scheduler_type="constant",
            learning_rate=work.learning_rate,
            max_grad_norm=work.clip_norm,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_num_workers=0,
            ddp_find_unused_parameters=False,
        )
        if arguments.world_size != bench.world:
            raise RuntimeError(f"the Trainer sees {arguments.world_size} processes")
        Loop(
            model=model,
            args=arguments,
            train_dataset=Samples(work, bench.world),
            callbacks=[turns],
            optimizers=(work.adamw(model), None),
        ).train()
