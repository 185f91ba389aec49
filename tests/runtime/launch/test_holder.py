"""Which holder of a run folder lives: by its answer, and by what grows in the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.errors import RunFolderError
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.run_folder import refuse_alone, refuse_in_use, run_id, set_aside
from holdfast.wire.journal import JournalWriter, segment_key
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import Host, create_generation, create_term
from tests.runtime.launch.holders import QUIET, growing
from tests.support.journal_builder import step_done

ELSEWHERE = Host("host-b", "boot-b")
REFUSED = "127.0.0.1:1"
LIFE, JOURNAL = "terms/0000000001-alive", segment_key(1, "agent")


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """Of a run of one node on host-a, which did step 7."""
    store = FolderStore(tmp_path / "run")
    store.create("resolved.json", b'{"config": {}, "run_id": "x"}')
    assert create_term(store, 1, REFUSED, "a", True, Host("host-a", "boot-a"))
    create_generation(store, 1, {})
    return store


@pytest.mark.parametrize("grows", [LIFE, JOURNAL])
def test_a_holder_on_another_host_lives_while_term_or_journal_grow(
    store: FolderStore, grows: str
) -> None:
    """Its address leads to this host, where no process listens."""
    writer = JournalWriter(store, "rank0", 1)
    writer.emit(step_done(7, 0.1, {}))
    writer.flush()
    with growing(store, grows):
        for refuse in (refuse_in_use, refuse_alone):
            watch = HolderWatch(store.folder, quiet_s=60, host=ELSEWHERE)
            with pytest.raises(RunFolderError) as caught:
                refuse(store.folder, watch)
            assert caught.value.exit_code == 2
        with pytest.raises(RunFolderError, match="another trainer uses this run folder") as caught:
            set_aside(store.folder, run_id(store.folder), watch)
    for fact in ("on a (host host-a)", "since 2", "last step 7", "stop it"):
        assert fact in str(caught.value)


def test_a_holder_on_another_host_is_dead_once_nothing_grows(store: FolderStore) -> None:
    said: list[str] = []
    watch = HolderWatch(store.folder, said.append, QUIET, ELSEWHERE)
    refuse_in_use(store.folder, watch)
    assert len(said) == 1
    assert "does not answer: waiting up to 0.3 s" in said[0]
    refuse_in_use(store.folder, watch)  # at once: nothing has grown since
    assert len(said) == 1
    store.append(LIFE, b".")
    with pytest.raises(RunFolderError, match="another trainer"):
        refuse_in_use(store.folder, watch)


@pytest.mark.parametrize(
    ("host", "is_dead"),
    [
        (Host("host-a", "boot-a"), True),
        (Host("host-a", "boot-b"), False),
        (Host("host-b", "boot-a"), False),
    ],
    ids=["its own", "another boot", "another host"],
)
def test_a_refused_connection_proves_death_on_the_holders_own_host_alone(
    store: FolderStore, host: Host, is_dead: bool
) -> None:
    assert HolderWatch(store.folder, host=host).look() is (False if is_dead else None)


def test_the_host_of_an_older_versions_holder_is_known_by_its_name(store: FolderStore) -> None:
    """Such a term does not name the boot."""
    term = store.folder / "terms" / "0000000001.json"
    value = json.loads(term.read_text())
    del value["boot"]
    term.write_text(json.dumps(value))
    assert HolderWatch(store.folder, host=Host("host-a", "boot-b")).look() is False
    assert HolderWatch(store.folder, host=ELSEWHERE).look() is None
