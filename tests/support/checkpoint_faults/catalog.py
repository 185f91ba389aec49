"""The faults by name, how often each is drawn, and how one case is run.

A case is (seed, fault, number) and nothing else: the same three give the same case again.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.checkpoint_faults import (
    bucket,
    interrupted,
    memory,
    movers,
    reading,
    rest,
    sealed,
    states,
    uploads,
)
from tests.support.checkpoint_faults.histories import history
from tests.support.checkpoint_faults.interrupted import Setting
from tests.support.checkpoint_faults.verdict import Restored, WrongError, judge_folder

Run = Callable[[Path, random.Random, int, int], tuple[str, Restored]]
"""(folder, randomness, seed, number) -> what was done, in words, and what came of it"""


@dataclass(frozen=True)
class Case:
    seed: int
    fault: str
    number: int

    @property
    def command(self) -> str:
        return (
            f"python -m tests.support.checkpoint_faults --seed {self.seed} --only {self.fault} "
            f"--case {self.number}"
        )


@dataclass(frozen=True)
class Outcome:
    """verdict: newest, older, sentence, nothing, or FAILED."""

    case: Case
    verdict: str
    what: str
    seconds: float


def run(case: Case, root: Path) -> Outcome:
    """One case in a folder of its own. Whatever is not a verdict is a failure."""
    rng = random.Random(f"{case.seed}/{case.fault}/{case.number}")
    folder = root / f"{case.fault}-{case.number}"
    folder.mkdir()
    begun = time.perf_counter()
    try:
        what, found = FAULTS[case.fault].run(folder / "run", rng, case.seed, case.number)
        verdict = _verdict(found)
        what = f"{what} -> {found}" + (f": {found.sentence}" if found.sentence else "")
    except Exception as error:
        verdict, what = "FAILED", f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(case, verdict, what, time.perf_counter() - begun)


def _verdict(found: Restored) -> str:
    if found.position is None:
        return "sentence" if found.sentence else "nothing"
    return "older" if found.position[0] < found.newest else "newest"


# --- families ---------------------------------------------------------------------------------
def at_rest(
    damage: tuple[str, ...], folder: Path, rng: random.Random, seed: int, number: int
) -> tuple[str, Restored]:
    """Break what lies there, then restore onto another layout."""
    setting = setting_of(rng)
    made = history(setting.first, setting.second)
    made.pour(folder)
    victim = rest.Victim(folder, made)
    names = damage or tuple(rng.sample([n for n in rest.DAMAGE if n != "none-left"], 2))
    what = "; ".join(rest.DAMAGE[name][0](victim, rng) for name in names)
    found, due = judge_folder(folder, made.files, states.topology(rng.randrange(8), 5))
    if damage == ("none-left",) and (due.allowed or not found.sentence):
        raise WrongError(f"{what}: {found}, though nothing good is left")
    return what, found


def setting_of(rng: random.Random) -> Setting:
    """One of a few: each costs a history, and a pass that counts its points."""
    return rng.choice(SETTINGS)


SETTINGS = [
    Setting(0, 3, 2, 0),
    Setting(1, 6, 4, 1),
    Setting(2, 7, 5, 3),
    Setting(3, 1, 6, 1),
    Setting(4, 2, 3, 2),
    Setting(5, 4, 0, 1),
    Setting(6, 5, 1, 0),
    Setting(7, 3, 7, 3),
]


@lru_cache(maxsize=64)
def _round(seed: int, family: str, number: int) -> Setting:
    """Cases of one round share a setting, so that together they reach all its points."""
    return setting_of(random.Random(f"{seed}/{family}/round {number}"))


@lru_cache(maxsize=64)
def _shuffled(seed: int, family: str, count: int) -> list[int]:
    return random.Random(f"{seed}/{family}/order").sample(range(count), count)


def killed(
    power: bool, folder: Path, rng: random.Random, seed: int, number: int
) -> tuple[str, Restored]:
    """Case i of a round ends at another point than every other; so many points, so many cases."""
    family = "power" if power else "kill"
    setting = _round(seed, family, 0)
    names = interrupted.points_of(setting)
    at = _shuffled(seed, family, len(names))[number % len(names)]
    said = interrupted.killed(folder, setting, at, rng if power else None)
    found = interrupted.settle(folder, setting, said, rng.randrange(8))
    return f"{family} {names[at]} (point {at} of {len(names)})", found


def of_setting(
    body: Callable[[Path, Setting, random.Random], tuple[str, Restored]],
    folder: Path,
    rng: random.Random,
    seed: int,
    number: int,
) -> tuple[str, Restored]:
    return body(folder, setting_of(rng), rng)


@lru_cache(maxsize=8)
def mover_points(setting: Setting) -> int:
    with TemporaryDirectory() as root:
        return movers.counted(Path(root, "run"), setting)


def at_mover_point(
    body: Callable[[Path, Setting, int, random.Random], tuple[str, Restored]],
    folder: Path,
    rng: random.Random,
    seed: int,
    number: int,
) -> tuple[str, Restored]:
    setting = _round(seed, "mover", number // 40)
    count = mover_points(setting)
    at = _shuffled(seed, f"mover {number // 40}", count)[number % 40 % count]
    return body(folder, setting, at, rng)


def of_reading(
    body: Callable[[Path, random.Random], tuple[str, Restored]],
    folder: Path,
    rng: random.Random,
    seed: int,
    number: int,
) -> tuple[str, Restored]:
    return body(folder, rng)


@dataclass(frozen=True)
class Fault:
    """share: of 500 cases, about so many are this."""

    run: Run
    share: int


FULL_DISK = "full-disk"
"""Only by name: it needs a small file system of its own."""

FAULTS: dict[str, Fault] = {
    **{name: Fault(partial(at_rest, (name,)), share) for name, (_, share) in rest.DAMAGE.items()},
    "two-faults": Fault(partial(at_rest, ()), 24),
    "sealed": Fault(partial(of_setting, sealed.at_rest), 24),
    "unreadable": Fault(partial(of_reading, reading.unreadable), 8),
    "hiccup": Fault(partial(of_reading, reading.hiccup), 8),
    "dropped": Fault(partial(of_reading, reading.dropped), 14),
    "kill": Fault(partial(killed, False), 60),
    "power": Fault(partial(killed, True), 60),
    "failing": Fault(partial(of_setting, interrupted.failing), 40),
    FULL_DISK: Fault(partial(of_setting, interrupted.full_disk), 20),
    "zombie": Fault(partial(of_setting, interrupted.zombie), 30),
    "race": Fault(partial(of_setting, interrupted.race), 14),
    "mover-point": Fault(partial(at_mover_point, movers.die_at), 30),
    "mover-failing": Fault(partial(at_mover_point, movers.failing), 16),
    "mover-sigkill": Fault(partial(of_setting, movers.sigkill), 10),
    "slot-rewritten": Fault(partial(of_setting, movers.rewritten), 6),
    "two-movers": Fault(partial(of_setting, movers.two_movers), 8),
    **{name: Fault(partial(of_setting, partial(memory.play, name)), 8) for name in memory.KINDS},
    **{name: Fault(partial(of_setting, body), 10) for name, body in bucket.KINDS.items()},
    **{name: Fault(partial(of_setting, body), 10) for name, body in uploads.KINDS.items()},
}


def cases(
    seed: int, count: int, only: Sequence[str] = (), every_point: bool = False
) -> Iterator[Case]:
    """About `count` cases, dealt over the faults by their shares; at least one of each.

    every_point: as many kills, and losses of power, as the protocol has points.
    """
    names = only or [name for name in FAULTS if name != FULL_DISK]
    total = sum(FAULTS[name].share for name in names)
    for name in names:
        share = max(1, -(-FAULTS[name].share * count // total))
        if every_point and name in ("kill", "power"):
            share = max(share, len(interrupted.points_of(_round(seed, name, 0))))
        for number in range(share):
            yield Case(seed, name, number)
