"""Prepare images or recordings, and train a model that reads them. A worker is killed on the way,
and the result is the same.

    python examples/read_media/run.py images
    python examples/read_media/run.py speech

The inputs are made up: squares of a colour and a size in folders of that name, and rows of tones
in tar files. Images need pillow.
"""

from __future__ import annotations

import io
import sys
import tarfile
import wave
from itertools import product
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))  # kill_once.py lies there

from kill_once import command, compare, empty, near, train_with_a_kill

HERE = near(Path(__file__).parent)
DATA, RUNS = near(HERE / "../../datasets"), near(HERE / "../../runs")
COLOURS = {"red": (230, 40, 40), "green": (40, 220, 60), "blue": (50, 60, 240)}
SIZES = {"small": 8, "large": 20}  # pixels of a square, of 32
TONES = {"low": 300.0, "middle": 700.0, "high": 1600.0}  # Hz
RATE = 16_000  # samples a second


def write_squares(folder: Path, copies: int) -> None:
    """Write PNG files, each in a folder with the name of its colour and size."""
    from PIL import Image

    draw = np.random.default_rng(1)
    for (colour, size), copy in product(product(COLOURS, SIZES), range(copies)):
        pixels = draw.integers(0, 40, (32, 32, 3), dtype=np.uint8)
        side = SIZES[size]
        top, left = (int(number) for number in draw.integers(0, 33 - side, 2))
        pixels[top : top + side, left : left + side] = COLOURS[colour]
        place = folder / f"{size} {colour}" / f"{copy:04d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place)


def write_tones(folder: Path, copies: int) -> None:
    """Write tar files with recordings of three tones, each with a text that names them."""
    draw = np.random.default_rng(2)
    seconds = np.arange(RATE // 4) / RATE
    folder.mkdir(parents=True)
    for copy in range(copies):
        with tarfile.open(folder / f"{copy:04d}.tar", "w") as out:
            for number, names in enumerate(product(TONES, repeat=3)):
                sound = np.concatenate([np.sin(2 * np.pi * TONES[n] * seconds) for n in names])
                sound = 0.4 * sound + 0.02 * draw.standard_normal(len(sound))
                file = io.BytesIO()
                with wave.open(file, "wb") as recording:
                    recording.setnchannels(1)
                    recording.setsampwidth(2)
                    recording.setframerate(RATE)
                    recording.writeframes((sound * 32767).astype("<i2").tobytes())
                files = {".wav": file.getvalue(), ".txt": " ".join(names).encode()}
                for ending, content in files.items():
                    entry = tarfile.TarInfo(f"{number:04d}{ending}")
                    entry.size = len(content)
                    out.addfile(entry, io.BytesIO(content))


def main(kind: str) -> None:
    run_file = HERE / f"{kind}.yaml"
    inputs = DATA / ("squares" if kind == "images" else "tones")
    undisturbed, killed = (RUNS / f"read-{kind}-{part}" for part in ("undisturbed", "killed"))
    empty(inputs, DATA / f"{inputs.name}-prepared", undisturbed, killed)
    write_squares(inputs, 60) if kind == "images" else write_tones(inputs, 12)

    command("data", "prepare", run_file)
    command("train", run_file, f"folder={undisturbed}")
    train_with_a_kill("train", run_file, f"folder={killed}", folder=killed, at_step=50)
    compare(undisturbed, killed)
    command("data", "audit", killed)


if __name__ == "__main__":
    if sys.argv[1:] not in (["images"], ["speech"]):
        sys.exit(__doc__)
    main(sys.argv[1])
