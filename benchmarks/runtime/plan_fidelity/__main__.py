"""Predictions of the planner against public measurements, with constants of other models' rows.

    python -m benchmarks.runtime.plan_fidelity [--rows FILE] [--data FOLDER] [--only SET...]

Every prediction is that of the product's own cost model (`holdfast.plan.cost.evaluate`). Four
constants of a device and precision are fitted: shares of its peaks in products, attention and
memory, and a time of a product (`fit.py`). For each model they are fitted on the rows of all other
models. `--rows` predicts the rows of another file with the columns of either kind, in the same way.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.runtime.plan_fidelity import fsdp, hybrid, megatron, networks, torchtitan
from benchmarks.runtime.plan_fidelity.case import Case, predicted, with_efficiency
from benchmarks.runtime.plan_fidelity.fit import Constants
from benchmarks.runtime.plan_fidelity.floors import PUBLISHED
from benchmarks.runtime.plan_fidelity.report import Prediction, constants, lines
from benchmarks.runtime.plan_fidelity.rows import Row, missing_columns, read_rows
from holdfast.errors import DataError, UserError
from holdfast.plan.hardware.devices import DeviceType, load_devices

DATA = Path(os.environ.get("HOLDFAST_DATA", "data"))
Reader = Callable[[Sequence[Row], Mapping[str, DeviceType]], list[Case]]
KINDS: Mapping[str, tuple[str, tuple[str, ...], Reader]] = {
    "fsdp": ("measured/llm_foundry.csv", fsdp.NEEDED, fsdp.cases_of),
    "hybrid": ("measured/megatron_bridge.csv", hybrid.NEEDED, hybrid.cases_of),
}
SETS = (*KINDS, "megatron", "torchtitan", "networks")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runtime.plan_fidelity", description=__doc__
    )
    parser.add_argument("--rows", type=Path, help="predict the rows of this file")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of the public rows; HOLDFAST_DATA"
    )
    parser.add_argument("--only", nargs="*", choices=SETS, default=SETS, help="sets of rows")
    parser.add_argument("--worst", type=int, default=10, help="rows to show")
    options = parser.parse_args(arguments)
    try:
        _report(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _report(options: argparse.Namespace) -> None:
    devices = load_devices()
    if options.rows:
        rows = read_rows(options.rows)
        kind = _kind(rows, options.rows)
        asked = KINDS[kind][2](rows, devices)
        _print(kind, asked, _known(kind, options.data, devices), devices, options.worst)
        return
    for kind in (each for each in KINDS if each in options.only):
        cases = _known(kind, options.data, devices)
        if not cases:
            path = options.data / KINDS[kind][0]
            raise DataError(
                "is not there",
                where=str(path),
                remedy="give its folder with --data, or in HOLDFAST_DATA",
            )
        _print(kind, cases, cases, devices, options.worst)
    if "megatron" in options.only:
        eight = megatron.cases_of(megatron.EIGHT, devices)
        _print("megatron", eight, eight, devices, len(eight))
        later = megatron.cases_of(megatron.NLG, devices)
        _print("MT-NLG (no bar)", later, eight, devices, len(later))
    if "torchtitan" in options.only:
        cases = torchtitan.cases_of(devices)
        _print("torchtitan (no bar)", cases, cases, devices, len(cases))
    if "networks" in options.only:
        print("\n".join(networks.lines(options.data)), end="\n\n")
    print("published, each on rows of its own:", *PUBLISHED, sep="\n  ")


def _known(kind: str, data: Path, devices: Mapping[str, DeviceType]) -> list[Case]:
    """The public rows of a kind; none where they are not."""
    path = data / KINDS[kind][0]
    return KINDS[kind][2](read_rows(path), devices) if path.is_file() else []


def _kind(rows: Sequence[Row], path: Path) -> str:
    """The kind of rows by their columns. Raises DataError if they are of neither."""
    missing = {kind: missing_columns(rows, needed) for kind, (_, needed, _) in KINDS.items()}
    kind = min(missing, key=lambda each: len(missing[each]))
    if missing[kind]:
        raise DataError(
            f"the header has no column {', '.join(map(repr, missing[kind]))}",
            where=f"{path}:1",
            remedy="give rows with the columns of llm_foundry.csv or megatron_bridge.csv",
        )
    return kind


def _print(
    kind: str,
    asked: Sequence[Case],
    known: Sequence[Case],
    devices: Mapping[str, DeviceType],
    worst: int,
) -> None:
    pool = list(asked) if asked is known else [*known, *asked]
    predictions = predict(asked, pool, devices, kind == "hybrid")
    print("\n".join(lines(kind, predictions, devices, worst)))
    every = Constants(pool, devices, kind == "hybrid")
    fits = {group: every.of(group) for group in sorted({case.group for case in asked})}
    print("\n".join(constants(fits)), end="\n\n")


def predict(
    asked: Sequence[Case], pool: Sequence[Case], devices: Mapping[str, DeviceType], are_alike: bool
) -> list[Prediction]:
    """Predict each row with constants from rows of other models."""
    found = dict[int, Prediction]()
    for model in dict.fromkeys(case.model for case in asked):
        others = [each for each in pool if each.model != model]
        constants = Constants(others, devices, are_alike)
        for case in (each for each in asked if each.model == model):
            source = constants.of(case.group)
            device = with_efficiency(devices[case.device], case.precision, source.constants)
            value = predicted(case, {**devices, case.device: device})
            found[id(case)] = Prediction(case, value, source)
    return [found[id(case)] for case in asked]


if __name__ == "__main__":
    sys.exit(main())
