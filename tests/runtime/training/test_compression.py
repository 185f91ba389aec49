"""Pruning, kept zeros and rounded weights: any layout has the curve of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from holdfast.config.sections.model import ModelConfig
from holdfast.model.decoder import Decoder
from holdfast.model.feed_forward import Linear
from holdfast.model.init import initialise
from holdfast.model.nf4 import Nf4Weight, rounded
from holdfast.training.compress import pruning
from tests.support.layouts import case, config_of, curve_of, engine_for
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values

STEPS = 3
KEPT = {"train__keep_zeros": True}
ROUNDED = {
    "model__dim": 32,
    "model__ffn_dim": 64,
    "train__precision": "fp32",
    # What pipeline stages sum in another order: both ends of tied embeddings, and norms.
    "model__tied_embeddings": False,
    "train__optimizer": {"clip_norm": 0},
}
QAT = {"train__qat": "int4"}


def _trained(rank: RankContext, layout: str, changes: dict[str, Any], step: int) -> dict[str, Any]:
    """step: after which half of the weights become zero, and are kept so; -1: never."""
    made = engine_for(rank, layout, config_of({**case(layout).changes, **changes}))
    if step >= 0:
        curve_of(made, step)
        for i, tensor in enumerate(made.parameters.master_tensors):
            tensor.masked_fill_(tensor.abs() < 0.012, 0.0)
            if i == 0:  # the moments of an unpruned run stay
                assert (tensor == 0).any()
        made.parameters.refresh()
    before = [tensor == 0 for tensor in made.parameters.master_tensors]
    found = curve_of(made, STEPS)
    masked = [
        bool((g[zero] == 0).all())
        for g, zero in zip(made._gradients.gradients(), before, strict=True)
        if g.dim() > 1
    ]
    after = [tensor == 0 for tensor in made.parameters.master_tensors]
    same = [torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.dim() > 1]
    found |= {"same": all(same), "masked": all(masked), "zeros": sum(int(m.sum()) for m in after)}
    made.close()
    return found


def _run(layout: str, changes: dict[str, Any], step: int = -1) -> list[dict[str, Any]]:
    given = {"layout": layout, "changes": changes, "step": step}
    return rank_values(_trained, case(layout).world_size, given)


@pytest.mark.parametrize("layout", ["dp3", in_campaign("zero1.2"), in_campaign("shard2")])
def test_zeros_stay_zero(layout: str) -> None:
    (alone,) = _run("one", KEPT, 1)
    assert alone["same"]
    assert alone["masked"]
    for found in _run(layout, KEPT, 1):
        assert found["same"]
        assert found["masked"]
        if layout == "dp3":
            assert found == alone
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-10)
    (loose,) = _run("one", {}, 1)
    assert loose["zeros"] < alone["zeros"] / 2
    assert loose["norms"][-1] > alone["norms"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp3", "shard2", "pp2"])
def test_rounded_weights(layout: str) -> None:
    """Only shards add up in an order of their own. Then some weights round to the other side, which
    is worth far less than rounding itself."""
    pytest.importorskip("torchao", reason="qat needs torchao")
    (alone,) = _run("one", ROUNDED | QAT)
    for found in _run(layout, ROUNDED | QAT):
        if layout == "dp3":
            assert found == alone
        if not all(map(math.isnan, found["losses"])):
            assert found["losses"][0] == alone["losses"][0]
            assert found["losses"] == pytest.approx(
                alone["losses"], rel=1e-5 if layout == "shard2" else 0.0
            )
    (plain,) = _run("one", ROUNDED)
    apart = [abs(a / b - 1) for a, b in zip(plain["losses"], alone["losses"], strict=True)]
    assert min(apart) > 3e-5
    assert max(apart) < 0.02


def small() -> tuple[ModelConfig, Decoder]:
    model = ModelConfig.model_validate(
        {
            "preset": None,
            "layers": 3,
            "dim": 8,
            "heads": 2,
            "kv_heads": 1,
            "ffn_dim": 16,
            "vocab_size": 32,
        }
    )
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.to_empty(device="cpu")
    initialise(decoder, 3)
    return model, decoder


def test_the_least_scores_become_zero() -> None:
    scores = torch.tensor([[4.0, 1.0, 3.0, 2.0], [9.0, 8.0, 7.0, 5.0]])
    half, pairs = pruning.Sparsity(0.5), pruning.Sparsity(0.5, 2, 4)
    by_row = [[False, True, False, True], [False, False, True, True]]
    assert pruning.least(scores, half, by_row=True).tolist() == by_row
    assert pruning.least(scores, pairs, by_row=False).tolist() == by_row
    assert pruning.least(scores, half, by_row=False).tolist() == [[True] * 4, [False] * 4]
    equal = pruning.least(torch.ones(1, 4), half, by_row=True)
    assert equal.tolist() == [[True, True, False, False]]


def test_wanda_weighs_by_the_inputs_of_the_pruned_blocks() -> None:
    """Recomputed by hand for the last block's gate."""
    _, decoder = small()
    tokens = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(1))
    sample = pruning.Sample(tokens, tokens, None)
    gate = decoder.layers[2].ffn.gate
    weight = gate.weight.detach().clone()
    pruning.prune_by_wanda(decoder, [sample], pruning.Sparsity(0.5))
    with torch.no_grad():
        context = decoder.attention_context(tokens, x := decoder.embed_tokens(tokens))
        x = decoder.blocks(x, context, positions={0, 1})
        block = decoder.layers[2]
        dense = {name: p.detach() for name, p in small()[1].layers[2].named_parameters()}
        given: list[torch.Tensor] = []
        hook = gate.register_forward_pre_hook(lambda _, a: given.append(a[0]))
        torch.func.functional_call(block, dense, (x, context.rotary, context.mask))
        hook.remove()
    scores = weight.abs().double() * given[0].double().square().flatten(0, 1).sum(0).sqrt()
    order = scores.argsort(dim=1)[:, :4]
    expected = weight.scatter(1, order, 0.0)
    assert torch.equal(gate.weight, expected)
    for layer in pruning.prunable_layers(decoder.layers).values():
        assert (layer.weight == 0).sum(1).tolist() == [layer.in_features // 2] * len(layer.weight)


def test_a_block_that_changes_nothing_goes_first() -> None:
    model, decoder = small()
    tokens = torch.arange(10).view(2, 5)
    sample = pruning.Sample(tokens, tokens, None)
    with torch.no_grad():
        decoder.layers[1].attention.o.weight.zero_()
        decoder.layers[1].ffn.down.weight.zero_()
    found = pruning.influences(decoder, [sample])
    assert found[1] == pytest.approx(0.0, abs=1e-7)
    assert min(found[0], found[2]) > 1e-6
    less, state = pruning.without_blocks(model, decoder.state_dict(), [1])
    assert less.layers == 2
    assert torch.equal(pruning.decoder_of(less, state)(tokens), decoder(tokens))


def test_nf4_has_the_bits_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="codes are compared")
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(2))
    weight[3, :64] = 0.0
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    packed = Nf4Weight.of(weight, torch.float32)
    assert torch.equal(packed.codes, codes.flatten())
    assert torch.equal(packed.scales, state.absmax)
    assert torch.equal(packed.dense(), functional.dequantize_4bit(codes, state))
    assert torch.equal(Nf4Weight.of(weight[5:9], torch.float32).dense(), packed.dense()[5:9])


def test_a_packed_layer_computes_with_the_rounded_weight() -> None:
    layer, plain = Linear(64, 3, bias=True), Linear(64, 3, bias=True)
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    layer.packed = Nf4Weight.of(weight, torch.float64)
    layer.weight = None  # type: ignore[assignment]
    bias = torch.arange(3).double()
    layer.bias = plain.bias = torch.nn.Parameter(bias)
    plain.weight = torch.nn.Parameter(rounded(weight))
    x, y = (torch.arange(128.0).view(2, 64).double().requires_grad_() for _ in range(2))
    assert torch.equal(layer(x), plain(y))
    layer(x).square().sum().backward()
    plain(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
