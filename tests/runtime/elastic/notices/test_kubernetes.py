"""What is heard from an API server: over TLS, by lists and watches, and what it may do to us."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.notices.clouds import make_notice_source
from holdfast.elastic.notices.poller import NoticePoller
from holdfast.elastic.notices.source import (
    Disruption,
    NoticeSource,
    NoticeSourceError,
    TerminationWarning,
)
from holdfast.errors import ConfigError
from tests.support.agents import until
from tests.support.kubernetes_api import NODES, PODS, Kube, api_server, authority_and_server
from tests.support.metadata_service import polled

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
POD = {"HOLDFAST_NODE_NAME": "node-1", "HOLDFAST_POD_NAME": "pod-1"}


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[Kube]:
    with api_server(tmp_path / "account") as world:
        world.put(NODES, "node-1", lambda node: node.update(spec={}))
        world.put(NODES, "node-2", lambda node: node.update(spec={}))
        world.put(PODS, "pod-1", lambda pod: pod.update(spec={"nodeName": "node-1"}))
        yield world


def _source(kube: Kube, environment: dict[str, str] = POD, **more: str) -> NoticeSource:
    settings = {
        "notices": "kubernetes",
        "notices_at": kube.address,
        "notices_account": str(kube.account),
    } | more
    found = make_notice_source(ClusterConfig.model_validate(settings), NOW.timestamp, environment)
    assert found is not None
    return found


def _taint(kube: Kube, key: str, node: str = "node-1", **more: Any) -> None:
    taint = {"key": key, "effect": "NoSchedule"} | more
    kube.put(NODES, node, lambda found: found["spec"].update(taints=[taint]))


def _until(done: Callable[[], object]) -> None:
    over = threading.Event()
    for _ in range(12000):
        if done():
            return
        over.wait(0.005)
    pytest.fail("not within a minute")


def _answer(part: NoticeSource, then: Callable[[], None]) -> TerminationWarning | None:
    """What `part` says to a question that is open while `then` happens."""
    said: list[Any] = []

    def ask() -> None:
        try:
            said.append(part.poll())
        except NoticeSourceError as error:
            said.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    then()
    asking.join(120)
    assert said, "the question is still open"
    if isinstance(said[0], NoticeSourceError):
        raise said[0]
    found: TerminationWarning | None = said[0]
    return found


def test_a_taint_is_heard_while_the_question_is_open(kube: Kube) -> None:
    node, pod = _source(kube).leaf_sources
    assert node.poll() is None
    assert pod.poll() is None

    def happens() -> None:
        _until(lambda: kube.watching == 1)
        kube.bookmark(NODES)
        _taint(kube, "ToBeDeletedByClusterAutoscaler", node="node-2")  # another node's
        _taint(kube, "example.com/dedicated")  # of no meaning
        _taint(kube, "aws-node-termination-handler/spot-itn", value="event-7")

    found = _answer(node, happens)
    assert found is not None
    assert (found.seconds_left, found.must_leave) == (120.0, True)
    assert found.source == "kubernetes: taint aws-node-termination-handler/spot-itn"
    assert kube.lists() == 2
    assert all("fieldSelector=metadata.name%3D" in path for path in kube.asked)


def test_a_pod_that_is_deleted_has_its_grace(kube: Kube) -> None:
    pod = _source(kube).leaf_sources[1]
    assert pod.poll() is None
    at = (NOW + timedelta(seconds=45)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def delete() -> None:
        kube.put(
            PODS,
            "pod-1",
            lambda found: found["metadata"].update(
                deletionTimestamp=at, deletionGracePeriodSeconds=60
            ),
        )

    assert _answer(pod, delete) == TerminationWarning(
        45.0, True, "kubernetes: the pod is deleted", f"Pod-pod-1 {at}"
    )
    gone = _answer(pod, lambda: kube.delete(PODS, "pod-1"))
    assert gone is not None
    assert (gone.seconds_left, gone.source) == (1.0, "kubernetes: the pod was deleted")


def test_where_the_clocks_differ_no_more_than_the_grace_is_believed(kube: Kube) -> None:
    at = (NOW + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    kube.put(
        PODS,
        "pod-1",
        lambda found: found["metadata"].update(deletionTimestamp=at, deletionGracePeriodSeconds=30),
    )
    assert polled(_source(kube)).seconds_left == 30.0


@pytest.mark.parametrize(
    ("key", "seconds", "meaning"),
    [
        ("cloud.google.com/impending-node-termination", 15.0, Disruption.GONE),
        ("remediator.kubernetes.azure.com/unschedulable", 30.0, Disruption.GONE),
        ("aws-node-termination-handler/rebalance-recommendation", 120.0, Disruption.RISK),
        ("aws-node-termination-handler/scheduled-maintenance", 120.0, Disruption.RESTART),
        ("node.kubernetes.io/out-of-service", 1.0, Disruption.GONE),
        ("example.com/drain", 90.0, Disruption.GONE),
        ("example.org/any", 30.0, Disruption.GONE),
    ],
)
def test_what_taints_mean(kube: Kube, key: str, seconds: float, meaning: Disruption) -> None:
    node = _source(kube, notices_taints="example.com/drain=90, example.org/*").leaf_sources[0]
    _taint(kube, key)
    found = polled(node)
    assert (found.seconds_left, found.disruption, found.must_leave) == (
        seconds,
        meaning,
        meaning is Disruption.GONE,
    )


def test_an_azure_nodes_condition(kube: Kube) -> None:
    def condition(status: str, message: str) -> None:
        found = {
            "type": "VMEventScheduled",
            "status": status,
            "message": message,
            "reason": "VMEventScheduled",
            "lastTransitionTime": "t",
        }
        kube.put(NODES, "node-1", lambda node: node.update(status={"conditions": [found]}))

    for status, message, meaning in (
        ("False", "no event", None),
        ("True", "Freeze Scheduled", Disruption.PAUSE),
        ("True", "Preempt Scheduled", Disruption.GONE),
    ):
        condition(status, message)
        found = _source(kube).leaf_sources[0].poll()
        assert (found.disruption if found else None) == meaning


def test_the_node_is_found_by_the_pod_where_nobody_names_it(kube: Kube) -> None:
    _taint(kube, "karpenter.sh/disrupted")
    node = _source(kube, {"HOLDFAST_POD_NAME": "pod-1"}).leaf_sources[0]
    assert polled(node).must_leave


@pytest.mark.parametrize("inside", [False, True], ids=["410", "410 in the watch"])
def test_a_version_that_is_forgotten_is_listed_anew(kube: Kube, inside: bool) -> None:
    node = _source(kube).leaf_sources[0]
    assert node.poll() is None
    kube.forgotten, kube.late_410 = kube.version, inside
    assert node.poll() is None
    assert (kube.lists(), kube.watches()) == (1, 1)
    _taint(kube, "ToBeDeletedByClusterAutoscaler", value="1")
    polled(node)
    assert (kube.lists(), kube.watches()) == (2, 1)


def test_a_watch_that_breaks_off_is_taken_up_where_it_was(kube: Kube) -> None:
    node = _source(kube).leaf_sources[0]
    assert node.poll() is None

    def cut() -> None:
        _until(lambda: kube.watching == 1)
        kube.cut = kube.begun

    assert _answer(node, cut) is None, "half a line is none"
    _taint(kube, "node.kubernetes.io/out-of-service")  # while nobody watches
    polled(node)
    assert (kube.lists(), kube.watches()) == (1, 2)


def test_a_token_that_is_renewed_is_read_anew(kube: Kube) -> None:
    node = _source(kube).leaf_sources[0]
    assert node.poll() is None
    kube.token = "second"
    with pytest.raises(NoticeSourceError, match="401: the token is not accepted"):
        node.poll()
    (kube.account / "token").write_text("second\n")
    assert node.poll() is None


def test_a_server_that_another_authority_signed_hears_no_token(kube: Kube, tmp_path: Path) -> None:
    other = tmp_path / "other"
    authority_and_server(other)
    (other / "token").write_text("first")
    node = _source(kube, notices_account=str(other)).leaf_sources[0]
    with pytest.raises(NoticeSourceError, match="certificate"):
        node.poll()
    assert not kube.asked


@pytest.mark.parametrize("illness", ["refuses", "page", "garbage"])
def test_a_server_that_is_ill_is_asked_again_and_told_of_once(kube: Kube, illness: str) -> None:
    heard: list[TerminationWarning] = []
    said: list[str] = []

    async def body() -> None:
        kube.illness = illness
        node = _source(kube).leaf_sources[0]
        watch = NoticePoller(node, 0.01, heard.append, said.append)
        await until(lambda: said, "an error")
        asked = len(kube.asked)
        await until(lambda: len(kube.asked) > asked + 3, "more requests")
        kube.illness = ""
        _taint(kube, "ToBeDeletedByClusterAutoscaler", value="1")
        await until(lambda: heard and kube.watching, "a notice")
        _taint(kube, "ToBeDeletedByClusterAutoscaler", value="2")
        await until(lambda: len(heard) == 2 and len(said) == 2, "the second notice")
        watch.close()

    asyncio.run(body())
    assert [warned.must_leave for warned in heard] == [True, True]
    assert said[0].startswith("notices cannot be had: ")
    assert said[1] == "notices can be had again"


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    def refused(match: str, environment: dict[str, str], **more: str) -> None:
        cluster = ClusterConfig.model_validate({"notices": "kubernetes"} | more)
        with pytest.raises(ConfigError, match=match):
            make_notice_source(cluster, environment=environment)

    refused("runs in no pod", {})
    refused("neither the pod nor the node", {}, notices_at="https://10.0.0.1")
    refused("'=5' is no taint", POD, notices_at="https://10.0.0.1", notices_taints="=5")
    refused("'a=soon' is no taint", POD, notices_at="https://10.0.0.1", notices_taints="b,a=soon")
    inside = {"KUBERNETES_SERVICE_HOST": "fd00::1", "HOSTNAME": "pod-1"}
    found = make_notice_source(ClusterConfig(notices="kubernetes"), environment=inside)
    assert found is not None
    assert len(found.leaf_sources) == 2
