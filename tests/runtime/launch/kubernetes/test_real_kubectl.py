"""The owner with a real kubectl, and a server that keeps objects."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import UserError
from holdfast.launch.owners.kubernetes.owner import KubernetesOwner
from holdfast.launch.owners.owner import LaunchRequest, NodeState
from tests.runtime.launch.kubernetes.test_manifests import RACK, request_of
from tests.runtime.launch.kubernetes.test_owner import LEVEL, with_folder
from tests.support.small_kubernetes import SmallKubernetes, small_kubernetes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl on PATH"),
]
CONFIG = """\
apiVersion: v1
kind: Config
clusters: [{name: small, cluster: {server: "%s"}}]
contexts: [{name: small, context: {cluster: small}}]
"""


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallKubernetes]:
    with small_kubernetes() as kube:
        (tmp_path / "config").write_text(CONFIG % kube.address)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        monkeypatch.setenv("HOME", str(tmp_path))  # where kubectl keeps what it has discovered
        yield kube


def request(tmp_path: Path, *given: str) -> LaunchRequest:
    return with_folder(request_of("launch.kubernetes.context=small", *given), tmp_path)


def test_a_run_is_launched_watched_grown_and_given_back(
    kube: SmallKubernetes, tmp_path: Path
) -> None:
    owner, asked = KubernetesOwner(), request(tmp_path)
    job = owner.submit(asked)
    assert kube.names("jobs") == [job.job]
    assert kube.names("secrets") == [f"{job.job}-secret"]
    assert [len(kube.names(each)) for each in ("serviceaccounts", "roles", "rolebindings")] == [
        1
    ] * 3
    found = owner.status(job)
    assert [each.state for each in found] == [NodeState.RUNNING] * 4
    assert found[0].detail == "on machine-0"
    assert list(owner.logs(job, found[0].node)) == ["step 1", "step 2"]
    assert owner.resize(job, replace(asked, nodes=5)).nodes == 5
    assert len(kube.names("pods")) == 5
    assert owner.submit(asked).job == job.job  # in place of the one before
    owner.release(job)
    assert kube.objects == {}
    assert owner.status(job) == []
    owner.release(job)  # a job that has ended is no error


def test_machines_in_two_racks_are_named(kube: SmallKubernetes, tmp_path: Path) -> None:
    job = KubernetesOwner().submit(request(tmp_path, *RACK))
    for number in range(4):
        about = {"name": f"machine-{number}", "labels": {LEVEL: f"r{number // 3}"}}
        kube.put("nodes", {"apiVersion": "v1", "kind": "Node", "metadata": about})
    (found,) = KubernetesOwner().warnings(job)
    assert "r0 (3 machines), r1 (1 machines)" in found


def test_what_the_cluster_refuses_is_one_sentence(kube: SmallKubernetes, tmp_path: Path) -> None:
    kube.refused = {"roles"}
    with pytest.raises(UserError, match=r"may not do that: roles \"hf-big-run-\w+\" is forbidden"):
        KubernetesOwner().submit(request(tmp_path))
    assert kube.objects == {}  # no job runs, and nothing else is left
    with pytest.raises(UserError, match="the cluster does not know jobsets"):
        KubernetesOwner().submit(request(tmp_path, "launch.kubernetes.kind=jobset"))
    with pytest.raises(UserError, match="no such context"):
        KubernetesOwner().submit(request(tmp_path, "launch.kubernetes.context=other"))
    with pytest.raises(UserError, match="does not know localqueues"):
        KubernetesOwner().submit(request(tmp_path, "launch.kubernetes.queue=team"))
    (tmp_path / "config").write_text(CONFIG % "http://127.0.0.1:1")
    with pytest.raises(UserError, match="the Kubernetes API server does not answer"):
        KubernetesOwner().submit(request(tmp_path))
