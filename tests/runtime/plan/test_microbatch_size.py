"""`train.microbatch_size: auto`: the largest size that fits, and the same after a resume."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from holdfast.config.loading.load import LoadedConfig, resolve_config
from holdfast.errors import UserError
from holdfast.launch.run.auto_layout import by_microbatch_size, describe_microbatch
from holdfast.launch.start.facts import Facts, resolve
from holdfast.machine.hardware import detect_hardware
from holdfast.plan.memory.microbatch_size import choose_microbatch_size, microbatch_choices

KEY = "train.microbatch_size"
MODEL = ("model.preset=tiny", "model.vocab_size=512", "data.sequence_length=64", "device=cpu")


def run_of(*words: str) -> LoadedConfig:
    return resolve_config(None, "command line", [*MODEL, f"{KEY}=auto", *words])


def test_the_sizes_are_those_that_the_batch_and_the_layout_allow() -> None:
    words = ("train.batch_size=24", "train.batch_warmup=[{from_step: 2, batch_size: 12}]")
    config = run_of(*words, "layout.workers=2", "layout.dp_shard=2").config
    assert [choice.size for choice in microbatch_choices(config)] == [12, 6, 4, 2]
    config = run_of("train.batch_size=24", "layout.workers=4").config
    assert [choice.size for choice in microbatch_choices(config)] == [6, 4, 3, 2, 1]


def test_the_largest_that_fits_is_taken() -> None:
    config = run_of("train.batch_size=16", "layout.workers=1").config
    choices = list(microbatch_choices(config))
    assert [choice.size for choice in choices] == [16, 8, 4, 2, 1]
    for choice in choices:
        found, _ = choose_microbatch_size(config, choice.peak)
        assert found is not None
        assert found.size == max(each.size for each in choices if each.peak <= choice.peak)
    least = min(choice.peak for choice in choices)
    assert choose_microbatch_size(config, least - 1)[0] is None


def test_the_choice_is_printed_and_a_resume_keeps_it() -> None:
    facts = Facts(detect_hardware())
    of_one = run_of("layout.workers=1", "train.memory.device_gb=1")
    loaded = resolve(of_one, facts, (by_microbatch_size,)).validated()
    assert loaded.config.train.microbatch_size == 16
    assert describe_microbatch(loaded)[0].startswith(f"{KEY} is 16: ")
    facts = replace(facts, stored=json.loads(json.dumps(loaded.to_json())))
    with_less = run_of("layout.workers=4", "train.memory.device_gb=0.00001")
    again = resolve(with_less, facts, (by_microbatch_size,))
    assert again.config.train.microbatch_size == 16


def test_a_task_is_refused() -> None:
    with pytest.raises(UserError, match="know no task; use a number"):
        run_of("task.name=mine:Task")
