"""What runs cost by kind, and bills in the form of FOCUS that are taken apart to the cent."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import DataError
from holdfast.events import NodesPresent, Record, RunStarted
from holdfast.policy.spending import meter_of
from holdfast.report.live.metrics import RunMetrics
from holdfast_platform.observe.costs import (
    KINDS,
    RunUse,
    cost_of_stay,
    costs_by,
    to_cents,
    use_of_records,
)
from holdfast_platform.observe.focus import BILL, Charge, read_bill
from holdfast_platform.observe.reconcile import reconcile
from tests.support.borders import unknown_entries
from tests.support.commands import within
from tests.support.dashboards import dashboard_of
from tests.support.journal_builder import Scribe

HOUR = 3600
BEGIN = datetime(2026, 11, 2, tzinfo=UTC).timestamp()
Row = dict[str, Any]


def iso(hours: float) -> str:
    return datetime.fromtimestamp(BEGIN + hours * HOUR, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def row(resource: str, hour: float, cost: str, **more: Any) -> Row:
    """A charge of one hour of a machine."""
    return {
        "BilledCost": cost,
        "EffectiveCost": cost,
        "BillingCurrency": "USD",
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargePeriodStart": iso(hour),
        "ChargePeriodEnd": iso(hour + 1),
        "ConsumedQuantity": "1",
        "ConsumedUnit": "Hours",
        "ResourceId": resource,
        "ResourceName": "",
        "Tags": "",
        "ServiceName": "Compute",
        "x_Discount": "0",
    } | more


def write_bill(path: Path, rows: list[Row]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def run_of(
    name: str, nodes: dict[str, dict[str, Any]], begin_h: float, hours: float, **tags: str
) -> list[Record]:
    """A run whose nodes train from the first second to the last but three: one step an hour."""
    run = Scribe(at=BEGIN + begin_h * HOUR)
    run.open_generation()
    run.write(RunStarted(name, "", "", tags=tags))
    run.among(*nodes)
    run.at -= 0.25 * (1 + len(nodes))  # `among` takes a while
    run.write(NodesPresent(nodes))
    left, step = hours * HOUR - 3, 0
    while left > 0:
        step += 1
        run.steps(step, step, min(left, HOUR), compute=min(left, HOUR))
        left -= HOUR
    run.finish(after=3)
    return run.records


A = {"pool": "kept", "market": "on-demand", "usd_per_hour": 3.5, "resource": "i-a"}
B = {"pool": "spot", "market": "spot", "usd_per_hour": 1.21, "resource": "i-b"}


def uses() -> list[RunUse]:
    one = run_of("one", {"a": A, "b": B}, 0, 2.5, team="search")
    two = run_of("two", {"b": B}, 3, 1.25, team="ads")
    return [use_of_records(one, "runs/one", "one"), use_of_records(two, "runs/two", "two")]


def made_bill() -> list[Row]:
    return [
        *(row("i-a", hour, "3.500000") for hour in range(3)),
        *(row("i-b", hour, "1.2345678") for hour in range(5)),  # spot: another price
        row("i-b", 1, "0.07", ConsumedQuantity="12", ConsumedUnit="GB"),
        row("i-a", 0, "1.05", ChargeCategory="Tax", ConsumedQuantity="", ConsumedUnit=""),
        row("i-a", 0, "-0.50", ChargeCategory="Credit", ConsumedQuantity="", ConsumedUnit=""),
        row("", 1, "0.33", ConsumedUnit="GB-Hours", Tags='{"team": "ads", "x": true}'),
        row("bucket", 4, "0.20", ConsumedUnit="GB-Hours", Tags='{"team": "ads"}'),
        row("i-of-another", 2, "99.99"),
    ]


def test_a_made_bill_is_taken_apart_to_the_cent(tmp_path: Path) -> None:
    bill = write_bill(tmp_path / "bill.csv", made_bill())
    charges, unread = read_bill(bill)
    assert not unread
    found = reconcile(charges, uses())
    spot = Decimal("1.2345678")
    one, two = found.runs["runs/one"], found.runs["runs/two"]
    # By hand: run one had both machines for 2.5 hours, run two had b from 3:00 to 4:15.
    assert one.total == Fraction(Decimal("3.5") * Decimal("2.5") + spot * Decimal("2.5"))
    assert two.total == Fraction(spot * Decimal("1.25"))
    assert one.journal == Fraction("2.5") * (Fraction("3.5") + Fraction("1.21"))
    assert found.outside == {
        "i-a": Fraction("1.75"),
        "i-b": Fraction(spot * Decimal("1.25")),  # 2:30 to 3:00, and 4:15 to 5:00
    }
    assert found.other_charges == {
        ("i-b", "unit GB"): Fraction("0.07"),
        ("i-a", "Tax"): Fraction("1.05"),
        ("i-a", "Credit"): Fraction("-0.5"),
    }
    assert (one.by_tag, two.by_tag) == (0, Fraction("0.20")), "in the hours of the run alone"
    assert found.other_rows == Fraction("0.33") + Fraction("99.99")
    total = sum(Fraction(each["BilledCost"]) for each in made_bill())
    assert sum(found.parts.values()) == found.total == total
    assert sum(to_cents(found.parts).values()) == round(Decimal(str(float(total))), 2)
    assert two.billed["rework"] == two.billed["idle"] == 0
    assert two.billed["useful"] > Fraction(99, 100) * two.total


def test_the_command_prints_the_remainder_and_ends_with_1(tmp_path: Path) -> None:
    bill = write_bill(tmp_path / "bill.csv", made_bill())
    folder = journal_folder(tmp_path / "one", run_of("one", {"a": A}, 0, 3, team="search"))
    done = within("cost", "reconcile", bill, folder)
    assert done.code == 1
    assert "remainder: $0.55" in done.out  # a tax of 1.05 and a credit of 0.50
    assert "i-of-another" not in done.out
    plain = [row("i-a", hour, "3.5") for hour in range(3)]
    done = within("cost", "reconcile", write_bill(bill, plain), folder, "--json").succeeds()
    told = json.loads(done.out)
    assert (told["total"], told["remainder"]) == ("10.50", "0.00")
    (run,) = told["runs"].values()
    assert (run["billed"], run["journal"], run["unbilled_hours"]) == ("10.50", "10.50", 0)
    within("cost", "reconcile", bill, folder, "--column", "Cost").refuses("ListCost")
    shown = json.loads(within("cost", "show", folder, "--by", "team", "--json").succeeds().out)
    assert [(each["team"], each["total_usd"]) for each in shown] == [("search", 10.5)]
    assert "10.50" in within("cost", "show", folder).succeeds().out


def journal_folder(folder: Path, records: list[Record]) -> Path:
    """A run folder with this journal."""
    from holdfast.config.run import RunConfig
    from holdfast.events import to_json

    for record in records:
        segment = folder / "journal" / f"{record.generation:010d}" / f"{record.writer}.jsonl"
        segment.parent.mkdir(parents=True, exist_ok=True)
        with segment.open("a") as file:
            file.write(json.dumps(to_json(record)) + "\n")
    resolved = {"config": RunConfig().model_dump(mode="json"), "origins": {}, "dataset": {}}
    (folder / "resolved.json").write_text(json.dumps(resolved))
    return folder


def disturbed_run() -> Scribe:
    """Two sessions: in the first a worker is lost, and a spare node of another price waits."""
    run = Scribe()
    run.start()
    run.write(NodesPresent({"a": A, "s": B}))
    run.generate()
    run.steps(1, 10)
    run.lose(1)
    run.restart(5)
    run.write(NodesPresent({"a": A, "s": B}))
    run.steps(6, 12)
    run.stop(after=1.0)
    run.start(resumed=True, pause=1000.0)
    run.write(NodesPresent({"a": A}))
    run.generate(12, "resume", "commits/x")
    run.steps(13, 20)
    run.finish()
    return run


def test_the_kinds_add_up_over_losses_and_sessions() -> None:
    run = disturbed_run()
    use = use_of_records(run.records, "r", "r")
    (cost,) = costs_by([use]).values()
    assert float(cost.total) == pytest.approx(meter_of(run.records).spent().usd, rel=1e-12)
    kinds = {kind: float(value) for kind, value in cost.dollars.items()}
    assert kinds["rework"] == pytest.approx(5 * 3.5 / HOUR, rel=1e-3), "steps 6 to 10 of node a"
    assert min(kinds.values()) > 0
    spare = sum(float(stay.usd or 0) for stay in use.stays if stay.node == "s")
    assert kinds["idle"] == pytest.approx(spare), "the spare node had no rank"


def test_metrics_page_and_cost_have_the_same_dollars(tmp_path: Path) -> None:
    run = disturbed_run()
    metrics = RunMetrics("r")
    metrics.replay(run.records)
    by_class = {
        sample.labels["class"]: sample.value
        for family in metrics.refresh().collect()
        for sample in family.samples
        if sample.name == "holdfast_cost_usd"
    }
    folder = journal_folder(tmp_path / "run", run.records)
    with dashboard_of(folder) as page:
        answer = page.get("/state", headers={"Authorization": f"Bearer {page.token}"})
        state = json.load(answer)
    (shown,) = json.loads(within("cost", "show", folder, "--json").succeeds().out)
    assert shown["total_usd"] == pytest.approx(meter_of(run.records).spent().usd, rel=1e-9)
    assert sum(by_class.values()) == pytest.approx(shown["total_usd"], rel=1e-9)
    assert state["usd"] == pytest.approx(shown["total_usd"], rel=1e-9)
    assert state["node_hours"] == pytest.approx(shown["node_hours"], rel=1e-9)
    for kind, classes in KINDS.items():
        dollars = sum(by_class[name] for name in classes)
        assert dollars == pytest.approx(shown["usd"][kind], rel=1e-6), kind


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_bill_and_the_runs_each_cent_has_a_place(seed: int) -> None:
    draw = random.Random(seed)
    charges, runs = [], []
    for line in range(60):
        start = Fraction(round(draw.uniform(0, 30 * HOUR), 3)) + int(BEGIN)
        length = draw.choice((HOUR, 24 * HOUR, 60))
        billed = Fraction(draw.uniform(0, length)) if draw.random() < 0.8 else None
        charges.append(
            Charge(
                line,
                Fraction(str(round(draw.uniform(-1, 20), 7))),
                draw.choice(("Usage", "Usage", "Usage", "Tax", "Credit")),
                draw.choice(("i-a", "i-b", "i-c", "")),
                draw.choice(("", "a")),
                start,
                start + length,
                "Hours",
                billed,
                draw.choice(({}, {"team": "x"})),
            )
        )
    for name in "xyz":
        nodes = {n: A | {"resource": f"i-{n}"} for n in draw.sample("abc", draw.randrange(1, 3))}
        records = run_of(name, nodes, draw.uniform(0, 20), draw.uniform(0.1, 9), team=name)
        runs.append(use_of_records(records, name, name))
    found = reconcile(charges, runs)
    assert sum(found.parts.values()) == found.total == sum(charge.cost for charge in charges)
    shown = to_cents(found.parts)
    assert sum(shown.values()) * 100 == round(found.total * 100)
    for use in runs:
        for stay in use.stays:
            assert set(cost_of_stay(use, stay).dollars) == set(KINDS)


def change(name: str, value: str) -> Callable[[list[Row]], None]:
    return lambda rows: rows[1].update({name: value})


def without(name: str) -> Callable[[list[Row]], None]:
    return lambda rows: [each.pop(name) for each in rows] and None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (change("BillingCurrency", "EUR"), r"bill.csv:3: BillingCurrency is 'EUR'"),
        (change("ConsumedQuantity", "24"), r"bill.csv:3: 24 Hours do not fit"),
        (change("ConsumedQuantity", "-1"), r"bill.csv:3: -1 Hours do not fit"),
        (change("BilledCost", "1,234.5"), r"bill.csv:3: BilledCost is '1,234.5'"),
        (change("BilledCost", "NaN"), r"bill.csv:3: BilledCost"),
        (change("BilledCost", ""), r"bill.csv:3: BilledCost"),
        (change("ChargeCategory", "Refund"), r"bill.csv:3: ChargeCategory is 'Refund'"),
        (change("ChargePeriodStart", "yesterday"), r"bill.csv:3: 'yesterday'"),
        (change("ChargePeriodEnd", iso(0)), r"bill.csv:3: ChargePeriodEnd is not after"),
        (change("Tags", "team=search"), r"bill.csv:3: Tags is no JSON object"),
        (without("ResourceId"), r"bill.csv:1: the bill has no column ResourceId"),
        (without("BilledCost"), r"bill.csv:1: the bill has no column BilledCost"),
    ],
)
def test_a_wrong_bill_is_refused_with_its_line(
    spoil: Callable[[list[Row]], None], said: str, tmp_path: Path
) -> None:
    rows = [row("i-a", hour, "3.5") for hour in range(3)]
    spoil(rows)
    with pytest.raises(DataError, match=said):
        read_bill(write_bill(tmp_path / "bill.csv", rows))


def test_a_cut_or_doubled_bill_is_refused(tmp_path: Path) -> None:
    bill = write_bill(tmp_path / "bill.csv", [row("i-a", hour, "3.5") for hour in range(3)])
    text = bill.read_text()
    bill.write_text(text.rstrip()[:-20])
    with pytest.raises(DataError, match=r"bill.csv:4: the row has another number of cells"):
        read_bill(bill)
    bill.write_text(text.replace("EffectiveCost", "BilledCost", 1))
    with pytest.raises(DataError, match="BilledCost is there twice"):
        read_bill(bill)
    with pytest.raises(DataError, match="cannot be read"):
        read_bill(tmp_path / "none.csv")


def test_unknown_columns_are_counted(tmp_path: Path) -> None:
    strange = {name: str(value) for name, value in unknown_entries(BILL).items()}
    rows = [row("i-a", 0, "3.5") | strange]
    charges, unread = read_bill(write_bill(tmp_path / "bill.csv", rows))
    assert len(charges) == 1
    assert all(name in unread for name in strange), "BILL names none of them"
    assert "x_Discount" not in unread
