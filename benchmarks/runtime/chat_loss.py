"""Loss of a fine-tuning step, next to TRL's on the same rows and weights.

    python -m benchmarks.runtime.chat_loss

A tiny Llama with random weights is written as a folder. `holdfast checkpoint import` brings it into
a run whose only step holds all rows, packed; `holdfast train` gives that step's loss. TRL's
SFTTrainer evaluates the same model on the same rows, unpacked in one padded batch. Needs trl and
datasets, which no other part of Holdfast does: `pip install trl datasets`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from tests.support.chat import CHATML, conversation, tokenizer_folder, write_rows

from holdfast.cli.main import main as holdfast
from holdfast.data.read.chat_templates import BY_KEY
from holdfast.events import StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore

ROWS = 24
LENGTH = 192
RUN = """\
name: loss
folder: {root}/run
device: cpu
data:
  folder: {root}/dataset
  sources:
    - {{kind: jsonl, path: "{root}/rows.jsonl", rows: {form}}}
  attention: document
  sequence_length: {length}
  validation_fraction: 0
  deduplicate: false
  processes: 1
model: {{from: "{folder}"}}
train:
  steps: 1
  batch_size: {samples}
  microbatch_size: 1
  evaluate: {{every: 0}}
layout: {{workers: 1}}
"""


def rows_of(form: str) -> list[dict[str, Any]]:
    """The same replies in another form. The forms of one reply have rows of one turn."""
    if form == "messages":
        return [{"messages": conversation(i, 1 + i % 3)} for i in range(ROWS)]
    talks = [conversation(i) for i in range(ROWS)]
    if form == "prompt of messages":
        return [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in talks]
    return [
        {"prompt": talk[-2]["content"] + "\n", "completion": talk[-1]["content"]} for talk in talks
    ]


def model_folder(folder: Path, template: str) -> Path:
    """A Llama of two layers with random weights, in Hugging Face form."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer_folder(folder, template, pad_token="<|endoftext|>")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=None,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def our_loss(root: Path, folder: Path, rows: list[dict[str, Any]], form: str) -> float:
    """Of the first step of a run that holds all rows."""
    from holdfast.config.loading.load import load_config
    from holdfast.data.prepare.prepare import prepare_dataset
    from holdfast.data.stream.batch import Batches

    root.mkdir()
    write_rows(root / "rows.jsonl", rows)
    kind = "messages" if form == "messages" else "prompt"
    path = root / "run.yaml"

    def write(samples: int) -> None:
        text = RUN.format(root=root, form=kind, folder=folder, samples=samples, length=LENGTH)
        path.write_text(text)

    write(1)
    config = load_config(path).config
    dataset = prepare_dataset(config.data, say=lambda line: None)
    write(Batches(dataset, config.data, config.train, 1).order.sizes[0])
    for command in (
        ["checkpoint", "import", str(path), "--from", str(folder)],
        ["train", str(path)],
    ):
        out = StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            code = holdfast(command)
        if code:
            raise SystemExit(out.getvalue())
    events = [record.event for record in read_journal(FolderStore(root / "run"))]
    return next(event.loss for event in events if isinstance(event, StepDone))


def trl_loss(root: Path, folder: Path, rows: list[dict[str, Any]], form: str) -> float:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(root / "trl"),
        per_device_eval_batch_size=ROWS,
        max_length=None,
        assistant_only_loss=form == "messages",
        packing=False,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    data = Dataset.from_list(rows)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        args=settings,
        train_dataset=data,
        eval_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    return float(trainer.evaluate()["eval_loss"])


def losses() -> Iterator[tuple[str, float, float]]:
    """(form, ours, TRL's)"""
    with tempfile.TemporaryDirectory() as name:
        # Of rows of messages TRL takes the mask from the template, which has to mark replies. Of
        # prompts it trains all that follows, as Holdfast does if the template marks nothing.
        for form, template in (
            ("messages", BY_KEY["chatml"]),
            ("prompt of messages", CHATML),
            ("prompt", CHATML),
        ):
            root, rows = Path(name) / form, rows_of(form)
            folder = model_folder(Path(name) / f"model of {form}", template)
            yield form, our_loss(root, folder, rows, form), trl_loss(root, folder, rows, form)


def main() -> None:
    for form, ours, theirs in losses():
        row = {"rows": form, "holdfast": ours, "trl": theirs, "difference": abs(ours - theirs)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
