"""The Open Service Broker: a real process, asked over HTTP."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
import yaml

from holdfast.config.sections.launch import LaunchConfig
from holdfast_platform.broker.messages import PLANS
from tests.support.commands import apart, secret_file, start, write_run_file
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


# --- what is asked of it ------------------------------------------------------------------------
ONE = "service_instances/one"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    made = Broker(tmp_path_factory.mktemp("broker"))
    made.start()
    yield made
    assert "Traceback" not in made.stop()


def test_the_catalogue_has_a_plan_for_each_owner(broker: Broker) -> None:
    status, answer, headers = broker.ask(
        "GET", "catalog", more={"X-Broker-API-Request-Identity": "abc"}
    )
    assert status == 200
    assert headers["X-Broker-API-Request-Identity"] == "abc"
    (service,) = answer["services"]
    assert {"id", "name", "description", "bindable", "plans"} <= set(service)
    assert [plan["name"] for plan in service["plans"]] == list(PLANS)
    assert set(PLANS) == set(get_args(LaunchConfig.model_fields["on"].annotation))
    for plan in service["plans"]:
        assert plan["id"] == f"{SERVICE}-{plan['name']}"


def test_it_listens_on_the_named_address_alone(broker: Broker) -> None:
    assert broker.process is not None
    found = psutil.Process(broker.process.pid).net_connections()
    (listener,) = (each for each in found if each.status == psutil.CONN_LISTEN)
    assert f"{listener.laddr.ip}:{listener.laddr.port}" == broker.address
    assert listener.laddr.ip == "127.0.0.1"


def test_a_wrong_password_is_refused(broker: Broker) -> None:
    for given in (None, "Basic", "Basic !", basic("holdfast:"), basic("holdfast:wrong"), "x"):
        status, answer, headers = broker.ask("GET", "catalog", more={"Authorization": given})
        assert status == 401, given
        assert answer["description"]
        assert headers["WWW-Authenticate"].startswith("Basic")


def test_another_version_is_refused(broker: Broker) -> None:
    for version in (None, "", "1.0", "2.12", "3.0", "two"):
        status, answer = broker("GET", "catalog", X_Broker_API_Version=version)
        assert status == 412, version
        assert "X-Broker-API-Version" in answer["description"]


WRONG: list[tuple[str, str, object, int, str]] = [
    ("PUT", ONE, wanted({}), 422, "asynchronous"),
    ("DELETE", ONE + plan_query().replace("true", "false"), None, 422, "asynchronous"),
    ("DELETE", ONE + ASYNC, None, 400, "service_id"),
    ("DELETE", ONE + plan_query(), None, 410, "no instance"),
    ("DELETE", f"{ONE}/service_bindings/b{plan_query()}", None, 410, "no instance"),
    ("GET", ONE, None, 404, "not provisioned"),
    ("GET", f"{ONE}/last_operation", None, 404, "no instance"),
    ("PATCH", ONE, {}, 405, "Method"),
    ("GET", "nothing", None, 404, "Not Found"),
    ("PUT", f"service_instances/..%2F..%2Fx{ASYNC}", wanted({}), 404, "Not Found"),
    ("PUT", f"service_instances/..{ASYNC}", wanted({}), 400, "begins with no"),
    ("PUT", f"service_instances/.lock{ASYNC}", wanted({}), 400, "begins with no"),
    ("PUT", f"service_instances/{'a' * 129}{ASYNC}", wanted({}), 400, "128"),
    ("PUT", ONE + ASYNC, wanted({}, "moon"), 400, "plan_id"),
    ("PUT", ONE + ASYNC, {"plan_id": f"{SERVICE}-local"}, 400, "parameters.run"),
    ("PUT", ONE + ASYNC, wanted([]), 400, "parameters.run"),
    ("PUT", ONE + ASYNC, wanted({"trane": {}}), 400, "trane"),
    ("PUT", ONE + ASYNC, wanted({}, nodes=0), 400, "nodes"),
    ("PUT", ONE + ASYNC, wanted({}, nodes=True), 400, "nodes"),
    ("PUT", ONE + ASYNC, wanted({}, overrides=["--fresh"]), 400, "overrides"),
    ("PUT", ONE + ASYNC, wanted({}, command="sh"), 400, "command"),
    ("PUT", ONE + ASYNC, b"{", 400, "not JSON"),
    ("PUT", ONE + ASYNC, b'{"a": NaN}', 400, "not JSON"),
    ("PUT", ONE + ASYNC, b'{"a": "\\ud800"}', 400, "not JSON"),
    ("PUT", ONE + ASYNC, b"[" * 90_000, 400, "not JSON"),
    ("PUT", ONE + ASYNC, b'{"a":' * 40 + b"1" + b"}" * 40, 400, "levels"),
    ("PUT", ONE + ASYNC, b" " * 300_000, 413, "bytes"),
]


def test_what_is_wrong_is_refused_in_one_sentence(broker: Broker) -> None:
    for method, path, body, status, words in WRONG:
        found, answer = broker(method, path, body)
        assert (found, words in answer["description"]) == (status, True), (path, answer)
        assert not (broker.folder / "one").exists(), "nothing stays of a refused request"


def test_a_launch_that_fails_says_why(broker: Broker, tmp_path: Path) -> None:
    run = yaml.safe_load(write_run_file(tmp_path).read_text())
    path, body = "service_instances/without-hosts", wanted(run, "ssh")
    assert broker("PUT", path + ASYNC, body) == (202, {"operation": "provision"})
    status, answer = broker.wait("without-hosts")
    assert (status, answer["state"]) == (200, "failed")
    assert "launch.ssh.hosts" in answer["description"]
    assert broker("PUT", path + ASYNC, wanted(run))[0] == 409
    assert broker("PUT", f"{path}/service_bindings/b", {"service_id": SERVICE})[0] == 400
    assert broker("DELETE", path + plan_query())[0] == 400, "another plan"
    other = {"service_id": SERVICE, "plan_id": f"{SERVICE}-ssh"}
    status, answer = broker("PUT", f"{path}/service_bindings/b", other)
    assert (status, answer["error"]) == (422, "ConcurrencyError")
    status, answer = broker("PUT", f"service_instances/same{ASYNC}", wanted(run))
    assert (status, "without-hosts has the run folder" in answer["description"]) == (400, True)
    assert broker("DELETE", path + plan_query("ssh")) == (202, {"operation": "deprovision"})
    assert broker.wait("without-hosts")[0] == 410


def test_a_foreign_file_is_named(broker: Broker) -> None:
    (broker.folder / "foreign").mkdir()
    (broker.folder / "foreign/instance.json").write_text("{}")
    status, answer = broker("GET", "service_instances/foreign/last_operation")
    assert (status, "instance.json" in answer["description"]) == (500, True)
    shutil.rmtree(broker.folder / "foreign")


@pytest.mark.slow
def test_a_run_is_provisioned_and_deprovisioned_over_restarts(tmp_path: Path) -> None:
    run = yaml.safe_load(write_run_file(tmp_path).read_text())
    run["train"] |= {"steps": 100_000}
    run["cluster"] = {"places": 1, "beat_seconds": 0.5, "settle_seconds": 0.5, "min_nodes": 2}
    broker, path, body = Broker(tmp_path), ONE, wanted(run, nodes=2)
    broker.start()
    assert broker("PUT", path + ASYNC, body) == (202, {"operation": "provision"})
    broker.kill()  # its child is at work: the next broker waits for it
    broker.start()
    assert broker("PUT", path + ASYNC, body)[0] in (200, 202)
    status, answer = broker.wait("one")
    assert (status, answer["state"]) == (200, "succeeded"), answer
    assert broker("PUT", path + ASYNC, body) == (200, {})
    assert broker("PUT", path + ASYNC, wanted(run, nodes=1))[0] == 409
    assert broker("GET", path)[1]["parameters"]["nodes"] == 2

    plan = {"service_id": SERVICE, "plan_id": f"{SERVICE}-local"}
    binding = f"{path}/service_bindings/b"
    assert broker("PUT", binding, plan)[0] == 201
    status, answer = broker("PUT", binding, plan)
    assert status == 200
    credentials = answer["credentials"]
    assert credentials["store"] == str(tmp_path / "run")
    secret = Path(credentials["secret_file"])
    assert secret.read_text().strip() not in str(answer)
    listed = apart(*credentials["commands"]["status"][1:])
    assert listed.code == 0, listed.err
    assert listed.out.count("running") == 2
    assert broker("DELETE", binding + plan_query())[0] == 200
    assert broker("DELETE", binding + plan_query())[0] == 410

    assert broker("DELETE", path + plan_query()) == (202, {"operation": "deprovision"})
    broker.stop()
    broker.start()
    assert broker.wait("one")[0] == 410
    assert broker("DELETE", path + plan_query())[0] == 410
    broker.stop()
    assert apart("status", tmp_path / "run").code == 1
    assert [each for each in _command_lines() if str(tmp_path) in each] == []


def _command_lines() -> Iterator[str]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            yield " ".join(process.cmdline())
