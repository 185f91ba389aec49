"""How a generation ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finished:
    """Every step of the run file is done; committed, unless `unsaved` says why not. missing: what
    the bucket does not have."""

    step: int
    unsaved: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Left:
    """The workers left, as they were asked to; saved, unless `unsaved` says why not. missing: as
    in Finished."""

    step: int
    unsaved: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Lost:
    """Something died, hung or failed that another generation may mend."""

    # Of the next GenerationStarted: worker_lost, error, peer_lost, hang, mover_lost,
    # template_lost, rot.
    reason: str
    cause: str  # a phrase for people
    rotten: str | None = None  # what is wrong with the checkpoint that the generation began from
    ranks: frozenset[int] = frozenset()  # who were lost, or cannot go on with their peers


@dataclass(frozen=True)
class Failed:
    """Something that a restart would not mend."""

    sentence: str
    exit_code: int = 1


Verdict = Finished | Left | Lost | Failed
