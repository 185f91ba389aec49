"""What a round of a run's learners takes: its sites, its compute, and codecs measured here."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from holdfast.config.loading.fields import leaves
from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.config.run import RunConfig
from holdfast.config.sections.outer import OuterConfig
from holdfast.config.sections.sites import SiteConfig
from holdfast.core.data.lineage import split_effective
from holdfast.core.round_bytes import payload_bytes
from holdfast.core.sharding.adapters import lora_parameters
from holdfast.core.sharding.fragments import fragment_of
from holdfast.core.sharding.parameters import count_parameters
from holdfast.core.sharding.run_table import run_parameters
from holdfast.core.sharding.state_table import learner_shares
from holdfast.errors import ConfigError, UserError
from holdfast.events import OuterRound, SiteLinkMeasured, StepDone
from holdfast.launch.run.runs import open_run
from holdfast.launch.start.facts import Facts
from holdfast.layout import Layout, place_layout
from holdfast.machine.limits import usable_cores
from holdfast.plan.auto.machines import Machines, machines_of
from holdfast.plan.cost.rounds import CodecChoice, RoundModel, Site, fastest
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.topology_cost import Fleet, TopologyCost
from holdfast.report.formatting import format_duration
from holdfast.wire.child_command import module_command
from holdfast.wire.journal import read_journal

CODECS = ("none", "bf16", "int8", "int4", "int2", "topk")
AUTO_CODECS = ("none", "bf16", "int8", "int4")
"""Those that are chosen unasked. `int2` and `topk` lose a large part of a change."""
CODEC_KEY = "outer.codec.name"
AUTO = "auto"
GUESSED_VOCABULARY = "data.tokenizer.vocab_size"
"""Origin of a vocabulary that stands for that of a dataset which is not prepared yet."""
MEASURE_LIMIT_S = 300.0
_MBIT = 1e6 / 8
_SHORT = re.compile(r"(\d+)x(\d+)@(\d+(?:\.\d+)?)(?:,(\d+(?:\.\d+)?))?")
_NODE = "node"
_MEASURED = "RUN_FILE --measured RUN"


def sites_of(
    loaded: LoadedConfig, short: str = "", measured: Path | None = None
) -> tuple[Site, ...]:
    """Return the sites of a run and their workers. short: `2x1@100,20`, two sites of one worker at
    100 Mbit/s and 20 ms each, in place of `cluster.sites`. measured: a run whose journal has the
    links that `cluster.sites` leaves out. Raises ConfigError."""
    if short:
        return _short_sites(short)
    config = loaded.config
    given = config.cluster.sites
    if not given:
        raise ConfigError(
            "the links of this run are not known",
            where=loaded.where("cluster.sites"),
            remedy="give cluster.sites, or two sites of one worker at 100 Mbit/s and 20 ms: "
            "--sites 2x1@100,20",
        )
    open_sites = [site for site in given if not site.workers]
    fixed = sum(site.workers for site in given)
    left = (config.layout.workers or config.outer.learners) - fixed
    if open_sites and left < len(open_sites):
        raise ConfigError(
            f"{len(open_sites)} of cluster.sites give no workers, and {max(0, left)} of "
            "layout.workers are left for them",
            where=loaded.where("cluster.sites"),
            remedy=f"use layout.workers={fixed + len(open_sites)}",
        )
    parts = [
        left // max(1, len(open_sites)) + (n < left % max(1, len(open_sites)))
        for n in range(len(open_sites))
    ]
    found = []
    for site in given:
        workers = site.workers or parts.pop(0)
        mbit_s, latency_ms = _link_of(site, loaded, measured)
        found.append(Site(site.name, workers, mbit_s * _MBIT, latency_ms / 1000, site.usd_per_gb))
    return tuple(found)


def _link_of(site: SiteConfig, loaded: LoadedConfig, measured: Path | None) -> tuple[float, float]:
    """Return Mbit/s and milliseconds of a site's link: given, or the newest that a run measured.
    Raises ConfigError."""
    if site.mbit_s is not None:
        return site.mbit_s, site.latency_ms or 0.0
    events = [] if measured is None else [r.event for r in read_journal(open_run(measured).store)]
    links = {
        frozenset((event.site, event.other)): event
        for event in events
        if isinstance(event, SiteLinkMeasured) and site.name in (event.site, event.other)
    }
    if not links:
        raise ConfigError(
            f"the link of {site.name} is not known",
            where=loaded.where("cluster.sites"),
            remedy=f"give its mbit_s, or name a run that measured it: holdfast plan {_MEASURED}",
        )
    latency_ms = site.latency_ms
    if latency_ms is None:
        latency_ms = max(event.latency_ms for event in links.values())
    return max(event.mbit_s for event in links.values()), latency_ms


def _short_sites(text: str) -> tuple[Site, ...]:
    found: list[Site] = []
    for part in text.split("+"):
        match = _SHORT.fullmatch(part)
        if match is None or 0 in (int(match[1]), int(match[2])) or not float(match[3]):
            raise ConfigError(
                f"{part!r} names no sites",
                where="--sites",
                remedy="write SITESxWORKERS@MBIT_S,LATENCY_MS, for example 2x1@100,20",
            )
        for _ in range(int(match[1])):
            link = float(match[3]) * _MBIT, float(match[4] or 0) / 1000
            found.append(Site(f"site-{len(found) + 1}", int(match[2]), *link))
    return tuple(found)


def model_of(
    loaded: LoadedConfig, sites: tuple[Site, ...], machines: Machines, measured: Path | None = None
) -> tuple[RoundModel, str]:
    """Return the rounds of a run, and where the seconds of an inner step are from. measured: a run
    whose journal gives them. Raises UserError."""
    config = loaded.config
    workers, learners = sum(site.workers for site in sites), config.outer.learners
    if workers > learners:
        raise ConfigError(
            f"the sites have {workers} workers, and outer.learners is {learners}",
            where=loaded.where("outer.learners"),
            remedy=f"use outer.learners={workers}, or fewer workers",
        )
    shares = learner_shares(learners, workers)
    if measured is not None:
        inner_s, rest_s = _measured_times(measured, loaded)
        source = f"measured by {measured}"
    else:
        inner_s, rest_s = _inner_step_s(config, machines, workers), 0.0
        source = f"predicted for {machines.name}"
    usd = None
    if all(pool.usd_per_hour is not None for pool in machines.cluster.pools):
        part = machines.with_workers(workers).cluster
        usd = sum(pool.nodes * (pool.usd_per_hour or 0.0) for pool in part.pools)
    outer, values = config.outer, values_of_round(config)
    steps = outer.fragments, outer.overlap_steps
    return RoundModel(shares, values, sites, inner_s, rest_s, usd, *steps), source


def values_of_change(config: RunConfig) -> int:
    """Return the number of values of a learner's change."""
    if config.lora.rank:
        return sum(row.size for row in lora_parameters(config.model, config.lora))
    return count_parameters(config.model)


