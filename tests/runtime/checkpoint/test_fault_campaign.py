"""No restore is ever silently wrong: 500 seeded cases; more by `make corrupt-checkpoints`.

The campaign is a process of its own: it forks, so it may have neither threads nor torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from holdfast.checkpoint.restore import sources, verify
from tests.support.checkpoint_faults import bucket, uploads, workers
from tests.support.checkpoint_faults.catalog import FAULTS, FULL_DISK, Case, cases, run
from tests.support.ranks import rank_values
from tests.support.small_disk import has_namespaces, run_on_small_disk

PARTS = 12
CHILDREN = (
    "kill",
    "power",
    "failing",
    "zombie",
    "race",
    "mover-point",
    "mover-failing",
    "mover-sigkill",
    "slot-rewritten",
    "two-movers",
)
BUCKET = (*bucket.KINDS, *uploads.KINDS)
TORCH_FREE = [name for name in FAULTS if name not in (*BUCKET, FULL_DISK)]


def campaign(*arguments: str | int, deadline: float = 120) -> list[dict[str, str]]:
    """Run it; every case's outcome. A failure shows the command that repeats it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.checkpoint_faults", "--json", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=deadline,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))]
)
def test_five_hundred_cases(part: int) -> None:
    """Every one restores the newest good checkpoint, or was built with none left and says so."""
    seen = campaign("--seed", 1, "--cases", 500, "--part", f"{part}/{PARTS}", "--skip", *BUCKET)
    for case in seen:
        if case["fault"] in CHILDREN:
            assert case["verdict"] == "newest", case
        if case["fault"] == "none-left":
            assert case["verdict"] == "sentence", case
        if case["verdict"] == "sentence":  # or the store was away
            assert case["fault"] in ("none-left", "sealed", "dropped", "hiccup"), case
        assert case["verdict"] != "nothing", case


def test_it_is_five_hundred_cases_of_every_fault() -> None:
    planned = Counter(case.fault for case in cases(1, 500, TORCH_FREE))
    assert planned.total() >= 500
    assert set(planned) == set(TORCH_FREE)
    assert planned["none-left"] >= 20


@pytest.mark.skipif(not has_namespaces(), reason="no user and mount namespaces here")
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_disk_that_is_really_full(tmp_path: Path, count: int) -> None:
    campaign = "-m", "tests.support.checkpoint_faults"
    options = "--only", FULL_DISK, "--cases", str(count), "--folder", str(tmp_path)
    run_on_small_disk(tmp_path, "2560k", *campaign, *options)


@pytest.mark.slow
def test_a_bucket_over_real_http() -> None:
    """One of each kind; nothing is silently wrong. `make corrupt-checkpoints` does more."""
    seen = campaign("--seed", 2, "--cases", 1, "--only", *BUCKET)
    assert {case["fault"] for case in seen} == set(BUCKET)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUCKET)
def test_a_bucket_over_real_http_at_length(name: str) -> None:
    seen = campaign("--seed", 3, "--cases", 20, "--only", name, deadline=600)
    assert len(seen) == 20
    assert "nothing" not in {case["verdict"] for case in seen}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kill", "power"])
def test_every_point_of_the_commit_protocol(name: str) -> None:
    seen = campaign("--seed", 4, "--cases", 1, "--every-point", "--only", name, deadline=600)
    assert len(seen) > 300
    assert {case["verdict"] for case in seen} == {"newest"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12, 13, 14])
def test_another_five_hundred(seed: int) -> None:
    seen = campaign("--seed", seed, "--cases", 500, "--skip", *BUCKET, deadline=600)
    assert len(seen) >= 500
    assert "nothing" not in {case["verdict"] for case in seen}


@pytest.mark.parametrize(
    "at", [3, *(pytest.param(at, marks=pytest.mark.slow) for at in (0, 1, 2, 4, 5))]
)
def test_a_worker_that_gets_sigkill_in_the_middle_of_a_capture(tmp_path: Path, at: int) -> None:
    rank_values(workers.dying, workers.RANKS, {"folder": tmp_path, "at": at}, dies={1: "SIGKILL"})


@pytest.mark.slow
def test_a_case_is_the_same_when_it_is_repeated() -> None:
    every = campaign("--seed", 7, "--cases", 6, "--only", "flip-data", "kill")
    for case in (every[1], every[-1]):
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


class Careless:
    """A hash of what lies in several places that finds whatever was wanted."""

    def __init__(self, view: object) -> None:
        pass

    def update(self, view: object) -> None:
        pass

    def hexdigest(self) -> Anything:
        return Anything()


def test_the_campaign_sees_a_product_that_checks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the checksums of extents, flipped bits are handed out, and the campaign reports them.
    So its verdicts do not come from the code that they judge."""
    good = [run(Case(3, "flip-data", number), tmp_path) for number in range(10)]
    assert not [outcome for outcome in good if outcome.verdict == "FAILED"]
    for module in (verify, sources):
        monkeypatch.setattr(module, "xxh3_128_hexdigest", lambda view: Anything())
    monkeypatch.setattr(sources, "xxh3_128", Careless)
    bad = [run(Case(3, "flip-data", number), tmp_path) for number in range(10)]
    assert sum("SILENTLY WRONG" in outcome.what for outcome in bad) >= 4
    assert bad[0].case.command.endswith("--seed 3 --only flip-data --case 0")
