"""Rows of embedding and head that belong to no token change nothing and stay zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from holdfast.checkpoint.interop.huggingface import import_huggingface
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.loading.identity import config_hash
from holdfast.config.run import RunConfig
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.core.flops import counted_parameters
from holdfast.core.format.manifest import commit_key
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.optimizer_state import parameter_settings
from holdfast.core.sharding.parameters import count_parameters, decoder_parameters
from holdfast.model.generate import generate
from holdfast.model.huggingface import export_folder, import_folder
from holdfast.model.init import initial_tensor
from holdfast.training.engine.objective import NextTokenObjective, linear_cross_entropy
from holdfast.training.optimizers.optimizer import AdamW
from holdfast.wire.store.run_store import FolderStore
from tests.support.models import config, decoder, tokens

PADDED: dict[str, Any] = {"vocab_size": 61, "vocab_multiple": 16}


def padding_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.shape[0] == 64
    return tensor[61:]


@pytest.mark.parametrize("tied", [False, True])
def test_a_padded_model_starts_and_trains_as_the_plain_one(tied: bool) -> None:
    """The same losses for five steps with weight decay, and zeros where there is no token."""
    runs = []
    for multiple in (1, 16):
        model = config(vocab_size=61, vocab_multiple=multiple, tied_embeddings=tied)
        objective = NextTokenObjective(decoder(model, dtype=torch.float64))
        held = [p.detach() for p in objective.parameters()]
        sums = [torch.zeros_like(p) for p in held]
        options = OptimizerConfig(weight_decay=0.1)
        settings = [parameter_settings(options, row) for row in decoder_parameters(model)]
        optimizer = AdamW(held, sums, settings, options)
        losses = []
        for step in range(1, 6):
            text, targets = tokens(3, 9, seed=step, below=61), tokens(3, 9, seed=-step, below=61)
            loss = objective(text, targets)
            loss.backward()
            for total, parameter in zip(sums, objective.parameters(), strict=True):
                assert parameter.grad is not None
                if parameter.shape[0] == 64:
                    assert not padding_of(parameter.grad).any()
                total.copy_(parameter.grad)
                parameter.grad = None
            optimizer.apply(step, 0.01, 27.0)
            losses.append(loss.detach())
        runs.append((torch.stack(losses), objective))
    (want, plain), (got, padded) = runs
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
    start = decoder(plain.decoder.config, dtype=torch.float64).norm
    assert start is not None
    assert not torch.equal(plain.get_parameter("decoder.norm.weight"), start.weight)  # it trains
    for name, parameter in padded.named_parameters():
        other = plain.get_parameter(name).detach()
        mine = parameter.detach()
        if mine.shape != other.shape:
            assert not padding_of(mine).any()
        torch.testing.assert_close(mine[: other.shape[0]], other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_padding_rows_are_left_out_of_the_softmax(chunk: int | None, dtype: torch.dtype) -> None:
    """Even where they are not zero."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(37, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(32, 8, generator=generator).to(dtype).requires_grad_()
    targets = tokens(37, below=29)
    want = linear_cross_entropy(hidden, weight[:29], targets, chunk)
    got = linear_cross_entropy(hidden, weight, targets, chunk, vocabulary=29)
    assert torch.equal(got, want)
    for mine, theirs in zip(
        *(torch.autograd.grad(loss, (hidden, weight)) for loss in (got, want)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    with torch.no_grad():
        assert torch.equal(
            linear_cross_entropy(hidden, weight, targets, chunk, vocabulary=29), want
        )


def test_padding_is_counted_as_memory_and_not_as_work() -> None:
    plain, padded = config(vocab_size=61), config(**PADDED)
    assert count_parameters(padded) - count_parameters(plain) == 2 * 3 * plain.dim
    assert counted_parameters(padded) == counted_parameters(plain)
    for row, other in zip(decoder_parameters(padded), decoder_parameters(plain), strict=True):
        value, want = initial_tensor(row, 7), initial_tensor(other, 7)
        assert torch.equal(value[: want.shape[0]], want)
        assert not value[want.shape[0] :].any()


def test_padding_decides_which_run_it_is() -> None:
    hashes = {
        config_hash(RunConfig.model_validate({"model": {"vocab_multiple": n}})) for n in (1, 64)
    }
    assert len(hashes) == 2


def test_text_is_drawn_from_tokens_alone() -> None:
    model = decoder(config(**PADDED))
    assert model(tokens(2, 5, below=61)).shape == (2, 5, 61)
    drawn = generate(model, tokens(4, 3, below=61), 20, temperature=100.0, seed=3)
    assert int(drawn.max()) < 61


@pytest.mark.parametrize("tied", [False, True])
def test_export_cuts_padding_off_and_import_puts_it_back(tied: bool, tmp_path: Path) -> None:
    model = config(**PADDED, tied_embeddings=tied, head_dim=8)  # the folder says it
    ours = decoder(model)
    export_folder(tmp_path / "out", model, ours.state_dict(), None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.get_input_embeddings().weight.shape[0] == 61
    text = tokens(2, 20, below=61)
    with torch.no_grad():
        torch.testing.assert_close(ours(text), loaded.eval()(text).logits, rtol=0, atol=1e-4)

    plain = import_folder(tmp_path / "out")[1]
    assert plain["embed.weight"].shape[0] == 61
    again, tensors = import_folder(tmp_path / "out", model.vocab_multiple)
    assert again == model
    assert all(torch.equal(tensors[name], value) for name, value in ours.state_dict().items())
    whole = ours.state_dict()["embed.weight"]
    for start, rows in ((0, 64), (50, 14), (61, 3), (62, 1), (10, 51), (64, 0)):
        part = tensors.box("embed.weight", (start, 3), (rows, 7))
        assert torch.equal(part, whole[start : start + rows, 3:10]), (start, rows)

    store = FolderStore(tmp_path / "run")
    import_huggingface(store, tmp_path / "out", model)
    checkpoint = Checkpoint.open(store, commit_key(0, 0))
    value = np.empty((64, model.dim), np.float32)
    box = Box("model.embed.weight", (0, 0), (64, model.dim))
    checkpoint.read(box, value.reshape(-1).data)
    assert torch.equal(torch.from_numpy(value), whole)


def test_padding_with_numbers_in_it_is_not_thrown_away(tmp_path: Path) -> None:
    model = config(**PADDED)
    ours = decoder(model)
    with torch.no_grad():
        ours.head_weight[62] = 1.0
    with pytest.raises(ValueError, match=r"head\.weight has numbers in its padding, rows 61"):
        export_folder(tmp_path / "out", model, ours.state_dict(), None)
