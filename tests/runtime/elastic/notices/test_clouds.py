"""What is heard from metadata services that are really spoken to, and told once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.notices.clouds import GoogleSource, make_notice_source
from holdfast.elastic.notices.poller import NoticePoller
from holdfast.elastic.notices.source import (
    CompositeSource,
    Disruption,
    MetadataClient,
    NoticeSource,
    NoticeSourceError,
    TerminationWarning,
)
from holdfast.errors import ConfigError
from holdfast.events import Event, NoticesUnheard
from tests.support.metadata_service import Metadata, metadata_service, polled

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC).timestamp()


@pytest.fixture
def service() -> Iterator[Metadata]:
    with metadata_service() as world:
        yield world


async def _until(done: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.01)


def _source(world: Metadata, cloud: str) -> NoticeSource:
    found = make_notice_source(
        ClusterConfig.model_validate({"notices": cloud, "notices_at": world.address}), lambda: NOW
    )
    assert found is not None
    return found


def test_aws_says_nothing_then_a_hint_then_a_time(service: Metadata) -> None:
    source = _source(service, "aws")
    assert source.poll() is None
    service.rebalance = {"noticeTime": "2026-03-01T11:59:59Z"}
    hint = polled(source)
    assert (hint.seconds_left, hint.must_leave) == (120.0, False)
    service.action = {"action": "terminate", "time": "2026-03-01T12:01:50Z"}
    assert source.poll() == TerminationWarning(
        110.0, True, "aws: terminate", "terminate 2026-03-01T12:01:50Z"
    )
    service.action = {"action": "hibernate", "time": "2026-03-01T12:02:00Z"}
    assert polled(source).seconds_left == 1.0, "a hibernation begins at once"


def test_aws_asks_for_a_new_token_when_the_old_one_has_expired(service: Metadata) -> None:
    source = _source(service, "aws")
    assert source.poll() is None
    assert source.poll() is None
    assert service.asked["/latest/api/token"] == 1
    service.token, service.action = "two", {"action": "stop", "time": "2026-03-01T12:02:00Z"}
    found = polled(source)
    assert (found.seconds_left, found.source) == (120.0, "aws: stop")
    assert service.asked["/latest/api/token"] == 2


def test_google_ends_a_machine_and_maintains_it(service: Metadata) -> None:
    service.etags = False  # so that no question stays open
    source = _source(service, "google")
    assert source.poll() is None
    service.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
    found = polled(source)
    assert (found.must_leave, found.disruption) == (False, Disruption.PAUSE), (
        "a live migration ends nothing"
    )
    service.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    found = polled(source)
    assert (found.must_leave, found.disruption) == (False, Disruption.RESTART)
    service.preempted = "TRUE"
    assert source.poll() == TerminationWarning(30.0, True, "google: preempted", "preempted")


def test_google_answers_when_the_value_changes(service: Metadata) -> None:
    """Two questions stay open, one for each value; nobody asks again before."""
    heard: list[TerminationWarning] = []

    async def body() -> None:
        watch = NoticePoller(_source(service, "google"), 0.01, heard.append, lambda said: None)
        await _until(lambda: service.open == 2)
        service.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
        await _until(lambda: len(heard) == 1)
        service.preempted = "TRUE"
        await _until(lambda: len(heard) == 2)
        watch.close()

    asyncio.run(body())
    assert [warned.must_leave for warned in heard] == [False, True]
    assert service.asked["/computeMetadata/v1/instance/preempted"] <= 9, "in haste it would be 1000"


def test_google_asks_again_when_a_question_has_been_open_long_enough(service: Metadata) -> None:
    part = GoogleSource(MetadataClient(service.address), "preempted", long_poll_s=0)
    assert part.poll() is None
    assert part.poll() is None, "its time was over at once"
    service.preempted = "TRUE"
    assert polled(part).must_leave


def _event(kind: str, number: str = "1", **changed: Any) -> dict[str, Any]:
    before = datetime.fromtimestamp(NOW + 45, UTC)
    return {
        "EventId": number,
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": ["vm-1"],
        "EventStatus": "Scheduled",
        "NotBefore": format_datetime(before, usegmt=True),
    } | changed


def test_azure_counts_the_events_of_this_machine(service: Metadata) -> None:
    source = _source(service, "azure")
    assert source.poll() is None
    service.events = [_event("Preempt", Resources=["vm-2"])]
    assert source.poll() is None
    service.events += [_event("Freeze", "2"), _event("Completed", "3")]
    found = polled(source)
    assert (found.must_leave, found.disruption, found.source) == (
        False,
        Disruption.PAUSE,
        "azure: Freeze",
    )
    service.events.append(_event("Redeploy", "6"))
    found = polled(source)
    assert (found.must_leave, found.disruption) == (False, Disruption.PAUSE), "both in 45 s"
    service.events.append(_event("Preempt", "4"))
    assert source.poll() == TerminationWarning(45.0, True, "azure: Preempt", "Preempt 4")
    service.events = [_event("Preempt", "5", NotBefore="")]
    assert polled(source).seconds_left == 30.0
    service.events = [_event("Preempt", "5", NotBefore="", EventStatus="Started")]
    assert polled(source).seconds_left == 1.0, "it has begun"


def test_azure_is_told_when_the_run_has_left(service: Metadata) -> None:
    """Only of what is this machine's alone, once, and not of a pause."""
    source = _source(service, "azure")
    source.acknowledge()
    service.events = [
        _event("Preempt", "all", Resources=["vm-1", "vm-2"]),
        _event("Freeze", "pause"),
        _event("Terminate", "other", Resources=["vm-2"]),
        _event("Preempt", "mine", Resources=["VM-1"]),  # names are told in either case
        _event("Reboot", "begun", EventStatus="Started"),
    ]
    assert source.poll() is not None
    assert service.started == []
    source.acknowledge()
    source.acknowledge()
    assert service.started == ["mine"]


