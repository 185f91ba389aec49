"""Train a model that hears or sees. A worker is killed on the way, and the result is the same.

    python examples/speech_and_images/run.py speech
    python examples/speech_and_images/run.py images

For a model of your own, put its folder in the place of `datasets/speech/model`, and your tar files
in the place of `datasets/speech/train`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # kill_once.py lies there

from inputs import write_all
from kill_once import command, compare, empty, near, train_with_a_kill

from holdfast.tasks.families import Speech, VisionLanguage

HERE = near(Path(__file__).parent)
DATA, RUNS = near(HERE / "../../datasets"), near(HERE / "../../runs")


def main(kind: str) -> None:
    run_file = HERE / f"{kind}.yaml"
    undisturbed, killed, exported = (
        RUNS / f"{kind}-{part}" for part in ("undisturbed", "killed", "exported")
    )
    empty(DATA / kind, undisturbed, killed, exported)
    write_all(kind, DATA / kind)

    command("train", run_file, f"folder={undisturbed}")
    train_with_a_kill("train", run_file, f"folder={killed}", folder=killed, at_step=60)
    compare(undisturbed, killed)
    command("export", killed, "--to", exported)
    right, samples = answers(kind, exported)
    print(f"the exported model is right about {right} of {samples} samples that it never saw")


def answers(kind: str, folder: Path) -> tuple[int, int]:
    """Load the export with transformers. Return how many of the validation's texts it gives, and
    their number. A text counts if each of its tokens is the likeliest one."""
    import torch
    import transformers

    task_class = Speech if kind == "speech" else VisionLanguage
    model = getattr(transformers, task_class.auto).from_pretrained(folder)
    task = task_class(str(folder), str(DATA / kind / "validation"))
    samples, right = task.data(), 0
    for index in range(len(samples)):
        batch = dict(task.collate([samples[index]]))
        labels = batch.pop("labels")[0]
        with torch.no_grad():
            likeliest = model(**batch).logits[0].argmax(-1)
        if kind == "images":  # the token after each position
            labels, likeliest = labels[1:], likeliest[:-1]
        carries = labels != -100
        right += bool((likeliest == labels)[carries].all())
    return right, len(samples)


if __name__ == "__main__":
    if sys.argv[1:] not in (["speech"], ["images"]):
        sys.exit(__doc__)
    main(sys.argv[1])
