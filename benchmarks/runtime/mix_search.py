"""A mixture from small runs, and what it saves in a larger one.

    python -m benchmarks.runtime.mix_search
    python -m benchmarks.runtime.mix_search --trials 32 --jobs 2 --folder /tmp/mix

Four sources: this repository's docs, its code, made-up stories, and random letters. The validation
text is that of docs and code. `holdfast data mix-search` finds the weights with runs of a small
model. Then a larger model with four times the steps trains with equal weights and with the weights
found, for five seeds each. A run saves the tokens that it does not need for the last loss of the
run with equal weights. The learning rate is constant, so that the runs' losses can be
compared at each step. A folder that is given keeps the runs, and the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

import holdfast
from holdfast.config.loading.yaml_tree import dump, parse_file

ROOT = Path(__file__).parents[2]
SEEDS = (1, 2, 3, 4, 5)
STUDENT_T_95 = 2.776  # two-sided, of five values
PIECE, SOURCE_BYTES = 3_000, 1_200_000
STEPS, EVERY = 600, 20
SMALL = ("train.steps=150", "model.layers=1", "model.dim=64", "model.ffn_dim=128")
RUN = {
    "name": "mixture",
    "device": "cpu",
    "data": {
        "tokenizer": {"vocab_size": 1024},
        "sequence_length": 128,
        "validation_fraction": 0.05,
        "folder": "dataset",
        "sources": [
            {"kind": "jsonl", "path": f"{name}.jsonl", "name": name}
            for name in ("docs", "code", "stories", "letters")
        ],
    },
    "model": {"preset": None, "layers": 2, "dim": 128, "heads": 4, "kv_heads": 4, "ffn_dim": 256},
    "train": {
        "steps": STEPS,
        "batch_size": 8,
        "microbatch_size": 8,
        "optimizer": {"learning_rate": 2e-3},
        "schedule": {"kind": "constant", "warmup_steps": 20},
        "evaluate": {"every": EVERY, "samples": 256, "sources": ["docs", "code"]},
    },
    "layout": {"workers": 1},
    "checkpoint": {"every_steps": 200},
}


def pieces(folder: Path, pattern: str) -> Iterator[str]:
    """Yield the texts of files, cut into pieces, in an order that is random and always the same."""
    texts = [path.read_text("utf-8") for path in sorted(folder.rglob(pattern))]
    cut = [text[at : at + PIECE] for text in texts for at in range(0, len(text), PIECE)]
    random.Random(1).shuffle(cut)
    yield from cut


def stories(seed: int) -> Iterator[str]:
    """Yield sentences of a few words without end."""
    draw = random.Random(seed)
    who = ("a cat", "the miller", "her son", "an old king", "the fox", "a tall tree", "the rain")
    did = ("saw", "called", "followed", "carried", "found", "lost", "waited for", "sang to")
    how = ("at night", "in the wood", "with care", "for a year", "again", "near the river")
    while True:
        lines = (f"{draw.choice(who)} {draw.choice(did)} {draw.choice(who)}" for _ in range(60))
        yield ". ".join(f"{line} {draw.choice(how)}" for line in lines)


def letters(seed: int) -> Iterator[str]:
    """Yield random letters without end."""
    draw = random.Random(seed)
    while True:
        yield "".join(draw.choices("abcdefghijklmnopqrstuvwxyz      ", k=PIECE))


def write_sources(folder: Path) -> Path:
    """Write the sources and the run file, and return its path."""
    texts = {
        "docs": pieces(ROOT / "docs", "*.md"),
        "code": pieces(ROOT / "src", "*.py"),
        "stories": stories(1),
        "letters": letters(1),
    }
    for name, source in texts.items():
        written = 0
        with (folder / f"{name}.jsonl").open("w") as file:
            for text in source:
                file.write(json.dumps({"text": text}) + "\n")
                if (written := written + len(text)) > SOURCE_BYTES:
                    break
    path = folder / "run.yaml"
    path.write_text(dump(RUN))
    return path


def command(*words: str | Path) -> str:
    """Run a command of `holdfast`, and return what it prints. Its lines are shown."""
    line = [sys.executable, "-m", "holdfast.cli.main", *map(str, words)]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(line)} ended with {done.returncode}")
    return done.stdout


def curve(run_file: Path, name: str, seed: int, mix: str) -> dict[int, float]:
    """Train, and return the loss by step."""
    folder = run_file.parent / f"{name}-{seed}"
    keys = (f"folder={folder}", f"seed={seed}", *((f"data.mix={mix}",) if mix else ()))
    command("train", run_file, *keys)
    records = holdfast.journal(folder)
    return {r["step"]: r["loss"] for r in records if r["kind"] == "evaluated"}


def steps_until(losses: dict[int, float], loss: float) -> float:
    """Return the step at which a curve has a loss, between two evaluations on a line."""
    before, at = 0, max(losses)
    for step in sorted(losses):
        if losses[step] <= loss:
            if not before:
                return float(step)
            part = (losses[before] - loss) / (losses[before] - losses[step])
            return before + part * (step - before)
        before = step
    return float(at)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(given.folder or kept)
        folder.mkdir(parents=True, exist_ok=True)
        run_file = folder / "run.yaml"
        if not run_file.exists():
            write_sources(folder)
        options = ("--trials", str(given.trials), "--jobs", str(given.jobs))
        command("data", "mix-search", run_file, *SMALL, *options, "--folder", folder / "search")
        report = json.loads((folder / "search/report.json").read_text())
        section, _ = parse_file((folder / "search/mix.yaml").read_text(), "mix.yaml")
        mix = json.dumps(section["data"]["mix"])
        print(f"mixture: {report['mixture']}, loss of its trial {report['loss']:.4f}")
        print(f"rank correlation, eight unseen mixtures: {report['check_rank_correlation']:.3f}")
        saved = []
        for seed in SEEDS:
            equal, found = curve(run_file, "equal", seed, ""), curve(run_file, "found", seed, mix)
            reached = steps_until(found, equal[STEPS])
            saved.append(1 - reached / STEPS)
            print(
                f"seed {seed}: equal weights {equal[STEPS]:.4f}, found {found[STEPS]:.4f}, which "
                f"reaches the former at step {reached:.0f} of {STEPS}: {saved[-1]:.1%} saved",
                flush=True,
            )
    half = STUDENT_T_95 * stdev(saved) / len(saved) ** 0.5
    print(f"tokens saved: {mean(saved):.1%} +- {half:.1%} (95 %, five seeds)")
    is_met = report["check_rank_correlation"] >= 0.9 and mean(saved) - half >= 0.2
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
