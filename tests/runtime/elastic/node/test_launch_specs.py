"""How many idle processes a node keeps."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.elastic.node.launch_specs import standby_count


@pytest.mark.parametrize(
    ("device", "workers", "standbys", "kept"),
    [
        ("cpu", 1, "auto", 0),
        ("cpu", 2, "auto", 1),
        ("cuda", 1, "auto", 1),  # a new process needs seconds there
        ("cuda", 1, 0, 0),
        ("cpu", 1, 2, 2),
    ],
)
def test_standbys_by_device_and_workers(
    device: str, workers: int, standbys: Any, kept: int
) -> None:
    value = {"device": device, "layout": {"workers": workers}, "cluster": {"standbys": standbys}}
    assert standby_count(RunConfig.model_validate(value)) == kept
