"""Tensor and sequence parallelism against one process: losses, gradients, bytes, shapes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.core.sharding.sharding_table import gradient_is_partial, sharding_table
from holdfast.core.sharding.state_table import local_boxes, parameter_table
from holdfast.errors import LayoutError
from holdfast.layout import Layout, place_layout
from holdfast.model.decoder import Decoder
from holdfast.model.init import initial_tensor
from holdfast.model.stage import keep_stage
from holdfast.options.async_tp.apply import overlap_halves
from holdfast.options.tp_by.apply import ComponentRegion
from holdfast.parallel.axes.fsdp import apply_fsdp
from holdfast.parallel.axes.tensor_parallel import (
    apply_tensor_parallel,
    localise_parameters,
    residual_shape,
)
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.comm.trace import SpanRecorder
from holdfast.parallel.torch_compat import is_peer_loss
from holdfast.training.engine.objective import NextTokenObjective
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values, ranks

SMALL = {
    "preset": None,
    "layers": 2,
    "dim": 16,
    "heads": 4,
    "kv_heads": 4,
    "ffn_dim": 20,
    "vocab_size": 61,
    "max_position": 64,
    "init_std": 0.3,
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "one_kv_head": {"kv_heads": 1},
    "tied": {"tied_embeddings": True},
    "qk_norm": {"qk_norm": True, "head_dim": 6, "kv_heads": 1},
    "uneven_ffn": {"ffn_dim": 18},
    "few_tokens": {"vocab_size": 3, "tied_embeddings": True},
    "empty_parts": {"vocab_size": 5},
    "padded": {"vocab_multiple": 8},
    "biases": {"attention_bias": "qkvo", "kv_heads": 1},
    "gemma": {
        "norms": "both",
        "norm_plus_one": True,
        "activation": "gelu_tanh",
        "window": 3,
        "window_layers": [1],
        "window_rope_theta": 100.0,
        "embedding_multiplier": 4.0,
        "attention_softcap": 2.0,
        "logit_softcap": 1.5,
        "tied_embeddings": True,
    },
    "scaled": {
        "norms": "post",
        "residual_multiplier": 0.5,
        "attention_scale": 0.3,
        "logit_divisor": 3.0,
        "rope_fraction": 0.5,
        "no_rope_layers": [0],
    },
    "odd_heads": {"heads": 3, "kv_heads": 1, "head_dim": 4},
    "six_heads": {"heads": 6, "kv_heads": 2, "head_dim": 4},
    "qk_norm_all": {"qk_norm": True, "qk_norm_width": "all"},
    "padding_alone": {"vocab_size": 3, "vocab_multiple": 8, "tied_embeddings": True},
}
UNCUT = ("odd_heads", "six_heads", "qk_norm_all")
"""Shapes whose attention 2 or 4 ranks cannot cut."""
BATCH, SEQUENCE = 3, 8


def config(shape: str) -> ModelConfig:
    return ModelConfig.model_validate({**SMALL, **SHAPES[shape]})


Degrees = dict[str, int]
"""`layout.tp_by`"""


def boxes_of(
    model: ModelConfig, tp: int, rank: int, tp_by: Degrees | None = None
) -> dict[str, Box]:
    """What a tp rank holds of each parameter, by its name."""
    topology = place_layout(Layout(tp=tp), 1, ("here",) * tp)
    table = parameter_table(model, "float64", degrees=tp_by or {})
    return {box.name: box for box in local_boxes(topology, table, rank)}


def cut(value: Tensor, box: Box) -> Tensor:
    return value[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]


def filled(
    objective: NextTokenObjective, boxes: dict[str, Box], seed: int = 4
) -> NextTokenObjective:
    """Give memory and the initial weights; gains too are drawn, or they would hide mistakes."""
    objective.to(torch.float64).to_empty(device="cpu")
    named = {n.removeprefix("decoder."): p for n, p in objective.named_parameters()}
    rows = {row.name: row for row in decoder_parameters(objective.decoder.config)}
    with torch.no_grad():
        for name, parameter in named.items():
            value = initial_tensor(rows[name], seed).double()
            noise = torch.Generator().manual_seed(len(name))
            value += 0.1 * torch.randn(value.shape, generator=noise, dtype=torch.float64)
            parameter.copy_(cut(value, boxes[name]))
    return objective


def single(model: ModelConfig, compiled: bool = False) -> NextTokenObjective:
    with torch.device("meta"):
        objective = NextTokenObjective(Decoder(model), compiled)
    return filled(objective, boxes_of(model, 1, 0))


def spread(
    model: ModelConfig,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    traffic: TrafficCounter | None = None,
    tp_by: Degrees | None = None,
    blocks: range | None = None,
    ends: tuple[bool, bool] | None = None,
) -> NextTokenObjective:
    """Over the ranks of `group`, or on one device. blocks: of one pipeline stage; None: all.
    ends: whether it begins and ends the model; None: as its blocks do."""
    tp, rank = (group.size(), group.rank()) if group else (1, 0)
    boxes = boxes_of(model, tp, rank, tp_by)
    with torch.device("meta"):
        objective = NextTokenObjective(Decoder(model))
    if blocks is not None:
        ends = ends or (blocks.start == 0, blocks.stop == model.layers)
        keep_stage(objective.decoder, blocks, *ends)
    localise_parameters(objective, boxes)
    if group is not None:
        apply_tensor_parallel(
            objective,
            group,
            sequence_parallel=sequence_parallel,
            degrees=tp_by or {},
            make_region=ComponentRegion,
            traffic=traffic,
        )
    return filled(objective, boxes)


def samples(
    model: ModelConfig, documents: bool, seed: int = 0, batch: int = BATCH
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    size = (batch, SEQUENCE)
    text = torch.randint(0, model.vocab_size, size, generator=generator)
    targets = torch.randint(0, model.vocab_size, size, generator=generator)
    targets[0, 2:5] = -100
    numbers = torch.arange(SEQUENCE).expand(size) // 3 if documents else None
    return text, targets, numbers


def gradients(objective: NextTokenObjective) -> dict[str, Tensor]:
    found = {}
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None, name
        found[name.removeprefix("decoder.")] = parameter.grad
    return found


def check_gradients(
    model: ModelConfig,
    own: dict[str, Tensor],
    whole: dict[str, Tensor],
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    tp_by: Degrees | None = None,
) -> None:
    """Each is the rank's box of the whole gradient, or a part of it that the table says to add."""
    boxes = boxes_of(model, group.size(), group.rank(), tp_by)
    table = sharding_table(model)
    everybody: list[dict[str, Any]] = []
    for rank in range(group.size()):
        theirs = boxes_of(model, group.size(), rank, tp_by)
        everybody.append({name: (box.offsets, box.lengths) for name, box in theirs.items()})
    for name, gradient in own.items():
        box = boxes[name]
        holders = [
            r for r, all_ in enumerate(everybody) if all_[name] == (box.offsets, box.lengths)
        ]
        partial = gradient_is_partial(table[name], sequence_parallel)
        parts = [torch.empty_like(whole[name]) for _ in range(group.size())]
        padded = torch.zeros_like(whole[name])
        cut(padded, box).copy_(gradient)
        dist.all_gather(parts, padded, group=group)
        total = sum(parts[r] for r in holders) if partial else parts[group.rank()]
        assert isinstance(total, Tensor)
        want = cut(whole[name], box)
        torch.testing.assert_close(cut(total, box), want, rtol=1e-11, atol=1e-11, msg=name)


