"""Real partitions: each node in a network namespace of its own, one of them cut off and healed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.events import GenerationStarted
from holdfast.report.history import history
from holdfast_lab.chaos.network import Network, why_unavailable
from tests.support.nodes import Nodes, in_bucket, nodes_of
from tests.support.separate_nodes import separate_nodes

WHY_NOT = why_unavailable()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.usefixtures("s3_credentials"),
]

STEPS = 200  # of which a node misses some 30 while it is cut off; the rest waits for it
SETTINGS = (
    f"train.steps={STEPS}",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.every_steps=50",
    "cluster.min_nodes=2",
)
ALL = {"a", "b", "c"}


@contextmanager
def _three(run_file: Path, folder: Path) -> Iterator[tuple[Network, Nodes]]:
    """At step 20. A node that is cut off cannot reach a bucket either."""
    settings = (*SETTINGS, "layout.workers=3")
    if in_bucket():
        here = folder / "here"
        shutil.copytree(run_file.parent, here)
        with separate_nodes(here / run_file.name, [*"abc"], *settings) as separate:
            for name in "abc":
                separate.start(name, settings=separate.network.settings(name))
            separate.wait_step(20, nodes=ALL)
            yield separate.network, separate
        return
    with Network() as network, nodes_of(run_file, folder / "run", *settings) as nodes:
        network.up("abc")
        for name in "abc":
            nodes.start(name, settings=network.settings(name), before=network.command(name))
        nodes.wait_step(20, nodes=ALL)
        yield network, nodes


@pytest.mark.slow
def test_a_node_that_is_cut_off_is_done_without_and_taken_in_again(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    """Cut off a follower, then the leader; the run equals an undisturbed one bit by bit."""
    with _three(run_file, tmp_path) as (network, nodes):
        first = nodes.leader
        network.set_delay(max(ALL - {first}), 10)  # no step is quicker than that, on any machine
        _cut_and_heal(network, nodes, min(ALL - {first}))
        assert nodes.leader == first
        _cut_and_heal(network, nodes, first)
        assert nodes.leader != first
        network.set_delay(max(ALL - {first}), 0)
        assert set(nodes.end().values()) == {0}, nodes.story()
        nodes.assert_same_run(undisturbed)
        _told(nodes, first)


@pytest.mark.slow
def test_two_that_do_not_reach_each_other_are_not_in_one_generation(
    run_file: Path, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    """The leader hears both, so neither is lost; one of them is left out."""
    with _three(run_file, tmp_path) as (network, nodes):
        first = nodes.leader
        one, other = sorted(ALL - {first})
        network.set_delay(first, 20)  # so slow that the other is tried again before the last step
        network.disconnect(one, other)
        nodes.wait_step(25, nodes={first, one})
        assert nodes.leader == first
        without = nodes.newest
        network.reconnect(one, other)
        nodes.wait_step(0, without, ALL)
        network.set_delay(first, 0)  # it has shown what it is to show
        assert set(nodes.end().values()) == {0}, nodes.story()
        losses = nodes.losses()
        assert losses == {step: undisturbed[step] for step in losses}
        assert len(losses) == STEPS, nodes.story()
        reasons = [
            record.event.reason
            for record in nodes.records()
            if isinstance(record.event, GenerationStarted)
        ]
        assert reasons[1:] == ["link_cut", "node_joined"], reasons


def _told(nodes: Nodes, first: str) -> None:
    """The report shows the node that was lost and came back, and takes no takeover for a
    restart."""
    story = history.read_history(nodes.store)
    assert [session.ended for session in story.sessions] == ["finished"]
    assert sum(story.time.values()) == pytest.approx(story.wall)
    assert story.time["recovery"] > 0
    assert story.time["stopped"] == story.time["rework"] == 0
    assert {i.gone for i in story.incidents if i.gone} >= {(first,), (min(ALL - {first}),)}
    came = {name for incident in story.incidents for name in incident.came}
    assert came >= {first, min(ALL - {first})}
    for incident in story.incidents:
        if incident.recovered is not None and incident.stood_still_s is not None:
            parts = sum(incident.phases.values())
            assert parts == pytest.approx(incident.stood_still_s)


def _cut_and_heal(network: Network, nodes: Nodes, lost: str) -> None:
    before = nodes.newest
    network.cut(lost)
    nodes.wait_step(0, before, ALL - {lost})
    parted = nodes.newest
    network.heal(lost)
    nodes.wait_step(0, parted, ALL)
