"""What is heard from metadata services that are really spoken to, and told once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.cluster import ClusterConfig
from holdfast.elastic.clouds import Source, SourceError, Warned, source_of
from holdfast.elastic.notice_watch import NoticeWatch
from holdfast.errors import ConfigError
from tests.elastic.metadata import Metadata, metadata_service

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC).timestamp()


@pytest.fixture
def service() -> Iterator[Metadata]:
    with metadata_service() as world:
        yield world


def _source(world: Metadata, cloud: str) -> Source:
    found = source_of(
        ClusterConfig.model_validate({"notices": cloud, "notices_at": world.address}), lambda: NOW
    )
    assert found is not None
    return found


def test_aws_says_nothing_then_a_hint_then_a_time(service: Metadata) -> None:
    source = _source(service, "aws")
    assert source.ask() is None
    service.rebalance = {"noticeTime": "2026-03-01T11:59:59Z"}
    hint = source.ask()
    assert hint is not None
    assert (hint.seconds, hint.leave) == (120.0, False)
    service.action = {"action": "terminate", "time": "2026-03-01T12:01:50Z"}
    assert source.ask() == Warned(110.0, True, "aws: terminate", "terminate 2026-03-01T12:01:50Z")
    service.action = {"action": "hibernate", "time": "2026-03-01T12:02:00Z"}
    now = source.ask()
    assert now is not None
    assert now.seconds == 1.0, "a hibernation begins at once"


def test_aws_asks_for_a_new_token_when_the_old_one_has_expired(service: Metadata) -> None:
    source = _source(service, "aws")
    assert source.ask() is None
    assert source.ask() is None
    assert service.asked["/latest/api/token"] == 1
    service.token, service.action = "two", {"action": "stop", "time": "2026-03-01T12:02:00Z"}
    found = source.ask()
    assert found is not None
    assert (found.seconds, found.source) == (120.0, "aws: stop")
    assert service.asked["/latest/api/token"] == 2


def test_google_ends_a_machine_and_maintains_it(service: Metadata) -> None:
    source = _source(service, "google")
    assert source.ask() is None
    service.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
    assert source.ask() is None, "a live migration ends nothing"
    service.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    found = source.ask()
    assert found is not None
    assert not found.leave
    service.preempted = "TRUE"
    assert source.ask() == Warned(30.0, True, "google: preempted", "preempted")


def _event(kind: str, number: str = "1", **changed: Any) -> dict[str, Any]:
    before = datetime.fromtimestamp(NOW + 45, UTC)
    return {
        "EventId": number, "EventType": kind, "ResourceType": "VirtualMachine",
        "Resources": ["vm-1"], "EventStatus": "Scheduled",
        "NotBefore": format_datetime(before, usegmt=True),
    } | changed  # fmt: skip


def test_azure_counts_the_events_of_this_machine(service: Metadata) -> None:
    source = _source(service, "azure")
    assert source.ask() is None
    service.events = [_event("Preempt", Resources=["vm-2"])]
    assert source.ask() is None
    service.events += [_event("Freeze", "2"), _event("Completed", "3")]
    found = source.ask()
    assert found is not None
    assert (found.leave, found.source) == (False, "azure: Freeze")
    service.events.append(_event("Preempt", "4"))
    assert source.ask() == Warned(45.0, True, "azure: Preempt", "Preempt 4")
    service.events = [_event("Preempt", "5", NotBefore="")]
    found = source.ask()
    assert found is not None
    assert found.seconds == 30.0


def test_a_file_that_somebody_writes(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    source = source_of(ClusterConfig(notices="file", notices_at=str(path), grace_seconds=12))
    assert source is not None
    assert source.ask() is None
    path.write_text("")
    assert source.ask() == Warned(12.0, True, f"file {path}", "file")
    path.write_text("90\n")
    found = source.ask()
    assert found is not None
    assert found.seconds == 90.0
    for wrong in ("soon", "-1", "nan"):
        path.write_text(wrong)
        with pytest.raises(SourceError):
            source.ask()


@pytest.mark.parametrize("cloud", ["aws", "google", "azure"])
def test_an_answer_that_makes_no_sense_is_none(service: Metadata, cloud: str) -> None:
    source = _source(service, cloud)
    service.broken = True
    with pytest.raises(SourceError, match="503"):
        source.ask()
    service.broken = False
    assert source.ask() is None
    service.action = {"action": "terminate", "time": "tomorrow"}
    service.events = [_event("Preempt", NotBefore="tomorrow")]
    if cloud != "google":
        with pytest.raises(SourceError, match="not a time"):
            source.ask()


def test_what_cannot_be_asked_is_refused() -> None:
    assert source_of(ClusterConfig()) is None
    for wrong in ("ftp://somewhere", "http://", "http://host:port"):
        with pytest.raises(ConfigError, match="metadata service"):
            source_of(ClusterConfig(notices="aws", notices_at=wrong))
    with pytest.raises(ConfigError, match="no file"):
        source_of(ClusterConfig(notices="file"))


def test_each_notice_is_told_once_and_a_broken_service_stops_nothing(service: Metadata) -> None:
    heard: list[Warned] = []
    said: list[str] = []

    async def until(done: Any) -> None:
        async with asyncio.timeout(60):
            while not done():
                await asyncio.sleep(0.01)

    def questions() -> int:
        return service.asked.get("/latest/meta-data/spot/instance-action", 0)

    async def body() -> None:
        service.broken = True
        watch = NoticeWatch(_source(service, "aws"), 0.01, heard.append, said.append)
        await until(lambda: said)
        service.broken = False
        await until(lambda: len(said) == 2)
        service.rebalance = {"noticeTime": "2026-03-01T11:59:59Z"}
        await until(lambda: heard)
        service.action = {"action": "terminate", "time": "2026-03-01T12:01:50Z"}
        await until(lambda: len(heard) == 2)
        seen = questions()
        await until(lambda: questions() > seen + 3)
        watch.close()

    asyncio.run(body())
    assert [warned.leave for warned in heard] == [False, True]
    assert "503" in said[0]
    assert said[1] == "notices can be had again"
