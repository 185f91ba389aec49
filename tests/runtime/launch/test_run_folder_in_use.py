"""Whose run folder it is: a start beside another one, with real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.config.loading.load import load_config
from holdfast.errors import RunFolderError
from holdfast.events import GenerationStarted, RequestsRefused, StepDone
from holdfast.launch.run import run_folder
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.run_folder import (
    refuse_foreign,
    refuse_in_use,
    refuse_other,
    run_id,
    set_aside,
    write_description,
)
from holdfast.machine.hardware import detect_hardware
from holdfast.wire.http.auth import Verifier
from holdfast.wire.http.server import HttpListener, SignedApplication
from holdfast.wire.http.sockets import address_of, bind_listener
from holdfast.wire.secret import open_secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import TERM_PATH, create_generation, create_term
from tests.support.commands import apart, start
from tests.support.marks import in_campaign
from tests.support.nodes import QUICK, nodes_of
from tests.support.ranks import DEADLINE_S, wait_until

SETTINGS = (
    "train.steps=100000",
    "train.batch_size=6",
    "train.evaluate.every=0",
    "checkpoint.every_steps=20",
    "layout.workers=2",
)


def _saves_on(folder: Path) -> None:
    newest = step_of(list_commits(FolderStore(folder))[0])
    wait_until(lambda: step_of(list_commits(FolderStore(folder))[0]) > newest, DEADLINE_S, "a save")


@pytest.mark.slow
def test_fresh_takes_no_folder_that_other_nodes_train_in(run_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with nodes_of(run_file, folder, *SETTINGS) as nodes:
        nodes.start("a", "b")
        nodes.wait_step(25, nodes={"a", "b"})
        command = ("train", run_file, f"folder={folder}", *SETTINGS, "--fresh")
        for more in ((), ("cluster.node=c", *QUICK)):
            refused = apart(*command, *more)
            refused.refuses("another trainer uses this run folder", nodes.leader, "stop it")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        _saves_on(folder)
        nodes.leave("a", "b")


def test_of_two_starts_in_one_moment_with_other_settings_one_begins_the_folder(
    run_file: Path, tmp_path: Path
) -> None:
    """Both have found nothing there, and are about to write what is computed here."""
    folder, machine = tmp_path / "run", detect_hardware()
    two = [load_config(run_file, [f"folder={folder}", f"seed={seed}"]) for seed in (1, 2)]
    for loaded in two:
        refuse_other(folder, loaded, "v1")
    write_description(folder, two[0], machine, tmp_path, "v1")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RunFolderError, match="seed"):
        write_description(folder, two[1], machine, tmp_path, "v1")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    write_description(folder, two[0], machine, tmp_path, "v1")


@pytest.mark.slow
def test_two_nodes_with_fresh_begin_one_run_beside_an_old_folder(
    run_file: Path, tmp_path: Path
) -> None:
    """The old one is moved once, whoever of the two comes first."""
    folder = tmp_path / "run"
    with nodes_of(run_file, folder, *SETTINGS) as nodes:
        nodes.start("a", "b")
        nodes.wait_step(25, nodes={"a", "b"})
        old = nodes.losses()
        for name in "ab":
            nodes.kill(name)
    with nodes_of(run_file, folder, *SETTINGS, "--fresh", "cluster.min_nodes=2") as nodes:
        nodes.start("a", "b")
        wait_until((tmp_path / "run.old-1").is_dir, what="the old folder is moved")
        nodes.wait_until(lambda: list_commits(FolderStore(folder)), "nothing is saved")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1"]
        assert nodes.events(GenerationStarted)[0].step == 0
        losses = nodes.losses()
        assert old.items() >= {step: losses[step] for step in range(1, 20)}.items()
        nodes.leave("a", "b")


@pytest.mark.slow
def test_two_nodes_with_fresh_begin_one_run_however_long_the_old_leader_is_asked(
    run_file: Path, tmp_path: Path
) -> None:
    """Its host is gone without a word: both ask until the deadline, and come out one after the
    other."""
    folder = tmp_path / "run"
    assert apart("train", run_file, f"folder={folder}", *SETTINGS, "train.steps=1").code == 0
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        nodes_of(run_file, folder, *SETTINGS, "--fresh", "cluster.min_nodes=2") as nodes,
    ):
        create_term(FolderStore(folder), 2, address_of(silent), "gone")
        nodes.start("a")
        time.sleep(0.5)
        nodes.start("b")
        wait_until((tmp_path / "run.old-1").is_dir, what="the old folder is moved")
        nodes.wait_step(3, nodes={"a", "b"})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.old-1"]
        assert nodes.events(GenerationStarted)[0].step == 0
        nodes.leave("a", "b")


def _begin_anew(folder: Path) -> None:
    """What another node does that was started with --fresh, up to its term."""
    folder.rename(folder.with_name("run.old-1"))
    folder.mkdir()
    _describe(folder, "new")


def _describe(folder: Path, run: str) -> None:
    (folder / "resolved.json").write_text(json.dumps({"config": {}, "dataset": {}, "run_id": run}))


def _old(folder: Path, leader: str) -> None:
    open_secret(folder)
    _describe(folder, "old")
    create_term(FolderStore(folder), 1, leader, "gone")


def _is_new(folder: Path) -> None:
    assert run_id(folder) == "new"
    assert run_id(folder.with_name("run.old-1")) == "old"
    assert not folder.with_name("run.old-2").exists()


def test_a_folder_that_is_begun_while_the_old_leader_is_asked_is_not_moved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as leader:

        def answer() -> None:
            asked, _ = leader.accept()
            _begin_anew(folder)
            asked.close()

        _old(folder, address_of(leader))
        thread = threading.Thread(target=answer)
        thread.start()
        assert set_aside(folder, run_id(folder), HolderWatch(folder, quiet_s=60)) is None
        thread.join()
    _is_new(folder)


def test_a_trainer_that_begins_while_the_old_leader_is_asked_refuses_nobody(tmp_path: Path) -> None:
    """It is a node of the new run, whose secret was not there yet."""
    folder = tmp_path / "run"
    with (
        socket.create_server(("127.0.0.1", 0)) as leader,
        HTTPServer(("127.0.0.1", 0), _Refusing) as node,
    ):

        def answer() -> None:
            asked, _ = leader.accept()
            _begin_anew(folder)
            create_generation(
                FolderStore(folder), 1, {"agents": {"a": {"address": address_of(node.socket)}}}
            )
            asked.close()
            node.serve_forever()

        _old(folder, address_of(leader))
        threading.Thread(target=answer, daemon=True).start()
        assert set_aside(folder, run_id(folder), HolderWatch(folder, quiet_s=60)) is None
        node.shutdown()
    _is_new(folder)


class _Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(401)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_folder_that_is_begun_at_the_last_moment_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last look at it: the old one has the name that it would get."""
    folder = tmp_path / "run"
    _old(folder, "127.0.0.1:1")
    before = run_id(folder)
    monkeypatch.setattr(run_folder, "refuse_in_use", lambda *_: None)
    looks = iter([lambda: _begin_anew(folder)])

    def look(path: Path) -> str | None:
        found = run_id(path)
        for then in looks:
            then()
        return found

    monkeypatch.setattr(run_folder, "run_id", look)
    assert set_aside(folder, before) is None
    _is_new(folder)


