"""Remedies of runs, commands, nodes and stores, carried out."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from re import Match

import pytest
import typer

from holdfast.api.training import _task_overrides
from holdfast.checkpoint.interop.huggingface import import_huggingface
from holdfast.checkpoint.mover.socket_place import MoverSocket
from holdfast.cli.table import all_commands
from holdfast.config.loading.load import load_config
from holdfast.doctor.run import folder_of
from holdfast.elastic.agent.agent import check_node_name
from holdfast.elastic.notices.kubernetes import _parse_taints
from holdfast.elastic.run_result import refuse_join
from holdfast.launch.node.node_place import PLACE_VARIABLE, by_place
from holdfast.launch.owners.kubernetes.owner import KubernetesOwner
from holdfast.launch.owners.ray.owner import _address
from holdfast.launch.owners.ssh import node_host
from holdfast.launch.owners.ssh.node_host import HostRequest
from holdfast.launch.run.run_folder import refuse_unlike_node
from holdfast.launch.run.runs import open_run
from holdfast.launch.start.facts import Facts
from holdfast.machine.hardware import detect_hardware
from holdfast.report.trackers.registry import check_options, load_tracker
from holdfast.show.layout_distance import distance
from holdfast.wire.http.sockets import bind_listener
from holdfast.wire.http.tls import with_tls
from holdfast.wire.secret import Secret, open_secret
from holdfast.wire.store.location import open_store, probe_store
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.remedies.lab import (
    MODEL,
    RUN,
    Case,
    Lab,
    Sized,
    begin_plan,
    begin_run,
    calling,
    export,
    fixed,
    make_plan,
    setting,
    values,
)
from tests.runtime.launch.holders import agent
from tests.runtime.launch.kubernetes.test_manifests import request_of
from tests.runtime.launch.test_node_place import Watch
from tests.support import s3
from tests.support.fake_kubectl import FakeKubectl
from tests.support.s3 import Fault, Proxy


def class_inside() -> type:
    class Inside(Sized): ...

    return Inside


def begin_import(lab: Lab) -> None:
    export(lab.folder / "hf")
    lab.settings.update(run="run", model=MODEL)


def import_model(lab: Lab) -> None:
    (lab.folder / lab.settings["run"]).mkdir(exist_ok=True)
    store = FolderStore(lab.folder / lab.settings["run"])
    import_huggingface(store, lab.folder / "hf", lab.settings["model"])


def begin_second_import(lab: Lab) -> None:
    begin_import(lab)
    import_model(lab)


def open_socket(lab: Lab) -> None:
    MoverSocket(lab.path(lab.settings["name"])).remove()


def line(text: str, *changes: Callable[[Lab], object]) -> Callable[[Lab], None]:
    """Begin with a run, some changes, and a command line."""

    def begin(lab: Lab) -> None:
        begin_run(lab)
        for change in changes:
            change(lab)
        lab.settings["line"] = shlex.split(text.format(root=lab.folder))

    return begin


def run_command(line: list[str]) -> None:
    """Run a command; its UserError comes out."""
    command = typer.main.get_command(import_module(all_commands()[line[0]].module).app)
    with command.make_context(f"holdfast {line[0]}", line[1:]) as context:
        assert command.invoke(context) in (0, None)


def attempt(lab: Lab) -> None:
    run_command(lab.settings["line"])


def _set_to(lab: Lab, name: str) -> None:
    words = lab.settings["line"]
    words[words.index("--to") + 1] = lab.path(name)


def remove(lab: Lab, match: Match[str]) -> None:
    """Remove the key that the remedy names, and what belongs to it."""
    lab.settings["overrides"] = []


def flip(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 0xFF]) + content[-99:]


def see_intact(lab: Lab, match: Match[str]) -> None:
    """Type the command; it says that step 3 is intact, which is then compared with itself."""
    words = shlex.split(match[1])[1:]
    try:
        run_command(words)
    except AssertionError:  # its exit code is 1: a checkpoint is damaged
        lab.settings["line"] = ["checkpoint", "diff", *[lab.path(f"{RUN}@3")] * 2]


def change_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Lab], None]:
    def begin(lab: Lab) -> None:
        path = next((lab.folder / RUN).glob(name))
        path.write_bytes(change(path.read_bytes()))

    return begin


def start_in_encrypted_run(lab: Lab) -> None:
    """What a node checks before it joins a run at work that speaks TLS."""
    with agent(with_tls(Secret(b"n" * 32))) as address:
        refuse_join({"address": address, "tls": True}, lab.settings["secret"])


def replace_word(old: str, new: str = "{0}") -> Callable[[Lab, Match[str]], None]:
    """Write another word on the line; `{0}` is what the remedy names."""

    def mend(lab: Lab, match: Match[str]) -> None:
        word = new.format(*match.groups())
        words = [word if one == old else one for one in lab.settings["line"]]
        assert words != lab.settings["line"], f"there is no {old}"
        lab.settings["line"] = words

    return mend


def leave_out(*words: str) -> Callable[[Lab, Match[str]], None]:
    def mend(lab: Lab, match: Match[str]) -> None:
        lab.settings["line"] = [one for one in lab.settings["line"] if one not in words]

    return mend


def without_variable(lab: Lab) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        _address(lab.settings["address"])


def begin_moved(lab: Lab) -> None:
    lab.settings["run"] = lab.write("run.yaml", f"folder: {lab.trained}\nmodel: {{from: gone}}\n")


def open_it(lab: Lab) -> None:
    open_run(Path(lab.settings["run"]))


def compare_keys(lab: Lab) -> None:
    loaded = load_config(lab.folder / "run.yaml", lab.settings["overrides"])
    refuse_unlike_node(lab.folder / RUN, loaded, Watch(lab.folder / RUN))


def start_on_host(lab: Lab) -> None:
    """What a host answers to `start`. Its node ends at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", lab.path("home"))
        patch.setattr(node_host, "module_command", lambda *_: ["true"])
        if version := lab.settings.get("version"):
            patch.setattr(node_host, "version", lambda _: version)
        request = HostRequest("start", "a", "h", location=lab.settings["location"], version="1.2")
        node_host.answer(request)


