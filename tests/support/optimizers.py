"""Runs that train the decoder with any optimizer."""

from __future__ import annotations

from typing import Any

from holdfast.config.run import RunConfig
from holdfast.tasks.child import describe_named
from tests.support.layouts import case, config_of

MODULE = "tests.support.sample_optimizers"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"nesterov": True, "learning_rate": 0.5},
    "lion": {"learning_rate": 0.001},
    "adafactor": {},
    "muon": {},
    "torch.optim.RMSprop": {"learning_rate": 0.001, "args": {"momentum": 0.9}},
    f"{MODULE}:Damped": {"learning_rate": 0.5, "weight_decay": 0.1},
    f"{MODULE}:Scaled": {},
}
"""Name -> options in the tests of complete steps."""
WHOLE = ("adafactor", "muon", f"{MODULE}:Scaled")
"""Those whose update needs complete parameters."""
ELEMENTWISE = [name for name in OPTIMIZERS if name not in WHOLE]


def optimizer_config(name: str, layout: str = "one", **changes: Any) -> RunConfig:
    """A tiny run of an optimizer in a named layout, with the planned keys."""
    options = {"learning_rate": 0.01, "clip_norm": 0.05, "name": name} | OPTIMIZERS[name]
    given = {"train__optimizer": options, **case(layout).changes, **changes}
    return planned(config_of(given))


def planned(config: RunConfig) -> RunConfig:
    """With what a start of the run finds out about classes and functions."""
    found = config.model_dump(mode="json")
    for key, value in describe_named(config).items():
        section, name = key.split(".")[1:]
        found["train"][section][name] = value
    return RunConfig.model_validate(found)
