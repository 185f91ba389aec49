"""Processes that do tasks: JSON lines in, JSON lines out.

A process is started by module name: no fork of a parent that may hold threads or torch, nothing
pickled. It ends when its standard input does, so none outlives the preparation, however that
ends. Each tokenises with one thread: the cores are divided by processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from holdfast import errors
from holdfast.data.stages.chat_tokens import Encoder
from holdfast.data.stages.unit_tasks import perform_task
from holdfast.errors import HoldfastError, UserError
from holdfast.wire import lifeline
from holdfast.wire.child_command import module_command
from holdfast.wire.process_end import skip_collections

Task = dict[str, Any]


def _tokenizer_loader() -> Callable[[str], Encoder]:
    """A look-up of tokenizers by path, each loaded once."""

    @cache
    def tokenizer_of(path: str) -> Encoder:
        from holdfast.data.read.vocabulary import load_tokenizer

        return load_tokenizer(Path(path))

    return tokenizer_of


class Pool(AbstractContextManager["Pool"], Protocol):
    """Whatever does the tasks of a preparation: `TaskPool`, or `ray_pool.RayPool`."""

    def run(self, tasks: Sequence[Task], on_done: Callable[[Task], None]) -> None: ...


class TaskPool:
    """`processes` that live until the pool is left; with 0, tasks are done right here.

    Each is served by a thread of ours that hands it one task after another.
    """

    def __init__(self, processes: int):
        self._processes: list[subprocess.Popen[str]] = []
        self._process_count = processes
        self._tokenizer_of = _tokenizer_loader()

    def __enter__(self) -> TaskPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for process in self._processes:
            if kind is not None:
                process.kill()  # results are complete or absent, so nothing can be torn
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it exited, with the task that was being written
                process.stdin.close()  # which ends it
            with process:  # waits
                pass

    def run(self, tasks: Sequence[Task], on_done: Callable[[Task], None]) -> None:
        """Do every task, `on_done` called after each (one at a time).

        Raises the first error of any task; tasks already begun elsewhere are finished first, the
        rest is left.
        """
        if self._process_count == 0:
            for task in tasks:
                perform_task(task, self._tokenizer_of)
                on_done(task)
            return
        while len(self._processes) < min(self._process_count, len(tasks)):
            self._processes.append(_start())
        turn = _TaskQueue(tasks, on_done)
        threads = [
            threading.Thread(target=turn.serve, args=(process,), daemon=True)
            for process in self._processes
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            turn.is_stopped = True
        if turn.error is not None:
            raise turn.error


class _TaskQueue:
    """One list of tasks, handed out to whichever process is free."""

    def __init__(self, tasks: Sequence[Task], done: Callable[[Task], None]):
        self._tasks = iter(tasks)
        self._on_done = done
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.is_stopped = False

    def _next(self) -> Task | None:
        with self._lock:
            return None if self.is_stopped or self.error else next(self._tasks, None)

    def serve(self, process: subprocess.Popen[str]) -> None:
        try:
            while (task := self._next()) is not None:
                assert process.stdin is not None
                assert process.stdout is not None
                try:
                    process.stdin.write(json.dumps(task) + "\n")
                    process.stdin.flush()
                except BrokenPipeError:
                    pass  # it exited; the empty answer below says so
                line = process.stdout.readline()
                if not line:
                    raise HoldfastError(f"a preparing process ended with {process.wait()}")
                answer = json.loads(line)
                if "error" in answer:
                    raise error_from_json(answer["error"])
                with self._lock:
                    self._on_done(task)
        except BaseException as error:
            with self._lock:
                self.error = self.error or error


def _start() -> subprocess.Popen[str]:
    environment = os.environ | {
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        module_command("holdfast.data.stages.task_pool"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def error_from_json(value: dict[str, Any]) -> Exception:
    kind = getattr(errors, value["kind"], None)
    if isinstance(kind, type) and issubclass(kind, UserError):
        return kind(value["message"], where=value["where"], remedy=value["remedy"])
    if value.get("errno") is not None:
        return OSError(value["errno"], value["message"], value.get("filename"))
    return HoldfastError(value["message"])


def error_to_json(error: Exception) -> dict[str, Any]:
    if isinstance(error, UserError):
        return {
            "kind": type(error).__name__,
            "message": error.message,
            "where": error.where,
            "remedy": error.remedy,
        }
    if isinstance(error, OSError) and error.errno is not None:
        return {
            "kind": "OSError",
            "errno": error.errno,
            "message": error.strerror,
            "filename": str(error.filename) if error.filename else None,
        }
    return {"kind": type(error).__name__, "message": traceback.format_exc()}


def main() -> None:
    """Do tasks until standard input ends. Signals are the parent's to handle."""
    skip_collections()
    lifeline.ignore_agent_signals()
    tokenizer_of = _tokenizer_loader()
    for line in sys.stdin:
        try:
            perform_task(json.loads(line), tokenizer_of)
            answer: dict[str, Any] = {}
        except Exception as error:
            answer = {"error": error_to_json(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
