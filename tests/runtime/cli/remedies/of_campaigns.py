"""Remedies of messages about campaigns of faults, networks of nodes, and copies into a store."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from re import Match
from typing import Any

import pytest

from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.bucket.copy_lease import CopyLease
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.restore_point import RestorePointFinder
from holdfast.wire.store.run_store import Buffer, FolderStore
from holdfast.wire.term import create_generation, newest_generation
from holdfast_lab.chaos import network
from holdfast_lab.chaos.campaign import Campaign, CampaignSettings, DisturbedRun
from holdfast_lab.chaos.layouts import parse_layout
from holdfast_lab.chaos.network import MAX_NODES, Network
from tests.runtime.checkpoint.bucket.test_copy_lease import KEY, save
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.runtime.cli.remedies.of_checkpoints import start_over
from tests.runtime.cli.remedies.of_others import values
from tests.runtime.cli.remedies.of_runs import RUN, begin_run, remove_commits

TRAINS = (
    "ls trains || exit 2; "
    'for word; do case $word in folder=*) mkdir -p "${word#folder=}";; esac; done'
)
"""In the place of `holdfast`: a run of it works once a file is there."""
RUN_OF_ONE = DisturbedRun(parse_layout("tp=2,workers=2"), 1, 1)


# --- campaigns ------------------------------------------------------------------------------
def campaign(lab: Lab) -> Campaign:
    begin_run_file(lab)
    command = ("sh", "-c", TRAINS, "holdfast")
    settings = CampaignSettings(
        command, lab.folder / "run.yaml", (), lab.folder / out(lab), 1, (), use_networks=False
    )
    return Campaign(settings, print)


def out(lab: Lab) -> str:
    return str(lab.settings.get("out", "out"))


def begin_run_file(lab: Lab) -> None:
    (lab.folder / "run.yaml").write_bytes((lab.trained.parent / "run.yaml").read_bytes())
    (lab.folder / out(lab)).mkdir(exist_ok=True)


def begin_second(lab: Lab) -> None:
    """Another command has the folder's lock."""
    begin_run_file(lab)
    lab.settings["other"] = (lab.folder / "out/.lock").open("w")
    fcntl.flock(lab.settings["other"], fcntl.LOCK_EX)


def take_turn(lab: Lab) -> None:
    campaign(lab).run([])


def begin_older(lab: Lab) -> None:
    """A result from before results named what they were made from."""
    lab.write(f"out/runs/{RUN_OF_ONE.name(1)}/result.json", json.dumps({"faults": 1}))


def check_results(lab: Lab) -> None:
    campaign(lab)._folder.check(RUN_OF_ONE)


def make_undisturbed(lab: Lab) -> None:
    """`holdfast train` fails here until a file is there."""
    campaign(lab)._ensure_undisturbed(RUN_OF_ONE.steps)


# --- networks -------------------------------------------------------------------------------
def bring_up(lab: Lab) -> None:
    """On a machine on which no namespace can be made."""
    if lab.settings["partitions"]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(network.shutil, "which", lambda tool: None)
            Network().up(["a"])


def full_network() -> Network:
    """A network whose nodes are there."""
    made = Network()
    hidden: Any = made
    hidden._bridge_process = object()
    hidden._nodes = {f"node{number}": object() for number in range(MAX_NODES)}
    return made


def plug_in(lab: Lab) -> None:
    full_network().up([f"node{number}" for number in range(lab.settings["count"])])


def find_node(lab: Lab) -> None:
    full_network()._node(lab.settings["node"])


def enter_namespace(lab: Lab) -> None:
    process = network._start_until_ready(["sh", "-c", "ls rights >&2 && echo ready"])
    process.communicate()


def call_ip(lab: Lab) -> None:
    network._run_or_raise(["ls", "rights"])


def give_rights(lab: Lab, found: Match[str]) -> None:
    lab.write("rights", "")


# --- copies ---------------------------------------------------------------------------------
def begin_copies(lab: Lab) -> None:
    """Two machines that each have a step 5 of their own."""
    for seed, name in enumerate(("one", "other", "target", "new")):
        (lab.folder / name).mkdir()
        if seed < 2:
            save(FolderStore(lab.folder / name), seed)
    lab.settings.update(busy=True, to="target")


class Contended(FolderStore):
    """While `busy`, another process writes each blob first, and another one."""

    busy = True

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        if self.busy and key.startswith("data/"):
            super().create(key, b"theirs")
        super().create(key, data)


class Swept(FolderStore):
    """While `busy`, another process removes the first blob when the second one is there."""

    busy = True

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        super().create(key, data)
        blobs = self.list("data/")
        if self.busy and len(blobs) == 2:
            self.delete(blobs[0])


def copy_into(kind: type[Contended] | type[Swept]) -> Callable[[Lab], None]:
    def copy(lab: Lab) -> None:
        target = kind(lab.folder / "target")
        target.busy = lab.settings["busy"]
        copy_checkpoint(FolderStore(lab.folder / "one"), KEY, target)

    return copy


def lease(lab: Lab, name: str, **more: Any) -> CopyLease:
    """The claim that a copy of this machine's step makes."""
    target = FolderStore(lab.folder / lab.settings["to"])
    source = FolderStore(lab.folder / name)
    return CopyLease(target, Checkpoint.open(source, KEY).commit, name, **more)


