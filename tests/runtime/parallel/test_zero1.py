"""The stages of ZeRO: the same training, the bytes that each keeps, the bytes that each sends."""

from __future__ import annotations

import gc
import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.optimizer import BLOCK, OptimizerConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.core.sharding.reduction_cells import reduction_cells
from holdfast.core.sharding.reduction_tree import deal
from holdfast.core.sharding.state_table import mesh_box, parameter_table
from holdfast.layout import Layout, place_replicas
from holdfast.model.decoder import Decoder
from holdfast.model.init import initial_box
from holdfast.options.short_state.apply import EightBitCode, ShortStateOptimizer
from holdfast.parallel.axes.fsdp import ShardedGradients, apply_fsdp, local_tensor
from holdfast.parallel.axes.replicated import ReplicatedGradients
from holdfast.parallel.axes.zero1 import OwnedRows
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.comm.transport import PeerGroup, exchange
from holdfast.parallel.gradients.cell_team import FIRST_TAG, TAGS_PER_REDUCER, CellTeam
from holdfast.parallel.gradients.feeder import Cells, single_cell
from holdfast.parallel.torch_compat import PrefixStore
from holdfast.training.engine.objective import NextTokenObjective
from holdfast.training.optimizers.make_optimizer import make_optimizer
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values

SMALL: dict[str, Any] = {
    "preset": None,
    "layers": 2,
    "dim": 16,
    "heads": 2,
    "kv_heads": 1,
    "ffn_dim": 21,
    "vocab_size": 31,
    "tied_embeddings": True,
}
WIDE: dict[str, Any] = {
    "preset": None,
    "layers": 4,
    "dim": 128,
    "heads": 4,
    "kv_heads": 4,
    "ffn_dim": 384,
    "vocab_size": 16,
    "tied_embeddings": False,
}


