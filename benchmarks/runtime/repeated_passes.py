"""Repeated passes over a small corpus: the weight decay that they need.

    python -m benchmarks.runtime.repeated_passes
    python -m benchmarks.runtime.repeated_passes --passes 4 16 --decays 0.1 1.6 --seeds 1 2 3

The corpus is made of pieces of this repository's guide. A small model trains on it, with a cosine
schedule over all passes. A line has the validation loss (nats per token) after the last step, as a
mean over the seeds and of each seed. The least of all validations is next to it. A folder that is
given keeps the runs, and the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

import holdfast
from holdfast.config.loading.yaml_tree import dump

ROOT = Path(__file__).parents[2]
PIECE, CORPUS_BYTES = 2_000, 220_000
BATCH, LENGTH, VALIDATIONS = 8, 128, 8
RUN = {
    "name": "passes",
    "device": "cpu",
    "data": {
        "tokenizer": {"vocab_size": 1024},
        "sequence_length": LENGTH,
        "validation_fraction": 0.2,
        "folder": "dataset",
        "sources": [{"kind": "jsonl", "path": "guide.jsonl"}],
    },
    "model": {"preset": None, "layers": 2, "dim": 128, "heads": 4, "kv_heads": 4, "ffn_dim": 384},
    "train": {
        "batch_size": BATCH,
        "microbatch_size": BATCH,
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"kind": "cosine", "warmup_steps": 20},
        "evaluate": {"samples": 256},
    },
    "layout": {"workers": 1},
    "checkpoint": {"every_steps": 100_000},
}


def write_corpus(folder: Path) -> None:
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "docs" / "guide").glob("*.md"))]
    cut = [text[at : at + PIECE] for text in texts for at in range(0, len(text), PIECE)]
    random.Random(1).shuffle(cut)
    lines = [json.dumps({"text": text}) for text in cut[: CORPUS_BYTES // PIECE]]
    (folder / "guide.jsonl").write_text("\n".join(lines))
    (folder / "run.yaml").write_text(dump(RUN))


def command(folder: Path, *words: str) -> None:
    line = [sys.executable, "-m", "holdfast.cli.main", *words]
    subprocess.run(line, cwd=folder, stdout=subprocess.PIPE, check=True)


def losses(folder: Path, passes: int, decay: float, seed: int, samples: int) -> list[float]:
    """Validation losses of one run, in the order of its steps."""
    run, steps = folder / f"{passes}-{decay:g}-{seed}", passes * samples // BATCH
    command(
        folder,
        *("train", "run.yaml", f"folder={run}", f"seed={seed}", f"train.steps={steps}"),
        f"train.optimizer.weight_decay={decay}",
        f"train.evaluate.every={steps // VALIDATIONS}",
    )
    return [r["loss"] for r in holdfast.journal(run) if r["kind"] == "evaluated"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--decays", type=float, nargs="+", default=[0.1, 0.8, 3.2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(folder)
        command(folder, "data", "prepare", "run.yaml")
        manifest = json.loads((folder / "dataset" / "manifest.json").read_text())
        tokens = manifest["splits"]["train"]["tokens"]
        print(f"{tokens:,} tokens of training text", flush=True)
        for passes in given.passes:
            for decay in given.decays:
                runs = [
                    losses(folder, passes, decay, seed, tokens // LENGTH) for seed in given.seeds
                ]
                last = ", ".join(f"{run[-1]:.3f}" for run in runs)
                print(
                    f"{passes} passes, weight decay {decay:g}: {mean(r[-1] for r in runs):.3f} "
                    f"({last}), least {mean(min(r) for r in runs):.3f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
