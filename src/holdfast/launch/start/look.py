"""A run that is only looked at: what a start would plan of it."""

from __future__ import annotations

from holdfast.config.loading.load import LoadedConfig
from holdfast.data.stream.dataset_location import dataset_exists, open_dataset
from holdfast.launch.run.microbatch_size import by_microbatch_size
from holdfast.launch.run.runs import read_resolved, run_folder_of
from holdfast.launch.start.data import BY_LAYOUT, with_vocabulary
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.resolve import resolve, run_stages
from holdfast.launch.start.screen import Screen
from holdfast.machine.hardware import detect_hardware

SMALLEST = "the smallest world"
"""The reason of a number of workers that was left to the machine."""


def with_prepared_vocabulary(loaded: LoadedConfig, screen: Screen) -> LoadedConfig:
    """Fill in the dataset's vocabulary if the dataset is prepared. Raises ConfigError."""
    data = loaded.config.data
    if not dataset_exists(data.folder, data):
        return loaded
    return with_vocabulary(loaded, open_dataset(data.folder, data), screen)


def plan_to_look(loaded: LoadedConfig, screen: Screen) -> tuple[LoadedConfig, Facts]:
    """Fill in layout and microbatch. A number of workers that is left to the machine becomes the
    smallest one. Raises UserError."""
    facts = Facts(detect_hardware(), stored=read_resolved(run_folder_of(loaded.config)))
    loaded, facts = run_stages(loaded, facts, (BY_LAYOUT,), screen)
    layout = loaded.config.layout
    if layout.workers == 0:
        loaded = loaded.with_values({"layout.workers": (layout.least_workers, SMALLEST)})
    return resolve(loaded, facts, (by_microbatch_size,)).validated(), facts
