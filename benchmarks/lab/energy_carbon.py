"""Energy, carbon and cost by policy, on traces of grids' intensities and of spot prices.

A run of ten days at full clock on eight nodes of eight H100 may take 10 % longer. Two more nodes
are held and not used. It is replayed from six moments of each trace. Each policy stands against the
run at full clock that stays where it is and leaves the two nodes on.

    python -m benchmarks.lab.energy_carbon [--traces FOLDER]

The folder holds the files that `holdfast trace` reads: `HOLDFAST_DATA` is used if it is set. Tables
of average intensities, one of marginal ones and one of spot prices are never mixed. Without a
folder, synthetic curves are used.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.lab.energy import Choice, EnergyOutcome, EnergyRun, EnergyStudy, Hour, hours_of
from benchmarks.runtime.interrupting import run_main
from holdfast.errors import DataError
from holdfast_lab.engine.clocks import NodePower
from holdfast_lab.engine.shifting import Action, Moment, ShiftRules, decide
from holdfast_lab.traces.events import TraceEvent
from holdfast_lab.traces.generators import make_trace
from holdfast_lab.traces.node_changes import ReadOptions
from holdfast_lab.traces.reading import read_stream

DAY_S = 86400.0
H100_NODE = NodePower(host_w=2000.0, idle_w=8 * 70.0, busy_w=8 * 700.0, off_w=20.0)
"""Eight devices of 70 to 700 W, by their data sheet; the host's 2 kW are assumed."""
SIX_OF_EIGHT = replace(H100_NODE, busy_w=6 * 700.0 + 2 * 70.0)
"""A node of which the run uses six devices."""
LONGEST = 1.1
STARTS = 6
GRIDS = ("CISO", "ERCO", "NYIS")
GPU = "a3-highgpu-8g"


def steady(moment: Moment, rules: ShiftRules) -> Action:
    """One clock all the time, which ends in time: a cap that looks at no signal."""
    clock = next(
        each / 100 for each in range(50, 101) if rules.power.rate(each / 100) >= 1.005 / LONGEST
    )
    return Action(moment.home, clock)


@dataclass(frozen=True)
class Case:
    """A policy: what it may do, on which nodes."""

    name: str
    rules: ShiftRules
    run: EnergyRun
    choice: Choice = decide


def cases(work_s: float, priced: bool) -> list[Case]:
    """The first is what each is compared with."""
    plain = ShiftRules(H100_NODE, priced=priced)
    wide = EnergyRun(work_s, nodes=8, idle_nodes=2, longest=LONGEST)
    off = replace(wide, idle_off=True)
    down = replace(plain, powers_down=True)
    move = replace(plain, can_move=True)
    spread = replace(plain, power=SIX_OF_EIGHT)
    both = replace(down, can_cap=True, can_pause=True)
    return [
        Case("full clock, idle nodes on", plain, wide),
        Case("idle nodes powered down", plain, off),
        Case("one cap all the time", plain, wide, steady),
        Case("a cap that follows the signal", replace(plain, can_cap=True), wide),
        Case("pauses, nodes wait", replace(plain, can_pause=True), wide),
        Case("pauses, nodes powered down", replace(down, can_pause=True), wide),
        Case("caps, pauses, all powered down", both, off),
        Case("moves to another zone", move, wide),
        Case("all of these", replace(both, can_move=True), off),
        Case("6 of 8 devices on 8 nodes", spread, replace(wide, idle_nodes=0)),
        Case("the same on 6 full nodes", plain, replace(wide, nodes=6, idle_nodes=0)),
    ]


@dataclass(frozen=True)
class Total:
    cost: float
    kwh: float
    longest: float
    pauses: float
    moves: float
    has_late: bool


def total(
    hours: Sequence[Hour], homes: Sequence[str], case: Case, steps: Sequence[int]
) -> Total | None:
    """All starts and homes added up. None: the trace is too short for one."""
    found: list[EnergyOutcome] = [
        EnergyStudy(hours, start, case.run, case.rules, home, case.choice).run()
        for home in homes
        for start in steps
    ]
    if not found:
        return None
    longest = max(each.seconds for each in found) / case.run.work_s
    return Total(
        sum(each.cost for each in found),
        sum(each.kwh for each in found),
        longest,
        sum(each.pauses for each in found) / len(found),
        sum(each.moves for each in found) / len(found),
        any(not each.is_done for each in found),
    )


