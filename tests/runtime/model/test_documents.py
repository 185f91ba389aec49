"""Attention inside packed documents, against a dense mask: numbers, gradients, memory, compiler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from holdfast.config.sections.model import ModelConfig
from holdfast.model.decoder import Decoder
from holdfast.model.documents import (
    DocumentAttention,
    choose_document_attention,
    document_positions,
    varlen_problem,
)
from tests.support.models import SHAPES, config, document_mask, lively, tokens

CPU, LENGTH = torch.device("cpu"), 96
FAMILIES: dict[str, dict[str, Any]] = {
    **SHAPES,
    "window_shorter_than_documents": {"window": 5},
    "window_of_some_blocks": {"window": 11, "window_layers": (1,), "window_rope_theta": 500.0},
    "window_longer_than_rows": {"window": 200},
    "limited_scores": {"attention_softcap": 20.0, "attention_scale": 0.3},
    "limited_scores_in_a_window": {"attention_softcap": 20.0, "window": 7},
}


def packed(rows: int = 3, length: int = LENGTH, mean: int = 20) -> Tensor:
    """Documents of drawn lengths, one of a single token; the last row is one document."""
    draw = torch.Generator().manual_seed(3)
    ends = torch.rand(rows, length, generator=draw) < 1 / mean
    ends[0, 3:5] = True
    ends[-1] = False
    return ends.cumsum(1)


def loss_and_gradients(
    model: Decoder, documents: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """mask: the dense one, which takes the place of `documents`."""
    text, targets = tokens(*documents.shape), tokens(documents.numel(), seed=1)
    if mask is None:
        logits = model(text, documents)
    else:
        logits = model(text, positions=document_positions(documents), mask=mask)
    loss = F.cross_entropy(logits.flatten(0, 1), targets)
    return logits.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_and_gradients_are_those_of_a_dense_mask(
    family: str, dtype: torch.dtype, within: float
) -> None:
    model, documents = lively(config(**FAMILIES[family]), dtype=dtype), packed()
    logits, gradients = loss_and_gradients(model, documents)
    dense, wanted = loss_and_gradients(model, documents, document_mask(documents))
    for ours, theirs in zip((logits, *gradients), (dense, *wanted), strict=True):
        apart = (ours - theirs).abs().max() / theirs.abs().max()
        assert apart < within


@pytest.mark.parametrize("family", ["llama_grouped_scaled", "window_shorter_than_documents"])
def test_a_document_does_not_depend_on_its_place(family: str) -> None:
    """Bit for bit: in another row, behind another document, with one of its length next to it. So
    attention has the same bits however rows are dealt to ranks."""
    model = lively(config(**FAMILIES[family]))
    layer, window = model.layers[0].attention, model.config.window
    draw = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, 30, heads, 8, generator=draw) for heads in (4, 2, 2))

    def attend(documents: list[list[int]], *given: Tensor) -> Tensor:
        known = model.document_attention.pack(torch.tensor(documents))
        known = known.within(window, torch.float32) if window else known
        return known.attend(*given, layer._mix, layer.scale)

    alone = attend([[0] * 30], q, k, v)
    shifted = [torch.cat((x[:, :7], x, x[:, :23]), 1) for x in (q, k, v)]
    rows = [torch.cat((x.flip(1), x)) for x in shifted]
    both = attend([[0] * 60, [0] * 7 + [1] * 30 + [2] * 23], *rows)
    assert torch.equal(both[1, 7:37], alone[0])
    pair = attend([[0] * 30 + [1] * 30], *(torch.cat((x.flip(1), x), 1) for x in (q, k, v)))
    assert torch.equal(pair[0, 30:], alone[0])


@pytest.mark.parametrize("family", ["llama_grouped_scaled", "window_shorter_than_documents"])
def test_memory_grows_linearly(family: str) -> None:
    """Bytes that one attention layer keeps for its backward pass; the dense mask keeps more."""
    model = config(**FAMILIES[family], max_position=2048)
    layer = lively(model)

    def kept(length: int, dense: bool) -> int:
        documents, found = packed(1, length, mean=60), dict[int, int]()
        documents = documents + (torch.arange(length) // 300)  # no document grows with the row

        def keep(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if dense:
                layer(tokens(1, length), mask=document_mask(documents))
            else:
                layer(tokens(1, length), documents)
        return sum(found.values())

    sizes = [kept(length, dense=False) for length in (512, 1024, 2048)]
    first, second = sizes[1] - sizes[0], sizes[2] - sizes[1]
    assert second == pytest.approx(2 * first, rel=0.05)
    assert kept(2048, dense=True) > sizes[2] + 2048 * 2048


def test_another_microbatch_is_not_compiled_again() -> None:
    plain = lively(config())
    model = lively(config())
    model.document_attention.exclude_from_compilation()
    counter = CompileCounterWithBackend("eager")
    for block in model.layers:
        block.compile(backend=counter)
    graphs = []
    for seed in range(3):
        text, documents = tokens(2, 48, seed=seed), torch.arange(48).expand(2, 48) // (7 + seed)
        assert torch.equal(model(text, documents), plain(text, documents))
        graphs.append(counter.frame_count)
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 3


# --- varlen: torch's kernel has no CPU, so a stand-in has its place ---------------------------
class StandIn(ModuleType):
    """`torch.nn.attention.varlen` with the formula in place of the kernel. factor: its error."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__("torch.nn.attention.varlen")
        self.factor, self.calls = factor, 0

    def varlen_attn(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:
        self.calls += 1
        assert cu_seq_q.dtype == torch.int32
        assert torch.equal(cu_seq_q, cu_seq_k)
        assert max_q == max_k == int(cu_seq_q.diff().max())
        assert window_size[1] == 0
        numbers = torch.repeat_interleave(cu_seq_q.diff().long())
        distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
        seen = (numbers[:, None] == numbers) & (distance >= 0)
        if window_size[0] >= 0:
            seen &= distance <= window_size[0]  # as many keys to the left, and the query's own
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        if enable_gqa:
            k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        else:
            assert len(q) == len(k)
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        return out.transpose(0, 1) * self.factor


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    module = StandIn()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    assert module.calls


@pytest.mark.parametrize(
    "family", ["llama_plain", "llama_grouped_scaled", "window_shorter_than_documents"]
)
def test_varlen_has_the_numbers_of_blocks(family: str, stand_in: StandIn) -> None:
    model = lively(config(**FAMILIES[family], attention_scale=0.4), dtype=torch.float64)
    documents = packed()
    blocks, wanted = loss_and_gradients(model, documents)
    model.document_attention = DocumentAttention("varlen")
    logits, gradients = loss_and_gradients(model, documents)
    for ours, theirs in zip((logits, *gradients), (blocks, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("changes", [{}, {"window": 9}, {"kv_heads": 4}])
def test_a_device_is_tried_on_a_few_tokens(changes: dict[str, Any], stand_in: StandIn) -> None:
    assert varlen_problem(config(**changes), torch.bfloat16, CPU) is None
    stand_in.factor = 1.5
    problem = varlen_problem(config(**changes), torch.bfloat16, CPU)
    assert problem is not None
    assert problem.endswith("from those of blocks")


def test_a_device_without_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = varlen_problem(config(), torch.bfloat16, CPU)  # the real one: a CPU has no kernel
    assert problem is not None
    assert problem.startswith("NotImplementedError")
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    problem = varlen_problem(config(), torch.bfloat16, CPU)
    assert problem is not None
    assert problem.startswith("ModuleNotFoundError")


@pytest.mark.parametrize(
    ("model", "dtype", "device", "reason"),
    [
        (config(), torch.bfloat16, "cpu", "torch has no varlen kernel for a CPU"),
        (config(), torch.float32, "cuda", "varlen computes in 16 bits, and this run in float32"),
        (
            config(attention_softcap=30.0),
            torch.bfloat16,
            "cuda",
            "varlen cannot limit scores (model.attention_softcap)",
        ),
    ],
)
def test_blocks_are_chosen_with_a_reason(
    model: ModelConfig, dtype: torch.dtype, device: str, reason: str
) -> None:
    how = choose_document_attention(model, dtype, torch.device(device))
    assert (how.way, how.reason) == ("blocks", reason)