class Rank:
    """One rank of replicas over dp_shard at one stage of ZeRO, from the parts of this room.

    shards: the degree of dp_shard of each replica.
    """

    def __init__(
        self,
        rank: RankContext,
        shape: dict[str, Any],
        zero: int,
        shards: list[int],
        *,
        state: torch.dtype,
        compute: torch.dtype | None = None,
        samples: int = 6,
        length: int = 4,
        state_dtype: Literal["fp32", "bf16", "8bit"] = "fp32",
    ):
        self.samples, self.length = samples, length
        self.model = ModelConfig.model_validate(shape)
        layouts = [Layout(dp_shard=degree) for degree in shards]
        topology = place_replicas(layouts, 1, ("n",) * rank.world_size)
        self.at, self.replicas = topology.coordinate(rank.rank), len(shards)
        self.traffic, store = TrafficCounter(), rank.store()
        self.peers = PeerGroup(store, "g1", rank.rank, rank.world_size, traffic=self.traffic)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"replica{self.at.replica}", store),
            rank=self.at.dp_shard,
            world_size=shards[self.at.replica],
        )
        rank.barrier("joined")  # who leaves early breaks a connection being made
        table, replica = parameter_table(self.model), topology.replica_of(rank.rank)
        self.boxes = {row.name: mesh_box(row, replica, self.at) for row in table}
        self.whole = {
            row.name: mesh_box(replace(row, shard_dim=None), replica, self.at) for row in table
        }
        cells = self._cells(topology, rank.rank, zero)
        with torch.device("meta"):
            self.objective = NextTokenObjective(Decoder(self.model))
        self.objective.to(state)
        build = self._sharded if zero > 1 and dist.get_world_size() > 1 else self._whole
        self.feeder, self.held, self.refresh = build(cells, zero, state, compute)
        rows = decoder_parameters(self.model)
        for row, tensor, box in zip(rows, self.held, self.boxes.values(), strict=True):
            tensor.copy_(initial_box(row, 5, box.offsets, box.lengths))
        self.refresh()
        config = OptimizerConfig(learning_rate=0.01, state_dtype=state_dtype)
        gradients, boxes = self.feeder.gradients(), list(self.boxes.values())
        self.optimizer = make_optimizer(config, rows, self.held, gradients, boxes=boxes)
        self.codes: list[EightBitCode] = []
        if isinstance(self.optimizer, ShortStateOptimizer):
            self.codes += self.optimizer.codes.values()

    def _cells(self, topology: Any, rank: int, zero: int) -> Cells:
        """Of dp_shard alone, each rank's part is a cell with tags of its own."""
        cells = reduction_cells(topology, self.model, rank, sequence_parallel=False, zero=zero)
        starts: dict[Any, int] = {}
        for other in range(topology.world_size):
            for cell in reduction_cells(
                topology, self.model, other, sequence_parallel=False, zero=zero
            ):
                starts.setdefault(cell, FIRST_TAG + len(starts) * TAGS_PER_REDUCER)
        return [
            (
                cell,
                CellTeam(
                    self.peers,
                    cell.members,
                    cell.members.index(cell.member(rank)),
                    tuple(m.rank for m in cell.members),
                    starts[cell],
                ),
            )
            for cell in cells
        ]

    def _named(self) -> dict[str, nn.Parameter]:
        return {n.removeprefix("decoder."): p for n, p in self.objective.named_parameters()}

    def _whole(self, cells: Cells, zero: int, state: torch.dtype, compute: Any) -> Any:
        self.objective.to(compute or state).to_empty(device="cpu")
        named = self._named()
        feeder = ReplicatedGradients(
            named,
            self.whole,
            cells,
            dtype=state,
            bucket_bytes=8000,
            wanted=self.boxes,
            by_unit=zero > 1,
        )
        rows = OwnedRows(
            named,
            self.whole,
            self.boxes,
            dist.group.WORLD,
            state=state,
            bucket_bytes=4000,
            traffic=self.traffic,
        )
        return feeder, rows.master_tensors, rows.gather

    def _sharded(self, cells: Cells, zero: int, state: torch.dtype, compute: Any) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        apply_fsdp(self.objective, list(self.objective.decoder.layers), mesh, compute, zero)
        self.objective.to_empty(device="cpu")
        named = self._named()
        feeder = ShardedGradients(
            self.objective, named, self.boxes, cells, dtype=state, traffic=self.traffic
        )
        return feeder, [local_tensor(p) for p in named.values()], lambda: None

    def step(self, leaves: int, number: int, forward: Callable[[], None] = lambda: None) -> None:
        """One update with gradients summed, not averaged. forward: called after each forward."""
        shares = deal(leaves, self.replicas)
        self.feeder.begin(leaves, shares)
        for leaf in shares[self.at.replica]:
            generator = torch.Generator().manual_seed(100 * number + leaf)
            shape = (self.samples, self.length + 1)
            tokens = torch.randint(self.model.vocab_size, shape, generator=generator)
            part = self.samples // dist.get_world_size()
            rows = slice(part * self.at.dp_shard, part * (self.at.dp_shard + 1))
            loss = self.objective(tokens[rows, :-1], tokens[rows, 1:].contiguous())
            forward()
            self.feeder.start_leaf(leaf)
            loss.backward()
            self.feeder.end_leaf()
            self.feeder.check()
        self.feeder.finish()
        exchange(self.peers, torch.zeros(1, dtype=torch.int64), [1] * self.peers.size, tag=1)
        self.optimizer.apply(number, 0.01, 24.0 * leaves)
        self.refresh()


SHAPES = {"small": SMALL, "even": {**WIDE, "layers": 1, "dim": 32, "ffn_dim": 48}}


def _state(
    rank: RankContext, shape: str, zero: int, shards: list[int]
) -> list[tuple[str, list[int], list[Any]]]:
    made = Rank(rank, SHAPES[shape], zero, shards, state=torch.float64)
    for number in (1, 2, 3):
        made.step(4, number)
    return [
        (name, list(box.offsets), tensor.tolist())
        for (name, box), tensor in zip(made.boxes.items(), made.held, strict=True)
    ]


def _spelled(value: int | list[int]) -> str:
    if isinstance(value, int):
        return f"zero{value}"
    return "_".join(f"dpshard{degree}" for degree in value)


def _check_parity(shape: str, zero: int, shards: list[int]) -> None:
    (alone,) = rank_values(_state, 1, {"shape": shape, "zero": 1, "shards": [1]})
    want = {name: torch.tensor(values, dtype=torch.float64) for name, _, values in alone}
    spread = rank_values(_state, sum(shards), {"shape": shape, "zero": zero, "shards": shards})
    held = dict.fromkeys(want, 0)
    for state in spread:
        for name, offsets, values in state:
            if values:
                got = torch.tensor(values, dtype=torch.float64)
                part = want[name].narrow(0, offsets[0], len(values))
                assert float((got - part).norm() / part.norm()) < 1e-10, name
                held[name] += len(values)
    assert held == {name: len(shards) * tensor.shape[0] for name, tensor in want.items()}


