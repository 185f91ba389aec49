"""Teach a small chat model which of two answers is better. A worker is killed on the way, and the
result is the same.

    python examples/prefer/run.py

For a model of your own, put its folder in the place of `datasets/pairs-base`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # kill_once.py lies there
sys.path.append(str(Path(__file__).resolve().parents[1] / "fine_tune"))  # and base.py there

from base import write_base
from kill_once import command, compare, empty, near, train_with_a_kill

import holdfast

HERE = near(Path(__file__).parent)
BASE = near(HERE / "../../datasets/pairs-base")
RUNS = near(HERE / "../../runs")


def main() -> None:
    run_file = HERE / "run.yaml"
    undisturbed, killed, exported = (
        RUNS / f"prefer-{part}" for part in ("undisturbed", "killed", "exported")
    )
    empty(undisturbed, killed, exported)

    rows = [json.loads(line) for line in (HERE / "pairs.jsonl").open()]
    write_base(
        BASE, [message["content"] for row in rows for part in row.values() for message in part]
    )
    command("data", "prepare", run_file)  # shows the first pair, and what carries loss
    command("train", run_file, f"folder={undisturbed}")  # computes the reference first
    train_with_a_kill("train", run_file, f"folder={killed}", folder=killed, at_step=20)
    compare(undisturbed, killed)
    steps = [r for r in holdfast.journal(killed) if r["kind"] == "step_done"]
    for record in (steps[0], steps[-1]):
        share = record["metrics"]["rewards/accuracies"]
        print(f"step {record['step']}: the chosen answer is preferred in {share:.0%} of the pairs")
    command("export", killed, "--to", exported)


if __name__ == "__main__":
    main()
