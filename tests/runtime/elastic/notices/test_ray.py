"""The child that asks Ray's head, with a stand-in for ray that reads its answers from a file."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.notices.clouds import make_notice_source
from holdfast.elastic.notices.ray import RaySource
from holdfast.elastic.notices.source import NoticeSourceError
from holdfast.errors import ConfigError
from tests.support.metadata_service import polled
from tests.support.processes import runs

STATE = """
import json, os, time
class GlobalState:
    def _initialize_global_state(self, options):
        assert options == ("here:6379", None, True, False), options
    def _now(self):
        found = json.load(open(os.environ["RAY_STANDS"]))
        if found == "hang":
            time.sleep(1000)
        if found == "die":
            os._exit(1)
        if found == "noise":
            print("<html>", flush=True)
        return found
    def get_draining_nodes(self):
        return self._now()
    def node_table(self):
        return [{"NodeID": "there", "Alive": True, "NodeManagerAddress": "203.0.113.9"},
                {"NodeID": "was", "Alive": False, "NodeManagerAddress": "127.0.0.1"},
                {"NodeID": "own", "Alive": True, "NodeManagerAddress": "127.0.0.1"}]
"""
RAYLET = """
class GcsClientOptions:
    @staticmethod
    def create(address, cluster, allow_cluster_id_nil, fetch_cluster_id_if_nil):
        return address, cluster, allow_cluster_id_nil, fetch_cluster_id_if_nil
"""


class Head:
    def __init__(self, folder: Path) -> None:
        package = folder / "ray"
        (package / "_private").mkdir(parents=True)
        for name, text in (
            ("__init__.py", ""),
            ("_raylet.py", RAYLET),
            ("_private/__init__.py", ""),
            ("_private/state.py", STATE),
        ):
            (package / name).write_text(text)
        self._answer = folder / "answer.json"
        self.says({})
        self.environment = os.environ | {"PYTHONPATH": str(folder), "RAY_STANDS": str(self._answer)}

    def says(self, what: object) -> None:
        fresh = self._answer.with_suffix(".new")
        fresh.write_text(json.dumps(what))
        fresh.rename(self._answer)


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(tmp_path)


@pytest.fixture
def ray(head: Head) -> Iterator[RaySource]:
    source = RaySource("here:6379", "", 0.01, head.environment, lambda: 1000.0)
    yield source
    source.close()


def test_a_drain_is_heard_with_its_deadline(head: Head, ray: RaySource) -> None:
    head.says({"there": 9})
    assert ray.poll() is None
    head.says({"there": 9, "own": 1_045_000})
    heard = polled(ray)
    assert (heard.seconds_left, heard.must_leave, heard.source) == (
        45.0,
        True,
        "ray: the node is drained",
    )
    head.says({"own": 0})
    assert polled(ray).seconds_left == 30.0, "a drain without a deadline"


def test_a_node_that_is_named_needs_no_address(head: Head) -> None:
    ray = RaySource("here:6379", "there", 0.01, head.environment, lambda: 1000.0)
    head.says({"there": 1_009_000})
    heard = ray.poll()
    ray.close()
    assert heard is not None
    assert heard.seconds_left == 9.0
    with pytest.raises(NoticeSourceError):
        ray.poll()


def test_a_head_that_is_away_costs_no_more_than_the_child(
    head: Head, ray: RaySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ray.poll() is None
    head.says("die")
    with pytest.raises(NoticeSourceError, match="has ended"):
        ray.poll()
    monkeypatch.setattr("holdfast.elastic.notices.ray.RAY_START_TIMEOUT_S", 0.2)
    head.says("hang")
    with pytest.raises(NoticeSourceError, match="does not answer"):
        ray.poll()
    monkeypatch.setattr("holdfast.elastic.notices.ray.RAY_START_TIMEOUT_S", 60.0)
    for wrong, match in (
        ("noise", "not JSON"),
        ([], "AttributeError"),
        ({"own": "soon"}, "'soon' where a time"),
    ):
        head.says(wrong)
        with pytest.raises(NoticeSourceError, match=match):
            ray.poll()
    head.says({"own": 1_045_000})
    assert ray.poll() is not None


def test_the_child_ends_with_its_agent(head: Head) -> None:
    starts = (
        "import os, sys\n"
        "from holdfast.elastic.notices.ray import RaySource\n"
        "source = RaySource('here:6379', '', 0.01, os.environ, lambda: 1000.0)\n"
        "source.poll()\n"
        "print(source._child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", starts],
        env=head.environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    child = int(agent.stdout.readline())
    agent.send_signal(signal.SIGKILL)
    agent.communicate()
    until = time.monotonic() + 60
    while runs(child):
        assert time.monotonic() < until, "it is still there"
        os.sched_yield()


def test_what_cannot_be_asked_is_refused() -> None:
    for environment in ({}, {"RAY_ADDRESS": "auto"}):
        with pytest.raises(ConfigError, match="the address of Ray's head is not known"):
            make_notice_source(ClusterConfig(notices="ray"), environment=environment)
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(ConfigError, match="ray is not installed"):
            make_notice_source(
                ClusterConfig(notices="ray", notices_at="10.0.0.1:6379"), environment={}
            )


def test_the_child_uses_the_token_of_this_machine(head: Head, tmp_path: Path) -> None:
    setup = tmp_path / "ray" / "_private" / "authentication"
    setup.mkdir()
    (setup / "authentication_token_setup.py").write_text(
        "import os\n"
        "def maybe_enable_token_auth_if_token_available(warn_if_disabled):\n"
        "    open(os.environ['RAY_STANDS'] + '.token', 'w').close()\n"
    )
    source = RaySource("here:6379", "", 0.01, head.environment, lambda: 1000.0)
    assert source.poll() is None
    source.close()
    assert (tmp_path / "answer.json.token").exists(), "before the head was asked"
