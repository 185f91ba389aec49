"""What an agent decides when it hears of a deadline, and what it tells the workers. Alarms of a
predictor in an agent: what is saved when, and how false alarms end it."""

from __future__ import annotations

import asyncio
from math import log
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.notices.handler import DeferredNotices, NoticeHandler
from holdfast.elastic.notices.prediction import PredictionWatch, load_prediction_watch
from holdfast.elastic.protocol.notice_messages import Notice
from holdfast.elastic.protocol.worker_messages import SaveRequest, WorkerReply
from holdfast.errors import ConfigError, DataError
from holdfast.events import (
    CheckpointCommitted,
    CheckpointFailed,
    EmergencyPlanned,
    Event,
    GenerationStarted,
    NoticeReceived,
    Record,
    SnapshotKept,
)
from holdfast.layout import Layout, place_layout
from holdfast.policy.prediction.models import BaseRateModel, LastEventModel
from holdfast.policy.prediction.predictor import FittedModels, ModelVerdict
from holdfast.policy.prediction.response import ResponsePrices
from holdfast.policy.saving.tier_durations import TierDurations
from holdfast.policy.saving.tiers import DISK

PEER = {"name": "stage", "address": "127.0.0.1:7600"}
MODEL = {
    "preset": None,
    "layers": 1,
    "dim": 16,
    "heads": 2,
    "kv_heads": 1,
    "ffn_dim": 16,
    "vocab_size": 32,
}


class World:
    """Notices of a run on nodes a and b, what they wrote down and what they said."""

    def __init__(self, **checkpoint: Any) -> None:
        config = RunConfig.model_validate({"model": MODEL, "checkpoint": checkpoint})
        self.topology = place_layout(Layout(dp_replicate=2), 1, ("a", "b"))
        self.events: list[Event] = []
        self.said: list[str] = []
        self.notices = NoticeHandler(config, self.events.append, self.said.append)

    def saw(self, event: Event, generation: int = 1) -> None:
        self.notices.observe(Record(generation, "mover", 0, 1e9, event))

    def hear(self, *nodes: str, seconds: float = 30.0, leave: bool = False) -> tuple[int, ...]:
        notice = Notice(seconds, nodes, leave)
        return self.notices.handle_notice(notice, self.topology, 7).tiers

    def reply(self, rank: int) -> WorkerReply:
        """The requests in the answer to a worker of this rank."""
        return self.notices.add_requests(WorkerReply(), rank)

    @property
    def save_request(self) -> SaveRequest:
        save = self.reply(0).save
        assert save is not None
        return save


def test_a_run_that_goes_on_is_asked_once_and_by_one_rank() -> None:
    world = World(peers=[PEER], bucket="s3://bucket/run")
    assert set(world.hear("a")) == {1, 2, 3}
    heard, plan = world.events
    assert isinstance(heard, NoticeReceived)
    assert isinstance(plan, EmergencyPlanned)
    assert (heard.nodes, heard.step, plan.step) == (["a"], 7, 7)
    both = World()
    both.hear()
    assert isinstance(both.events[1], EmergencyPlanned)
    assert 0 < plan.bytes < both.events[1].bytes, "a owns some of it, both own all"
    told = world.reply(0)
    assert (told.save, told.is_peer_copy_enough) == (SaveRequest(1, tuple(plan.tiers)), False)
    assert world.reply(1).save is None
    world.hear("b")
    assert world.save_request.number == 2
    assert world.said[0].startswith("a will be gone in 30 s: ")


def test_bandwidths_are_those_that_were_measured() -> None:
    world = World(peers=[PEER])
    for _ in range(9):
        world.saw(CheckpointCommitted("k", 10**6, 1e5))
    assert world.hear() == (1,)
    assert world.reply(0).tier_durations == TierDurations({2: 1e5}, {2: 1e5})


def test_what_cannot_be_done_in_time_is_tried_all_the_same() -> None:
    world = World()
    for _ in range(9):
        world.saw(CheckpointCommitted("k", 10**6, 1e5))
    assert world.hear(leave=True) == ()
    assert "nothing can be complete in time" in world.said[0]
    assert not world.reply(0).is_peer_copy_enough  # durably, as there is no peer
    assert asyncio.run(world.notices.wait_for_peer_copy(7)) is None


