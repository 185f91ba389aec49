"""Remedies of messages about Kubernetes. Its kubectl answers from a table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from re import Match
from typing import Any

import pytest

from holdfast.launch.owners.kubernetes.owner import KubernetesOwner
from tests.runtime.cli.remedies.lab import Case, Lab, Mend, case
from tests.runtime.launch.kubernetes.test_manifests import request_of
from tests.support.fake_kubectl import FakeKubectl

KUBECTL, POD = "launch/owners/kubernetes/kubectl.py: ", "launch/owners/kubernetes/pod.py: "


def given(*words: str, nodes: int = 0, dataset: str = "", **says: str) -> Callable[[Lab], None]:
    """words: settings of the run. nodes: another number of them is asked for. dataset: its folder.
    says: complaints of kubectl, by its command."""

    def begin(lab: Lab) -> None:
        lab.settings |= {"given": list(words), "nodes": nodes, "dataset": dataset, "says": says}

    return begin


def launch(lab: Lab) -> None:
    settings = lab.settings
    folder = lab.folder / "run"
    folder.mkdir(exist_ok=True)
    request = replace(request_of(*settings["given"]), folder=folder, secret_file=folder / "secret")
    if settings["dataset"]:
        stored = {"config": {}, "dataset": {"folder": settings["dataset"]}}
        lab.write("run/resolved.json", json.dumps(stored))
    with pytest.MonkeyPatch.context() as patch:
        kubectl = FakeKubectl(lab.folder / "bin").install(patch)
        for part, said in settings["says"].items():
            kubectl.says(f"{part} ", said, 1)
        if settings.get("has_kubectl") is False:
            patch.setenv("PATH", lab.path("nothing"))
        owner = KubernetesOwner()
        job = owner.submit(request)
        if settings["nodes"]:
            owner.resize(job, replace(request, nodes=settings["nodes"]))


def use(lab: Lab, found: Match[str]) -> None:
    """Set the key that the remedy names."""
    lab.settings["given"].append(found[1])


def set_to(word: str) -> Mend:
    return lambda lab, found: lab.settings["given"].append(word)


def other_context(lab: Lab, found: Match[str]) -> None:
    """Of a cluster that answers."""
    lab.settings["says"] = {}
    lab.settings["given"].append("launch.kubernetes.context=other")


def silence(lab: Lab, found: Match[str]) -> None:
    """What an administrator or a login mends."""
    lab.settings["says"] = {}


def without_kubectl(lab: Lab) -> None:
    given()(lab)
    lab.settings["has_kubectl"] = False


def install(lab: Lab, found: Match[str]) -> None:
    assert shutil.which("sh")
    lab.settings["has_kubectl"] = True


def complaint(message: str, said: str, remedy: str, mend: Mend, *more: tuple[str, Mend]) -> Case:
    return case(KUBECTL + message, given(apply=said), launch, remedy, mend, *more)


def of_pod(message: str, word: str, remedy: str, mend: Any) -> Case:
    return case(POD + message, given(word), launch, remedy, mend)


NO_KIND = 'error: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"'

CASES: list[Case] = [
    of_pod(
        "pods cannot reach a run folder on this machine's disk",
        "launch.kubernetes.claim=''",
        r"name the volume that it lies on, with launch\.kubernetes\.claim=NAME",
        set_to("launch.kubernetes.claim=runs"),
    ),
    of_pod(
        "the run folder … does not lie on the claim",
        "launch.kubernetes.claim_at=/mnt",
        r"use (launch\.kubernetes\.claim_at=\S+)",
        use,
    ),
    of_pod(
        "no image is named for the pods",
        "launch.kubernetes.image=''",
        r"build one \(docs/deploy\.md\) and use launch\.kubernetes\.image=NAME:TAG",
        set_to("launch.kubernetes.image=mine:1"),
    ),
    case(
        POD + "device cuda needs accelerators, and pods ask for none",
        given("device=cuda", "launch.kubernetes.gpus=0"),
        launch,
        r"use (launch\.kubernetes\.gpus=\d+)",
        use,
    ),
    case(
        "launch/owners/kubernetes/manifests.py: a … on Kubernetes keeps its number of nodes",
        given("launch.kubernetes.kind=trainer", nodes=5),
        launch,
        r"end it with holdfast down and launch it again, or use one of (\w+), .*",
        lambda lab, found: lab.settings["given"].append(f"launch.kubernetes.kind={found[1]}"),
    ),
    case(
        "launch/owners/kubernetes/owner.py: namespace … has no queue …: …",
        given(
            "launch.kubernetes.queue=team",
            **{"localqueues.kueue.x-k8s.io team": 'Error from server (NotFound): "team" not found'},
        ),
        launch,
        r"choose one of kubectl get localqueues --namespace default",
        set_to("launch.kubernetes.queue=mine"),
    ),
    case(
        "launch/owners/kubernetes/owner.py: pods cannot reach the dataset in …",
        given(dataset="/home/me/dataset"),
        launch,
        r"prepare it on the claim: data\.folder=PATH below launch\.kubernetes\.claim_at",
        lambda lab, found: lab.settings.update(dataset="/runs/dataset"),
    ),
    case(
        KUBECTL + "kubectl is not on PATH",
        without_kubectl,
        launch,
        r"install it: https://kubernetes\.io/docs/tasks/tools",
        install,
    ),
    complaint(
        "the Kubernetes API server does not answer: …",
        "The connection to the server localhost:8080 was refused - did you specify the right host?",
        r"compare with kubectl cluster-info, or set launch\.kubernetes\.context",
        other_context,
    ),
    complaint(
        "kubectl knows no such context: …",
        "Error in configuration: context was not found for specified context: nope",
        r"choose one that kubectl config get-contexts lists",
        other_context,
    ),
    complaint(
        "the cluster does not know …: no controller of it is there",
        NO_KIND,
        r"have it installed, or use launch\.kubernetes\.kind=job",
        silence,
    ),
    complaint(
        "the namespace's quota is used up: …",
        'Error from server (Forbidden): pods "a" is forbidden: exceeded quota: team',
        r"ask for fewer nodes or less of launch\.kubernetes\.cpu, memory and gpus",
        silence,
    ),
    complaint(
        "the cluster has no namespace …",
        'Error from server (NotFound): namespaces "x" not found',
        r"have it made, or use launch\.kubernetes\.namespace=default",
        silence,
    ),
    complaint(
        "the cluster does not accept the credentials: …",
        "error: You must be logged in to the server (Unauthorized)",
        r"log in again",
        silence,
    ),
    complaint(
        "this account may not do that: …",
        'Error from server (Forbidden): jobs.batch is forbidden: User "u" cannot create it',
        r"ask for the rights that docs/kubernetes\.md lists",
        silence,
    ),
]
