"""Classes of optimizers and functions of schedules by their path: what a start finds out, and one
sentence for each that a run cannot use."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.core.sharding.run_table import run_state_table
from holdfast.errors import ConfigError
from holdfast.launch.run.task_run import ask_named
from holdfast.tasks.child import describe_named
from holdfast.tasks.named.named import load_user_parts
from tests.support.optimizers import MODULE, optimizer_config, planned
from tests.support.ranks import ROOT


def _config(**train: Any) -> RunConfig:
    return RunConfig.model_validate({"train": train})


def _optimizer(name: str, **options: Any) -> RunConfig:
    return _config(optimizer={"name": name, **options})


EVERYWHERE = ["dp_replicate", "pp", "dp_shard", "tp"]


@pytest.mark.parametrize(
    ("name", "slots", "layouts"),
    [
        ("torch.optim.RMSprop", ["step step all", "square_avg elementwise all"], EVERYWHERE),
        ("torch.optim.Adagrad", ["step step all", "sum elementwise all"], EVERYWHERE),
        (f"{MODULE}:Damped", ["updates count all", "mean elementwise all"], EVERYWHERE),
        (f"{MODULE}:Scaled", ["norm scalar all"], ["dp_replicate", "pp"]),
        (f"{MODULE}:RowNormed", [], ["dp_replicate", "pp"]),
    ],
)
def test_what_a_class_keeps(name: str, slots: list[str], layouts: list[str]) -> None:
    found = describe_named(_optimizer(name))
    assert found["train.optimizer.slots"] == slots
    assert found["train.optimizer.layouts"] == layouts
    assert bool(found["train.optimizer.source"]) == name.startswith(MODULE)


def test_the_table_has_what_it_keeps() -> None:
    names = {
        spec.name: spec.shape for spec in run_state_table(optimizer_config(f"{MODULE}:Scaled"))
    }
    assert names["optimizer.norm.norm.weight"] == (1,)
    assert not any("exp_avg" in name for name in names)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Undeclared", {}, "has state 'norm', a tensor of shape [] and torch.float64 for a"),
        ("Undeclared", {}, "declare it in the class: state_shapes = {'norm': 'scalar'}"),
        ("Misdeclared", {}, "declares state 'norm' as rows, and has a tensor of shape []"),
        ("Secretive", {}, "keeps more than its state: after a restore, its third update is"),
        ("NoOptimizer", {}, "is no subclass of torch.optim.Optimizer"),
        ("Missing", {}, "has no Missing; name something that is in it"),
        ("Damped", {"args": {"beta": 2}}, "unexpected keyword argument 'beta'"),
        ("torch.optim.NAdam", {}, "has state 'mu_product', a tensor of shape []"),
        ("torch.optim.LBFGS", {}, "missing 1 required positional argument: 'closure'"),
        ("torch.optim.Adafactor", {}, "is not declared; use train.optimizer.name=adafactor"),
        ("torch.optim.Rprop", {"weight_decay": 0.1}, "use train.optimizer.weight_decay 0"),
    ],
)
def test_a_class_that_no_run_can_use(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        describe_named(_optimizer(name if "." in name else f"{MODULE}:{name}", **options))
    text = str(refused.value)
    assert words in text
    assert text.startswith("train.optimizer.")
    assert "\n" not in text


def test_a_class_that_updates_complete_parameters_is_cut_by_no_axis() -> None:
    with pytest.raises(ValueError, match=r"layout\.dp_shard 2 does not fit train\.optimizer\.name"):
        planned(
            RunConfig.model_validate(
                {"train": {"optimizer": {"name": f"{MODULE}:RowNormed"}}, "layout": {"dp_shard": 2}}
            )
        )


def test_a_function_of_the_step() -> None:
    config = planned(_config(steps=8, schedule={"kind": f"{MODULE}:rate"}))
    function = load_user_parts(config).schedule
    assert function is not None
    assert [function(step, 8) for step in (1, 4, 5, 8)] == [1.0, 1.0, 0.25, 0.25]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("falls_below_zero", "falls_below_zero(3, 8) returned -0.5; return a finite number"),
        ("says_nothing", "says_nothing(1, 8) returned None; return a finite number"),
        ("fails_late", "fails_late(4, 8) failed: ValueError: no rate for this step"),
        ("missing", "has no missing"),
        ("MODULE_THAT_IS_NOT_THERE", "has no MODULE_THAT_IS_NOT_THERE"),
    ],
)
def test_a_function_that_no_run_can_use(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        describe_named(_config(steps=8, schedule={"kind": f"{MODULE}:{name}"}))
    text = str(refused.value)
    assert text.startswith("train.schedule.kind: ")
    assert words in text


@pytest.mark.slow
def test_another_source_is_refused_where_it_is_loaded() -> None:
    given = {"optimizer": {"name": f"{MODULE}:Damped"}}
    config = planned(RunConfig.model_validate({"train": given, "task": {"folder": str(ROOT)}}))
    load_user_parts(config)
    other = config.model_dump(mode="json")
    other["train"]["optimizer"]["source"] = "0" * 32
    with pytest.raises(ConfigError, match=r"the source of .*:Damped has changed since this run"):
        load_user_parts(RunConfig.model_validate(other))


@pytest.mark.slow
def test_a_start_names_the_line() -> None:
    text = f"train:\n  optimizer: {{name: '{MODULE}:Undeclared'}}\ntask: {{folder: {ROOT}}}\n"
    with pytest.raises(ConfigError, match=r"run\.yaml:2: .*:Undeclared has state 'norm'"):
        ask_named(resolve_config(text, "run.yaml"))


def test_what_is_worked_out_cannot_be_written() -> None:
    text = "train: {optimizer: {name: torch.optim.RMSprop, slots: [a]}}\n"
    with pytest.raises(ConfigError, match=r"run\.yaml:1: train\.optimizer\.slots is worked out"):
        ask_named(resolve_config(text, "run.yaml"))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            "groups: [{match: '*nrom*', weight_decay: 0}]",
            "train.optimizer.groups.0.match '*nrom*' matches none of the",
        ),
        ("groups: [{match: 'norm.weigth'}]", "the nearest names are norm.weight"),
        ("name: muon, adamw_for: [emb]", "train.optimizer.adamw_for 'emb' matches none"),
    ],
)
def test_a_pattern_of_nothing(optimizer: str, words: str) -> None:
    text = f"train:\n  optimizer: {{{optimizer}}}\n"
    with pytest.raises(ConfigError) as refused:
        ask_named(resolve_config(text, "run.yaml"))
    assert str(refused.value).startswith("run.yaml:2: ")
    assert words in str(refused.value)
