"""A Ceph of one monitor, one daemon that keeps objects in memory, and a gateway that speaks S3.

It needs the commands of Debian's packages ceph-mon, ceph-osd, radosgw and ceph-common. All ports
are free ones, and all processes end with the test process.
"""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import end_with_starter
from tests.support.ranks import DEADLINE_S, wait_until

COMMANDS = ("ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool")
STORE_BYTES = 2 * 2**30
_CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = {monitor}
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = {bytes}
mon allow pool size one = true
mon max pg per osd = 1000
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
pid file = {folder}/run/$name.pid
log file = {folder}/log/$name.log
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
keyring = {folder}/keyring
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
# The gateway waits for ever without this.
ms mon client mode = crc
"""


def gateway(credentials: dict[str, str], bucket: str) -> tuple[str, int]:
    """Start a Ceph for this test process, with one user and one bucket. Return (host, port)."""
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        pytest.skip(f"no {missing[0]}: apt install ceph-mon ceph-osd radosgw ceph-common")
    with ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="ceph-"))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        ceph = _Ceph(folder)
        undo.callback(ceph.end)
        ceph.up()
        key, secret = credentials["AWS_ACCESS_KEY_ID"], credentials["AWS_SECRET_ACCESS_KEY"]
        user = ("--uid", "tests", "--display-name", "tests")
        ceph.call("radosgw-admin", "user", "create", *user, "--access-key", key, "--secret", secret)
        _make_bucket(ceph.address, key, secret, bucket)
        atexit.register(undo.pop_all().close)
        return ceph.address


class _Ceph:
    """The processes, and what they have on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        one, other, port = _free_ports(3)
        self._monitor = f"[v2:127.0.0.1:{one},v1:127.0.0.1:{other}]"
        self._fsid = str(uuid.uuid4())
        self.address = ("127.0.0.1", port)

    def up(self) -> None:
        for name in ("mon", "osd", "run", "log", "rgw"):
            (self._folder / name).mkdir()
        (self._folder / "keyring").touch()
        (self._folder / "ceph.conf").write_text(
            _CONFIGURATION.format(
                folder=self._folder,
                fsid=self._fsid,
                monitor=self._monitor,
                port=self.address[1],
                bytes=STORE_BYTES,
            )
        )
        self._start_monitor()
        self._start_objects()
        gateway = self._start("radosgw", "-n", "client.rgw.a")
        self._wait(gateway, self._answers)

    def _start_monitor(self) -> None:
        members = str(self._folder / "monmap")
        make = ("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", self._monitor)
        _run(*make, members)
        self.call("ceph-mon", "--mkfs", "-i", "a", "--monmap", members)
        monitor = self._start("ceph-mon", "-i", "a")
        self._wait(monitor, lambda: self._said("ceph", "-s") is not None)

    def _start_objects(self) -> None:
        name = str(uuid.uuid4())
        self.call("ceph", "osd", "new", name, "0")
        self.call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", name)
        objects = self._start("ceph-osd", "-i", "0")
        self._wait(objects, lambda: "1 up" in (self._said("ceph", "osd", "stat") or ""))

    def call(self, command: str, *arguments: str) -> None:
        _run(command, "-c", f"{self._folder}/ceph.conf", *arguments)

    def end(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait(120)

    def _start(self, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [command, "-c", f"{self._folder}/ceph.conf", "-f", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=end_with_starter,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def _said(self, command: str, *arguments: str) -> str | None:
        """Return what a command prints, None if it fails."""
        words = ["timeout", "10", command, "-c", f"{self._folder}/ceph.conf", *arguments]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return None if done.returncode else done.stdout + done.stderr

    def _answers(self) -> bool:
        try:
            socket.create_connection(self.address, timeout=5).close()
        except OSError:
            return False
        return True

    def _wait(self, process: subprocess.Popen[bytes], due: Callable[[], bool]) -> None:
        def is_over() -> bool:
            return process.poll() is not None or due()

        def story() -> str:
            logs = "\n".join(p.read_text()[-2000:] for p in self._folder.glob("log/*.log"))
            return f"{process.args!r} to be ready\n{logs}"

        wait_until(is_over, DEADLINE_S, story, pause_s=0.1)
        assert process.poll() is None, story()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        return [
            held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in range(count)
        ]


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"


def _make_bucket(address: tuple[str, int], key: str, secret: str, bucket: str) -> None:
    import boto3  # comes with moto

    client: Any = boto3.client(
        "s3",
        endpoint_url=f"http://{address[0]}:{address[1]}",
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=bucket)
