"""What a task says of itself for other programs: names of an export, FLOPs; and text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from holdfast.config.sections.task import TaskConfig
from holdfast.core.flops import run_flops_per_token
from holdfast.errors import TaskError, UserError
from holdfast.model.generate import generate
from holdfast.report.history.history import build_history
from holdfast.report.history.summary import utilisations
from holdfast.tasks.task.module import known_flops
from holdfast.tasks.task.task_export import export_task
from holdfast.tasks.transformers.huggingface_export import CausalLMSession, open_causal_lm
from tests.support.journal_builder import lossy_run
from tests.support.marks import in_campaign
from tests.support.own_tasks import MODULE, task_config
from tests.support.sample_tasks import WIDTH, Named
from tests.support.their_models import write_model

COST = 6.0 * 5 * WIDTH * WIDTH


class Weights:
    """Parameters in memory, as a checkpoint gives them."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self._values = values
        self.names: Sequence[str] = tuple(values)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._values[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._values[name].dtype

    def box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        value = self._values[name]
        return value[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]


def _weights() -> Weights:
    return Weights({name: p.detach() for name, p in Named().model().named_parameters()})


def _export(to: Path, **how: Any) -> Weights:
    weights = _weights()
    settings = {"dtype": None, "shard_bytes": 10**9} | how
    export_task(to, TaskConfig(name=f"{MODULE}:Named"), weights, **settings)
    return weights


def test_a_task_is_exported_under_its_own_names(tmp_path: Path) -> None:
    weights = _export(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    kept = [name for name in weights.names if not name.startswith("unused.")]
    assert found.keys() == {f"net.{name}" for name in kept}
    for name in kept:
        complete = weights.box(name, [0] * len(weights.shape(name)), weights.shape(name))
        assert torch.equal(found[f"net.{name}"], complete)


def test_a_large_export_has_several_files_and_an_index(tmp_path: Path) -> None:
    _export(tmp_path / "out", dtype=torch.bfloat16, shard_bytes=600)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    for file in files:
        assert all(t.dtype == torch.bfloat16 for t in load_file(tmp_path / "out" / file).values())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda self, name: "one", "'one' for inner.0.weight, as for another one"),
        (lambda self, name: 3, "exported() returned 3 for first.weight; return a name"),
        (lambda self, name: None, "exported() returned None for each parameter"),
        (lambda self, name: name.missing, "exported() failed: AttributeError"),
    ],
)
def test_names_that_cannot_be_written_are_refused(
    answer: Callable[[Any, str], Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Named, "exported", answer)
    with pytest.raises(TaskError) as refused:
        _export(tmp_path / "out")
    assert words in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_flops_of_a_task_give_utilisation() -> None:
    config = task_config("Named", precision="bf16")
    assert run_flops_per_token(config) == {"task": COST}
    run = lossy_run()
    resolved = {"config": config.model_dump(mode="json")}
    history = build_history(run.records)
    (found,) = utilisations(history, resolved, "NVIDIA H100 80GB HBM3")
    assert found.convention == "task"
    assert found.ratio == pytest.approx(history.tokens_per_second * COST / found.peak)
    assert run_flops_per_token(task_config("Tied")) == {}
    resolved = {"config": task_config("Tied", precision="bf16").model_dump(mode="json")}
    assert utilisations(history, resolved, "NVIDIA H100 80GB HBM3") == ()


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "many", True])
def test_flops_that_are_none_are_refused(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Named, "flops", lambda self: value)
    with pytest.raises(TaskError, match=r"flops\(\) returned .*; return a number above 0, or None"):
        known_flops(Named())


@pytest.mark.parametrize("kind", ["gpt2", in_campaign("llama")])
def test_a_model_of_transformers_continues_a_text_as_there(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / kind, kind)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    values = dict(theirs.named_parameters())
    name = "holdfast.tasks.huggingface:CausalLM"
    config = TaskConfig(name=name, args={"folder": str(folder)})
    opened = open_causal_lm(config, tuple(values), lambda name: values[name].detach())
    ids = torch.tensor([[5, 9, 3, 200]])
    wanted = theirs.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)
    found = generate(opened, ids, wanted.shape[1] - 4, temperature=0)
    assert torch.equal(found, wanted)
    if kind == "gpt2":
        with pytest.raises(UserError, match="36 tokens are more than the model's 32 positions"):
            generate(opened, ids, 32)
        with pytest.raises(UserError, match="the prompt is empty"):
            generate(partial(CausalLMSession, theirs), ids[:, :0], 1)
