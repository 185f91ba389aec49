"""Rows about bits: two equal trainings on the device, and the device against a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.runtime.accelerator.settings import RowResult, Settings
from holdfast.config.run import RunConfig
from holdfast.errors import NonFiniteError
from holdfast.parallel.axes.context_kernels import Keys, choose_kernel
from holdfast.training.engine.precision import same_kernels_each_time
from holdfast.training.measure.equal_steps import lone_engine, one_step, trained, unequal

PARITY = 1e-4  # relative difference of losses in fp32; products of a device add in another order


def small(settings: Settings, precision: str, *, compiled: bool = False) -> RunConfig:
    """A decoder that is trained in a second, with grouped heads and several microbatches."""
    quick = settings.quick
    model = {
        "preset": None,
        "layers": 2 if quick else 4,
        "dim": 32 if quick else 512,
        "heads": 4 if quick else 8,
        "kv_heads": 2,
        "ffn_dim": 64 if quick else 1536,
        "vocab_size": 256 if quick else 8192,
        "tied_embeddings": True,
    }
    return RunConfig.model_validate(
        {
            "device": settings.device,
            "model": model,
            "data": {"sequence_length": 32 if quick else 1024},
            "train": {
                "steps": 100,
                "batch_size": 6,
                "microbatch_size": 2,
                "precision": precision,
                "compile": compiled,
                "optimizer": {"learning_rate": 1e-3},
                "schedule": {"warmup_steps": 2},
            },
        }
    )


def wide(settings: Settings) -> RunConfig:
    """Two blocks of Llama 3.2 1B's width at its sequence: kernels as in a real run."""
    config = small(settings, "bf16", compiled=True)
    model = {"layers": 2, "dim": 2048, "heads": 32, "kv_heads": 8, "ffn_dim": 8192}
    value = config.model_dump()
    value["model"] |= model
    value["data"]["sequence_length"] = 4096
    return RunConfig.model_validate(value)


def bits(settings: Settings) -> RowResult:
    """Two equal trainings in the mode that a worker trains in, and one mode without it."""
    device, figures = settings.torch_device, dict[str, Any]()
    modes = {"fp32": small(settings, "fp32"), "bf16": small(settings, "bf16")}
    documents = modes["bf16"].model_dump()
    documents["data"]["attention"] = "document"
    modes["documents"] = RunConfig.model_validate(documents)
    loose = "bf16"
    if device.type != "cpu":
        loose = "wide, compiled"
        modes[loose] = wide(settings)
    figures[f"{loose}, not deterministic"] = _trained_twice(modes[loose], device)
    if device.type != "cpu":
        torch.compiler.reset()
        same_kernels_each_time(compiled=True)
    figures |= {mode: _trained_twice(config, device) for mode, config in modes.items()}
    counts = {name: len(found["unequal"]) for name, found in figures.items()}
    line = "tensors that differ: " + "; ".join(f"{name} {odd}" for name, odd in counts.items())
    return RowResult(line, figures, not any(counts[mode] for mode in modes))


def _trained_twice(config: RunConfig, device: torch.device) -> dict[str, Any]:
    (losses, one), (_, other) = (trained(config, device, 3) for _ in range(2))
    return {"losses": losses, "tensors": len(one), "unequal": list(unequal(one, other))}


def parity(settings: Settings) -> RowResult:
    """fp32 on the device against fp32 on the CPU, from the same weights and tokens: each
    optimizer, and packed documents."""
    if settings.device != "cpu":
        same_kernels_each_time(compiled=False)
    figures: dict[str, Any] = {}
    for name in ("adamw", "documents", "sgd", "lion", "adafactor", "muon"):
        value = small(settings, "fp32").model_dump(exclude_unset=True)
        value["model"]["layers"] = 2
        value["data"]["sequence_length"] = 32 if settings.quick else 256
        if name == "documents":
            value["data"]["attention"] = "document"
        else:
            value["train"]["optimizer"] = {"name": name, "learning_rate": 1e-3}
        figures[name] = _against_cpu(RunConfig.model_validate(value), settings)
    worst = {name: found["worst_loss"] for name, found in figures.items()}
    line = "losses within " + ", ".join(f"{name} {off:.0e}" for name, off in worst.items())
    return RowResult(line, figures, max(worst.values()) < PARITY)


def _against_cpu(config: RunConfig, settings: Settings) -> dict[str, Any]:
    """Relative differences of losses, and of weights after the last step."""
    steps = 3 if settings.quick else 5
    ours, state = trained(config, settings.torch_device, steps)
    theirs, reference = trained(config, torch.device("cpu"), steps)
    moved = max(
        float((state[name] - held).norm() / held.norm().clamp_min(1e-30))
        for name, held in reference.items()
        if name.startswith("model.")
    )
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    return {"losses": ours, "on_cpu": theirs, "worst_loss": worst, "worst_weight": moved}


