"""No restore is ever silently wrong: a sample of the campaign here, the whole of it by `make
rotten`. The campaign is a process of its own: it forks, so it may have neither threads nor torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast.checkpoint import restore, sources
from tests.checkpoint.campaign import memory, workers
from tests.checkpoint.campaign.faults import FAULTS, Case, run
from tests.ranks import rank_values

MOVERS = ("mover-point", "mover-failing", "mover-sigkill", "slot-header", "slot-rewritten",
          "two-movers")  # fmt: skip
MEMORY = tuple(memory.KINDS)
CHILDREN = ("kill", "power", "failing", "zombie", "race")


def campaign(*arguments: str | int, deadline: float = 120) -> list[dict[str, str]]:
    """Run it; every case's outcome. A failure shows the command that repeats it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.campaign", "--json", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=deadline,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_bytes_at_rest() -> None:
    seen = campaign("--seed", 20261, "--cases", 90, "--skip", *MOVERS, *CHILDREN, *MEMORY)
    verdicts = Counter(case["verdict"] for case in seen)
    assert verdicts["older"] > 20
    assert verdicts["sentence"] >= 8
    assert verdicts["newest"] > 5


def test_interrupted_saves() -> None:
    seen = campaign("--seed", 20262, "--cases", 90, "--only", *CHILDREN)
    assert {case["fault"] for case in seen} == set(CHILDREN)
    assert {case["verdict"] for case in seen} == {"newest"}


def test_movers_that_die_and_disks_that_fail_them() -> None:
    seen = campaign("--seed", 20263, "--cases", 24, "--only", *MOVERS)
    assert {case["fault"] for case in seen} == set(MOVERS)


def test_snapshots_in_memory() -> None:
    seen = campaign("--seed", 20264, "--cases", 24, "--only", *MEMORY)
    assert {case["fault"] for case in seen} == set(MEMORY)
    assert {case["verdict"] for case in seen} == {"newest", "older"}


@pytest.mark.slow
def test_the_whole_campaign() -> None:
    seen = campaign("--seed", 1, "--cases", 500, deadline=600)
    assert len(seen) >= 500
    assert {case["fault"] for case in seen} == set(FAULTS)
    assert Counter(case["verdict"] for case in seen)["sentence"] >= 20


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 5), *(pytest.param(n, 10, marks=pytest.mark.slow) for n in range(5, 45, 10))],
)
def test_real_workers(first: int, count: int) -> None:
    """Ranks with torch, each with its Capturer, and a real mover process."""
    seen, *_ = rank_values(
        workers.play, workers.RANKS, {"seed": 4, "first": first, "count": count},
        deadline=60 + 10.0 * count,
    )  # fmt: skip
    assert [number for number, *_ in seen] == list(range(first, first + count))
    assert {kind for _, kind, *_ in seen} == set(workers.KINDS)


@pytest.mark.parametrize(
    "at", [3, *(pytest.param(at, marks=pytest.mark.slow) for at in (0, 1, 2, 4, 5))]
)
def test_a_worker_that_gets_sigkill_in_the_middle_of_a_capture(tmp_path: Path, at: int) -> None:
    rank_values(workers.dying, workers.RANKS, {"folder": tmp_path, "at": at}, dies={1: "SIGKILL"})


def test_a_case_is_the_same_when_it_is_repeated() -> None:
    only = ("--only", "flip-data", "kill")
    every = campaign("--seed", 7, "--cases", 6, *only)
    for case in every[1:5]:
        again = campaign("--seed", 7, "--only", case["fault"], "--case", case["number"])
        assert again == [case]


class Anything(str):
    """A checksum that every other one equals."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def test_the_campaign_sees_a_product_that_checks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the checksums of extents left out, flipped bits are handed out, and the campaign says
    so: its verdicts do not come from the code that they judge."""
    good = [run(Case(3, "flip-data", number), tmp_path) for number in range(10)]
    assert not [outcome for outcome in good if outcome.verdict == "FAILED"]
    for module in (restore, sources):
        monkeypatch.setattr(module, "xxh3_128_hexdigest", lambda view: Anything())
    bad = [run(Case(3, "flip-data", number), tmp_path) for number in range(10)]
    assert sum("SILENTLY WRONG" in outcome.what for outcome in bad) >= 4
    assert bad[0].case.command.endswith("--seed 3 --only flip-data --case 0")
