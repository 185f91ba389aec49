"""Which fault comes when, and the folder through which workers are told."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from holdfast.elastic.protocol.fault_orders import FAULT_POINTS, FaultHit, FaultOrder, FaultOrders
from holdfast.errors import UserError
from holdfast_lab.chaos.actions import FAULT_ACTIONS
from holdfast_lab.chaos.catalog import FAULTS
from holdfast_lab.chaos.layouts import CHAOS_LAYOUTS, parse_layout
from holdfast_lab.chaos.relay import LineDirection, LinkShape
from holdfast_lab.chaos.schedule import (
    draw_faults,
    draws_of_trace,
    is_trace_of_faults,
    parse_faults_option,
    read_trace,
    why_unfit,
)


def test_a_seed_gives_the_same_draws_every_time() -> None:
    first = list(islice(draw_faults("7 tp 1", []), 50))
    assert first == list(islice(draw_faults("7 tp 1", []), 50))
    assert first != list(islice(draw_faults("8 tp 1", []), 50))
    assert sum(draw.gap for draw in first) / 50 == pytest.approx(3, abs=0.5)


def test_all_are_drawn_by_their_weights_and_what_is_named_evenly() -> None:
    every = Counter(draw.fault.name for draw in islice(draw_faults("1", []), 5000))
    assert set(every) == {name for name, fault in FAULTS.items() if fault.weight}
    assert every["kill"] > 5 * every["everything"]
    two = ["kill", "run-store-long"]
    named = Counter(draw.fault.name for draw in islice(draw_faults("1", two), 1000))
    assert set(named) == set(two)
    assert named["kill"] == pytest.approx(500, abs=100)


def test_every_fault_has_points_that_exist_and_deeds_that_somebody_does() -> None:
    for fault in FAULTS.values():
        for part in fault.parts:
            assert set(part.points) <= set(FAULT_POINTS), fault.name
            assert not part.is_outside or part.action in FAULT_ACTIONS, fault.name


def test_what_makes_no_sense_for_a_layout_is_said() -> None:
    (pipeline,) = islice(draw_faults("1", ["pipeline"]), 1)
    assert why_unfit(pipeline.fault, CHAOS_LAYOUTS["tp"], None) == "the layout has no pipeline"
    assert why_unfit(pipeline.fault, CHAOS_LAYOUTS["pp"], None) is None
    (partition,) = islice(draw_faults("1", ["partition"]), 1)
    assert why_unfit(partition.fault, CHAOS_LAYOUTS["two"], None) == "it needs 3 nodes"
    assert why_unfit(partition.fault, CHAOS_LAYOUTS["tp"], "no rights") == "no rights"


def test_degrees_name_a_layout() -> None:
    shape = parse_layout("tp=2,workers=4", 2)
    assert (shape.ranks, shape.nodes, shape.ranks_per_node, shape.is_exact) == (4, 2, 2, False)
    assert parse_layout("replicated", 2).settings == ["layout.workers=4", "cluster.places=2"]
    assert parse_layout("replicated", 2).is_exact
    whole = parse_layout("workers=4,pp=1,dp_shard=1")
    assert (whole.is_pipelined, whole.has_shared_state, whole.is_exact) == (False, False, True)
    with pytest.raises(UserError, match="no layout"):
        parse_layout("diagonal")
    with pytest.raises(UserError, match="spread evenly"):
        parse_layout("tp", 3)


def test_a_file_says_which_fault_comes_when() -> None:
    text = '{"step": 9, "fault": "agent", "target": "b"}\n\n{"step": 4, "fault": "kill"}\n'
    first, second = read_trace(text, "f.jsonl", "1")
    assert (first.step, first.fault.name) == (4, "kill")
    assert (second.step, second.fault.name, second.target) == (9, "agent", "b")
    with pytest.raises(UserError, match=r"f.jsonl:1: there is no fault 'earthquake'"):
        read_trace('{"step": 9, "fault": "earthquake"}', "f.jsonl", "1")
    for text in ("step 9", '{"step": 9, "fault": "agent"', '{"step": ' + "[" * 100_000):
        with pytest.raises(UserError, match=r"f.jsonl:1: this is not a fault at a step"):
            read_trace(text, "f.jsonl", "1")
    with pytest.raises(UserError, match="cannot be at 'lunch'"):
        read_trace('{"step": 9, "fault": "kill", "point": "lunch"}', "f.jsonl", "1")


def test_a_file_of_faults_is_known_by_its_keys() -> None:
    assert is_trace_of_faults('\n  { "fault": "agent", "step": 9 }')
    assert is_trace_of_faults('{ "step": 9}')
    assert is_trace_of_faults('{"step": 12, "fault": "agent"'), "a slip is told where it is"
    assert not is_trace_of_faults('{"data": [1, 2], "metadata": {"gap_seconds": 5}}')
    assert not is_trace_of_faults("{\n 0,add,n1")


def test_a_target_is_for_a_fault_that_hits_a_chosen_node() -> None:
    for name, fault in FAULTS.items():
        text = f'{{"step": 9, "fault": "{name}", "target": "b"}}'
        if fault.is_aimed:
            assert read_trace(text, "f", "1")[0].target == "b"
        else:
            with pytest.raises(UserError, match="cannot be aimed"):
                read_trace(text, "f", "1")
    assert FAULTS["mover"].is_aimed
    assert not FAULTS["kill"].is_aimed
    assert not FAULTS["coordinator"].is_aimed


def test_a_trace_of_machines_takes_as_large_a_part_of_ours() -> None:
    draws = draws_of_trace([0.05, 0.5, 1.0, 0.3], 1, 4)
    assert [draw.fault.name for draw in draws] == ["agent", "two-agents", "everything", "agent"]
    assert draws == draws_of_trace([0.05, 0.5, 1.0, 0.3], 1, 4)
    assert [draw.fault.name for draw in draws_of_trace([0.5, 1.0], 1, 2)] == ["agent", "everything"]


def test_faults_are_a_number_or_names_or_both() -> None:
    assert parse_faults_option("30 kill,agent") == (30, ["kill", "agent"])
    assert parse_faults_option("30") == (30, [])
    assert parse_faults_option("kill") == (0, ["kill"])
    with pytest.raises(UserError, match="there is no fault 'rust'"):
        parse_faults_option("rust")


def test_an_order_is_carried_out_once_and_by_whom_it_was_meant_for(tmp_path: Path) -> None:
    ours, theirs = FaultOrders(tmp_path / "faults"), FaultOrders(tmp_path / "faults")
    assert theirs.gate is None
    ours.prepare(gate=3)
    assert theirs.gate == 3
    ours.arm(FaultOrder(10, "kill", "kill", "forward", 5, rank=7))
    assert theirs.find_due("forward", 4, 3, 4, 1) is None
    assert theirs.find_due("computed", 5, 3, 4, 1) is None
    assert theirs.find_due("forward", 5, 2, 4, 1) is None
    order = theirs.find_due("forward", 5, 3, 4, 1)
    assert order is not None
    assert ours.read_hit(10) is None
    hit = FaultHit(10, 1, 5, 3, 1234, "d")
    assert theirs.claim(hit)
    assert not ours.claim(hit)
    assert ours.read_hit(10) == hit
    assert theirs.find_due("forward", 5, 3, 4, 2) is None, "a step that is done again"


def test_an_order_for_a_recovery_waits_for_a_later_generation(tmp_path: Path) -> None:
    armoury = FaultOrders(tmp_path)
    armoury.arm(FaultOrder(11, "recovery", "kill", "agreeing", 0, 1, generation=2))
    assert armoury.find_due("agreeing", 0, 1, 4, 2) is None
    assert armoury.find_due("agreeing", 0, 1, 4, 3) is not None
    armoury.disarm(11)
    assert armoury.find_due("agreeing", 0, 1, 4, 3) is None


# --- what waits on a line -------------------------------------------------------------------------
def test_a_packet_comes_after_its_delay_and_the_time_of_its_bits() -> None:
    line, shape = LineDirection(), LinkShape(delay_s=0.5, gbit_per_s=8e-6)  # 1,000 bytes a second
    line.push(b"x" * 100, 10.0, shape)
    line.push(b"y" * 100, 10.0, shape)
    assert line.next_due == pytest.approx(10.6)
    assert line.pop_due(10.59) == []
    assert line.pop_due(10.61) == [b"x" * 100]
    assert line.next_due == pytest.approx(10.7)
    line.push(b"z", 20.0, shape)
    assert line.pop_due(20.0) == [b"y" * 100], "the line was free again"
    assert line.next_due == pytest.approx(20.501)


def test_a_quicker_shape_lets_no_packet_overtake_another() -> None:
    line = LineDirection()
    line.push(b"first", 0.0, LinkShape(delay_s=1.0))
    line.push(b"second", 0.1, LinkShape())
    assert line.pop_due(0.9) == []
    assert line.pop_due(1.0) == [b"first", b"second"]
    assert line.next_due is None


def test_the_words_of_a_shape_are_those_that_the_relay_reads() -> None:
    shape = LinkShape(delay_s=0.125, loss=0.25, gbit_per_s=5.7)
    assert LinkShape.of(shape.words()) == shape
    assert LinkShape.of(["20", "1"]) == LinkShape(0.02, 0.01)
    assert LinkShape.of([]) == LinkShape()
