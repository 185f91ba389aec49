"""What a user can do wrong, each with its remedy.

A `UserError` is one clear sentence: where, what, and what to do about it. The command line
prints it without a traceback and exits with 2; everything else that escapes is our own bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial


def nearest_of(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the choice that was probably meant, whatever its case; "" if none is near."""
    from difflib import get_close_matches  # not at the start of each command

    by_name = {choice.lower(): choice for choice in choices}
    close = get_close_matches(name.lower(), by_name, n=1, cutoff=cutoff)
    return by_name[close[0]] if close else ""


def use_one_of(choices: Iterable[str], name: str = "", cutoff: float = 0.6) -> str:
    """Return the remedy of a name that is no choice: the nearest one, or all of them."""
    choices = list(choices)
    near = nearest_of(name, choices, cutoff) if name else ""
    return f"use {near or 'one of ' + ', '.join(choices)}"


def nearest_degrees(degree: int, works: Callable[[int], bool], most: int) -> str:
    """Return the closest degrees below and above `degree` that work, in words: "2 or 4"."""
    below = next((d for d in range(min(degree - 1, most), 0, -1) if works(d)), None)
    above = next((d for d in range(degree + 1, most + 1) if works(d)), None)
    return " or ".join(str(d) for d in (below, above) if d is not None)


START_OVER = "start over with --fresh (in a bucket: with another folder=)"
"""The remedy if nothing of a run can be used. Objects of a bucket cannot be moved aside."""


class HoldfastError(Exception):
    """Root of every error that Holdfast raises on purpose."""

    exit_code = 1


class NoRoomError(HoldfastError):
    """There is no memory for snapshots. Training does not need them."""


class UserError(HoldfastError):
    """Something the person at the keyboard can mend.

    `where` names the place (a file and line, a key of the run file, a command), `remedy` a
    value or a command that would work.
    """

    exit_code = 2

    def __init__(self, message: str, *, where: str | None = None, remedy: str | None = None):
        self.message = message
        self.where = where
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}; {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        """Survive a process boundary: keyword arguments are not replayed by default."""
        return partial(type(self), where=self.where, remedy=self.remedy), (self.message,)


def unknown_name(
    kind: type[UserError], what: str, name: str, choices: Iterable[str], where: str
) -> UserError:
    """Return the refusal of a name that is none of the choices."""
    return kind(f"there is no {what} {name!r}", where=where, remedy=use_one_of(choices, name))


class ConfigError(UserError):
    """The run file or an override is wrong."""


class OverBudgetError(ConfigError):
    """A limit of money or time in a file is reached. The limit is to be raised, or --yes passed."""

    exit_code = 4


class DataError(UserError):
    """A source, a tokenizer or a prepared dataset is wrong."""


class LayoutError(UserError):
    """Degrees that cannot work together."""


class CheckpointError(UserError):
    """No checkpoint can be trusted, or one that was asked for cannot be read."""


class TaskError(UserError):
    """A user's task cannot be made, does not fit the run, or breaks a rule of
    docs/guide/python.md. Its place is the section `task`, unless it is known better."""

    def __init__(self, message: str, *, where: str | None = "task", remedy: str | None = None):
        super().__init__(message, where=where, remedy=remedy)


class ScriptError(TaskError):
    """The script of an own loop has raised, exited or ended early. Its process cannot continue."""


class RewardError(UserError):
    """A reward cannot be made, or rates a completion with something that is no number. Its place
    is the entry of `rollout.rewards`."""


class ModelFolderError(UserError):
    """A folder in Hugging Face form cannot be read or written."""


class RunFolderError(UserError):
    """The run folder is in use, is not writable, or belongs to another configuration."""


class CannotGoOnError(UserError):
    """The run cannot go on with what there is: too few nodes, or no state that can be trusted. What
    it has is kept, and the same command takes it up."""

    exit_code = 3


class StoreError(RunFolderError):
    """The run store is out of reach, refuses us, or does not keep what it must promise. Says
    nothing about the bytes in it: whoever looks for a good checkpoint must not take it for rot."""


class OtherKeyError(StoreError):
    """An object is sealed with another key than ours, or the end that names its key is rotten."""


class StateMemoryError(UserError):
    """A rank's state does not fit its place, or that place fails. Its process cannot continue."""


class MismatchError(UserError):
    """A check has found that a rank computed a learner's round wrongly, and the run is to stop."""


class OutOfSpaceError(UserError):
    """A disk is full."""


class FencedError(HoldfastError):
    """A newer generation or term exists: this writer must not write any more."""


class CorruptError(HoldfastError):
    """Bytes do not match their checksum, or a format is torn. Names the blob and the place."""


class PeerLostError(HoldfastError):
    """A collective failed because another rank is gone. The step was not applied."""


class DeviceStuckError(HoldfastError):
    """The device, or its backend, does not answer after the groups on it were given up. Only a new
    process can use the device again."""


class NonFiniteError(HoldfastError):
    """A loss or gradient is NaN or infinite; `rank` and `parameter` say where it was seen first.

    dealt: the microbatches of each replica. suspects: those that may have caused it, as far as that
    can be said. again: they were so once more when the same ranks computed them anew, at once.
    """

    def __init__(
        self,
        step: int,
        rank: int,
        parameter: str,
        dealt: Sequence[Sequence[int]] = (),
        suspects: Sequence[int] = (),
        again: bool = True,
    ) -> None:
        self.step, self.rank, self.parameter = step, rank, parameter
        self.dealt, self.suspects, self.again = dealt, suspects, again
        super().__init__(f"step {step}: {parameter} is not finite on rank {rank}")


class JumpError(HoldfastError):
    """The loss of a step has jumped. Raised on every rank alike; the one that judged knows `limit`,
    how the microbatches were `dealt`, and which are `suspects`."""

    def __init__(
        self,
        step: int,
        loss: float,
        limit: float | None = None,
        dealt: Sequence[Sequence[int]] = (),
        suspects: Sequence[int] = (),
    ) -> None:
        self.step, self.loss, self.limit = step, loss, limit
        self.dealt, self.suspects = dealt, suspects
        bound = "" if limit is None else f"; up to {limit:.4g} were to be expected"
        super().__init__(f"step {step}: its loss of {loss:.4g} is a jump{bound}")
