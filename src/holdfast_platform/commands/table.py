"""The commands that the platform adds to `holdfast`."""

from __future__ import annotations

from holdfast.cli.table import Command, commands_of

_ROOM = "holdfast_platform.commands"
_COMMANDS = commands_of(
    _ROOM,
    "Platform",
    broker="launch runs for a platform with the Open Service Broker API",
    cloud="show prices, choose a mix, write jobs for managed services",
    cluster="bring up a Ray or Slurm of your own on this machine",
    observe="write rules, routes and boards for Prometheus, and serve a run's metrics",
    host="run programs of a controller on this machine",
    search="try values of a run file's keys with Optuna, and name the best",
    pipeline="run stages from data to an exported model, each once for its inputs",
    runs="find runs by their tags, see what they cost, and raise a budget",
    cost="show what runs cost, and compare that with a bill",
    canary="check on a schedule whether a run file is ready for production",
    postmortem="draft a post-mortem from a run's journal",
    registry="keep versions of a model, and promote the better ones",
    serve="answer requests of the OpenAI protocol with one or two models",
) + commands_of(
    _ROOM, "Data and models", audit="recompute steps of a run, and keep its model's signed record"
)
_MIX_SEARCH = Command("mix-search", f"{_ROOM}.mix_search", "data", "find weights of data.sources")
COMMANDS = (*_COMMANDS, _MIX_SEARCH)
