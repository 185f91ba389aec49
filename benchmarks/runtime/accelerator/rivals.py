"""The row of other training programs on the same device, at the same shape, in the same call."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from benchmarks.peers.on_card import NAMES
from benchmarks.runtime.accelerator.settings import RowResult, Settings
from benchmarks.runtime.accelerator.shape import (
    ROOT,
    RUN_FILE,
    VARIANTS,
    shape_changes,
    train_shape,
)
from holdfast.config.loading.load import load_config

PACKAGES = {"hf-trainer": ("transformers", "accelerate"), "torchtitan": ("torchtitan",)}
BAR = 1.05
"""What our tokens a second must be of the better peer's, at full size on a card."""
_INSTALL_S, _RUN_S = 240.0, 300.0


def peers(settings: Settings) -> RowResult:
    """Our step engine, Hugging Face's Trainer and torchtitan, one after another."""
    variant = VARIANTS[0]
    ours = train_shape(settings, variant)
    rate = ours.figures["tokens_per_second"]
    python = _environment(settings.scratch / "peers")
    figures: dict[str, Any] = {"holdfast": dict(ours.figures)}
    rates: dict[str, float] = {}
    refusals = []
    for name in NAMES:
        found = _peer(python, name, settings, shape_changes(settings, variant))
        figures[name] = found
        if "tokens_per_second" in found:
            rates[name] = found["tokens_per_second"]
        else:
            refusals.append(f"{name}: {found['refused']}")
    told = [f"ours {rate:,.0f} tokens/s", *(f"{n} {r:,.0f}" for n, r in rates.items()), *refusals]
    line = ("" if settings.device != "cpu" else "no card: on the CPU. ") + "; ".join(told)
    if not rates:
        return RowResult(line, figures, settings.quick)
    ratio = figures["ratio"] = rate / max(rates.values())
    is_asked = not settings.quick and settings.device != "cpu"
    line += f"; ours / better peer {ratio:.3f}"
    line += f" (bar {BAR}: {'passed' if ratio >= BAR else 'MISSED'})" if is_asked else ""
    return RowResult(line, figures, not is_asked or ratio >= BAR)


def _environment(folder: Path) -> Path:
    """Return the interpreter of an environment that sees this one's packages, without peers."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    mine = [
        path
        for path in sys.path
        if path.endswith("-packages") or (path and not path.startswith(sys.base_prefix))
    ]
    (folder / "lib" / version / "site-packages" / "ours.pth").write_text("\n".join(mine) + "\n")
    return python


def _peer(python: Path, name: str, settings: Settings, changes: list[str]) -> dict[str, Any]:
    """Install a peer and train with it. Return its tokens a second, or who refused it."""
    install = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES[name]]
    done = _run(install, _INSTALL_S)
    if done is None or done.returncode:
        return {"refused": f"pip: {_last_line(done)}"}
    steps, skip = (3, 1) if settings.quick else (9, 3)
    module = [str(python), "-m", "benchmarks.peers.on_card", name, str(RUN_FILE)]
    done = _run([*module, *changes, f"steps={steps}"], _RUN_S)
    if done is None or done.returncode:
        return {"refused": _last_line(done)}
    taken = json.loads(done.stdout.splitlines()[-1])["step_s"]
    config = load_config(RUN_FILE, changes).config
    tokens = config.train.batch_size * config.data.sequence_length
    return {"tokens_per_second": tokens / statistics.median(taken[skip:]), "step_s": taken}


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _last_line(done: subprocess.CompletedProcess[str] | None) -> str:
    if done is None:
        return "it did not end in time"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.returncode}"
