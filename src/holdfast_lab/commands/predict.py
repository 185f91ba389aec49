"""`holdfast predict`: fit a predictor of lost nodes to traces, and judge it on what came later."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from holdfast.api.progress import LongWork
from holdfast.cli.dispatch import app as make_app
from holdfast.errors import DataError, UserError
from holdfast.policy.prediction.bilstm import BiLstm
from holdfast.policy.prediction.predictor import FittedModels
from holdfast.show.output import check_target, print_json, print_table, say, write_text
from holdfast_lab.commands.trace import read_bytes
from holdfast_lab.prediction.fitting import TrainingPart, fit_models, predict_all
from holdfast_lab.prediction.judging import Verdict
from holdfast_lab.prediction.judging import judge as verdict_of
from holdfast_lab.prediction.reading import label_zone, read_history
from holdfast_lab.prediction.samples import BINS_PER_HORIZON, Sample, take_samples
from holdfast_lab.traces.events import EventStream
from holdfast_lab.traces.node_changes import ReadOptions

app = make_app("Fit a predictor of lost nodes to traces, and judge it.")

Files = Annotated[list[Path], typer.Argument(help="traces of any kind that names or counts nodes")]
Zones = Annotated[
    list[str] | None, typer.Option("--zone", help="one for each file; default: the file's name")
]
Systems = Annotated[
    list[str] | None, typer.Option("--system", help="one for each file, of tables of outages")
]
Seed = Annotated[int, typer.Option(help="of what a file leaves open: which nodes of a count go")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Nth = Annotated[
    int, typer.Option("--every-nth", min=1, help="ask about each N-th node only, to save time")
]
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


@app.command()
def fit(
    files: Files,
    to: Annotated[Path, typer.Option("--to", help="the file to write")],
    horizon: Annotated[
        float, typer.Option(min=0.001, help="seconds ahead in which a node is lost or not")
    ] = 1800.0,
    until: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="share of each trace that the fit may see")
    ] = 0.6,
    lstm: Annotated[bool, typer.Option(help="train the Bi-LSTM too (seconds to a minute)")] = True,
    every_nth: Nth = 1,
    zone: Zones = None,
    system: Systems = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Fit all models to the first part of each trace, and write them.

    The models give the chance that a working node is lost within the horizon. There are three: a
    hazard by age and zone, exponential smoothing of recent losses, and a Bi-LSTM on the node's
    signals. Three baselines are judged too: never, the base rate, the last event.

    The last fifth of the part that the fit sees is the validation. It sets each model's threshold
    and chooses one model. What comes after --until is for `holdfast predict judge`.

    \b
    Example:
      holdfast predict fit p3-trace.csv --horizon 600 --to p3.predict.json
      holdfast predict judge p3-trace.csv --model p3.predict.json
    """
    check_target(to, "--to", files)
    streams = read_histories(files, zone, system, seed)
    parts = [TrainingPart(stream, stream.seconds * until, every_nth) for stream in streams]
    with LongWork("fitting") as work:
        made = fit_models(parts, horizon, train_lstm if lstm else None, work.stage)
    write_text(to, json_module.dumps(made.to_json()) + "\n")
    if json:
        verdicts = {name: asdict(verdict) for name, verdict in made.verdicts.items()}
        print_json({"chosen": made.chosen, "verdicts": verdicts})
        return
    rows = [
        (
            name,
            f"{v.threshold:.3f}",
            f"{v.precision:.2f}",
            f"{v.recall:.2f}",
            f"{v.average_precision:.3f}",
        )
        for name, v in made.verdicts.items()
    ]
    print_table(rows, ("model", "threshold", "precision", "recall", "average precision"))
    say(f"chosen: {made.chosen}, by average precision in the last fifth of what the fit has seen")