@pytest.mark.parametrize(
    ("zero", "shards"),
    [in_campaign(1, [2]), (1, [3]), in_campaign(1, [2, 2]), (2, [3]), in_campaign(3, [3, 3])],
    ids=_spelled,
)
def test_parity_with_one_process(zero: int, shards: list[int]) -> None:
    """31 rows of vocabulary and 21 of the feed-forward: no stage's cut is even."""
    _check_parity("small", zero, shards)


@pytest.mark.parametrize(
    ("zero", "shards"),
    [in_campaign(1, [2, 1]), (1, [2, 3]), in_campaign(2, [1, 2]), (3, [2, 3])],
    ids=_spelled,
)
def test_parity_of_unlike_replicas(zero: int, shards: list[int]) -> None:
    _check_parity("small", zero, shards)


def test_parity_where_units_are_summed_in_place_dpshard2() -> None:
    """Every row count is even and every size whole lines: FSDP2 writes into the buffer itself."""
    _check_parity("even", 3, [2, 2])


def _bits(rank: RankContext) -> str:
    shards = [2] * (rank.world_size // 2)
    made = Rank(rank, SMALL, 1, shards, state=torch.float32, compute=torch.bfloat16)
    for number in (1, 2):
        made.step(7, number)
    digest = hashlib.sha256()
    for tensor in made.held:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def test_replicas_of_zero1_are_bit_equal_in_bf16_dpshard2() -> None:
    by_shard: list[set[str]] = [set(), set()]
    for replicas in (1, 3):
        for rank, bits in enumerate(rank_values(_bits, 2 * replicas)):
            by_shard[rank % 2].add(bits)
    assert [len(bits) for bits in by_shard] == [1, 1]


def _storages() -> dict[int, int]:
    """Bytes of every tensor's storage in this process, by address."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            if thing.device.type == "cpu" and storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def _kept(
    rank: RankContext, zero: int, compute: str, moments: Literal["fp32", "bf16", "8bit"]
) -> list[int]:
    """(bytes of all tensors after a forward, model elements, elements outside of the blocks,
    elements whose moments stay fp32 under 8bit).

    One token a rank, so that activations are next to nothing.
    """
    made = Rank(
        rank,
        WIDE,
        zero,
        [rank.world_size],
        state=torch.float32,
        compute=torch.bfloat16 if compute == "bf16" else None,
        state_dtype=moments,
        samples=rank.world_size,
        length=1,
    )
    held: list[int] = []

    def look() -> int:
        storages = _storages()
        for reducer in made.feeder.reducers:  # room for what others send is no state
            for room in reducer._scratch.values():
                storages.pop(room.untyped_storage().data_ptr(), None)
        for code in made.codes:  # of one size for any model
            storages.pop(code.codes.untyped_storage().data_ptr())
        for buffer in made.objective.buffers():
            storages.pop(buffer.untyped_storage().data_ptr(), None)
        return sum(storages.values())

    def measure() -> None:
        # A thread of the backend may still hold the buffer of a gather that is over: it lets go
        # when it next runs, on a busy machine after the first look. Nothing else computes here,
        # so what stays is the least of several looks, until it no longer falls.
        deadline, still = time.monotonic() + 1.0, threading.Event()
        least, unchanged = look(), 0
        while unchanged < 5 and time.monotonic() < deadline:
            still.wait(0.03)
            found = look()
            unchanged = 0 if found < least else unchanged + 1
            least = min(least, found)
        held.append(least)

    made.step(1, 1)
    made.step(1, 2, measure)
    ends = sum(box.size for name, box in made.whole.items() if not name.startswith("layers."))
    rest = sum(box.size for box in made.whole.values() if not _is_in_8bit(box.lengths))
    return [held[0], sum(box.size for box in made.whole.values()), ends, rest]


def _is_in_8bit(shape: tuple[int, ...]) -> bool:
    return OptimizerConfig(state_dtype="8bit").is_in_8bit(shape)


CASES_OF_BYTES = [
    *[(zero, 4, "bf16", "fp32") for zero in (1, 2, 3)],
    *[in_campaign(zero, 2, "bf16", "fp32") for zero in (1, 2, 3)],
    (2, 2, "fp32", "fp32"),
    *[in_campaign(zero, 2, "fp32", "fp32") for zero in (1, 3)],
    *[in_campaign(zero, 4, "fp32", "fp32") for zero in (1, 2, 3)],
    *[in_campaign(zero, 4, "bf16", short) for zero in (1, 2, 3) for short in ("bf16", "8bit")],
]
MOMENTS = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 * (1 + 4 / BLOCK)}
"""Bytes of AdamW's two, per parameter."""


@pytest.mark.parametrize(("zero", "size", "compute", "moments"), CASES_OF_BYTES)
def test_bytes_of_state_are_the_papers(zero: int, size: int, compute: str, moments: str) -> None:
    """Rajbhandari et al., 2020, section 5, with a gradient sum in fp32. For bf16 these are 2, 4
    and K = 12 bytes. For fp32, where no copy is computed with, they are 4, 4 and K = 8. Stage 2
    gathers a copy also there."""
    arguments = {"zero": zero, "compute": compute, "moments": moments}
    copy, kept = (2, MOMENTS[moments] + 4) if compute == "bf16" else (4, MOMENTS[moments])
    for held, model, ends, rest in rank_values(_kept, size, arguments):
        own = kept if compute == "bf16" else kept + 4
        formula = {
            1: copy * model + 4 * model + kept * model / size,
            2: copy * model + (4 + own) * model / size,
            3: copy * ends + (4 + own) * model / size,
        }[zero]
        if moments == "8bit":
            formula += (MOMENTS["fp32"] - MOMENTS["8bit"]) * rest / size
        assert held == pytest.approx(formula, rel=0.02)


def _sent(rank: RankContext, zero: int) -> list[float]:
    """Bytes sent in a step as a fraction of the model, and the fraction outside of the blocks."""
    made = Rank(rank, WIDE, zero, [rank.world_size], state=torch.float32, samples=rank.world_size)
    made.step(1, 1)
    made.traffic.reset()
    made.step(1, 2)
    sizes = {name: box.size for name, box in made.whole.items()}
    model = sum(sizes.values())
    ends = sum(size for name, size in sizes.items() if not name.startswith("layers."))
    sent = made.traffic.bytes_by_kind
    sent.pop("control")
    return [sum(sent.values()) / (4 * model), ends / model]


@pytest.mark.parametrize("size", [in_campaign(2), 4])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_on_the_wire_are_the_papers(zero: int, size: int) -> None:
    """Rajbhandari et al., 2020, section 7: twice the model, and three times in stage 3, of which
    the last unit is spared one gather: the backward begins where the forward ended."""
    for sent, ends in rank_values(_sent, size, {"zero": zero}):
        times = 3 if zero == 3 else 2
        assert sent == pytest.approx(times * (size - 1) / size, rel=0.02)
        exact = times - (ends if zero == 3 else 0)
        assert sent == pytest.approx(exact * (size - 1) / size, rel=0.003)


class Uneven(nn.Module):
    """A matrix of no rows beside one of four."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.some = nn.Linear(3, 0, bias=False), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, 3] -> scalar"""
        return self.some(x).sum() + self.none(x).sum()


def _empty(rank: RankContext) -> list[float]:
    """As where tensor parallelism leaves a rank no row of the vocabulary."""
    rank.init_torch_world()
    module = Uneven()
    apply_fsdp(module, [], init_device_mesh("cpu", (2,)), None)
    named = dict(module.named_parameters())
    boxes = {
        name: Box(
            name,
            (local_tensor(p).shape[0] * rank.rank,) + (0,) * (p.dim() - 1),
            tuple(local_tensor(p).shape),
        )
        for name, p in named.items()
    }
    peers = PeerGroup(rank.store("alone"), f"g{rank.rank}", 0, 1)
    feeder = ShardedGradients(module, named, boxes, single_cell(boxes, peers), dtype=torch.float32)
    feeder.begin(1, ((0,),))
    feeder.start_leaf(0)
    module(torch.full((1, 3), 1.0 + rank.rank)).backward()
    feeder.end_leaf()
    feeder.finish()
    assert [tuple(g.shape) for g in feeder.gradients()] == [(0, 3), (2, 3), (2,)]
    return [float(g.sum()) for g in feeder.gradients()]


def test_fsdp_leaves_a_tensor_without_elements_alone() -> None:
    assert rank_values(_empty, 2) == [[0.0, 18.0, 4.0]] * 2


def test_a_part_that_is_not_this_ranks_is_refused() -> None:
    rank_values(_refused, 2)


def _refused(rank: RankContext) -> None:
    rank.init_torch_world()
    named = {"w": torch.zeros(4, 2)}
    whole = {"w": Box("w", (0, 0), (4, 2))}
    other = {"w": Box("w", (2 - 2 * rank.rank, 0), (2, 2))}
    with pytest.raises(ValueError, match="is not part"):
        OwnedRows(named, whole, other, dist.group.WORLD, state=torch.float32)
