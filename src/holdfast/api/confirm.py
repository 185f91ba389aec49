"""Asks before a run that costs more than its owner said."""

from __future__ import annotations

import sys

from holdfast.config.loading.load import LoadedConfig
from holdfast.errors import ConfigError

KEY = "plan.ask_above_usd"


def confirm_cost(loaded: LoadedConfig, usd: float) -> None:
    """Ask on a terminal. Raises ConfigError for any answer but yes, and without a terminal."""
    limit = loaded.config.plan.ask_above_usd
    if usd <= limit:
        return
    cost = f"by the plan this run costs ${usd:,.2f}, and {KEY} is {limit:g}"
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"{cost}; train? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise ConfigError(cost, where=loaded.where(KEY), remedy=f"pass --yes, or {KEY}={_above(usd)}")


def _above(usd: float) -> int:
    return int(usd) + 1