def begin_held(lab: Lab) -> None:
    begin_copies(lab)
    lab.settings["other"] = lease(lab, "other")
    lab.settings["other"].acquire()


def copy_beside(lab: Lab) -> None:
    """The other copy shows a sign of life while this one watches."""

    def live(text: str) -> None:
        lab.settings["other"].renew()

    target = FolderStore(lab.folder / lab.settings["to"])
    copy_checkpoint(FolderStore(lab.folder / "one"), KEY, target, lease_expiry_s=3, say=live)


def keep_claim(lab: Lab) -> None:
    """This copy was suspended for so long that the other machine took over."""
    own = lease(lab, "one")
    own.acquire()
    if lab.settings["busy"]:
        other = lease(lab, "other", expiry_s=0.1)
        other.acquire()
        lab.settings["other"] = other
    own.renew()
    own.release()


def end_other(lab: Lab, found: Match[str]) -> None:
    """The other copy has ended."""
    if "other" in lab.settings:
        lab.settings["other"].release()
    lab.settings["busy"] = False


# --- where a run begins again ---------------------------------------------------------------
def find_start(lab: Lab) -> None:
    store = FolderStore(lab.folder / RUN)
    number = newest_generation(store) + 1
    create_generation(store, number, {})
    found = json.loads((lab.folder / RUN / "resolved.json").read_text())
    known = found["config_hash"], found["dataset"]["version"]
    finder = RestorePointFinder(store, (), number, *known, lambda key, reason: None)
    assert finder.find_newest(()) is not None or not list_commits(store)


def fresh(lab: Lab, found: Match[str]) -> None:
    """What --fresh does: the run begins in an empty folder."""
    start_over(lab, found)
    content = (lab.folder / "old/resolved.json").read_bytes()
    (lab.folder / RUN / "resolved.json").write_bytes(content)


def begin_torn(lab: Lab) -> None:
    begin_run(lab)
    for path in (lab.folder / RUN / "commits").iterdir():
        path.write_bytes(b"torn")


def begin_without_checkpoints(lab: Lab) -> None:
    begin_run(lab)
    for path in (lab.folder / RUN / "commits").iterdir():
        lab.good[str(path)] = path.read_bytes()
    remove_commits("*")(lab)


def put_back(lab: Lab, found: Match[str]) -> None:
    for path, content in lab.good.items():
        Path(path).write_bytes(content)


CHAOS, NET, COPY = (
    "holdfast_lab/chaos/campaign.py: ",
    "holdfast_lab/chaos/network.py: ",
    "checkpoint/bucket/",
)
START = "checkpoint/restore/restore_point.py: "
RIGHTS = r"see that the rights suffice"

CASES: list[Case] = [
    case(
        CHAOS + "another chaos command is at work here",
        begin_second,
        take_turn,
        r"wait for its end, or name another --out",
        lambda lab, found: lab.settings.pop("other").close(),
    ),
    case(
        CHAOS + "the undisturbed run ended with …: …",
        values(),
        make_undisturbed,
        r"see that it trains: holdfast train",
        lambda lab, found: lab.write("trains", ""),
    ),
    case(
        CHAOS + "this holds what another campaign made, of other faults or settings, or by other "
        "code",
        begin_older,
        check_results,
        r"name another --out, or remove it",
        fixed(out="other"),
    ),
    case(
        NET + "(up)",
        values(partitions=True),
        bring_up,
        r"run as root, or do without partitions",
        fixed(partitions=False),
    ),
    case(
        NET + "a network has room for … nodes",
        values(count=MAX_NODES + 1),
        plug_in,
        r"start fewer",
        fixed(count=3),
    ),
    case(
        NET + "… is no node of this network",
        values(node="nobody"),
        find_node,
        r"use one of (\w+), .*",
        lambda lab, found: lab.settings.update(node=found[1]),
    ),
    case(NET + "…: …", values(), enter_namespace, RIGHTS, give_rights),
    case(NET + "…: …", values(), call_ip, RIGHTS, give_rights),
    case(
        COPY + "copy.py: somebody else writes … there at the same time",
        begin_copies,
        copy_into(Contended),
        r"copy it again once the other copy has ended",
        end_other,
    ),
    case(
        COPY + "copy.py: somebody removed or changed … there while the checkpoint was copied",
        begin_copies,
        copy_into(Swept),
        r"copy it again",
        end_other,
    ),
    case(
        COPY + "copy_lease.py: (acquire)",
        begin_held,
        copy_beside,
        r"name a new folder",
        fixed(to="new"),
    ),
    case(
        COPY + "copy_lease.py: … | the claim of this copy was taken over there",
        begin_copies,
        keep_claim,
        r"copy it again, or name a new folder",
        end_other,
    ),
    case(
        START + "none of … checkpoints can be trusted",
        begin_torn,
        find_start,
        r"see why with: holdfast checkpoint verify RUN, or start over with --fresh.*",
        fresh,
    ),
    case(
        START + "this run had a checkpoint of step …, and none is left",
        begin_without_checkpoints,
        find_start,
        r"put the checkpoints back \(what checkpoint\.bucket names is asked\), or start over with "
        r"--fresh.*",
        put_back,
    ),
]