def check_step(
    objective: NextTokenObjective,
    given: Any,
    group: dist.ProcessGroup,
    sequence_parallel: bool = True,
    msg: str | None = None,
    tp_by: Degrees | None = None,
) -> None:
    """Loss and gradients are those of one process."""
    model = objective.decoder.config
    whole = single(model)
    want, got = whole(*given), objective(*given)
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0, msg=msg)
    own, wanted = gradients(objective), gradients(whole)
    check_gradients(model, own, wanted, group, sequence_parallel, tp_by)
    with torch.no_grad():
        torch.testing.assert_close(objective(*given), want, rtol=1e-12, atol=0, msg=msg)


def check_parity(rank: RankContext, shapes: list[str]) -> None:
    group = rank.init_torch_world()
    for index, shape in enumerate(shapes):
        model = config(shape)
        given = samples(model, documents=index % 2 == 1, batch=4)
        for sequence_parallel in (True, False):
            objective = spread(model, group, sequence_parallel)
            check_step(objective, given, group, sequence_parallel, shape)
    dist.barrier()


@pytest.mark.parametrize("tp", [2, in_campaign(4)])
def test_parity(tp: int) -> None:
    shapes = [shape for shape in SHAPES if shape not in UNCUT]
    rank_values(check_parity, tp, {"shapes": shapes}, deadline=240)


