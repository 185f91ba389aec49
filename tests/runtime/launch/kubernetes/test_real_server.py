"""Every kind of job is accepted by a real API server, which also evaluates CEL rules.

HOLDFAST_KUBE_BIN: folder with `kube-apiserver` and `etcd`. HOLDFAST_KUBE_CRDS: folder with the
definitions of custom kinds, as YAML or JSON; without it only Kubernetes' own kinds are submitted.
`kubectl` has to be on PATH.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.launch.owners.kubernetes.manifests import make_objects, to_yaml
from tests.runtime.launch.kubernetes.test_manifests import GIVEN, request_of
from tests.support.ranks import DEADLINE_S, wait_until

BIN, CRDS = os.environ.get("HOLDFAST_KUBE_BIN"), os.environ.get("HOLDFAST_KUBE_CRDS")
OWN_KINDS = ("job", "yunikorn")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not BIN or shutil.which("kubectl") is None,
        reason="needs HOLDFAST_KUBE_BIN (kube-apiserver, etcd) and kubectl",
    ),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    folder, binaries = tmp_path_factory.mktemp("kube"), Path(str(BIN))
    client, peer, port = free_port(), free_port(), free_port()
    key, tokens = folder / "key.pem", folder / "tokens.csv"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    tokens.write_text("test,admin,1,system:masters\n")
    etcd = [
        *(binaries / "etcd", "--data-dir", folder / "etcd"),
        *("--listen-client-urls", f"http://127.0.0.1:{client}"),
        *("--advertise-client-urls", f"http://127.0.0.1:{client}"),
        *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
    ]
    server = [
        *(binaries / "kube-apiserver", "--etcd-servers", f"http://127.0.0.1:{client}"),
        *("--secure-port", str(port), "--cert-dir", folder / "certificates"),
        *("--authorization-mode", "RBAC", "--token-auth-file", tokens),
        *("--service-account-issuer", "https://test", "--service-account-key-file", key),
        *("--service-account-signing-key-file", key),
    ]

    def call(*arguments: str, given: str = "") -> str:
        command = ["kubectl", f"--server=https://127.0.0.1:{port}", "--token=test"]
        command += ["--insecure-skip-tls-verify", "--request-timeout=30s", *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with (folder / "log").open("wb") as log:
        running = [subprocess.Popen(each, stdout=log, stderr=log) for each in (etcd, server)]
        try:
            _wait_ready(call, folder / "log")
            if CRDS:
                call("create", "-f", CRDS, "--recursive")
                call("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
            yield call
        finally:
            for each in reversed(running):
                each.terminate()
                each.wait()


def _wait_ready(call: Callable[..., str], log: Path) -> None:
    def answers() -> bool:
        with suppress(AssertionError):
            call("get", "namespace", "default")
            return True
        return False

    wait_until(answers, DEADLINE_S, lambda: log.read_text("utf-8", "replace")[-3000:], pause_s=0.5)


@pytest.mark.parametrize("kind", [kind for kind in GIVEN if kind != "kubedl"])
def test_an_api_server_accepts_the_kind(kind: str, kubectl: Callable[..., str]) -> None:
    if kind not in OWN_KINDS and not CRDS:
        pytest.skip("needs HOLDFAST_KUBE_CRDS, the definitions of custom kinds")
    manifest = to_yaml(make_objects(request_of(f"launch.kubernetes.kind={kind}", *GIVEN[kind])))
    told = kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", given=manifest)
    assert "serverside-applied" in told
