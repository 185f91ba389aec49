"""Rows about speed: the shapes of Llama 3.2 1B in the step engine, on random tokens."""

from __future__ import annotations

import gc
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.runtime.accelerator.settings import RowResult, Settings
from benchmarks.runtime.accelerator.work import wait_for
from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.config.run import RunConfig
from holdfast.core.flops import CONVENTIONS, flops_per_token
from holdfast.errors import ConfigError
from holdfast.launch.node.devices import refuse_float8
from holdfast.machine.accelerators import peak_flops
from holdfast.machine.hardware import detect_hardware
from holdfast.training.engine.engine import StepEngine
from holdfast.training.engine.precision import same_kernels_each_time
from holdfast.training.measure.equal_steps import lone_engine, one_step

ROOT = Path(__file__).resolve().parents[3]
RUN_FILE = ROOT / "examples/llama3.2-1b/run.yaml"
BAR = 42_000  # tokens/s of this shape at sequence 4096 on one H100


@dataclass(frozen=True)
class Variant:
    """One way of training the shape. has_bar: it is the one that the bar is asked of. precision: of
    the run file."""

    microbatch: int
    compiled: bool = True
    is_strict: bool = True
    has_bar: bool = False
    precision: str = "bf16"

    @property
    def name(self) -> str:
        if self.precision != "bf16":
            return f"1b-{self.precision}"
        name = f"1b-mb{self.microbatch}" + ("" if self.compiled else "-eager")
        return name + ("" if self.is_strict else "-not-deterministic")


VARIANTS = (
    Variant(4, has_bar=True),
    Variant(4, is_strict=False),
    Variant(4, compiled=False),
    Variant(2),
    Variant(8),
    Variant(4, precision="fp8"),
)


def shape_config(settings: Settings, variant: Variant) -> RunConfig:
    return load_config(RUN_FILE, shape_changes(settings, variant)).config


def shape_changes(settings: Settings, variant: Variant) -> list[str]:
    """Return the changes of the run file that make a variant."""
    changes = [
        f"train.microbatch_size={variant.microbatch}",
        f"train.precision={variant.precision}",
        f"train.compile={str(variant.compiled).lower()}",
        f"train.deterministic={str(variant.is_strict).lower()}",
        f"device={settings.device}",
        f"train.batch_size={max(16, variant.microbatch)}",
    ]
    if settings.quick:
        changes += ["model.preset=tiny", "model.vocab_size=512", "data.sequence_length=64"]
        changes += ["train.compile=false"]
    return changes


def train_shape(settings: Settings, variant: Variant) -> RowResult:
    """Tokens a second, utilisation and peak memory of some steps, without the first ones."""
    config, device = shape_config(settings, variant), settings.torch_device
    try:
        refuse_float8(LoadedConfig(config, {}), detect_hardware())
    except ConfigError as error:
        return RowResult(f"skipped: {error.message}")
    if variant.is_strict and settings.device != "cpu":
        same_kernels_each_time(compiled=config.train.compile)
    engine = lone_engine(config, device)
    with torch.no_grad():
        for tensor in engine.parameters.master_tensors:
            tensor.normal_(std=0.02) if tensor.dim() > 1 else tensor.fill_(1.0)
        engine.parameters.refresh()
    skip, steps = (1, 2) if settings.quick else (3, 6)
    taken, losses = [], []
    for step in range(1, skip + steps + 1):
        wait_for(device)
        begun = time.perf_counter()
        losses.append(one_step(engine, config, step).mean_loss)
        wait_for(device)
        taken.append(time.perf_counter() - begun)
    tokens = config.train.batch_size * config.data.sequence_length
    figures = _figures(config, settings, tokens / statistics.median(taken[skip:]))
    figures |= {"step_s": taken, "losses": losses}
    if variant.has_bar and (folder := os.environ.get("HOLDFAST_GPU_PROFILE")):
        _profile(engine, config, Path(folder) / f"{variant.name}.txt")
    engine.close()
    del engine
    gc.collect()
    memory = figures.get("peak_gib")
    line = f"{figures['tokens_per_second']:,.0f} tokens/s"
    for name in CONVENTIONS:
        if name in figures:
            line += f", {100 * figures[name]:.1f} % ({name})"
    line += "" if memory is None else f", peak {memory:.1f} GiB"
    line += f", first step {taken[0]:.0f} s"
    missed = variant.has_bar and not settings.quick and figures["tokens_per_second"] < BAR
    bar = variant.has_bar and not settings.quick and settings.device != "cpu"
    line += f"; bar {BAR:,}: {'MISSED' if missed else 'passed'}" if bar else ""
    return RowResult(line, figures, not missed)


def _figures(config: RunConfig, settings: Settings, rate: float) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens_per_second": rate}
    if settings.device == "cpu":
        return found
    found["peak_gib"] = torch.accelerator.max_memory_allocated() / 2**30
    found["peak_reserved_gib"] = torch.accelerator.max_memory_reserved() / 2**30
    cuda: Any = torch.cuda
    peak = peak_flops(cuda.get_device_properties(0).name, config.train.precision)
    if peak is not None:
        for name in CONVENTIONS:
            length = config.data.sequence_length
            found[name] = rate * flops_per_token(config.model, length, name) / peak
    return found


def _profile(engine: StepEngine, config: RunConfig, to: Path) -> None:
    """The kernels that two steps spend most time in, as a text."""
    from torch.profiler import ProfilerActivity, profile

    first = engine.step + 1
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for step in range(first, first + 2):
            one_step(engine, config, step)
        wait_for(engine.device)
    by = "self_cuda_time_total" if engine.device.type == "cuda" else "self_cpu_time_total"
    to.write_text(seen.key_averages().table(sort_by=by, row_limit=45, max_name_column_width=90))
