"""Trackers of a run: programs that show it, fed by processes of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from holdfast.config.sections.base import Section

_TRACKER_NAME = re.compile(r"[A-Za-z_][\w-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class WandbConfig(Section):
    """Options of the tracker `wandb` (extra `wandb`). Its key stays in the environment
    (`WANDB_API_KEY`)."""

    mode: Literal["offline", "online"] = "offline"
    """offline: into the run folder, for `wandb sync`; online: to the server, too"""
    project: str = Field("holdfast", description="the project that gets the run")
    entity: str = Field("", description="user or team; empty: your default")


class MlflowConfig(Section):
    """Options of the tracker `mlflow` (extra `mlflow`). User and password stay in the environment
    (`MLFLOW_TRACKING_USERNAME`, `MLFLOW_TRACKING_PASSWORD`)."""

    mode: Literal["offline", "online"] = "offline"
    """offline: a database in the run folder; online: the server at uri"""
    uri: str = Field("", description="address of the server; empty: MLFLOW_TRACKING_URI")
    experiment: str = Field("holdfast", description="the experiment that gets the run")

    @field_validator("uri")
    @classmethod
    def _has_no_password(cls, uri: str) -> str:
        if re.search(r"/[^/]*@", uri):
            raise ValueError(
                "the address has a user or a password, and a run file is no place for it: "
                "use MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD of the environment"
            )
        return uri


class LoggingConfig(Section):
    """Trackers show the run in other programs ([trackers.md](../guide/trackers.md))."""

    trackers: tuple[str, ...] = ()
    """names: csv, tensorboard, wandb, mlflow, an installed one, or module:Class"""
    options: tuple[str, ...] = ()
    """options of other trackers, each as NAME.OPTION=VALUE"""
    timeout_seconds: float = Field(60.0, gt=0)
    """a tracker whose call takes longer is started again"""
    finish_seconds: float = Field(10.0, ge=0)
    """how long the end of the run waits for trackers"""
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()

    @field_validator("trackers", "options", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Take `csv,tensorboard` of the command line for a list."""
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("trackers")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not _TRACKER_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a tracker: use csv or module:Class")
            if names.count(name) > 1:
                raise ValueError(f"{name} is there twice: use it once")
        return names

    def broken_rules(self) -> Iterator[str]:
        for option in self.options:
            name = self._split_option(option)[0]
            if name not in self.trackers:
                yield (
                    f"logging.options: {option!r} names no tracker of logging.trackers: "
                    "use NAME.OPTION=VALUE"
                )

    def options_of(self, name: str) -> dict[str, str]:
        """Return what `options` has for one tracker."""
        split = [self._split_option(option) for option in self.options]
        return {option: value for tracker, option, value in split if tracker == name}

    @staticmethod
    def _split_option(text: str) -> tuple[str, str, str]:
        key, _, value = text.partition("=")
        name, _, option = key.rpartition(".")
        return name.strip(), option.strip(), value.strip()
