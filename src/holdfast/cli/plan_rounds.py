"""The part of `holdfast plan` about a run whose learners meet once in a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import join

from holdfast.api.start import SCREEN
from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.errors import ConfigError
from holdfast.launch.run.rounds import (
    AUTO,
    AUTO_CODECS,
    GUESSED_VOCABULARY,
    codec_choices,
    model_of,
    sites_of,
)
from holdfast.launch.start.data import with_prepared_vocabulary
from holdfast.machine.hardware import detect_hardware
from holdfast.plan.auto.machines import machines_of
from holdfast.plan.cost.rounds import CodecChoice, RoundCost, RoundModel, best_round, fastest
from holdfast.report.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_plural,
    format_si,
)
from holdfast.show.output import print_json, print_table

COMPUTE_SHARE = 0.9
"""Part of a round that is to be computing."""
_CHOSEN = ("outer.every_steps", "outer.codec.name")


@dataclass(frozen=True)
class RoundRequest:
    """A run with learners, and the rounds that it may have."""

    loaded: LoadedConfig
    model: RoundModel
    codecs: list[CodecChoice]
    source: str  # of the seconds of an inner step

    @property
    def costs(self) -> list[RoundCost]:
        """By codec, with the inner steps of the run file."""
        every = self.loaded.config.outer.every_steps
        return [self.model.cost(every, codec) for codec in self.codecs]


def read_round_request(
    run_file: Path, asked: Sequence[str], cluster: str, sites: str, measured: Path | None
) -> RoundRequest | None:
    """Return None for a run without learners. Raises UserError."""
    loaded = load_config(run_file, list(asked))
    if not loaded.config.outer.is_on:
        if sites or measured is not None:
            raise ConfigError(
                "the workers of this run exchange in each step, so it has no rounds to plan",
                where=loaded.where("outer.learners"),
                remedy="use outer.learners=4, or leave out --sites and --measured",
            )
        return None
    loaded = with_prepared_vocabulary(loaded, SCREEN)
    if loaded.config.model.vocab_size == 0:
        size = loaded.config.data.tokenizer.vocab_size
        loaded = loaded.with_planned({"model.vocab_size": size}, GUESSED_VOCABULARY)
    places = sites_of(loaded, sites, measured)
    machines = machines_of(loaded.config, detect_hardware(), cluster)
    model, source = model_of(loaded, places, machines, measured)
    codecs = codec_choices(loaded, model.values, sum(site.workers for site in places))
    return RoundRequest(loaded, model, codecs, source)


def print_rounds(request: RoundRequest, command: Sequence[str], *, json: bool) -> None:
    """Print the rounds by codec, and the fewest inner steps that reach `COMPUTE_SHARE`. command:
    that starts the run."""
    outer, model = request.loaded.config.outer, request.model
    usual = [codec for codec in request.codecs if codec.name in AUTO_CODECS]
    chosen: str = outer.codec.name
    if chosen == AUTO:
        chosen = fastest(model, outer.every_steps, usual).codec
    may = [codec for codec in request.codecs if codec in usual or codec.name == chosen]
    best, _ = best_round(model, may, COMPUTE_SHARE)
    _, reached = best_round(model, request.codecs, COMPUTE_SHARE)
    if json:
        print_json(
            {
                "values": model.values,
                "learners": outer.learners,
                "sites": [asdict(site) for site in model.sites],
                "inner_step_s": model.inner_s,
                "source": request.source,
                "rounds": [_as_json(cost, chosen) for cost in request.costs],
                "least_steps": {name: _as_json(cost, "") for name, cost in reached.items()},
                "best": None if best is None else _as_json(best, ""),
            }
        )
        return
    sites = ", ".join(
        f"{s.name} ({format_plural(s.workers, 'worker')}, {s.bandwidth * 8 / 1e6:g} Mbit/s, "
        f"{1000 * s.latency_s:g} ms)"
        for s in model.sites
    )
    print(
        f"{request.loaded.config.name}: {format_si(model.values)} parameters, "
        f"{format_count(outer.learners)} learners on {sites}"
    )
    print(
        f"an inner step of a learner: {format_duration(model.inner_s)} ({request.source}); codecs "
        "are measured here"
    )
    share = f"{COMPUTE_SHARE:.0%}"
    _print_costs(request, reached, chosen, share)
    if best is None:
        print(f"no number of inner steps reaches a compute share of {share}")
        return
    print(
        f"{share} of compute: outer.every_steps={best.every_steps} with outer.codec.name="
        f"{best.codec}, a round of {format_duration(best.round_s)}"
    )
    keys = [f"outer.every_steps={best.every_steps}", f"outer.codec.name={best.codec}"]
    open_words = [word for word in command if word.partition("=")[0] not in _CHOSEN]
    print(f"next: {join([*open_words, *keys])}")


def _print_costs(
    request: RoundRequest, reached: Mapping[str, RoundCost], chosen: str, share: str
) -> None:
    """Print a row for each codec. share: what `reached` reaches."""
    outer = request.loaded.config.outer
    rows = [
        (
            cost.codec,
            format_duration(cost.compute_s),
            format_duration(cost.codec_s),
            format_duration(cost.exchange_s),
            format_duration(cost.round_s),
            format_percent(cost.compute_share),
            format_bytes(cost.sent_bytes),
            format_bytes(cost.leaving_bytes),
            "?" if cost.usd is None else f"{cost.usd:,.4f}",
            format_count(reached[cost.codec].every_steps) if cost.codec in reached else "none",
            f"<- outer.codec.name {outer.codec.name}" if cost.codec == chosen else "",
        )
        for cost in request.costs
    ]
    print_table(
        rows,
        (
            "codec",
            "compute",
            "coding",
            "exchange",
            "round",
            "share",
            "sent",
            "leaves sites",
            "$",
            f"steps for {share}",
            "",
        ),
    )


def _as_json(cost: RoundCost, chosen: str) -> dict[str, object]:
    more = {"round_s": cost.round_s, "compute_share": cost.compute_share}
    return asdict(cost) | more | ({"chosen": True} if cost.codec == chosen else {})
