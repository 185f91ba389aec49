"""Compares a bill with the journals of runs: each cent of it belongs to a run, or is named.

A charge by the hour of a machine belongs to a run for the seconds in which the run had the machine.
It is split by what the run did then. All else of the bill has a name:

    outside       the machine was billed, and was in none of these runs
    other charge  of such a machine, but not by the hour, or a tax, a credit, a purchase
    by tag        of no machine of these runs, but with all tags of exactly one of them
    other rows    of neither

`outside` and `other charge` are the remainder: billed for the machines, and no run explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from holdfast.policy.spending import HOUR_S, NodeStay
from holdfast_platform.observe.costs import KINDS, RunUse, Split, cost_of_stay, exact
from holdfast_platform.observe.focus import Charge

REMAINDER = ("outside", "other charge")
"""Names of parts that were billed for the machines of the runs, and no run explains them."""
Machine = str
"""ResourceId of a bill, or the name of a node."""


@dataclass
class RunBill:
    """One run: what the bill has for it, and what its journal says."""

    place: str
    billed: Split = field(default_factory=lambda: dict.fromkeys(KINDS, Fraction(0)))
    by_tag: Fraction = Fraction(0)
    journal: Fraction = Fraction(0)  # at the prices of its journal
    unpriced_hours: Fraction = Fraction(0)
    unbilled_hours: Fraction = Fraction(0)  # in the journal, and in no row of the bill

    @property
    def total(self) -> Fraction:
        return sum(self.billed.values(), Fraction(0))


@dataclass
class Reconciled:
    """The bill, taken apart. Everything adds up to `total` exactly."""

    runs: dict[str, RunBill]
    total: Fraction
    outside: dict[Machine, Fraction] = field(default_factory=dict)
    other_charges: dict[tuple[Machine, str], Fraction] = field(default_factory=dict)
    """(machine, unit or category) -> dollars."""
    other_rows: Fraction = Fraction(0)
    other_count: int = 0

    @property
    def parts(self) -> dict[tuple[str, ...], Fraction]:
        """Every part of the bill by its name; they add up to `total`."""
        found: dict[tuple[str, ...], Fraction] = {}
        for place, run in self.runs.items():
            found |= {("run", place, kind): value for kind, value in run.billed.items()}
            found["run", place, "by tag"] = run.by_tag
        found |= {("outside", machine): value for machine, value in self.outside.items()}
        found |= {("other charge", *key): value for key, value in self.other_charges.items()}
        found["other rows",] = self.other_rows
        return found


@dataclass(frozen=True)
class _Stay:
    run: RunUse
    stay: NodeStay
    begin: Fraction
    end: Fraction


def reconcile(charges: Sequence[Charge], uses: Sequence[RunUse]) -> Reconciled:
    """Take a bill apart by runs. Pure."""
    stays: dict[Machine, list[_Stay]] = {}
    covered: dict[int, list[tuple[Fraction, Fraction]]] = {}  # id of a stay -> what rows have
    result = Reconciled(
        {use.place: RunBill(use.place) for use in uses},
        sum((charge.cost for charge in charges), Fraction(0)),
    )
    for use in uses:
        run = result.runs[use.place]
        for stay in use.stays:
            cost = cost_of_stay(use, stay)
            run.journal += cost.total
            run.unpriced_hours += cost.unpriced_hours
            one = _Stay(use, stay, exact(stay.begin), exact(stay.end))
            stays.setdefault(stay.price.resource or stay.node, []).append(one)
    for charge in charges:
        machine = next((m for m in (charge.resource, charge.name) if m and m in stays), "")
        if not machine:
            _take_by_tag(charge, uses, result)
        elif charge.category != "Usage" or charge.billed_s is None:
            word = charge.category if charge.category != "Usage" else f"unit {charge.unit or '-'}"
            key = machine, word
            result.other_charges[key] = result.other_charges.get(key, Fraction(0)) + charge.cost
        else:
            _share_out(charge, machine, stays[machine], result, covered)
    for each in (one for found in stays.values() for one in found):
        left = each.end - each.begin - _length(covered.get(id(each), []))
        if left > 0:
            result.runs[each.run.place].unbilled_hours += left / Fraction(HOUR_S)
    return result


def _share_out(
    charge: Charge,
    machine: Machine,
    stays: Sequence[_Stay],
    result: Reconciled,
    covered: dict[int, list[tuple[Fraction, Fraction]]],
) -> None:
    """Share a charge by the hour out to the runs that had the machine in its period."""
    inside = [
        (one, start, stop)
        for one in stays
        if (start := max(charge.start, one.begin)) < (stop := min(charge.stop, one.end))
    ]
    used = sum((stop - start for _, start, stop in inside), Fraction(0))
    # More seconds in runs than were billed: two runs shared the machine, or a clock is off.
    whole = max(used, charge.billed_s or Fraction(0))
    for one, start, stop in inside:
        covered.setdefault(id(one), []).append((start, stop))
        run = result.runs[one.run.place]
        for kind, seconds in one.run.split(one.stay.node, start, stop).items():
            run.billed[kind] += charge.cost * seconds / whole
    rest = charge.cost * (whole - used) / whole if whole else charge.cost
    if rest:
        result.outside[machine] = result.outside.get(machine, Fraction(0)) + rest


def _length(spans: list[tuple[Fraction, Fraction]]) -> Fraction:
    """Return the seconds of a union: several rows may have the same hour of a machine."""
    length = until = Fraction(0)
    for start, stop in sorted(spans):
        length += max(Fraction(0), stop - max(start, until))
        until = max(until, stop)
    return length


def _take_by_tag(charge: Charge, uses: Sequence[RunUse], result: Reconciled) -> None:
    """Give a charge of no machine to the run whose tags it has, if that is one run."""
    owners = [
        use.place
        for use in uses
        if use.tags
        and all(charge.tags.get(key) == value for key, value in use.tags.items())
        and any(
            charge.start < exact(stay.end) and exact(stay.begin) < charge.stop for stay in use.stays
        )
    ]
    if len(owners) == 1:
        result.runs[owners[0]].by_tag += charge.cost
    else:
        result.other_rows += charge.cost
        result.other_count += 1
