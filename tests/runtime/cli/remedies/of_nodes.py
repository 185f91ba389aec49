"""Remedies of messages that a run at work causes: other nodes, their leader, notices, and readers.

An agent here is a thread that answers as an agent's control does, next to a term of the run folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from re import Match
from socketserver import BaseServer
from typing import Any

import pytest

from holdfast.checkpoint.peers.config import Peer
from holdfast.checkpoint.peers.generation_floor import generation_floor
from holdfast.checkpoint.peers.staging_node import StagingNode
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.config.loading.load import load_config
from holdfast.elastic.protocol.messages import handler_of
from holdfast.elastic.protocol.notice_messages import (
    NOTICE_PATH,
    EmergencyReply,
    Notice,
    UnknownNodeReply,
)
from holdfast.elastic.run_result import refuse_join
from holdfast.events import StepTraced
from holdfast.export.weights import with_checkpoint
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.run_folder import refuse_alone, refuse_in_use
from holdfast.launch.run.runs import open_run
from holdfast.launch.run.unlike_node import refuse_unlike_node
from holdfast.policy.placement import Machine
from holdfast.wire.http.client import Client
from holdfast.wire.http.sockets import bind_listener
from holdfast.wire.http.tls import with_tls
from holdfast.wire.journal import JournalWriter
from holdfast.wire.secret import SECRET_FILE_VARIABLE, Secret, open_secret
from holdfast.wire.store.run_store import FolderStore, MissingKeyError
from holdfast.wire.term import Host, create_generation, create_term, newest_generation, newest_term
from tests.runtime.cli.remedies.lab import Case, Lab, Mend, case, fixed
from tests.runtime.cli.remedies.of_others import values
from tests.runtime.cli.remedies.of_runs import RUN, attempt, begin_run, first, line, replace
from tests.runtime.launch.holders import QUIET, agent, growing
from tests.runtime.launch.test_unlike_node import Watch

ELSEWHERE = Host("host-b", "boot-b")
NOBODY = "127.0.0.1:1"
"""An address at which no process listens."""


def open_term(lab: Lab, address: str, alone: bool = False, host: Host | None = None) -> None:
    store = FolderStore(lab.folder / RUN)
    assert create_term(store, newest_term(store)[0] + 1, address, "a", alone, host)


def close_term(lab: Lab) -> None:
    """What a trainer does when it is stopped."""
    store = FolderStore(lab.folder / RUN)
    number, _ = newest_term(store)
    store.create(f"terms/{number:010d}-closed", b"")


# --- a holder that lives --------------------------------------------------------------------
def begin_held(address: str = NOBODY, alone: bool = False) -> Callable[[Lab], None]:
    """A trainer on another host has the run."""

    def begin(lab: Lab) -> None:
        begin_run(lab)
        open_term(lab, address, alone, Host("host-a", "boot-a"))
        lab.settings["lives"] = True

    return begin


def start_beside(check: Callable[..., None]) -> Callable[[Lab], None]:
    """What a start here checks. A holder that lives makes its term grow."""

    def start(lab: Lab) -> None:
        folder = lab.folder / RUN
        with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
            patch.delenv(SECRET_FILE_VARIABLE, raising=False)
            if secret := lab.settings.get("secret"):
                patch.setenv(SECRET_FILE_VARIABLE, secret)
            if "agent" in lab.settings:
                open_term(lab, stack.enter_context(agent(lab.settings["agent"])))
            if lab.settings["lives"]:
                number, _ = newest_term(FolderStore(folder))
                key = f"terms/{number:010d}-alive"
                stack.enter_context(growing(FolderStore(folder), key))
            quiet = 10 * QUIET if lab.settings["lives"] else QUIET
            check(folder, HolderWatch(folder, quiet_s=quiet, host=ELSEWHERE))

    return start


def fixed_secret(secret: Secret) -> Callable[[Lab], None]:
    """A node that has the secret, with or without TLS."""

    def begin(lab: Lab) -> None:
        lab.settings["secret"] = secret

    return begin


def start_in_encrypted_run(lab: Lab) -> None:
    """What a node checks before it joins a run at work that speaks TLS."""
    with agent(with_tls(Secret(b"n" * 32))) as address:
        refuse_join({"address": address, "tls": True}, lab.settings["secret"])


def stop_it(lab: Lab, found: Match[str]) -> None:
    close_term(lab)
    lab.settings["lives"] = False


def start_as_node(address: str) -> Mend:
    """The trainer is stopped, and started as a node that other nodes can reach."""

    def mend(lab: Lab, found: Match[str]) -> None:
        stop_it(lab, found)
        open_term(lab, address, False, Host("host-a", "boot-a"))

    return mend


def begin_other_secret(name: str) -> Callable[[Lab], None]:
    """The run's secret lies in a file of this name; the shell names another one."""

    def begin(lab: Lab) -> None:
        begin_run(lab)
        (lab.folder / RUN / "secret").unlink(missing_ok=True)
        for file, digits in ((name, "5e"), ("other", "a7")):
            lab.write(file, digits * 32).chmod(0o600)
        lab.settings.update(lives=True, agent=Secret(bytes.fromhex("5e" * 32)))
        lab.settings["secret"] = lab.path("other")

    return begin


