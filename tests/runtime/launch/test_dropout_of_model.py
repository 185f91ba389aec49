"""The line about dropout in the config.json of `model.from`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.launch.run.lora_run import _dropout_of_model


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"embd_pdrop": 0.2, "resid_pdrop": 0.3}, "embd_pdrop 0.2, resid_pdrop 0.3"),
        ({"attention_dropout": 0.0, "embd_pdrop": None}, ""),
    ],
)
def test_a_run_says_which_dropout_it_trains_without(
    tmp_path: Path, config: dict[str, object], said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    line = f"{path} says {said}; this run trains without dropout of the model"
    assert _dropout_of_model(str(tmp_path)) == ([line] if said else [])
    assert _dropout_of_model(str(tmp_path / "none")) == []
