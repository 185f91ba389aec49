"""Layouts by name, for the tests that run many of them.

one               a single process, the reference
dp2 tp2 pp4       replicas, tensor parallel, pipeline
cp2               context parallel by all-gather; ring.cp2, ulysses.cp2, hybrid.cp4: otherwise
shard2            dp_shard 2 under ZeRO-3; zero1.2 and zero2.2: under ZeRO-1 and ZeRO-2
once.zero2.2      ZeRO-2 that adds up gradients once a step
pp2-dp2-tp2       a product
zbv.pp2           a pipeline schedule: interleaved, zbh1, zbv, dualpipev, gpipe
2bw.pp2           an asynchronous one: pipedream, 2bw, pipemare
pp3+pp2           unlike replicas side by side
plain.tp2         without sequence parallelism;  gpipe.pp2: another schedule
files.dp2         optimizer state in a file, gradients on the host
gathered.dp2      gradients between replicas by collectives
fp8.dp2           float8 products, of a model that is wide enough;  wider.bf16.one: its shapes
qboth.shard2      shards send each other codes of few bits;  qweights.shard2, qgradients.shard2
state8bit.dp2     moments in 8 bits, of a model that is wide enough;  statebf16.dp2: in bf16
att2.tp4          attention in two parts, each on two ranks; ffn2: feed-forwards; att2ffn1: both
experts.tp2       with experts; experts.ep2.shard2: spread over two ranks
long.cp4          of more tokens, which 2, 3 and 4 ranks divide;  documents.cp2: in documents
full.tp2          blocks are run again in the backward pass; selective.tp2, compiled.tp2
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, lcm, prod
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import torch

from holdfast.config.run import RunConfig
from holdfast.config.sections.data import DataConfig
from holdfast.core.sharding.boxes import Box
from holdfast.core.sharding.optimizer_state import VELOCITY, slot_prefix
from holdfast.layout import Layout, Topology, place_replicas
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.parallel.torch_compat import Store
from holdfast.plan.placing.balance import planned_stages
from holdfast.training.engine.build import build_engine, connect_settings
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.task import EngineTask
from holdfast.training.engine.vote import StepVerdict
from tests.support.ranks import RankContext
from tests.support.tiny_training import CPU, LENGTH, changed, digest, feed

VOCABULARY, STEPS = 61, 8

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"train__recompute": "full"},
    "selective": {"train__recompute": "selective"},
    "attention": {"train__recompute": "selective", "train__recompute_keep": ["attention"]},
    "activation": {"train__recompute": "selective", "train__recompute_keep": ["activation"]},
    "most": {
        "train__recompute": "selective",
        "train__recompute_keep": ["matmul", "attention", "activation"],
    },
    "cut": {"train__recompute": "full", "train__partition_activations": True},
    "cut-most": {
        "train__recompute": "selective",
        "train__recompute_keep": ["matmul", "attention", "activation"],
        "train__partition_activations": True,
    },
    "staged": {"train__recompute": ["full", "none"], "layout__pp": 2},
    "unstaged": {"train__recompute": ["none", "selective"], "layout__pp": 2},
}
"""Ways to keep less of a forward pass. The last two are for two stages."""

_FLAGS: dict[str, dict[str, Any]] = {
    "plain": {"layout__sequence_parallel": False},
    "gpipe": {"layout__schedule": "gpipe"},
    "ring": {"layout__cp_method": "ring"},
    "ulysses": {"layout__cp_method": "ulysses"},
    "hybrid": {"layout__cp_method": "ulysses-ring"},
    "heads": {"model__kv_heads": 4},
    "long": {"data__sequence_length": 24},
    "documents": {"data__attention": "document"},
    "interleaved": {"layout__schedule": "interleaved"},
    "zbh1": {"layout__schedule": "zb-h1"},
    "packed": {"layout__balance": "memory"},
    "uneven": {"layout__balance_costs": [0, 1, 1, 1, 1, 9]},
    "zbv": {"layout__schedule": "zbv"},
    "dualpipev": {"layout__schedule": "dualpipev"},
    "pipedream": {"layout__schedule": "pipedream"},
    "2bw": {"layout__schedule": "pipedream-2bw"},
    "pipemare": {"layout__schedule": "pipemare"},
    "gathered": {"layout__exchange": "gathered"},
    "shared": {"cluster__workers_per_device": 2},
    **RECOMPUTE,
    "compiled": {"train__compile": True},
    "untied": {"model__tied_embeddings": False},
    "qknorm": {"model__qk_norm": True},
    "biased": {"model__attention_bias": "qkv"},
    "gemma": {
        "model__norms": "both",
        "model__norm_plus_one": True,
        "model__activation": "gelu_tanh",
        "model__window": 5,
        "model__window_layers": [0],
        "model__embedding_multiplier": 4.0,
        "model__attention_softcap": 3.0,
        "model__logit_softcap": 4.0,
    },
    "experts": {
        "model__family": "mixtral",
        "model__experts": {"count": 4, "top_k": 2, "balance_loss": 0.02, "z_loss": 0.001},
    },
    "dropping": {
        "model__family": "mixtral",
        "model__experts": {"count": 4, "top_k": 2, "balance_loss": 0.02, "capacity": 0.7},
    },
    "sigmoid": {
        "model__family": "dots1",
        "model__qk_norm": True,
        "model__experts": {
            "count": 4,
            "top_k": 2,
            "width": 16,
            "scores": "sigmoid",
            "shared": 1,
            "scale": 1.5,
            "choice_bias": True,
            "bias_rate": 0.01,
        },
    },
    "once": {"layout__zero2_reduce": "step"},
    **{
        f"att{a}" * (a > 0) + f"ffn{f}" * (f > 0): {"layout__tp_by": {"attention": a, "ffn": f}}
        for a in range(3)
        for f in range(3)
        if a or f
    },
    "six": {"model__heads": 6, "model__head_dim": 4},
    "ep2": {"layout__ep": 2},
    "ep4": {"layout__ep": 4},
    "copies": {"layout__expert_replicas": "auto"},
    "fp32": {"train__precision": "fp32"},
    "bf16": {"train__precision": "bf16"},
    "fp16": {"train__precision": "fp16"},
    "fp8": {
        "train__precision": "fp8",
        "data__sequence_length": 16,  # in the run file: on a device 12 would be too odd
        "model__dim": 64,
        "model__ffn_dim": 128,
    },
    "wider": {"model__dim": 64, "model__ffn_dim": 128},
    "qweights": {"layout__quantized": "weights", "layout__dp_shard": 2},
    "qgradients": {"layout__quantized": "gradients", "layout__dp_shard": 2},
    "qboth": {"layout__quantized": "both", "layout__dp_shard": 2},
    "small": {"train__batch_size": 8},  # two microbatches
    "files": {
        "train__memory": {
            "optimizer": "file",
            "gradients": "host",
            "folder": gettempdir(),
            "piece_mb": 0.05,
        }
    },
    "shallow": {"model__layers": 2},
    "deep": {"model__layers": 4},
    "eight": {"model__layers": 8},
    **{
        name: {"train__optimizer": {"name": name, "learning_rate": 0.01, "clip_norm": 0.05}}
        for name in ("sgd", "lion", "adafactor", "muon")
    },
    **{
        f"state{short}": {
            "train__precision": "fp32",
            "train__optimizer": {"learning_rate": 0.01, "clip_norm": 0.05, "state_dtype": short},
            "model__dim": 64,
            "model__ffn_dim": 128,
        }
        for short in ("bf16", "8bit")
    },
    "wide": {"model__dim": 256, "model__ffn_dim": 256},
}


@dataclass(frozen=True)
class Case:
    """What a name means: one Layout per replica, and changes of the run file."""

    name: str
    replicas: tuple[Layout, ...]
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return sum(layout.replica_size for layout in self.replicas)


def case(name: str) -> Case:
    """Read a name. Raises ValueError for a word that it does not know."""
    changes: dict[str, Any] = {}
    *flags, rest = re.split(r"\.(?=[a-z]|2bw)", name)
    for flag in flags:
        changes.update(_FLAGS[flag])
    replicas: list[Layout] = []
    for text in rest.split("+"):
        layout = Layout()
        for word in text.split("-") if text != "one" else []:
            match = re.fullmatch(r"(pp|dp|shard|cp|tp|zero[12]\.)(\d+)", word)
            if match is None:
                raise ValueError(f"{word!r} in {name!r} is not an axis")
            axis, degree = match[1], int(match[2])
            if axis.startswith("zero"):
                changes["layout__zero"] = int(axis[4])
                axis = "shard"
            keys = {"dp": "dp_replicate", "shard": "dp_shard"}
            layout = replace(layout, **{keys.get(axis, axis): degree})
        replicas += [replace(layout, dp_replicate=1)] * layout.dp_replicate
    if "layout__tp_by" in changes:
        degrees = filter(None, changes["layout__tp_by"].values())
        changes["layout__tp"] = lcm(max(layout.tp for layout in replicas), *degrees)
    if "layout__ep" in changes:  # the run file's own replica is one that has it
        changes["layout__cp"] = max(layout.cp for layout in replicas)
        shards = max(layout.dp_shard for layout in replicas)
        missing = changes["layout__ep"] // gcd(
            changes["layout__ep"], shards * changes["layout__cp"]
        )
        changes["layout__dp_shard"] = shards * missing
    return Case(name, tuple(replicas), changes)


def model_flags(name: str) -> str:
    """What of a name's words makes another curve: a single process heeds those."""
    precisions = ("fp32", "bf16", "fp16", "fp8", "wider")
    kinds = ("qknorm", "biased", "gemma", "untied", "heads", "six", "long", "documents")
    kinds += ("experts", "sigmoid", "dropping")
    flags = (*kinds, *precisions, "small", "shallow", "deep", "eight")
    return "".join(f"{flag}." for flag in flags if flag in name)