def check_halves(rank: RankContext, shapes: list[str]) -> list[list[Any]]:
    """Bytes, spans and seconds of a step, without halves and with them."""
    group = rank.init_torch_world()
    for index, shape in enumerate(shapes):
        model = config(shape)
        for batch, length in ((4, 8), (2, 7), (3, 8)):  # even, padded, and undivided
            objective = spread(model, group, True)
            overlap_halves(objective)
            text, targets, numbers = samples(model, documents=index % 2 == 1, batch=batch)
            given = [None if t is None else t[:, :length] for t in (text, targets, numbers)]
            check_step(objective, given, group, msg=f"{shape} {batch}")
    found: list[list[Any]] = []
    for is_halved in (False, True):
        recorder = SpanRecorder()
        traffic = TrafficCounter(recorder)
        objective = spread(config("plain"), group, True, traffic)
        if is_halved:
            overlap_halves(objective)
        objective(*samples(config("plain"), False, batch=4)).backward()
        spans = sorted((s.start, s.stop) for s in recorder.spans)
        together = sum(after[0] < before[1] for before, after in pairwise(spans))
        found.append([traffic.bytes_by_kind, together, *traffic.seconds_by_kind["tp"]])
    dist.barrier()
    return found


def test_two_halves_have_the_parity_and_bytes_of_one_and_overlap() -> None:
    shapes = ["plain", "gemma", "tied", "scaled"]
    for plain, halved in rank_values(check_halves, 2, {"shapes": shapes}, deadline=240):
        assert plain[0] == halved[0]
        assert plain[1] == 0
        # in each of 4 regions, one gather forward and one backward, and one scatter each
        assert halved[1] >= 4 * 4
        assert 0.0 < plain[3] <= plain[2]
        assert 0.0 < halved[3] < halved[2]


def through(
    stages: list[NextTokenObjective], microbatches: list[tuple[Tensor, Tensor, Tensor | None]]
) -> list[Tensor]:
    """All forwards, then all backwards, of microbatches of unlike shapes -> losses"""
    losses, seams = [], []
    for given in microbatches:
        x, cuts = None, []
        for stage in stages:
            out = stage(*given, incoming=x)
            x = out.detach().requires_grad_()
            cuts.append((out, x))
        losses.append(out)
        seams.append(cuts)
    for cuts in seams:
        upstream = None
        for index in reversed(range(len(stages))):
            cuts[index][0].backward(upstream)
            upstream = cuts[index - 1][1].grad
    return losses


@pytest.mark.parametrize("tied", [False, True])
def test_stages_in_a_row_are_the_whole(tied: bool) -> None:
    """On one device: bit-equal losses, and gradients where nothing is held twice."""
    model = config("tied" if tied else "plain")
    microbatches = [samples(model, True, seed, batch) for seed, batch in ((1, 2), (2, 3))]
    whole = single(model)
    want = [whole(*given) for given in microbatches]
    for loss in want:
        loss.backward()
    stages = [spread(model, None, False, blocks=range(i, i + 1)) for i in range(2)]
    assert stages[0].decoder.head is None
    assert (stages[1].decoder.embed is None) != tied
    assert all(map(torch.equal, through(stages, microbatches), want))
    found = [gradients(stage) for stage in stages]
    for name, gradient in gradients(whole).items():
        parts = [g[name] for g in found if name in g]
        assert len(parts) == (2 if tied and name == "embed.weight" else 1)
        torch.testing.assert_close(sum(parts), gradient, rtol=1e-12, atol=1e-12)


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with torch.device("meta"):
        decoder = Decoder(config("plain"))
    for blocks in (range(1, 3), range(0)):
        with pytest.raises(ValueError, match="not a part"):
            keep_stage(decoder, blocks, True, True)


