"""Rows about memory: what a step holds, moved or computed again, and the estimate of the peak."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.runtime.accelerator.correct import small
from benchmarks.runtime.accelerator.settings import RowResult, Settings
from benchmarks.runtime.accelerator.shape import Variant, shape_config
from benchmarks.runtime.accelerator.work import wait_for
from holdfast.config.run import RunConfig
from holdfast.layout import Layout, place_layout
from holdfast.plan.memory.activations import has_formula
from holdfast.plan.memory.estimate import rank_estimate
from holdfast.training.engine.precision import same_kernels_each_time
from holdfast.training.measure.equal_steps import lone_engine, one_step, trained, unequal

STEPS = 3
NEAR = 0.01  # relative difference of losses between dtypes
WITHIN = 0.05  # of the estimate

MOVED = ("optimizer", "gradients", "activations")
SAME_BITS: dict[str, dict[str, Any]] = {
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "keep attention": {"recompute": "selective", "recompute_keep": ["attention"]},
    **{f"{key} on host": {"memory": {key: "host"}} for key in MOVED},
    **{f"{key} in file": {"memory": {key: "file"}} for key in ("optimizer", "activations")},
    "all on host": {"memory": dict.fromkeys(MOVED, "host"), "recompute": "full"},
}
OTHER_DTYPES: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "bf16 state": {"optimizer": {"state_dtype": "bf16", "learning_rate": 1e-3}},
    "8bit state": {"optimizer": {"state_dtype": "8bit", "learning_rate": 1e-3}},
}


def _changed(config: RunConfig, settings: Settings, train: dict[str, Any]) -> RunConfig:
    value = config.model_dump(exclude_unset=True)
    value["train"] |= train
    if "file" in train.get("memory", {}).values():
        folder = settings.scratch / "places"
        folder.mkdir(exist_ok=True)
        value["train"]["memory"] = train["memory"] | {"folder": str(folder)}
    return RunConfig.model_validate(value)


def same_bits(settings: Settings) -> RowResult:
    """Keys that must change no bit, against a run without them; and other dtypes, by their loss."""
    if settings.device != "cpu":
        same_kernels_each_time(compiled=False)
    device, plain = settings.torch_device, small(settings, "bf16")
    losses, state = trained(plain, device, STEPS)
    figures: dict[str, Any] = {"losses": losses}
    wrong = []
    for name, train in SAME_BITS.items():
        _, held = trained(_changed(plain, settings, train), device, STEPS)
        figures[name] = odd = unequal(held, state)
        wrong += [f"{name}: {len(odd)}"] * bool(odd)
    for name, train in OTHER_DTYPES.items():
        found, _ = trained(_changed(plain, settings, train), device, STEPS)
        figures[name] = off = max(abs(a - b) / b for a, b in zip(found, losses, strict=True))
        wrong += [f"{name}: loss {off:.1e} away"] * (off > NEAR)
    good = f"{len(SAME_BITS)} ways with the same bits; losses of " + ", ".join(
        f"{name} {figures[name]:.0e}" for name in OTHER_DTYPES
    )
    return RowResult("; ".join(wrong) or good, figures, not wrong)


@dataclass(frozen=True)
class _Way:
    """A way of holding less. compiled: blocks are."""

    name: str
    train: dict[str, Any]
    compiled: bool = False


WAYS = (
    _Way("plain", {}),
    _Way("selective", {"recompute": "selective"}),
    _Way("full", {"recompute": "full"}),
    _Way("8bit", {"optimizer": {"state_dtype": "8bit"}}),
    _Way("optimizer", {"memory": {"optimizer": "host"}}),
    _Way("activations", {"memory": {"activations": "host"}}),
    _Way("plain, compiled", {}, compiled=True),
    _Way("full, compiled", {"recompute": "full"}, compiled=True),
    _Way("activations, compiled", {"memory": {"activations": "host"}}, compiled=True),
)


def shape_memory(settings: Settings) -> RowResult:
    """Llama 3.2 1B, held in several ways: tokens a second, and the peak against its estimate."""
    if settings.device != "cpu":
        same_kernels_each_time(compiled=True)
    figures: dict[str, Any] = {}
    wrong = []
    for way in WAYS:
        figures[way.name] = found = _way(settings, way)
        off = found.get("estimate_off")
        if off is not None and abs(off) > WITHIN:
            wrong.append(way.name)
        print(way.name, found, flush=True)
    line = "; ".join(_said(name, found) for name, found in figures.items())
    return RowResult(line, figures, not wrong)


def _said(name: str, found: dict[str, Any]) -> str:
    line = f"{name} {found['tokens_per_second']:,.0f}/s"
    line += f" {found['peak_gib']:.1f} GiB" if "peak_gib" in found else ""
    off = found.get("estimate_off")
    return line + (f" ({100 * off:+.1f} %)" if off is not None else "")


def _way(settings: Settings, way: _Way) -> dict[str, Any]:
    """One way's figures. estimate_off: how far the estimate is above the peak, relative to it."""
    device = settings.torch_device
    config = shape_config(settings, Variant(4, compiled=way.compiled))
    value = config.model_dump(exclude_unset=True)
    value["train"] |= {"batch_size": 8}
    value["train"]["optimizer"] |= way.train.get("optimizer", {})
    value["train"] |= {key: of for key, of in way.train.items() if key != "optimizer"}
    config = RunConfig.model_validate(value)
    if settings.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    engine = lone_engine(config, device)
    with torch.no_grad():
        for tensor in engine.parameters.master_tensors:
            tensor.normal_(std=0.02) if tensor.dim() > 1 else tensor.fill_(1.0)
        engine.parameters.refresh()
    taken, losses = [], []
    for step in range(1, 6):
        wait_for(device)
        begun = time.perf_counter()
        losses.append(one_step(engine, config, step).mean_loss)
        wait_for(device)
        taken.append(time.perf_counter() - begun)
        if step == 1 and settings.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
    tokens = config.train.batch_size * config.data.sequence_length
    found: dict[str, Any] = {"tokens_per_second": tokens / statistics.median(taken[2:])}
    found |= {"step_s": taken, "losses": losses}
    topology = place_layout(Layout(), 1, ("local",))
    if has_formula(config):
        estimate = rank_estimate(config, topology, engine.groups.coordinate, "accelerator")
        found["estimate_gib"] = (estimate.peak - estimate.fragmentation) / 2**30
        found["moment"] = estimate.moment
    if settings.device != "cpu":
        found["peak_gib"] = torch.accelerator.max_memory_allocated() / 2**30
        found["reserved_gib"] = torch.accelerator.max_memory_reserved() / 2**30
        if "estimate_gib" in found:
            found["estimate_off"] = found["estimate_gib"] / found["peak_gib"] - 1.0
    engine.close()
    del engine
    gc.collect()
    torch.compiler.reset()
    if settings.device != "cpu":
        torch.cuda.empty_cache()
    return found
