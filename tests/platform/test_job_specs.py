"""Jobs of managed services against the services' own schemas.

SageMaker's schema comes with botocore. Runpod's is transcribed from its OpenAPI description. Those
of SkyPilot, Vertex and Azure ML come with their packages. The campaign uses them where they are
installed: pip install skypilot google-cloud-aiplatform azure-ai-ml
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.loaders
import botocore.model
import botocore.validate
import pytest
import yaml

from holdfast.config.loading import yaml_tree
from holdfast.config.run import RunConfig
from holdfast.launch.owners.owner import LaunchRequest
from holdfast_platform.clouds.job_specs import (
    ServiceSettings,
    azure_ml_job,
    job_name,
    join_line,
    runpod_pods,
    sagemaker_job,
    skypilot_task,
    vertex_job,
)

SETTINGS = ServiceSettings(
    "registry.example/holdfast:1",
    "ml.p5.48xlarge",
    "H100",
    8,
    "us-east-1",
    "arn:aws:iam::123456789012:role/trainer",
    spot=True,
    hours=12,
    secret="holdfast-secret",
)
ONE_OF_EACH = [replace(SETTINGS, spot=False, accelerator="", count=0, region=""), SETTINGS]


def request_of(nodes: int = 4) -> LaunchRequest:
    return LaunchRequest(
        "my.run",
        "s3://bucket/runs/mine?region=us-east-1",
        Path("/home/me/runs/mine"),
        Path("/home/me/secret"),
        RunConfig(),
        nodes,
        1,
        ("cluster.places=8",),
    )


@pytest.mark.parametrize("settings", ONE_OF_EACH)
def test_sagemakers_own_schema_accepts_the_request(settings: ServiceSettings) -> None:
    body = sagemaker_job(request_of(), settings)
    model = botocore.loaders.Loader().load_service_model("sagemaker", "service-2")
    service = botocore.model.ServiceModel(model)
    shape = service.operation_model("CreateTrainingJob").input_shape
    report = botocore.validate.ParamValidator().validate(body, shape)
    assert not report.has_errors(), report.generate_report()
    assert body["ResourceConfig"]["InstanceCount"] == 5


_TEXT, _WHOLE, _FLAG = str, int, bool
RUNPOD_POD: dict[str, Any] = {
    "name": _TEXT,
    "imageName": _TEXT,
    "cloudType": ("SECURE", "COMMUNITY"),
    "computeType": ("GPU", "CPU"),
    "interruptible": _FLAG,
    "containerDiskInGb": _WHOLE,
    "globalNetworking": _FLAG,
    "ports": list,
    "dockerEntrypoint": list,
    "dockerStartCmd": list,
    "env": dict,
    "gpuTypeIds": list,
    "gpuCount": _WHOLE,
    "dataCenterIds": list,
}
"""`PodCreateInput` of rest.runpod.io/v1/openapi.json: the keys that are used, and their types."""


@pytest.mark.parametrize("settings", ONE_OF_EACH)
def test_runpods_pods_have_keys_and_types_of_its_description(settings: ServiceSettings) -> None:
    bodies = runpod_pods(request_of(2), settings)
    assert len({body["name"] for body in bodies}) == 3
    for body in bodies:
        for key, value in body.items():
            kind = RUNPOD_POD[key]
            assert value in kind if isinstance(kind, tuple) else isinstance(value, kind), key
        assert len(body["name"]) <= 191
        assert all(isinstance(word, str) for word in body["dockerStartCmd"])


@pytest.mark.slow
@pytest.mark.parametrize("settings", ONE_OF_EACH)
def test_skypilots_own_schema_accepts_the_task(settings: ServiceSettings) -> None:
    schemas, jsonschema = _package("sky.utils.schemas"), _package("jsonschema")
    body = yaml.safe_load(
        yaml_tree.dump(skypilot_task(request_of(), replace(settings, machine="")))
    )
    jsonschema.validate(body, schemas.get_task_schema())
    jsonschema.validate(body["resources"], schemas.get_resources_schema())


@pytest.mark.slow
@pytest.mark.parametrize("settings", ONE_OF_EACH)
def test_vertexs_own_message_takes_the_job(settings: ServiceSettings) -> None:
    types, json_format = (
        _package("google.cloud.aiplatform_v1.types"),
        _package("google.protobuf.json_format"),
    )
    body = vertex_job(request_of(), replace(settings, machine="a3-highgpu-8g"))
    message = json_format.ParseDict(body, types.CustomJob()._pb, ignore_unknown_fields=False)
    assert [pool.replica_count for pool in message.job_spec.worker_pool_specs] == [1, 4]


@pytest.mark.slow
@pytest.mark.parametrize("settings", ONE_OF_EACH)
def test_azures_own_loader_takes_the_job(settings: ServiceSettings, tmp_path: Path) -> None:
    azure = _package("azure.ai.ml")
    path = tmp_path / "job.yaml"
    body = azure_ml_job(request_of(), replace(settings, machine="cluster"))
    path.write_text(yaml_tree.dump(body))
    job = azure.load_job(path)
    assert job.resources.instance_count == 5
    assert job.distribution.process_count_per_instance == 1


def _package(name: str) -> Any:
    """A package of a service, which the campaign uses where it is installed."""
    return pytest.importorskip(name, reason=f"pip install the package of {name}")


def test_no_job_holds_the_secret_or_its_value() -> None:
    bodies = [
        sagemaker_job(request_of(), SETTINGS),
        vertex_job(request_of(), SETTINGS),
        azure_ml_job(request_of(), SETTINGS),
        *runpod_pods(request_of(), SETTINGS),
    ]
    for body in bodies:
        assert "/home/me/secret" not in str(body)
        assert "holdfast-secret" in str(body)


def test_a_node_joins_under_the_name_that_the_shell_fills_in() -> None:
    line = join_line(request_of(), "node-$RANK")
    assert line == (
        "exec holdfast join 's3://bucket/runs/mine?region=us-east-1' --node \"node-$RANK\" "
        "cluster.places=8"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [("my.run", "holdfast-my-run"), ("_", "holdfast"), ("a" * 90, "holdfast-" + "a" * 51)],
)
def test_names_are_what_every_service_accepts(name: str, expected: str) -> None:
    assert job_name(replace(request_of(), name=name)) == expected