def values_of_round(config: RunConfig) -> int:
    """Return the most values of a change that a round exchanges: of the largest fragment."""
    if (fragments := config.outer.fragments) == 1:
        return values_of_change(config)
    rows = run_parameters(config)
    of, sizes = fragment_of(rows, fragments), [0] * fragments
    for row in rows:
        sizes[of[row.name]] += row.size
    return max(sizes)


def _inner_step_s(config: RunConfig, machines: Machines, workers: int) -> float:
    """Seconds of one learner's inner step on one worker, by the cost model."""
    share = config.train.batch_size // config.outer.learners
    size = config.train.microbatch_size or share
    alone = config.model_copy(
        update={
            "outer": OuterConfig(),
            "layout": config.layout.model_copy(update={"workers": 1}),
            "train": config.train.model_copy(update={"batch_size": share, "microbatch_size": size}),
        }
    )
    part = machines.with_workers(config.cluster.places or workers)
    fleet = Fleet(part.devices, part.cluster.pools[0])
    cost = TopologyCost(alone, fleet, [NodePlaces(_NODE, 1)])
    return cost.cost(place_layout(Layout(), 1, (_NODE,))).step_s


def _refuse_other_step(path: Path, there: RunConfig, loaded: LoadedConfig) -> None:
    """Raises ConfigError if a run's inner steps are not those of the run file."""
    own, other = _step_values(loaded.config), _step_values(there)
    if loaded.origins["model.vocab_size"].place == GUESSED_VOCABULARY:
        other["model.vocab_size"] = own["model.vocab_size"]
    for key in sorted(own.keys() | other.keys()):
        if own.get(key) != other.get(key):
            raise ConfigError(
                f"an inner step of {path} is another one: its {key} is {other.get(key)}, and that "
                f"of the run file {own.get(key)}",
                where="--measured",
                remedy="name a run with the same model and batch, or leave out --measured",
            )


def _step_values(config: RunConfig) -> dict[str, object]:
    """Dotted key -> value of what decides the seconds of an inner step on one machine."""
    found = dict(leaves({"model": config.model.model_dump(mode="json")}))
    for key in ("model.weights", "model.weights_checksum"):
        found.pop(key, None)
    return found | {
        "device": config.device,
        "data.sequence_length": config.data.sequence_length,
        "lora.rank": config.lora.rank,
        "train.precision": config.train.precision,
        "train.batch_size / outer.learners": config.train.batch_size // config.outer.learners,
    }


