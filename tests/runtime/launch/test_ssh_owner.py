"""Hosts that ssh reaches, with a program in the place of ssh and shells in the place of agents.

A real sshd and real agents: `tests/system/test_launch_on_owners.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config.loading.load import load_config
from holdfast.config.sections.launch import SshConfig
from holdfast.errors import ConfigError, UserError
from holdfast.launch.owners.owner import LaunchRequest, OwnedJob
from holdfast.launch.owners.ssh.hosts import HOSTS_LINE, hosts_of, read_host
from holdfast.launch.owners.ssh.owner import SshOwner
from tests.support.borders import unknown_entries
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
        (
            "changed",
            r"host changed: its host key has changed .* -f /k/hosts -R '\[127.0.0.1\]:2299'",
        ),
        ("new", r"host new: its host key is not known .*ssh-keyscan -p 2299 127.0.0.1 >> /k/hosts"),
        ("new", r"""launch.ssh.options=\["-o", "StrictHostKeyChecking=accept-new", "-v"\]"""),
        ("new-by-proxy", "accept it once with: ssh -v new-by-proxy,"),
        ("locked", "host locked: it accepts no key.* ssh-copy-id -v locked, .*launch.ssh.user"),
        ("off", "host off: ssh cannot connect .*Connection refused"),
        ("bare", "host bare: .* there has no Holdfast, or an older one; .*launch.ssh.python"),
    ],
)
def test_what_a_host_lacks_is_one_sentence_with_its_name(
    hosts: Hosts, host: str, words: str
) -> None:
    with pytest.raises(UserError, match=words) as refused:
        OWNER.submit(
            hosts.request(f"launch.ssh.hosts=[{host}]", "launch.ssh.options=[-v]", nodes=1)
        )
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


LISTS = {
    "as mpirun writes it": (
        "# a list\r\nn1 slots=4\r\n\r\nn2 slots=2 max-slots=8 # b\r\n",
        "n1 4 n2 2",
    ),
    "as PBS writes it, with a mark": ("\ufeffn1\nn1\nn2\nN1.\nn2\n", "n1 3 n2 2"),
    "one line with places": ("n1 slots = 4\nn1\n", "n1 5"),
    "ranges": (
        "n[1-2,07-08]-ib port=2222 user=me\n",
        " 0 ".join(f"me@n{n}-ib:2222" for n in ("1", "2", "07", "08")) + " 0",
    ),
    "addresses": (
        "me@::1\n[fe80::1%eth0]:2222 slots=1\n10.0.0.1:22\n10.0.0.1:2222\n",
        "me@[::1] 0 [fe80::1%eth0]:2222 1 10.0.0.1:22 0 10.0.0.1:2222 0",
    ),
}


@pytest.mark.parametrize("form", LISTS)
def test_each_host_of_a_file_is_one_node_with_its_places(form: str, tmp_path: Path) -> None:
    text, expected = LISTS[form]
    (tmp_path / "list").write_bytes(text.encode())
    found = hosts_of(SshConfig.model_validate({"hosts_file": str(tmp_path / "list")}))
    assert " ".join(f"{host} {host.places}" for host in found) == expected
    assert [replace(read_host(str(host), ""), places=host.places) for host in found] == found


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("n1:4", "ends with a port or a number of places; .*slots=4"),
        ("n1 4 all.q@n1", "list:2: this has the word '4' that Holdfast does not know"),
        ("n1 slots=", "slots= is no number"),
        ("n1 slots=8 max_slots=4", "slots exceeds max_slots"),
        ("n1 max_slots=2", "list:2: max_slots=2 is there without slots; write slots=2"),
        ("n1 slots=1 slots=2", "there twice"),
        ("n1 port=70000", "port=70000 is no number from 1 to 65535"),
        ("me@n1 user=you", "there twice"),
        ("n1:2222 port=22", "there twice"),
        ("n[4-1]", "is no range"),
        ("[::g]:2222", "is no host"),
        ("-oProxyCommand=x", "is no host"),
        ("other@n0", "list:2: other@n0 had another user"),
        *(
            (f"n1 {name}={value}", f"list:2: this has the word '{name}'")
            for name, value in unknown_entries(HOSTS_LINE).items()
        ),
    ],
)
def test_what_a_line_of_hosts_says_and_no_list_names_is_refused(
    line: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "list").write_text(f"n0\n{line.replace(' [', '[')}\n")
    with pytest.raises(ConfigError, match=words):
        hosts_of(SshConfig.model_validate({"hosts_file": str(tmp_path / "list")}))


@pytest.mark.parametrize(
    "twice", [("n1", "N1"), ("n1", "n1:22"), ("n[1-2]", "me@n2"), ("::1", "[0::1]")]
)
def test_a_list_of_the_run_file_names_each_host_once(twice: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"launch.ssh.hosts: .* is named twice"):
        hosts_of(SshConfig.model_validate({"hosts": twice}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["StrictHostKeyChecking=no"], "'StrictHostKeyChecking=no' is no option of ssh: use"),
        (["-v", "gpu-1"], "'gpu-1' is no option"),
        (["-p", "2222", "gpu-1"], "'gpu-1' is no option"),
        (["--"], "'--' is no option"),
        (["-"], "'-' is no option"),
        (["-p", "2222", "-o"], r"'-o' has no value: use \[-o, VALUE\]"),
        (["-p", ""], "'-p' has no value"),
    ],
)
def test_no_word_of_the_options_is_taken_as_the_host(options: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=rf"launch\.ssh\.options: {words}"):
        SshConfig.model_validate({"options": options})


def test_options_of_ssh_in_each_of_its_forms() -> None:
    options = ["-4vp2222", "-p", "22", "-Ci", "my key", "-oUser=me", "-o User=me", "-J", "-gate"]
    assert SshConfig.model_validate({"options": options}).options == tuple(options)


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
case "$*" in
  *-by-proxy) [ "$1" = -G ] && {{ echo "hostname 10.0.0.1"; echo "proxyjump gate"; exit 0; }};;
esac
[ "$1" = -G ] && {{
  printf 'hostname 127.0.0.1\\nport 2299\\nuserknownhostsfile /k/hosts\\n'; exit 0; }}
while [ $# -gt 2 ]; do shift; done
case "$1" in
  unknown*) echo "ssh: Could not resolve hostname $1: Name or service not known" >&2; exit 255;;
  new*) echo "Host key verification failed." >&2; exit 255;;
  changed*) printf '@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\\n' >&2
    printf 'Offending ED25519 key in /k/hosts:3\\nHost key verification failed.\\n' >&2; exit 255;;
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
