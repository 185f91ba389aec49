"""A real sshd on loopback, with keys of its own, as two hosts."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.ranks import wait_until

HOSTS = ("127.0.0.1", "127.0.0.2")
CONFIG = """\
Port {port}
ListenAddress {hosts[0]}
ListenAddress {hosts[1]}
HostKey {root}/host_key
AuthorizedKeysFile {root}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""


@dataclass(frozen=True)
class Sshd:
    """options: of ssh, to reach the hosts."""

    root: Path
    port: int

    @property
    def options(self) -> tuple[str, ...]:
        given = (f"UserKnownHostsFile={self.root}/known", "StrictHostKeyChecking=yes")
        words = ["-p", str(self.port), "-i", str(self.root / "user_key"), "-F", "none"]
        return (*words, *(word for each in given for word in ("-o", each)))

    def change_host_key(self) -> None:
        """As a host that was installed again: its key is not the one that is known here."""
        _make_key(self.root / "other_key")
        self._know((self.root / "other_key.pub").read_text())

    def _know(self, key: str) -> None:
        lines = [f"[{host}]:{self.port} {key.strip()}\n" for host in HOSTS]
        (self.root / "known").write_text("".join(lines))


def _make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)


def _free_port() -> int:
    with socket.socket() as asking:
        asking.bind((HOSTS[0], 0))
        return int(asking.getsockname()[1])


@contextmanager
def sshd(root: Path) -> Iterator[Sshd]:
    """Skips without the program: apt-get install openssh-server."""
    program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if program is None:
        pytest.skip("needs sshd: apt-get install openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)  # what sshd of Debian wants, as root
    root.mkdir()
    for name in ("host_key", "user_key"):
        _make_key(root / name)
    found = Sshd(root, _free_port())
    found._know((root / "host_key.pub").read_text())
    (root / "config").write_text(CONFIG.format(port=found.port, root=root, hosts=HOSTS))
    with (root / "log").open("w") as log:
        server = subprocess.Popen([program, "-D", "-e", "-f", str(root / "config")], stderr=log)
    try:

        def listens() -> bool:
            assert server.poll() is None, (root / "log").read_text()
            return (root / "log").read_text().count("Server listening") >= len(HOSTS)

        wait_until(listens, what=(root / "log").read_text)
        yield found
    finally:
        server.terminate()
        server.wait()