def _measured_times(path: Path, loaded: LoadedConfig) -> tuple[float, float]:
    """Seconds of one inner step of one learner, and of a round without computing, codec and
    exchange: the medians of a run. Raises RunFolderError, ConfigError."""
    run = open_run(path)
    if run.config.outer.is_on:
        _refuse_other_step(path, run.config, loaded)
    every = run.config.outer.inner_steps
    effective, _ = split_effective(read_journal(run.store))
    rounds = [r.event for r in effective if isinstance(r.event, OuterRound) and r.event.inner_s]
    done = {r.event.step: r.event for r in effective if isinstance(r.event, StepDone)}
    first = {event.step: event for event in rounds if event.rank == 0}
    rest = [
        done[step].seconds
        - event.inner_s
        - event.codec_s
        - event.waited_s
        - (0.0 if run.config.outer.sends_all else done[step].phases.get("reduce", 0.0))
        for step, event in first.items()
        if step in done
    ]
    slowest: dict[int, float] = {}  # a round waits for its slowest worker
    for event in rounds:
        if event.learners:
            seconds = event.inner_s / (every * len(event.learners))
            slowest[event.step] = max(seconds, slowest.get(event.step, 0.0))
    steps = list(slowest.values())
    if not rest or not steps:
        raise ConfigError(
            "this run has done no round whose seconds are known",
            where=str(path),
            remedy="name a run with outer.learners that has done a round",
        )
    return median(steps), max(0.0, median(rest))


def by_codec(loaded: LoadedConfig, facts: Facts) -> PlannedValues:
    """Return the codec of a run that leaves it open: that of the run that continues, or the one
    with the shortest round. Raises UserError."""
    if (stored := by_stored_codec(loaded, facts)) or not _is_open(loaded):
        return stored
    config = loaded.config
    sites = sites_of(loaded)
    model, _ = model_of(loaded, sites, machines_of(config, facts.hardware))
    workers = sum(site.workers for site in sites)
    codecs = codec_choices(loaded, model.values, workers, AUTO_CODECS)
    every = config.outer.every_steps
    chosen = fastest(model, every, codecs).codec
    rounds = (model.cost(every, codec) for codec in codecs)
    times = ", ".join(f"{cost.codec} {format_duration(cost.round_s)}" for cost in rounds)
    return {CODEC_KEY: (chosen, f"rounds by cluster.sites and codecs measured here: {times}")}


def by_stored_codec(loaded: LoadedConfig, facts: Facts) -> PlannedValues:
    """Return the codec of the run that continues, if the run file leaves it open."""
    stored = facts.stored_config.get("outer", {}).get("codec", {}).get("name", AUTO)
    if stored == AUTO or not (_is_open(loaded) or loaded.origins[CODEC_KEY].kind == "planned"):
        return {}
    return {CODEC_KEY: (stored, "that of the run")}


def describe_codec(loaded: LoadedConfig) -> list[str]:
    """Return a line for a codec that was chosen."""
    origin = loaded.origins[CODEC_KEY]
    name = loaded.config.outer.codec.name
    return [f"{CODEC_KEY} is {name}: {origin.place}"] if origin.kind == "planned" else []


def _is_open(loaded: LoadedConfig) -> bool:
    return loaded.config.outer.is_on and loaded.config.outer.codec.name == AUTO


def codec_choices(
    loaded: LoadedConfig, values: int, workers: int, names: Sequence[str] = CODECS
) -> list[CodecChoice]:
    """Return the codecs that a run may use, with their times measured on this machine now. Raises
    UserError if they cannot be measured."""
    config = loaded.config
    outer = config.outer
    device = "cpu" if config.device in ("auto", "cpu") else config.device
    places = config.cluster.places or workers
    threads = config.cluster.threads_per_worker or max(1, usable_cores() // places)
    words = (str(values), str(outer.codec.share), device, str(threads), *names)
    command = module_command("holdfast.parallel.outer.codec_times", *words)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MEASURE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"codecs could not be measured on {device} within {MEASURE_LIMIT_S:g} s",
            where=CODEC_KEY,
            remedy="name a codec, such as int8, or start again when the machine is less busy",
        ) from None
    if done.returncode:
        raise UserError(
            f"codecs cannot be measured on {device}: "
            f"{(done.stderr.strip().splitlines() or ['no message'])[-1]}",
            where=CODEC_KEY,
            remedy="see holdfast doctor",
        )
    times = json.loads(done.stdout)
    found = []
    for name in names:
        if name == "none" and not outer.needs_all:
            found.append(CodecChoice(name, 0))
            continue
        size = payload_bytes(name, outer.codec.share, values)
        encode_s, decode_s = times[name]
        if name != "none" and outer.codec.error_feedback > 0:
            encode_s += decode_s  # a learner decodes its own change, to know what is left out
        found.append(CodecChoice(name, size, encode_s, decode_s))
    return found
