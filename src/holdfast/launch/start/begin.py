"""Begins a run in its folder, or resumes it: checks, data, and the run's description."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.config.huggingface.folder import keep_settings
from holdfast.config.loading.load import LoadedConfig
from holdfast.config.loading.no_effect import find_without_effect
from holdfast.core.data.lineage import split_effective
from holdfast.events import RunFinished
from holdfast.launch.node.devices import describe_devices
from holdfast.launch.run.auto_layout import describe_microbatch
from holdfast.launch.run.bucket_run import (
    begin_again_word,
    place_word,
    probe_run_store,
    require_secret,
)
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.lora_run import describe_lora, describe_weights
from holdfast.launch.run.resume_checks import (
    bring_back_fallback,
    ensure_end_is_intact,
    refuse_branch_without_state,
    refuse_unfit_state,
)
from holdfast.launch.run.rounds import by_stored_codec, describe_codec
from holdfast.launch.run.run_folder import (
    by_stored_places,
    is_begun_by_other,
    refuse_alone,
    refuse_in_use,
    refuse_old_base,
    refuse_other,
    refuse_unlike_node,
    run_hash,
    run_id,
    set_aside,
    write_description,
)
from holdfast.launch.run.runs import IMPORTED_FOLDER, read_resolved
from holdfast.launch.run.sealing import seal_folder
from holdfast.launch.start.data import RunData, prepare_run_data
from holdfast.launch.start.facts import Facts, Screen, resolve
from holdfast.launch.start.regions import refuse_other_regions
from holdfast.options.registry import option_keys
from holdfast.plan.hardware.cluster_file import HERE, read_cluster
from holdfast.wire.journal import read_journal
from holdfast.wire.store.location import check_location
from holdfast.wire.store.run_location import store_of_run, where_of_run


@dataclass(frozen=True)
class Start:
    """A start of a run in its folder."""

    loaded: LoadedConfig  # planned for this machine
    facts: Facts
    folder: Path
    watch: HolderWatch  # of the trainer that may have the folder
    screen: Screen
    fresh: bool = False  # begin again, whatever lies there
    yes: bool = False  # whatever it costs


@dataclass(frozen=True)
class BegunRun:
    """A run whose dataset is prepared and whose description lies in its folder."""

    loaded: LoadedConfig
    dataset_version: str
    last_step: int | None = None  # of a run that is finished. Then nothing was written


def begin_run(start: Start) -> BegunRun:
    """Prepare the data of a run and write its description, or check those that are there.

    If the run has several nodes, one of them may be at work already. Raises UserError."""
    folder, fresh, say = start.folder, start.fresh, start.screen.say
    several = start.facts.several
    refuse_other_regions(start.loaded)
    if (cluster := start.loaded.config.plan.cluster) not in ("", HERE):
        read_cluster(cluster, where=start.loaded.where("plan.cluster"))  # before data is prepared
    check_location(start.loaded.config.checkpoint.bucket)
    seal_folder(folder, start.loaded.config, fresh=fresh)
    probe_run_store(folder)  # before anything is read or written in the run folder
    refuse_old_base(start.loaded)
    refuse_branch_without_state(folder, start.loaded, fresh)
    before = run_id(folder)  # what two nodes with --fresh both find, only one of them moves
    # This node joins the trainer that has the folder, or takes its place.
    if start.facts.several:
        if before is not None:
            require_secret(start.folder)
        refuse_alone(start.folder, start.watch)
    if start.fresh or not start.facts.several:
        refuse_in_use(start.folder, start.watch)
    facts = replace(start.facts, stored=None if fresh else read_resolved(folder))
    loaded, facts, data = prepare_run_data(start.loaded, facts, folder, start.screen, fresh=fresh)
    version = data.version
    if several and not fresh:  # another node may have chosen a codec meanwhile
        stored = replace(facts, stored=read_resolved(folder))
        loaded = resolve(loaded, stored, (by_stored_codec,))
    beside = fresh and several and is_begun_by_other(folder, before, loaded, version)
    if fresh and not beside and (old := set_aside(folder, before, start.watch)) is not None:
        say(f"the old run folder is now {old}")
    refuse_other(folder, loaded, version)
    facts = replace(facts, stored=read_resolved(folder))
    loaded = resolve(loaded, facts, (by_stored_places,)).validated()
    if several:
        refuse_alone(folder, start.watch)  # the dataset may have taken its time
    if (last := finished_step(folder, loaded.config.train.steps)) is not None:
        bring_back_fallback(
            store_of_run(folder), loaded.config, run_hash(folder, loaded.config), False, say
        )
        ensure_end_is_intact(folder, last, loaded.config.checkpoint.bucket, say)
        say(
            f"this run is finished: all {last} steps are done; see it with: holdfast report "
            f"{place_word(folder)}, or {begin_again_word(folder)}"
        )
        return BegunRun(loaded, version, last)
    refuse_unfit_state(folder, loaded.config)
    if several:
        refuse_unlike_node(folder, loaded, start.watch)
    _describe_run(replace(start, loaded=loaded, facts=facts), data)
    return BegunRun(loaded, version)


def _describe_run(start: Start, data: RunData) -> None:
    """Write the description of the run, and say what a reader has to know of it."""
    loaded, facts, folder, say = start.loaded, start.facts, start.folder, start.screen.say
    begins = facts.stored is None
    for line in facts.layout.about:
        say(line)
    if begins and not start.yes:
        start.screen.confirm_cost(loaded, facts.layout.usd)
    lora, origin = describe_lora(loaded), describe_weights(loaded) if begins else []
    size = [*describe_microbatch(loaded), *describe_codec(loaded)]
    devices = describe_devices(loaded)
    bits = [line for option in option_keys() for line in option.notices(loaded.config.layout)]
    bits += loaded.config.outer.notices(loaded.config.checkpoint.memory_every_steps == 1)
    bits += loaded.config.server.notices()
    lines = [*find_without_effect(loaded), *size, *data.use, *origin, *lora, *devices, *bits]
    if begins:
        lines = [f"a new run in {where_of_run(folder.resolve())}", *lines]
    begun = write_description(folder, loaded, facts.hardware, data.location, data.version)
    if not begun and facts.several:
        require_secret(folder)  # another node may have begun the run just now
    if begun and loaded.config.model.weights:
        keep_settings(Path(loaded.config.model.weights), folder / IMPORTED_FOLDER, tokenizer=True)
    for line in lines:
        say(line)


def finished_step(folder: Path, steps: int) -> int | None:
    """The last step, when the journal says that the run is finished and counts up to there."""
    if not folder.is_dir():
        return None
    effective, _ = split_effective(read_journal(store_of_run(folder)))
    done = [r.event.step for r in effective if isinstance(r.event, RunFinished)]
    return max((step for step in done if step >= steps), default=None)