def test_a_mount_point_is_named_and_not_moved(tmp_path: Path) -> None:
    """A rename of it fails, with or without --fresh on several nodes."""
    folder = tmp_path / "run"
    _old(folder, "127.0.0.1:1")
    mount = ["mount", "--bind", str(folder), str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    try:
        with pytest.raises(RunFolderError, match="is a mount point") as found:
            set_aside(folder, run_id(folder))
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert f"folder={folder / 'new'}" in str(found.value)
    assert run_id(folder) is not None


def test_a_folder_that_goes_while_it_is_looked_at_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    refuse_foreign(tmp_path / "run")


def test_a_folder_whose_leader_is_lost_is_still_that_of_the_others(tmp_path: Path) -> None:
    async def scene() -> None:
        store, secret = FolderStore(tmp_path), open_secret(tmp_path)
        bound = bind_listener("127.0.0.1", 0, "cluster.interface")

        async def answer(_: int, body: dict[str, object]) -> dict[str, object]:
            return {"hears": False, "term": 1}

        handlers = {TERM_PATH: answer}
        guard = SignedApplication(
            handlers,
            secret,
            Verifier(secret, time.time),
            lambda: 0,
            generationless_paths=frozenset(handlers),
        )
        serving = asyncio.create_task(HttpListener(guard, bound).serve())
        create_term(store, 1, "127.0.0.1:1", "a")
        agents = {"a": {"address": "127.0.0.1:1"}, "b": {"address": address_of(bound)}}
        create_generation(store, 1, {"agents": agents})
        with pytest.raises(RunFolderError, match="node b is at work"):
            await asyncio.to_thread(refuse_in_use, tmp_path)
        serving.cancel()
        await asyncio.wait({serving})
        await asyncio.to_thread(refuse_in_use, tmp_path)

    asyncio.run(scene())


@pytest.mark.slow
def test_a_node_beside_a_run_of_one_node_is_refused_before_it_writes(
    run_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = ("train", run_file, f"folder={folder}", *SETTINGS)
    with nodes_of(run_file, folder, *SETTINGS) as nodes:
        nodes.agents["alone"] = start(*command)
        nodes.wait_step(1)
        before = (folder / "resolved.json").read_bytes()
        refused = apart(*command, "cluster.node=n", *QUICK)
        refused.refuses("trains this run without other nodes", "cluster.node=NAME")
        assert (folder / "resolved.json").read_bytes() == before
        nodes.agents["alone"].terminate()
        assert nodes.end() == {"alone": 0}, nodes.story()


@pytest.mark.slow
def test_of_two_agents_of_one_name_the_older_ends_with_a_sentence(
    run_file: Path, tmp_path: Path
) -> None:
    """One that follows, and then one that leads."""
    folder = tmp_path / "run"
    with nodes_of(run_file, folder, *SETTINGS) as nodes:
        nodes.start("a", "b")
        nodes.wait_step(5, nodes={"a", "b"})
        for leads in (False, True):
            name = next(name for name in "ab" if (name == nodes.leader) == leads)
            older, newest = nodes.agents.pop(name), nodes.newest
            nodes.start(name)
            out, err = older.communicate(timeout=DEADLINE_S)
            assert older.returncode == 2, out + err
            assert f"another agent has joined as {name}" in err
            assert "cluster.node=NAME" in err
            assert "Traceback" not in err
            nodes.wait_step(1, newest, {"a", "b"})
        assert not list((folder / "logs").glob("holdfast-error*"))
        nodes.leave("a", "b")


@pytest.mark.parametrize("length", [64, in_campaign(300)])
def test_a_node_whose_name_is_too_long_makes_no_folder(
    run_file: Path, tmp_path: Path, length: int
) -> None:
    folder, name = tmp_path / "run", "n" * length
    refused = apart("train", run_file, f"folder={folder}", f"cluster.node={name}")
    refused.refuses("cluster.node", f"{length} characters", "63", "such as node-1")
    assert not folder.exists()


@pytest.mark.slow
def test_a_notice_names_each_node_once_and_knows_who_is_there(
    run_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with nodes_of(run_file, folder, *SETTINGS) as nodes:
        nodes.start("a", "b")
        nodes.wait_step(5, nodes={"a", "b"})
        told = ("notice", folder, "--seconds", "60")
        apart(*told, "--node", "").refuses("--node", "without a name")
        apart(*told, "--node", "z").refuses("there is no node z in this run", "there are a, b")
        goes = next(name for name in "ab" if name != nodes.leader)
        done = apart(*told, "--node", goes, "--node", goes, "--leave", "--json")
        assert done.code == 0, done.err
        assert json.loads(done.out)["moves"] == [goes]
        nodes.agents[goes].wait(DEADLINE_S)
        newest = max(event.step for event in nodes.events(StepDone))
        nodes.wait_step(newest + 5)
        assert nodes.events(RequestsRefused) == []
        nodes.signal(nodes.leader, signal.SIGTERM)
        assert set(nodes.end().values()) == {0}, nodes.story()
