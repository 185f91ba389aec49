"""`KubernetesOwner` with a kubectl that answers from a table, in the words of a real one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.launch.owners.kubernetes.kubectl import Kubectl, shorten
from holdfast.launch.owners.kubernetes.owner import KubernetesOwner
from holdfast.launch.owners.kubernetes.status import topology_warnings
from holdfast.launch.owners.owner import LaunchRequest, NodeState, OwnedJob
from tests.runtime.launch.kubernetes.test_manifests import RACK, request_of
from tests.support.fake_kubectl import FakeKubectl, listing

LEVEL = "example.com/rack"
NAME = "hf-big-run-306e47"


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    return FakeKubectl(tmp_path / "bin").install(monkeypatch)


@pytest.fixture
def request_here(tmp_path: Path) -> LaunchRequest:
    """A run whose folder is on this machine, so that it has a secret."""
    return with_folder(request_of(), tmp_path)


def with_folder(request: LaunchRequest, folder: Path) -> LaunchRequest:
    (folder / "run").mkdir(exist_ok=True)
    return replace(request, folder=folder / "run", secret_file=folder / "run/secret")


def pod(name: str, phase: str, node: str = "", **status: Any) -> dict[str, Any]:
    spec = {"nodeName": node} if node else {}
    return {"metadata": {"name": name}, "spec": spec, "status": {"phase": phase, **status}}


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "agent", "restartCount": 0, "state": state}]


def condition(kind: str, status: str, **more: str) -> list[dict[str, Any]]:
    return [{"type": kind, "status": status, **more}]


def job_of(request: LaunchRequest, kubectl: FakeKubectl) -> OwnedJob:
    return KubernetesOwner().submit(request)


JOB = {"metadata": {"name": NAME, "uid": "u1"}, "status": {}}


def test_a_job_is_submitted_with_its_secret_and_given_back(
    kubectl: FakeKubectl, request_here: LaunchRequest
) -> None:
    job = job_of(request_here, kubectl)
    assert (job.owner, job.nodes) == ("kubernetes", 4)
    secret, *others, made = kubectl.applied
    assert secret["stringData"]["secret"] == request_here.secret_file.read_text().strip()
    assert [each["kind"] for each in others] == ["ServiceAccount", "Role", "RoleBinding"]
    assert (made["kind"], made["metadata"]["name"]) == ("Job", job.job)
    assert secret["stringData"]["secret"] not in "".join(kubectl.calls)
    KubernetesOwner().release(OwnedJob.read(_stored(job, request_here.folder)))
    assert [" delete " in call for call in kubectl.calls[-2:]] == [True, True]
    assert f"jobs.batch {job.job}" in kubectl.calls[-2]


def _stored(job: OwnedJob, folder: Path) -> Path:
    job.write(folder)
    return folder


def test_a_job_grows_and_one_that_cannot_says_so(
    kubectl: FakeKubectl, request_here: LaunchRequest
) -> None:
    job = job_of(request_here, kubectl)
    assert KubernetesOwner().resize(job, replace(request_here, nodes=6)).nodes == 6
    assert kubectl.applied[-1]["spec"]["completions"] == 6
    fixed = replace(request_of("launch.kubernetes.kind=jobset"), nodes=6)
    with pytest.raises(UserError, match=r"keeps its number of nodes.*job, volcano"):
        KubernetesOwner().resize(job, fixed)


def test_the_status_of_each_pod_is_in_the_clusters_own_words(
    kubectl: FakeKubectl, request_here: LaunchRequest
) -> None:
    job = replace(job_of(request_here, kubectl), nodes=6)
    pull = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x:1"'}
    gone = {"metadata": {"name": "e", "deletionTimestamp": "2026-11-26T10:00:00Z"}}
    lost = {"spec": {"nodeName": "n5"}, "status": {"phase": "Running", "reason": "NodeLost"}}
    evicted = condition("DisruptionTarget", "True", reason="EvictionByEvictionAPI", message="by x")
    unplaced = condition("PodScheduled", "False", reason="Unschedulable", message="0/4 nodes")
    ended = container(terminated={"exitCode": 137, "reason": "OOMKilled"})
    pods = [
        pod("a", "Running", "n1"),
        pod("b", "Pending", "n2", containerStatuses=container(waiting=pull)),
        pod("c", "Pending", conditions=unplaced),
        pod("d", "Failed", "n4", containerStatuses=ended),
        gone | lost,
        pod("f", "Failed", "n6", conditions=evicted),
        pod("g", "Succeeded", "n7"),
        {"metadata": {"name": "h", "deletionTimestamp": "2126-11-26T10:00:00Z"}}
        | {"spec": {"nodeName": "n8"}, "status": {"phase": "Running"}},
    ]
    quota = 'pods "x" is forbidden: exceeded quota: team, requested: cpu=1'
    event = {
        "involvedObject": {"name": job.job},
        "reason": "FailedCreate",
        "message": quota,
        "lastTimestamp": "2026-11-26T10:00:00Z",
    }
    kubectl.says("get pods", listing(*pods)).says("get jobs.batch", JOB)
    kubectl.says("get events", listing(event))
    found = {each.node: (each.state, each.detail) for each in KubernetesOwner().status(job)}
    assert found["a"] == (NodeState.RUNNING, "on n1")
    assert found["b"] == (NodeState.WAITING, 'ImagePullBackOff: Back-off pulling image "x:1"')
    assert found["c"] == (NodeState.WAITING, "Unschedulable: 0/4 nodes")
    assert found["d"] == (NodeState.FAILED, "exit code 137 (OOMKilled)")
    assert found["e"][0] is NodeState.LOST
    assert found["h"] == (NodeState.RUNNING, "leaves n8, until 2126-11-26T10:00:00Z at most")
    assert "kubectl taint node n5 node.kubernetes.io/out-of-service" in found["e"][1]
    assert found["f"] == (NodeState.LOST, "EvictionByEvictionAPI: by x")
    assert found["g"] == (NodeState.FINISHED, "")
    assert found["pod 6"] == (NodeState.WAITING, f"FailedCreate: {quota}")


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (None, "Kueue has not seen the job"),
        (condition("QuotaReserved", "False", message="insufficient quota for cpu"), "insufficient"),
        (condition("QuotaReserved", "True"), "admitted by Kueue"),
    ],
)
def test_a_job_that_waits_for_kueue_says_what_kueue_says(
    kubectl: FakeKubectl, tmp_path: Path, workload: list[dict[str, Any]] | None, words: str
) -> None:
    job = job_of(with_folder(request_of("launch.kubernetes.queue=team"), tmp_path), kubectl)
    own = {"metadata": {"name": "w", "ownerReferences": [{"uid": "u1"}]}}
    found = [] if workload is None else [own | {"status": {"conditions": workload}}]
    kubectl.says("get pods", listing()).says("get jobs.batch", JOB)
    kubectl.says("get workloads", listing(*found)).says("get events", listing())
    told = KubernetesOwner().status(job)
    assert [each.state for each in told] == [NodeState.WAITING] * 4
    assert words in told[0].detail


def test_a_job_that_has_ended_or_is_unknown_waits_for_nothing(
    kubectl: FakeKubectl, request_here: LaunchRequest
) -> None:
    job = job_of(request_here, kubectl)
    over = {"conditions": condition("Failed", "True", message="too many failed indexes")}
    kubectl.says("get pods", listing()).says("get jobs.batch", JOB | {"status": over})
    (found,) = KubernetesOwner().status(job)
    assert (found.state, found.detail) == (NodeState.FAILED, "too many failed indexes")
    missing = f'Error from server (NotFound): jobs.batch "{job.job}" not found'
    kubectl.says("get jobs.batch", missing, 1)
    assert KubernetesOwner().status(job) == []


def test_logs_name_the_pod_that_printed_them(
    kubectl: FakeKubectl, request_here: LaunchRequest
) -> None:
    job = job_of(request_here, kubectl)
    kubectl.says("get pods", listing(pod("a", "Running", "n1"), pod("b", "Running", "n2")))
    kubectl.says("logs a ", "one\ntwo\n").says("logs b ", "three\n")
    assert list(KubernetesOwner().logs(job, "")) == ["a: one", "a: two", "b: three"]
    assert list(KubernetesOwner().logs(job, "b")) == ["three"]
    starting = 'Error from server (BadRequest): container "agent" in pod "b" is waiting to start: x'
    kubectl.says("logs b ", starting, 1)
    assert list(KubernetesOwner().logs(job, "")) == ["a: one", "a: two"]
    assert list(KubernetesOwner().logs(job, "pod 3")) == []
    with pytest.raises(UserError, match="this job has no node c; use one of a, b"):
        list(KubernetesOwner().logs(job, "c"))


@pytest.mark.parametrize("wish", ["required", "preferred"])
def test_a_topology_that_was_ignored_is_named(
    kubectl: FakeKubectl, tmp_path: Path, wish: str
) -> None:
    given = ["launch.kubernetes.queue=team", *RACK, f"launch.kubernetes.topology={wish}"]
    job = job_of(with_folder(request_of(*given), tmp_path), kubectl)
    kubectl.says("get pods", listing(pod("a", "Running", "n1"), pod("b", "Running", "n2")))

    def warnings(**racks: str) -> list[str]:
        machines = [{"metadata": {"name": n, "labels": {LEVEL: r}}} for n, r in racks.items()]
        kubectl.says("get nodes", listing(*machines))
        return KubernetesOwner().warnings(job)

    assert warnings(n1="r1", n2="r1") == []
    (found,) = warnings(n1="r1", n2="r2")
    assert "several domains of example.com/rack: r1 (1 machines), r2 (1 machines)" in found
    assert ("TopologyAwareScheduling is off" in found) == (wish == "required")
    kubectl.says("get nodes", "Error from server (Forbidden): nodes is forbidden: User x", 1)
    (found,) = KubernetesOwner().warnings(job)
    assert "cannot be read: nodes is forbidden" in found


def test_machines_without_the_label_are_named() -> None:
    (found,) = topology_warnings([pod("a", "Running", "n1")], {"n1": {}}, LEVEL, "required")
    assert "the machines n1 have no label example.com/rack" in found


RECORDED = [  # what kubectl 1.32 printed, and words of our sentence
    (
        "The connection to the server localhost:8080 was refused - did you specify the right host "
        "or port?",
        "does not answer: The connection to the server localhost:8080 was refused",
    ),
    (
        'E1126 19:53:59.262006 5437 memcache.go:265] "Unhandled Error" err="x"\nUnable to connect '
        "to the server: dial tcp: lookup k8s on 10.0.0.1:53: no such host",
        "does not answer: Unable",
    ),
    ('error: context "nope" does not exist', "kubectl knows no such context"),
    (
        "Error in configuration: context was not found for specified context: nope",
        "launch.kubernetes.context: kubectl knows no such context",
    ),
    (
        'error: resource mapping not found for name: "a" namespace: "b" from "STDIN": no '
        'matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"\nensure CRDs',
        "the cluster does not know JobSet",
    ),
    ('error: the server doesn\'t have a resource type "jobsets"', "does not know jobsets"),
    (
        'Error from server (NotFound): error when creating "STDIN": namespaces "x" not found',
        "launch.kubernetes.namespace: the cluster has no namespace",
    ),
    (
        "Error from server (Forbidden): roles.rbac.authorization.k8s.io is forbidden: User "
        '"u" cannot create resource "roles"',
        "this account may not do that: roles.rbac",
    ),
    (
        'Error from server (Forbidden): error when creating "STDIN": pods "a" is forbidden: '
        "exceeded quota: team",
        "the namespace's quota is used up: pods",
    ),
    ("error: You must be logged in to the server (Unauthorized)", "not accept the credentials"),
]


@pytest.mark.parametrize(("said", "words"), RECORDED)
def test_what_kubectl_complains_of_is_one_sentence(
    kubectl: FakeKubectl, said: str, words: str
) -> None:
    kubectl.says("get pods", said, 1)
    with pytest.raises(UserError) as caught:
        Kubectl("", "default").get("pods")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_without_kubectl_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="kubectl is not on PATH"):
        Kubectl("", "default").get("pods")


def test_a_queue_that_does_not_exist_is_refused_before_anything_is_made(
    kubectl: FakeKubectl, tmp_path: Path
) -> None:
    request = with_folder(request_of("launch.kubernetes.queue=team"), tmp_path)
    kubectl.says("get localqueues", 'Error from server (NotFound): localqueues "team" not found', 1)
    with pytest.raises(
        UserError, match=r"launch\.kubernetes\.queue: namespace default has no queue"
    ):
        KubernetesOwner().submit(request)
    assert not any(" apply " in call for call in kubectl.calls)


def test_a_dataset_that_pods_cannot_reach_is_refused(kubectl: FakeKubectl, tmp_path: Path) -> None:
    request = with_folder(request_of("data.folder=/home/me/dataset"), tmp_path)
    with pytest.raises(UserError, match=r"data\.folder: pods cannot reach the dataset"):
        KubernetesOwner().submit(request)
    assert kubectl.calls == []


def test_a_dataset_that_moved_to_the_claim_is_not_sought_where_the_run_had_it(
    kubectl: FakeKubectl, tmp_path: Path
) -> None:
    """A run that trained on this machine continues in pods."""
    request = with_folder(request_of(), tmp_path)
    stored = {"config": {}, "dataset": {"folder": "/home/me/dataset"}}
    (request.folder / "resolved.json").write_text(json.dumps(stored))
    assert KubernetesOwner().submit(request).nodes == 4


def test_long_complaints_are_cut() -> None:
    assert len(shorten("error: " + "x" * 1000)) == 300
