"""A run at work is left alone by whoever knows another secret than its own, or none."""

from __future__ import annotations

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from holdfast.errors import RunFolderError
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.run_folder import refuse_alone, refuse_in_use, run_id, set_aside
from holdfast.wire.journal import JournalWriter, segment_key
from holdfast.wire.secret import SECRET_FILE_VARIABLE, Secret, open_secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import Host, create_generation, create_term, newest_term
from tests.runtime.launch.holders import QUIET, agent, growing
from tests.support.commands import secret_file, within
from tests.support.journal_builder import step_done
from tests.support.nodes import QUICK, nodes_of

IN_USE = "another trainer uses this run folder"
OTHER = "another secret than is known here is the run's"


@pytest.mark.slow
@pytest.mark.parametrize("known", ["none", "of another run", "in the folder"])
def test_a_trainer_is_found_whatever_secret_the_shell_names(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    folder = tmp_path / "run"
    own = known == "in the folder"
    monkeypatch.delenv(SECRET_FILE_VARIABLE, raising=False)
    if not own:
        monkeypatch.setenv(SECRET_FILE_VARIABLE, str(secret_file(tmp_path)))
    settings = ("train.steps=100000", "train.evaluate.every=0", "layout.workers=1")
    command = ("train", run_file, f"folder={folder}", *settings)
    with nodes_of(run_file, folder, *settings, "cluster.min_nodes=1") as nodes:
        nodes.start("a")
        nodes.wait_step(2)
        if known == "none":
            monkeypatch.delenv(SECRET_FILE_VARIABLE)
        else:
            monkeypatch.setenv(SECRET_FILE_VARIABLE, str(secret_file(tmp_path, "a7")))
        before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}

        for more in ((), ("--fresh",)):
            within(*command, *more).refuses_last(IN_USE, "stop it", "on a")
        # Such a node would hear nothing that it takes for an answer, and open the next term.
        said = (OTHER, f"unset {SECRET_FILE_VARIABLE}" if own else SECRET_FILE_VARIABLE)
        node = (*command, "cluster.node=b", *QUICK)
        for joins in (node, (*node, "--fresh"), ("join", folder, "--node", "b")):
            within(*joins).refuses_last(*said, "on a")
        assert HolderWatch(folder).look() is (True if own else None)

        assert not list(tmp_path.glob("run.old*"))
        assert (folder / "secret").exists() is own
        assert {path: path.stat().st_mtime_ns for path in folder.glob("*.json")} == before
        assert newest_term(FolderStore(folder))[0] == 1
        nodes.signal("a", signal.SIGTERM)
        assert nodes.end() == {"a": 0}, nodes.story()
    within(*command, "train.steps=1", "--fresh").refuses_last(code=0)


def test_a_node_whose_leader_is_gone_is_found_without_its_secret(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with agent(Secret(b"5" * 32)) as address:
        create_term(store, 1, "127.0.0.1:1", "a")
        agents = {"a": {"address": "127.0.0.1:1"}, "b": {"address": address}}
        create_generation(store, 1, {"agents": agents})
        with growing(store), pytest.raises(RunFolderError, match=IN_USE):
            refuse_in_use(tmp_path)
    refuse_in_use(tmp_path)


@pytest.mark.parametrize("own", [False, True])
def test_another_runs_trainer_in_a_dead_ones_place_keeps_nobody(tmp_path: Path, own: bool) -> None:
    folder = tmp_path / "a run"
    store = FolderStore(folder)
    if own:
        open_secret(folder)
    with agent(Secret(b"5" * 32)) as address:
        create_term(store, 1, address, "a")
        assert HolderWatch(folder).look() is None
        for check in (refuse_in_use, refuse_alone):
            check(folder, HolderWatch(folder, quiet_s=QUIET))


class _Stranger(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("own", [False, True])
def test_a_strangers_server_in_a_dead_ones_place_keeps_nobody(tmp_path: Path, own: bool) -> None:
    if own:
        open_secret(tmp_path)
    with HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        create_term(FolderStore(tmp_path), 1, f"127.0.0.1:{server.server_port}", "a")
        for check in (refuse_in_use, refuse_alone):
            check(tmp_path, HolderWatch(tmp_path, quiet_s=QUIET))
        server.shutdown()
    assert HolderWatch(tmp_path).look() is False


# --- which holder of a run folder lives -----------------------------------------------------------
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
