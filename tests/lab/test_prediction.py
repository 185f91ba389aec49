"""Samples of a trace, fits and verdicts: what is counted, what is censored, who wins where."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn

from holdfast.errors import DataError
from holdfast.policy.prediction.bilstm import SIGNALS_PER_BIN, BiLstm
from holdfast_lab.prediction.bilstm import _Network, _to_pure, train_bilstm
from holdfast_lab.prediction.fitting import TrainingPart, fit_models, predict_all
from holdfast_lab.prediction.judging import average_precision, best_threshold, judge
from holdfast_lab.prediction.reading import label_zone, read_history
from holdfast_lab.prediction.samples import changes_of, take_samples
from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader, in_order
from holdfast_lab.traces.generators import make_trace

LIVES = (
    "name,zone,lifetime_s,insert_end_time,other_ops\n"
    "a,z1,3600,2019-03-25T12:00:00+00:00,compute.instances.preempted\n"
    "b,z2,7200,2019-03-25T12:30:00+00:00,stopped\n"
    "c,z1,60,,compute.instances.preempted\n"
)


def stream(*events: TraceEvent, seconds: float, **header: object) -> EventStream:
    return EventStream(TraceHeader("t", seconds=seconds, **header), in_order(events))


def join(t: float, node: str, zone: str = "z") -> TraceEvent:
    return TraceEvent(t, "join", node, zone, value=1.0)


def gone(t: float, node: str, zone: str = "z") -> TraceEvent:
    return TraceEvent(t, "preempt", node, zone)


def test_each_loss_is_in_one_sample_and_a_newborn_counts_as_missed() -> None:
    made = stream(
        join(0, "a"), join(0, "b"), gone(25, "a"), join(31, "c"), gone(34, "c"), seconds=60
    )
    found = take_samples(made, 10.0)
    lost = [(s.t_s, s.node, s.lead_s) for s in found.samples if s.is_lost]
    assert lost == [(20.0, "a", 5.0)]
    assert found.losses == 2  # c came and went between two moments
    assert len(found.samples) == 3 + 6


def test_what_cannot_be_known_is_no_sample() -> None:
    stopped = TraceEvent(25.0, "preempt", "a", "z", extra={"stopped": True})
    made = stream(join(0, "a"), stopped, join(0, "b"), seconds=65, gaps=((31.0, 39.0),))
    found = take_samples(made, 10.0)
    assert found.losses == 0
    # a: at 0 and 10; at 20 it is censored. b: not at 30 (a gap), nor at 60 (beyond the end).
    assert [s.t_s for s in found.samples if s.node == "a"] == [0.0, 10.0]
    assert [s.t_s for s in found.samples if s.node == "b"] == [0.0, 10.0, 20.0, 40.0, 50.0]


def test_a_table_of_lives_is_judged_as_it_was_lived() -> None:
    found = read_history(LIVES.encode(), "lives.csv")
    assert found.header.notes == ("1 rows without a start are left out",)
    assert [(c.t_s, c.kind, c.zone) for c in changes_of(found)] == [
        (0.0, "join", "z1"),
        (1800.0, "join", "z2"),
        (3600.0, "lost", "z1"),
        (9000.0, "left", "z2"),
    ]
    named = label_zone(stream(TraceEvent(0, "join", "a", value=1.0), seconds=9), "here")
    assert (named.events[0].zone, named.header.zones) == ("here", ("here",))


def test_average_precision_and_threshold() -> None:
    lost, chances = [True, False, True, False], [0.9, 0.8, 0.7, 0.1]
    assert average_precision(lost, chances) == pytest.approx((1 + 2 / 3) / 2)
    assert average_precision(lost, [0.5] * 4) == pytest.approx(0.5)  # the base rate
    assert best_threshold(lost, chances) == 0.7
    assert best_threshold([False] * 4, chances) > 1


def spot(seed: int) -> EventStream:
    """Machines in one zone that are lost at a wall, an hour old, and in rare bursts."""
    draw = random.Random(seed)
    events = []
    for place in range(6):
        at, life = -draw.random() * 3600, 0
        while at < 30 * 3600:
            stay, life = 3600.0 + draw.random() * 60, life + 1
            events.append(join(max(0.0, at), f"n{place}.{life}"))
            if at + stay < 30 * 3600:
                events.append(gone(max(1.0, at + stay), f"n{place}.{life}"))
            at += stay + draw.random() * 600
    return stream(*events, seconds=30 * 3600.0)


def test_a_wall_of_age_is_found_by_the_hazard_and_not_by_the_baselines() -> None:
    past, unseen = spot(1), spot(2)
    fit = fit_models([TrainingPart(past, past.seconds * 0.5)], 300.0)
    asked = take_samples(unseen, 300.0)
    found = {
        name: judge(name, asked, chances, fit.verdicts[name].threshold)
        for name, chances in predict_all(fit.models, None, asked, 300.0).items()
    }
    assert fit.chosen == "hazard"
    assert found["hazard"].precision > 0.8
    assert found["hazard"].recall > 0.8
    assert found["hazard"].calibration_error < 0.03
    assert found["never"].alarms == 0
    assert found["base rate"].average_precision == pytest.approx(found["base rate"].base_rate)
    assert found["last event"].precision < 0.3
    assert 0 < (found["hazard"].lead_s or 0) <= 300.0


def test_failures_without_memory_cannot_be_foreseen() -> None:
    made = make_trace("failures", 1, 60.0, {"nodes": 40.0})
    whole = label_zone(made, "z")
    with pytest.raises(DataError, match="give more traces"):
        fit_models([TrainingPart(whole, 3600.0)], 600.0)


# --- the Bi-LSTM ----------------------------------------------------------------------------------
BINS = 3


def windows(many: int, seed: int) -> list[list[tuple[float, ...]]]:
    draw = random.Random(seed)
    return [
        [tuple(draw.random() for _ in range(SIGNALS_PER_BIN)) for _ in range(BINS)]
        for _ in range(many)
    ]


def test_the_pass_without_torch_is_the_same() -> None:
    torch.manual_seed(3)
    network = _Network()
    pure = _to_pure(network, 5.0, BINS, 10.0)
    data = windows(20, 1)
    with torch.no_grad():
        expected = torch.sigmoid(network(torch.tensor(data))).tolist()
    assert pure.probabilities(data) == pytest.approx(expected, abs=1e-6)
    read = BiLstm.from_json(json.loads(json.dumps(pure.to_json())))
    assert read == pure
    assert read.probability(data[0], 5.0) == pytest.approx(1 - (1 - expected[0]) ** 0.5, abs=1e-6)
    with pytest.raises(ValueError, match="do not fit"):
        BiLstm.from_json({**pure.to_json(), "head": [0.0]})
    assert isinstance(network.lstm, nn.LSTM)


def test_training_learns_a_signal_and_leaves_the_global_generator() -> None:
    data = windows(1500, 2)
    lost = [window[-1][0] > 0.7 for window in data]
    before = torch.get_rng_state()
    made = train_bilstm(data, lost, [1.0] * len(data), 5.0, 10.0)
    assert torch.equal(torch.get_rng_state(), before)
    fresh = windows(200, 5)
    chances = made.probabilities(fresh)
    right = [p for p, window in zip(chances, fresh, strict=True) if window[-1][0] > 0.7]
    wrong = [p for p, window in zip(chances, fresh, strict=True) if window[-1][0] <= 0.7]
    assert sum(right) / len(right) > 0.6
    assert sum(wrong) / len(wrong) < 0.3
