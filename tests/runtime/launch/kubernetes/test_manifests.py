"""What is submitted to Kubernetes: as files, and as the definitions of its kinds accept it."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.errors import ConfigError
from holdfast.launch.owners.kubernetes.manifests import make_objects
from holdfast.launch.owners.kubernetes.owner import KubernetesOwner
from holdfast.launch.owners.owner import LaunchRequest
from tests.support.commands import within
from tests.support.kubernetes_definitions import problems
from tests.support.ranks import ROOT

GOLDEN = ROOT / "tests/golden/kubernetes"
RUN_FILE = """\
name: big-run
folder: /runs/big-run
data: {folder: /runs/dataset, sources: [{path: /texts}]}
cluster: {places: 8, min_nodes: 2, grace_seconds: 60}
launch:
  on: kubernetes
  kubernetes:
    image: registry.example/holdfast:1
    claim: runs
    cpu: "32"
    memory: 256Gi
    gpus: 8
    tolerations: ["nvidia.com/gpu:NoSchedule"]
"""
QUEUE = ["launch.kubernetes.queue=team", "launch.kubernetes.priority_class=high"]
RACK = ["launch.kubernetes.topology=required", "launch.kubernetes.topology_level=example.com/rack"]
GIVEN: dict[str, list[str]] = {
    "job": [*QUEUE],
    "jobset": [*QUEUE, *RACK],
    "volcano": [
        *QUEUE,
        "launch.kubernetes.topology=required",
        "launch.kubernetes.topology_level=2",
    ],
    "trainer": [*QUEUE, "launch.kubernetes.topology=preferred", RACK[1]],
    "kuberay": [*RACK, "launch.kubernetes.pull_secret=registry"],
    "yunikorn": [*QUEUE, *RACK, "launch.kubernetes.node_selector=[example.com/pool=a]"],
    "kubedl": ["launch.kubernetes.resources=[rdma/hca=1]", "launch.kubernetes.secret=mine"],
}


def config_of(*given: str) -> RunConfig:
    return resolve_config(RUN_FILE, "run.yaml", list(given)).config


def request_of(*given: str, location: str = "/runs/big-run", spares: int = 0) -> LaunchRequest:
    config, folder = config_of(*given), Path("/runs/big-run")
    return LaunchRequest(
        "big-run", location, folder, folder / "secret", config, 4, spares, ("cluster.places=8",)
    )


def pods_in(value: Any) -> list[dict[str, Any]]:
    """Every pod's spec within an object."""
    if isinstance(value, list):
        return [pod for each in value for pod in pods_in(each)]
    if not isinstance(value, dict):
        return []
    if "containers" in value:
        return [value]
    return [pod for each in value.values() for pod in pods_in(each)]


