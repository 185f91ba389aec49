"""`holdfast chaos`: break a run on purpose, and check that its result is the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.config.loading.load import read_text, resolve_config
from holdfast.errors import ConfigError, UserError
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.machine import plan_for_machine
from holdfast.machine.hardware import detect_hardware
from holdfast.show.output import say
from holdfast.wire.child_command import module_command
from holdfast_lab.chaos.campaign import Campaign, CampaignSettings, DisturbedRun, plan_runs
from holdfast_lab.chaos.catalog import FAULTS
from holdfast_lab.chaos.layouts import CHAOS_LAYOUTS, ChaosLayout, parse_layout, parse_natural
from holdfast_lab.chaos.results import format_table, summarize
from holdfast_lab.chaos.sample_run import (
    EXPERT_OVERRIDES,
    RUN_FILE,
    SAMPLE_OVERRIDES,
    run_file_text,
    write_run_file,
)
from holdfast_lab.chaos.schedule import (
    Draw,
    draws_of_trace,
    is_trace_of_faults,
    parse_faults_option,
    read_trace,
)
from holdfast_lab.commands.output_paths import explained_out_errors
from holdfast_lab.traces.reading import load_trace

COMMAND = tuple(module_command("holdfast.cli.main"))  # starts `holdfast` in the same environment

Nodes = Annotated[int, typer.Option(help="agents that share the ranks; 0: as the layout says")]
Store = Annotated[
    str, typer.Option(help="a bucket for the run stores; faults of disks and networks are left out")
]
Trace = Annotated[Path | None, typer.Option(help="a file that says which fault comes when")]

app = make_app("Break a run on purpose, and see that it comes to the same end.")


@app.command()
def chaos(
    run_file: Annotated[
        Path | None, typer.Argument(help="the run file; left out: a tiny model of its own")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    seed: Annotated[int, typer.Option(help="draws faults, steps and victims")] = 1,
    faults: Annotated[
        str, typer.Option(help="how many, or which, or both: '30 kill,agent'")
    ] = "25",
    layout: Annotated[
        str, typer.Option(help="by name, several with commas; or degrees such as tp=2,workers=4")
    ] = "replicated",
    nodes: Nodes = 0,
    trace: Trace = None,
    shard: Annotated[
        str, typer.Option(help="i/n: the i-th part of all runs, from 1; parts may share --out")
    ] = "1/1",
    out: Annotated[Path, typer.Option(help="the folder for everything")] = Path("chaos"),
    network: Annotated[
        bool, typer.Option(help="nodes in network namespaces, where the rights allow")
    ] = True,
    store: Store = "",
    known: Annotated[bool, typer.Option("--list", help="list the faults and leave")] = False,
) -> int:
    """Train on several nodes, break them again and again, and compare with a run left in peace.

    Every node is an agent, started by the real command. A fault happens at a named point of a step,
    which the journal shows, about every third step; what was killed is started again. In the end
    there are three verdicts: the same loss at every step, each sample used once, the same tensors.
    If nodes cannot have their own networks, partition, delay and loss are left out and listed.

    Runs of 25 faults each, one after the other. A run that the same command has finished in --out
    is not repeated; another command's result is refused. Exit code 0 only if every run recovered,
    from one fault at least. All results are in result.json in --out; those of a shard in
    result-1of2.json.

    \b
    Example:
      holdfast chaos                                        25 faults, replicas, a tiny model
      holdfast chaos run.yaml --layout tp --faults '10 kill,agent' --seed 7
      holdfast chaos --layout replicated,tp,pp --faults 150 --shard 1/2
      holdfast chaos --trace faults.jsonl                   {"step": 12, "fault": "agent"} a line
    """
    if known:
        for fault in FAULTS.values():
            rare = "" if fault.weight else " (only where it is named)"
            print(f"{fault.name:<18} {fault.text}{rare}")
        return 0
    if run_file is not None and not run_file.exists():
        raise ConfigError(
            "there is no such run file", where=str(run_file), remedy="name one before any key=value"
        )
    number, names = _parse_faults(faults)
    shapes, part = _shapes(layout, nodes), _parse_part(shard)
    draws = None if trace is None else tuple(_read_draws(trace, seed, shapes[0].nodes))
    with_experts = run_file is None and any(shape.has_experts for shape in shapes)
    changed = (*SAMPLE_OVERRIDES, *(EXPERT_OVERRIDES * with_experts), *(overrides or ()))
    file, chosen = run_file or out / RUN_FILE, tuple(names)
    asked = CampaignSettings(
        COMMAND, file, changed, out, seed, chosen, draws, network, shard=part, store=store
    )
    runs = _plan_runs(shapes, number, names, draws)
    return _run_campaign(asked, shapes, runs, own=run_file is None)


def _run_campaign(
    settings: CampaignSettings,
    shapes: Sequence[ChaosLayout],
    runs: list[DisturbedRun],
    *,
    own: bool,
) -> int:
    """Check all that can be known before, run this shard's part, write its results; the exit code.
    own: the run file is one of this command's own, which may have to be written."""
    campaign, out = Campaign(settings, say), settings.out
    campaign.check(shapes)
    work = _part_of(runs, *settings.shard)
    _check_layouts(work, settings, run_file_text(out) if own else None)
    with explained_out_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        if own:
            write_run_file(out)
    return _write_results(campaign.run(work), out / f"result{settings.shard_suffix}.json")


