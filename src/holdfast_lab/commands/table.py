"""The commands that the lab adds to `holdfast`."""

from __future__ import annotations

from holdfast.cli.table import commands_of

COMMANDS = commands_of(
    "holdfast_lab.commands",
    "Lab",
    trace="read, show and make traces of machines; timelines of runs",
    simulate="simulate a run on machines that come and go",
    score="score how well a trainer or a policy survives losses",
    predict="fit a predictor of lost nodes to traces, and judge it",
    scale="show how a run scales from 8 to 16,384 devices",
    claims="show claims of surveys next to what was measured here",
    chaos="break a run on purpose, and see that it comes to the same end",
)
