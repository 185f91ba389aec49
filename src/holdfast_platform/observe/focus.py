"""Reads a bill in the form of FOCUS 1.0 to 1.2 (FinOps Open Cost and Usage Specification), CSV.

Rows are charges of one currency. What Holdfast reads of them stands in `BILL`. Numbers are exact.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

from holdfast.borders import Border, Unread
from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError, nearest_of

COSTS = ("BilledCost", "EffectiveCost", "ContractedCost", "ListCost")
REQUIRED = (
    *("BillingCurrency", "ChargeCategory", "ChargePeriodEnd", "ChargePeriodStart", "ResourceId"),
)
BILL = Border(
    "columns of a bill",
    frozenset(
        (
            *(*COSTS, *REQUIRED, "ConsumedQuantity", "ConsumedUnit", "PricingQuantity"),
            *("PricingUnit", "ResourceName", "Tags"),
        )
    ),
    frozenset(
        (
            *("AvailabilityZone", "BillingAccountId", "BillingAccountName", "BillingAccountType"),
            *("BillingPeriodEnd", "BillingPeriodStart", "CapacityReservationId"),
            *("CapacityReservationStatus", "ChargeClass", "ChargeDescription", "ChargeFrequency"),
            *("CommitmentDiscountCategory", "CommitmentDiscountId", "CommitmentDiscountName"),
            *("CommitmentDiscountQuantity", "CommitmentDiscountStatus", "CommitmentDiscountType"),
            *("CommitmentDiscountUnit", "ContractedUnitPrice", "InvoiceId", "InvoiceIssuer"),
            *("InvoiceIssuerName", "ListUnitPrice", "PricingCategory", "PricingCurrency"),
            *("PricingCurrencyContractedUnitPrice", "PricingCurrencyEffectiveCost"),
            *("PricingCurrencyListUnitPrice", "Provider", "ProviderName", "Publisher"),
            *("PublisherName", "RegionId", "RegionName", "ResourceType", "ServiceCategory"),
            *("ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter", "SkuPriceDetails"),
            *("SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType"),
        )
    ),
    unknown="count",
    entry="column",
)
"""Columns that begin with x_ are the provider's own, by the specification, and are not read."""
CURRENCY = "USD"
CATEGORIES = ("Usage", "Purchase", "Tax", "Credit", "Adjustment")
_UNITS_S = {
    **dict.fromkeys(("hour", "hours", "hr", "hrs", "h"), 3600),
    **dict.fromkeys(("minute", "minutes", "min", "mins"), 60),
    **dict.fromkeys(("second", "seconds", "sec", "secs", "s"), 1),
    **dict.fromkeys(("day", "days"), 86400),
}
"""Units of time, in seconds."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d{1,3})?")


@dataclass(frozen=True)
class Charge:
    """One row. start, stop: of its charge period, in seconds since 1970. billed_s: seconds that
    were used in it; None if its unit is none of time."""

    line: int
    cost: Fraction  # dollars
    category: str  # of CATEGORIES
    resource: str  # ResourceId; "" if the row has none
    name: str  # ResourceName
    start: Fraction
    stop: Fraction
    unit: str
    billed_s: Fraction | None
    tags: Mapping[str, str] = field(default_factory=dict)


def read_bill(path: Path, column: str = COSTS[0]) -> tuple[list[Charge], str]:
    """Return the charges of a file, and a line about columns that were not read; "" for none.

    column: of COSTS. Raises DataError, with file and line."""
    unread = Unread(BILL)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, strict=True)
            names = rows.fieldnames or []
            _check_columns(names, column, path)
            own = [name for name in names if name.startswith("x_")]
            charges = []
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        "the row has another number of cells than the header",
                        where=where,
                        remedy="export the bill again, as CSV with a header",
                    )
                said = {name: value for name, value in row.items() if name not in own}
                unread.add(BILL.check(said, where, DataError, ""), where)
                charges.append(_charge(row, rows.line_num, column, where))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"the bill cannot be read ({words})",
            where=str(path),
            remedy="name a CSV file in the form of FOCUS 1.x",
        ) from None
    return charges, unread.line()


def _check_columns(names: Sequence[str], column: str, path: Path) -> None:
    double = sorted({name for name in names if list(names).count(name) > 1})
    if double:
        raise DataError(
            f"the column {double[0]} is there twice", where=f"{path}:1", remedy="keep one of them"
        )
    for name in (column, *REQUIRED):
        if name not in names:
            near = nearest_of(name, names, 0.75)
            hint = f"; {near} looks like it" if near else ""
            raise DataError(
                f"the bill has no column {name}{hint}",
                where=f"{path}:1",
                remedy="export it in the form of FOCUS 1.0 or newer",
            )


def _charge(row: Mapping[str, str], line: int, column: str, where: str) -> Charge:
    currency, category = row["BillingCurrency"], row["ChargeCategory"]
    if currency != CURRENCY:
        raise DataError(
            f"BillingCurrency is {currency!r}, and the prices of plan.cluster are US dollars",
            where=where,
            remedy=f"export the bill in {CURRENCY}",
        )
    if category not in CATEGORIES:
        raise DataError(
            f"ChargeCategory is {category!r}, which FOCUS does not have",
            where=where,
            remedy=f"use one of {', '.join(CATEGORIES)}",
        )
    start, stop = (_time(row[f"ChargePeriod{end}"], where) for end in ("Start", "End"))
    if stop <= start:
        raise DataError(
            "ChargePeriodEnd is not after ChargePeriodStart",
            where=where,
            remedy="export the bill again",
        )
    unit, quantity = row.get("ConsumedUnit", ""), row.get("ConsumedQuantity", "")
    if not unit:
        unit, quantity = row.get("PricingUnit", ""), row.get("PricingQuantity", "")
    billed = None
    if (seconds := _UNITS_S.get(unit.lower())) is not None:
        billed = _number(quantity, "the quantity", where) * seconds if quantity else stop - start
        if not 0 <= billed <= stop - start:
            raise DataError(
                f"{quantity} {unit} do not fit the charge period of "
                f"{float((stop - start) / 3600):g} hours",
                where=where,
                remedy="export one row for each resource",
            )
    return Charge(
        line,
        _number(row[column], column, where),
        category,
        row["ResourceId"],
        row.get("ResourceName", ""),
        start,
        stop,
        unit,
        billed,
        _tags(row.get("Tags", ""), where),
    )


def _number(text: str, column: str, where: str) -> Fraction:
    if not _NUMBER.fullmatch(text):
        raise DataError(
            f"{column} is {text!r}, which is no number",
            where=where,
            remedy="write it with digits and one point",
        )
    return Fraction(text)


def _time(text: str, where: str) -> Fraction:
    """Return seconds since 1970. A time without a zone is UTC, by the specification."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise DataError(
            f"{text!r} is no date and time", where=where, remedy="write as 2026-11-29T08:00:00Z"
        ) from None
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    return Fraction(str(at.timestamp()))


def _tags(text: str, where: str) -> dict[str, str]:
    if not text.strip():
        return {}
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise DataError("Tags is no JSON object", where=where, remedy='write as {"team": "search"}')
    return {key: str(each) for key, each in value.items()}
