"""A base for adapters: a folder in Hugging Face form, with weights that follow from their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.data.read.weight_files import weights_checksum
from holdfast.model.huggingface import export_folder
from holdfast.model.init import initial_tensor
from tests.support.chat import message_rows, tokenizer_folder, write_rows
from tests.support.tiny_training import tiny

STEPS, BATCH, MICROBATCH = 20, 4, 2
RATE, DECAY = 0.01, 0.1
MODEL = {
    "preset": None,
    "layers": 2,
    "dim": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 48,
    "vocab_size": 400,
    "max_position": 256,
    "init_std": 0.2,
}
TARGETS = "[q_proj, v_proj, down_proj]"
RUN = """\
name: tuned
folder: {root}/run
device: cpu
seed: 5
data:
  folder: {root}/dataset
  sources:
    - {{kind: jsonl, path: "{root}/rows.jsonl", rows: messages}}
  attention: document
  sequence_length: 128
  validation_fraction: 0
  processes: 1
model: {{from: "{root}/base"}}
lora: {{rank: 4, alpha: 8, targets: {targets}}}
train:
  steps: {steps}
  batch_size: {batch}
  microbatch_size: {microbatch}
  evaluate: {{every: 0}}
  optimizer: {{learning_rate: {rate}, weight_decay: {decay}, clip_norm: 0}}
  schedule: {{kind: constant, warmup_steps: 0}}
checkpoint: {{every_steps: {steps}}}
cluster: {{threads_per_worker: 1}}
"""
GOLDEN = Path(__file__).parents[1] / "golden" / "expected" / "lora.json"
"""Losses of this run by PEFT and TRL: `python -m benchmarks.runtime.lora_parity --golden`."""


def write_base(folder: Path, model: ModelConfig | None = None, seed: int = 3) -> None:
    """A Llama in Hugging Face form; without a shape of its own, MODEL's with a tokenizer."""
    tokenizer = None
    if model is None:
        tokenizer = folder.with_name("tokenizer")
        tokenizer_folder(tokenizer)
        model = ModelConfig.model_validate(MODEL)
    values = {row.name: initial_tensor(row, seed) for row in decoder_parameters(model)}
    export_folder(folder, model, values, tokenizer)


def write_run(root: Path) -> Path:
    """The base, rows of messages and the run file."""
    write_base(root / "base")
    write_rows(root / "rows.jsonl", message_rows(60))
    path = root / "run.yaml"
    sizes = {"steps": STEPS, "batch": BATCH, "microbatch": MICROBATCH}
    path.write_text(RUN.format(root=root, rate=RATE, decay=DECAY, targets=TARGETS, **sizes))
    return path


def tiny_adapters(folder: Path, **changes: Any) -> RunConfig:
    """`tiny` with adapters of a base in `folder`, which is written if it does not exist."""
    given: dict[str, Any] = {"lora__rank": 4, "lora__base": str(folder), **changes}
    config = tiny(**given)
    if not folder.exists():
        write_base(folder, config.model)
    return tiny(**given, lora__base_checksum=weights_checksum(folder))
