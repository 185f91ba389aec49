"""Small models whose steps `holdfast calibrate` measures, each for what one constant adds to it.

Probes "alone" run in every process at the same time, without peers: they show what the passes, the
sums of gradients and the update take. The rest run in one layout of two ranks. They show what the
exchange of an axis takes as the engine does it: copies, Python and waits are in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.layout import AXES, Layout, Topology, place_layout

NODE = "here"
HEAD = 32
"""Elements of a head of attention."""


@dataclass(frozen=True)
class Probe:
    """One model and layout."""

    name: str
    way: str  # what of a pool's links it measures (`NodePool.ways`), "" for a rank alone
    layers: int
    dim: int
    tokens: int  # of a sample
    samples: int = 2  # of a microbatch
    microbatches: int = 1  # of a step and replica
    vocabulary: int = 512
    layout: Mapping[str, Any] = field(default_factory=dict)  # keys of the run file's `layout`
    experts: int = 0  # of each block; 0: none
    precision: str = "fp32"
    is_large: bool = False  # an accelerator computes longer than its host

    @property
    def ranks(self) -> int:
        return 2 if self.way else 1

    @property
    def replicas(self) -> int:
        return self.ranks // prod(int(self.layout.get(axis, 1)) for axis in AXES)

    def config(self, device: str = "cpu") -> RunConfig:
        """The probe as a run file."""
        heads = max(2, self.dim // (2 * HEAD if self.is_large else HEAD))
        model: dict[str, Any] = {
            "preset": None,
            "layers": self.layers,
            "dim": self.dim,
            "heads": heads,
            "kv_heads": heads,
            "ffn_dim": 5 * self.dim // 2,
            "vocab_size": self.vocabulary,
            "tied_embeddings": False,
        }
        if self.experts:
            experts = {"count": self.experts, "top_k": 2, "width": self.dim // 2}
            model |= {"family": "mixtral", "experts": experts}
        layout = {"workers": self.ranks} | dict(self.layout)
        if layout.get("pp", 1) > 1:
            layout["stages"] = self.stages
        size = self.samples * self.microbatches * self.replicas
        return RunConfig.model_validate(
            {
                "device": device,
                "model": model,
                "data": {"sequence_length": self.tokens},
                "layout": layout,
                "train": {
                    "steps": 10**6,
                    "batch_size": size,
                    "microbatch_size": self.samples,
                    "precision": self.precision,
                },
            }
        )

    @property
    def stages(self) -> tuple[int, ...]:
        """Blocks of each pipeline stage; () without a pipeline."""
        pp = int(self.layout.get("pp", 1))
        return (self.layers // pp,) * pp if pp > 1 else ()

    def topology(self) -> Topology:
        degrees: dict[str, Any] = {axis: int(self.layout.get(axis, 1)) for axis in AXES}
        layout = Layout(dp_replicate=self.replicas, stages=self.stages, **degrees)
        return place_layout(layout, 1, (NODE,) * self.ranks)


ALONE = (
    Probe("alone: tiny", "", 1, 64, 16),
    Probe("alone: deep", "", 6, 64, 16),
    Probe("alone: many microbatches", "", 2, 64, 16, microbatches=6),
    Probe("alone: tokens", "", 2, 96, 192, samples=6),
    Probe("alone: wide", "", 2, 320, 96, samples=4, vocabulary=1536),
    Probe("alone: parameters", "", 1, 512, 16),
    Probe("alone: sums", "", 1, 384, 32, microbatches=4),
    Probe("alone: blocks", "", 3, 192, 144, samples=3, vocabulary=1024),
    Probe("alone: few tokens", "", 2, 256, 48, microbatches=4),
    Probe("alone: products", "", 1, 448, 256, samples=2, vocabulary=1024),
    Probe("alone: long", "", 2, 128, 640, samples=1),
)
LARGE = (
    Probe("large: wide", "", 2, 3072, 1024, 8, 1, 4096, precision="bf16", is_large=True),
    Probe("large: tokens", "", 4, 1024, 2048, 8, 1, 4096, precision="bf16", is_large=True),
    Probe("large: long", "", 2, 1536, 8192, 1, 1, 4096, precision="bf16", is_large=True),
)
"""For accelerators alone."""
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "replicas": {},
    "zero 1": {"dp_shard": 2, "zero": 1},
    "zero 2": {"dp_shard": 2, "zero": 2},
    "zero 3": {"dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "cp allgather": {"cp": 2},
    "cp ring": {"cp": 2, "cp_method": "ring"},
    "cp ulysses": {"cp": 2, "cp_method": "ulysses"},
    "pp": {"pp": 2},
    "ep": {"dp_shard": 2, "zero": 3, "ep": 2},
}
_OF_PARAMETERS = ("replicas", "zero 1", "zero 2", "zero 3")
"""Ways whose messages are parameters or gradients; those of the rest are tokens."""


def _of_ways() -> Iterator[Probe]:
    for way, layout in _WAYS.items():
        microbatches = 4 if way == "pp" else 1
        large = (2, 448, 32) if way in _OF_PARAMETERS else (2, 192, 320)
        for size, numbers in (("small", (4, 64, 32)), ("large", large)):
            one = Probe(f"{way}: {size}", way, *numbers, microbatches=microbatches, layout=layout)
            yield replace(one, experts=4 if way == "ep" else 0)


PROBES = (*ALONE, *LARGE, *_of_ways())
"""In the order in which they run."""


def probes_for(ranks: int, is_host: bool) -> tuple[Probe, ...]:
    """Those that so many processes can run. is_host: on a CPU."""
    small = tuple(probe for probe in PROBES if not (is_host and probe.is_large))
    return tuple(probe for probe in small if probe.ranks <= ranks)