def of_one_model(*names: str) -> list[str]:
    """These layouts, of a model no deeper than their longest pipeline needs: it takes half the
    time."""
    longest = max(
        layout.pp * config_of(case(name).changes).layout.stages_a_worker
        for name in names
        for layout in case(name).replicas
    )
    depth = "eight" if longest > 4 else "deep" if longest > 2 else "shallow"
    return [f"{depth}.{name}" for name in names]


def config_of(changes: dict[str, Any]) -> RunConfig:
    """Return a small run: 6 microbatches of 4 samples a step, 4 blocks, two key/value heads for
    four query heads. Its vocabulary is indivisible, and clipping is active in each step."""
    value: dict[str, Any] = {
        "data": {"sequence_length": LENGTH},
        "model": {
            "preset": None,
            "layers": 4,
            "dim": 16,
            "heads": 4,
            "kv_heads": 2,
            "ffn_dim": 24,
            "vocab_size": VOCABULARY,
            "tied_embeddings": True,
        },
        "train": {
            "steps": STEPS,
            "batch_size": 24,
            "microbatch_size": 4,
            "precision": "float64",
            "optimizer": {"learning_rate": 0.01, "clip_norm": 0.05},
            "schedule": {"warmup_steps": 4},
        },
        "layout": {"bucket_mb": 0.004},
    }
    return changed(value, changes)


