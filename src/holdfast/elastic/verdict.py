"""How a generation ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finished:
    """Every step of the run file is done; committed, unless `unsaved` says why not."""

    step: int
    unsaved: str | None = None


@dataclass(frozen=True)
class Left:
    """The workers left, as they were asked to; saved, unless `unsaved` says why not."""

    step: int
    unsaved: str | None = None


@dataclass(frozen=True)
class Lost:
    """Something died or hung that a restart may mend."""

    reason: str  # of the next GenerationStarted: worker_lost, hang, mover_lost, template_lost, rot
    cause: str  # a phrase for people
    rotten: str | None = None  # what is wrong with the checkpoint that the generation began from


@dataclass(frozen=True)
class Failed:
    """Something that a restart would not mend."""

    sentence: str
    exit_code: int = 1


Verdict = Finished | Left | Lost | Failed
