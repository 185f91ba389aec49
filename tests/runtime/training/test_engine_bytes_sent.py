"""What a whole engine sends in one step, by kind, against the formulas of the literature.

Each replica computes one microbatch, so one piece: k = 1 in the reducer's formula. All counts are
in elements of float32, per rank.
"""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config.run import RunConfig
from holdfast.core.sharding.parameters import decoder_parameters
from holdfast.options.quantized.apply import BLOCK
from holdfast.options.tp_by.cost import attention_tokens, ffn_tokens
from holdfast.options.zero2_reduce.cost import zero2_costs
from holdfast.parallel.axes.expert_parallel import routed_layers
from holdfast.parallel.axes.process_groups import connect
from holdfast.parallel.axes.replica_groups import ConnectSettings
from holdfast.parallel.comm.comm_stats import TrafficCounter
from holdfast.training.engine.build import build_engine
from tests.support.layouts import VOCABULARY, case, config_of, topology_of
from tests.support.marks import in_campaign
from tests.support.ranks import RankContext, rank_values
from tests.support.tiny_training import CPU, LENGTH, feed

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


def _sent(rank: RankContext, name: str, microbatches: int) -> dict[str, float]:
    """Elements that one step of this rank sends, by kind; small exchanges left aside."""
    config, traffic = _config(name, microbatches), TrafficCounter()
    topology = topology_of(case(name), config)
    groups = connect(
        ConnectSettings(rank.store(), CPU, seconds=60.0, traffic=traffic), topology, rank.rank
    )
    made = build_engine(config, groups, CPU)
    made.initialise(config.seed)
    part, parts = groups.coordinate.dp_shard, groups.degree("dp_shard")
    for step in (1, 2):  # the first one may send what is only needed once
        traffic.reset()
        share = made.begin(step)
        assert len(share) == microbatches
        made.compute([feed(step, leaf, SAMPLES, part, parts, VOCABULARY) for leaf in share])
        made.apply(made.reduce())
    sent = traffic.bytes_by_kind
    made.close()
    assert sent.pop("control", 0) < 2000
    return {kind: count / BYTES for kind, count in sent.items()}


def _sizes(name: str) -> tuple[int, int]:
    """(elements of the model, of these outside of the blocks)."""
    rows = decoder_parameters(_config(name, 1).model)
    sizes: dict[str, int] = {}
    for row in rows:
        size = 1
        for length in row.shape:
            size *= length
        sizes[row.name] = size
    ends = sum(size for key, size in sizes.items() if not key.startswith("layers."))
    return sum(sizes.values()), ends


def _said(name: str, microbatches: int) -> float:
    """Elements that a rank sends by `layout show`."""
    config = _config(name, microbatches)
    used, _ = zero2_costs(config, topology_of(case(name), config), 0)
    return used.sent / BYTES


def _about(**kinds: float) -> Any:
    return pytest.approx(kinds, rel=0.02)


def test_replicas_send_k_plus_1_parts_of_the_gradient_dp2() -> None:
    """(k + 1)(n - 1)/n of the gradient with k = 1 piece and n = 2 replicas."""
    model, _ = _sizes("dp2")
    for sent in rank_values(_sent, 2, {"name": "dp2", "microbatches": 1}):
        assert sent == _about(reduce=2 * model / 2)


def test_zero1_reduces_to_the_owner_and_gathers_the_parameters_dpshard2() -> None:
    """Rajbhandari et al., 2020, section 7.1: one reduce-scatter, one all-gather."""
    model, _ = _sizes("zero1.2")
    for sent in rank_values(_sent, 2, {"name": "zero1.2", "microbatches": 1}):
        assert sent == _about(reduce=model / 2, gather=model / 2)


