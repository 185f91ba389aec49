"""Fine-tune a small chat model. A worker is killed on the way, and the result is the same.

    python examples/fine_tune/run.py           trains all weights (full.yaml)
    python examples/fine_tune/run.py --lora    trains adapters (lora.yaml)

For a model of your own, put its folder in the place of `datasets/chat-base`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # kill_once.py lies there

from base import texts_of, write_base
from kill_once import command, compare, empty, near, train_with_a_kill

HERE = near(Path(__file__).parent)
BASE = near(HERE / "../../datasets/chat-base")
RUNS = near(HERE / "../../runs")
ASK = ("What happens if a worker dies?", "--chat", "--temperature", "0", "--tokens", "30")


def main() -> None:
    lora = "--lora" in sys.argv
    run_file, name = (HERE / "lora.yaml", "lora") if lora else (HERE / "full.yaml", "full")
    before, undisturbed, killed, exported, merged = (
        RUNS / f"chat-{name}-{part}"
        for part in ("before", "undisturbed", "killed", "exported", "merged")
    )
    empty(before, undisturbed, killed, exported, merged)

    write_base(BASE, texts_of(HERE / "chat.jsonl"))
    command("data", "prepare", run_file)  # shows the first row, and what carries loss

    # The answer before: a run that has the folder's weights, and no step.
    weights = ("checkpoint", "import", HERE / "full.yaml", "--from", BASE)
    command(*weights, f"folder={before}")
    command("generate", before, *ASK)

    if not lora:  # all weights are trained, so each run begins with a copy of them
        command(*weights, f"folder={undisturbed}")
        command(*weights, f"folder={killed}")
    command("train", run_file, f"folder={undisturbed}")
    train_with_a_kill("train", run_file, f"folder={killed}", folder=killed, at_step=40)
    compare(undisturbed, killed)

    command("generate", killed, *ASK)
    if lora:
        command("export", killed, "--to", exported, "--format", "peft")  # the adapters alone
        command("export", killed, "--to", merged)  # base and adapters in one model
    else:
        command("export", killed, "--to", exported)


if __name__ == "__main__":
    main()