def test_an_acknowledgement_that_fails_is_said_and_stops_nothing(service: Metadata) -> None:
    said: list[str] = []

    async def body() -> None:
        service.events = [_event("Preempt", "mine")]
        heard: list[TerminationWarning] = []
        watch = NoticePoller(_source(service, "azure"), 60, heard.append, said.append)
        await _until(lambda: heard)
        service.illness = "refuses"
        await watch.acknowledge()
        watch.close()

    asyncio.run(body())
    assert len(said) == 1
    assert "could not be acknowledged" in said[0]
    assert "503" in said[0]


def test_a_file_that_somebody_writes(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    source = make_notice_source(
        ClusterConfig(notices="file", notices_at=str(path), grace_seconds=12)
    )
    assert source is not None
    assert source.poll() is None
    path.write_text("")
    assert source.poll() == TerminationWarning(12.0, True, f"file {path}", "file")
    path.write_text("90\n")
    assert polled(source).seconds_left == 90.0
    for wrong in ("soon", "-1", "nan"):
        path.write_text(wrong)
        with pytest.raises(NoticeSourceError):
            source.poll()


@pytest.mark.parametrize("illness", ["refuses", "page", "half"])
@pytest.mark.parametrize("cloud", ["aws", "google", "azure"])
def test_an_answer_that_makes_no_sense_is_none(service: Metadata, cloud: str, illness: str) -> None:
    service.etags = False
    source = _source(service, cloud)
    service.illness = illness
    service.action = {"action": "terminate", "time": "2026-03-01T12:01:50Z"}
    with pytest.raises(NoticeSourceError):
        source.poll()
    service.illness, service.action = "", None
    assert source.poll() is None


@pytest.mark.parametrize("wrong", ["tomorrow", "9999999-01-01", ["now"]])
def test_a_time_that_is_none(service: Metadata, wrong: Any) -> None:
    service.action = {"action": "terminate", "time": wrong}
    service.events = [_event("Preempt", NotBefore=wrong)]
    for cloud in ("aws", "azure"):
        with pytest.raises(NoticeSourceError, match="not a time"):
            _source(service, cloud).poll()


@pytest.mark.parametrize(
    "events", ["none", [None, 3, {"EventType": []}], [{"EventType": "Preempt", "Resources": 4}]]
)
def test_events_of_a_strange_shape(service: Metadata, events: Any) -> None:
    service.events = events
    source = _source(service, "azure")
    if isinstance(events, list):
        assert source.poll() is None
    else:
        with pytest.raises(NoticeSourceError, match="list of events"):
            source.poll()


def test_a_machine_without_a_name_leaves_for_nobody(service: Metadata) -> None:
    service.name = ""
    service.events = [_event("Preempt")]
    with pytest.raises(NoticeSourceError, match="name"):
        _source(service, "azure").poll()


@pytest.mark.parametrize("illness", ["drips", "hangs"])
def test_an_answer_has_an_end(service: Metadata, illness: str) -> None:
    service.illness = illness
    with pytest.raises(NoticeSourceError, match="timed out"):
        MetadataClient(service.address).request(
            "GET", "/anything", {"Metadata": "true"}, timeout_s=0.3
        )


def test_what_cannot_be_asked_is_refused() -> None:
    assert make_notice_source(ClusterConfig()) is None
    for wrong in ("ftp://somewhere", "http://", "http://host:port"):
        with pytest.raises(ConfigError, match="metadata service"):
            make_notice_source(ClusterConfig(notices="aws", notices_at=wrong))
    with pytest.raises(ConfigError, match="nobody knows whose"):
        make_notice_source(ClusterConfig(notices="auto", notices_at="http://here"))
    with pytest.raises(ConfigError, match="no file"):
        make_notice_source(ClusterConfig(notices="file"))


def test_each_notice_is_told_once_and_a_broken_service_stops_nothing(service: Metadata) -> None:
    heard: list[TerminationWarning] = []
    said: list[str] = []
    written: list[Event] = []

    def questions() -> int:
        return service.asked.get("/latest/meta-data/spot/instance-action", 0)

    async def body() -> None:
        service.illness = "refuses"
        watch = NoticePoller(
            _source(service, "aws"), 0.01, heard.append, said.append, written.append
        )
        await _until(lambda: said)
        service.illness = ""
        await _until(lambda: len(said) == 2)
        service.rebalance = {"noticeTime": "2026-03-01T11:59:59Z"}
        await _until(lambda: heard)
        service.action = {"action": "terminate", "time": "2026-03-01T12:01:50Z"}
        await _until(lambda: len(heard) == 2)
        seen = questions()
        await _until(lambda: questions() > seen + 3)
        watch.close()

    asyncio.run(body())
    assert [warned.must_leave for warned in heard] == [False, True]
    assert "503" in said[0]
    assert said[1] == "notices can be had again"
    [unheard] = written
    assert isinstance(unheard, NoticesUnheard)
    assert "503" in unheard.reason


def test_a_source_with_a_bug_stops_nothing(service: Metadata) -> None:
    class Wrong(NoticeSource):
        def poll(self) -> TerminationWarning | None:
            raise ZeroDivisionError("of ours")

    heard: list[TerminationWarning] = []
    said: list[str] = []

    async def body() -> None:
        service.action = {"action": "terminate", "time": "2026-03-01T12:01:50Z"}
        both = CompositeSource((Wrong(), _source(service, "aws")), "two are asked")
        watch = NoticePoller(both, 0.01, heard.append, said.append)
        await _until(lambda: heard and len(said) == 2)
        watch.close()

    asyncio.run(body())
    assert said == [
        "two are asked",
        "notices cannot be had: ZeroDivisionError: of ours; asking again",
    ]
