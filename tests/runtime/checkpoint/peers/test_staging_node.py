"""Tier 1 with the real mover and the real `holdfast stage`: a node is lost, its state is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.peers.config import Peer, PeerSettings
from holdfast.checkpoint.peers.source import PeerBlobs
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.sources import FallbackReader
from holdfast.checkpoint.restore.verify import verify
from holdfast.policy.placement import Machine
from holdfast.policy.saving.destinations import SaveDestinations
from holdfast.wire.secret import Secret
from holdfast.wire.term import create_generation
from tests.support.mover_process import Start, Workers, assert_holds, topology
from tests.support.ranks import wait_until

SECRET = Secret.from_hex("5e" * 32)  # of the fixture `stage`


def told(stage: str, **settings: Any) -> dict[str, Any]:
    peers = (Peer(Machine("stage"), stage),)
    return PeerSettings(Machine("node"), peers, stable="stage", **settings).to_json()


def capture(workers: Workers, step: int) -> None:
    """Every rank's snapshot of a step, to stay in memory."""
    workers.compute(step)
    for capturer in workers.capturers:
        capturer.capture(step, wait=60)
    for capturer in workers.capturers:
        assert capturer.announce(step, {"position": step}, SaveDestinations(False)) is None


def kept(client: MoverClient) -> tuple[int, int]:
    generation, step = client.status()["peers"]["sends"]["stage"]["kept"]
    return generation, step


def test_a_lost_node_goes_on_from_the_staging_machine(start: Start, stage: str) -> None:
    """Its mover is killed, and its memory with it. The new one begins from what the stage holds,
    four ranks' shards onto two. The run store has nothing newer than step 1."""
    first = start(secret=SECRET, peers=told(stage))
    workers = first.workers(4, slots=3)
    workers.commit(1)
    for step in (2, 3):
        capture(workers, step)
        wait_until(lambda s=step: kept(workers.client) == (1, s))
    first.kill()

    second = start(secret=SECRET, peers=told(stage))
    create_generation(second.store, 2, {})
    asking = second.client(2)
    newest = asking.find_restore_point()
    assert (newest.step, newest.generation, newest.durable) == (3, 1, False)
    assert len(list_commits(second.store)) == 1
    asking.expect(topology(2, generation=2), workers.table, newest.step)
    assert newest.key is not None
    found = asking.holdings(newest.key)
    assert not found.slots
    sources = [PeerBlobs(p, SECRET, 2) for p in found.peers]
    assert_holds(Checkpoint(FallbackReader(sources), found.commit), 3, workers.table)

    # What memory alone held becomes durable behind that, from where it lies.
    assert second.client(1).wait_until_committed(3, 60) is None
    durable = Checkpoint.open(second.store, newest.key)
    assert_holds(durable, 3, workers.table)
    assert verify(second.store, newest.key) == []

    # It continues from there, and its own snapshots replace the old ones at the stage.
    after = Workers(asking, topology(2, generation=2), slots=3)
    capture(after, 4)
    wait_until(lambda: kept(asking) == (2, 4))


def test_another_run_finds_no_snapshots_of_this_one(
    start: Start, stage: str, tmp_path: Path
) -> None:
    """The secret and the model are the same, but the computation differs. Neither its restart nor
    its copies meet the first run's, and its generations fence no node there."""
    first = start(secret=SECRET, peers=told(stage))
    workers = first.workers(slots=3)
    capture(workers, 1)
    wait_until(lambda: kept(workers.client) == (1, 1))
    (tmp_path / "other").mkdir()
    other = start(tmp_path / "other", secret=SECRET, peers=told(stage), config_hash="e")
    for generation in range(1, 6):
        create_generation(other.store, generation, {})
    asking = other.client(5)
    assert asking.find_restore_point().key is None
    asking.expect(topology(generation=5), workers.table, 0)
    strange = Workers(asking, topology(generation=5), slots=3)
    capture(strange, 1)
    failed = wait_until(lambda: [e for e in asking.events(0)[0] if e.kind == "peer_failed"])
    assert "the snapshots of another run are kept here" in failed[0].reason
    capture(workers, 2)
    wait_until(lambda: kept(workers.client) == (1, 2))


def test_a_peer_that_is_gone_stops_no_save(start: Start) -> None:
    mover = start(secret=SECRET, peers=told("127.0.0.1:1"))
    workers = mover.workers(2, slots=3)
    for step in (1, 2, 3):
        workers.commit(step)
    failed = wait_until(lambda: [e for e in workers.client.events(0)[0] if e.kind == "peer_failed"])
    assert len(failed) == 1
    assert "cannot be reached" in failed[0].reason
    newest = workers.client.find_restore_point()
    assert newest.step == 3
