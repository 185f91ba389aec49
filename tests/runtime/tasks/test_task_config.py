"""The section `task` of a run file: identity, sentences, and rows as text."""

from __future__ import annotations

import pytest

from holdfast.config.loading.identity import config_differences, config_hash, refuse_other_run
from holdfast.config.loading.load import resolve_config
from holdfast.config.loading.no_effect import find_without_effect
from holdfast.config.run import RunConfig
from holdfast.core.sharding.parameters import Own, Parameter
from holdfast.core.sharding.run_table import row_of_text, row_text, run_parameters, run_state_table
from holdfast.errors import ConfigError, RunFolderError
from holdfast.launch.run.task_run import ask_task


def _config(**task: object) -> RunConfig:
    return RunConfig.model_validate({"task": {"name": "my_task:Net", **task}})


def test_a_run_of_the_decoder_keeps_its_hash() -> None:
    stored = RunConfig().model_dump(mode="json")
    del stored["task"]
    assert config_differences(stored, RunConfig()) == []
    assert config_hash(RunConfig()) == config_hash(RunConfig.model_validate({"task": {}}))


def test_source_data_and_arguments_are_of_the_run_and_the_folder_is_not() -> None:
    one = _config(args={"hidden": 8}, source="a", data="v1", samples=5, folder="/x")
    assert config_hash(one) == config_hash(
        _config(args={"hidden": 8}, source="a", data="v1", samples=5, folder="/y")
    )
    for other in (
        _config(args={"hidden": 9}, source="a", data="v1", samples=5),
        _config(source="a", data="v1", samples=5),
        _config(args={"hidden": 8}, source="b", data="v1", samples=5),
        _config(args={"hidden": 8}, source="a", data="v2", samples=5),
        _config(args={"hidden": 8}, source="a", data="v1", samples=6),
    ):
        assert config_hash(one) != config_hash(other)
        assert len(config_differences(one.model_dump(mode="json"), other)) == 1


def test_another_source_is_said_in_words() -> None:
    stored = _config(source="a", parameters=["w 2x3"]).model_dump(mode="json")
    with pytest.raises(RunFolderError, match="another source of task my_task:Net"):
        refuse_other_run(stored, _config(source="b", parameters=["w 2x4"]), "run")


def test_another_source_alone_names_the_branch_that_goes_on_with_it() -> None:
    stored = _config(source="a").model_dump(mode="json")
    command = "holdfast branch run --at 50 --to run-branch"
    with pytest.raises(RunFolderError) as caught:
        refuse_other_run(stored, _config(source="b"), "run", command)
    assert str(caught.value).endswith(f"with the new source in a run of its own: {command}")
    with pytest.raises(RunFolderError) as caught:
        refuse_other_run(stored, _config(source="b", parameters=["w 2x4"]), "run", command)
    assert command not in str(caught.value), "no checkpoint fits other parameters"


def test_what_is_worked_out_cannot_be_written() -> None:
    loaded = resolve_config("task: {name: my_task:Net, samples: 3}\n", "run.yaml")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: task\.samples is worked out"):
        ask_task(loaded)


def test_keys_of_the_decoder_are_said_to_have_no_effect() -> None:
    text = "task: my_task:Net\nmodel: {layers: 7}\ndata: {sequence_length: 64}\n"
    found = find_without_effect(resolve_config(text, "run.yaml"))
    assert [line.split(" has no effect on task my_task:Net")[0] for line in found] == [
        "run.yaml:3: data.sequence_length",
        "run.yaml:2: model.layers",
    ]


@pytest.mark.parametrize(("samples", "said"), [(0, True), (5, False)])
def test_an_evaluation_without_validation_samples_is_said(samples: int, said: bool) -> None:
    text = "task: my_task:Net\ntrain: {evaluate: {every: 10}}\n"
    planned = {"task.data": "v1", "task.validation": samples}
    found = find_without_effect(resolve_config(text, "run.yaml").with_planned(planned, "the task"))
    assert (
        any("train.evaluate.every has no effect, as task my_task:Net" in f for f in found) is said
    )


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (Parameter("a.weight", (2, 3), True, Own()), "a.weight 2x3 decay"),
        (Parameter("norm.mean", (4,), False, Own(), merge="mean"), "norm.mean 4 mean"),
    ],
)
def test_rows_as_text(row: Parameter, text: str) -> None:
    assert row_text(row, is_frozen=False) == text
    assert row_of_text(text) == row


def test_the_tables_of_a_task() -> None:
    config = _config(parameters=["a.weight 2x3 decay", "scale 1 frozen"])
    assert [row.name for row in run_parameters(config)] == ["a.weight", "scale"]
    table = run_state_table(config)
    assert [(spec.name, spec.shard_dim) for spec in table[:2]] == [
        ("model.a.weight", 0),
        ("model.scale", 0),
    ]
    assert table[2].name == "optimizer.exp_avg.a.weight"