def experts(settings: Settings) -> RowResult:
    """A model of experts: fp32 against the CPU, and bf16, which has a grouped product, twice."""
    if settings.device != "cpu":
        same_kernels_each_time(compiled=False)
    figures: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        value = small(settings, precision).model_dump(exclude_unset=True)
        value["model"] |= {"layers": 2, "experts": {"count": 8, "top_k": 2}}
        value["data"]["sequence_length"] = 32 if settings.quick else 256
        config = RunConfig.model_validate(value)
        if precision == "fp32":
            figures[precision] = _against_cpu(config, settings)
        else:
            figures[precision] = _trained_twice(config, settings.torch_device)
    off, odd = figures["fp32"]["worst_loss"], len(figures["bf16"]["unequal"])
    line = f"fp32: losses within {off:.0e}; bf16: tensors that differ: {odd}"
    return RowResult(line, figures, off < PARITY and not odd)


def spread_attention(settings: Settings) -> RowResult:
    """Attention in two parts of the keys, merged, as a rank of `layout.cp` computes it. It is
    compared with float64 on the CPU, and torch's own kernel is too."""
    device = settings.torch_device
    heads, keys, length, size = 8, 2, 64 if settings.quick else 2048, 64
    generator = torch.Generator().manual_seed(5)
    drawn = [
        torch.randn(1, count, length, size, generator=generator, dtype=torch.float64)
        for count in (heads, keys, keys, heads)
    ]
    exact = _attention_in_parts(*drawn)
    found = _attention_in_parts(*(t.to(device, torch.bfloat16) for t in drawn))
    whole = _whole_attention(*(t.to(device, torch.bfloat16) for t in drawn))
    ours, theirs = _distances(found, exact), _distances(whole, exact)
    line = "result and gradients of q, k, v: " + ", ".join(f"{off:.1e}" for off in ours)
    line += " from float64; torch's kernel: " + ", ".join(f"{off:.1e}" for off in theirs)
    passed = all(a < 2 * b + 1e-3 for a, b in zip(ours, theirs, strict=True))
    return RowResult(line, {"ours": ours, "torch": theirs}, passed)


def _distances(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((f.double().cpu() - e).norm() / e.norm()) for f, e in pairs]


def _attention_in_parts(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    """The causal result and the gradients of q, k and v, by the later half of the queries."""
    kernel, scale, half = choose_kernel(q.device, 0.0), q.shape[-1] ** -0.5, q.shape[2] // 2
    late, g = q[:, :, half:], g[:, :, half:]
    parts = [
        Keys(k[:, :, rows], v[:, :, rows], None, is_causal, scale)
        for rows, is_causal in ((slice(0, half), False), (slice(half, None), True))
    ]
    results = [kernel.forward(late, keys) for keys in parts]
    log = torch.logaddexp(results[0][1], results[1][1])
    out = sum(o.to(log.dtype) * (one - log).exp()[..., None] for o, one in results)
    merged = (torch.as_tensor(out).to(q.dtype), log)
    back = [kernel.backward(g, late, keys, merged) for keys in parts]
    dq = back[0][0].to(log.dtype) + back[1][0].to(log.dtype)
    return [merged[0], dq, *(torch.cat([back[0][i], back[1][i]], 2) for i in (1, 2))]


def _whole_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    """The same by torch's kernel over all queries."""
    half = q.shape[2] // 2
    leaves = [t.requires_grad_() for t in (q, k, v)]
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(q, k, v, is_causal=True, enable_gqa=True)[:, :, half:]
    dq, dk, dv = torch.autograd.grad(out, leaves, g[:, :, half:])
    return [out.detach(), dq[:, :, half:], dk, dv]


def non_finite(settings: Settings) -> RowResult:
    """A NaN in a weight: the step is refused, and the weight is named."""
    config = small(settings, "bf16")
    engine = lone_engine(config, settings.torch_device)
    engine.initialise(config.seed)
    one_step(engine, config, 1)
    rows = [row.name for row in engine.parameters.table]
    name = next(row for row in rows if "layers.1" in row and "down" in row)
    with torch.no_grad():
        engine.parameters.master_tensors[rows.index(name)][0, 0] = torch.nan
        engine.parameters.refresh()
    try:
        one_step(engine, config, 2)
    except NonFiniteError as error:
        figures = {"named": error.parameter, "expected": name}
        return RowResult(f"named {error.parameter}", figures, error.parameter == name)
    return RowResult("the step was applied", {}, False)
