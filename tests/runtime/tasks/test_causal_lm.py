"""A model of transformers as a task: its loss is transformers' own, and documents stay apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from holdfast.config.loading.load import resolve_config
from holdfast.config.loading.model_from import TRANSFORMERS_TASK
from holdfast.config.sections.task import TaskConfig
from holdfast.errors import TaskError, UserError
from holdfast.tasks.huggingface import CausalLM, positions_in_documents
from holdfast.tasks.task.loading import load_task, source_digest
from holdfast.tasks.task.module import meta_module, module_rows, own_values
from tests.support.marks import in_campaign
from tests.support.their_models import TOKENS, write_model

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3], [0] * 8])


@pytest.mark.parametrize("kind", ["gpt2", in_campaign("llama")])
def test_the_loss_of_a_packed_row_is_that_of_its_documents(kind: str, tmp_path: Path) -> None:
    """And the model's weights, rows and buffers are those that transformers loads."""
    from transformers import AutoModelForCausalLM

    task = CausalLM(str(write_model(tmp_path / kind, kind)))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / kind).eval()
    weights = task.weights()
    assert all(torch.equal(weights[name], p) for name, p in theirs.named_parameters())
    rows = module_rows(task, meta_module(task))
    assert [row.split()[0] for row in rows] == list(weights)
    buffers = own_values(task, 1).buffers
    assert all(torch.equal(buffers[name], b) for name, b in theirs.named_buffers())

    model = task.with_values(weights).eval()
    assert model.config._attn_implementation == "sdpa"
    ids = torch.randint(0, TOKENS, DOCUMENTS.shape, generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    batch = {"inputs": ids, "targets": targets}
    packed = task.loss(model, batch | {"documents": DOCUMENTS}).detach()
    apart = torch.zeros(())
    with torch.no_grad():
        for row in range(2):
            for number in DOCUMENTS[row].unique():
                own = DOCUMENTS[row] == number
                logits = theirs(ids[row : row + 1, own]).logits[0]
                apart += F.cross_entropy(logits, targets[row, own], reduction="sum")
    assert float(packed) == pytest.approx(float(apart), rel=1e-5)
    together = task.loss(model, batch).detach()
    assert abs(float(together) - float(packed)) > 1e-4 * float(packed)
    counts = torch.rand(targets.shape, generator=torch.Generator().manual_seed(2))
    weighted = task.loss(model, batch | {"weights": counts}).detach()
    with torch.no_grad():
        nats = F.cross_entropy(theirs(ids).logits.transpose(1, 2), targets, reduction="none")
    assert float(weighted) == pytest.approx(float((nats * counts).sum()), rel=1e-5)


def test_places_begin_anew_in_each_document() -> None:
    assert positions_in_documents(DOCUMENTS).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], list(range(8))]


def test_a_model_that_mixes_documents_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = CausalLM(str(write_model(tmp_path / "gpt2", "gpt2")))
    model = task.with_values(task.weights())
    forward = type(model).forward

    def mixing(self: object, position_ids: object = None, **given: object) -> object:
        return forward(self, **given)

    monkeypatch.setattr(type(model), "forward", mixing)
    ids = torch.zeros(DOCUMENTS.shape, dtype=torch.long)
    with pytest.raises(TaskError, match=r"data\.attention: GPT2LMHeadModel of transformers lets"):
        task.loss(model, {"inputs": ids, "targets": ids, "documents": DOCUMENTS})


def test_the_shape_alone_has_other_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "gpt2", "gpt2")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(TaskError, match=r"has no file.*set task\.args\.pretrained=false"):
        CausalLM(str(folder))
    task = CausalLM(str(folder), pretrained=False)
    assert task.weights() == {}
    one, other = own_values(task, 1).parameters, own_values(task, 2).parameters
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])


def test_the_config_is_a_part_of_the_source(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "gpt2", "gpt2")
    config = TaskConfig(name=TRANSFORMERS_TASK, args={"folder": str(folder)})
    before = source_digest(config, load_task(config))
    path = folder / "config.json"
    path.write_text(path.read_text().replace("1e-05", "1e-06"))
    assert source_digest(config, load_task(config)) != before


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = CausalLM(str(write_model(tmp_path / "gpt2", "gpt2")))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TaskError, match=r"needs the package transformers.*holdfast\[hf\]"):
        meta_module(task)


def test_the_run_file_names_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt_neox"}')
    (folder / "tokenizer.json").write_text("{}")
    given = "model: {from: theirs, code: transformers}\ntask: {args: {pretrained: false}}\n"
    loaded = resolve_config(given, "run.yaml", base=str(tmp_path))
    assert loaded.config.task.name == TRANSFORMERS_TASK
    assert loaded.config.task.args == {"folder": str(folder), "pretrained": False}
    assert loaded.config.data.tokenizer.path == str(folder / "tokenizer.json")
    assert str(loaded.origins["task.name"]) == f"model folder ({folder})"
    typed = resolve_config(
        "seed: 1\n", "run.yaml", ["model.code=transformers", f"model.from={folder}"]
    )
    assert typed.config.task.args == {"folder": str(folder)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {code: transformers}", "model.code needs model.from; name a folder"),
        ("model: {from: x, code: jax}", "model.code 'jax' is unknown; use transformers"),
        ("model: {from: x, code: transformers, layers: 3}", "model.layers has no effect with"),
        ("model: {from: x, code: transformers}\ntask: my:Net", "both say what is trained"),
        ("model: {from: x}", "there is no config.json here"),
    ],
)
def test_mistakes_in_the_run_file(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve_config(text, "run.yaml")


def test_a_folder_without_a_model() -> None:
    with pytest.raises(TaskError, match=r"no config\.json in nowhere"):
        CausalLM("nowhere")
