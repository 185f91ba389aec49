"""Redirection of a worker's output: a file for each generation and rank."""

from __future__ import annotations

import os
import sys


def redirect_output(log: str) -> None:
    """Redirect standard output and error into the worker's log, and input from nowhere.

    If the log cannot be opened, they stay: a run folder that is out of reach ends no worker.
    """
    try:
        target = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        print(f"what belongs into {log} follows here: {error}", flush=True)
        return
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nothing, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
