"""Hosts that ssh reaches, with a program in the place of ssh and shells in the place of agents.

A real sshd and real agents: `tests/system/test_launch_on_owners.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.config.loading.load import load_config
from holdfast.errors import UserError
from holdfast.launch.owners.owner import LaunchRequest, OwnedJob
from holdfast.launch.owners.ssh.owner import SshOwner
from tests.support.commands import secret_file, write_run_file
from tests.support.ranks import wait_until

AT_WORK = """\
echo "at work: $*"; echo "secret: $(cat "$HOLDFAST_SECRET_FILE" 2>/dev/null)"
trap "echo leaves; exit 0" TERM; while :; do sleep 0.02; done"""
OWNER = SshOwner()


class Hosts:
    """A run, and requests to start it on hosts of the fake ssh."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.ssh = FakeSsh(root / "hosts", patch)
        self.run_file, self.folder = write_run_file(root), root / "run"
        self.folder.mkdir()
        stored = {"config": {}, "run_id": "17"}
        (self.folder / "resolved.json").write_text(json.dumps(stored))
        self.secret = secret_file(root)
        self.ssh.python(AT_WORK)
        self.job: OwnedJob | None = None

    def request(self, *overrides: str, nodes: int = 2, **more: object) -> LaunchRequest:
        python = f"launch.ssh.python={self.ssh.root}/bin/python"
        config = load_config(self.run_file, [python, *overrides]).config
        values = {"location": str(self.folder), "secret_file": self.folder / "secret"} | more
        return LaunchRequest(
            name="tiny",
            folder=self.folder,
            config=config,
            nodes=nodes,
            overrides=("cluster.places=1",),
            **values,  # type: ignore[arg-type]
        )

    def submit(self, *overrides: str, **more: object) -> OwnedJob:
        self.job = OWNER.submit(self.request(*overrides, **more))  # type: ignore[arg-type]
        return self.job

    def wait(self, due: Callable[[], object]) -> None:
        wait_until(due)

    def file(self, host: str, name: str) -> Path:
        (found,) = self.ssh.home(host).glob(f".holdfast/*/{name}")
        return found


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    made = Hosts(tmp_path, monkeypatch)
    yield made
    if made.job is not None:
        OWNER.release(made.job)


def states(job: OwnedJob) -> dict[str, str]:
    return {each.node: each.state.value for each in OWNER.status(job)}


def test_one_node_on_each_host_from_start_to_end(hosts: Hosts, tmp_path: Path) -> None:
    """The hosts share no folder: the run store is a bucket, and the secret comes by stdin."""
    listed = tmp_path / "hosts.txt"
    listed.write_text("a.example slots=2  # a comment\n\nme@b.example\nc.example\n")
    (hosts.folder / "launch.json").unlink(missing_ok=True)
    bucket = {"location": "s3://bucket/run", "secret_file": hosts.secret}
    job = hosts.submit(f"launch.ssh.hosts_file={listed}", **bucket)
    job.write(hosts.folder)
    assert OwnedJob.read(hosts.folder) == job
    assert states(job) == {"a.example": "running", "b.example": "running"}
    hosts.wait(lambda: "secret" in "".join(OWNER.logs(job, "b.example")))
    lines = list(OWNER.logs(job, ""))
    (first,) = [line for line in lines if line.startswith("a.example: at work")]
    assert first.endswith("join s3://bucket/run --node a.example cluster.places=1 cluster.places=2")
    assert "b.example: secret: " + "5e" * 32 in lines
    secret = hosts.file("a.example", "*.secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert "5e5e" not in "".join(job.details.values())

    more = hosts.request(f"launch.ssh.hosts_file={listed}", nodes=3, **bucket)
    grown = hosts.job = OWNER.resize(job, more)
    assert {n: v for n, v in grown.details.items() if n in job.details} == job.details
    hosts.wait(lambda: "at work" in "".join(OWNER.logs(grown, "c.example")))
    hosts.ssh.switch_off("c.example")
    assert states(grown)["c.example"] == "lost"
    (hosts.ssh.root / "c.example.off").unlink()

    OWNER.release(grown)
    hosts.wait(lambda: set(states(grown).values()) == {"finished"})
    assert not secret.exists(), "it goes with the agent"


def test_a_shared_run_folder_is_compared_and_the_secret_in_it_not_sent(hosts: Hosts) -> None:
    job = hosts.submit("launch.ssh.hosts=[a]", "launch.ssh.user=me", nodes=1)
    hosts.wait(lambda: "secret: " in list(OWNER.logs(job, "a")))
    OWNER.release(job)
    elsewhere = hosts.request("launch.ssh.hosts=[a]", nodes=1, location=str(hosts.folder) + "-2")
    with pytest.raises(UserError, match=r"host a: .*does not see the run folder .*a bucket"):
        OWNER.submit(elsewhere)


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("unknown.example", "host unknown.example: no host of this name is known"),
        ("changed", "host changed: its host key is not the one .* ssh-keygen -R changed"),
        ("locked", "host locked: it accepts no key of this user; .*launch.ssh.user"),
        ("off", "host off: ssh cannot connect .*Connection refused"),
        ("bare", "host bare: .* there has no Holdfast, or an older one; .*launch.ssh.python"),
    ],
)
def test_what_a_host_lacks_is_one_sentence_with_its_name(
    hosts: Hosts, host: str, words: str
) -> None:
    with pytest.raises(UserError, match=words) as refused:
        OWNER.submit(hosts.request(f"launch.ssh.hosts=[{host}]", nodes=1))
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_another_version_or_no_python_and_the_other_hosts_are_given_back(hosts: Hosts) -> None:
    gone = hosts.request("launch.ssh.hosts=[a]", "launch.ssh.python=/none/python", nodes=1)
    with pytest.raises(UserError, match="host a: it has no Python at /none/python"):
        OWNER.submit(gone)
    older = "import os\nif '/b' in os.environ['HOME']: node_host.version = lambda _: '0.0.1'"
    hosts.ssh.python(AT_WORK, older)
    with pytest.raises(UserError, match=r"host b: .*has Holdfast 0.0.1, and the run"):
        OWNER.submit(hosts.request("launch.ssh.hosts=[a, b]"))
    hosts.wait(lambda: list(hosts.ssh.home("a").glob(".holdfast/*/a.exit")))


