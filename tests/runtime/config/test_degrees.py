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


ONCE = "zero=2 zero2_reduce=step"
EXPERTS = "model.family=mixtral model.experts.count=6"
PLAIN = "layout.async_tp false"
REFUSED = [
    ("tp=5", "4 or 12"),
    ("tp=8", "4 or 12, or layout.tp_by.attention 4"),
    ("tp=4 layout.tp_by.attention=3", "2 or 4"),
    ("tp=8 layout.tp_by.attention=8", "4"),
    ("tp=12 model.kv_heads=3 layout.tp_by.attention=2", "1 or 3"),
    ("tp=4 model.ffn_dim=26 layout.tp_by.ffn=4", "2"),
    (f"{EXPERTS} tp=2 layout.tp_by.ffn=1", "0"),
    ("lora.rank=4 layout.tp_by.attention=1", "0"),
    (
        "tp=2 layout.tp_by.attention=1 train.precision=fp8",
        "layout.tp_by.attention 0, or train.precision bf16",
    ),
    ("train.microbatch_size=3 tp=2 async_tp=true", f"{PLAIN}, or train.microbatch_size 4"),
    ("train.recompute=full tp=2 async_tp=true", f"{PLAIN}, or train.recompute none"),
    ("tp=2 sequence_parallel=false async_tp=true", f"{PLAIN}, or layout.sequence_parallel true"),
    ("train.compile=true tp=2 async_tp=true", f"{PLAIN}, or train.compile false"),
    ("tp=2 cp=2 async_tp=true", f"{PLAIN}, or layout.cp 1"),
    (f"{EXPERTS} tp=2 async_tp=true", PLAIN),
    ("tp=2 async_tp=true layout.tp_by.attention=1", PLAIN),
    ("ep=2", "layout.ep 1"),
    (f"{EXPERTS} dp_shard=3 expert_replicas=auto", "layout.expert_replicas off"),
    (f"{EXPERTS} dp_shard=3 ep=2", "layout.ep 1 or 3"),
    (f"{EXPERTS} dp_shard=3 cp=2 ep=4", "layout.ep 3 or 6"),
    (f"{EXPERTS} dp_shard=2 cp=2 ep=4", "layout.ep 2"),
    (f"{EXPERTS} cp=2 train.optimizer.name=adafactor ep=2", "layout.ep 1"),
    (f"{EXPERTS} dp_shard=2 zero=1 ep=2", "layout.zero 2"),
    (f"{EXPERTS} dp_shard=2 {ONCE} ep=2", "layout.zero2_reduce microbatch"),
    (f"{EXPERTS} train.recompute=selective dp_shard=2 ep=2", "train.recompute full"),
    (
        f"{EXPERTS} train.recompute=[none,selective] pp=2 dp_shard=2 ep=2",
        "train.recompute [none, full]",
    ),
    ("schedule=interleaved virtual_stages=4 pp=3", "layout.virtual_stages 2"),
    (f"{EXPERTS} cp=2 model.experts.capacity=1.5", "model.experts.capacity 0"),
    (
        f"{EXPERTS} model.dim=64 model.heads=4 model.ffn_dim=64 train.precision=fp8",
        "train.precision bf16",
    ),
    (
        "workers=4 dp_shard=2 tp=2 layout.tp_by.attention=1 zero=3 quantized=weights",
        "layout.quantized: none",
    ),
    (f"{EXPERTS} dp_shard=2 ep=2 quantized=weights", "layout.quantized: none"),
    (f"dp_shard=2 {ONCE} quantized=gradients", "layout.quantized: none"),
    (f"dp_shard=2 {ONCE} train.memory.parameters=host", "train.memory.parameters: device"),
    (f"{EXPERTS} model.experts.width=20 tp=4 tp=12", "4"),
    ("tp=24", "12, or layout.tp_by.attention 12"),
    ("model.ffn_dim=22 tp=4", "2, or layout.tp_by.ffn 2"),
    ("tp=6", "4 or 12, or layout.tp_by.attention 2"),
    ("cp=5", "4 or 8"),
    ("cp_method=ulysses cp=8", "4, or layout.cp_method ring"),
    ("cp_method=ulysses-ring cp_ring=4 cp=2", "1 or 4"),
    ("pp=7", "6 or less"),
    ("pp=3 stages=[3,3]", "[2, 2, 2], or [] to have them balanced by cost"),
    ("pp=4 stages=[1,1,1,1]", "[2, 2, 1, 1], or [] to have them balanced by cost"),
    ("dp_shard=4", "train.microbatch_size 8, or layout.dp_shard 3 or 6"),
    ("dp_shard=5", "layout.dp_shard 3 or 6"),
    (
        "train.batch_warmup.0.from_step=1 train.batch_warmup.0.batch_size=12 dp_shard=4",
        "train.microbatch_size 12, or layout.dp_shard 3 or 6",
    ),
    (
        "layout.replicas.0.dp_shard=3 layout.replicas.1.dp_shard=4",
        "train.microbatch_size 12, or layout.replicas.1.dp_shard 3 or 6",
    ),
    ("pp=2 tp=2 workers=6", "4 or 8"),
    ("layout.replicas.0.pp=3 layout.replicas.1.pp=2 workers=6", "5, or 0"),
    ("layout.replicas.0.pp=2 layout.replicas.1.tp=5", "4 or 12"),
    ("schedule=zbv pp=4", "layout.pp 3, or layout.schedule 1f1b"),
    ("schedule=interleaved pp=2 stages=[3,3]", "[2, 2, 1, 1], or [] to have them balanced by cost"),
    ("schedule=zb-h1 virtual_stages=2", "layout.schedule interleaved, or virtual_stages 0"),
    ("pp=2 dp_shard=2 schedule=zb-h1", "layout.zero 1, or layout.schedule 1f1b"),
    ("pp=2 dp_shard=2 zero=2 schedule=zbv", "layout.zero2_reduce step, or layout.schedule 1f1b"),
    ("pp=2 train.compile=true schedule=zbv", "train.compile false, or layout.schedule interleaved"),
    ("pp=2 dp_shard=2 schedule=pipedream-2bw", "layout.zero 1, or layout.schedule 1f1b"),
    ("pp=2 dp_shard=2 schedule=pipemare", "layout.dp_shard 1, or layout.schedule 1f1b"),
    (
        "pp=2 dp_shard=2 zero=1 schedule=pipemare",
        "layout.dp_shard 1, or layout.schedule pipedream-2bw",
    ),
    (
        "layout.replicas.0.pp=3 layout.replicas.1.pp=2 schedule=pipemare",
        "layout.replicas [], or layout.schedule 1f1b",
    ),
    ("pp=2 train.compile=true schedule=pipedream", "train.compile false, or layout.schedule 1f1b"),
    (
        "pp=2 model.tied_embeddings=true schedule=pipemare",
        "model.tied_embeddings false, or layout.schedule pipedream-2bw",
    ),
    (
        "pp=2 train.recompute=full schedule=pipemare",
        "train.recompute none, or layout.schedule pipedream-2bw",
    ),
    (
        "pp=2 train.precision=fp16 schedule=pipemare",
        "train.precision bf16, or layout.schedule 1f1b",
    ),
    (
        "pp=2 schedule=pipedream virtual_stages=2",
        "layout.schedule interleaved, or virtual_stages 0",
    ),
]
"""Overrides, of `layout` if they name no section; what is offered instead of the last one."""
REFUSED_OTHERWISE = [
    ("tp=2 layout.tp_by.mlp=2", "unknown key layout.tp_by.mlp", "layout.tp_by has attention, ffn"),
    ("schedule=ZBV", "layout.schedule is 'ZBV'", "did you mean zbv?"),
    ("pp=2 stages=[6,0]", "layout.stages.1 is 0", "use 1"),
    ("pp=0", "layout.pp is 0", "use 1"),
    ("layout.replicas.0.pp=3 layout.replicas.1.pp=2 tp=2", "layout.tp is", "use one of the two"),
    ("zero=4", "layout.zero is 4", "use 1"),
    ("schedule=1f1", "layout.schedule is '1f1'", "did you mean 1f1b?"),
    (
        "pp=2 balance_costs=[1,1,1]",
        "layout.balance_costs has",
        "use 8 times, or layout.balance_costs []",
    ),
    (
        "pp=2 balance=memory balance_costs=[1,1,1]",
        "layout.balance_costs has",
        "use layout.balance time, or layout.balance_costs []",
    ),
    (
        "pp=2 train.memory.gradients=host schedule=pipedream",
        "layout.schedule pipedream",
        "remove train.memory, or use layout.schedule 1f1b",
    ),
]
"""The same with the place."""


@pytest.mark.parametrize(("overrides", "offer"), REFUSED)
def test_an_impossible_degree_is_refused(overrides: str, offer: str) -> None:
    place = overrides.split()[-1].replace("=", " ").replace(",", ", ")
    check(overrides, place if "." in place else f"layout.{place}", f"use {offer}")


@pytest.mark.parametrize(("overrides", "place", "offer"), REFUSED_OTHERWISE)
def test_an_impossible_value_is_refused(overrides: str, place: str, offer: str) -> None:
    check(overrides, place, offer)


def check(overrides: str, place: str, offer: str) -> None:
    keys = [w if "." in w.partition("=")[0] else f"layout.{w}" for w in overrides.split()]
    with pytest.raises(ConfigError) as caught:
        resolve_config(TEXT, "run.yaml", keys)
    said = str(caught.value).removeprefix(f"command line: {keys[-1]}: ")
    assert re.match(rf"{re.escape(place)}(?!\w)", said)
    assert f"; {offer};" in f"{said};"
    assert "\n" not in said


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
