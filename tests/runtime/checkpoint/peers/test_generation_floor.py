"""The generation above which a new run folder begins, and what it finds of an older one's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.peers.client import PeerClient
from holdfast.checkpoint.peers.config import Peer
from holdfast.checkpoint.peers.generation_floor import generation_floor
from holdfast.checkpoint.peers.source import PeerMemories
from holdfast.checkpoint.restore.restore_point import ChosenRestorePoint, RestorePointFinder
from holdfast.checkpoint.restore.start_records import record_start
from holdfast.core.format.manifest import PartManifest
from holdfast.errors import FencedError, RunFolderError
from holdfast.policy.placement import Machine
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_generation
from tests.support.peer_nodes import SECRET, Node, topology

RUN = ""  # what the processes of these tests compute


@pytest.fixture
def node() -> Iterator[Node]:
    """A peer that holds step 7 of generation 5."""
    made = Node(every_steps=1000)
    made.begin(topology(5))
    made.put(7)
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def above(
    store: FolderStore, *peers: Peer, fresh: bool = False, secret: Secret = SECRET, run: str = RUN
) -> tuple[int, list[str]]:
    said: list[str] = []
    return generation_floor(store, peers, secret, run, fresh, said.append), said


def peer(node: Node) -> Peer:
    return Peer(Machine("stage"), node.address)


def chosen(
    store: FolderStore, node: Node, generation: int
) -> tuple[ChosenRestorePoint | None, list[str]]:
    """What a generation that has just been opened begins from, and what it passes over."""
    create_generation(store, generation, {})
    rejected: list[str] = []
    memories = PeerMemories([peer(node)], SECRET, lambda: generation)
    chooser = RestorePointFinder(
        store, [memories], generation, "c", "d", lambda key, reason: rejected.append(reason)
    )
    return chooser.find_newest(()), rejected


def test_a_new_folder_begins_above_what_its_peers_know(store: FolderStore, node: Node) -> None:
    """Asking fences no node; the generation that is opened then does."""
    newest, said = above(store, peer(node))
    assert newest == 5
    assert said == [
        "stage knows this run up to generation 5: the run folder is new, and goes on "
        "from what there is"
    ]
    zombie = PeerClient(node.address, SECRET, 5)
    assert zombie.inventory().snapshots
    choice, _ = chosen(store, node, newest + 1)
    assert choice is not None
    assert (choice.commit.step, choice.commit.generation, choice.is_durable) == (7, 5, False)
    with pytest.raises(FencedError, match="generation 5 is over: 6 rules"):
        zombie.inventory()
    # A folder that knows its generations asks no peer.
    assert above(store, peer(node)) == (0, [])


def test_a_second_new_folder_fences_the_first(tmp_path: Path, node: Node) -> None:
    stores = [FolderStore(tmp_path / name) for name in ("one", "two")]
    for number, store in enumerate(stores, 6):
        newest, _ = above(store, peer(node))
        assert newest + 1 == number
        choice, _ = chosen(store, node, number)
        assert choice is not None
        assert choice.commit.step == 7
    with pytest.raises(FencedError):
        PeerClient(node.address, SECRET, 6).inventory()


def test_a_beginning_that_was_asked_for_gives_up_what_peers_hold(
    store: FolderStore, node: Node
) -> None:
    """Also when the process ended between the note and its generation, and starts again."""
    assert above(store, peer(node), fresh=True) == (6, [])
    assert above(store, peer(node))[0] == 6
    choice, rejected = chosen(store, node, 7)
    assert choice is None
    assert rejected == ["a later generation began again from an older step"]
    record_start(store, 7, 0)
    assert chosen(store, node, 8)[0] is None


def test_who_lacks_the_secret_is_told(store: FolderStore, node: Node) -> None:
    stranger = Secret(b"x" * 32)
    with pytest.raises(RunFolderError, match=r"does not accept the secret.*HOLDFAST_SECRET_FILE"):
        above(store, peer(node), secret=stranger)
    assert above(store, peer(node), secret=stranger, fresh=True) == (0, [])


def test_a_peer_that_is_away_or_keeps_another_run_says_nothing(
    store: FolderStore, node: Node
) -> None:
    assert above(store, peer(node), run="another") == (0, [])
    node.kill()
    newest, said = above(store, peer(node))
    assert newest == 0
    assert len(said) == 1
    assert "stage cannot say what it holds of this run" in said[0]


@pytest.mark.parametrize("order", [1, -1])
def test_the_nearest_holder_comes_first(store: FolderStore, node: Node, order: int) -> None:
    other = Node(every_steps=1000)
    other.begin(topology(5))
    other.put(7)
    try:
        create_generation(store, 6, {})
        peers = [
            Peer(Machine("far", zone="rome"), node.address),
            Peer(Machine("near", zone="paris"), other.address),
        ][::order]
        own = Machine("own", zone="paris")
        memories = PeerMemories(peers, SECRET, lambda: 6, own=own)
        keys = [
            PartManifest.from_bytes(e.sealed_manifest, "part").blob.key
            for e in memories.inventory()
        ]
        assert [holder.name for holder in memories.locate_blobs(keys)] == ["peer near", "peer far"]
        assert len(set(keys)) == 1
    finally:
        other.close()
