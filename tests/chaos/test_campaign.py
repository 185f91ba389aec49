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

from holdfast.chaos import campaign
from holdfast.chaos.campaign import Campaign, Settings, Task, tasks
from holdfast.chaos.experiment import Story
from holdfast.chaos.layouts import SHAPES
from holdfast.chaos.sample_run import OVERRIDES, write_run_file
from holdfast.chaos.schedule import read_trace
from holdfast.errors import ConfigError, RunFolderError, UserError
from tests.support.ranks import wait_until

WORK = tasks([SHAPES["two"]], 5)


class _Quick(Campaign):
    """Trains nothing, and disturbs nothing."""

    def _disturbed(self, task: Task, folder: Path) -> Story:
        return Story(problem="none was begun")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of which a campaign was done; `true` is a command that trains at once."""
    out = tmp_path / "out"
    out.mkdir()
    found = Settings(("true",), write_run_file(out), OVERRIDES, out, 1, ("kill",), networks=False)
    _made(found)
    return found


def _made(settings: Settings) -> tuple[list[dict[str, Any]], list[str]]:
    said: list[str] = []
    for steps in {task.steps for task in WORK}:
        folder = settings.out / f"undisturbed-{steps}{settings.part}"
        folder.mkdir(exist_ok=True)
    quick = _Quick(settings, said.append)
    quick._undisturbed = _undisturbed(quick)  # type: ignore[method-assign]
    return quick.run(WORK), said


def _undisturbed(quick: Campaign) -> Any:
    def made(steps: int) -> Path:
        whole = quick._whole(steps)
        whole.parent.mkdir(exist_ok=True)
        whole.write_text(quick._trains(steps))
        return whole.parent

    return made


def test_two_at_work_in_one_folder_are_refused_unless_they_are_shards(settings: Settings) -> None:
    def at_work(part: tuple[int, int]) -> AbstractContextManager[None]:
        return Campaign(replace(settings, shard=part), print)._alone()

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
    line = [sys.executable, "-m", "holdfast.cli.main", "chaos", "--faults", "2", "--no-network",
            "--layout", "two,replicated", "--nodes", "2", "--out", str(out), "--shard"]  # fmt: skip
    shards = [subprocess.Popen([*line, f"{n}/2"], stderr=subprocess.DEVNULL) for n in (1, 2)]
    try:
        wait_until(
            lambda: len(list(out.glob("undisturbed-*of2/undisturbed"))) == 2
            or any(shard.poll() is not None for shard in shards),
            120, "two undisturbed runs",
        )  # fmt: skip
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
        wait_until(lambda: list(out.glob("undisturbed-*/terms/*")), 60, "an undisturbed run")
        process.kill()
    wait_until(lambda: not _at_work(out), 10, "the end of the undisturbed run")


def _at_work(out: Path) -> list[str]:
    lines = (each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"]))
    return [" ".join(line) for line in lines if any(str(out) in word for word in line)]


def test_the_same_campaign_is_not_done_again(settings: Settings) -> None:
    results, said = _made(settings)
    assert [line for line in said if "done before" in line] == ["two-1-1: done before"]
    assert len(results) == 1


@pytest.mark.parametrize("change", [
    {"names": ("agent",)}, {"overrides": (*OVERRIDES, "train.optimizer.learning_rate=0.5")},
    {"draws": tuple(read_trace('{"step": 3, "fault": "kill"}', "f", "1"))},
])  # fmt: skip
def test_what_another_campaign_made_is_refused(settings: Settings, change: dict[str, Any]) -> None:
    with pytest.raises(RunFolderError, match=r"two-1-1: .*another campaign.*--out"):
        _made(replace(settings, **change))


def test_a_run_file_that_was_changed_is_another_campaign(settings: Settings) -> None:
    settings.run_file.write_text(settings.run_file.read_text().replace("dim: 16", "dim: 32"))
    with pytest.raises(RunFolderError, match="another campaign"):
        _made(settings)


def test_what_other_code_made_is_another_campaign(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert campaign.code() == campaign.code()
    monkeypatch.setattr(campaign, "code", lambda: "changed")
    with pytest.raises(RunFolderError, match="other code"):
        _made(settings)


def test_another_number_of_faults_is_another_run(settings: Settings) -> None:
    with pytest.raises(RunFolderError, match="another campaign"):
        _Quick(settings, print).run(tasks([SHAPES["two"]], 6))


def test_an_undisturbed_run_of_something_else_is_refused(settings: Settings) -> None:
    other = replace(settings, seed=2, overrides=(*OVERRIDES, "train.optimizer.learning_rate=0.5"))
    with pytest.raises(RunFolderError, match=r"undisturbed-32: .*another campaign"):
        _made(other)
    results, _ = _made(replace(settings, seed=2))
    assert results[0]["run"] == "two-2-1"


def test_a_result_from_before_there_were_digests_is_refused(settings: Settings) -> None:
    stored = settings.out / "runs" / "two-1-1" / "result.json"
    result = json.loads(stored.read_text())
    del result["made_from"]
    stored.write_text(json.dumps(result))
    with pytest.raises(RunFolderError, match="another campaign"):
        _made(settings)


def test_shards_share_no_undisturbed_run(settings: Settings) -> None:
    first, second = (Campaign(replace(settings, shard=(n, 2)), print) for n in (1, 2))
    assert first._whole(40) != second._whole(40)
    results, said = _made(replace(settings, shard=(1, 2)))
    assert any("done before" in line for line in said)
    assert len(results) == 1


def test_an_override_that_is_none_is_refused_before_anything_starts(settings: Settings) -> None:
    with pytest.raises(ConfigError):
        _Quick(replace(settings, overrides=("train.nonsense=1",)), print).run(WORK)
