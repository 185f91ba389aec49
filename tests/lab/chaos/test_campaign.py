"""What a campaign takes up of what lies in its folder, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.errors import ConfigError, RunFolderError, UserError
from holdfast_lab.chaos import campaign
from holdfast_lab.chaos.campaign import Campaign, CampaignSettings, DisturbedRun, plan_runs
from holdfast_lab.chaos.layouts import CHAOS_LAYOUTS
from holdfast_lab.chaos.results import DisturbedRunReport
from holdfast_lab.chaos.sample_run import SAMPLE_OVERRIDES, write_run_file
from holdfast_lab.chaos.schedule import read_trace
from tests.support.ranks import wait_until

WORK = plan_runs([CHAOS_LAYOUTS["two"]], 5)


class _Quick(Campaign):
    """Trains nothing, and disturbs nothing."""

    def _run_disturbed(self, task: DisturbedRun, folder: Path, address: str) -> DisturbedRunReport:
        return DisturbedRunReport(problem="none was begun")


@pytest.fixture
def settings(tmp_path: Path) -> CampaignSettings:
    """Of which a campaign was done; `true` is a command that trains at once."""
    out = tmp_path / "out"
    out.mkdir()
    found = CampaignSettings(
        ("true",), write_run_file(out), SAMPLE_OVERRIDES, out, 1, ("kill",), use_networks=False
    )
    _made(found)
    return found


def _made(settings: CampaignSettings) -> tuple[list[dict[str, Any]], list[str]]:
    said: list[str] = []
    for steps in {task.steps for task in WORK}:
        folder = settings.out / f"undisturbed-{steps}{settings.shard_suffix}"
        folder.mkdir(exist_ok=True)
    quick = _Quick(settings, said.append)
    quick._ensure_undisturbed = _undisturbed(quick)  # type: ignore[method-assign]
    return quick.run(WORK), said


def _undisturbed(quick: Campaign) -> Any:
    def made(steps: int) -> Path:
        whole = quick._folder.undisturbed_marker(steps)
        whole.parent.mkdir(exist_ok=True)
        whole.write_text(quick._folder.training_digest(steps))
        return whole.parent

    return made


def test_two_at_work_in_one_folder_are_refused_unless_they_are_shards(
    settings: CampaignSettings,
) -> None:
    def at_work(part: tuple[int, int]) -> AbstractContextManager[None]:
        return Campaign(replace(settings, shard=part), print)._hold_locks()

    with at_work((1, 1)):
        for part in ((1, 1), (1, 2)):
            with pytest.raises(UserError, match="at work here"), at_work(part):
                pass
    with at_work((1, 2)), at_work((2, 2)):
        for part in ((1, 1), (1, 2)):
            with pytest.raises(UserError, match="at work here"), at_work(part):
                pass
    with at_work((1, 1)):
        pass


@pytest.mark.slow
def test_shards_that_begin_at_once_prepare_their_data_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = [
        sys.executable,
        "-m",
        "holdfast.cli.main",
        "chaos",
        "--faults",
        "2",
        "--no-network",
        "--layout",
        "two,replicated",
        "--nodes",
        "2",
        "--out",
        str(out),
        "--shard",
    ]
    shards = [subprocess.Popen([*line, f"{n}/2"], stderr=subprocess.DEVNULL) for n in (1, 2)]
    try:
        wait_until(
            lambda: (
                len(list(out.glob("undisturbed-*of2/undisturbed"))) == 2
                or any(shard.poll() is not None for shard in shards)
            ),
            120,
            "two undisturbed runs",
        )
        assert [shard.poll() for shard in shards] == [None, None]
    finally:
        for shard in shards:
            shard.kill()
            shard.wait()


def test_nobody_trains_on_for_a_campaign_that_was_killed(tmp_path: Path) -> None:
    """Else it would be in the way of the same command."""
    out = tmp_path / "out"
    line = [sys.executable, "-m", "holdfast.cli.main", "chaos", "--faults", "1", "--out", str(out)]
    with subprocess.Popen(line, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: list(out.glob("undisturbed-*/terms/*")), what="an undisturbed run")
        process.kill()
    wait_until(lambda: not _at_work(out), what="the end of the undisturbed run")


def _at_work(out: Path) -> list[str]:
    lines = (each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"]))
    return [" ".join(line) for line in lines if any(str(out) in word for word in line)]


def test_the_same_campaign_is_not_done_again(settings: CampaignSettings) -> None:
    results, said = _made(settings)
    assert [line for line in said if "done before" in line] == ["two-1-1: done before"]
    assert len(results) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"fault_names": ("agent",)},
        {"overrides": (*SAMPLE_OVERRIDES, "train.optimizer.learning_rate=0.5")},
        {"draws": tuple(read_trace('{"step": 3, "fault": "kill"}', "f", "1"))},
    ],
)
def test_what_another_campaign_made_is_refused(
    settings: CampaignSettings, change: dict[str, Any]
) -> None:
    with pytest.raises(RunFolderError, match=r"two-1-1: .*another campaign.*--out"):
        _made(replace(settings, **change))


def test_a_run_file_that_was_changed_is_another_campaign(settings: CampaignSettings) -> None:
    settings.run_file.write_text(settings.run_file.read_text().replace("dim: 16", "dim: 32"))
    with pytest.raises(RunFolderError, match="another campaign"):
        _made(settings)


def test_what_other_code_made_is_another_campaign(
    settings: CampaignSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert campaign.source_digest() == campaign.source_digest()
    monkeypatch.setattr(campaign, "source_digest", lambda: "changed")
    with pytest.raises(RunFolderError, match="other code"):
        _made(settings)


def test_another_number_of_faults_is_another_run(settings: CampaignSettings) -> None:
    with pytest.raises(RunFolderError, match="another campaign"):
        _Quick(settings, print).run(plan_runs([CHAOS_LAYOUTS["two"]], 6))


def test_an_undisturbed_run_of_something_else_is_refused(settings: CampaignSettings) -> None:
    other = replace(
        settings, seed=2, overrides=(*SAMPLE_OVERRIDES, "train.optimizer.learning_rate=0.5")
    )
    with pytest.raises(RunFolderError, match=r"undisturbed-32: .*another campaign"):
        _made(other)
    results, _ = _made(replace(settings, seed=2))
    assert results[0]["run"] == "two-2-1"


def test_a_result_from_before_there_were_digests_is_refused(settings: CampaignSettings) -> None:
    stored = settings.out / "runs" / "two-1-1" / "result.json"
    result = json.loads(stored.read_text())
    del result["made_from"]
    stored.write_text(json.dumps(result))
    with pytest.raises(RunFolderError, match="another campaign"):
        _made(settings)


def test_shards_share_no_undisturbed_run(settings: CampaignSettings) -> None:
    first, second = (Campaign(replace(settings, shard=(n, 2)), print) for n in (1, 2))
    assert first._folder.undisturbed_marker(40) != second._folder.undisturbed_marker(40)
    results, said = _made(replace(settings, shard=(1, 2)))
    assert any("done before" in line for line in said)
    assert len(results) == 1


def test_an_override_that_is_none_is_refused_before_anything_starts(
    settings: CampaignSettings,
) -> None:
    with pytest.raises(ConfigError):
        _Quick(replace(settings, overrides=("train.nonsense=1",)), print).run(WORK)
