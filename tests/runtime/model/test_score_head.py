"""A reward model opens in transformers with equal scores, and its folder is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from holdfast.config.sections.lora import LoraConfig
from holdfast.core.sharding.adapters import adapted_layers, lora_parameters
from holdfast.core.sharding.parameters import SCORE
from holdfast.model.huggingface import export_folder, import_folder
from holdfast.model.lora import add_adapters, set_base
from holdfast.model.peft_folder import write_adapter
from tests.support.models import config, lively

SHAPES = {
    "llama": {"tied_embeddings": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 24, "norm_eps": 1e-6},
}


@pytest.mark.parametrize("name", SHAPES)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model = config(**SHAPES[name], score_head="only", vocab_multiple=8)
    ours = lively(model, dtype=torch.float64)
    assert ours.head is None
    folder = tmp_path / "reward"
    export_folder(folder, model, dict(ours.named_parameters()), None)
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float64
    )
    assert opened.config.num_labels == 1
    tokens = torch.randint(0, model.vocab_size, (1, 17))
    assert ours.score is not None
    with torch.no_grad():
        want = opened(tokens).logits[0, 0]
        scores = F.linear(ours.hidden(tokens), ours.score.weight)[0, :, 0]
    # Norms and angles of transformers are float32, whatever the model is.
    assert float(scores[-1]) == pytest.approx(float(want), rel=1e-5)
    found, tensors = import_folder(folder, vocab_multiple=8)
    assert found.score_head == "only"
    assert torch.equal(tensors["score.weight"], ours.score.weight)


def test_a_value_head_is_no_part_of_an_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = config(score_head="also")
    ours = lively(model)
    export_folder(tmp_path / "policy", model, dict(ours.named_parameters()), None)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokens = torch.randint(0, model.vocab_size, (1, 9))
    with torch.no_grad():
        torch.testing.assert_close(opened(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-5)


def test_adapters_of_a_reward_model_open_in_peft(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="the program that opens the folder")
    torch.set_num_threads(1)
    model, lora = config(score_head="only"), LoraConfig(rank=3, targets=("q_proj", "down_proj"))
    base = config()
    export_folder(tmp_path / "base", base, dict(lively(base).named_parameters()), None)
    lora = lora.model_copy(update={"base": str(tmp_path / "base")})
    rows = {row.name: torch.randn(row.shape) for row in lora_parameters(model, lora)}
    write_adapter(tmp_path / "adapter", model, lora, rows, {})
    opened = peft.PeftModel.from_pretrained(
        transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "base", num_labels=1
        ),
        tmp_path / "adapter",
    )
    ours = lively(model)
    add_adapters(ours, adapted_layers(model, lora), lora)
    _, tensors = import_folder(tmp_path / "base")
    set_base(ours, {n: tensors[n] for n, _ in lively(model).named_parameters() if n != SCORE})
    ours.load_state_dict(rows, strict=True)
    tokens = torch.randint(0, model.vocab_size, (1, 11))
    assert ours.score is not None
    with torch.no_grad():
        scores = F.linear(ours.hidden(tokens), ours.score.weight)[0, :, 0]
        assert float(scores[-1]) == pytest.approx(float(opened(tokens).logits[0, 0]), rel=1e-4)
