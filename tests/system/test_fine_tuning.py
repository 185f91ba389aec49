"""Supervised fine-tuning by the real commands: a folder of Hugging Face, rows of messages, a kill.

Weights come from a folder, and two runs train on the same rows. One has one worker and no fault.
In the other a worker of two gets SIGKILL, and the run ends with the same bits. The exported
folder has the template, and stops where the rows taught it to.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.events import Evaluated, StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.chat import message_rows, tokenizer_folder, write_rows
from tests.support.checkpoints import newest_tensors
from tests.support.commands import here, within
from tests.support.followed_run import run_with_a_kill

STEPS = 60
RUN_FILE = """\
name: tuned
folder: {root}/run
device: cpu
data:
  folder: {root}/dataset
  sources:
    - {{kind: jsonl, path: "{root}/rows.jsonl", rows: messages}}
  attention: document
  sequence_length: 128
  validation_fraction: 0.2
  processes: 1
model: {{from: "{root}/model"}}
train:
  steps: {steps}
  batch_size: 4
  microbatch_size: 1
  evaluate: {{every: 20, samples: 8}}
  optimizer: {{learning_rate: 0.01, clip_norm: 0.05}}
layout: {{workers: 1}}
checkpoint: {{every_steps: 5}}
cluster: {{threads_per_worker: 1}}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A tiny Llama with random weights in Hugging Face form, rows of messages, and a run file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer_folder(tmp_path / "model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=2,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", message_rows(60))
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE.format(root=tmp_path, steps=STEPS))
    return path


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = run_file.parent
    for name in ("alone", "killed"):
        place = ("--from", root / "model", f"folder={root / name}")
        here(capsys, "checkpoint", "import", run_file, *place).succeeds()
    assert here(capsys, "train", run_file, f"folder={root / 'alone'}").code == 0
    changes = (f"folder={root / 'killed'}", "layout.workers=2")
    run_with_a_kill(root / "killed", 22, "train", run_file, *changes)

    left, right = (newest_tensors(root / run, STEPS) for run in ("alone", "killed"))
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []
    assert _losses(root / "alone") == _losses(root / "killed")
    losses = list(_losses(root / "alone").values())
    assert losses[-1] < 0.5 * losses[0]
    for name in ("alone", "killed"):
        audit = here(capsys, "data", "audit", root / name).succeeds()
        assert f"{4 * STEPS} samples in {STEPS} steps: none missing, none twice" in audit.out

    here(capsys, "export", root / "killed", "--to", root / "out").succeeds()
    _speaks_as_taught(root, capsys)


def _losses(folder: Path) -> dict[tuple[str, int], float]:
    """Of each step and each evaluation; repeated steps must have given the same."""
    found: dict[tuple[str, int], float] = {}
    for record in read_journal(FolderStore(folder)):
        event = record.event
        if isinstance(event, StepDone | Evaluated):
            key = type(event).__name__, event.step
            assert found.setdefault(key, event.loss) == event.loss
    return dict(sorted(found.items()))


def _speaks_as_taught(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exported folder's own template and stop token, and a reply by our command."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root / "out")
    talk = [{"role": "user", "content": "Say red."}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nSay red.<|im_end|>\n<|im_start|>assistant\n"
    config = json.loads((root / "out" / "generation_config.json").read_text())
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    said = here(
        capsys, "generate", root / "killed", "Say red.", "--chat", "--tokens", "40", "--json"
    ).succeeds()
    assert "<|im_" not in json.loads(said.out)["text"]


def test_a_row_is_shown_and_another_template_is_another_dataset(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = within("data", "prepare", run_file, "data.chat.template=chatml").succeeds()
    assert "carries loss in [[ ]]" in prepared.out + prepared.err
    shown = here(capsys, "data", "inspect", run_file, "data.chat.template=chatml")
    assert "<|im_start|>assistant\n[[" in shown.out
    other = here(capsys, "data", "prepare", run_file)
    other.refuses("another data.chat", "name another data.folder")