def topology_of(
    of: Case, config: RunConfig, generation: int = 1, ranks: Sequence[int] | None = None
) -> Topology:
    """Replicas in order, `ranks` (in rising order) in mesh order inside each."""
    layouts = [
        replace(
            layout,
            stages=config.layout.stages or planned_stages(config, layout.mesh_shape),
            is_folded=config.layout.is_folded,
        )
        if layout.pp > 1
        else layout
        for layout in of.replicas
    ]
    topology = place_replicas(layouts, generation, ("node",) * of.world_size)
    if ranks is None:
        return topology
    permuted = tuple(
        replace(replica, ranks=tuple(ranks[rank] for rank in replica.ranks))
        for replica in topology.replicas
    )
    return Topology(generation, permuted, topology.nodes)


def engine_of(
    config: RunConfig,
    topology: Topology,
    rank: int,
    store: Store,
    traffic: TrafficCounter | None = None,
    task: EngineTask | None = None,
) -> StepEngine:
    """Connected and initialised. task: what is trained; None: the decoder."""
    settings = replace(connect_settings(config, store, CPU, 60.0), traffic=traffic)
    made = build_engine(config, connect(settings, topology, rank), CPU, task=task)
    made.initialise(config.seed)
    return made


def engine_for(
    rank: RankContext,
    name: str,
    config: RunConfig | None = None,
    store: str = "run",
    traffic: TrafficCounter | None = None,
    task: EngineTask | None = None,
) -> StepEngine:
    """That of a rank of the layout `name`, connected and initialised. store: of its world."""
    config = config or config_of(case(name).changes)
    topology = topology_of(case(name), config)
    return engine_of(config, topology, rank.rank, rank.store(store), traffic, task)


