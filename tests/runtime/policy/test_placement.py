"""Who keeps whose copies: apart where that is possible, evenly, and with few moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.placement import Machine, Placement, place_copies, shared_domains


def machines(count: int) -> list[Machine]:
    return [Machine(f"m{number}") for number in range(count)]


def even(count: int) -> dict[str, int]:
    return dict.fromkeys((m.name for m in machines(count)), 10)


def loads(plan: Placement) -> Counter[str]:
    return Counter(name for held in plan.holders.values() for name in held)


def moved(old: Placement, new: Placement) -> int:
    """Copies that a machine has now and had not before."""
    return sum(
        len(set(held) - set(old.holders.get(owner, ()))) for owner, held in new.holders.items()
    )


domain = st.sampled_from(["", "a", "b", "c"])
some_machines = st.lists(
    st.tuples(domain, domain, domain, domain, domain), min_size=2, max_size=9
).map(lambda rows: [Machine(f"m{number}", *row) for number, row in enumerate(rows)])


@given(some_machines, st.integers(1, 3))
def test_each_owner_has_its_copies_on_other_machines(found: list[Machine], copies: int) -> None:
    plan = place_copies({m.name: 10 for m in found}, found, copies=copies)
    for owner, held in plan.holders.items():
        assert owner not in held
        assert len(set(held)) == len(held) == min(copies, len(found) - 1)
    short = copies > len(found) - 1
    assert any("copies" in text for text in plan.warnings) == short


@given(some_machines)
def test_a_copy_shares_no_domain_where_some_machine_shares_none(found: list[Machine]) -> None:
    """And where every machine shares one, the copy shares the mildest, and it is said."""
    plan = place_copies({m.name: 10 for m in found}, found)
    for owner in found:
        (holder,) = (m for m in found if m.name in plan.holders[owner.name])
        ways = [shared_domains(owner, m) for m in found if m is not owner]
        assert shared_domains(owner, holder) in ways
        assert bool(shared_domains(owner, holder)) == all(ways)
        said = any(text.startswith(f"{owner.name} and its copy") for text in plan.warnings)
        assert said == bool(shared_domains(owner, holder))


def test_the_nearest_domain_is_avoided_first() -> None:
    here = Machine("here", rack="r1", power="p1", zone="z1")
    near = Machine("near", rack="r1", zone="z2")
    far = Machine("far", rack="r2", power="p1", zone="z1")
    assert place_copies({"here": 1}, [here, near, far]).holders == {"here": ("far",)}
    host = Machine("host", node="here")  # another mover on the same host
    assert place_copies({"here": 1}, [here, host, near]).holders == {"here": ("near",)}


def test_two_copies_stand_apart_from_each_other_too() -> None:
    found = [
        Machine("here", zone="z1"),
        Machine("a", zone="z2"),
        Machine("b", zone="z2"),
        Machine("c", zone="z3"),
    ]
    (held,) = place_copies({"here": 1}, found, copies=2).holders.values()
    assert "c" in held


@given(st.integers(2, 12), st.integers(1, 3))
def test_the_load_is_even(count: int, copies: int) -> None:
    found = machines(count)
    of = loads(place_copies(even(count), found, copies=copies))
    assert max(of.values()) - min(of[m.name] for m in found) <= 1


@given(st.integers(3, 12), st.integers(1, 2), st.data())
def test_loss_and_return_move_little(count: int, copies: int, data: st.DataObject) -> None:
    found = machines(count)
    before = place_copies(even(count), found, copies=copies)
    lost = data.draw(st.sampled_from(found))
    rest = [m for m in found if m is not lost]
    sizes = {m.name: 10 for m in rest}
    after = place_copies(sizes, rest, copies=copies, previous=before.holders)
    due = min(copies, count - 2)
    held = sum(lost.name in h for owner, h in before.holders.items() if owner != lost.name)
    assert moved(before, after) <= held + due
    again = place_copies(sizes, rest, copies=copies, previous=after.holders)
    assert moved(after, again) == 0
    back = place_copies(even(count), found, copies=copies, previous=after.holders)
    own = len(back.holders[lost.name])
    assert moved(after, back) <= own + 2 * copies
    assert max(loads(back).values()) - min(loads(back)[m.name] for m in found) <= 1


def test_a_stable_machine_takes_the_first_copies_while_it_has_room() -> None:
    found = [*machines(3), Machine("stage", room=20)]
    sizes = dict.fromkeys(("m0", "m1", "m2"), 10)
    plan = place_copies(sizes, found, stable_machine="stage")
    assert plan.holders["m0"] == plan.holders["m1"] == ("stage",)
    assert plan.holders["m2"][0] in ("m0", "m1")
    both = place_copies(sizes, found, copies=2, stable_machine="stage")
    assert both.holders["m0"][0] == "stage"
    assert len(both.holders["m0"]) == 2


def test_no_room_is_said() -> None:
    plan = place_copies({"a": 10}, [Machine("a"), Machine("b", room=9)])
    assert plan.holders == {"a": ()}
    assert plan.warnings == ("a has 0 of 1 copies: no other machine has room",)


def test_the_order_of_the_machines_does_not_matter() -> None:
    found = machines(7)
    turned = place_copies(even(7), reversed(found))
    assert turned == place_copies(even(7), found)


def test_strangers_are_refused() -> None:
    with pytest.raises(ValueError, match="x is not among"):
        place_copies({"x": 1}, machines(2))
