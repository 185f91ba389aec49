"""Rows about several devices of one node: each layout against one worker, kills, collectives."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from benchmarks.runtime.accelerator.floors import said_by
from benchmarks.runtime.accelerator.journal import read_events
from benchmarks.runtime.accelerator.runs import Command, disturbed, run_file
from benchmarks.runtime.accelerator.settings import RowResult, Settings
from benchmarks.runtime.accelerator.work import wait_for
from holdfast.config.loading.load import load_config
from holdfast.events import StepDone
from holdfast_lab.chaos.compare import compare_runs

PARITY = 1e-8  # relative, in float64: a mesh adds in another order, replicas do not
LIMIT_S = 300.0


@dataclass(frozen=True)
class NodeLayout:
    """workers: of how many devices it uses at most a multiple. exact: the bits of one worker."""

    name: str
    multiple: int
    degrees: tuple[str, ...]
    exact: bool = False

    def workers(self, devices: int) -> int:
        return devices - devices % self.multiple

    def settings(self, devices: int) -> list[str]:
        degrees = [each.format(workers=self.workers(devices)) for each in self.degrees]
        return [f"layout.workers={self.workers(devices)}", *degrees]


LAYOUTS = (
    NodeLayout("dp", 1, (), exact=True),
    NodeLayout("dp-gathered", 1, ("layout.exchange=gathered",), exact=True),
    NodeLayout("dp_shard", 1, ("layout.dp_shard={workers}",)),
    NodeLayout("zero-1", 1, ("layout.dp_shard={workers}", "layout.zero=1")),
    NodeLayout("tp", 2, ("layout.tp=2",)),
    NodeLayout("pp", 2, ("layout.pp=2",)),
    NodeLayout("pp-tp", 4, ("layout.pp=2", "layout.tp=2")),
    NodeLayout("dp_shard-tp", 4, ("layout.dp_shard=2", "layout.tp=2")),
)


def links(settings: Settings) -> RowResult:
    """How the devices are connected, as the driver prints it."""
    count = torch.accelerator.device_count()
    matrix = said_by(["nvidia-smi", "topo", "-m"])
    kinds = sorted({word for word in matrix.split() if word[:2] in ("NV", "PI", "PX", "SY", "NO")})
    return RowResult(f"{count} devices; links {' '.join(kinds) or 'unknown'}", {"matrix": matrix})


def float64_run(settings: Settings, *changes: str) -> tuple[Command, int]:
    """The command that trains in a folder, and its steps. A microbatch can be cut for all devices,
    and each replica gets one."""
    samples = lcm(2, settings.workers)
    path = run_file(
        settings,
        "several",
        precision="float64",
        microbatch_size=samples,
        batch_size=samples * max(4, settings.workers),
    )

    def make(folder: Path) -> tuple[str | Path, ...]:
        return ("train", path, f"folder={folder}", *changes)

    return make, load_config(path).config.train.steps


def alone(settings: Settings) -> RowResult:
    """One worker: what the layouts are compared with."""
    make, _ = float64_run(settings, "layout.workers=1")
    disturbed(make, settings.scratch / "alone", "alone", 0, LIMIT_S)
    return RowResult(f"{_steps_per_second(settings.scratch / 'alone'):.1f} steps/s")


def parity(settings: Settings, layout: NodeLayout) -> RowResult:
    """A layout, undisturbed, against one worker: losses, ledger and weights."""
    if layout.workers(settings.workers) < 2:
        return RowResult(f"not run: it needs {max(2, layout.multiple)} devices")
    make, steps = float64_run(settings, *layout.settings(settings.workers))
    folder = settings.scratch / layout.name
    disturbed(make, folder, "alone", 0, LIMIT_S)
    return _compared(settings, folder, layout.exact, steps)


def killed(settings: Settings, layout: NodeLayout) -> RowResult:
    """The same, with one worker killed in the middle: it is replaced, and the end is the same."""
    if layout.workers(settings.workers) < 2:
        return RowResult(f"not run: it needs {max(2, layout.multiple)} devices")
    make, steps = float64_run(settings, *layout.settings(settings.workers))
    folder = settings.scratch / f"{layout.name}-killed"
    disturbed(make, folder, "killed", steps // 2, LIMIT_S)
    return _compared(settings, folder, layout.exact, steps)


def _compared(settings: Settings, folder: Path, exact: bool, steps: int) -> RowResult:
    tolerance = 0.0 if exact else PARITY
    found = compare_runs(folder, settings.scratch / "alone", steps, tolerance)
    wrong = found.curve or found.ledger or found.tensors
    same = "same bits as one worker" if exact else f"within {found.worst:.0e} of one worker"
    line = f"{wrong or same}; {_steps_per_second(folder):.1f} steps/s"
    return RowResult(line, {"worst": found.worst, "differs": wrong}, not wrong)


def _steps_per_second(folder: Path) -> float:
    """Of the median step; the model is small, so this says little about speed."""
    seconds = [e.seconds for _, e in read_events(folder) if isinstance(e, StepDone)]
    return 1.0 / statistics.median(seconds)


# --- collectives ------------------------------------------------------------------------------
def _factor_all_reduce(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _factor_others(ranks: int) -> float:
    return (ranks - 1) / ranks


BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": _factor_all_reduce,
    "all_gather": _factor_others,
    "reduce_scatter": _factor_others,
    "all_to_all": _factor_others,
}
"""Bus bandwidth over bytes per second, as nccl-tests defines it (doc/PERFORMANCE.md). The bytes are
those of the full buffer: for all_gather and reduce_scatter that of all ranks together."""


def _call(name: str, full: Tensor, other: Tensor, part: Tensor) -> None:
    """full, other: a buffer of all ranks. part: one rank's."""
    match name:
        case "all_reduce":
            dist.all_reduce(full)
        case "all_gather":
            dist.all_gather_into_tensor(full, part)
        case "reduce_scatter":
            dist.reduce_scatter_tensor(part, full)
        case "all_to_all":
            dist.all_to_all_single(other, full)