def test_a_save_that_a_new_generation_cut_off_is_asked_for_until_there_is_one() -> None:
    world = World(peers=[PEER])
    world.saw(CheckpointFailed("the disk is full", 4, step=8), generation=4)
    world.saw(CheckpointFailed("an older agent does not say which", step=8), generation=4)
    assert world.save_request.number == 0, "that is no better in another step"
    world.saw(CheckpointFailed("generation 5 has begun", 4, step=10), generation=5)
    assert world.save_request == SaveRequest(1, (DISK,))
    world.saw(CheckpointCommitted("k", 1, 0.1, step=8), generation=5)
    assert world.save_request.tiers == (DISK,), "an older one does not make it good"
    world.saw(CheckpointCommitted("k", 1, 0.1, step=11), generation=5)
    assert world.save_request.tiers == ()


def test_a_run_that_leaves_with_a_snapshot_waits_until_a_peer_has_it() -> None:
    async def leave(kept: int, seconds: float) -> str | None:
        world = World(peers=[PEER])
        for _ in range(9):
            world.saw(CheckpointCommitted("k", 10**6, 1e5))
        world.saw(SnapshotKept("stage", 10**6, 1.0, step=99))
        world.saw(GenerationStarted({}, "resume", None, step=5))  # 99 was of another branch
        world.hear(leave=True, seconds=seconds)
        assert world.reply(1) == WorkerReply(is_peer_copy_enough=True)
        waiting = asyncio.create_task(world.notices.wait_for_peer_copy(8))
        await asyncio.sleep(0)
        world.saw(SnapshotKept("stage", 10**6, 1.0, step=kept))
        return await waiting

    assert asyncio.run(leave(8, 600.0)) is None
    assert asyncio.run(leave(7, 0.05)) == "time was up before a peer had it"


def test_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank is on node c"):
        World().hear("c")
    for body in ({"seconds": 0}, {"seconds": -3}, {"seconds": "soon"}, {"seconds": 1e9}):
        with pytest.raises(ValueError, match=r"makes no sense|could not convert"):
            Notice.from_json(body)
    assert Notice.from_json({"seconds": 30, "nodes": ["a"]}) == Notice(30.0, ("a",))


def test_a_run_folder_on_a_nodes_own_disk_is_not_counted_on() -> None:
    """Peers, or a bucket fed by a durable save; where there is neither, the disk all the same."""
    peers = World(peers=[PEER], folder_survives=False)
    assert peers.hear(leave=True) == (1,)
    assert peers.reply(0).is_peer_copy_enough
    bucket = World(peers=[PEER], bucket="s3://bucket/run", folder_survives=False)
    assert set(bucket.hear(leave=True)) == {1, 3}
    assert not bucket.reply(0).is_peer_copy_enough
    stays = World(bucket="s3://bucket/run", folder_survives=False)
    assert stays.hear("a") == (3,)
    assert stays.save_request.tiers == (3, 2)
    late = World(peers=[PEER], folder_survives=False)
    assert late.hear(seconds=1e-6) == ()
    assert late.save_request.tiers == (1,)
    alone = World(folder_survives=False)
    assert alone.hear(leave=True) == ()
    assert "no tier survives" in alone.said[-1]
    assert not alone.reply(0).is_peer_copy_enough
    assert World().hear(leave=True) == (2,)


def test_what_is_heard_between_two_generations_is_kept_for_the_next() -> None:
    held = DeferredNotices()
    assert held.take_all(0.0) == []
    hint = Notice(60.0, source="aws: rebalance recommendation")
    held.add(hint, 100.0)
    held.add(Notice(30.0, ("b",)), 100.0)
    held.add(Notice(120.0, must_leave=True, source="aws: terminate"), 105.0)
    held.add(Notice(100.0, must_leave=True, source="aws: terminate"), 115.0)  # said more exactly
    assert held.take_all(120.0) == [
        Notice(95.0, must_leave=True, source="aws: terminate"),
        Notice(10.0, ("b",)),
        Notice(40.0, source="aws: rebalance recommendation"),
    ]
    assert held.take_all(120.0) == [], "each is delivered once"
    held.add(hint, 0.0)
    held.add(Notice(30.0, must_leave=True), 0.0)
    assert held.take_all(200.0) == [Notice(1.0, must_leave=True)], (
        "a hint has its time; who leaves has to"
    )


PRICES = ResponsePrices(save_s=0.1, save_every_s=50.0, recovery_s=5.0)


def watch_of(model: BaseRateModel | LastEventModel, horizon: float = 100.0) -> PredictionWatch:
    verdict = ModelVerdict(0.3, 0.5, 0.5, 0.5)
    fit = FittedModels(
        horizon, (horizon,), 10 * horizon, (model,), None, model.name, {model.name: verdict}, ()
    )
    return PredictionWatch(fit, "a")


