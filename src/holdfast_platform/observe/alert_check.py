"""Posts the result of a check-up to `observe.webhook`, as an alert of Alertmanager's format."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.config.sections.observe import FROM_ENVIRONMENT, TOKEN_VARIABLE, WEBHOOK_VARIABLE
from holdfast.doctor.checks import Check
from holdfast.report.alerts.catalogue import Alert
from holdfast.report.alerts.evaluate import Change, webhook_body
from holdfast.report.alerts.webhook import NotConnectedError, post

ALERT = "ReadinessCheck"
PAGE = "docs/guide/ready.md"
_NAME = "alert"


def deliver_alert(config: RunConfig, environ: Mapping[str, str], checks: Sequence[Check]) -> Check:
    """Post that the alert fires, and unless a check has failed, that it is over. Return the check
    that both were taken."""
    address = config.observe.webhook
    if address == FROM_ENVIRONMENT:
        address = environ.get(WEBHOOK_VARIABLE, "")
    if not address:
        found = "no address gets alerts, so none was posted"
        return Check(_NAME, "weak", found, "set observe.webhook", "observe.webhook")
    failed = [check.name for check in checks if check.state == "fails"]
    began, token = time.time(), environ.get(TOKEN_VARIABLE, "")
    sent = 0
    try:
        for resolved_at in (None,) if failed else (None, began):
            post(address, token, _body(config.name, failed, began, resolved_at))
            sent += 1
    except (OSError, NotConnectedError) as error:
        remedy = "see whether the address and HOLDFAST_WEBHOOK_TOKEN are right"
        return Check(_NAME, "fails", f"the webhook did not take it: {error}", remedy, PAGE)
    words = "it fires" if failed else "it fired, and is over"
    return Check(_NAME, "good", f"the webhook took {ALERT} ({words}), in {sent} requests")


def _body(run: str, failed: Sequence[str], began: float, resolved_at: float | None) -> Any:
    summary = f"the readiness check of {run} failed: {', '.join(failed)}"
    if not failed:
        summary = f"the readiness check of {run} tries whether alerts arrive"
    alert = Alert(ALERT, (), "ticket" if failed else "chat", "readiness", summary)
    body = webhook_body(run, [Change(alert, began, resolved_at)])
    for each in (body["commonAnnotations"], *(one["annotations"] for one in body["alerts"])):
        each["runbook_url"] = PAGE
    return body