def compare_keys(lab: Lab) -> None:
    loaded = load_config(lab.folder / "run.yaml", lab.settings["overrides"])
    refuse_unlike_node(lab.folder / RUN, loaded, Watch(lab.folder / RUN))


def with_overrides(*words: str) -> Callable[[Lab], None]:
    return lambda lab: (begin_run(lab), lab.settings.update(overrides=list(words)))[0]


# --- notices --------------------------------------------------------------------------------
async def answer_notice(_: int, notice: Notice) -> EmergencyReply | UnknownNodeReply:
    if unknown := [name for name in notice.nodes if name != "a"]:
        return UnknownNodeReply(f"there is no node {unknown[0]} in this run", ("a",))
    return EmergencyReply((2,), "saves to the run folder")


@contextmanager
def at_work(lab: Lab) -> Iterator[None]:
    """The run's agents: "all", "followers" for a leader that cannot be reached, or "none"."""
    if lab.settings["agents"] == "none":
        yield
        return
    store = FolderStore(lab.folder / RUN)
    handlers = {NOTICE_PATH: handler_of(Notice.from_json, answer_notice)}
    with agent(open_secret(lab.folder / RUN), handlers) as address:
        nodes = {"b": {"address": address}}
        create_generation(store, newest_generation(store) + 1, {"agents": nodes})
        open_term(lab, address if lab.settings["agents"] == "all" else NOBODY)
        yield


def give_notice(lab: Lab) -> None:
    """Without the patience for an agent that is about to listen."""
    with at_work(lab), pytest.MonkeyPatch.context() as patch:
        patch.setitem(Client.__init__.__kwdefaults__ or {}, "connect_retry_s", 0.1)
        attempt(lab)


def notice(site: str, text: str, remedy: str, mend: Mend, agents: str = "all") -> Case:
    def begin(lab: Lab) -> None:
        line(f"notice run {text}")(lab)
        lab.settings["agents"] = agents

    return case(f"cli/notice.py: {site}", begin, give_notice, remedy, mend)


# --- peers ----------------------------------------------------------------------------------
@contextmanager
def quick_servers() -> Iterator[None]:
    """Inside, a server of a thread looks often whether it is to end, not twice a second."""
    original = BaseServer.serve_forever
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseServer, "serve_forever", lambda server, _: original(server, 0.01))
        yield


def ask_peers(lab: Lab) -> None:
    """A run with a new folder asks a staging machine what it has of the run."""
    secret = Secret(bytes.fromhex("5e" * 32))
    with quick_servers():
        node = StagingNode(bind_listener("127.0.0.1", 0, "x"), secret, 1 << 20, lambda event: None)
        try:
            store = FolderStore(lab.folder / "new")
            peers = [Peer(Machine("stage"), node.address)]
            generation_floor(store, peers, lab.settings["secret"], "", False, print)
        finally:
            node.close()


# --- readers of a run that continues --------------------------------------------------------
def begin_quick(lab: Lab) -> None:
    """The run saves a checkpoint and removes another one each time that one is read."""
    begin_run(lab)
    lab.settings["continues"] = True


def export_newest(lab: Lab) -> None:
    run = open_run(lab.folder / RUN)
    commits = {key: run.store.get(key) for key in list_commits(run.store)}

    def read(checkpoint: Any) -> None:
        if not lab.settings["continues"]:
            return
        key = checkpoint.commit.key
        for other in commits.keys() - set(list_commits(run.store)):
            run.store.create(other, commits[other])
        run.store.delete(key)
        raise MissingKeyError(key)

    with_checkpoint(run, None, read, print)


def remove_blobs(lab: Lab) -> None:
    for path in (lab.folder / RUN).glob("data/*/0000000003-*"):
        path.unlink()


def look_and_choose(lab: Lab, found: Match[str]) -> None:
    first(lab, found)
    replace("run@3", "run@6")(lab, found)


def trace_a_step(lab: Lab, found: Match[str] | None = None) -> None:
    """What a run with `layout.trace_step` leaves in its journal."""
    store = FolderStore(lab.folder / RUN)
    writer = JournalWriter(store, "rank0", newest_generation(store))
    writer.emit(StepTraced(0, [["compute", "0F0", 0.0, 1.0]], step=6))
    writer.flush(sync=True)


FOLDER, WEIGHTS = "launch/run/run_folder.py: ", "export/weights.py: "

