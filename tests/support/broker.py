"""A broker in a process of its own, and requests to it as a platform sends them."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path
from typing import Any

from tests.support.commands import secret_file, start
from tests.support.ranks import wait_until

SERVICE = "holdfast-run"
ASYNC = "?accepts_incomplete=true"


class Broker:
    def __init__(self, root: Path) -> None:
        self.folder = root / "instances"
        self.secret = secret_file(root)
        self.headers = {
            "X-Broker-API-Version": "2.17",
            "Authorization": basic(f"holdfast:{self.secret.read_text()}"),
        }
        self.process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self) -> None:
        settings = ("--runs", self.folder, "--secret", self.secret, "--json")
        self.process = start("broker", *settings)
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["address"]

    def stop(self) -> str:
        """End it as Ctrl-C does; return what it printed to stderr."""
        assert self.process is not None
        self.process.terminate()
        _, err = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, err
        return err

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate()

    def __call__(
        self, method: str, path: str, body: object = None, **headers: str | None
    ) -> tuple[int, Any]:
        """Return status and JSON of the answer. A header of None is left out."""
        status, answer, _ = self.ask(method, path, body, headers)
        return status, answer

    def ask(
        self, method: str, path: str, body: object = None, more: dict[str, str | None] | None = None
    ) -> tuple[int, Any, Any]:
        given = self.headers | {k.replace("_", "-"): v for k, v in (more or {}).items()}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://{self.address}/v2/{path}",
            data=data,
            method=method,
            headers={name: value for name, value in given.items() if value is not None},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read()), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), error.headers

    def wait(self, name: str) -> tuple[int, Any]:
        """Ask for the last operation until it is over."""

        def ended() -> tuple[int, Any] | None:
            status, answer = self("GET", f"service_instances/{name}/last_operation")
            return None if answer.get("state") == "in progress" else (status, answer)

        answer = wait_until(ended, what=f"the end of the operation on {name}", pause_s=0.1)
        assert answer is not None
        return answer


def basic(text: str) -> str:
    return "Basic " + b64encode(text.encode()).decode()


def wanted(run: object, owner: str = "local", **more: object) -> dict[str, object]:
    """The body of a provisioning."""
    plan = f"{SERVICE}-{owner}"
    return {"service_id": SERVICE, "plan_id": plan, "parameters": {"run": run, **more}}


def plan_query(owner: str = "local") -> str:
    return f"{ASYNC}&service_id={SERVICE}&plan_id={SERVICE}-{owner}"
