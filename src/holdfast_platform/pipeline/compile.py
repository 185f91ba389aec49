"""Turns a pipeline into files of other programs. Each stage is a step there.

A step calls `holdfast pipeline run FILE --only STAGE`. The order comes from the references. A retry
of a step continues its stage, so retries stay with the scheduler.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.config.loading.yaml_tree import dump
from holdfast_platform.pipeline.file import Pipeline, references
from holdfast_platform.pipeline.stages import NO_RETRY, Stage

RETRIES = 5  # of a step; a machine that is taken back costs one


@dataclass(frozen=True)
class Target:
    """What the steps of a compiled pipeline need."""

    file: str  # the pipeline file, where the steps run
    image: str = ""  # of containers that have Holdfast
    claim: str = ""  # PersistentVolumeClaim with the pipeline file's folder
    claim_at: str = ""  # where containers mount it


def words_of_step(target: Target, stage: Stage) -> list[str]:
    return ["holdfast", "pipeline", "run", target.file, "--only", stage.name]


def needs(stage: Stage) -> list[str]:
    """Return the stages that a stage refers to, each once."""
    return list(dict.fromkeys(other for other, _ in references(dict(stage.values))))


def to_kubeflow(pipeline: Pipeline, target: Target) -> str:
    """Return a pipeline of Kubeflow Pipelines 2 in its own YAML (`PipelineSpec`, 2.1.0). A second
    document mounts the claim (`PlatformSpec`)."""
    executors, components, tasks, mounts = {}, {}, {}, {}
    for stage in pipeline.stages:
        name = stage.name.replace("_", "-")
        command, *arguments = words_of_step(target, stage)
        executors[f"exec-{name}"] = {
            "container": {"image": target.image, "command": [command], "args": arguments}
        }
        components[f"comp-{name}"] = {"executorLabel": f"exec-{name}"}
        tasks[name] = {
            "cachingOptions": {},  # off: the stage itself knows what is done
            "componentRef": {"name": f"comp-{name}"},
            "retryPolicy": {"maxRetryCount": RETRIES, "backoffDuration": "10s"},
            "taskInfo": {"name": name},
        }
        if before := [other.replace("_", "-") for other in needs(stage)]:
            tasks[name]["dependentTasks"] = before
        mount = {
            "constant": target.claim,
            "mountPath": target.claim_at,
            "pvcNameParameter": {"runtimeValue": {"constant": target.claim}},
        }
        mounts[f"exec-{name}"] = {"pvcMount": [mount]}
    spec = {
        "components": components,
        "deploymentSpec": {"executors": executors},
        "pipelineInfo": {"name": re.sub(r"[^a-z0-9-]", "-", pipeline.name.lower())},
        "root": {"dag": {"tasks": tasks}},
        "schemaVersion": "2.1.0",
        "sdkVersion": "kfp-2.17.3",  # the release whose schema this follows
    }
    platform = {"platforms": {"kubernetes": {"deploymentSpec": {"executors": mounts}}}}
    return dump(spec) + (f"---\n{dump(platform)}" if target.claim else "")


_AIRFLOW = '''\
"""{name}: compiled from {source} by holdfast pipeline compile."""

import subprocess
from datetime import timedelta

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowException, AirflowFailException

STAGES = {stages}  # stage -> the stages that it needs
NO_RETRY = {no_retry}  # refused, over budget: a person has to change something


def run_stage(stage):
    """Run one stage. A retry continues it."""
    code = subprocess.call([{words}, stage])
    if code in NO_RETRY:
        raise AirflowFailException(f"stage {{stage}} ended with exit code {{code}}")
    if code:
        raise AirflowException(f"stage {{stage}} ended with exit code {{code}}; a retry continues")


settings = {{"retries": {retries}, "retry_delay": timedelta(seconds=10)}}
with DAG({dag!r}, schedule=None, catchup=False, default_args=settings) as dag:
    steps = {{
        stage: PythonOperator(task_id=stage, python_callable=run_stage, op_args=[stage])
        for stage in STAGES
    }}
    for stage, needed in STAGES.items():
        for other in needed:
            steps[other] >> steps[stage]
'''


def to_airflow(pipeline: Pipeline, target: Target) -> str:
    """Return a file with one DAG, for Airflow 3."""
    words = ", ".join(map(json.dumps, ("holdfast", "pipeline", "run", target.file, "--only")))
    return _AIRFLOW.format(
        name=pipeline.name.replace('"', "'"),
        source=target.file.replace('"', "'"),
        dag=re.sub(r"[^A-Za-z0-9_.-]", "_", pipeline.name),
        stages=json.dumps({stage.name: needs(stage) for stage in pipeline.stages}),
        words=words,
        no_retry=NO_RETRY,
        retries=RETRIES,
    )


def to_github(pipeline: Pipeline, target: Target) -> str:
    """Return a workflow of GitHub Actions with one job. What the stages made is kept in the cache
    of the repository, so a job that is started again continues."""
    folder = os.path.relpath(pipeline.folder)  # the workflow runs in the repository, too
    cache = {"path": folder, "key": f"{pipeline.name}-${{{{ github.run_id }}}}"}
    steps: list[Mapping[str, Any]] = [
        {"uses": "actions/checkout@v4"},
        {
            "uses": "actions/cache/restore@v4",
            "with": {**cache, "restore-keys": f"{pipeline.name}-"},
        },
        {"run": "pip install holdfast"},
    ]
    steps += [
        {"name": stage.name, "run": shlex.join(words_of_step(target, stage))}
        for stage in pipeline.stages
    ]
    key = f"{pipeline.name}-${{{{ github.run_id }}}}-${{{{ github.run_attempt }}}}"
    steps.append(
        {"if": "always()", "uses": "actions/cache/save@v4", "with": {"path": folder, "key": key}}
    )
    job = {"runs-on": "ubuntu-latest", "timeout-minutes": 360, "steps": steps}
    if target.image:
        job["container"] = target.image
    return dump({"name": pipeline.name, "on": {"workflow_dispatch": None}, "jobs": {"run": job}})


TARGETS: Mapping[str, Callable[[Pipeline, Target], str]] = {
    "kubeflow": to_kubeflow,
    "airflow": to_airflow,
    "github": to_github,
}