@ranks(2)
def test_stages_over_tensor_ranks_with_microbatches_in_flight(rank: RankContext) -> None:
    group = rank.init_torch_world()
    model = config("tied")
    microbatches = [samples(model, True, seed, batch) for seed, batch in ((1, 2), (2, 3), (3, 1))]
    whole = single(model)
    want = [whole(*given) for given in microbatches]
    for loss in want:
        loss.backward()
    for sequence_parallel in (True, False):
        stages = [spread(model, group, sequence_parallel, blocks=range(i, i + 1)) for i in range(2)]
        out = stages[0](*microbatches[0])
        assert tuple(out.shape) == residual_shape(2, SEQUENCE, model.dim, 2, sequence_parallel)
        torch.testing.assert_close(through(stages, microbatches), want, rtol=1e-12, atol=0)
        found = [gradients(stage) for stage in stages]
        own = {}
        for name in gradients(whole):
            parts = [g[name] for g in found if name in g]
            own[name] = torch.stack(parts).sum(0)
        check_gradients(model, own, gradients(whole), group, sequence_parallel)
    dist.barrier()


def bytes_of(
    rank: RankContext, sequence_parallel: bool, first: bool, last: bool
) -> tuple[int, float]:
    """(counted, by the formula) bytes of one microbatch's forward and backward in float64"""
    group = rank.init_torch_world()
    model, traffic = ModelConfig.model_validate({**SMALL, "dim": 128}), TrafficCounter()
    ends = first, last
    objective = spread(model, group, sequence_parallel, traffic, blocks=range(2), ends=ends)
    given = samples(model, False)
    n, tokens, item = group.size(), BATCH * SEQUENCE, 8
    shape = residual_shape(BATCH, SEQUENCE, model.dim, n, sequence_parallel)
    incoming = None if first else torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = objective(*given, incoming=incoming)
    out.backward(torch.ones_like(out))
    sums = 8 * model.layers + 2 * first + 2 * last
    formula = (n - 1) / n * tokens * model.dim * item * sums
    dist.barrier()
    return traffic.bytes_by_kind["tp"], formula + (2 * (n - 1) * tokens * item if last else 0)


@pytest.mark.parametrize("tp", [in_campaign(2), 4])
@pytest.mark.parametrize("ends", [(True, True), (True, False), (False, True), (False, False)])
def test_bytes_are_two_all_reduces_per_block_and_direction(
    tp: int, ends: tuple[bool, bool]
) -> None:
    """4 * 2(n-1)/n activations a block, as Shoeybi et al. count; the same with tokens cut."""
    args = {"first": ends[0], "last": ends[1]}
    cut_, whole = (
        rank_values(bytes_of, tp, {**args, "sequence_parallel": sp}) for sp in (True, False)
    )
    for counted, formula in cut_ + whole:
        assert abs(counted - formula) <= 1e-6 * formula
    assert [c for c, _ in cut_] == [c for c, _ in whole]


@ranks(4)
def test_any_number_of_tokens_can_be_cut(rank: RankContext) -> None:
    """Also where tp does not divide them, as at the end of a validation set."""
    group = rank.init_torch_world()
    model = config("qk_norm")
    text, targets, numbers = samples(model, True)
    assert numbers is not None
    for batch, length in ((3, 7), (1, 3), (1, 1)):
        given = tuple(t[:batch, :length] for t in (text, targets, numbers))
        check_step(spread(model, group, sequence_parallel=True), given, group)
    dist.barrier()