def listen(lab: Lab) -> None:
    host, port = lab.settings["address"]
    with bind_listener(host, port, "cluster.interface"):
        pass


def run_shell(lab: Lab, match: Match[str]) -> None:
    subprocess.run(match[1], shell=True, check=True)


OURS = tuple(f"AWS_{name}" for name in ("ENDPOINT_URL", "ENDPOINT_URL_S3", "ACCESS_KEY_ID"))


def probe(lab: Lab) -> None:
    with environment(lab):
        store = open_store(lab.settings["location"])
        probe_store(store, "bucket")


def begin_other_key(lab: Lab) -> None:
    for name, digits in (("first", "ab" * 32), ("other", "cd" * 32)):
        lab.write(name, digits).chmod(0o600)
    (lab.folder / "store").mkdir()
    open_store(f"file://{lab.path('store')}?seal={lab.path('first')}").create("data/1/a", b"x")
    lab.settings["key"] = "other"


def read_sealed(lab: Lab) -> None:
    key = lab.path(lab.settings["key"])
    assert open_store(f"file://{lab.path('store')}?seal={key}").get("data/1/a") == b"x"


def begin_overwriting(lab: Lab) -> None:
    proxy = Proxy(s3.server())
    proxy.drop_headers = frozenset({"if-none-match"})
    lab.settings.update(location=s3.location(proxy.address), environment=s3.CREDENTIALS)


def use_honest_store(lab: Lab, match: Match[str]) -> None:
    lab.settings["location"] = s3.location(s3.server())


def at(location: str) -> Callable[[Lab], None]:
    return lambda lab: lab.settings.update(location=location.format(root=lab.folder))


def open_location(lab: Lab) -> None:
    with environment(lab):
        open_store(lab.settings["location"])


