"""FLOPs per token against a count of the real matrix products; learning rates; keyed seeds."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from holdfast.config.sections.model import ModelConfig
from holdfast.config.sections.train import (
    SCHEDULES,
    SCHEDULES_WITHOUT_FINAL_RATIO,
    ScheduleConfig,
    TrainConfig,
)
from holdfast.core.flops import CONVENTIONS, counted_parameters, dense_peak, flops_per_token
from holdfast.core.lr_schedule import last_common_step, learning_rate, schedule_factor
from holdfast.core.seeds import key_seed
from holdfast.model.decoder import Decoder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_dim", [0, 48])
def test_full_convention_counts_the_real_products(tied: bool, head_dim: int) -> None:
    model = ModelConfig.model_validate(
        {"preset": "tiny", "vocab_size": 256, "tied_embeddings": tied, "head_dim": head_dim}
    )
    batch, sequence = 2, 64
    with torch.device("meta"):
        decoder = Decoder(model)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
        # A mask makes torch compute, and count, attention without skipping the masked half.
        mask = torch.ones(1, 1, sequence, sequence, dtype=torch.bool)
    with FlopCounterMode(display=False) as counter:
        decoder(tokens, mask=mask)
    gains = sum(p.numel() for p in decoder.parameters() if p.dim() == 1)
    forward = flops_per_token(model, sequence, "full") / 3 - 2 * gains
    assert counter.get_total_flops() / (batch * sequence) == pytest.approx(forward, rel=1e-9)


def test_causal_convention_halves_attention_alone() -> None:
    model = ModelConfig.model_validate({"preset": "llama3.1-8b"})
    full, causal = (flops_per_token(model, 8192, name) for name in CONVENTIONS)
    parameters = 6 * counted_parameters(model)
    assert full - parameters == 2 * (causal - parameters)
    # Llama 3.1 8B at 8,192: frameworks that halve quote 5.15e10, those that do not 5.79e10.
    assert full == pytest.approx(5.79e10, rel=0.005)
    assert causal == pytest.approx(5.15e10, rel=0.005)


def test_utilisation_of_a_published_run() -> None:
    # 42,000 tokens/s on one H100 with Llama 3.2 1B at 4,096 is 38 % by torchtitan's formula.
    model = ModelConfig.model_validate({"preset": "llama3.2-1b"})
    peak = dense_peak("NVIDIA H100 80GB HBM3", "bf16")
    assert peak == 989e12
    assert 42_000 * flops_per_token(model, 4096, "full") / peak == pytest.approx(0.383, abs=0.001)


def test_unknown_peaks_are_unknown() -> None:
    assert dense_peak("AMD EPYC 9B14", "bf16") is None
    assert dense_peak("NVIDIA H100 80GB HBM3", "fp32") is None
    assert dense_peak("NVIDIA H100 PCIe", "bf16") == 756e12
    assert dense_peak("NVIDIA H200", "bf16") == 989e12


def test_a_window_costs_its_own_keys() -> None:
    whole = {"preset": "tiny", "vocab_size": 256}
    plain = ModelConfig.model_validate(whole)
    near = ModelConfig.model_validate(whole | {"window": 16, "window_layers": [0]})
    per_key = 12 * plain.heads * plain.head_size
    full = [flops_per_token(m, 64, "full") for m in (plain, near)]
    assert full[0] - full[1] == per_key * (64 - 16)
    # Causal: a token sees min(its number, 16) keys.
    seen = sum(min(n, 16) for n in range(1, 65)) / 64
    causal = [flops_per_token(m, 64, "causal") for m in (plain, near)]
    assert causal[0] - causal[1] == pytest.approx(per_key * (32 - seen), rel=0.03)
    wide = ModelConfig.model_validate(whole | {"window": 64})
    for convention in CONVENTIONS:
        assert flops_per_token(wide, 64, convention) == flops_per_token(plain, 64, convention)


# --- learning-rate schedules ----------------------------------------------------------------------


def test_cosine_values() -> None:
    schedule = ScheduleConfig(kind="cosine", warmup_steps=10, final_ratio=0.1)
    assert [schedule_factor(schedule, n, 110) for n in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert schedule_factor(schedule, 60, 110) == pytest.approx(0.55)
    assert schedule_factor(schedule, 35, 110) == pytest.approx(
        0.1 + 0.45 * (1 + math.cos(math.pi / 4))
    )
    assert schedule_factor(schedule, 110, 110) == pytest.approx(0.1)


def test_linear_and_constant_values() -> None:
    linear = ScheduleConfig(kind="linear", warmup_steps=0, final_ratio=0.0)
    assert [schedule_factor(linear, n, 4) for n in (1, 2, 3, 4)] == [0.75, 0.5, 0.25, 0.0]
    constant = ScheduleConfig(kind="constant", warmup_steps=2)
    assert [schedule_factor(constant, n, 9) for n in (1, 2, 3, 9)] == [0.5, 1.0, 1.0, 1.0]


def test_wsd_is_flat_and_then_falls_over_a_fifth() -> None:
    schedule = ScheduleConfig(kind="wsd", warmup_steps=5, final_ratio=0.2)
    assert [schedule_factor(schedule, n, 100) for n in (5, 6, 50, 80)] == [1.0] * 4
    assert schedule_factor(schedule, 90, 100) == pytest.approx(0.6)
    assert schedule_factor(schedule, 100, 100) == pytest.approx(0.2)
    explicit = ScheduleConfig(kind="wsd", warmup_steps=0, decay_steps=50, final_ratio=0.0)
    assert schedule_factor(explicit, 75, 100) == pytest.approx(0.5)


def test_rate_is_the_peak_times_the_factor() -> None:
    train = TrainConfig(steps=20)
    assert learning_rate(train, 20) == train.optimizer.learning_rate
    assert learning_rate(train, 1) == pytest.approx(train.optimizer.learning_rate / 20)


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 60),
    st.integers(0, 80),
    st.integers(0, 80),
    st.floats(0, 1),
)
def test_every_schedule_rises_once_and_then_never_rises(
    kind: str, steps: int, warmup: int, decay: int, ratio: float
) -> None:
    schedule = ScheduleConfig.model_validate(
        {"kind": kind, "warmup_steps": warmup, "decay_steps": decay, "final_ratio": ratio}
    )
    rates = [schedule_factor(schedule, n, steps) for n in range(1, steps + 1)]
    assert all(0.0 <= r <= 1.0 for r in rates)
    after = rates[max(0, warmup - 1) :]
    assert all(b <= a + 1e-12 for a, b in pairwise(after))
    if kind not in SCHEDULES_WITHOUT_FINAL_RATIO and warmup < steps:
        assert rates[-1] == pytest.approx(ratio)


def test_a_schedule_with_a_length_of_its_own_leaves_the_steps_before_as_they_were() -> None:
    short = TrainConfig(steps=50)
    long = TrainConfig(steps=80, schedule=ScheduleConfig(steps=50))
    assert [learning_rate(short, s) for s in range(1, 51)] == [
        learning_rate(long, s) for s in range(1, 51)
    ]
    assert {learning_rate(long, s) for s in range(50, 81)} == {learning_rate(short, 50)}


def test_last_common_step() -> None:
    wsd = ScheduleConfig(kind="wsd", warmup_steps=5)
    short, long = TrainConfig(steps=50, schedule=wsd), TrainConfig(steps=80, schedule=wsd)
    assert last_common_step(short, long, 30) == 30
    assert last_common_step(short, long, 50) == 40, "the decay takes the last fifth"
    assert last_common_step(TrainConfig(steps=50), TrainConfig(steps=51), 50) == 20, "warm-up"


# --- keyed seeds ----------------------------------------------------------------------------------
PARTS = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=8)), max_size=4)


def test_values_are_part_of_the_format() -> None:
    assert key_seed(0, "init", "embed.weight") == 7846031751278615929
    assert key_seed(1, "sample", 7, 12) == 8253341781070720133


@given(PARTS, PARTS)
def test_different_keys_have_different_seeds(a: list[int | str], b: list[int | str]) -> None:
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]
    assert (key_seed(1, "p", *a) == key_seed(1, "p", *b)) == same


@given(st.integers(0, 2**63 - 1), st.text(max_size=20), PARTS)
def test_every_seed_is_a_torch_seed(seed: int, purpose: str, parts: list[int | str]) -> None:
    assert 0 <= key_seed(seed, purpose, *parts) < 2**63


def test_neighbouring_items_do_not_run_together() -> None:
    keys = [("ab", "c"), ("a", "bc"), ("abc",), (1, 1), (11,), ("1", 1), (1, "1"), ("", "abc")]
    assert len({key_seed(1, "p", *key) for key in keys}) == len(keys)


def test_bits_are_spread_evenly() -> None:
    seeds = [key_seed(3, "sample", step) for step in range(4000)]
    for bit in range(63):
        share = sum(seed >> bit & 1 for seed in seeds) / len(seeds)
        assert 0.45 < share < 0.55  # six standard deviations
