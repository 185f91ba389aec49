"""`holdfast cloud trials` against a server that speaks SageMaker's protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import botocore.loaders
import botocore.model
import botocore.validate
import pytest

from holdfast.wire.secret_managers.aws import AwsService
from holdfast.wire.secret_managers.request import ask
from holdfast.wire.store.location import open_store
from holdfast_platform.clouds.sagemaker import SageMakerJobs
from tests.support import s3
from tests.support.commands import secret_file, within, write_run_file

RATES = "train.optimizer.learning_rate"
JOB = ("--image", "ecr/holdfast", "--machine", "ml.g5.xlarge", "--secret", "tiny")
ROLE = ("--role", "arn:aws:iam::123456789012:role/trainer")


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    host, port = s3.server()
    found = {**s3.CREDENTIALS, "AWS_REGION": "us-east-1"}
    found |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "XDG_CACHE_HOME": str(tmp_path / "c")}
    for name, value in {**found, "HOLDFAST_SECRET_FILE": str(secret_file(tmp_path))}.items():
        monkeypatch.setenv(name, value)
    return found


def accepted(action: str, body: Mapping[str, Any]) -> None:
    """Check a request against the service's own model."""
    model = botocore.loaders.Loader().load_service_model("sagemaker", "service-2")
    shape = botocore.model.ServiceModel(model).operation_model(action).input_shape
    report = botocore.validate.ParamValidator().validate(dict(body), shape)
    assert not report.has_errors(), report.generate_report()


def test_each_trial_is_a_run_and_a_job(environ: dict[str, str], tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    place = s3.location(s3.server())
    words = ("cloud", "trials", run_file, f"folder={place}")
    submitted = within(*words, "--each", f"{RATES}=0.001,0.0003", *JOB, *ROLE).succeeds()
    assert "submitted holdfast-tiny-1" in submitted.err + submitted.out
    shown = within(*words).succeeds().out
    assert [line.split()[:3] for line in shown.splitlines()[1:]] == [
        ["holdfast-tiny-0", f"{RATES}=0.001", "Completed"],
        ["holdfast-tiny-1", f"{RATES}=0.0003", "Completed"],
    ], shown
    path, _, query = place.partition("?")
    resolved = open_store(f"{path}-trial-1?{query}").get("resolved.json")
    assert json.loads(resolved)["config"]["train"]["optimizer"]["learning_rate"] == 0.0003
    page = SageMakerJobs(AwsService("sagemaker", environ, ask), "holdfast-tiny")._ask(
        "DescribeTrainingJob", {"TrainingJobName": "holdfast-tiny-1"}
    )
    (line,) = page["AlgorithmSpecification"]["ContainerEntrypoint"][2:]
    assert f"{path.rpartition('/')[2]}-trial-1" in line


def test_a_job_that_has_not_ended_is_stopped(environ: dict[str, str]) -> None:
    """The server's jobs end at once and it knows no stop: this one's request is compared with the
    service's model."""
    asked: list[str] = []

    def service(method: str, url: str, headers: Mapping[str, str], body: bytes) -> bytes:
        action = headers["x-amz-target"].partition(".")[2]
        accepted(action, json.loads(body))
        asked.append(action)
        return b"" if action == "StopTrainingJob" else ask(method, url, headers, body)

    jobs = SageMakerJobs(AwsService("sagemaker", environ, service), "holdfast-other")
    assert jobs.trials() == []
    jobs.stop("holdfast-other-0")
    assert asked == ["ListTrainingJobs", "StopTrainingJob"]


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("--each", f"{RATES}=1,1", *JOB, *ROLE), "--each"),
        (("--each", f"{RATES}=1", *JOB), "--role"),
        (("--each", f"{RATES}=1", "--stop", *JOB, *ROLE), "--each"),
        (("--each", f"{RATES}=1", *JOB, *ROLE), "folder"),
    ],
)
def test_what_cannot_be_submitted_is_refused(
    words: tuple[str, ...], place: str, environ: dict[str, str], tmp_path: Path
) -> None:
    within("cloud", "trials", write_run_file(tmp_path), *words).refuses(place)
