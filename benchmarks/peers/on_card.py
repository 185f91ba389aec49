"""Tokens a second of another training program on one device, at the shape of a run file.

    python -m benchmarks.peers.on_card NAME RUN_FILE [KEY=VALUE ...]

Each loop has its own model of the shape, random tokens, bf16 as its program computes it, fused
AdamW and clipping to norm 1. The last line that is printed is JSON: steps in seconds.
`benchmarks/runtime/accelerator/rivals.py` compares them with ours.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.config.loading.load import load_config
from holdfast.config.run import RunConfig

NAMES = ("hf-trainer", "torchtitan")


@dataclass
class Clock:
    """Takes the time of steps. steps: to take, the first ones included."""

    device: torch.device
    steps: int
    taken: list[float] = field(default_factory=list)
    _begun: float = 0.0

    def tick(self) -> None:
        """Note that a step has ended, or, at the first call, that one begins."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        now = time.perf_counter()
        if self._begun:
            self.taken.append(now - self._begun)
        self._begun = now


def _tokens(config: RunConfig, samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (samples, config.data.sequence_length)
    return torch.randint(0, config.model.vocab_size, shape, generator=generator)


def hf_trainer(config: RunConfig, clock: Clock) -> None:
    """Hugging Face's Trainer with LlamaForCausalLM, under autocast."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    shape, train = config.model, config.train
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.dim,
            intermediate_size=shape.ffn_dim,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_size,
            max_position_embeddings=shape.max_position,
            tie_word_embeddings=shape.tied_embeddings,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    tokens = _tokens(config, 64)
    rows = [{"input_ids": row, "labels": row} for row in tokens] * 1000

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.tick()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=clock.device.type == "cpu",
            max_steps=clock.steps,
            per_device_train_batch_size=train.microbatch_size,
            gradient_accumulation_steps=train.batch_size // train.microbatch_size,
            bf16=train.precision == "bf16",
            torch_compile=train.compile,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Turns()]).train()


def torchtitan(config: RunConfig, clock: Clock) -> None:
    """torchtitan's Llama 3 model, its blocks compiled as it compiles them, under autocast as its
    trainer has it on one device. Its Trainer reads a dataset of its own, so the loop is its step
    written out."""
    from benchmarks.peers.torchtitan_llama import shaped, without_triton

    has_card = clock.device.type != "cpu"
    if has_card:
        from torchtitan.models.common.rope import CosSinRoPE
    else:
        with without_triton():
            from torchtitan.models.common.rope import CosSinRoPE
    shape, train = config.model, config.train
    with clock.device:
        model = shaped(shape, config.data.sequence_length, CosSinRoPE)
    if shape.tied_embeddings:
        parts: Any = model
        parts.lm_head.weight = parts.tok_embeddings.weight
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(std=0.02) if each.dim() > 1 else each.fill_(1.0)
    compute_loss: Callable[[Tensor, Tensor], Tensor] = _summed_loss
    if train.compile:
        blocks: Any = model
        for block in blocks.layers.values():
            block.compile(fullgraph=True)
        compute_loss = torch.compile(_summed_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    tokens = _tokens(config, train.batch_size).to(clock.device)
    count = tokens.numel()
    clock.tick()
    for _ in range(clock.steps):
        for part in tokens.split(train.microbatch_size):
            with torch.autocast(clock.device.type, torch.bfloat16):
                loss = compute_loss(_logits(model, part), part.roll(-1, 1)) / count
            torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(tokens)
    return found


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def main() -> None:
    name, file, *changes = sys.argv[1:]
    config = load_config(Path(file), [c for c in changes if not c.startswith("steps=")]).config
    steps = next(int(c.removeprefix("steps=")) for c in changes if c.startswith("steps="))
    clock = Clock(torch.device(config.device), steps)
    {"hf-trainer": hf_trainer, "torchtitan": torchtitan}[name](config, clock)
    print(json.dumps({"step_s": clock.taken}), flush=True)


if __name__ == "__main__":
    main()
