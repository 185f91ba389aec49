"""Degrees that cannot work are refused, and what a refusal offers instead does work."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.config.loading.load import resolve_config
from holdfast.config.run import RunConfig
from holdfast.errors import ConfigError

MODEL = "preset: null, layers: 6, dim: 48, heads: 12, kv_heads: 4, ffn_dim: 24"
TEXT = f"""\
model: {{{MODEL}}}
train: {{batch_size: 24, microbatch_size: 6}}
layout:
  workers: 0
"""


ONCE = ["layout.zero=2", "layout.zero2_reduce=step"]
EXPERTS = ["model.family=mixtral", "model.experts={count: 6}"]


def sentence(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_config(TEXT, "run.yaml", overrides)
    said = str(caught.value)
    assert "\n" not in said
    return said.removeprefix(f"command line: {overrides[-1]}: ")


@pytest.mark.parametrize(
    ("overrides", "place", "offer"),
    [
        (["layout.tp=5"], "layout.tp 5", "use 4 or 12"),
        (["layout.tp=8"], "layout.tp 8", "use 4 or 12, or layout.tp_by.attention 4"),
        (["layout.tp=4", "layout.tp_by.attention=3"], "layout.tp_by.attention 3", "use 2 or 4"),
        (["layout.tp=8", "layout.tp_by.attention=8"], "layout.tp_by.attention 8", "use 4"),
        (
            ["layout.tp=12", "model.kv_heads=3", "layout.tp_by.attention=2"],
            "layout.tp_by.attention 2",
            "use 1 or 3",
        ),
        (["layout.tp=4", "model.ffn_dim=26", "layout.tp_by.ffn=4"], "layout.tp_by.ffn 4", "use 2"),
        (
            ["layout.tp=2", "layout.tp_by.mlp=2"],
            "unknown key layout.tp_by.mlp",
            "layout.tp_by has attention, ffn",
        ),
        ([*EXPERTS, "layout.tp=2", "layout.tp_by.ffn=1"], "layout.tp_by.ffn 1", "use 0"),
        (["lora.rank=4", "layout.tp_by.attention=1"], "layout.tp_by.attention 1", "use 0"),
        (
            ["layout.tp=2", "layout.tp_by.attention=1", "train.precision=fp8"],
            "train.precision fp8",
            "use layout.tp_by.attention 0, or train.precision bf16",
        ),
        (["layout.ep=2"], "layout.ep 2", "use layout.ep 1"),
        (
            [*EXPERTS, "layout.dp_shard=3", "layout.expert_replicas=auto"],
            "layout.expert_replicas auto",
            "use layout.expert_replicas off",
        ),
        ([*EXPERTS, "layout.dp_shard=3", "layout.ep=2"], "layout.ep 2", "use layout.ep 1 or 3"),
        (
            [*EXPERTS, "layout.dp_shard=3", "layout.cp=2", "layout.ep=4"],
            "layout.ep 4",
            "use layout.ep 3 or 6",
        ),
        (
            [*EXPERTS, "layout.dp_shard=2", "layout.cp=2", "layout.ep=4"],
            "layout.ep 4",
            "use layout.ep 2",
        ),
        (
            [*EXPERTS, "layout.cp=2", "train.optimizer.name=adafactor", "layout.ep=2"],
            "layout.ep 2",
            "use layout.ep 1",
        ),
        (
            [*EXPERTS, "layout.dp_shard=2", "layout.zero=1", "layout.ep=2"],
            "layout.ep 2",
            "use layout.zero 2",
        ),
        (
            [*EXPERTS, "layout.dp_shard=2", *ONCE, "layout.ep=2"],
            "layout.ep 2",
            "use layout.zero2_reduce microbatch",
        ),
        (
            [*EXPERTS, "train.recompute=selective", "layout.dp_shard=2", "layout.ep=2"],
            "layout.ep 2",
            "use train.recompute full",
        ),
        (
            [
                *(*EXPERTS, "train.recompute=[none,selective]", "layout.pp=2"),
                *("layout.dp_shard=2", "layout.ep=2"),
            ],
            "layout.ep 2",
            "use train.recompute [none, full]",
        ),
        (
            ["layout.schedule=interleaved", "layout.virtual_stages=4", "layout.pp=3"],
            "layout.pp 3",
            "use layout.virtual_stages 2",
        ),
        (["layout.schedule=ZBV"], "layout.schedule is 'ZBV'", "did you mean zbv?"),
        (["layout.pp=2", "layout.stages=[6,0]"], "layout.stages.1 is 0", "use 1"),
        (
            [*EXPERTS, "layout.cp=2", "model.experts.capacity=1.5"],
            "model.experts.capacity 1.5",
            "use model.experts.capacity 0",
        ),
        (
            [*EXPERTS, "model.dim=64", "model.heads=4", "model.ffn_dim=64", "train.precision=fp8"],
            "train.precision fp8",
            "use train.precision bf16",
        ),
        (
            [
                "layout.workers=4",
                *("layout.dp_shard=2", "layout.tp=2", "layout.tp_by.attention=1"),
                *("layout.zero=3", "layout.quantized=weights"),
            ],
            "layout.quantized weights",
            "use layout.quantized: none",
        ),
        (
            [*EXPERTS, "layout.dp_shard=2", "layout.ep=2", "layout.quantized=weights"],
            "layout.quantized weights",
            "use layout.quantized: none",
        ),
        (
            ["layout.dp_shard=2", *ONCE, "layout.quantized=gradients"],
            "layout.quantized gradients",
            "use layout.quantized: none",
        ),
        (
            ["layout.dp_shard=2", *ONCE, "train.memory.parameters=host"],
            "train.memory.parameters host",
            "use train.memory.parameters: device",
        ),
        (
            [*EXPERTS, "model.experts.width=20", "layout.tp=4", "layout.tp=12"],
            "layout.tp 12",
            "use 4",
        ),
        (["layout.tp=24"], "layout.tp 24", "use 12, or layout.tp_by.attention 12"),
        (["model.ffn_dim=22", "layout.tp=4"], "layout.tp 4", "use 2, or layout.tp_by.ffn 2"),
        (["layout.tp=6"], "layout.tp 6", "use 4 or 12, or layout.tp_by.attention 2"),
        (["layout.cp=5"], "layout.cp 5", "use 4 or 8"),
        (
            ["layout.cp_method=ulysses", "layout.cp=8"],
            "layout.cp 8",
            "use 4, or layout.cp_method ring",
        ),
        (
            ["layout.cp_method=ulysses-ring", "layout.cp_ring=4", "layout.cp=2"],
            "layout.cp 2",
            "use 1 or 4",
        ),
        (["layout.pp=7"], "layout.pp 7", "use 6 or less"),
        (
            ["layout.pp=3", "layout.stages=[3, 3]"],
            "layout.stages [3, 3]",
            "use [2, 2, 2], or [] to have them balanced by cost",
        ),
        (
            ["layout.pp=4", "layout.stages=[1, 1, 1, 1]"],
            "layout.stages [1, 1, 1, 1]",
            "use [2, 2, 1, 1], or [] to have them balanced by cost",
        ),
        (["layout.pp=0"], "layout.pp is 0", "use 1"),
        (
            ["layout.dp_shard=4"],
            "layout.dp_shard 4",
            "use train.microbatch_size 8, or layout.dp_shard 3 or 6",
        ),
        (["layout.dp_shard=5"], "layout.dp_shard 5", "use layout.dp_shard 3 or 6"),
        (
            ["train.batch_warmup=[{from_step: 1, batch_size: 12}]", "layout.dp_shard=4"],
            "layout.dp_shard 4",
            "use train.microbatch_size 12, or layout.dp_shard 3 or 6",
        ),
        (
            ["layout.replicas.0.dp_shard=3", "layout.replicas.1.dp_shard=4"],
            "layout.replicas.1.dp_shard 4",
            "use train.microbatch_size 12, or layout.replicas.1.dp_shard 3 or 6",
        ),
        (["layout.pp=2", "layout.tp=2", "layout.workers=6"], "layout.workers 6", "use 4 or 8"),
        (
            ["layout.replicas=[{pp: 3}, {pp: 2}]", "layout.workers=6"],
            "layout.workers 6",
            "use 5, or 0",
        ),
        (
            ["layout.replicas=[{pp: 3}, {pp: 2}]", "layout.tp=2"],
            "layout.tp is",
            "use one of the two",
        ),
        (
            ["layout.replicas.0.pp=2", "layout.replicas.1.tp=5"],
            "layout.replicas.1.tp 5",
            "use 4 or 12",
        ),
        (["layout.zero=4"], "layout.zero is 4", "use 1"),
        (["layout.schedule=1f1"], "layout.schedule is '1f1'", "did you mean 1f1b?"),
        (
            ["layout.schedule=zbv", "layout.pp=4"],
            "layout.pp 4",
            "use layout.pp 3, or layout.schedule 1f1b",
        ),
        (
            ["layout.schedule=interleaved", "layout.pp=2", "layout.stages=[3, 3]"],
            "layout.stages [3, 3]",
            "use [2, 2, 1, 1], or [] to have them balanced by cost",
        ),
        (
            ["layout.pp=2", "layout.balance_costs=[1, 1, 1]"],
            "layout.balance_costs has",
            "use 8 times, or layout.balance_costs []",
        ),
        (
            ["layout.pp=2", "layout.balance=memory", "layout.balance_costs=[1, 1, 1]"],
            "layout.balance_costs has",
            "use layout.balance time, or layout.balance_costs []",
        ),
        (
            ["layout.schedule=zb-h1", "layout.virtual_stages=2"],
            "layout.virtual_stages 2",
            "use layout.schedule interleaved, or virtual_stages 0",
        ),
        (
            ["layout.pp=2", "layout.dp_shard=2", "layout.schedule=zb-h1"],
            "layout.schedule zb-h1",
            "use layout.zero 1, or layout.schedule 1f1b",
        ),
        (
            ["layout.pp=2", "layout.dp_shard=2", "layout.zero=2", "layout.schedule=zbv"],
            "layout.schedule zbv",
            "use layout.zero2_reduce step, or layout.schedule 1f1b",
        ),
        (
            ["layout.pp=2", "train.compile=true", "layout.schedule=zbv"],
            "layout.schedule zbv",
            "use train.compile false, or layout.schedule interleaved",
        ),
        (
            ["layout.pp=2", "layout.dp_shard=2", "layout.schedule=pipedream-2bw"],
            "layout.schedule pipedream-2bw",
            "use layout.zero 1, or layout.schedule 1f1b",
        ),
        (
            ["layout.pp=2", "layout.dp_shard=2", "layout.schedule=pipemare"],
            "layout.schedule pipemare",
            "use layout.dp_shard 1, or layout.schedule 1f1b",
        ),
        (
            ["layout.pp=2", "layout.dp_shard=2", "layout.zero=1", "layout.schedule=pipemare"],
            "layout.schedule pipemare",
            "use layout.dp_shard 1, or layout.schedule pipedream-2bw",
        ),
        (
            ["layout.replicas=[{pp: 3}, {pp: 2}]", "layout.schedule=pipemare"],
            "layout.schedule pipemare",
            "use layout.replicas [], or layout.schedule 1f1b",
        ),
        (
            ["layout.pp=2", "train.compile=true", "layout.schedule=pipedream"],
            "layout.schedule pipedream",
            "use train.compile false, or layout.schedule 1f1b",
        ),
        (
            ["layout.pp=2", "model.tied_embeddings=true", "layout.schedule=pipemare"],
            "layout.schedule pipemare",
            "use model.tied_embeddings false, or layout.schedule pipedream-2bw",
        ),
        (
            ["layout.pp=2", "train.recompute=full", "layout.schedule=pipemare"],
            "layout.schedule pipemare",
            "use train.recompute none, or layout.schedule pipedream-2bw",
        ),
        (
            ["layout.pp=2", "train.precision=fp16", "layout.schedule=pipemare"],
            "layout.schedule pipemare",
            "use train.precision bf16, or layout.schedule 1f1b",
        ),
        (
            ["layout.pp=2", "train.memory.gradients=host", "layout.schedule=pipedream"],
            "layout.schedule pipedream",
            "remove train.memory, or use layout.schedule 1f1b",
        ),
        (
            ["layout.pp=2", "layout.schedule=pipedream", "layout.virtual_stages=2"],
            "layout.virtual_stages 2",
            "use layout.schedule interleaved, or virtual_stages 0",
        ),
    ],
)
def test_an_impossible_degree_is_refused(overrides: list[str], place: str, offer: str) -> None:
    said = sentence(*overrides)
    assert re.match(rf"{re.escape(place)}(?!\w)", said)
    assert f"; {offer};" in f"{said};"


def test_the_line_of_the_run_file_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(TEXT + "  replicas:\n    - {pp: 2}\n    - pp: 9\n", "run.yaml")
    assert str(caught.value) == (
        "run.yaml:7: layout.replicas.1.pp 9 is more than model.layers 6; use 6 or less"
    )


degree = st.integers(1, 9)


@given(
    heads=st.sampled_from([1, 2, 4, 6, 8, 12]),
    kv_heads=st.integers(1, 12),
    ffn_dim=st.integers(1, 24),
    layers=st.integers(1, 8),
    microbatch=st.integers(1, 8),
    pp=degree,
    dp_shard=degree,
    tp=degree,
    cp=degree,
    method=st.sampled_from(["ring", "ulysses", "ulysses-ring"]),
    length=st.sampled_from([8, 12, 32]),
    workers=st.integers(0, 24),
    batches=st.lists(st.integers(1, 12), min_size=1, max_size=2),
    larger=st.booleans(),
)
def test_what_a_refusal_offers_works(
    heads: int,
    kv_heads: int,
    ffn_dim: int,
    layers: int,
    microbatch: int,
    pp: int,
    dp_shard: int,
    tp: int,
    cp: int,
    method: str,
    length: int,
    workers: int,
    batches: list[int],
    larger: bool,
) -> None:
    """Follow the sentence, each offer in turn, until nothing is refused: no key is refused again
    after its own offer was taken. `larger`: take a larger microbatch where one is offered."""
    assume(heads % kv_heads == 0)
    value: dict[str, Any] = {
        "model": {
            "preset": None,
            "layers": layers,
            "dim": 4 * heads,
            "heads": heads,
            "kv_heads": kv_heads,
            "ffn_dim": ffn_dim,
        },
        "train": {
            "batch_size": batches[0] * microbatch,
            "microbatch_size": microbatch,
            "batch_warmup": [{"from_step": 1, "batch_size": batches[-1] * microbatch}],
        },
        "data": {"sequence_length": length},
        "layout": {
            "pp": pp,
            "dp_shard": dp_shard,
            "cp": cp,
            "cp_method": method,
            "tp": tp,
            "workers": workers,
        },
    }
    mended: set[str] = set()
    while (said := _refusal(value)) is not None:
        key, was, offers, microbatches = said
        assert key not in mended, f"{key} was mended, and is refused again"
        assert offers
        assert was not in offers
        mended.add(key)
        if larger and microbatches:
            (value["train"]["microbatch_size"],) = microbatches
            continue
        value["layout"][key] = offers[-1] if len(mended) % 2 else offers[0]
    config = RunConfig.model_validate(value)
    degrees = config.layout
    assert heads % degrees.tp == ffn_dim % degrees.tp == 0
    assert config.train.microbatch_size % degrees.dp_shard == 0
    assert degrees.cp == 1 or length % (2 * degrees.cp) == 0
    assert degrees.pp <= layers
    assert degrees.workers % degrees.ranks == 0


def _refusal(value: dict[str, Any]) -> tuple[str, int, list[int], list[int]] | None:
    """(key of the layout, its value, the values offered instead, microbatch sizes offered)."""
    try:
        RunConfig.model_validate(value)
    except ValueError as error:
        said = re.search(r"layout\.(\w+) (\d+) .*: use (.*?) \[type", str(error), re.DOTALL)
        if said is None:
            raise
        key, was, offer = said.groups()
        numbers = offer.split("dp_shard ")[-1].split(", or")[0]
        microbatches = [int(size) for size in re.findall(r"microbatch_size (\d+)", offer)]
        return key, int(was), [int(number) for number in re.findall(r"\d+", numbers)], microbatches
    return None
