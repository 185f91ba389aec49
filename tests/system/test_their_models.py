"""Promises 1 and 2 for a model of transformers, under the real command, and its way back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.events import Evaluated, StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import apart, write_run_file
from tests.support.followed_run import run_with_a_kill
from tests.support.their_models import write_model

STEPS = 12
MODEL = "model: {from: theirs, code: transformers}\n"


def _run_file(root: Path, dropout: float = 0.1, kind: str = "gpt2") -> Path:
    path = write_run_file(root)
    write_model(root / "theirs", kind, dropout)
    lines = path.read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("model:", "  tokenizer:"))]
    text = "\n".join(kept).replace("  steps: 6", f"  steps: {STEPS}") + "\n" + MODEL
    text = text.replace("  microbatch_size: 1", "  microbatch_size: 2")
    text = text.replace("  batch_size: 4", "  batch_size: 12")
    text = text.replace("  processes: 1", "  processes: 1\n  attention: document")
    path.write_text(text + "cluster: {threads_per_worker: 1}\n")
    return path


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    opened = holdfast.open_checkpoint(folder)
    assert opened.step == STEPS
    return {name: opened[name] for name in opened.names}


@pytest.mark.slow
def test_a_model_of_transformers_is_killed_exported_and_branched(tmp_path: Path) -> None:
    run_file, killed, alone = _run_file(tmp_path), tmp_path / "killed", tmp_path / "alone"
    three = (f"folder={killed}", "layout.workers=3")
    found = run_with_a_kill(killed, 5, "train", run_file, *three)
    validations = [e for e in found.events if isinstance(e, Evaluated)]
    assert [e.step for e in validations] == [3, 6, 9, 12]
    assert all(e.bits_per_byte for e in validations)
    apart("train", run_file, f"folder={alone}", "layout.workers=1", deadline=300).succeeds()
    one, other = _tensors(alone), _tensors(killed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    audit = apart("data", "audit", killed)
    assert "none missing, none twice" in audit.out, audit.err

    apart("export", killed, "--to", tmp_path / "out", deadline=300).succeeds()
    _assert_loads(tmp_path / "out", tmp_path / "theirs", killed)
    _assert_same_text(tmp_path / "out", killed)

    apart("branch", killed, "--at", "6", "--to", tmp_path / "twin", deadline=300).succeeds()
    apart("train", tmp_path / "twin" / "run.yaml", deadline=300).succeeds()
    branched = _tensors(tmp_path / "twin")
    assert all(torch.equal(one[name], branched[name]) for name in one)


def _assert_loads(folder: Path, source: Path, run: Path) -> None:
    """from_pretrained gives the logits of the checkpoint's parameters, and the same tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = AutoModelForCausalLM.from_pretrained(source).eval()
    text = "the quick brown fox"
    ids, theirs = (
        AutoTokenizer.from_pretrained(place)(text, return_tensors="pt").input_ids
        for place in (folder, source)
    )
    assert torch.equal(ids, theirs)
    with torch.no_grad():
        before = expected(ids).logits
        parameters = holdfast.open_checkpoint(run).parameters()
        expected.load_state_dict(parameters, strict=False)
        expected.tie_weights()
        assert torch.equal(loaded(ids).logits, expected(ids).logits)
        assert not torch.equal(loaded(ids).logits, before)


def _assert_same_text(folder: Path, run: Path) -> None:
    """`holdfast generate` continues as transformers does with the exported folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = ["--temperature", "0", "--tokens", "8", "--json"]
    done = apart("generate", run, "the quick", *options, deadline=300).succeeds()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the quick", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder)
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = tokenizer.decode(theirs[0, ids.shape[1] :], skip_special_tokens=True)
    assert json.loads(done.out)["text"] == expected


@pytest.mark.slow
def test_zero_agrees_in_float64_and_is_restored_on_another_layout(tmp_path: Path) -> None:
    run_file = _run_file(tmp_path, dropout=0.0)
    wide = "train.precision=float64"
    apart("train", run_file, "layout.workers=1", wide, f"folder={tmp_path / 'alone'}").succeeds()
    one = _tensors(tmp_path / "alone")
    for zero in (1, 2, 3):
        folder, layout = tmp_path / f"zero{zero}", [f"layout.zero={zero}", "layout.dp_shard=2"]
        apart(
            "train",
            run_file,
            wide,
            "train.steps=6",
            f"folder={folder}",
            *layout,
            "train.schedule.steps=12",
            deadline=300,
        ).succeeds()
        apart(
            "train",
            run_file,
            wide,
            f"folder={folder}",
            "train.schedule.steps=12",
            "layout.workers=1",
            deadline=300,
        ).succeeds()
        for name, value in _tensors(folder).items():
            assert (value - one[name]).norm() <= 1e-10 * one[name].norm(), name


@pytest.mark.slow
def test_adapters_and_a_plan_for_tensor_parallelism(tmp_path: Path) -> None:
    """By the folder's own plan, two workers compute the curve of one. Adapters are merged into an
    export and a text."""
    from transformers import AutoModelForCausalLM

    run_file, curves = _run_file(tmp_path, kind="qwen2"), []
    for name, *layout in (("one", "layout.workers=1"), ("two", "layout.workers=2", "layout.tp=2")):
        folder = tmp_path / name
        done = apart("train", run_file, f"folder={folder}", *layout, deadline=300).succeeds()
        events = [record.event for record in read_journal(FolderStore(folder))]
        losses = [event.loss for event in events if isinstance(event, StepDone)]
        validations = [event.loss for event in events if isinstance(event, Evaluated)]
        assert (len(losses), len(validations)) == (STEPS, 4)
        curves.append(losses + validations)
    assert curves[1] == pytest.approx(curves[0], rel=2e-5)
    refused = apart(
        "train", run_file, f"folder={tmp_path / 'x'}", "layout.workers=4", "layout.tp=4"
    )
    refused.refuses_last("layout.tp 4 does not divide the 2 parts of", "use 2")

    tuned = tmp_path / "tuned"
    lora = ("lora.rank=2", "lora.targets=[q_proj,down_proj]")
    apart("train", run_file, f"folder={tuned}", *lora, deadline=300).succeeds()
    apart("export", tuned, "--to", tmp_path / "out").succeeds()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").state_dict()
    changed = {name for name in base if not torch.equal(base[name], exported[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}
    apart("export", tuned, "--to", tmp_path / "adapter", "--format", "peft").succeeds()
    there = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (there["r"], there["target_modules"]) == (2, ["down_proj", "q_proj"])
    kept = holdfast.open_checkpoint(tuned).parameters()
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert written.keys() == {f"base_model.model.{name}.weight" for name in kept}
    done = apart("generate", tuned, "the quick", "--temperature", "0", "--tokens", "5")
    assert (done.code, "the quick" in done.out) == (0, True), done.err
