"""The section `train.optimizer`: options, layouts and identity of each optimizer."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast.config.loading.fields import change_of
from holdfast.config.loading.identity import config_differences, config_hash, refuse_other_run
from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.base import Change
from holdfast.config.sections.optimizer import BUILT_IN, OptimizerConfig, Slot
from holdfast.config.sections.recompute import Recompute, RecomputePolicy, word_of_stage
from holdfast.core.lr_schedule import last_common_step
from holdfast.core.sharding.run_table import run_state_table
from holdfast.errors import ConfigError, RunFolderError
from holdfast.launch.run import branch_config
from holdfast.plan.memory.activations import has_formula


def _config(optimizer: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"train": {"optimizer": optimizer}, **sections})


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_has_its_own_defaults_and_reads_its_dump(name: str) -> None:
    made = OptimizerConfig.model_validate({"name": name})
    assert {key: getattr(made, key) for key in BUILT_IN[name].options} == BUILT_IN[name].options
    assert OptimizerConfig.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: lionn", "is none of adamw, sgd, lion, adafactor, muon, nor the path of a class"),
        ("name: lionn", "use lion"),
        ("name: muon, state_dtype: 8bit", "train.optimizer.state_dtype is no option of muon"),
        ("name: torch.optim.Adam, state_dtype: bf16", "clip_norm, groups, args; remove it"),
        (
            "name: sgd, betas: [0.8, 0.9]",
            "train.optimizer.betas is no option of sgd, which takes learning_rate, weight_decay, "
            "clip_norm, groups, momentum, nesterov, state_dtype; remove it",
        ),
        ("momentum: 0.9", "train.optimizer.momentum is no option of adamw"),
        ("name: torch.optim.RMSprop, args: {lr: 1}", "args has lr, which learning_rate gives"),
        ("name: torch.optim.Adam, eps: 0.1", "groups, args; use train.optimizer.args.eps"),
        ("name: sgd, momentum: 0, nesterov: true", "use momentum 0.9, or nesterov false"),
        ("groups: [{weight_decay: 0}]", "train.optimizer.groups.0.match is missing"),
        ("groups: [{match: a, lr: 1}]", "unknown key train.optimizer.groups.0.lr"),
    ],
)
def test_an_option_that_it_does_not_take(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_config(f"train:\n  optimizer: {{{text}}}\n", "run.yaml")
    assert str(refused.value).startswith("run.yaml:2: ")
    assert words in str(refused.value)


def test_the_run_file_of_a_branch_gives_no_option_that_is_not_taken() -> None:
    values = _config({"name": "lion", "learning_rate": 0.1}).model_dump(mode="json")
    written = branch_config._without_defaults(values)["train"]["optimizer"]
    assert written["betas"] == [0.9, 0.99]
    assert not {"eps", "momentum", "args"} & set(written)


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("muon", {"dp_shard": 2}, "layout.dp_shard 2 does not fit train.optimizer.name muon"),
        ("muon", {"pp": 2}, "use pp 1, with replicas (layout.workers)"),
        ("adafactor", {"tp": 2}, "use tp 1, with replicas (layout.workers) and pp"),
        (
            "adafactor",
            {"replicas": [{"dp_shard": 2}, {}]},
            "layout.replicas.0.dp_shard 2 does not fit",
        ),
    ],
)
def test_an_update_of_complete_parameters_is_cut_by_no_axis(
    name: str, layout: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        _config({"name": name}, layout=layout)


def test_short_state_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"use optimizer\.state_dtype fp32, which keeps float64"):
        RunConfig.model_validate(
            {"train": {"precision": "float64", "optimizer": {"state_dtype": "bf16"}}}
        )
    with pytest.raises(ValueError, match=r"adamw with state_dtype 8bit: use .*state_dtype: fp32"):
        RunConfig.model_validate(
            {"train": {"memory": {"optimizer": "host"}, "optimizer": {"state_dtype": "8bit"}}}
        )
    model = {"preset": None, "layers": 2, "dim": 256, "heads": 8, "kv_heads": 8, "ffn_dim": 256}
    for tp, words in (
        (2, ""),
        (4, ""),
        (8, "model.ffn_dim 256 is no multiple of 8 x 64: use tp 4"),
    ):
        make = {"model": model | {"head_dim": 64}, "layout": {"tp": tp}}
        if words:
            with pytest.raises(ValueError, match=words):
                _config({"state_dtype": "8bit"}, **make)
        else:
            _config({"state_dtype": "8bit"}, **make)
        _config({"state_dtype": "bf16"}, **make)


def test_another_dtype_of_state_is_another_run() -> None:
    stored = _config({"state_dtype": "8bit"}).model_dump(mode="json")
    with pytest.raises(
        RunFolderError, match=r"no checkpoint of the run fits another .*state_dtype"
    ):
        refuse_other_run(stored, _config({}), "run")


def test_adafactor_is_cut_by_stages_and_muon_has_replicas() -> None:
    _config({"name": "adafactor"}, layout={"pp": 2, "workers": 4})
    _config({"name": "muon"}, layout={"workers": 3})


def test_what_each_keeps() -> None:
    def shapes(name: str) -> dict[str, tuple[int, ...]]:
        model = {"preset": None, "layers": 1, "dim": 8, "heads": 2, "kv_heads": 1, "ffn_dim": 6}
        config = _config({"name": name}, model=model | {"vocab_size": 16})
        rows = run_state_table(config)
        return {s.name: s.shape for s in rows if not s.name.startswith("model.")}

    assert shapes("sgd")["optimizer.momentum_buffer.norm.weight"] == (8,)
    factored = shapes("adafactor")
    assert factored["optimizer.row_var.layers.0.ffn.up.weight"] == (6, 1)
    assert factored["optimizer.col_var.layers.0.ffn.up.weight"] == (1, 8)
    assert factored["optimizer.variance.norm.weight"] == (8,)
    assert "optimizer.row_var.norm.weight" not in factored
    muon = shapes("muon")
    assert muon["optimizer.momentum_buffer.layers.0.ffn.up.weight"] == (6, 8)
    assert "optimizer.momentum_buffer.embed.weight" not in muon
    assert muon["optimizer.exp_avg_sq.embed.weight"] == (16, 8)


def test_sgd_without_momentum_keeps_nothing() -> None:
    assert OptimizerConfig.model_validate({"name": "sgd", "momentum": 0}).state_slots == ()


def test_a_slot_as_text() -> None:
    slot = Slot("row_var", "rows", "matrices")
    assert Slot.of_text(slot.text) == slot
    with pytest.raises(ValueError, match="is no slot"):
        Slot.of_text("a rows nobody")


def test_another_optimizer_is_another_run() -> None:
    """Its name fits no checkpoint; an option of it may change in a branch."""
    stored = _config({"name": "lion"}).model_dump(mode="json")
    assert change_of("train.optimizer.name") is Change.NEVER
    with pytest.raises(RunFolderError, match=r"no checkpoint of the run fits another .*name"):
        refuse_other_run(stored, _config({"name": "sgd"}), "run")
    for key in ("momentum", "groups", "betas", "args"):
        assert change_of(f"train.optimizer.{key}") is Change.BRANCH
    groups = _config({"name": "lion", "groups": [{"match": "*norm*", "weight_decay": 0}]})
    found = config_differences(stored, groups)
    assert {d.key.split(".")[2] for d in found} == {"groups"}


def test_a_run_from_before_the_choice_keeps_its_hash() -> None:
    stored = RunConfig().model_dump(mode="json")
    for key in list(stored["train"]["optimizer"]):
        if key not in ("learning_rate", "betas", "eps", "weight_decay", "clip_norm"):
            del stored["train"]["optimizer"][key]
    del stored["train"]["schedule"]["source"]
    assert config_differences(stored, RunConfig()) == []
    assert config_hash(RunConfig()) == "d574bf92fa772dae9159e57cceb7c135"


def test_another_source_is_said_in_words() -> None:
    def of(source: str) -> RunConfig:
        return RunConfig.model_validate(
            {"train": {"schedule": {"kind": "my_schedule:rate", "source": source}}}
        )

    with pytest.raises(RunFolderError, match=r"another source of train\.schedule\.kind"):
        refuse_other_run(of("a").model_dump(mode="json"), of("b"), "run")
    with pytest.raises(RunFolderError, match="continue with the new source in a run of its own: B"):
        refuse_other_run(of("a").model_dump(mode="json"), of("b"), "run", "B")


def test_a_schedule_by_name_or_function() -> None:
    with pytest.raises(ConfigError, match="is none of constant, linear, cosine, wsd, nor"):
        resolve_config("train: {schedule: {kind: cosin}}\n", "run.yaml")
    own = resolve_config("train: {schedule: {kind: 'my_schedule:rate'}}\n", "run.yaml").config
    longer = own.model_copy(update={"train": own.train.model_copy(update={"steps": 2000})})
    assert last_common_step(own.train, own.train, 100) == 100
    assert last_common_step(own.train, longer.train, 100) == 0


# --- `train.recompute`, a list of it, and the keys next to it -------------------------------------
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
