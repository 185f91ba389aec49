"""Values that can never take effect: each is said, with its place, and no other."""

from __future__ import annotations

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.config.loading.no_effect import find_without_effect


def said(*overrides: str) -> list[str]:
    return find_without_effect(resolve_config(None, "command line", overrides))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            "train.schedule.warmup_steps=0 train.schedule.kind=wsd train.schedule.decay_steps=2000",
            "the decay is cut to 1000; use 1000 or less",
        ),
        ("seed=2 train.precision=bf16 seed=3", "leave out seed=2"),
        ("train.schedule.kind=wsd train.schedule.decay_steps=990", "the decay is cut to 980"),
        ("train.schedule.decay_steps=5", "is for schedule.kind wsd"),
        (
            "train.schedule.kind=constant train.schedule.final_ratio=0.5",
            "no effect with schedule.kind constant",
        ),
        (
            "train.batch_warmup.0.from_step=9 train.batch_warmup.0.batch_size=2 "
            "train.batch_warmup.1.batch_size=4 train.batch_warmup.1.from_step=1001",
            "1001 comes after the last step 1000",
        ),
        ("train.optimizer.name=sgd train.optimizer.betas=[0.9,0.95]", "has no effect on sgd"),
        ("train.optimizer.name=lion train.optimizer.eps=1e-8", "has no effect on lion"),
        (
            "train.recompute_keep=[attention]",
            "no effect with train.recompute none; use train.recompute selective",
        ),
        ("train.partition_activations=true", "recompute none"),
        ("train.recompute=full train.partition_activations=true", "layout.tp 1"),
        (
            "train.recompute=full layout.tp=2 train.partition_activations=true",
            "layout.sequence_parallel true",
        ),
        (
            "train.recompute=full layout.tp=2 layout.sequence_parallel=false "
            "train.memory.activations=host train.partition_activations=true",
            "train.memory.activations host",
        ),
        ("layout.async_tp=true", "layout.tp 1"),
        ("pause.above=400", "no pause.file"),
        ("train.evaluate.every=1001", "one evaluation, at the end"),
        ("checkpoint.every_steps=5000", "it never comes"),
        ("checkpoint.keep_every=5000", "it never comes"),
        ("layout.reduction=fast layout.exchange=gathered", "no effect with layout.reduction fast"),
        ("train.memory.folder=/tmp", "no state in a file"),
        ("train.memory.piece_mb=4", "all state on the device"),
        ("layout.trace_step=1001", "nothing is recorded"),
        ("train.profile.steps=[999,1001]", "fewer steps; use [999, 1000]"),
        ("train.profile.ranks=[1]", "no train.profile.steps"),
        ("layout.workers=2 train.profile.steps=[1,2] train.profile.ranks=[5]", "use [0]"),
        ("server.staleness=5", "no effect with server.mode none"),
        ("server.mode=synchronous server.staleness=5", "server.mode synchronous"),
        ("server.mode=synchronous server.noise_decay=0.5", "server.max_update_microbatches 0"),
        ("server.mode=bounded_stale server.straggling=0.5", "server.mode bounded_stale"),
        ("outer.every_steps=5", "no effect with outer.learners 0"),
        ("outer.codec.name=int8", "no effect with outer.learners 0"),
        ("outer.learners=2 outer.codec.error_feedback=0.5", "outer.codec.name none"),
        ("outer.learners=4 outer.faulty=0", "no effect with outer.average mean"),
        ("outer.learners=4 outer.free.quorum=2", "no effect with outer.mode fixed"),
        (
            "outer.learners=2 outer.codec.name=int8 outer.codec.share=0.5",
            "no effect with outer.codec.name int8",
        ),
        (
            "checkpoint.interval=adaptive checkpoint.every_steps=5",
            "no effect with checkpoint.interval adaptive",
        ),
        ("checkpoint.peer_copies=2", "no checkpoint.peers"),
        ("cluster.notices_at=http://h", "cluster.notices none"),
        (
            "data.tokenizer.path=t.json data.tokenizer.vocab_size=300",
            "no effect with data.tokenizer.path",
        ),
        ("data.chat.long_rows=cut", "no effect with no chat data"),
        (
            "data.sources.0.kind=text data.sources.0.path=a data.sources.0.field=body",
            "no effect with kind text",
        ),
    ],
)
def test_one_value_is_one_sentence_with_its_place(overrides: str, says: str) -> None:
    """The last override has no effect."""
    words = overrides.split()
    (sentence,) = said(*words)
    assert sentence.startswith(f"command line: {words[-1]}: {words[-1].partition('=')[0]} ")
    assert says in sentence
    assert "; " in sentence, "a remedy"


def test_a_warm_up_is_too_long_for_the_run() -> None:
    for steps, says in ((10, "ends at 50% of"), (20, "the cosine decay never begins")):
        (sentence,) = said(f"train.steps={steps}")
        assert sentence.startswith("command line: train.schedule.warmup_steps ")
        assert says in sentence


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
