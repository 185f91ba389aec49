"""Values that can never take effect: each is said, with its place, and no other."""

from __future__ import annotations

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.config.loading.no_effect import find_without_effect

STAGE = "{from_step: %d, batch_size: %d}"
QUIET = "train.schedule.warmup_steps=0"


def said(*overrides: str) -> list[str]:
    return find_without_effect(resolve_config(None, "command line", overrides))


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["train.steps=10"], "train.schedule.warmup_steps", "ends at 50% of"),
        (["train.steps=20"], "train.schedule.warmup_steps", "the cosine decay never begins"),
        (
            [QUIET, "train.schedule.kind=wsd", "train.schedule.decay_steps=2000"],
            "train.schedule.decay_steps",
            "the decay is cut to 1000; use 1000 or less",
        ),
        (
            ["train.schedule.kind=wsd", "train.schedule.decay_steps=990"],
            "train.schedule.decay_steps",
            "the decay is cut to 980",
        ),
        (
            ["train.schedule.decay_steps=5"],
            "train.schedule.decay_steps",
            "is for schedule.kind wsd",
        ),
        (
            ["train.schedule.kind=constant", "train.schedule.final_ratio=0.5"],
            "train.schedule.final_ratio",
            "no effect with schedule.kind constant",
        ),
        (
            [f"train.batch_warmup=[{STAGE % (9, 2)}, {STAGE % (1001, 4)}]"],
            "train.batch_warmup.1.from_step",
            "1001 comes after the last step 1000",
        ),
        (
            ["train.optimizer.name=sgd", "train.optimizer.betas=[0.9, 0.95]"],
            "train.optimizer.betas",
            "has no effect on sgd",
        ),
        (
            ["train.optimizer={name: lion, eps: 1e-8}"],
            "train.optimizer.eps",
            "has no effect on lion",
        ),
        (
            ["train.recompute_keep=[attention]"],
            "train.recompute_keep",
            "no effect with train.recompute none; use train.recompute selective",
        ),
        (["train.partition_activations=true"], "train.partition_activations", "recompute none"),
        (
            ["train.partition_activations=true", "train.recompute=full"],
            "train.partition_activations",
            "layout.tp 1",
        ),
        (
            ["train.partition_activations=true", "train.recompute=full", "layout.tp=2"],
            "train.partition_activations",
            "layout.sequence_parallel true",
        ),
        (
            [
                "train.partition_activations=true",
                "train.recompute=full",
                "layout.tp=2",
                "layout.sequence_parallel=false",
                "train.memory.activations=host",
            ],
            "train.partition_activations",
            "train.memory.activations host",
        ),
        (["train.evaluate.every=1001"], "train.evaluate.every", "one evaluation, at the end"),
        (["checkpoint.every_steps=5000"], "checkpoint.every_steps", "it never comes"),
        (["checkpoint.keep_every=5000"], "checkpoint.keep_every", "it never comes"),
        (
            ["layout.exchange=gathered", "layout.reduction=fast"],
            "layout.exchange",
            "no effect with layout.reduction fast",
        ),
        (["train.memory.folder=/tmp"], "train.memory.folder", "no state in a file"),
        (["train.memory.piece_mb=4"], "train.memory.piece_mb", "all state on the device"),
        (["layout.trace_step=1001"], "layout.trace_step", "nothing is recorded"),
        (
            ["checkpoint.interval=adaptive", "checkpoint.every_steps=5"],
            "checkpoint.every_steps",
            "no effect with checkpoint.interval adaptive",
        ),
        (["checkpoint.peer_copies=2"], "checkpoint.peer_copies", "no checkpoint.peers"),
        (["cluster.notices_at=http://h"], "cluster.notices_at", "cluster.notices none"),
        (
            ["data.tokenizer.path=t.json", "data.tokenizer.vocab_size=300"],
            "data.tokenizer.vocab_size",
            "no effect with data.tokenizer.path",
        ),
        (["data.chat.long_rows=cut"], "data.chat.long_rows", "no effect with no chat data"),
        (
            ["data.sources=[{kind: text, path: a}]", "data.sources.0.field=body"],
            "data.sources.0.field",
            "no effect with kind text",
        ),
    ],
)
def test_one_value_is_one_sentence_with_its_place(
    overrides: list[str], key: str, says: str
) -> None:
    (sentence,) = said(*overrides)
    place = overrides[-1] if "." in overrides[-1].partition("=")[0] else "command line"
    assert f"{key} " in sentence
    assert says in sentence
    assert "; " in sentence, "a remedy"
    if key.startswith(overrides[-1].partition("=")[0]):
        assert sentence.startswith(f"command line: {place}: ")


def test_a_default_that_does_nothing_is_not_said() -> None:
    assert said() == []
    assert said("train.steps=30", "train.evaluate.every=10") == []
    assert said("train.steps=1000", "train.schedule.kind=wsd") == []
    assert said("train.optimizer={name: sgd, momentum: 0}") == []


def test_the_line_of_the_run_file_is_named() -> None:
    text = "train:\n  steps: 100\n  schedule:\n    warmup_steps: 500\n"
    (sentence,) = find_without_effect(resolve_config(text, "run.yaml"))
    assert sentence.startswith("run.yaml:4: train.schedule.warmup_steps 500 is longer than")
    assert "ends at 20% of" in sentence
