"""A fitted set of models with its file, and the predictor that a run or a replay carries. Pure.

The predictor is a value. `update` takes a change of a node in and returns the next value.
`probability` is the chance that a working node is lost within a horizon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError
from holdfast.policy.prediction.bilstm import BiLstm, window_of
from holdfast.policy.prediction.history import ClusterHistory, NodeChange
from holdfast.policy.prediction.models import Model, model_from_json, model_to_json, rescale

FORMAT = "holdfast-prediction-1"


@dataclass(frozen=True)
class TrainingSource:
    """A trace that the fit has seen, from its start until `until_s`."""

    source: str
    sha256: str
    until_s: float


@dataclass(frozen=True)
class ModelVerdict:
    """One model on the part of the training time that its fit has not seen."""

    threshold: float  # the chance from which it raises an alarm
    precision: float
    recall: float
    average_precision: float  # 0 to 1


@dataclass(frozen=True)
class FittedModels:
    """What a fit made."""

    horizon_s: float  # for which the chances are
    half_lives_s: tuple[float, ...]  # of the smoothing
    memory_s: float  # how far back the history reaches
    models: tuple[Model, ...]
    bilstm: BiLstm | None
    chosen: str  # the model with the best average precision in the validation
    verdicts: Mapping[str, ModelVerdict]
    trained_on: tuple[TrainingSource, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (
            *(model.name for model in self.models),
            *([self.bilstm.name] if self.bilstm else []),
        )

    def empty_history(self) -> ClusterHistory:
        return ClusterHistory(self.half_lives_s, self.memory_s)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "horizon_s": self.horizon_s,
            "half_lives_s": list(self.half_lives_s),
            "memory_s": self.memory_s,
            "chosen": self.chosen,
            "verdicts": {name: vars(verdict) for name, verdict in self.verdicts.items()},
            "trained_on": [vars(source) for source in self.trained_on],
            "models": [model_to_json(model) for model in self.models],
            "bilstm": None if self.bilstm is None else self.bilstm.to_json(),
        }

    @staticmethod
    def from_text(text: str, where: str) -> FittedModels:
        """Read the file of a fit. Raises DataError. where: its path, for the message."""
        try:
            value = parse_json(text)
            if not isinstance(value, dict) or value.get("format") != FORMAT:
                raise ValueError(f"it has no format {FORMAT}")
            lstm = value["bilstm"]
            made = FittedModels(
                float(value["horizon_s"]),
                tuple(map(float, value["half_lives_s"])),
                float(value["memory_s"]),
                tuple(map(model_from_json, value["models"])),
                None if lstm is None else BiLstm.from_json(lstm),
                str(value["chosen"]),
                {
                    str(name): ModelVerdict(**{key: float(each) for key, each in verdict.items()})
                    for name, verdict in value["verdicts"].items()
                },
                tuple(
                    TrainingSource(str(s["source"]), str(s["sha256"]), float(s["until_s"]))
                    for s in value["trained_on"]
                ),
            )
            if made.chosen not in made.names or set(made.verdicts) != set(made.names):
                raise ValueError("the chosen model is not among the models")
            return made
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(
                f"this is no fit of a predictor: {error}",
                where=where,
                remedy="make one with `holdfast predict fit TRACE --to FILE`",
            ) from None


@dataclass(frozen=True)
class NodePredictor:
    """One model of a fit, with the history so far. Begin with `NodePredictor.of(fit)`."""

    fit: FittedModels
    name: str
    history: ClusterHistory

    @staticmethod
    def of(fit: FittedModels, name: str = "") -> NodePredictor:
        """name: of the model; empty: the one that the fit has chosen."""
        return NodePredictor(fit, name or fit.chosen, fit.empty_history())

    @property
    def threshold(self) -> float:
        """The chance from which the validation says that an alarm is due."""
        return self.fit.verdicts[self.name].threshold

    def update(self, change: NodeChange) -> NodePredictor:
        return self.update_all((change,))

    def update_all(self, changes: Iterable[NodeChange]) -> NodePredictor:
        """As `update`, for changes in order of time."""
        return replace(self, history=self.history.update(changes))

    def probability(self, node: str, horizon_s: float, now_s: float) -> float:
        """The chance that the node is lost within `horizon_s` from `now_s`; 0 if it does not
        work."""
        signals = self.history.signals(node, now_s)
        if signals is None:
            return 0.0
        lstm = self.fit.bilstm
        if lstm is not None and self.name == lstm.name:
            window = window_of(self.history, node, now_s, lstm.bin_s, lstm.bins)
            return 0.0 if window is None else lstm.probability(window, horizon_s)
        model = next(model for model in self.fit.models if model.name == self.name)
        own = model.probability(signals, self.fit.horizon_s)
        return rescale(own, self.fit.horizon_s, horizon_s)