CASES: list[Case] = [
    case(
        FOLDER + "another trainer uses this run folder: …",
        begin_held(),
        start_beside(refuse_in_use),
        r"stop it, or choose another with folder=\.\.\.",
        stop_it,
    ),
    case(
        "elastic/run_result.py: process … on … trains this run without other nodes",
        begin_held(alone=True),
        start_beside(refuse_alone),
        r"stop it, start it with cluster\.node=NAME; then other nodes can join",
        start_as_node("0.0.0.0:1"),
    ),
    case(
        "elastic/run_result.py: the run at work … TLS, and this node …",
        fixed_secret(Secret(b"n" * 32)),
        start_in_encrypted_run,
        r"start this node with cluster\.tls=true",
        fixed(secret=with_tls(Secret(b"n" * 32))),
    ),
    case(
        FOLDER + "… leads the run and listens on …, which only its own machine reaches",
        begin_held(),
        start_beside(refuse_alone),
        r"start it without cluster\.interface, or with an address of its machine",
        start_as_node("0.0.0.0:1"),
    ),
    case(
        FOLDER + "another secret than is known here is the run's: …",
        begin_other_secret("kept"),
        start_beside(refuse_alone),
        rf"name the file of the run's secret in {SECRET_FILE_VARIABLE}",
        lambda lab, found: lab.settings.update(secret=lab.path("kept")),
    ),
    case(
        FOLDER + "another secret than is known here is the run's: …",
        begin_other_secret(f"{RUN}/secret"),
        start_beside(refuse_alone),
        rf"unset {SECRET_FILE_VARIABLE}: the secret in this folder is right",
        fixed(secret=""),
    ),
    case(
        "launch/run/unlike_node.py: … is … here and … on the nodes at work; it has to be alike "
        "on all nodes of a run",
        with_overrides("layout.reduction=fast"),
        compare_keys,
        r"use (\S+), or holdfast join \S+",
        lambda lab, found: lab.settings.update(overrides=[found[1]]),
    ),
    case(
        "cli/join.py: no run has been started here",
        lambda lab: lab.settings.update(line=["join", RUN, "--node", "b"]),
        attempt,
        r"start one with: holdfast train RUN_FILE cluster\.node=NAME",
        lambda lab, found: shutil.copytree(lab.trained, lab.folder / RUN),
    ),
    notice(
        "a notice of … seconds makes no sense",
        "--seconds 0",
        r"say in how many seconds the machines will be lost",
        replace("0", "30"),
    ),
    notice(
        "a node without a name",
        "--seconds 30 --node ''",
        r"name one, or leave --node out: all",
        replace("", "a"),
    ),
    notice(
        "(notice)",
        "--seconds 30 --node c",
        r"there are (\w+)",
        replace("c"),
    ),
    notice(
        "(_post)",
        "--seconds 30",
        r"call this while the run is at work",
        fixed(agents="all"),
        agents="followers",
    ),
    notice(
        "nobody is training here, or on another machine, or with another secret than is known here",
        "--seconds 30",
        rf"call this on the machine that trains, while it does, with {SECRET_FILE_VARIABLE} as "
        r"there",
        fixed(agents="all"),
        agents="none",
    ),
    case(
        "checkpoint/peers/generation_floor.py: … does not accept the secret of this run folder, "
        "which is new",
        values(secret=Secret(bytes.fromhex("a7" * 32))),
        ask_peers,
        rf"give both the same secret file \(here: {SECRET_FILE_VARIABLE}\); if the run folder was "
        r"lost, that of the lost run; or start over with --fresh.*",
        fixed(secret=Secret(bytes.fromhex("5e" * 32))),
    ),
    case(
        WEIGHTS + "the run removes its checkpoints faster than they can be read",
        begin_quick,
        export_newest,
        r"wait for its end, or start it again with checkpoint\.keep_last above 3",
        fixed(continues=False),
    ),
    case(
        "cli/read_errors.py: …; a run in progress may have removed it",
        line("checkpoint diff run@3 run@6", remove_blobs),
        attempt,
        r"see what is there: (holdfast checkpoint list \S+)",
        look_and_choose,
    ),
    case(
        "cli/report.py: no step of this run was traced",
        line("report run --trace trace.json"),
        attempt,
        r"train on with layout\.trace_step=N for a step N that is still to come",
        trace_a_step,
    ),
    case(
        "cli/report.py: the trace cannot be written (…)",
        line("report run --trace none/trace.json", trace_a_step),
        attempt,
        r"name another place with --trace",
        replace("none/trace.json", "trace.json"),
    ),
    case(
        "cli/report.py: the trace cannot be written: this is a folder",
        line("report run --trace run", trace_a_step),
        attempt,
        r"name a file in it with --trace",
        lambda lab, found: lab.settings.update(line=["report", "run", "--trace", "run/trace.json"]),
    ),
]
