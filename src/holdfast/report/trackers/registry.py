"""Finds trackers by name: those of Holdfast, entry points `holdfast.trackers`, `module:Class`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from holdfast.config.run import RunConfig
from holdfast.config.sections.logging import LoggingConfig
from holdfast.errors import ConfigError, use_one_of
from holdfast.report.trackers.tracker import Tracker

GROUP = "holdfast.trackers"
OTEL_PACKAGE = "opentelemetry.exporter.otlp.proto.http"


@dataclass(frozen=True)
class BuiltIn:
    """A tracker that comes with Holdfast."""

    place: str  # module:Class
    package: str = ""  # what it imports; "" for nothing
    extra: str = ""  # of Holdfast, that installs the package


BUILT_IN = {
    "csv": BuiltIn("holdfast.report.trackers.csv_files:CsvTracker"),
    "tensorboard": BuiltIn("holdfast.report.trackers.event_files:TensorBoardTracker"),
    "wandb": BuiltIn("holdfast.report.trackers.wandb_runs:WandbTracker", "wandb", "wandb"),
    "mlflow": BuiltIn("holdfast.report.trackers.mlflow_runs:MlflowTracker", "mlflow", "mlflow"),
    "otel": BuiltIn("holdfast.report.trackers.otel:OtelTracker", OTEL_PACKAGE, "otel"),
}


def trackers_of(config: RunConfig) -> tuple[str, ...]:
    """Return the names of a run's trackers. `tensorboard: true` is a short form of one of them."""
    names = config.logging.trackers
    return (*names, "tensorboard") if config.tensorboard and "tensorboard" not in names else names


def require_tracker(name: str, where: str = "logging.trackers") -> None:
    """Refuse a tracker that cannot be loaded here, without importing it. Raises ConfigError."""
    if (known := BUILT_IN.get(name)) is not None:
        if known.package and not is_installed(known.package):
            raise ConfigError(
                f"the tracker {name} needs {known.package}, which is not installed",
                where=where,
                remedy=f"pip install 'holdfast[{known.extra}]'",
            )
        return
    if ":" in name:
        module = name.partition(":")[0]
        if not is_installed(module.partition(".")[0]):
            raise ConfigError(
                f"there is no module {module} for the tracker {name}",
                where=where,
                remedy="install it, or name its folder in PYTHONPATH",
            )
        return
    others = [point.name for point in entry_points(group=GROUP)]
    if name not in others:
        every = [*BUILT_IN, *others]
        raise ConfigError(
            f"there is no tracker {name!r}",
            where=where,
            remedy=f"{use_one_of(every, name)}, or module:Class",
        )


def load_tracker(name: str) -> type[Tracker]:
    """Import a tracker's class. Raises ConfigError if there is none, and what the module raises."""
    if name in BUILT_IN or ":" in name:
        module, _, attribute = (BUILT_IN[name].place if name in BUILT_IN else name).partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"the tracker {name} cannot be imported: {error}",
                where="logging.trackers",
                remedy="correct its place, module:Class",
            ) from error
    else:
        require_tracker(name)
        (point, *_) = entry_points(group=GROUP, name=name)
        found = point.load()
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise ConfigError(
            f"the tracker {name} is not a subclass of {Tracker.__module__}.Tracker",
            where="logging.trackers",
            remedy="derive the class from it",
        )
    return found


def options_of(name: str, config: LoggingConfig) -> dict[str, str]:
    """Return a tracker's options from the run file."""
    section = {"wandb": config.wandb, "mlflow": config.mlflow}.get(name)
    found = {} if section is None else {k: str(v) for k, v in section.model_dump().items()}
    return found | config.options_of(name)


def check_options(
    name: str,
    kind: type[Tracker],
    options: Mapping[str, str],
    where: Callable[[str], str] = lambda option: "logging.options",
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Refuse an option that a tracker does not take, and a value that can never work.

    where: returns the place of an option, for the message. Raises ConfigError."""
    known = kind.option_names
    for option in options:
        if known is not None and option not in known:
            takes = ", ".join(known) or "none"
            raise ConfigError(
                f"the tracker {name} has no option {option!r}",
                where=where(option),
                remedy=f"its options: {takes}",
            )
    for option, what, remedy in kind.problems(options, environment):
        raise ConfigError(what, where=where(option), remedy=remedy)


def is_installed(package: str) -> bool:
    """Return True if a top-level package can be imported. A folder of that name is no package."""
    try:
        found = find_spec(package)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None