def test_after_a_loss_this_nodes_part_is_saved_again_and_again_until_the_horizon_ends() -> None:
    watch = watch_of(LastEventModel(100.0, -log(0.4) / 100, 1e-6))
    watch.observe_nodes({"a", "b", "c"}, 0.0)
    assert watch.check(10.0, PRICES) is None
    watch.observe_nodes({"a", "b"}, 20.0)
    first = watch.check(20.0, PRICES)
    assert first is not None
    assert (first.is_first, first.left_s) == (True, 100.0)
    assert watch.check(20.5, PRICES) is None
    later = watch.check(30.0, PRICES)
    assert later is not None
    assert (later.is_first, later.left_s) == (False, 90.0)
    assert watch.check(121.0, PRICES) is None
    # Alarms about a and b ended; neither was lost.
    assert (watch.policy.record.alarms, watch.policy.record.came_true) == (2, 0)


def test_alarms_about_other_nodes_count_and_lead_to_nothing_here() -> None:
    watch = watch_of(BaseRateModel(-log(0.4) / 100))
    watch.observe_nodes({"b"}, 0.0)  # the node of this agent takes no part yet
    assert watch.check(1.0, PRICES) is None
    watch.observe_nodes(set(), 50.0)
    assert (watch.policy.record.alarms, watch.policy.record.came_true) == (1, 1)


def test_false_alarms_switch_it_off() -> None:
    watch = watch_of(BaseRateModel(-log(0.4) / 100))
    dear = ResponsePrices(save_s=1.0, save_every_s=50.0, recovery_s=5.0)
    watch.observe_nodes({"a"}, 0.0)
    saves = [watch.check(now, dear) is not None for now in range(0, 3000, 5)]
    assert any(saves[:20])
    assert not any(saves[-300:])


def test_a_file_that_is_no_fit_is_refused(tmp_path: Path) -> None:
    def load(path: str) -> PredictionWatch | None:
        return load_prediction_watch(ClusterConfig(prediction=path), "a")

    assert load("") is None
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="no fit"):
        load(str(tmp_path / "bad.json"))


SMI = """\
#!/bin/sh
case "$*" in
*clocks_event_reasons*) echo 'Field "clocks_event_reasons" is not a valid field' >&2; exit 2;;
*clocks_throttle_reasons*) cat {0}/slow;;
*) cat {0}/devices;;
esac
"""
DEVICES = """\
index, name, ecc.errors.uncorrected.volatile.total
0, NVIDIA H100 80GB HBM3, {}
1, NVIDIA H100 80GB HBM3, [N/A]
"""
SLOW = """\
{}, Not Active
Not Active, [N/A]
"""


def test_signals_of_this_node_raise_alarms_and_their_record_scales_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool is an older one, which refuses a query with a name that it does not know."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI.format(tmp_path))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def read(errors: int, heat: str) -> list[str]:
        (tmp_path / "devices").write_text(DEVICES.format(errors))
        (tmp_path / "slow").write_text(SLOW.format(heat))
        return watch.read_signals()

    cluster = ClusterConfig(signals=("memory_errors", "temperature"))
    watch = load_prediction_watch(cluster, "a")
    assert watch is not None
    watch.observe_nodes({"a", "b"}, 0.0)
    assert read(7, "Not Active") == []
    assert watch.check(1.0, PRICES) is None, "these errors were there before"
    assert read(8, "Not Active") == []
    alarm = watch.check(2.0, PRICES)
    assert alarm is not None
    assert alarm.reason.startswith("its memory has new uncorrected errors; lost within 600 s")
    assert read(8, "Not Active") == []
    assert watch.check(700.0, PRICES) is None, "the horizon is over, and no error is new"
    read(8, "Active")
    hot = watch.check(701.0, PRICES)
    assert hot is not None
    assert "hot" in hot.reason
    assert "(0 of 1 alarms came true)" in hot.reason

    read(9, "Active")
    worse = watch.check(702.0, PRICES)
    assert worse is not None
    assert worse.is_first, "an open alarm of a smaller chance does not hide a new one"
    assert worse.reason.startswith("its memory has new uncorrected errors and a device")

    tool.unlink()
    watch = load_prediction_watch(ClusterConfig(signals=("power",)), "a")
    assert watch is not None
    assert watch.read_signals() == ["power"]
    assert watch.read_signals() == [], "it is said once"