@app.command()
def judge(
    files: Files,
    model: Annotated[Path, typer.Option("--model", help="what `holdfast predict fit` wrote")],
    since: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="judge from this share of a trace on; default: what the fit has not seen",
        ),
    ] = None,
    every_nth: Nth = 1,
    zone: Zones = None,
    system: Systems = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Judge a fit on traces: precision, recall, calibration, lead time.

    Of a trace that the fit has seen in part, only the rest is judged. An alarm is a chance of at
    least the threshold. Precision is the share of alarms that a loss followed within the horizon.
    Recall is the share of all losses that an alarm preceded. Average precision needs no threshold:
    a model that knows nothing gets the base rate.

    \b
    Example:
      holdfast predict judge another-zone.json --model p3.predict.json
    """
    fitted = FittedModels.from_text(read_text(model), str(model))
    out = []
    for stream in read_histories(files, zone, system, seed):
        start = first_unseen_second(fitted, stream) if since is None else since * stream.seconds
        with LongWork(f"judging on {stream.header.source}"):
            found, at_thresholds = judge_stream(fitted, stream, start, every_nth)
        if json:
            out.append(
                {
                    "source": stream.header.source,
                    "start_s": start,
                    "models": [asdict(verdict) for verdict in found],
                    "thresholds": [asdict(replace(v, calibration=())) for v in at_thresholds],
                }
            )
        else:
            _print_verdicts(fitted, stream, start, found, at_thresholds)
    if json:
        print_json(out)


# --- what the commands share, and the benchmark uses --------------------------------------------
def read_histories(
    files: Sequence[Path], zones: Sequence[str] | None, systems: Sequence[str] | None, seed: int
) -> list[EventStream]:
    """One stream for each file. Nodes without a zone get the file's name as one."""
    for option, given in (("--zone", zones), ("--system", systems)):
        if given and len(given) not in (1, len(files)):
            raise UserError(
                f"the numbers of files ({len(files)}) and of values ({len(given)}) differ",
                where=f"command line, {option}",
                remedy="give one for all files, or one for each, in their order",
            )
    out = []
    for place, path in enumerate(files):
        options = ReadOptions(
            seed,
            zone=zones[place % len(zones)] if zones else "",
            system=systems[place % len(systems)] if systems else None,
        )
        with LongWork(f"reading {path}"):
            stream = read_history(read_bytes(path), str(path), options)
        out.append(label_zone(stream, path.stem))
    return out


def read_text(path: Path) -> str:
    return read_bytes(path).decode("utf-8", "replace")


def train_lstm(samples: Sequence[Sample], weights: Sequence[float], horizon_s: float) -> BiLstm:
    """Train on the samples in order of time."""
    from holdfast_lab.prediction.bilstm import train_bilstm

    order = sorted(range(len(samples)), key=lambda index: samples[index].t_s)
    return train_bilstm(
        [samples[index].window for index in order],
        [samples[index].is_lost for index in order],
        [weights[index] for index in order],
        horizon_s / BINS_PER_HORIZON,
        horizon_s,
    )


def first_unseen_second(fitted: FittedModels, stream: EventStream) -> float:
    """From when on the fit has not seen this trace: 0 for another trace."""
    seen = [s.until_s for s in fitted.trained_on if s.sha256 == stream.header.sha256]
    return max(seen, default=0.0)


def judge_stream(
    fitted: FittedModels, stream: EventStream, start_s: float, every_nth: int = 1
) -> tuple[list[Verdict], list[Verdict]]:
    """(every model at its own threshold, the chosen one at several)."""
    asked = take_samples(stream, fitted.horizon_s, start_s, None, every_nth)
    if not asked.samples:
        raise DataError(
            f"no node works for a horizon of {fitted.horizon_s:g} s after {start_s:g} s",
            where=stream.header.source or "trace",
            remedy="give a longer trace, or an earlier --since",
        )
    chances = predict_all(fitted.models, fitted.bilstm, asked, fitted.horizon_s)
    found = [
        verdict_of(name, asked, row, fitted.verdicts[name].threshold)
        for name, row in chances.items()
    ]
    own = chances[fitted.chosen]
    return found, [verdict_of(fitted.chosen, asked, own, each) for each in THRESHOLDS]


def _print_verdicts(
    fitted: FittedModels,
    stream: EventStream,
    start: float,
    found: list[Verdict],
    at_thresholds: list[Verdict],
) -> None:
    first = found[0]
    say(
        f"{stream.header.source}: {first.samples:,} samples from {start:,.0f} s on, "
        f"{first.losses:,} losses, base rate {first.base_rate:.3f}, "
        f"horizon {fitted.horizon_s:g} s"
    )
    head = ("alarms", "precision", "recall", "lead s")
    print_table(
        [
            (
                v.model + (" *" if v.model == fitted.chosen else ""),
                f"{v.threshold:.3f}",
                *_cells(v),
                f"{v.average_precision:.3f}",
                f"{v.skill:+.3f}",
                f"{v.calibration_error:.3f}",
            )
            for v in found
        ],
        ("model", "threshold", *head, "average precision", "skill", "calibration error"),
    )
    print(f"\n{fitted.chosen} at other thresholds")
    print_table([(f"{v.threshold:.2f}", *_cells(v)) for v in at_thresholds], ("threshold", *head))
    chosen = next(v for v in found if v.model == fitted.chosen)
    print(f"\ncalibration of {fitted.chosen}")
    print_table(
        [
            (f"{b.low:.2f}", b.samples, f"{b.predicted:.3f}", f"{b.observed:.3f}")
            for b in chosen.calibration
        ],
        ("chance from", "samples", "predicted", "observed"),
    )


def _cells(v: Verdict) -> tuple[str, ...]:
    lead = "-" if v.lead_s is None else f"{v.lead_s:,.0f}"
    return f"{v.alarms:,}", f"{v.precision:.2f}", f"{v.recall:.2f}", lead
