"""What a whole engine sends in one step, by kind, against the formulas of the literature.

Each replica computes one microbatch, so one piece: k = 1 in the reducer's formula. All counts are
in elements of float32, per rank.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.options.quantized.apply import BLOCK
from holdfast.options.tp_by.cost import attention_tokens, ffn_tokens
from holdfast.options.zero2_reduce.cost import zero2_costs
from holdfast.parallel.axes.expert_parallel import routed_layers
from holdfast.parallel.comm.comm_stats import TrafficCounter
from tests.support.layouts import VOCABULARY, case, config_of, engine_for, topology_of
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import LENGTH, feed

SAMPLES, BYTES = 4, 4  # of a microbatch; of an element


def _config(name: str, microbatches: int) -> RunConfig:
    """Matrices of even rows, wide enough that what FSDP2 pads (norms) is below 2 %."""
    of = case(name)
    wide = {
        "model__dim": 64,
        "model__ffn_dim": 160,
        "model__tied_embeddings": False,
        "train__batch_size": SAMPLES * microbatches * len(of.replicas),
        "train__precision": "fp32",
    }
    return config_of({**of.changes, **wide})


def _sent(rank: RankContext, name: str, microbatches: int = 1) -> dict[str, Any]:
    """Elements that one step of this rank sends, by kind, small exchanges left aside; and the
    choices of each router of this rank's tokens."""
    config, traffic, counts = _config(name, microbatches), TrafficCounter(), list[list[int]]()
    made = engine_for(rank, name, config, traffic=traffic)
    for layer in routed_layers(made.objective.decoder):  # type: ignore[arg-type, union-attr]
        layer.router.register_forward_hook(lambda _, x, found: counts.append(found.counts.tolist()))
    part, parts = made.groups.coordinate.dp_shard, made.groups.degree("dp_shard")
    for step in (1, 2):  # the first one may send what is only needed once
        traffic.reset()
        counts.clear()
        share = made.begin(step)
        assert len(share) == microbatches
        made.compute([feed(step, leaf, SAMPLES, part, parts, VOCABULARY) for leaf in share])
        made.apply(made.reduce())
    sent = traffic.bytes_by_kind
    made.close()
    assert sent.pop("control", 0) < 2000
    return {"sent": {kind: count / BYTES for kind, count in sent.items()}, "counts": counts}


def _sent_by_each(name: str, microbatches: int = 1) -> list[dict[str, float]]:
    arguments = {"name": name, "microbatches": microbatches}
    return [found["sent"] for found in rank_values(_sent, case(name).world_size, arguments)]


def _sizes(name: str) -> tuple[int, int]:
    """(elements of the model, of these outside of the blocks)."""
    sizes = {row.name: prod(row.shape) for row in decoder_parameters(_config(name, 1).model)}
    ends = sum(size for key, size in sizes.items() if not key.startswith("layers."))
    return sum(sizes.values()), ends


def _said(name: str, microbatches: int) -> float:
    """Elements that a rank sends by `layout show`."""
    config = _config(name, microbatches)
    used, _ = zero2_costs(config, topology_of(case(name), config), 0)
    return used.sent / BYTES


def _about(**kinds: float) -> Any:
    return pytest.approx(kinds, rel=0.02)


@pytest.mark.parametrize(
    ("name", "microbatches", "parts"),
    [
        ("dp2", 1, {"reduce": 1}),
        ("zero1.2", 1, {"reduce": 1 / 2, "gather": 1 / 2}),
        in_campaign("zero1.4", 1, {"reduce": 3 / 4, "gather": 3 / 4}),
        ("zero2.2", 1, {"scatter": 1 / 2, "gather": 1 / 2}),
        in_campaign("zero2.4", 1, {"scatter": 3 / 4, "gather": 3 / 4}),
        ("zero2.2", 4, {"scatter": 4 / 2, "gather": 1 / 2}),
        ("once.zero2.2", 1, {"reduce": 1 / 2, "gather": 1 / 2}),
        ("once.zero2.2", 4, {"reduce": 1 / 2, "gather": 1 / 2}),
        in_campaign("zero2.2-dp2", 4, {"reduce": 1 / 2, "scatter": 4 / 2, "gather": 1 / 2}),
        in_campaign("once.zero2.2-dp2", 4, {"reduce": 3 / 4 + 1 / 4, "gather": 1 / 2}),
    ],
)
def test_sums_and_parameters_send_what_the_papers_say(
    name: str, microbatches: int, parts: dict[str, float]
) -> None:
    """parts: of the model. Replicas send (k + 1)(n - 1)/n, with k = 1 piece. ZeRO: Rajbhandari
    et al., 2020, section 7.1: one reduce-scatter, of each microbatch in stage 2 unless `once`, and
    one all-gather. R replicas add up, by 2 (R - 1) / R of their part, or once a step with P - P /
    (R n) to owners and (R - 1) / R of P / n from here."""
    model, _ = _sizes(name)
    for sent in _sent_by_each(name, microbatches):
        assert sent == _about(**{kind: part * model for kind, part in parts.items()})
        if "zero2" in name:
            assert sum(sent.values()) == pytest.approx(_said(name, microbatches), rel=0.02)