def _parse_faults(faults: str) -> tuple[int, list[str]]:
    """How many (0: not said) and which. Raises UserError for neither: nothing was meant by it."""
    number, names = parse_faults_option(faults)
    if not number and not names:
        raise UserError(
            "this says neither how many faults nor which",
            where=f"--faults {faults!r}",
            remedy="use a number, or some of those of --list",
        )
    return number, names


def _check_layouts(
    work: Sequence[DisturbedRun], settings: CampaignSettings, text: str | None
) -> None:
    """Raises UserError for what every node would refuse: a layout that does not fit the model, the
    batch or the machine. text: of a run file of its own, which may not be there yet."""
    machine, name = detect_hardware(), str(settings.run_file)
    text = read_text(settings.run_file) if text is None else text
    for shape, steps in dict.fromkeys((task.shape, task.steps) for task in work):
        asked = (f"train.steps={steps}", *settings.overrides, *shape.settings)
        plan_for_machine(resolve_config(text, name, asked), Facts(machine)).validated()


def _plan_runs(
    shapes: Sequence[ChaosLayout], number: int, names: Sequence[str], draws: Sequence[Draw] | None
) -> list[DisturbedRun]:
    """Return the runs of the entire campaign. number: of faults; 0: 25. draws: of a trace, in
    each."""
    if draws is None:
        return plan_runs(shapes, number or 25, names)
    last = max(draw.step for draw in draws)
    return [DisturbedRun(shape, index, len(draws), last) for index, shape in enumerate(shapes, 1)]


def _part_of(work: list[DisturbedRun], index: int, parts: int) -> list[DisturbedRun]:
    """Raises UserError for a part in which nothing would be done."""
    if index > len(work):
        raise UserError(
            f"there is nothing in part {index}: of {len(work)} runs in all",
            where="--shard",
            remedy=f"use {len(work)} parts at most",
        )
    return work[index - 1 :: parts]


def _shapes(layout: str, nodes: int) -> list[ChaosLayout]:
    """Of one name or some degrees, or of several names with commas. Raises UserError."""
    named = [layout] if "=" in layout else [each.strip() for each in layout.split(",")]
    shapes = [parse_layout(each, nodes) for each in named]
    if any(shape.nodes < 2 for shape in shapes):
        raise UserError(
            "a campaign needs several nodes",
            where="--nodes",
            remedy=f"use 2 or more, or one of {', '.join(CHAOS_LAYOUTS)}",
        )
    return shapes


def _write_results(results: list[dict[str, Any]], file: Path) -> int:
    """The table, and the file of all results; the exit code."""
    found = summarize(results)
    file.write_text(json.dumps(found, indent=1))
    print("\n".join(format_table(results)), flush=True)
    say(
        f"{sum(r['recovered'] for r in results)} of {len(results)} runs recovered, "
        f"{found['faults']} faults; {file}"
    )
    return 0 if found["recovered"] else 1


def _read_draws(trace: Path, seed: int, nodes: int) -> list[Draw]:
    """From a file of faults, or one of machines that come and go (docs/studies/chaos.md).

    Raises UserError for a file that cannot be read, or in which nothing happens."""
    try:
        text = trace.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"this cannot be read ({error})", where=str(trace), remedy="name a file of faults"
        ) from None
    if is_trace_of_faults(text):
        draws = read_trace(text, str(trace), str(seed))
    else:
        shares, there = [], 0
        for _, gone, come in load_trace(text, str(trace), seed=seed).instants():
            if gone:
                shares.append(len(gone) / max(1, there))
            there += len(come) - len(gone)
        draws = draws_of_trace(shares, seed, nodes)
    if not draws:
        raise UserError("nothing happens in this trace", where=str(trace), remedy="use another one")
    return draws


def _parse_part(text: str) -> tuple[int, int]:
    index, slash, parts = text.partition("/")
    which, many = parse_natural(index), parse_natural(parts)
    if not (slash and which and many and which <= many):
        raise UserError(f"{text!r} is no part of anything", where="--shard", remedy="use 1/2, 2/2")
    return which, many