def launch(lab: Lab) -> None:
    folder = lab.folder / "run"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        FakeKubectl(lab.folder / "bin").install(patch)
        if not lab.settings["has_kubectl"]:
            patch.setenv("PATH", lab.path("nothing"))
        KubernetesOwner().submit(
            replace(request_of(), folder=folder, secret_file=folder / "secret")
        )


def take_secret(lab: Lab) -> None:
    assert len(open_secret(lab.folder / "run", {}).key) == 32


@contextmanager
def environment(lab: Lab) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in OURS:
            patch.delenv(name, raising=False)
        for name, value in lab.settings.get("environment", {}).items():
            patch.setenv(name, value)
        yield


def begin_full(lab: Lab) -> None:
    """Begin at a bucket that is full."""
    proxy = Proxy(s3.server())
    proxy.rule = lambda request: Fault(507, "")
    lab.settings.update(location=s3.location(proxy.address, retries=0), proxy=proxy)
    lab.settings.update(environment=s3.CREDENTIALS)


def begin_unlike(lab: Lab) -> None:
    begin_run(lab)
    lab.settings["overrides"] = ["layout.reduction=fast"]


CASES: list[Case] = [
    Case(
        "api/training.py",
        values(task=class_inside()),
        lambda lab: _task_overrides(lab.settings["task"]),
        r"write it at the top level of a file \(in a notebook: %%writefile my_task\.py\)",
        fixed(task=Sized),
    ),
    Case(
        "checkpoint/interop/huggingface.py",
        begin_second_import,
        import_model,
        r"import into a new run folder, with folder=<path>",
        fixed(run="new"),
    ),
    Case(
        "checkpoint/mover/socket_place.py",
        values(name="d" * 120),
        open_socket,
        r"set TMPDIR to a folder of your own with a short path",
        fixed(name="s"),
    ),
    Case(
        "cli/checkpoint.py",
        line("checkpoint copy {root}/run --to {root}/run"),
        attempt,
        r"name another folder",
        lambda lab, match: _set_to(lab, "new"),
    ),
    Case(
        "doctor/run.py",
        line("doctor {root}/none"),
        lambda lab: folder_of(Path(lab.settings["line"][1])),
        r"name a run folder, or a run file that was trained: holdfast train RUN.yaml",
        lambda lab, match: lab.settings["line"].__setitem__(1, lab.path(RUN)),
    ),
    Case(
        "show/layout_distance.py",
        values(size=0),
        lambda lab: distance(size=[lab.settings["size"]]),
        r"use 1 or more",
        fixed(size=1),
    ),
    Case(
        "cli/plan_request.py",
        begin_plan("1xA100-80", "layout.stages=[1,2]", "layout.pp=2"),
        make_plan,
        r"remove (layout.stages), or see the layout with: holdfast layout show .+",
        remove,
    ),
    Case(
        "cli/read_errors.py",
        line(
            "checkpoint diff {root}/run@6 {root}/run@3",
            change_file("data/*/0000000006-rank00000-*", flip),
        ),
        attempt,
        r"see which checkpoints are intact: (holdfast checkpoint verify .*)",
        see_intact,
    ),
    Case(
        "elastic/agent/agent.py",
        values(node="a node"),
        lambda lab: check_node_name(lab.settings["node"]),
        r"use letters, digits, dots, dashes and underscores",
        fixed(node="a-node"),
    ),
    Case(
        "elastic/notices/kubernetes.py",
        values(text="=60"),
        calling(_parse_taints),
        r"write KEY or KEY=SECONDS, as (\S+)",
        setting("text"),
    ),
    Case(
        "elastic/run_result.py",
        values(secret=Secret(b"n" * 32)),
        start_in_encrypted_run,
        r"start this node with cluster\.tls=true",
        fixed(secret=with_tls(Secret(b"n" * 32))),
    ),
    Case(
        "export/adapters.py",
        line("export run --to out --format peft"),
        attempt,
        r"use --format (hf)",
        replace_word("peft"),
    ),
    Case(
        "export/texts.py",
        line("generate {root}/run the --tokens 1 --chat"),
        attempt,
        r"leave out (--chat)",
        leave_out("--chat"),
    ),
    Case(
        "export/weights.py",
        line("export {root}/run --to {root}/hf --step 4"),
        attempt,
        r"there are: (\d+).*",
        replace_word("4"),
    ),
    Case(
        "launch/owners/kubernetes/kubectl.py",
        values(has_kubectl=False),
        launch,
        r"install it: https://kubernetes\.io/docs/tasks/tools",
        fixed(has_kubectl=True),
    ),
    Case(
        "launch/node/node_place.py",
        values(place="rck=7"),
        lambda lab: by_place(
            load_config(None, []), Facts(detect_hardware(), {PLACE_VARIABLE: lab.settings["place"]})
        ),
        r"write KIND=NAME with one of node, rack, power, pool, zone",
        fixed(place="rack=7"),
    ),
    Case(
        "launch/owners/ray/owner.py",
        values(address=""),
        without_variable,
        r"use HOST:PORT, as ray start --head prints it, or set RAY_ADDRESS",
        fixed(address="head:6379"),
    ),
    Case(
        "launch/run/branch.py",
        line("branch {root}/run --at 4 --to {root}/new"),
        attempt,
        r"name one of these steps with --at, or (newest)",
        replace_word("4", "3"),
    ),
    Case(
        "launch/run/runs.py",
        begin_moved,
        open_it,
        r"name the run folder in the place of the run file",
        lambda lab, match: lab.settings.update(run=lab.trained),
    ),
    Case(
        "launch/run/run_folder.py",
        begin_unlike,
        compare_keys,
        r"use (\S+), or holdfast join \S+",
        lambda lab, match: lab.settings.update(overrides=[match[1]]),
    ),
    Case(
        "launch/owners/ssh/node_host.py",
        values(version="1.1", location="s3://b/run"),
        start_on_host,
        r"install Holdfast (\S+) there, or name a Python that has it",
        setting("version"),
    ),
    Case(
        "report/page/page.py",
        line("report {root}/run --output {root}"),
        attempt,
        r"name a file in it with --output",
        lambda lab, match: lab.settings["line"].__setitem__(-1, lab.path("page.html")),
    ),
    Case(
        "report/trackers/registry.py",
        values(options={"foldr": "x"}),
        lambda lab: check_options("csv", load_tracker("csv"), lab.settings["options"]),
        r"its options: .*\b(folder)\b.*",
        lambda lab, match: lab.settings.update(options={match[1]: "x"}),
    ),
    Case(
        "wire/http/sockets.py",
        values(address=("192.0.2.1", 80)),
        listen,
        r"use an address of this machine and a free port \((0) takes any\)",
        lambda lab, match: lab.settings.update(address=("127.0.0.1", int(match[1]))),
    ),
    Case(
        "wire/secret.py",
        lambda lab: lab.write("run/secret", "5e" * 32).chmod(0o644),
        take_secret,
        r"remove it, or run: (chmod 600 \S+)",
        run_shell,
    ),
    Case(
        "wire/store/bucket_errors.py",
        begin_full,
        probe,
        r"free some space, or use another bucket",
        lambda lab, match: setattr(lab.settings["proxy"], "rule", lambda request: None),
    ),
    Case(
        "wire/store/encrypted_store.py",
        begin_other_key,
        read_sealed,
        r"name the file of the key that the run was begun with",
        fixed(key="first"),
    ),
    Case(
        "wire/store/location.py",
        begin_overwriting,
        probe,
        r"use one that does not: docs/guide/stores.md names those that were tested",
        use_honest_store,
    ),
    Case(
        "wire/store/location.py",
        at("ftp://host/x"),
        open_location,
        r"use a folder, or an address that begins with (s3://), gs:// or az://",
        lambda lab, match: lab.settings.update(location=match[1] + "host/x"),
    ),
]