def test_shape_of_what_passes_between_stages() -> None:
    assert residual_shape(3, 8, 16, 4, True) == (6, 16)
    assert residual_shape(3, 7, 16, 4, True) == (6, 16)
    assert residual_shape(3, 8, 16, 4, False) == residual_shape(3, 8, 16, 1, True) == (3, 8, 16)


@ranks(3)
def test_what_cannot_be_cut_is_refused(rank: RankContext) -> None:
    group = rank.init_torch_world()
    for shape, words in (
        ({}, "tp 3 does not divide the 4 query heads"),
        ({"heads": 12, "kv_heads": 4, "head_dim": 4}, "neither a divisor nor a multiple"),
        ({"heads": 3, "kv_heads": 3, "head_dim": 4, "ffn_dim": 2}, "more than the 2 inner units"),
    ):
        model = ModelConfig.model_validate({**SMALL, **shape})
        with torch.device("meta"):
            objective = NextTokenObjective(Decoder(model))
        with pytest.raises(LayoutError, match=words):
            apply_tensor_parallel(objective, group)


@ranks(4)
def test_tensor_ranks_that_fsdp_shards_further(rank: RankContext) -> None:
    """dp_shard 2 by tp 2: each pair of tp ranks computes its samples, FSDP2 adds them up."""
    rank.init_torch_world()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    shards, group = mesh["dp_shard"], mesh["tp"].get_group()
    model = config("qk_norm")
    text, targets, numbers = samples(model, True, batch=4)
    assert numbers is not None
    whole = single(model)
    whole(text, targets, numbers).backward()
    boxes = boxes_of(model, 2, group.rank())
    objective = spread(model, group, sequence_parallel=True)
    apply_fsdp(objective, list(objective.decoder.layers), shards, None)
    mine = slice(shards.get_local_rank() * 2, shards.get_local_rank() * 2 + 2)
    objective(text[mine], targets[mine], numbers[mine]).backward()
    gathered = {}
    for name, gradient in gradients(objective).items():
        assert isinstance(gradient, DTensor)
        gathered[name] = gradient.full_tensor()
        assert gathered[name].shape == boxes[name].lengths
    check_gradients(model, gathered, gradients(whole), group, True)
    dist.barrier()


@pytest.mark.slow
@ranks(2)
def test_compiled_blocks_compute_the_same(rank: RankContext) -> None:
    group = rank.init_torch_world()
    model = config("grouped")
    objective = spread(model, group, sequence_parallel=True)
    assert objective.tensor is not None
    objective.tensor.exclude_from_compilation()
    for block in objective.decoder.layers:
        block.compile(backend="aot_eager")
    check_step(objective, samples(model, True, batch=2), group)
    dist.barrier()


@ranks(2)
def test_precisions_stay_near(rank: RankContext) -> None:
    """Losses of one process in the same precision: float32 to 2e-5, bfloat16 to 1e-3."""
    group = rank.init_torch_world()
    for dtype, near in ((torch.float32, 2e-5), (torch.bfloat16, 1e-3)):
        for sequence_parallel in (True, False):
            model = ModelConfig.model_validate({**SMALL, "dim": 64, "init_std": 0.05})
            given = samples(model, True, batch=16)
            whole = single(model).to(dtype)
            objective = spread(model, group, sequence_parallel).to(dtype)
            got, want = objective(*given), whole(*given)
            assert got.dtype == torch.float64
            torch.testing.assert_close(got, want, rtol=near, atol=0)
            got.backward()
            assert all(g.dtype == dtype for g in gradients(objective).values())
    dist.barrier()


@ranks(2, dies={1: "SIGKILL"})
def test_a_lost_tensor_rank_is_a_lost_peer(rank: RankContext) -> None:
    group = rank.init_torch_world()
    model = config("plain")
    objective = spread(model, group, sequence_parallel=True)
    loss = objective(*samples(model, False, batch=2))
    if rank.rank == 1:
        rank.kill(1)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert is_peer_loss(caught.value)