def one_step(made: StepEngine, step: int, data: DataConfig | None = None) -> StepVerdict:
    """data: its length of a sample, and whether documents are kept apart."""
    shard, shards = made.groups.coordinate.dp_shard, made.groups.degree("dp_shard")
    length = LENGTH if data is None else data.sequence_length
    apart = data is not None and data.attention == "document"
    share = made.begin(step)
    made.compute([feed(step, j, 4, shard, shards, VOCABULARY, length, apart) for j in share])
    verdict = made.reduce()
    made.apply(verdict)
    return verdict


def curve_of(made: StepEngine, steps: int, data: DataConfig | None = None) -> dict[str, Any]:
    """Train to step `steps`. Return what each step gave, and the digest of the state then."""
    first = (made.status.applied_step or 0) + 1
    verdicts = [one_step(made, step, data) for step in range(first, steps + 1)]
    return {
        "losses": [verdict.mean_loss for verdict in verdicts],
        "norms": [verdict.mean_norm for verdict in verdicts],
        "tokens": [verdict.tokens for verdict in verdicts],
        "digest": digest(made),
    }


def train_layout(rank: RankContext, name: str, steps: int, **changes: Any) -> dict[str, Any]:
    """Train under a layout. Return the curve; the state goes into the folder of the ranks."""
    config = config_of({**case(name).changes, **changes})
    made = engine_for(rank, name, config)
    found = curve_of(made, steps, config.data)
    save_pieces(rank.folder / f"{rank.rank}.npz", pieces(made))
    made.close()
    return found


DTYPES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""By the words of a state table."""
Piece = tuple[str, tuple[int, ...], np.ndarray]


def pieces(made: StepEngine) -> list[Piece]:
    """All state that this rank holds: name, offsets, values. bfloat16 comes as its bits."""
    return [(t.name, t.offsets, as_numpy(t.tensor).copy()) for t in made.state()]


def pieces_of_curve(made: StepEngine) -> list[Piece]:
    """`pieces` without the mean movement that pipemare keeps: it depends on the pipeline."""
    return [piece for piece in pieces(made) if not piece[0].startswith(slot_prefix(VELOCITY))]


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A view. bfloat16 comes as its bits."""
    found: np.ndarray = (
        tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return found


def save_pieces(path: Any, found: list[Piece]) -> None:
    """Write what `pieces` gave, for another process to read."""
    arrays = {f"{name}|{','.join(map(str, offsets))}": values for name, offsets, values in found}
    np.savez(path, **arrays)


def load_pieces(path: Any) -> list[Piece]:
    with np.load(path) as file:
        out = []
        for key in file.files:
            name, _, offsets = key.partition("|")
            out.append((name, tuple(int(n) for n in offsets.split(",")), file[key]))
        return out


def load_complete(path: Any) -> dict[str, np.ndarray]:
    """The state of a single process, by name."""
    return {name: values for name, _, values in load_pieces(path)}


def restore(made: StepEngine, whole: dict[str, np.ndarray], step: int) -> None:
    """Continue after step `step` from a complete state."""

    def read(box: Box, tensor: torch.Tensor) -> None:
        part = tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))
        as_numpy(tensor)[...] = whole[box.name][part]

    made.load(read)
    made.set_applied_step(step)


def assert_state_equal(
    whole: dict[str, np.ndarray], held: list[Piece], tolerance: float
) -> dict[str, int]:
    """Compare each piece with its part of the complete tensor, as |difference| / |part|. Return the
    number of elements by name."""
    count: dict[str, int] = {}
    for name, offsets, values in held:
        count[name] = count.get(name, 0) + values.size
        if not values.size:
            continue
        part = whole[name][
            tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        ]
        assert part.shape == values.shape, (name, part.shape, values.shape)
        if tolerance == 0.0:
            assert np.array_equal(part, values), name
            continue
        norm = max(float(np.linalg.norm(part)), 1e-30)
        error = float(np.linalg.norm(part - values)) / norm
        assert error < tolerance, (name, offsets, error)
    return count


def assert_all_state(whole: dict[str, np.ndarray], files: Iterable[Path], tolerance: float) -> None:
    """Check that the ranks' files, one each, equal the complete state and cover all of it."""
    count: dict[str, int] = {}
    for file in files:
        for name, number in assert_state_equal(whole, load_pieces(file), tolerance).items():
            count[name] = count.get(name, 0) + number
    for name, values in whole.items():
        assert count.get(name, 0) >= prod(values.shape), name