def _rank(rank: int, ranks: int, device_type: str, sizes: list[int], folder: str) -> None:
    """One rank of the collectives: seconds by (name, bytes), medians, in a file."""
    device = torch.device(device_type, rank) if device_type != "cpu" else torch.device("cpu")
    if device_type != "cpu":
        torch.accelerator.set_device_index(rank)
    else:
        torch.set_num_threads(1)
    backend = dist.get_default_backend_for_device(device)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    found: dict[str, float] = {}
    for size in sizes:
        elements = size // 4 // ranks * ranks
        for name in BUS_FACTORS:
            full = torch.ones(elements, device=device)
            other, part = torch.zeros_like(full), torch.ones(elements // ranks, device=device)
            _call(name, full, other, part)
            _check(name, full, other, part, ranks)
            taken = []
            for _ in range(7):
                dist.barrier()
                wait_for(device)
                begun = time.perf_counter()
                _call(name, full, other, part)
                wait_for(device)
                taken.append(time.perf_counter() - begun)
            found[f"{name} {size}"] = statistics.median(taken[2:])
    Path(folder, f"{rank}.json").write_text(json.dumps({"backend": backend, "seconds": found}))
    dist.destroy_process_group()


def _check(name: str, full: Tensor, other: Tensor, part: Tensor, ranks: int) -> None:
    """Raises RuntimeError if a sum or a copy of ones is wrong."""
    got, due = {
        "all_reduce": (full, float(ranks)),
        "all_gather": (full, 1.0),
        "reduce_scatter": (part, float(ranks)),
        "all_to_all": (other, 1.0),
    }[name]
    if not bool((got == due).all()):
        raise RuntimeError(f"{name} of ones gave {float(got.min())} to {float(got.max())}")


def collectives(settings: Settings) -> RowResult:
    """Bus bandwidth of each collective; the slowest rank counts."""
    sizes = [2**20] if settings.quick else [2**20, 2**26, 2**30]
    folder = settings.scratch / "collectives"
    folder.mkdir()
    ranks = settings.workers
    arguments: Any = (ranks, settings.device, sizes, str(folder))
    processes.spawn(_rank, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    figures: dict[str, Any] = {"backend": told[0]["backend"], "ranks": ranks}
    for key in told[0]["seconds"]:
        name, size = key.split()
        seconds = max(each["seconds"][key] for each in told)
        bus = int(size) / seconds * BUS_FACTORS[name](ranks) / 1e9
        figures[key] = {"seconds": seconds, "bus_gb_s": bus}
    best = {n: figures[f"{n} {sizes[-1]}"]["bus_gb_s"] for n in BUS_FACTORS}
    line = ", ".join(f"{name} {value:.1f}" for name, value in best.items())
    return RowResult(f"bus GB/s over {figures['backend']}, {ranks} ranks: {line}", figures)
