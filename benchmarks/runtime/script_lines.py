"""Lines that a script needs to survive a kill, in Holdfast's own loop and in three other systems.

    python -m benchmarks.runtime.script_lines

The scripts are in `benchmarks/runtime/own_loop`. They train the same model from the same samples,
with the same optimizer, schedule and clipping, on several workers, and resume after a kill.
`plain.py` is the script for one process that loses all.

    lines    of the script, without empty lines and comments
    written  lines that `plain.py` does not have
    dropped  lines of `plain.py` that are not needed any more
    resumes  where each continues after a kill
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parent / "own_loop"
SCRIPTS = {
    "plain.py": "from the start",
    "holdfast_loop.py": "in the same step, in the same processes, with the same bits",
    "torchft_loop.py": "with the next step, without the samples of the lost one",
    "accelerate_loop.py": "from its last save, all processes started again by torchrun",
    "ray_loop.py": "from its last save, all processes started again",
}


def lines_of(script: str) -> Counter[str]:
    """The lines that count, each with its number of occurrences."""
    stripped = (line.strip() for line in (FOLDER / script).read_text().splitlines())
    return Counter(line for line in stripped if line and not line.startswith("#"))


def main() -> None:
    plain = lines_of("plain.py")
    print(f"{'script':<20}{'lines':>7}{'written':>9}{'dropped':>9}  resumes")
    for script, resumes in SCRIPTS.items():
        lines = lines_of(script)
        written, dropped = (lines - plain).total(), (plain - lines).total()
        print(f"{script:<20}{lines.total():7d}{written:9d}{dropped:9d}  {resumes}")


if __name__ == "__main__":
    main()
