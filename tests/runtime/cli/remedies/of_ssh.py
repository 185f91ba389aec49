"""Remedies of messages about hosts that ssh reaches. A script takes the place of ssh."""

from __future__ import annotations

from collections.abc import Callable
from re import Match

import pytest

from holdfast.config.loading.load import load_config
from holdfast.launch.owners.owner import LaunchRequest
from holdfast.launch.owners.ssh import node_host
from holdfast.launch.owners.ssh.call import SshHost
from holdfast.launch.owners.ssh.node_host import HostRequest
from holdfast.launch.owners.ssh.owner import SshOwner
from tests.runtime.cli.remedies.lab import Case, Lab, Mend, case, fixed
from tests.runtime.cli.remedies.of_others import values
from tests.runtime.cli.remedies.of_runs import RUN, begin_run
from tests.support.fake_ssh import FakeSsh

CALL, OWNER, HOST = (
    "launch/owners/ssh/call.py: ",
    "launch/owners/ssh/owner.py: ",
    "launch/owners/ssh/node_host.py: ",
)


def ask(lab: Lab) -> None:
    """Ask the host for the state of a node, as `status` does."""
    with pytest.MonkeyPatch.context() as patch:
        if lab.settings.get("installed", True):
            root = lab.folder / f"hosts{len(list(lab.folder.glob('hosts*')))}"
            good = str(FakeSsh(root, patch).python("true"))
            python = lab.settings.get("python") or good
        else:
            patch.setenv("PATH", lab.path("none"))
            python = "python"
        host = SshHost(lab.settings["host"], python)
        host.ask(HostRequest("status", "a", ".holdfast", "1@1"))


def on_host(host: str, **more: object) -> Callable[[Lab], None]:
    return values(host=host, **more)


def failure(host: str, remedy: str, mend: Mend, **more: object) -> Case:
    return case(CALL + "(_failure)", on_host(host, **more), ask, remedy, mend)


def describe(lab: Lab) -> None:
    """As `launch --dry-run` does, with two nodes and a spare."""
    config = load_config(lab.folder / "run.yaml", lab.settings["overrides"]).config
    folder, nodes = lab.folder / RUN, lab.settings.get("nodes", 2)
    spares = config.launch.spares
    request = LaunchRequest("t", str(folder), folder, folder / "secret", config, nodes, spares)
    SshOwner().describe(request)


def hosts(*overrides: str) -> Callable[[Lab], None]:
    def begin(lab: Lab) -> None:
        begin_run(lab)
        lab.settings["overrides"] = ["launch.spares=1", *overrides]

    return begin


def hosts_in_file(lab: Lab) -> None:
    hosts(f"launch.ssh.hosts_file={lab.write('hosts', '-oProxyCommand=x')}")(lab)


def name_them(lab: Lab, found: Match[str]) -> None:
    lab.write("hosts", "a\nb\nc\n")
    lab.settings["overrides"].append(f"{found[1]}={lab.path('hosts')}")


def start_on_host(lab: Lab) -> None:
    """What a host answers to `start`. Its node ends at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", lab.path("home"))
        patch.setattr(node_host, "module_command", lambda *_: ["true"])
        if version := lab.settings.get("version"):
            patch.setattr(node_host, "version", lambda _: version)
        request = HostRequest("start", "a", "h", location=lab.settings["location"], version="1.2")
        node_host.answer(request)


CASES: list[Case] = [
    case(
        CALL + "there is no program ssh on the PATH",
        on_host("a", installed=False),
        ask,
        r"install OpenSSH's client, or choose another owner",
        fixed(installed=True),
    ),
    failure("unknown", r"correct it in launch\.ssh", fixed(host="a")),
    failure(
        "changed",
        r"connect once with ssh to see both keys, and remove the old one with: ssh-keygen -R (\w+)",
        lambda lab, found: fixed(host=found[1].removeprefix("changed") or "a")(lab, found),
    ),
    failure(
        "locked",
        r"add one with ssh-copy-id, or name the user in launch\.ssh\.user",
        fixed(host="me@a"),
    ),
    failure("off", r"find out why with: ssh off", fixed(host="a")),
    failure(
        "a",
        r"install it there, or name the Python that has it in launch\.ssh\.python",
        fixed(python=""),
        python="/none/python",
    ),
    failure("a", r"look there with: ssh a", fixed(python=""), python="/bin/false"),
    case(
        OWNER + "… nodes need as many hosts, and launch.ssh has …",
        hosts("launch.ssh.hosts=[a, b]"),
        describe,
        r"name more hosts, or use --nodes (\d+)",
        lambda lab, found: lab.settings.update(nodes=int(found[1])),
    ),
    case(
        OWNER + "… nodes need as many hosts, and launch.ssh has …",
        hosts(),
        describe,
        r"name them there, or in (\S+)",
        name_them,
    ),
    case(
        OWNER + "the list of hosts cannot be read (…)",
        hosts("launch.ssh.hosts_file=none"),
        describe,
        r"name a file with one host a line",
        lambda lab, found: lab.write("none", "a\nb # the second\n\nc\n"),
    ),
    case(
        OWNER + "… is no host",
        hosts_in_file,
        describe,
        r"write HOST or USER@HOST, such as (\S+), at the beginning of a line",
        lambda lab, found: lab.write("hosts", f"{found[1]}\nb\nc\n"),
    ),
    case(
        HOST + "this host has Holdfast …, and the run was begun with …",
        values(version="1.1", location="s3://b/run"),
        start_on_host,
        r"install Holdfast (\S+) there, or name a Python that has it",
        lambda lab, found: lab.settings.update(version=found[1]),
    ),
    case(
        HOST + "this host does not see the run folder …",
        values(version="1.2", location="/none/run"),
        start_on_host,
        r"use a folder on a disk that all hosts share, or a bucket",
        fixed(location="s3://b/run"),
    ),
]
