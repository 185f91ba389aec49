"""A study that compares policies and settings over a trace, and the runs that answer it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError, DataError
from holdfast.launch.run.runs import open_run
from holdfast.plan.objective.goodput import GoodputModel
from holdfast.plan.objective.recovery_costs import RUNG_S, RecoveryCosts
from holdfast.policy.membership.state import node_timeout_s
from holdfast.report.history.history import read_history, rung_prices
from holdfast_lab.engine.capped import CLOCKS, STRETCH, capped
from holdfast_lab.engine.holdfast import HoldfastRules, holdfast
from holdfast_lab.engine.interfaces import CostModel, PolicyMaker
from holdfast_lab.engine.kept_replays import key_of
from holdfast_lab.engine.planned_cost import planned_cost
from holdfast_lab.engine.settings import (
    FLEET,
    Settings,
    as_number,
    is_setting,
    parse_setting,
    refuse_repeated,
)
from holdfast_lab.engine.study import Case, Outcome, histories_of, with_all_nodes
from holdfast_lab.engine.study_replays import Progress, StudyReplays
from holdfast_lab.rivals.registry import policy_named
from holdfast_lab.traces.events import EventStream
from holdfast_lab.traces.generators import GENERATORS, make_trace
from holdfast_lab.traces.reading import merge_streams
from holdfast_lab.traces.scenario import as_long_as_nodes, with_known_places

if TYPE_CHECKING:
    from holdfast.cli.plan_request import PlanRequest

OURS = "holdfast"
RATE = "per_node_year"  # parameter of the generator whose rate a cluster file can give


@dataclass(frozen=True)
class Asked:
    """What a reader wants to know."""

    run_file: Path
    overrides: tuple[str, ...] = ()
    cluster: str = ""
    traces: tuple[Path, ...] = ()
    zones: tuple[str, ...] = ()
    gpu: str = ""
    made: str = ""
    days: float | None = None
    given: tuple[str, ...] = ()
    policies: tuple[str, ...] = (OURS,)
    sweeps: tuple[str, ...] = ()
    seeds: int = 1
    is_until_done: bool = False
    journal: Path | None = None  # a run whose recoveries price the rungs; None: RUNG_S
    out: Path | None = None


@dataclass(frozen=True)
class StudyResult:
    """outcomes: in the order of the policies, and of the sweep in each. request: the first plan."""

    asked: Asked
    request: PlanRequest
    trace: str
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Variant:
    words: str
    settings: Settings
    overrides: tuple[str, ...] = ()


def study_of(
    asked: Asked,
    plan: Callable[[Sequence[str]], PlanRequest],
    read: Callable[[], Sequence[EventStream]],
    progress: Progress,
) -> StudyResult:
    """Simulate what is asked. Raises UserError, and OSError if the folder cannot be written.

    plan: plans the run with further keys of the run file. read: a stream of each file of the trace.
    """
    fixed, of_generator = _fixed_settings(asked)
    _refuse_stretch_without_effect(asked)
    refuse_no_trace(asked)
    recorded = read() if asked.traces else ()
    files = [stream.header.sha256 for stream in recorded]
    histories = _Histories(asked, recorded)
    prices = rung_prices_of(asked.journal)
    variants = list(_variants(asked, fixed))
    plans: dict[tuple[str, ...], PlanRequest] = {}
    outcomes, notes = list[Outcome](), list[str]()
    makers = {name: policy_named(name) for name in asked.policies}
    total = len(asked.policies) * len(variants) * asked.seeds
    with StudyReplays(asked.out, total, progress).running() as replays:
        for name, variant in product(asked.policies, variants):
            if variant.overrides not in plans:
                plans[variant.overrides] = plan(variant.overrides)
            request = plans[variant.overrides]
            beat = request.loaded.config.cluster.beat_seconds
            costs = RecoveryCosts(prices, detection_s=node_timeout_s(beat))
            model = GoodputModel(request.problem, costs)
            best = request.plan.best
            made = planned_cost(model, best.choice, best.cost)
            cost = replace(made, costs=variant.settings.costs(made.costs))
            drawn, note = _with_loss_rate(asked.made, of_generator, request)
            notes += [note] if note else []
            words = " ".join(part for part in (name, variant.words) if part)
            maker = makers[name]
            if name == OURS or name in CLOCKS:
                maker = _ours(request, variant.settings, prices)
            if name in CLOCKS:
                maker = capped(name, maker, variant.settings.values.get("stretch", STRETCH))
            case = Case(words, maker, cost)
            steps = request.loaded.config.train.steps if asked.is_until_done else inf
            tokens = request.problem.workload.step_tokens * steps
            key = key_of(
                name,
                sorted(variant.settings.values.items()),
                request.loaded.config,
                request.machines,
                request.plan.best,
                request.problem,
                cost.costs,
                tokens,
                (asked.made, asked.days, sorted(drawn.items()), asked.seeds),
                (asked.zones, asked.gpu, files, sorted(prices.items())),
            )
            made_of = histories.of(cost, variant.settings, drawn)
            outcomes.append(replays.outcome(case, made_of, tokens, request, key))
    first = plans[variants[0].overrides]
    notes += [note for plan in plans.values() for note in plan.notes]
    notes += replays.notes
    return StudyResult(asked, first, histories.words, tuple(outcomes), tuple(dict.fromkeys(notes)))


def refuse_no_trace(asked: Asked) -> None:
    """Raise ConfigError if there is no trace, or one too many."""
    if bool(asked.traces) == bool(asked.made):
        raise ConfigError(
            "there is no trace" if not asked.traces else "--trace and --make name two traces",
            where="command line",
            remedy="give one of: --trace FILE, --make spot",
        )
    if asked.made and (asked.zones or asked.gpu):
        raise ConfigError(
            f"{'--zone' if asked.zones else '--gpu'} has no effect with --make",
            where="command line",
            remedy="leave it out, or name files with --trace",
        )


# --- settings -----------------------------------------------------------------------------------
def _fixed_settings(asked: Asked) -> tuple[dict[str, float], dict[str, float]]:
    """Values of --set for the simulation, and for the generator."""
    refuse_repeated(asked.policies, "--policy")
    for option, given in (("--set", asked.given), ("--sweep", asked.sweeps)):
        refuse_repeated([text.partition("=")[0].strip() for text in given], option)
    known = GENERATORS[asked.made].defaults if asked.made else {}
    ours: dict[str, float] = {}
    made: dict[str, float] = {}
    for text in asked.given:
        name, values = parse_setting(text, "--set")
        if len(values) > 1:
            raise ConfigError(
                f"{text!r} has {len(values)} values",
                where="--set",
                remedy=f"give one, or compare them with --sweep {text}",
            )
        (made if name in known else ours)[name] = as_number(name, values[0], "--set")
        if name not in known and not is_setting(name):
            raise ConfigError(
                f"there is no setting {name!r}",
                where="--set",
                remedy="docs/studies/simulate.md has the names; a key of the run file goes "
                "without --set",
            )
    return ours, made


def _refuse_stretch_without_effect(asked: Asked) -> None:
    given = [text.partition("=")[0].strip() for text in (*asked.given, *asked.sweeps)]
    if "stretch" in given and not CLOCKS.keys() & {*asked.policies}:
        raise ConfigError(
            "stretch is for policies with caps or pauses, and none of them is named",
            where="command line",
            remedy="leave it out, or add --policy carbon-pause",
        )


def _variants(asked: Asked, fixed: dict[str, float]) -> Iterator[_Variant]:
    parsed = [parse_setting(text, "--sweep") for text in asked.sweeps]
    for name, swept in parsed:
        refuse_repeated(swept, f"--sweep {name}")
    for chosen in product(*([(name, value) for value in values] for name, values in parsed)):
        values = dict(fixed)
        overrides = []
        for name, value in chosen:
            if is_setting(name):
                values[name] = as_number(name, value, "--sweep")
            else:
                overrides.append(f"{name}={value}")
        words = " ".join(f"{name}={value}" for name, value in chosen)
        yield _Variant(words, Settings(values), tuple(overrides))


def _with_loss_rate(
    made: str, of_generator: Mapping[str, float], request: PlanRequest
) -> tuple[Mapping[str, float], str]:
    """Return the parameters of a generator and a sentence about its rate of losses ("": none is
    due). The rate is that of the pools that the layout uses."""
    pools = request.problem.cluster.pools
    if not made or RATE in of_generator:
        return of_generator, ""
    if RATE not in GENERATORS[made].defaults:
        note = f"--make {made} does not use losses_per_day of the cluster; --make failures does"
        return of_generator, note if any(pool.is_spot for pool in pools) else ""
    used = request.plan.best.choice.devices_by_pool
    nodes = {pool.name: used.get(pool.name, 0) / pool.devices for pool in pools}
    lost = sum(nodes[pool.name] * pool.losses_per_day for pool in pools)
    per_year = 365 * lost / sum(nodes.values())
    if not per_year:
        usual = GENERATORS[made].defaults[RATE]
        return of_generator, (
            f"the cluster gives no losses_per_day above 0: {usual:g} failures of a node in a year "
            f"are assumed; --set {RATE}=N gives another rate"
        )
    return {**of_generator, RATE: per_year}, (
        f"{per_year:.3g} failures of a node in a year, from losses_per_day of the cluster; "
        f"--set {RATE}=N gives another rate"
    )


# --- what runs ----------------------------------------------------------------------------------
def rung_prices_of(journal: Path | None) -> Mapping[int, float]:
    """Return the price of each rung: the kept ones, and those of a run in their place."""
    if journal is None:
        return RUNG_S
    return {**RUNG_S, **rung_prices(read_history(open_run(journal).store))}


def _ours(request: PlanRequest, settings: Settings, prices: Mapping[int, float]) -> PolicyMaker:
    saves = request.loaded.config.checkpoint
    bounds = HoldfastRules(min_interval_s=saves.min_seconds, max_interval_s=saves.max_seconds)
    rules = replace(settings.rules(bounds), rung_s=prices)
    if rules.min_interval_s > rules.max_interval_s:
        raise ConfigError(
            f"min_interval_s is {rules.min_interval_s:g}, and max_interval_s is "
            f"{rules.max_interval_s:g}",
            where="--set",
            remedy=f"give a max_interval_s of {rules.min_interval_s:g} or more",
        )
    return lambda cost: holdfast(cost, rules)


def _refuse_no_node(stream: EventStream, where: str) -> None:
    """A trace of prices has no nodes, either; it says for how long the machines are there."""
    first = min((event.t_s for event in stream.events if event.kind == "join"), default=0.0)
    if not stream.events or first >= stream.seconds:
        raise DataError(
            "no node is there before the trace ends",
            where=where,
            remedy="look at it with holdfast trace show, and give a trace of nodes",
        )


class _Histories:
    """The histories of a study. Each is made when a replay needs it, and serves the next policy."""

    def __init__(self, asked: Asked, streams: Sequence[EventStream]) -> None:
        self._asked = asked
        self._recorded = None
        if streams:
            merged = with_known_places(merge_streams(streams))
            self._recorded = as_long_as_nodes(merged, streams)
            _refuse_no_node(self._recorded, self.words)
        self._parts: dict[int, list[EventStream]] = {}
        self._made: dict[tuple[object, ...], EventStream] = {}

    @property
    def words(self) -> str:
        if self._recorded is None:
            return f"made: {self._asked.made}"
        return ", ".join(path.name for path in self._asked.traces)

    def of(
        self, cost: CostModel, settings: Settings, of_generator: Mapping[str, float]
    ) -> list[Callable[[], EventStream]]:
        """What makes each history for a case. of_generator: parameters of --make. Raises
        ConfigError."""
        values = settings.values
        wanted = int(values.get("nodes", cost.wanted) + values.get("spares", 0))
        if self._recorded is not None:
            unused = [name for name in FLEET if name in settings.values]
            if unused and any(event.kind == "join" for event in self._recorded.events):
                raise ConfigError(
                    f"{unused[0]} has no effect, because the trace says which nodes there are",
                    where="--set",
                    remedy=f"leave {unused[0]} out, or make a trace with --make spot",
                )
        number = self._asked.seeds
        find = self._part if self._recorded is not None else partial(self._drawn, of_generator)

        def history(index: int) -> EventStream:
            return settings.stream(find(index, wanted), index)

        return [partial(history, index) for index in range(number)]

    def _drawn(self, of_generator: Mapping[str, float], index: int, wanted: int) -> EventStream:
        key = (index, wanted, *sorted(of_generator.items()))
        if key not in self._made:
            known = GENERATORS[self._asked.made].defaults
            nodes = {"nodes": float(wanted)} if "nodes" in known else {}
            made = make_trace(self._asked.made, index, self._asked.days, {**nodes, **of_generator})
            self._made[key] = made
        return self._made[key]

    def _part(self, index: int, wanted: int) -> EventStream:
        assert self._recorded is not None
        if wanted not in self._parts:
            stream = with_all_nodes(self._recorded, wanted)
            self._parts[wanted] = histories_of(stream, self._asked.seeds)
        return self._parts[wanted][index]