def test_zero2_gathers_once_and_adds_up_each_microbatch_dpshard2() -> None:
    """The paper's volume with one microbatch; with m, the part of the gradients m times."""
    model, _ = _sizes("zero2.2")
    for sent in rank_values(_sent, 2, {"name": "zero2.2", "microbatches": 4}):
        assert sent == _about(scatter=4 * model / 2, gather=model / 2)
        assert sum(sent.values()) == pytest.approx(_said("zero2.2", 4), rel=0.02)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_zero2_that_adds_up_once_a_step_has_the_volume_of_replicas_dpshard2(
    microbatches: int,
) -> None:
    """Rajbhandari et al., 2020, section 7.1: twice the model in all, as an all-reduce, whatever
    the number of microbatches. 2 (n - 1) / n of it leave a rank."""
    model, _ = _sizes("once.zero2.2")
    arguments = {"name": "once.zero2.2", "microbatches": microbatches}
    for sent in rank_values(_sent, 2, arguments):
        assert sent == _about(reduce=model / 2, gather=model / 2)
        assert sum(sent.values()) == pytest.approx(2 * model / 2, rel=0.02)
        assert sum(sent.values()) == pytest.approx(_said("once.zero2.2", microbatches), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2.2-dp2", "once.zero2.2-dp2"])
def test_zero2_of_several_replicas_sends_what_layout_show_says(name: str) -> None:
    """R = 2 replicas of n = 2. Once a step: P - P / (R n) to owners, and (R - 1) / R of P / n
    from here. Otherwise the part of each is summed over replicas, 2 (R - 1) / R of P / n."""
    model, _ = _sizes(name)
    expected = {"reduce": model / 2, "scatter": 4 * model / 2, "gather": model / 2}
    if name.startswith("once"):
        expected = {"reduce": model * 3 / 4 + model / 4, "gather": model / 2}
    for sent in rank_values(_sent, 4, {"name": name, "microbatches": 4}):
        assert sent == _about(**expected)
        assert sum(sent.values()) == pytest.approx(_said(name, 4), rel=0.02)


@pytest.mark.parametrize(("name", "gathers"), [("zero2.2", 1), ("shard2", 2)])
def test_sharded_parameters_send_what_the_paper_says_dpshard2(name: str, gathers: int) -> None:
    """Rajbhandari et al., 2020, section 7: stage 3 gathers a second time, in the backward; of
    that the last unit, all outside of the blocks, is spared: it begins where the forward ended."""
    model, ends = _sizes(name)
    for sent in rank_values(_sent, 2, {"name": name, "microbatches": 1}):
        spared = ends if gathers == 2 else 0
        assert sent == _about(scatter=model / 2, gather=(gathers * model - spared) / 2)


def test_codes_of_few_bits_send_a_scale_for_each_block_dpshard2() -> None:
    """Wang et al., 2023: weights in 8 bits and gradients in 4, with 4 bytes for 128 of them."""
    model, ends = _sizes("qboth.shard2")
    weight, gradient = (bits / 8 + 4 / BLOCK for bits in (8, 4))
    for sent in rank_values(_sent, 2, {"name": "qboth.shard2", "microbatches": 1}):
        gathered = (2 * model - ends) / 2 * weight / BYTES
        assert sent == _about(scatter=model / 2 * gradient / BYTES, gather=gathered)


@pytest.mark.parametrize("name", ["tp2", "plain.tp2"])
def test_tensor_parallelism_sends_two_sums_per_region(name: str) -> None:
    """The formula of `parallel/axes/tensor_parallel.py`, n = 2, with the embedding and the head
    here."""
    config, tokens = _config(name, 1), SAMPLES * LENGTH
    sums = 8 * config.model.layers + 2 + 2
    formula = tokens * config.model.dim * sums / 2 + 2 * tokens
    for sent in rank_values(_sent, 2, {"name": name, "microbatches": 1}):
        assert sent["tp"] == pytest.approx(formula, rel=0.02)


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
    for sent in rank_values(_sent, size, {"name": name, "microbatches": 1}):
        assert sent["tp"] == pytest.approx(formula, rel=0.02)


def _sent_to_experts(rank: RankContext, name: str) -> dict[str, Any]:
    """Bytes of a step for experts, and the choices of each router of this rank's tokens."""
    config, traffic = _config(name, 1), TrafficCounter()
    topology, counts = topology_of(case(name), config), list[list[int]]()
    groups = connect(
        ConnectSettings(rank.store(), CPU, seconds=60.0, traffic=traffic, ep=config.layout.ep),
        topology,
        rank.rank,
    )
    made = build_engine(config, groups, CPU)
    made.initialise(config.seed)
    for layer in routed_layers(made.objective.decoder):  # type: ignore[arg-type, union-attr]
        layer.router.register_forward_hook(lambda _, x, found: counts.append(found.counts.tolist()))
    part, parts = groups.coordinate.dp_shard, groups.degree("dp_shard")
    made.compute([feed(1, leaf, SAMPLES, part, parts, VOCABULARY) for leaf in made.begin(1)])
    made.apply(made.reduce())
    sent = traffic.bytes_by_kind["ep"]
    made.close()
    return {"sent": sent, "counts": counts}


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
    found = rank_values(_sent_to_experts, size, {"name": name})
    experts = 4 // size  # of a rank
    for me in range(size):
        mine = range(me * experts, (me + 1) * experts)
        rows = 0
        for choices in zip(*(each["counts"] for each in found), strict=True):  # of a block
            rows += sum(n for expert, n in enumerate(choices[me]) if expert not in mine)
            rows += sum(choices[rank][e] for rank in range(size) if rank != me for e in mine)
        numbers = config.model.layers * 8 * ((size - 1) * experts + gathered)
        formula = 2 * rows * config.model.dim * BYTES + numbers
        assert found[me]["sent"] == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_pipeline_sends_activations_one_way_and_their_gradients_the_other_pp2(
    microbatches: int,
) -> None:
    """[B, S, D] of each microbatch leaves the first stage, its gradient the last one."""
    activation = SAMPLES * LENGTH * _config("pp2", 1).model.dim
    for sent in rank_values(_sent, 2, {"name": "pp2", "microbatches": microbatches}):
        assert sent == _about(pp=microbatches * activation)