def test_too_few_hosts_are_refused_and_a_dry_run_asks_none(hosts: Hosts) -> None:
    with pytest.raises(UserError, match=r"2 nodes need as many hosts, and launch.ssh has 1"):
        OWNER.describe(hosts.request("launch.ssh.hosts=[a]"))
    asked = hosts.request(
        "launch.ssh.hosts=[a, me@b]",
        'launch.ssh.options=["-p", "2222"]',
        location="s3://bucket/run",
        secret_file=hosts.secret,
    )
    shown = OWNER.describe(asked)
    python = hosts.ssh.root / "bin/python"
    assert shown == "".join(
        f"ssh -p 2222 -o BatchMode=yes -o ConnectTimeout=10 -T {host} "
        f"'{python} -P -m holdfast.launch.owners.ssh.node_host'\n"
        f"  starts: holdfast join s3://bucket/run --node {node} cluster.places=1\n"
        for host, node in (("a", "a"), ("me@b", "b"))
    )


# --- a program `ssh` that runs the command on this machine, with a home for each host -------------
_SSH = """\
#!/bin/sh
# The host is the last word but one. Names of hosts are faults of ssh.
while [ $# -gt 2 ]; do shift; done
case "$1" in
  unknown*) echo "ssh: Could not resolve hostname $1: Name or service not known" >&2; exit 255;;
  changed*) echo "Host key verification failed." >&2; exit 255;;
  locked*) echo "$1: Permission denied (publickey)." >&2; exit 255;;
  off*) echo "ssh: connect to host $1 port 22: Connection refused" >&2; exit 255;;
  bare*) set -- "$1" "exec env -i {bare} -P -m holdfast.launch.owners.ssh.node_host";;
esac
[ ! -e "{root}/$1.off" ] || {{ echo "ssh: connect to host $1: No route to host" >&2; exit 255; }}
mkdir -p "{root}/$1"
echo "a banner of the login shell"
HOME="{root}/$1" exec /bin/sh -c "$2"
"""
_PYTHON = """\
#!{python}
import sys

from holdfast.launch.owners.ssh import node_host

SCRIPT = {script!r}
{more}
node_host.module_command = lambda _, *a: ["/bin/sh", "-c", SCRIPT, a[a.index("--node") + 1], *a]
sys.exit(node_host.main())
"""


class FakeSsh:
    """root: has `bin/ssh`, and the homes of the hosts. The PATH finds that ssh."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        (root / "bin").mkdir(parents=True)
        self._write("bin/ssh", _SSH.format(root=root, bare=sys.base_prefix + "/bin/python3"))
        patch.setenv("PATH", str(root / "bin"), prepend=":")

    def python(self, script: str, more: str = "") -> Path:
        """A Python of the hosts whose agents are shells that run a script. more: lines of Python
        before the request."""
        text = _PYTHON.format(python=sys.executable, script=script, more=more)
        return self._write("bin/python", text)

    def home(self, host: str) -> Path:
        return self.root / host

    def switch_off(self, host: str) -> None:
        (self.root / f"{host}.off").touch()

    def _write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.write_text(text)
        path.chmod(0o755)
        return path