def agents_in(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    containers = [each for pod in pods_in(made) for each in pod["containers"]]
    return [each for each in containers if each.get("command") == ["holdfast"]]


@pytest.mark.parametrize("kind", GIVEN)
def test_a_dry_run_prints_the_golden_objects_and_their_definitions_accept_them(
    kind: str, tmp_path: Path
) -> None:
    """HOLDFAST_WRITE_GOLDEN=1 writes the files."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text(RUN_FILE)
    given = [f"launch.kubernetes.kind={kind}", *GIVEN[kind]]
    command = ["launch", run_file, "--on", "kubernetes", "--nodes", "4", "--dry-run", *given]
    shown = within(*command)
    assert shown.code == 0, shown.err
    golden = GOLDEN / f"{kind}.yaml"
    if os.environ.get("HOLDFAST_WRITE_GOLDEN"):
        golden.write_text(shown.out)
    assert shown.out == golden.read_text()
    made = list(yaml.safe_load_all(shown.out))
    found = [problem for each in made for problem in problems(each)]
    unknown = ["no definition of training.kubedl.io/v1alpha1 PyTorchJob is at hand"]
    assert found == (unknown if kind == "kubedl" else [])


def test_the_checker_refuses_what_an_api_server_would() -> None:
    job = make_objects(request_of("launch.kubernetes.kind=jobset"))[-1]
    template = ("spec", "replicatedJobs", 0, "template", "spec")
    for path, value, word in [
        ((*template, "template", "spec", "containers", 0, "imagge"), "x", "imagge"),
        ((*template, "completions"), "four", "integer"),
        (("spec", "failurePolicy", "restartStrategy"), "Never", "not one of"),
        (("spec", "replicas"), 4, "replicas"),
    ]:
        bad: Any = copy.deepcopy(job)
        place = bad
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert [word in problem for problem in problems(bad)] == [True], (path, problems(bad))


@pytest.mark.parametrize("kind", GIVEN)
def test_each_node_joins_with_the_secret_mounted_and_is_replaced_alone(kind: str) -> None:
    made = make_objects(request_of(f"launch.kubernetes.kind={kind}", *GIVEN[kind], spares=1))
    for agent in agents_in(made):
        assert agent["args"][:4] == ["join", "/runs/big-run", "--node", "$(HOLDFAST_POD_NAME)"]
        assert {"cluster.notices=kubernetes", "cluster.left_exit_code=143"} <= set(agent["args"])
        assert "cluster.grace_seconds=60" in agent["args"]
        values = {each["name"]: each.get("value") for each in agent["env"]}
        assert values["HOLDFAST_SECRET_FILE"] == "/etc/holdfast/secret"
        assert agent["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    for pod in pods_in(made):
        assert pod["securityContext"]["runAsNonRoot"] is True
        if pod["containers"][0]["name"] != "ray-head":
            assert pod["restartPolicy"] == ("OnFailure" if kind == "kuberay" else "Never")
    assert "'maxRestarts': 0" in str(made) or kind not in ("jobset", "trainer")


def test_a_run_in_a_bucket_needs_no_claim_and_gets_its_credentials_from_a_secret() -> None:
    given = ["launch.kubernetes.claim=''", "launch.kubernetes.environment_from=[s3]"]
    given.append("data.folder=s3://runs/data")
    made = make_objects(request_of(*given, location="s3://runs/big-run"))
    (agent,) = agents_in(made)
    assert agent["args"][1] == "s3://runs/big-run"
    assert agent["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert "persistentVolumeClaim" not in str(made)


def test_two_runs_of_one_name_have_different_objects() -> None:
    one, other = (
        make_objects(
            request_of(f"data.folder=/runs/{where}/data", location=f"/runs/{where}/big-run")
        )[-1]["metadata"]["name"]
        for where in "ab"
    )
    assert one != other
    assert max(len(one), len(other)) <= 40


def test_the_secret_is_in_no_dry_run() -> None:
    text = KubernetesOwner().describe(request_of())
    assert text.startswith("# Secret hf-big-run-")
    assert "kind: Secret" not in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["launch.kubernetes.claim=''"], "claim=NAME"),
        (["launch.kubernetes.claim_at=/mnt"], "claim_at=/runs"),
        (["launch.kubernetes.image=''"], "no image"),
        (["device=cuda", "launch.kubernetes.gpus=0"], "gpus=8"),
        (["launch.kubernetes.topology=required"], "needs a level"),
        (["launch.kubernetes.kind=volcano", *RACK], "a number"),
        (["launch.kubernetes.tolerations=[gpu]"], "KEY:NoSchedule"),
        (["launch.kubernetes.node_selector=[a b]"], "NAME=VALUE"),
        (["launch.kubernetes.memory=much"], "launch.kubernetes.memory"),
        (["launch.kubernetes.node_selector=[a=1, a=2]"], "a=2 and a=1 are both given; use one"),
        (["launch.kubernetes.resources=[x/y=1, x/y=2]"], "x/y=2 and x/y=1 are both given"),
        (["launch.kubernetes.resources=[nvidia.com/gpu=1]"], "gpu=1 and nvidia.com/gpu=8 are"),
        (
            ["launch.kubernetes.cpu=2", "launch.kubernetes.resources=[cpu=1]"],
            "cpu=1 and cpu=2 are both given",
        ),
        (["launch.kubernetes.resources=[x/y=many]"], "NAME=QUANTITY"),
        (["launch.kubernetes.resources=[x/y=]"], "NAME=QUANTITY"),
        (["launch.kubernetes.image='a b'"], "launch.kubernetes.image"),
        (["launch.kubernetes.queue='a b'"], "launch.kubernetes.queue"),
        (["launch.kubernetes.queue=Team"], "no name of an object"),
        (["launch.kubernetes.namespace=a.b"], "launch.kubernetes.namespace"),
        (
            ["launch.kubernetes.memory=1Gi", "launch.kubernetes.shared_memory=2G"],
            "shared memory of 2G .* use at most 1Gi",
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_its_key(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_objects(request_of(*given))
    assert "launch.kubernetes" in str(caught.value)


def test_a_dry_run_names_all_that_pods_lack_as_the_real_call_does() -> None:
    lacking = [f"launch.kubernetes.{key}=''" for key in ("image", "claim")]
    request = request_of(*lacking, "data.folder=/home/me/data", "launch.kubernetes.claim_at=/mnt")
    for call in (KubernetesOwner().describe, KubernetesOwner().check, KubernetesOwner().submit):
        with pytest.raises(ConfigError) as caught:
            call(request)
        told = str(caught.value).splitlines()
        words = ("no image", "claim=NAME", "claim_at=/runs", "cannot reach the dataset in /home/me")
        assert [word in line for word, line in zip(words, told, strict=True)] == [True] * 4
