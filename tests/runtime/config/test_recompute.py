"""`train.recompute`, a list of it, and the keys next to it."""

from __future__ import annotations

import pytest

from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.recompute import Recompute, RecomputePolicy, word_of_stage
from holdfast.errors import ConfigError
from holdfast.plan.memory.activations import has_formula


def resolved(*overrides: str) -> RunConfig:
    return resolve_config(None, "command line", overrides).config


NONE_OF = "is none of none, selective, full"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("train.recompute=fulll", f"'fulll' {NONE_OF}; use full"),
        ("train.recompute=[]", "use none"),
        ("train.recompute=true", f"true {NONE_OF}; use none"),
        ("layout.pp=2 train.recompute=[full,nonne]", f"'nonne' {NONE_OF}; use none"),
        ("layout.pp=2 train.recompute=[full,selective,none]", "use [full, selective]"),
        (
            "layout.replicas.0.pp=2 layout.replicas.1.pp=1 train.recompute=[full,none]",
            "replicas.1.pp 1 stages; use full",
        ),
        ("train.recompute=selective train.recompute_keep=[norm]", "use matmul"),
        ("train.recompute=selective train.recompute_keep=[]", "or recompute_keep [matmul]"),
        ("layout.pp=2 train.recompute=[none,selective] train.compile=true", "or compile false"),
    ],
)
def test_one_sentence(overrides: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(*overrides.split())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_word_for_each_stage() -> None:
    config = resolved("layout.pp=3", "train.recompute=[full, selective, none]")
    found = [config.recompute_policy(stage, 3, 1).word for stage in range(3)]
    assert found == ["full", "selective", "none"]
    assert resolved("train.recompute=full").train.recompute == "full"


@pytest.mark.parametrize(
    ("stages", "found"),
    [
        (1, ["full"]),
        (2, ["full", "selective"]),
        (3, ["full", "selective", "selective"]),
        (8, ["full", "full", "none", "none", "selective", "selective", "none", "none"]),
    ],
)
def test_other_stages_take_the_word_that_keeps_least(stages: int, found: list[str]) -> None:
    words: tuple[Recompute, ...] = ("full", "none", "selective", "none")
    assert [word_of_stage(words, stage, stages) for stage in range(stages)] == found


def test_inputs_are_cut_where_tp_has_copies_of_them() -> None:
    cut = ("layout.tp=2", "train.partition_activations=true", "layout.sequence_parallel=false")
    assert resolved(*cut, "train.recompute=full").recompute_policy(0, 1, 2).input_parts == 2
    assert resolved(*cut).recompute_policy(0, 1, 2).input_parts == 1
    parallel = (*cut[:2], "train.recompute=full")
    assert resolved(*parallel).recompute_policy(0, 1, 2).input_parts == 1


def test_a_policy_in_words() -> None:
    kept = RecomputePolicy("selective", ("matmul", "attention"), 2)
    assert str(kept) == "selective, keeps matmul and attention, inputs of blocks cut over tp 2"
    assert str(RecomputePolicy("full")) == "full"


def test_no_formula_knows_a_kept_kernel_under_cp() -> None:
    words = ("model.vocab_size=64", "layout.cp=2", "train.recompute=selective")
    assert has_formula(resolved(*words))
    assert not has_formula(resolved(*words, "train.recompute_keep=[attention]"))
