"""A user's function as a reward. It runs in a process of its own, which a hang or a crash ends."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from holdfast.config.sections.rewards import RewardConfig
from holdfast.core.json_parsing import parse_json
from holdfast.errors import RewardError
from holdfast.rollout.prompts import Prompt
from holdfast.wire.child_command import module_command

START_S = 120.0
"""Most seconds until the function's module is imported."""
TRIES = 2
"""Processes that one completion may end. The first may have been killed from outside."""


class FunctionReward:
    """Asks the function in a child process. Raises RewardError if it cannot be loaded."""

    def __init__(self, entry: RewardConfig, folder: str, where: str):
        self._entry, self._folder, self._where = entry, folder, where
        self._child: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self.source: str = self._start()["source"]

    def rate(self, prompt: Prompt, text: str, ids: Sequence[int]) -> Any:
        ask = {
            "prompt": prompt.said,
            "completion": text,
            "completion_ids": list(ids),
            "answer": prompt.answer,
            "columns": dict(prompt.columns),
        }
        at = f"prompt {prompt.number} ({prompt.where})"
        for attempt in range(TRIES):
            if self._child is None:
                self._start()
            said = self._exchange(ask, self._entry.timeout_s)
            if said is not None:
                if "error" in said:
                    raise self._refusal(f"{self._entry.function} {said['error']} at {at}")
                return said["reward"]
            code = self._end()
            if code is None:  # it was still running
                if self._entry.on_timeout is not None:
                    return self._entry.on_timeout
                raise RewardError(
                    f"{self._entry.function} took more than timeout_s {self._entry.timeout_s:g} "
                    f"at {at}",
                    where=self._where,
                    remedy="raise timeout_s, or set on_timeout to the number of such a completion",
                )
            if attempt + 1 == TRIES:
                raise self._refusal(
                    f"{self._entry.function} ended its process ({_how_ended(code)}) at {at}"
                )
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._end()

    def _start(self) -> dict[str, Any]:
        name, folder = str(self._entry.function), self._folder or os.getcwd()
        # Hashes of texts are a part of what a function computes with sets.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        self._child = subprocess.Popen(
            module_command("holdfast.rollout.rewards.function_child", name, folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._rest = b""
        said = self._exchange(None, START_S)
        if said is None:
            code = self._end()
            how = f"does not end within {START_S:g} s" if code is None else _how_ended(code)
            raise self._refusal(f"{name} cannot be loaded: the import {how}")
        if "error" in said:
            self._end()
            raise self._refusal(f"{name} {said['error']}")
        return said

    def _exchange(self, ask: dict[str, Any] | None, limit_s: float) -> dict[str, Any] | None:
        """Return the child's next line; None if it does not come in time, or the child ended."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        if ask is not None:
            try:
                self._child.stdin.write(json.dumps(ask).encode() + b"\n")
                self._child.stdin.flush()
            except BrokenPipeError:
                return None
        end, fd = time.monotonic() + limit_s, self._child.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                piece = os.read(fd, 1 << 16)
                if not piece:
                    return None
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        said: dict[str, Any] = parse_json(line)
        return said

    def _end(self) -> int | None:
        """End the child. Return its exit code; None if it was still running."""
        child, self._child = self._child, None
        if child is None:
            return 0
        closed = self._is_closed(child)
        code = child.wait() if closed else None
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return code

    @staticmethod
    def _is_closed(child: subprocess.Popen[bytes]) -> bool:
        """Return True if the child has closed its end of the pipe, as one that ends does."""
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            return bool(selector.select(0)) and not os.read(child.stdout.fileno(), 1)

    def _refusal(self, what: str) -> RewardError:
        remedy = "mend the function; it is asked again when the run continues"
        return RewardError(what, where=self._where, remedy=remedy)


def _how_ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
