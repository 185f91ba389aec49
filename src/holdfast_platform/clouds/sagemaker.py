"""Training jobs of Amazon SageMaker by its JSON protocol: one job for each trial of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.wire.secret_managers.aws import AwsService
from holdfast.wire.secret_managers.request import SecretManagerError, json_object

ENDED = ("Completed", "Failed", "Stopped")
STATUSES = (*ENDED, "InProgress", "Stopping", "Deleting")
"""All statuses of a training job that SageMaker's documentation lists."""


@dataclass(frozen=True)
class Trial:
    """One trial as SageMaker describes it."""

    job: str
    settings: Mapping[str, str]  # what tells it from the other trials
    status: str  # InProgress, Completed, Failed, Stopping, Stopped
    detail: str  # the service's secondary status, or why the job failed


class SageMakerJobs:
    """Jobs named `prefix`-NUMBER."""

    def __init__(self, service: AwsService, prefix: str) -> None:
        self._service, self._prefix = service, prefix

    def create(self, job: Mapping[str, Any]) -> None:
        self._ask("CreateTrainingJob", job)

    def stop(self, job: str) -> None:
        self._ask("StopTrainingJob", {"TrainingJobName": job})

    def trials(self) -> list[Trial]:
        """Return all trials that the service lists, by number."""
        names: list[str] = []
        asked: dict[str, Any] = {"NameContains": self._prefix, "MaxResults": 100}
        while True:
            page = self._ask("ListTrainingJobs", asked)
            names += [_said(e, "TrainingJobName") for e in page.get("TrainingJobSummaries") or ()]
            if not (token := page.get("NextToken")):
                break
            asked["NextToken"] = token
        form = re.compile(re.escape(self._prefix) + r"-(\d+)")
        found = {int(match[1]): match[0] for name in names if (match := form.fullmatch(name))}
        return [self._trial(found[number]) for number in sorted(found)]

    def _trial(self, job: str) -> Trial:
        page = self._ask("DescribeTrainingJob", {"TrainingJobName": job})
        detail = page.get("FailureReason") or page.get("SecondaryStatus") or ""
        settings = page.get("HyperParameters") or {}
        status = _said(page, "TrainingJobStatus")
        if status not in STATUSES:
            raise SecretManagerError(
                f"SageMaker says that {job} is {status!r}, a status that is not known here"
            )
        return Trial(job, settings, status, str(detail))

    def _ask(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        headers = {
            "content-type": "application/x-amz-json-1.1",
            "x-amz-target": f"SageMaker.{action}",
        }
        answer = self._service.post(headers, json.dumps(body).encode())
        return json_object(answer or b"{}")  # StopTrainingJob answers with nothing


def _said(answer: Mapping[str, Any], key: str) -> str:
    """Return a value of an answer. Raises SecretManagerError if it lacks it."""
    if not answer.get(key):
        raise SecretManagerError(f"SageMaker's answer has no {key}")
    return str(answer[key])
