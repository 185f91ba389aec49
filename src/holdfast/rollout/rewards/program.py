"""A program that a completion holds, run in a sandbox (`program_child.py`)."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.config.sections.rewards import RewardConfig
from holdfast.errors import RewardError
from holdfast.rollout.prompts import Prompt
from holdfast.rollout.rewards import program_child

END = -1000
"""Stands for the exit code of a program that came to its end."""
WALL_FACTOR = 5
"""Wall seconds of a program for each second of processor time that it may use."""
_CPU_SIGNALS = (signal.SIGXCPU, signal.SIGKILL)
_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class ProgramReward:
    """1 for a program that passes, 0 for one that does not. Raises RewardError if the machine
    cannot isolate it."""

    source = ""

    def __init__(self, entry: RewardConfig, where: str):
        self._entry, self._where = entry, where
        self._number = float(entry.on_timeout or 0.0)
        code, _, said = self._run("")
        if code == program_child.NO_ISOLATION:
            raise RewardError(
                f"a program of the model cannot be isolated: this machine lacks {said.strip()}",
                where=where,
                remedy="use a machine that has it, or set isolation: limits if the model may use "
                "the network and your files",
            )
        if code != END:
            raise RewardError(
                f"an empty program ends with exit code {code} ({said.strip()[-200:]})",
                where=where,
                remedy="raise memory_mb",
            )

    def rate(self, prompt: Prompt, text: str, ids: Sequence[int]) -> float:
        program = program_in(text)
        if self._entry.tests:
            program += "\n" + str(prompt.columns[self._entry.tests]) + "\n"
        code, output, _ = self._run(program)
        if code is None:
            return self._number
        if self._entry.tests or code not in (0, END):
            return float(code == END)
        return float(output.strip() == (prompt.answer or "").strip())

    def close(self) -> None:
        pass

    def _run(self, program: str) -> tuple[int | None, str, str]:
        """Return exit code, output and errors; the code is None for one that took too long."""
        entry = self._entry
        with tempfile.TemporaryDirectory(prefix="holdfast-program-") as folder:
            os.mkdir(place := os.path.join(folder, "here"), 0o777)
            with (
                open(os.path.join(folder, "out"), "w+b") as out,
                open(os.path.join(folder, "err"), "w+b") as err,
            ):
                end_code = secrets.choice(
                    range(40, 100)
                )  # not in argv, where a program would see it
                limits = str(entry.timeout_s), str(entry.memory_mb << 20), entry.isolation
                child = subprocess.Popen(
                    [sys.executable, "-I", "-S", program_child.__file__, place, *limits],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=err,
                    env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "HOME": place},
                    start_new_session=True,
                )
                try:
                    child.communicate(
                        f"{end_code}\n{program}".encode(), timeout=entry.timeout_s * WALL_FACTOR
                    )
                    code: int | None = child.returncode
                except subprocess.TimeoutExpired:
                    code = None
                finally:
                    _kill_session(child)
                code = END if code == end_code else _cpu_is_up(code)
                return code, _text(Path(out.name)), _text(Path(err.name))


def program_in(text: str) -> str:
    """Return the last block in fences, or all of a text without one."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def _cpu_is_up(code: int | None) -> int | None:
    """Return None for the exit code of a program that has used up its processor time."""
    ends = {-number for number in _CPU_SIGNALS} | {128 + number for number in _CPU_SIGNALS}
    return None if code in ends else code


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _text(path: Path) -> str:
    return path.read_bytes()[: program_child.FILE_BYTES].decode("utf-8", "replace")
