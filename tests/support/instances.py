"""The machines behind a server that speaks EC2: an instance is a process of this machine.

It runs its user data when it starts. When it is ended it gets the signal of a system that shuts
down. A reclaimed one is killed without a notice.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.wire.secret_managers.aws import AwsService
from holdfast.wire.secret_managers.request import SecretManagerError, ask
from holdfast_platform.clouds.ec2 import Ec2Fleet, Instance, InstanceSettings


class Instances:
    """Instances of one run. environ: what each process gets, with the address of the server."""

    def __init__(self, run: str, environ: dict[str, str], folder: Path) -> None:
        self.fleet = Ec2Fleet(AwsService("ec2", environ, ask), run, InstanceSettings("", ""))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.seen: dict[str, tuple[str, float, float]] = {}
        """By id: its offer, when it was ordered, and when it was last seen alive; since 1970."""
        self._environ, self._folder = environ, folder
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def live(self) -> list[Instance]:
        return [each for each in self.fleet.instances() if each.is_live]

    def reclaim(self, instance: Instance) -> None:
        """Power it off, then list it as terminated."""
        with self._lock:
            os.killpg(self.processes[instance.id].pid, signal.SIGKILL)
            self.fleet.end([instance.id])

    def close(self) -> None:
        self._closing.set()
        self._thread.join(60)
        for each in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait(60)

    def _keep(self) -> None:
        ended = set[str]()
        while not self._closing.wait(0.2):
            # A busy server may answer too late.
            with self._lock, suppress(SecretManagerError):
                for each in self.fleet.instances():
                    if each.is_live:
                        self.seen[each.id] = each.offer, each.launched, time.time()
                    if each.is_live and each.id not in self.processes:
                        self.processes[each.id] = self._start(each)
                    elif not each.is_live and each.id in self.processes.keys() - ended:
                        ended.add(each.id)
                        self.processes[each.id].terminate()

    def _start(self, instance: Instance) -> subprocess.Popen[bytes]:
        asked = {"InstanceId": instance.id, "Attribute": "userData"}
        page = self.fleet._ask("DescribeInstanceAttribute", asked)
        folder = self._folder / instance.node
        folder.mkdir(parents=True)
        script = folder / "user-data"
        script.write_bytes(base64.b64decode(page.findtext("userData/value") or ""))
        own = {
            "XDG_CACHE_HOME": str(folder),
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        }
        with (folder / "log").open("wb") as out:
            return subprocess.Popen(
                ["/bin/sh", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | self._environ | own,
                start_new_session=True,
            )


@contextmanager
def instances_of(run: str, environ: dict[str, str], folder: Path) -> Iterator[Instances]:
    found = Instances(run, environ, folder)
    try:
        yield found
    finally:
        found.close()