def starts(hours: Sequence[Hour], work_s: float) -> list[int]:
    """Places in the trace, evenly spread, a day after its begin and early enough to end."""
    first, last = hours[0][0] + DAY_S, hours[-1][0] - 1.2 * work_s
    if last <= first:
        return []
    wanted = [first + (last - first) * k / (STARTS - 1) for k in range(STARTS)]
    found, place = [], 0
    for at in wanted:
        while hours[place][0] < at:
            place += 1
        found.append(place)
    return found


def table(name: str, hours: Sequence[Hour], homes: Sequence[str], priced: bool) -> None:
    """Print one row a policy."""
    work_s = 10 * DAY_S if hours[-1][0] > 40 * DAY_S else 5 * DAY_S
    steps = starts(hours, work_s)
    print(f"\n{name}: {work_s / DAY_S:g} days of work, {len(steps) * len(homes)} runs")
    head = "US dollars" if priced else "gCO2"
    print(f"{'policy':<34}{head:>11}{'kWh':>8}{'longest':>9}{'pauses':>8}{'moves':>7}")
    base: Total | None = None
    for case in cases(work_s, priced):
        found = total(hours, homes, case, steps)
        if found is None:
            print("the trace is too short")
            return
        if base is None or case.name.startswith("6 of 8"):
            base = found
        print(
            f"{case.name:<34}{found.cost / base.cost - 1:>+11.1%}{found.kwh / base.kwh - 1:>+8.1%}"
            f"{found.longest:>9.3f}{found.pauses:>8.1f}{found.moves:>7.1f}"
            f"{'  LATE' if found.has_late or found.longest > LONGEST + 1e-6 else ''}",
            flush=True,
        )


# --- traces -------------------------------------------------------------------------------------
def merged(streams: Mapping[str, Sequence[TraceEvent]]) -> list[TraceEvent]:
    """Several grids of the same year as zones of one trace."""
    return [
        replace(event, zone=name)
        for name, events in streams.items()
        for event in events
        if event.kind == "carbon"
    ]


def _read(path: Path, options: ReadOptions) -> Sequence[TraceEvent]:
    return read_stream(path.read_bytes(), path.name, options).events


def carbon_tables(folder: Path) -> None:
    """Average intensities: each grid alone, then three grids among which the run moves."""
    grids: dict[str, Sequence[TraceEvent]] = {}
    for path in sorted(folder.rglob("*_avgCI.csv")):
        if (name := path.name.split("_")[0]) in GRIDS:
            grids[name] = _read(path, ReadOptions())
    for name, events in grids.items():
        hours = hours_of(merged({name: events}), "carbon")
        table(f"average intensity, {name} alone", hours, [name], priced=False)
    if len(grids) > 1:
        title = f"average intensity, {', '.join(grids)}, from each in turn"
        table(title, hours_of(merged(grids), "carbon"), list(grids), priced=False)
    for path in sorted(folder.rglob("watttime*.csv")):
        hours = hours_of(_read(path, ReadOptions(carbon="marginal")), "carbon")
        table("marginal intensity, one month", hours, [next(iter(hours[0][1]))], priced=False)


def price_tables(folder: Path) -> None:
    """Spot prices of one machine type in regions of one continent, from each in turn."""
    for path in sorted(folder.rglob("*spot_prices*.csv")):
        events = _read(path, ReadOptions(gpu=GPU))
        home = [e for e in events if e.kind == "price" and e.zone.startswith("europe-")]
        hours = hours_of(home, "price")
        zones = sorted(hours[0][1])
        homes = zones[:: max(1, len(zones) // 3)][:3]
        title = f"spot prices of {GPU}, {len(zones)} regions, from {', '.join(homes)}"
        table(title, hours, homes, priced=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, default=os.environ.get("HOLDFAST_DATA"))
    given = parser.parse_args()
    if not given.traces:
        print("no real traces: set HOLDFAST_DATA to their folder; synthetic ones follow")
        events = make_trace("carbon", 1, 90.0, {}).events
        table("synthetic daily curve", hours_of(events, "carbon"), ["made"], priced=False)
        return
    folder = Path(given.traces)
    try:
        carbon_tables(folder)
        price_tables(folder)
    except DataError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    run_main(main)
