"""A worker writes into the pipe of its agent, whatever it writes with."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import os, sys
from holdfast.elastic.worker.fork_server import redirect_output
redirect_output(int(sys.argv[1]))
print("from Python")
print("an error", file=sys.stderr)
os.write(1, b"from a library\\n")
assert sys.stdin.read() == ""
"""


def test_all_that_a_process_says_goes_into_the_pipe() -> None:
    read_fd, write_fd = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(write_fd)],
        capture_output=True,
        text=True,
        pass_fds=[write_fd],
        timeout=120,
    )
    os.close(write_fd)
    with open(read_fd, encoding="utf-8") as pipe:
        said = pipe.read()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert said == "from Python\nan error\nfrom a library\n"
