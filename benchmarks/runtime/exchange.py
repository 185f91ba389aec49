"""State that goes to torchtitan and comes back.

    python -m benchmarks.runtime.exchange --peers-python PATH

A run of ours is trained for a few steps and exported twice: as a DCP folder with torchtitan's
names, and as a Hugging Face folder. torchtitan's own CheckpointManager loads the first (weights,
AdamW's moments and settings) and, through its adapter, the second. transformers loads the second as
well. All three must give the same logits. torchtitan then takes a step and saves. `holdfast
checkpoint import` begins a run from that, and torchtitan loads the export of this run once more.
Every tensor must be, bit for bit, the one that torchtitan saved.

PATH is an interpreter that has torchtitan, transformers and Holdfast. The exit code is 1 if
something differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from holdfast_lab.chaos.sample_run import write_texts

STEPS = 6
RUN_FILE = """\
name: exchange
folder: {root}/run
device: cpu
data:
  folder: {root}/dataset
  sources: [{{kind: text, path: "{root}/texts"}}]
  tokenizer: {{vocab_size: 320}}
  sequence_length: 32
  validation_fraction: 0.2
model: {{preset: null, layers: 2, dim: 64, heads: 4, kv_heads: 2, ffn_dim: 96}}
train: {{steps: {steps}, batch_size: 4, evaluate: {{every: 0}}}}
checkpoint: {{every_steps: 3}}
"""


def holdfast(*arguments: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *map(str, arguments)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def theirs(python: str, **request: Any) -> dict[str, Any]:
    """One question to a process that has torchtitan."""
    done = subprocess.run(
        [python, "-m", "benchmarks.peers.titan_exchange", json.dumps(request, default=str)],
        check=False,
        text=True,
        capture_output=True,
    )
    if done.returncode:
        raise SystemExit(f"torchtitan's process ended with {done.returncode}:\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def trained(root: Path) -> Path:
    """A run that has ended; its run file."""
    write_texts(root / "texts", 24, 200)
    run_file = root / "run.yaml"
    run_file.write_text(RUN_FILE.format(root=root, steps=STEPS))
    holdfast("data", "prepare", run_file)
    holdfast("train", run_file)
    return run_file


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peers-python", required=True, help="an interpreter with torchtitan")
    python = parser.parse_args().peers_python
    with tempfile.TemporaryDirectory(prefix="holdfast-exchange-") as folder:
        root = Path(folder)
        run_file = trained(root)
        holdfast(
            "export", root / "run", "--to", root / "dcp", "--format", "dcp", "--names", "torchtitan"
        )
        holdfast("export", root / "run", "--to", root / "hf")
        known = {"resolved": root / "run/resolved.json", "sequence": 32}
        went = theirs(
            python,
            do="take",
            dcp=root / "dcp",
            hf=root / "hf",
            save=root / "titan",
            step=STEPS,
            **known,
        )
        again = root / "again"
        holdfast(
            "checkpoint",
            "import",
            run_file,
            f"folder={again}",
            "--from",
            f"{root}/titan/checkpoint/step-{STEPS + 1}",
        )
        holdfast("export", again, "--to", root / "back", "--format", "dcp", "--names", "torchtitan")
        back = theirs(
            python, do="compare", dcp=root / "back", save=root / "titan", step=STEPS + 1, **known
        )
    lines = [
        ("logits, our DCP folder in torchtitan against transformers", went["dcp"], 1e-5),
        ("logits, our Hugging Face folder in torchtitan against it", went["hf"], 1e-5),
        ("tensors of AdamW that torchtitan read otherwise than stored", went["unlike"], 0),
        (f"of {back['tensors']} tensors, changed on the way there and back", back["unlike"], 0),
    ]
    for text, value, most in lines:
        print(f"{text:62}{value:9.2g}  at most {most:g}: {'yes' if value <= most else 'NO'}")
    return int(any(value > most for _, value, most in lines))


if __name__ == "__main__":
    sys.exit(main())
