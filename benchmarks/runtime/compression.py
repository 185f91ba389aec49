"""A small model made smaller: validation loss, bytes and tokens/s of each way, by transformers.

    python -m benchmarks.runtime.compression            about 15 minutes on two free cores
    python -m benchmarks.runtime.compression --steps 50

Trains a base model (examples/compression/base.yaml) if runs/compression has none. Then it prunes,
rounds, distils and adapts it. Each run that trains has two workers; one of them is killed with
SIGKILL. Its weights are compared with those of an undisturbed run if `--twice` is given. Each
result is a folder that transformers loads. Losses are of 256 validation samples of 128 tokens.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.kill_once import compare, empty, train_with_a_kill

ROOT = Path(__file__).parents[2]

RUNS = Path("runs/compression")
RECIPES = ROOT / "examples" / "compression"
BASE, SAMPLES = RUNS / "base-model", 256
DATA = f"data.folder={RUNS.parent.parent / 'datasets/compression'}"


def holdfast(*words: str | Path) -> str:
    """Run a command and return what it prints on standard output."""
    print(f"$ holdfast {' '.join(map(str, words))}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "holdfast.cli.main", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr or f"exit code {done.returncode}")
    return done.stdout


class Bench:
    """The rows of the table. steps: of each further training. twice: train each also undisturbed,
    and compare."""

    def __init__(self, steps: int, twice: bool) -> None:
        self.steps, self.twice, self.rows = steps, twice, list[dict[str, Any]]()
        self.validation = _validation()

    def row(self, name: str, folder: Path, note: str = "") -> None:
        """Load a folder with transformers, and add its row."""
        found = {"name": name, **measured(folder, self.validation), "note": note}
        self.rows.append(found)
        print(json.dumps(found), flush=True)

    def train(self, name: str, *words: str, steps: int = 0) -> Path:
        """Train from the base's weights, with a kill on the way; return the run's folder."""
        steps = steps or self.steps
        file = RECIPES / ("student.yaml" if name.startswith("student") else "continued.yaml")
        given: list[str | Path] = [file, DATA, f"train.steps={steps}", *words]
        folders = RUNS / name, RUNS / f"{name}-undisturbed"
        empty(*folders)
        killed = [*given, f"folder={folders[0]}"]
        train_with_a_kill("train", *killed, folder=folders[0], at_step=steps // 3)
        if self.twice:
            holdfast("train", *given, f"folder={folders[1]}")
            compare(folders[1], folders[0])
        return folders[0]

    def export(self, run: Path, *words: str) -> Path:
        """Return the folder of a run's weights."""
        kind = f"-{words[1]}" if words else "-model"
        to = run.with_name(run.name + kind)
        empty(to)
        holdfast("export", run, "--to", to, *words)
        return to

    def prune(self) -> None:
        for name, words in {
            "magnitude 50 %": ("magnitude", "--sparsity", "0.5"),
            "Wanda 50 %": ("wanda", "--sparsity", "0.5"),
            "Wanda 2:4": ("wanda", "--pattern", "2:4"),
            "one of three blocks less": ("layers", "--layers", "1"),
        }.items():
            to = RUNS / f"pruned-{words[0]}-{words[-1].replace(':', 'of')}"
            empty(to)
            data = ("--data", RECIPES / "base.yaml", "--samples", "64")
            holdfast("prune", BASE, "--method", *words, "--to", to, *data)
            self.row(name, to)
            if words[0] != "magnitude":
                keeps = "true" if words[0] == "wanda" else "false"
                run = self.train(
                    f"{to.name}-trained", f"model.from={to}", f"train.keep_zeros={keeps}"
                )
                self.row(f"{name}, trained further", self.export(run), f"keep_zeros {keeps}")

    def quantise(self) -> None:
        further = self.train("further", f"model.from={BASE}")
        self.row("base, trained further", self.export(further))
        kinds = ("int8", "int4", "int8-int4", "nf4")
        for kind in kinds:
            self.row(f"{kind} after it", self.export(further, "--quantize", kind))
        for kind in ("int4", "int8-int4"):
            run = self.train(f"qat-{kind}", f"model.from={BASE}", f"train.qat={kind}")
            self.row(f"{kind}, trained so", self.export(run, "--quantize", kind), f"qat {kind}")

    def distil(self) -> None:
        teacher = f"objective.reference.model={BASE}"
        holdfast("data", "teach", RECIPES / "student.yaml", DATA, teacher)
        plain = self.train("student-plain", "objective={kind: next_token}", steps=2 * self.steps)
        self.row("student alone", self.export(plain))
        run = self.train("student", teacher, steps=2 * self.steps)
        self.row("student of the base", self.export(run), "top 16, alpha 0.2")

    def adapt(self) -> None:
        for dtype in ("compute", "nf4"):
            words = "lora={rank: 8, alpha: 16}", f"lora.base_dtype={dtype}"
            run = self.train(f"lora-{dtype}", f"model.from={BASE}", *words)
            name = "LoRA" if dtype == "compute" else "QLoRA"
            self.row(name, self.export(run), "adapters merged")


def measured(folder: Path, rows: Any) -> dict[str, Any]:
    """Loss in nats a token, bytes of the weight files, part of zeros, tokens/s of a pass."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs, targets = rows
    total = count = 0.0
    begun = time.perf_counter()
    with torch.no_grad():
        for x, y in zip(inputs.split(16), targets.split(16), strict=True):
            logits = model(x).logits.float().flatten(0, 1)
            total += float(torch.nn.functional.cross_entropy(logits, y.flatten(), reduction="sum"))
            count += int((y >= 0).sum())
    seconds = time.perf_counter() - begun
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"loss": total / count, "bytes": size, "tokens_s": inputs.numel() / seconds}


def _validation() -> Any:
    import torch

    from holdfast.config.loading.load import load_config
    from holdfast.data.stream.batch import Batches
    from holdfast.data.stream.dataset_location import open_dataset

    config = load_config(RECIPES / "base.yaml", [DATA]).config
    dataset = open_dataset(config.data.folder, config.data)
    found = Batches(dataset, config.data, config.train, config.seed).validation(SAMPLES)
    inputs = torch.cat([torch.from_numpy(each.inputs) for each in found.microbatches])
    return inputs, torch.cat([torch.from_numpy(each.targets) for each in found.microbatches])


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| model | loss | bytes | tokens/s | |", "|---|---:|---:|---:|---|"]
    for row in rows:
        numbers = f"{row['loss']:.4f} | {row['bytes']:,} | {row['tokens_s']:,.0f}"
        lines.append(f"| {row['name']} | {numbers} | {row['note']} |")
    return "\n".join(lines)


def main() -> None:
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of each further training")
    parser.add_argument("--twice", action="store_true", help="also train undisturbed, and compare")
    parser.add_argument("--only", default="prune,quantise,distil,adapt")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not (BASE / "config.json").exists():
        run = RUNS / "base"
        holdfast("train", RECIPES / "base.yaml", DATA, f"folder={run}")
        holdfast("export", run, "--to", BASE)
    bench = Bench(asked.steps, asked.twice)
    bench.row("base", BASE)
    for name in asked.only.split(","):
        getattr(bench, name)()
    print(table(bench.rows))


if __name__ == "__main__":
    main()
