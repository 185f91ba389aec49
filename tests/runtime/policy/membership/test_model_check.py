"""Every interleaving of three agents and what befalls them: see
`tests/support/membership_model/`."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import FunctionType, ModuleType, SimpleNamespace

import pytest

from holdfast.policy.membership import election, transitions
from holdfast.policy.membership.election import AgentState, Role
from holdfast.policy.membership.transitions import NodeStage
from tests.support.marks import in_campaign
from tests.support.membership_model.agent import Carried
from tests.support.membership_model.model import Model
from tests.support.membership_model.state_search import Found, fair_cycles, stuck
from tests.support.membership_model.world import NAMES, PAIR, Agent, Store, World


def _check(found: Found) -> None:
    _check_ways(found)
    cycles = fair_cycles(found)
    assert not cycles, f"{len(cycles)} cycles; one after\n{found.way(cycles[0])}"


def _check_ways(found: Found) -> None:
    left = stuck(found)
    assert not left, f"{len(left)} worlds never train again; one after\n{found.way(left[0])}"
    print(f"{len(found.worlds)} worlds, {found.steps} steps")


def test_a_run_begins_whoever_comes_first() -> None:
    model = Model()
    _check(Found(model, [model.cold(faults=0)]))


def test_a_run_goes_on_after_any_fault_that_may_end() -> None:
    """One fault of any kind at any moment, which lasts or ends at any later one. What takes one
    agent alone is done before anything else."""
    model = Model(eager=True)
    found = Found(model, [model.training(faults=1)])
    assert len(found.worlds) > 10_000
    _check(found)


def test_a_run_goes_on_after_two_faults_of_nodes_and_workers() -> None:
    model = Model(eager=True, ends=False, kinds=("crash", "error"))
    found = Found(model, [model.training(faults=2)])
    _check(found)


def test_a_request_that_is_held_up_does_no_harm() -> None:
    model = Model(eager=True, ends=False, kinds=("crash", "error", "suspect"))
    _check(Found(model, [model.training(faults=1, lates=1)]))


TWO = ("crash", "stop", "error")


def test_a_run_goes_on_after_two_faults_that_last() -> None:
    """An agent dies, or is stopped as a whole, or a worker breaks: at any two moments."""
    model = Model(eager=True, ends=False, kinds=TWO)
    found = Found(model, [model.training(faults=2)])
    assert len(found.worlds) > 1_000
    _check_ways(found)


@pytest.mark.slow
def test_a_run_goes_on_after_any_two_faults_that_last() -> None:
    """Every kind, every pair of moments: minutes."""
    model = Model(eager=True, ends=False)
    _check_ways(Found(model, [model.training(faults=2)]))


@pytest.mark.parametrize("inside", ["a", "ab"])
def test_who_trains_without_a_coordinator_gets_one(inside: str) -> None:
    """The second one was opened while the first was about to make the object of a generation, which
    then begins; and before anybody of it has heard the second one, that is no more. They see their
    own journals grow."""
    model = Model(eager=True, ends=False)
    _check_ways(Found(model, [_unled(model, inside)]))


def _unled(model: Model, inside: str) -> World:
    """They train in generation 2; c, which holds the second term, has vanished; whoever else is
    there is cut off."""
    members = frozenset(f"{name}0" for name in inside)
    store = Store(2, "c0", (frozenset({"a0", "b0", "c0"}), members))
    agents = []
    for name in "ab":
        seat = AgentState(name, Role.PRE_CANDIDATE, 2, "c0", 1, 0, NAMES, last_answered_term=1)
        if name in inside:
            seat = replace(seat, generation=2, members=tuple(inside))
        agents.append(Agent(True, 0, seat, None, STAGE[name in inside]))
    gone = Agent(False, 0, AgentState("c"))
    numbers = [model.agents(agent) for agent in (*agents, gone)]
    cuts = PAIR[0, 2] | PAIR[1, 2] | (0 if "b" in inside else PAIR[0, 1])
    return World(model.stores(store), (numbers[0], numbers[1], numbers[2]), cuts)


STAGE = {True: NodeStage.WORKING, False: NodeStage.HELD}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["crash", "vanish"])
def test_a_run_goes_on_after_two_agents_have_died_and_returned(kind: str) -> None:
    """Each at any moment, or never, and their machines say so, or nobody does: minutes, some
    GiB."""
    model = Model(eager=True, kinds=(kind,))
    _check_ways(Found(model, [model.training(faults=2)]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", ["cold", "training"])
def test_a_run_goes_on_after_any_two_faults(start: str) -> None:
    """Each may end at any moment, too; and requests are held up. Hours, and many GiB."""
    model = Model(eager=True)
    _check_ways(Found(model, [getattr(model, start)(faults=2, lates=1)], most=100_000_000))


# --- the check finds what is wrong ----------------------------------------------------------------
def _broken(module: ModuleType, function: str, old: str, new: str) -> SimpleNamespace:
    """The machine with one line of one function changed."""
    names = dict(vars(module))
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            source = inspect.getsource(value)
            if name == function:
                assert source.count(old) == 1, f"{function} has no such line any more"
                source = source.replace(old, new)
            exec("from __future__ import annotations\n" + source, names)
    return SimpleNamespace(**names)


WORKS = r"is of generation \d+ and works in \d+"
OVER = "over and over"
MUTANTS = {
    # a node that has not spoken is counted on
    "unheard": (WORKS, transitions, "_is_stopped", "and not node.must_report", ""),
    # the next generation while one still works
    "working": (WORKS, transitions, "_is_stopped", "node.stage in STOPPED_STAGES and", ""),
    "halted at once": (OVER, transitions, "_is_halted", "return all(", "return True or all("),
    "lost node stays": (OVER, transitions, "_remove_node", "if other.name != node.name", "if True"),
    "apart": (OVER, transitions, "_select_nodes", "if now < pair.retry_at", "if False"),
    # who is coordinator
    "cut off": (
        OVER,
        election,
        "_candidate_place",
        "not state.is_leader_dead and state.last_answered_term < state.term",
        "False",
    ),
    "signs": (
        OVER,
        election,
        "pre_vote_ended",
        "if newer or (moved and not most):",
        "has_leader_progress = False\n    if newer:",
    ),
    "claims what is made": (
        "reigns in a term that it has not opened",
        election,
        "candidacy_ended",
        "if is_won:",
        "if True:",
    ),
    "never claims": (
        "never train again",
        election,
        "can_be_candidate",
        "now - state.role_since >=",
        "-1.0 >=",
    ),
    "stays coordinator": ("cycles", election, "newer_term_found", "if state.role is", "if None is"),
}
"""What is wrong with the worlds that it comes to, and the line that is changed."""
ENDING = {
    # a cut that heals
    "overtaken": (
        transitions,
        "_apply_report",
        'replace(halt(state, "overtaken", now), generation=at)',
        "_enter_phase(state, Phase.FENCED, now)",
    ),
    "never fenced": (
        transitions,
        "term_superseded",
        "_enter_phase(state, Phase.FENCED, now)",
        "state",
    ),
}
HARMLESS = {
    # whom it disturbs, and when: never whether it is safe
    "everybody is a majority": (
        election,
        "_candidate_place",
        "2 * len(misses) > len(alive)",
        "True",
    ),
    "nobody is a majority": (election, "_candidate_place", "2 * len(misses) > len(alive)", "False"),
    "who is slow is gone": (
        election,
        "pre_vote_ended",
        "if has_leader_progress and",
        "if False and",
    ),
    "no turns": (election, "_candidate_place", "misses.index(state.name) if", "0 if True or"),
}


def _with(module: ModuleType, function: str, old: str, new: str) -> Carried:
    broken = _broken(module, function, old, new)
    return Carried(member=broken) if module is transitions else Carried(succeed=broken)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_machine_is_found_out(name: str) -> None:
    wrong, *mutant = MUTANTS[name]
    model = Model(_with(*mutant), eager=True, ends=False)
    with pytest.raises(AssertionError, match=wrong):
        _check(Found(model, [model.cold(faults=0), model.training(faults=1)]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDING)
def test_a_broken_machine_is_found_out_when_a_cut_heals(name: str) -> None:
    model = Model(_with(*ENDING[name]), eager=True, kinds=("cut",))
    found = Found(model, [model.training(faults=1)])
    assert stuck(found) or fair_cycles(found)


def test_a_broken_machine_is_found_out_by_who_trains_without_a_coordinator() -> None:
    """It waits for itself."""
    broken = _with(election, "pre_vote_ended", "(moved and not most)", "moved")
    model = Model(broken, eager=True, ends=False)
    assert stuck(Found(model, [_unled(model, "ab")]))


@pytest.mark.parametrize("name", [in_campaign(name) for name in HARMLESS])
def test_when_to_claim_is_never_about_safety(name: str) -> None:
    model = Model(_with(*HARMLESS[name]), eager=True, ends=False)
    _check(Found(model, [model.cold(faults=0), model.training(faults=1)]))