@pytest.mark.parametrize("name", ["shard2", in_campaign("shard4")])
def test_sharded_parameters_send_what_the_paper_says(name: str) -> None:
    """Rajbhandari et al., 2020, section 7: stage 3 gathers a second time, in the backward. The
    last unit, all outside of the blocks, is spared: the backward begins where the forward ended."""
    (model, ends), n = _sizes(name), case(name).world_size
    for sent in _sent_by_each(name):
        parts = {"scatter": model, "gather": 2 * model - ends}
        assert sent == _about(**{kind: (n - 1) / n * part for kind, part in parts.items()})


def test_codes_of_few_bits_send_a_scale_for_each_block_dpshard2() -> None:
    """Wang et al., 2023: weights in 8 bits and gradients in 4, with 4 bytes for 128 of them."""
    model, ends = _sizes("qboth.shard2")
    weight, gradient = (bits / 8 + 4 / BLOCK for bits in (8, 4))
    for sent in _sent_by_each("qboth.shard2"):
        gathered = (2 * model - ends) / 2 * weight / BYTES
        assert sent == _about(scatter=model / 2 * gradient / BYTES, gather=gathered)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["att2.tp4", "att1ffn2.tp4", "ffn1.tp2", "plain.att2.tp4"])
def test_components_of_a_lower_degree_send_what_layout_show_says(name: str) -> None:
    """The formula of `options/tp_by/cost.py`."""
    config, size, tokens = _config(name, 1), case(name).world_size, SAMPLES * LENGTH
    (replica,) = topology_of(case(name), config).replicas
    dim = config.model.dim
    regions = [each(config, replica, 0) for each in (attention_tokens, ffn_tokens)]
    block = sum(each.sent(tokens, dim) for each in regions)
    formula = config.model.layers * block + (size - 1) / size * tokens * dim * 4
    formula += 2 * (size - 1) * tokens
    for sent in _sent_by_each(name):
        assert sent["tp"] == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize(
    ("name", "gathered"),
    [
        ("experts.ep2.shard2", 4),
        in_campaign("experts.ep2.cp2", 4),
        in_campaign("experts.ep4.shard2-cp2", 4 + 2 * 4),
    ],
)
def test_experts_send_the_tokens_of_other_ranks(name: str, gathered: int) -> None:
    """The formula of `parallel/axes/expert_parallel.py`. gathered: numbers of choices that a block
    sends for the balance loss, along dp_shard and then along cp."""
    config, size = _config(name, 1), case(name).world_size
    found = rank_values(_sent, size, {"name": name})
    experts = 4 // size  # of a rank
    for me in range(size):
        mine = range(me * experts, (me + 1) * experts)
        rows = 0
        for choices in zip(*(each["counts"] for each in found), strict=True):  # of a block
            rows += sum(n for expert, n in enumerate(choices[me]) if expert not in mine)
            rows += sum(choices[rank][e] for rank in range(size) if rank != me for e in mine)
        numbers = config.model.layers * 8 * ((size - 1) * experts + gathered)
        formula = 2 * rows * config.model.dim * BYTES + numbers
        assert found[me]["sent"]["ep"] == pytest.approx(formula / BYTES, rel=0.02)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_pipeline_sends_activations_one_way_and_their_gradients_the_other_pp2(
    microbatches: int,
) -> None:
    """[B, S, D] of each microbatch leaves the first stage, its gradient the last one."""
    activation = SAMPLES * LENGTH * _config("pp2", 1).model.dim
    for sent in _sent_by_each("pp2", microbatches):
        assert sent == _about(pp=microbatches * activation)
