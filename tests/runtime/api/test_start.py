"""A start resolves its configuration once: it is validated when it is read, and at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.start import start
from holdfast.config.run import RunConfig
from holdfast.launch import local
from tests.support.commands import write_run_file
from tests.support.marks import in_campaign

LEFT_OPEN = ("device=auto", "layout.workers=0", "train.microbatch_size=auto")
WAYS: dict[str, tuple[str, ...]] = {
    "given": (),
    "left open": (*LEFT_OPEN, "train.memory.device_gb=1"),
    "layout auto": ("layout.mode=auto",),
    "an optimizer by its path": ("train.optimizer.name=torch.optim:RMSprop",),
    "one of several nodes": ("cluster.node=a", "cluster.places=2"),
}


class IdleAgent:
    """Stands in for the agent: what comes before it is looked at."""

    def __init__(self, *args: object, **keywords: object) -> None:
        pass

    def run(self) -> int:
        return 0


@pytest.fixture
def validations(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was validated as a complete configuration, in its order."""
    seen: list[dict[str, Any]] = []
    validate = RunConfig.model_validate.__func__  # type: ignore[attr-defined]

    def counted(kind: type[RunConfig], value: Any, **keywords: Any) -> RunConfig:
        seen.append(value)
        config: RunConfig = validate(kind, value, **keywords)
        return config

    monkeypatch.setattr(RunConfig, "model_validate", classmethod(counted))
    monkeypatch.setattr(local, "NodeAgent", IdleAgent)
    return seen


@pytest.mark.parametrize(
    "way", [in_campaign(way) if way == "an optimizer by its path" else way for way in WAYS]
)
def test_a_start_validates_its_configuration_twice_at_most(
    way: str, tmp_path: Path, validations: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_PLACE", "rack=r7")
    run_file = write_run_file(tmp_path)
    words = [word.format(root=tmp_path) for word in WAYS[way]]
    for _ in ("begin", "resume"):
        validations.clear()
        assert start(run_file, words, yes=True).exit_code == 0
        assert 1 <= len(validations) <= 2


def test_what_a_start_plans_has_its_reason(
    tmp_path: Path, validations: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_PLACE", "rack=r7")
    folder = start(write_run_file(tmp_path), WAYS["left open"]).folder
    assert folder is not None
    resolved = json.loads((folder / "resolved.json").read_text())
    planned = {key: o["place"] for key, o in resolved["origins"].items() if o["kind"] == "planned"}
    assert set(planned) == {
        "device",
        "layout.workers",
        "checkpoint.machine.rack",
        "model.vocab_size",
        "train.microbatch_size",
    }
    assert planned["model.vocab_size"] == "the dataset's"
    assert planned["checkpoint.machine.rack"] == "the environment's"
    assert resolved["config"]["train"]["microbatch_size"] == 4
