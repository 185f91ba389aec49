"""Settings of a simulation by name: of machines, of the policy, of the trace. Pure.

A sweep changes one of them, or a key of the run file. Those of machines are fields of `Costs`, and
those of the policy are fields of `HoldfastRules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.engine.holdfast import HoldfastRules
from holdfast_lab.engine.interfaces import Costs
from holdfast_lab.traces.events import EventStream
from holdfast_lab.traces.scenario import Notices, with_notices

COSTS = tuple(each.name for each in fields(Costs))
RULES = tuple(each.name for each in fields(HoldfastRules) if each.name != "rung_s")
NOTICES = ("notice_s", "missed_share", "false_per_node_day")
FLEET = ("nodes", "spares")
POWER = ("stretch",)
MOST_NODES = 100_000  # nodes of a made trace
_SWITCHES = ("peers", "staged", "replicas_go_on")
_SHARES = ("missed_share", "sent_share")
_POSITIVE = (
    "state_bytes",
    "store_bandwidth",
    "node_store_bandwidth",
    "peer_bandwidth",
    "min_interval_s",
    "max_interval_s",
    "prior_mtbf_s",
)


@dataclass(frozen=True)
class Settings:
    """Values by name. What is not named keeps its value. nodes: the most that the run may use;
    spares: nodes beyond them that the run may have. stretch: time that training may take under a
    policy of caps or pauses, of that at full clock."""

    values: Mapping[str, float] = field(default_factory=dict)

    def costs(self, costs: Costs) -> Costs:
        return replace(costs, **{k: v for k, v in self.values.items() if k in COSTS})

    def rules(self, rules: HoldfastRules) -> HoldfastRules:
        given: dict[str, Any] = {k: v for k, v in self.values.items() if k in RULES}
        flags = {k: bool(v) for k, v in given.items() if k in _SWITCHES}
        return replace(rules, **(given | flags))

    def stream(self, stream: EventStream, seed: int) -> EventStream:
        notice = self.values.get("notice_s", 0.0)
        missed = self.values.get("missed_share", 0.0)
        false = self.values.get("false_per_node_day", 0.0)
        if not notice:
            return stream
        return with_notices(stream, notice, Notices(missed, false, seed))


def is_setting(name: str) -> bool:
    """Return True for a name that `Settings` knows; another name may be a key of the run file."""
    return name in (*COSTS, *RULES, *NOTICES, *FLEET, *POWER)


def parse_setting(text: str, where: str) -> tuple[str, tuple[str, ...]]:
    """('key', values) of 'key=a,b,c'. Raises ConfigError."""
    name, has_values, rest = text.partition("=")
    values = tuple(value.strip() for value in rest.split(",") if value.strip())
    if not has_values or not values or not name.strip():
        raise ConfigError(
            f"{text!r} is no setting",
            where=where,
            remedy="write key=value, and commas between values: store_interval_s=60,300,900",
        )
    return name.strip(), values


def as_number(name: str, text: str, where: str) -> float:
    """The value of a setting or of a generator's parameter. Raises ConfigError for text that is no
    number, and for a number that the setting cannot have."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    fits, remedy = 0 <= value < inf, "give a number of 0 or more"
    if name in _SWITCHES:
        fits, remedy = value in (0, 1), "give 0 or 1"
    elif name in _SHARES:
        fits, remedy = 0 <= value <= 1, "give a number from 0 to 1"
    elif name in _POSITIVE:
        fits, remedy = 0 < value < inf, "give a number above 0"
    elif name in POWER:
        fits, remedy = 1 <= value < inf, "give a number of 1 or more, as 1.5 for half as much again"
    elif name in FLEET:
        least = int(name == "nodes")
        fits = least <= value <= MOST_NODES and value.is_integer()
        remedy = f"give a whole number from {least} to {MOST_NODES}"
    if not fits:
        raise ConfigError(f"{name} is {text!r}", where=where, remedy=remedy)
    return value


def refuse_repeated(names: Sequence[str], option: str) -> None:
    """Raise ConfigError if an option names one thing twice: which value counts is a guess."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{name} is named {names.count(name)} times",
                where=f"command line, {option}",
                remedy=f"name {name} once",
            )
