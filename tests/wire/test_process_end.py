"""A program ends without a search of its memory, and still does what it registered for its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """\
import atexit
from holdfast.wire.process_end import skip_last_collection

class Said:
    def __init__(self, word):
        self.word = word
    def __del__(self):
        print(self.word)

if {spared}:
    skip_last_collection()
atexit.register(print, "registered")
in_a_cycle, alone = Said("cycle"), Said("alone")
in_a_cycle.itself = in_a_cycle
"""


@pytest.mark.parametrize(("spared", "said"), [(True, ""), (False, "cycle")])
def test_only_what_is_in_a_cycle_is_left_as_it_is(spared: bool, said: str) -> None:
    program = PROGRAM.format(spared=spared)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == {"registered", "alone", *said.split()}
