"""A run at work is left alone by whoever knows another secret than its own, or none."""

from __future__ import annotations

import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from holdfast.errors import RunFolderError
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.run_folder import refuse_alone, refuse_in_use
from holdfast.wire.secret import SECRET_FILE_VARIABLE, Secret, open_secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_generation, create_term, newest_term
from tests.runtime.launch.holders import QUIET, agent, growing
from tests.support.commands import secret_file, within
from tests.support.nodes import QUICK, nodes_of

IN_USE = "another trainer uses this run folder"
OTHER = "another secret than is known here is the run's"


@pytest.mark.slow
@pytest.mark.parametrize("known", ["none", "of another run", "in the folder"])
def test_a_trainer_is_found_whatever_secret_the_shell_names(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    known: str,
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
