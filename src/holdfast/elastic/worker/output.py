"""Redirection of a worker's output into the pipe that its agent reads."""

from __future__ import annotations

import os
import sys


def redirect_output(pipe_fd: int) -> None:
    """Make `pipe_fd` standard output and error, and take input from nowhere. Closes `pipe_fd`."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nothing, 0)
    os.dup2(pipe_fd, 1)
    os.dup2(pipe_fd, 2)
    os.close(pipe_fd)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
