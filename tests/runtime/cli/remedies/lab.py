"""Carries out remedies: a case makes a fault, reads the remedy and does what it says.

An attempt is what a user does. It fails with a message; the case says how a user reads each remedy,
and the attempt is repeated until it succeeds. Every site of the case must have been met.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from tests.runtime.cli.remedies.sites import module_of, names_at

MOST_ROUNDS = 4


@dataclass
class Lab:
    """The folder of a case, and what its attempt is given. trained: a finished run, to copy. good:
    files as they were before."""

    folder: Path
    trained: Path
    settings: dict[str, Any] = field(default_factory=dict)
    good: dict[str, bytes] = field(default_factory=dict)

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def spoil(self, path: Path, content: bytes) -> None:
        """Replace a file that is right; `fetch_again` brings it back."""
        self.good[str(path)] = path.read_bytes()
        path.write_bytes(content)

    def path(self, name: str) -> str:
        return str(self.folder / name)


Mend = Callable[[Lab, re.Match[str]], object]


@dataclass(frozen=True)
class Case:
    """remedies: a pattern of the complete remedy -> what a user does who reads it."""

    sites: tuple[str, ...]
    begin: Callable[[Lab], object]
    attempt: Callable[[Lab], object]
    remedies: tuple[tuple[str, Mend], ...]

    def __str__(self) -> str:
        return self.sites[0]


def case(
    site: str | tuple[str, ...],
    begin: Callable[[Lab], object],
    attempt: Callable[[Lab], object],
    remedy: str,
    mend: Mend,
    *more: tuple[str, Mend],
) -> Case:
    sites = (site,) if isinstance(site, str) else site
    return Case(sites, begin, attempt, ((remedy, mend), *more))


def carry_out(one: Case, lab: Lab) -> None:
    """Attempt, and follow the remedies until the attempt succeeds."""
    one.begin(lab)
    told: list[str] = []
    with recorded_places() as places:
        for _ in range(MOST_ROUNDS):
            try:
                one.attempt(lab)
            except UserError as error:
                sentence = str(error)
                assert sentence not in told, f"leads nowhere: {sentence}"
                told.append(sentence)
                _follow(one, lab, sentence, str(error.remedy or ""))
                continue
            assert told, "this was no mistake"
            met = {name for place in places for name in names_at(*place)}
            assert set(one.sites) <= met, f"met {sorted(met)}; {told}"
            return
    raise AssertionError("\n".join(told))


def _follow(one: Case, lab: Lab, sentence: str, remedy: str) -> None:
    for pattern, mend in one.remedies:
        if found := re.search(rf"(?:^|; ){pattern}$", remedy or sentence):
            mend(lab, found)
            return
    raise AssertionError(f"cannot be followed: {sentence}")


@contextmanager
def recorded_places() -> Iterator[set[tuple[str, int]]]:
    """Inside, each message that is built adds the modules and lines that it came from."""
    places: set[tuple[str, int]] = set()
    original = UserError.__init__

    def noting(self: UserError, message: str, **more: Any) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None:
            if module := module_of(frame.f_code.co_filename):
                places.add((module, frame.f_lineno))
            frame = frame.f_back
        original(self, message, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UserError, "__init__", noting)
        yield places


# --- what users do --------------------------------------------------------------------------
def setting(key: str, read: Callable[[str], Any] = str) -> Mend:
    """Give the attempt the value that the remedy names."""

    def mend(lab: Lab, found: re.Match[str]) -> None:
        lab.settings[key] = read(found[1])

    return mend


def fixed(**settings: Any) -> Mend:
    """Give the attempt other values, as a person chooses them."""
    return lambda lab, found: lab.settings.update(settings)


def fetch_again(lab: Lab, found: re.Match[str]) -> None:
    for path, content in lab.good.items():
        Path(path).write_bytes(content)


def remove(name: str) -> Mend:
    return lambda lab, found: (lab.folder / name).unlink()
