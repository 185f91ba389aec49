"""`holdfast report RUN --json`: the history as one JSON value for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.core.flops import FORMULAS, run_flops_per_token
from holdfast.machine.accelerators import peak_flops
from holdfast.report.history.history import EvaluationPoint, History
from holdfast.report.ledger.incidents import Incident


def summary(
    history: History,
    resolved: Mapping[str, Any] | None = None,
    *,
    baselines: Mapping[str, float] | None = None,
    device: str | None = None,
    curve: bool = False,
) -> dict[str, Any]:
    """Totals, incidents, checkpoints, where the time went; with `curve` every step too.

    Seconds, bytes, nats per token. Keys of `seconds_by_class` add up to `wall_seconds`, and so do
    those of each rank in `seconds_by_rank`.
    """
    last, best = (history.evaluations[-1] if history.evaluations else None), history.best_evaluation
    out: dict[str, Any] = {
        "run": history.run,
        "state": history.state,
        "config_hash": history.config_hash,
        "dataset_version": history.dataset_version,
        "last_step": history.last_step,
        "loss": history.steps[-1].loss if history.steps else None,
        "tokens": history.tokens,
        "tokens_done_again": history.recomputed_tokens,
        "tokens_per_second": history.tokens_per_second,
        "model_flop_utilisation": {
            u.convention: {"ratio": u.ratio, "formula": u.formula, "peak_flops": u.peak}
            for u in utilisations(history, resolved or {}, device)
        },
        "validation": _evaluation(last),
        "best_validation": _evaluation(best),
        "baselines_bits_per_byte": dict(baselines or {}),
        "wall_seconds": history.wall,
        "seconds_by_class": history.time,
        "goodput": history.goodput,
        "goodput_running": history.goodput_running,
        "seconds_by_rank": {str(rank): s for rank, s in history.ranks.totals().items()},
        "rank_seconds_of_fleet": history.ranks.fleet_totals(),
        "goodput_fleet": history.goodput_fleet,
        "sessions": [asdict(s) for s in history.sessions],
        "generations": [asdict(g) | {"nodes": list(g.nodes)} for g in history.generations],
        "incidents": [_incident(each) for each in history.incidents],
        "checkpoints": [asdict(c) for c in history.checkpoints],
        "cadence": [asdict(decision) for decision in history.cadence],
        "notices": [asdict(n) for n in history.notices],
    }
    if history.branch:
        out["branch"] = history.branch.body
    if metrics := history.metrics:
        out["metrics"] = [asdict(metric) for metric in metrics]
    if lost := history.roles_lost:
        out["roles_lost"] = {"processes": len(lost), "tokens": history.lost_tokens}
    if history.experts:
        out["experts"] = {str(block): counts for block, counts in history.experts.items()}
        out["dropped_choices"] = history.dropped_choices
    if history.experts and history.loads_with_copies:
        copies = history.loads_with_copies
        out["expert_copies"] = {str(block): asdict(loads) for block, loads in copies.items()}
    if history.exchanges:
        out["exchanges"] = {
            e.kind: {"seconds": e.seconds, "exposed": e.exposed} for e in history.exchanges
        }
    if history.fates:
        out["outer"] = {"mode": "free", "tokens_by_fate": dict(history.fates)}
    if history.plan is not None:
        out["plan"] = history.plan.to_json()
    if history.morphs:
        out["morphs"] = [morph.to_json() for morph in history.morphs]
    if any(history.predictions.values()):
        out["predictions"] = history.predictions
    if history.memory:  # the newest sample of each worker of the newest generation that has one
        newest = max(sample.generation for sample in history.memory)
        by_rank = {sample.rank: sample for sample in history.memory if sample.generation == newest}
        out["memory"] = [asdict(by_rank[rank]) for rank in sorted(by_rank)]
    if history.transfers:
        sums = history.transfers.items()
        out["transfers"] = {kind: asdict(one) | {"hidden": one.hidden} for kind, one in sums}
    if history.tasks:
        out["tasks"] = [{"step": task.step, **task.body} for task in history.tasks]
    if history.holes:
        out["holes"] = list(history.holes)
    if curve:
        out["steps"] = [asdict(p) for p in history.steps]
        out["steps_done_again"] = [[asdict(p) for p in piece] for piece in history.rework]
        out["validations"] = [asdict(e) for e in history.evaluations]
    return out


@dataclass(frozen=True)
class Utilisation:
    """One figure and the convention it was computed by: one is meaningless without the other."""

    ratio: float
    convention: str
    formula: str
    peak: float  # FLOP/s of all devices together


def _incident(one: Incident) -> dict[str, Any]:
    """An incident with what follows from it."""
    return (
        asdict(one)
        | {"losses": [asdict(loss) for loss in one.losses], "title": one.title}
        | {"seconds": one.seconds, "stood_still": one.stood_still_s, "planned": one.is_planned}
        | {"came": list(one.came), "gone": list(one.gone), "grown": list(one.grown)}
        | {"steps_lost": one.steps_lost, "phases": one.phases, "restored": one.source}
    )


def _evaluation(point: EvaluationPoint | None) -> dict[str, Any] | None:
    """An evaluation; the key `metrics` is there if the objective has any."""
    if point is None:
        return None
    return {name: value for name, value in asdict(point).items() if name != "metrics" or value}


def utilisations(
    history: History, resolved: Mapping[str, Any], device: str | None
) -> tuple[Utilisation, ...]:
    """By each convention, at the run's median tokens/s.

    resolved: what `resolved.json` holds; device: the accelerator's reported name, None on a CPU.
    """
    if device is None or "config" not in resolved or not history.steps:
        return ()
    config = RunConfig.model_validate(resolved["config"])
    peak = peak_flops(device, config.train.precision)
    if peak is None:
        return ()
    devices = max(1, history.generations[-1].workers if history.generations else 1)
    achieved = history.tokens_per_second / (peak * devices)
    return tuple(
        Utilisation(achieved * flops, name, FORMULAS[name], peak * devices)
        for name, flops in run_flops_per_token(config).items()
    )
