"""The part of `holdfast simulate` about a run whose learners meet once in a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from holdfast.cli.plan_rounds import RoundRequest, read_round_request
from holdfast.config.run import RunConfig
from holdfast.errors import ConfigError, DataError
from holdfast.launch.run.rounds import AUTO, AUTO_CODECS
from holdfast.plan.cost.rounds import fastest
from holdfast.report.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_plural,
)
from holdfast.show.output import print_json, print_table, say
from holdfast_lab.engine.asked_study import Asked, rung_prices_of
from holdfast_lab.engine.interfaces import Node
from holdfast_lab.engine.round_replay import RoundHistory, RoundRun, replay_rounds
from holdfast_lab.traces.events import EventStream

START_S = 6.0
"""Seconds of a start of processes, as for every run on CPUs (`planned_cost.py`)."""
MOST_LINES = 40  # memberships that are printed


def refuse_options(asked: Asked, options: Mapping[str, object]) -> None:
    """Raise ConfigError for an option without an effect on rounds. options: by name."""
    default = Asked(asked.run_file)
    given = {
        "--make": asked.made,
        "--set": asked.given,
        "--policy": asked.policies if asked.policies != ("holdfast",) else (),
        "--sweep": asked.sweeps,
        "--seeds": asked.seeds != default.seeds,
        "--until-done": asked.is_until_done,
        "--out": asked.out,
        **options,
    }
    for name, value in given.items():
        if value:
            raise ConfigError(
                f"{name} has no effect on a run with outer.learners, whose rounds are replayed",
                where="command line",
                remedy=f"leave {name} out",
            )


def simulate_rounds(asked: Asked, streams: Sequence[EventStream], *, json: bool) -> None:
    """Replay one trace of nodes and print what becomes of the rounds. Raises UserError."""
    request = read_round_request(asked.run_file, asked.overrides, asked.cluster, "", asked.journal)
    assert request is not None, "the run has learners"
    stream = _only(streams)
    run = _run_of(request, asked)
    for event in stream.events:
        if event.kind == "join":
            run.site_of(Node(event.node, event.zone))
    history = replay_rounds(run, stream.events, stream.seconds)
    unused = sorted({event.kind for event in stream.events} & {"net", "price", "carbon"})
    if unused:
        say(f"events of the kind {', '.join(unused)} have no effect on rounds")
    if json:
        print_json(_as_json(request, run, history))
    else:
        _print(request, run, history)


def _only(streams: Sequence[EventStream]) -> EventStream:
    if len(streams) != 1:
        raise ConfigError(
            f"a replay of rounds takes one trace of nodes, and there are {len(streams)}",
            where="--trace",
            remedy="merge them with holdfast trace convert, or give one",
        )
    return streams[0]


def _run_of(request: RoundRequest, asked: Asked) -> RoundRun:
    config = request.loaded.config
    name: str = config.outer.codec.name
    if name == AUTO:
        usual = [codec for codec in request.codecs if codec.name in AUTO_CODECS]
        name = fastest(request.model, config.outer.every_steps, usual).codec
    codec = next((c for c in request.codecs if c.name == name), None)
    if codec is None:
        raise ConfigError(
            f"the rounds of the codec {name} cannot be predicted",
            where=request.loaded.where("outer.codec.name"),
            remedy=f"use one of {', '.join(c.name for c in request.codecs)}",
        )
    prices = rung_prices_of(asked.journal)
    return RoundRun(config, request.model, codec, _SiteOf(config), prices, START_S)


class _SiteOf:
    """Names the site of a node: the one that has its name, or the one that is its zone."""

    def __init__(self, config: RunConfig) -> None:
        self._cluster = config.cluster
        self._names = [site.name for site in config.cluster.sites]

    def __call__(self, node: Node) -> str:
        """Raises DataError for a node without a site."""
        site = self._cluster.site_of(node.name)
        for name in (site.name if site else "", node.zone, node.name):
            if name in self._names:
                return name
        raise DataError(
            f"the node {node.name!r} belongs to none of cluster.sites",
            where="--trace",
            remedy=f"give it one of the zones {', '.join(self._names)}, or name it in "
            "cluster.sites[].nodes",
        )


def _as_json(request: RoundRequest, run: RoundRun, history: RoundHistory) -> dict[str, Any]:
    return {
        "run": request.loaded.config.name,
        "codec": run.codec.name,
        "source": request.source,
        **asdict(history),
        "waited_s": history.waited_s,
        "usd": _usd(history),
    }


def _usd(history: RoundHistory) -> float | None:
    """None: the price of the machines is not known."""
    return None if history.machine_usd is None else history.machine_usd + history.link_usd


def _print(request: RoundRequest, run: RoundRun, history: RoundHistory) -> None:
    config = request.loaded.config
    print(
        f"{config.name}: {format_count(config.outer.learners)} learners on "
        f"{', '.join(site.name for site in request.model.sites)}, codec {run.codec.name}; an inner "
        f"step takes {format_duration(request.model.inner_s)} ({request.source})"
    )
    rows = [
        (
            format_count(each.first_round),
            format_count(each.rounds),
            format_duration(each.started_s),
            each.reason,
            "" if each.rung < 0 else str(each.rung),
            format_count(each.repeated),
            ", ".join(f"{name}: {_ranges(own)}" for name, own in each.hosts.items() if own),
            format_duration(each.round_s),
        )
        for each in history.generations[:MOST_LINES]
    ]
    heads = ("from round", "rounds", "at", "because", "rung", "repeated", "learners", "a round")
    print_table(rows, heads)
    if (more := len(history.generations) - MOST_LINES) > 0:
        print(f"and {format_plural(more, 'more membership')}; --json has all of them")
    wall = history.wall_s or 1.0
    print(
        f"{format_plural(history.rounds, 'round')} in {format_duration(history.wall_s)}: rounds "
        f"{format_percent(history.training_s / wall)}, repeated "
        f"{format_percent(history.repeated_s / wall)}, recovery and starts "
        f"{format_percent(history.waited_s / wall)}, stopped "
        f"{format_percent(history.stopped_s / wall)}"
    )
    print(
        f"sites lost {history.sites_lost}, regained {history.sites_regained}; rounds of a learner "
        f"away from its first site: {format_count(history.hosted_elsewhere)}"
    )
    left = ", ".join(f"{name} {format_bytes(n)}" for name, n in history.link_bytes.items())
    usd = _usd(history)
    price = "" if usd is None else f"; ${usd:,.4f}"
    print(f"bytes that left sites: {left or 'none'}{price}")


def _ranges(numbers: Sequence[int]) -> str:
    """Return consecutive numbers as first-last: 0-3."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return " ".join(map(str, numbers))
