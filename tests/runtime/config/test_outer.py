"""What a run with learners refuses, by key."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.tiny_training import tiny


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout__tp": 2}, "layout.tp 2 cuts the model"),
        ({"layout__dp_shard": 2}, "layout.dp_shard 2 cuts the model"),
        ({"outer__learners": 5}, "do not divide train.batch_size 24"),
        ({"train__microbatch_size": 3}, "does not divide the 8 samples"),
        ({"train__precision": "fp16"}, "train.precision fp16"),
        ({"train__keep_zeros": True}, "train.keep_zeros"),
        ({"objective__kind": "dpo"}, "objective.kind dpo"),
        ({"outer__average": "krum", "outer__faulty": 2}, "faulty 2 of learners 3"),
        ({"outer__trust": {"norm": 0.5}}, "norm 0.5"),
        ({"outer__trust": {"checks": 0.1}, "layout__workers": 1}, "another worker"),
        (
            {"outer__trust": {"norm": 3.0}, "outer__average": "token_weighted"},
            "token_weighted does not leave out",
        ),
        ({"outer__optimizer": {"momentum": 0}}, "Nesterov"),
        (
            {
                "layout__workers": 3,
                "cluster__sites": [{"name": n, "workers": 1, "mbit_s": 1} for n in "ab"],
            },
            "have 2 workers, and layout.workers is 3",
        ),
        ({"outer__mode": "free"}, "use average token_weighted"),
        (
            {
                "outer__mode": "free",
                "outer__average": "token_weighted",
                "outer__free": {"quorum": 4},
            },
            "free.quorum 4 is more than learners 3",
        ),
    ],
)
def test_it_names_the_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words.replace(".", r"\.")):
        tiny(**{"outer__learners": 3} | changes)


def test_a_step_is_a_round_for_data_and_update() -> None:
    config = tiny(outer__learners=3, outer__every_steps=5)
    train = config.step_train
    assert (train.batch_size, train.microbatch_size) == (120, 40)
    assert (train.optimizer.name, train.optimizer.learning_rate) == ("sgd", 0.7)
    assert tiny().step_train == tiny().train
