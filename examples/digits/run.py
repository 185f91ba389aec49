"""Train a convolutional network on digits. A worker is killed on the way, and nothing changes.

    python examples/digits/run.py

Needs scikit-learn, for its digits. The network and its data are in digits.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # kill_once.py lies there

from kill_once import command, compare, empty, near, train_with_a_kill

import holdfast

HERE = near(Path(__file__).parent)
RUNS = near(HERE / "../../runs")


def main() -> None:
    run_file = HERE / "run.yaml"
    undisturbed, killed = RUNS / "digits-undisturbed", RUNS / "digits-killed"
    empty(undisturbed, killed)

    command("train", run_file, f"folder={undisturbed}")
    train_with_a_kill("train", run_file, f"folder={killed}", folder=killed, at_step=60)
    compare(undisturbed, killed)

    for record in holdfast.journal(killed):
        if record["kind"] == "evaluated":  # the validation's loss is the share of wrong digits
            print(f"step {record['step']}: {1 - record['loss']:.1%} of held-out digits are right")


if __name__ == "__main__":
    main()
