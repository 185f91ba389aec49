"""Adapters of a task that are merged into its own parameters: an export, and text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.config.sections.lora import LoraConfig
from holdfast.errors import TaskError
from holdfast.model.generate import generate
from holdfast.model.lora import set_base
from holdfast.tasks.task.initial import first_values, frozen_values, trained_module, values_checksum
from holdfast.tasks.task.loading import load_task
from holdfast.tasks.task.module import own_values, set_buffers
from holdfast.tasks.task.task_export import MergedTaskWeights, export_task
from holdfast.tasks.transformers.huggingface_export import export_folder_model, open_causal_lm
from tests.runtime.tasks.test_task_export import Weights
from tests.support.marks import in_campaign
from tests.support.own_tasks import MODULE
from tests.support.sample_tasks import WIDTH
from tests.support.their_models import write_model

CAUSAL_LM = "holdfast.tasks.huggingface:CausalLM"


class Adapted:
    """A run of adapters with random values, and the module that it trains."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        value = {"task": {"name": name, "args": args}, "lora": {"rank": 2, "alpha": 4}}
        config = RunConfig.model_validate(value)
        task = load_task(config.task)
        frozen = frozen_values(task, first_values(task, config.seed))
        lora = config.lora.model_copy(update={"base_checksum": values_checksum(frozen)})
        self.config = config.model_copy(update={"lora": lora})
        self.module = trained_module(task, LoraConfig(rank=2, alpha=4)).to_empty(device="cpu")
        set_base(self.module, frozen)
        buffers = own_values(task, config.seed).buffers
        set_buffers(self.module, buffers, torch.device("cpu"), torch.float32, {})
        generator = torch.Generator().manual_seed(3)
        self.trained = {
            name: torch.randn(parameter.shape, generator=generator) / 9
            for name, parameter in self.module.named_parameters()
        }
        for name, parameter in self.module.named_parameters():
            parameter.data = self.trained[name]

    def merged(self) -> MergedTaskWeights:
        return MergedTaskWeights(self.config, Weights(self.trained))


def test_an_export_computes_what_the_adapted_module_computes(tmp_path: Path) -> None:
    """Of a net with a matrix of two layers, whose adapters make two of it."""
    args = {"dropout": 0.0, "sometimes": False}
    made = Adapted(f"{MODULE}:Tied", args)
    task = load_task(made.config.task)
    export_task(tmp_path / "out", made.config.task, made.merged(), dtype=None, shard_bytes=10**9)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert {"first.weight", "last.weight", "frozen.bias"} <= exported.keys()
    module: Any = task.model()
    module.last = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    module.load_state_dict(exported, strict=True)
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    torch.testing.assert_close(module(x), made.module(x))


def test_other_frozen_values_are_not_merged() -> None:
    made = Adapted(f"{MODULE}:Gru", {})
    lora = made.config.lora.model_copy(update={"base_checksum": "0" * 32})
    made.config = made.config.model_copy(update={"lora": lora})
    with pytest.raises(TaskError, match="not those that the run was begun with"):
        made.merged()


@pytest.mark.parametrize("kind", ["gpt2", in_campaign("llama")])
def test_a_model_of_transformers_with_adapters(kind: str, tmp_path: Path) -> None:
    """Its text and its export. The only linear layer of GPT-2 is the head, which is tied."""
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / kind, kind)
    made = Adapted(CAUSAL_LM, {"folder": str(folder)})
    merged, task = made.merged(), made.config.task
    ids = torch.tensor([[5, 9, 3, 200]])

    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = model(input_ids=ids, use_cache=False).logits
        return found

    export_folder_model(
        tmp_path / "out",
        task,
        merged.names,
        merged.whole,
        dtype=None,
        shard_bytes=10**9,
        tokenizer=None,
        chat_template=None,
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(logits(theirs), logits(made.module.eval()))
    assert (logits(base) - logits(theirs)).abs().max() > 1e-3
    wanted = theirs.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)
    opened = open_causal_lm(task, merged.names, merged.whole)
    assert torch.equal(partial(generate, opened)(ids, wanted.shape[1] - 4, temperature=0), wanted)
