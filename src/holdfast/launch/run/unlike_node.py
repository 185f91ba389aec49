"""Refuses a node whose run file differs from that of the nodes at work in the run folder.

The coordinator refuses it too, when it joins. But by then this node would have written its own
description into the run folder, and nodes that join later would read it.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.config.loading.explain import format_value
from holdfast.config.loading.identity import values_alike_on_all_nodes
from holdfast.config.loading.load import LoadedConfig
from holdfast.errors import RunFolderError
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.runs import read_resolved
from holdfast.wire.store.run_location import location_of_run, where_of_run


def refuse_unlike_node(folder: Path, loaded: LoadedConfig, watch: HolderWatch) -> None:
    """Compare the keys that have to be alike on all nodes with those of the nodes at work.

    Raises RunFolderError, with both values, if one differs."""
    stored = read_resolved(folder)
    if stored is None or watch.look() is not True:
        return
    there = values_alike_on_all_nodes(stored["config"])
    here = values_alike_on_all_nodes(loaded.config.model_dump(mode="json"))
    for key in sorted(there.keys() & here.keys()):
        if there[key] != here[key]:
            raise RunFolderError(
                f"{key} is {format_value(here[key])} here and {format_value(there[key])} on the "
                "nodes at work; it has to be alike on all nodes of a run",
                where=where_of_run(folder),
                remedy=f"use {key}={format_value(there[key])}, or holdfast join "
                f"{location_of_run(folder)}",
            )
