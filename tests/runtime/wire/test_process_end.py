"""A program ends without a search of its memory, and does what it registered for its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """\
import atexit, sys
from holdfast.wire.process_end import skip_last_collection

class Said:
    def __init__(self, word):
        self.word = word
    def __del__(self):
        print(self.word)

if {spared}:
    skip_last_collection()
atexit.register(print, "registered")
held = Said("held")
log = open(sys.argv[1], "w")
log.write("logged")

def work():
    local = Said("local")

work()
"""


@pytest.mark.parametrize(("spared", "said"), [(True, []), (False, ["held"])])
def test_what_is_registered_runs_and_what_modules_hold_is_left(
    spared: bool, said: list[str], tmp_path: Path
) -> None:
    program = PROGRAM.format(spared=spared)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "log"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["local", "registered", *said]
    assert (tmp_path / "log").read_text() == "logged"
