"""`holdfast layout show`: which rank holds what, on which node, and what a loss would leave."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.api.start import SCREEN
from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.task import refuse_task
from holdfast.core.sharding.reduction_tree import deal
from holdfast.errors import ConfigError, UserError, unknown_name
from holdfast.launch.run.microbatch_size import describe_microbatch
from holdfast.launch.start.look import SMALLEST, plan_to_look, with_prepared_vocabulary
from holdfast.launch.start.machine import checked_layouts
from holdfast.layout import Topology, place_replicas
from holdfast.plan.memory.activations import activations_of, device_kind, has_formula
from holdfast.plan.memory.communicators import BYTES_EACH, communicators_by_rank
from holdfast.plan.memory.memory_use import contents_by_rank
from holdfast.plan.memory.placed_memory import placed_by_rank
from holdfast.plan.placing.loss_impact import LossImpact, impact_of_loss
from holdfast.plan.step_microbatches import microbatches
from holdfast.report.formatting import format_plural
from holdfast.show.layout_estimate import estimates_as_json
from holdfast.show.layout_picture import LayoutPicture
from holdfast.show.layout_stages import stages_as_json
from holdfast.show.output import print_json, say


def show(
    run_file: Annotated[Path, typer.Argument(help="the run file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="the same as layout.workers=N")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option("--nodes", help="names of the nodes: a,b; filled in order")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", min=1, help="ranks on each node")
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option("--what-if", help="lost=3 or lost=3,5 or lost=node:a: what would be left"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Draw which rank holds what, on which node. Starts nothing and needs no device.

    A replica is one copy of the model: a grid of pp stages, each shared by dp_shard x tp ranks.
    Bytes are those on one rank while a step's backward runs; activations come on top.

    \b
    Example:
      holdfast layout show run.yaml
      holdfast layout show run.yaml layout.pp=2 layout.tp=2 --workers 8 --ranks-per-node 4
      holdfast layout show run.yaml --workers 8 --nodes a,b --what-if lost=node:a
    """
    loaded, notes = _read_request(run_file, list(overrides or []), workers)
    config = loaded.config
    layouts = checked_layouts(loaded)
    world = sum(layout.world_size for layout in layouts)
    topology = place_replicas(layouts, 1, nodes_of(world, nodes, ranks_per_node))
    lost = frozenset[int]() if what_if is None else parse_loss(what_if, topology)
    loss = None if what_if is None else impact_of_loss(config, topology, lost)
    for note in notes:
        say(note)
    if json:
        print_json(_as_json(config, topology, lost, loss))
    else:
        LayoutPicture(config, topology, contents_by_rank(config, topology), lost, loss).print()


def _read_request(
    run_file: Path, overrides: list[str], workers: int | None
) -> tuple[LoadedConfig, list[str]]:
    """The run file with what the command line says, the dataset's vocabulary if it is there, and
    what has to be said about it."""
    if workers is not None:
        overrides.append(f"layout.workers={workers}")
    loaded, notes = load_config(run_file, overrides), list[str]()
    refuse_task(loaded.config.task, "holdfast layout", is_file=True)
    loaded = with_prepared_vocabulary(loaded, SCREEN)
    if loaded.config.model.vocab_size == 0:
        notes.append(
            "the vocabulary is the dataset's, which is not prepared: embedding and head count as "
            "nothing here; add model.vocab_size=N to see them"
        )
    loaded, facts = plan_to_look(loaded, SCREEN)
    notes += facts.layout.about
    if loaded.origins["layout.workers"].place == SMALLEST:
        least = loaded.config.layout.workers
        notes.append(f"layout.workers is 0, the machine's choice: shown for {least}; see --workers")
    return loaded, [*notes, *describe_microbatch(loaded)]


def nodes_of(world: int, names: str | None, per_node: int | None) -> tuple[str, ...]:
    """The node of every rank, filled in order. Without names or a number: all on this one.

    Raises ConfigError when the ranks do not fit on the nodes, or a node would have none.
    """
    if names is None:
        if per_node is None:
            return (platform.node() or "localhost",) * world
        return tuple(f"node{rank // per_node}" for rank in range(world))
    given = [name.strip() for name in names.split(",")]
    if "" in given or len(set(given)) != len(given):
        raise ConfigError(
            f"{names!r} is not a list of different names",
            where="--nodes",
            remedy="write for example --nodes a,b",
        )
    if len(given) > world:
        raise ConfigError(
            f"{len(given)} nodes are more than {world} ranks",
            where="--nodes",
            remedy=f"name {world} or fewer",
        )
    if per_node is None:  # as even as it goes, the first ones with one more
        share, more = divmod(world, len(given))
        return tuple(
            name for i, name in enumerate(given) for _ in range(share + (1 if i < more else 0))
        )
    if world > per_node * len(given):
        raise ConfigError(
            f"{format_plural(len(given), 'node')} of {format_plural(per_node, 'rank')} cannot "
            f"hold {world}",
            where="--ranks-per-node",
            remedy=f"use {-(-world // len(given))}, or name {-(-world // per_node)} nodes",
        )
    filled = -(-world // per_node)
    if filled < len(given):
        raise ConfigError(
            f"{format_plural(world, 'rank')}, {per_node} on a node, leave {given[filled]} "
            f"without one",
            where="--nodes",
            remedy=f"name {format_plural(filled, 'node')}, or leave out --ranks-per-node",
        )
    return tuple(given[rank // per_node] for rank in range(world))


def parse_loss(text: str, topology: Topology) -> frozenset[int]:
    """ "lost=3,5" or "lost=node:a" -> ranks. Raises ConfigError for anything else."""
    word, equals, what = text.partition("=")
    lost: set[int] = set()
    if word.strip() != "lost" or not equals or not what.strip():
        raise _unreadable(text)
    for item in (part.strip() for part in what.split(",")):
        kind, colon, name = item.partition(":")
        if colon and kind == "node":
            here = {rank for rank, node in enumerate(topology.nodes) if node == name}
            if not here:
                nodes = dict.fromkeys(topology.nodes)
                raise unknown_name(ConfigError, "node", name, nodes, f"--what-if {text}")
            lost |= here
        elif item.isascii() and item.isdigit():
            lost.add(int(item))
        else:
            raise _unreadable(text)
    return frozenset(lost)


def _unreadable(text: str) -> UserError:
    return ConfigError(
        "this is not a loss",
        where=f"--what-if {text}",
        remedy="write lost=3, lost=3,5 or lost=node:a",
    )


def _as_json(
    config: RunConfig, topology: Topology, lost: frozenset[int], loss: LossImpact | None
) -> dict[str, Any]:
    replicas = len(topology.replicas)
    ranks = []
    estimates, placed = estimates_as_json(config, topology), placed_by_rank(config, topology)
    contents = contents_by_rank(config, topology)
    counts = communicators_by_rank(config, topology)
    for each, estimate, places, groups in zip(contents, estimates, placed, counts, strict=True):
        row = asdict(each)
        row |= {"at": asdict(each.at), "held": asdict(each.held) | {"total": each.held.total}}
        row["places"] = asdict(places)
        row["activations"] = None
        if has_formula(config):
            kept = activations_of(config, topology, each.at, device_kind(config))
            row["activations"] = asdict(kept) | {
                "per_microbatch": kept.per_microbatch,
                "total": kept.total,
            }
        row["estimate"] = estimate
        row["communicators"] = {"groups": groups, "bytes": groups * BYTES_EACH}
        ranks.append(row)
    value: dict[str, Any] = {
        "topology": topology.to_json(),
        "layout": config.layout.model_dump(mode="json"),
        "stages": [stages_as_json(config, replica) for replica in topology.replicas],
        "ranks": ranks,
        "microbatches": [
            {"from_step": step, "number": number, "shares": deal(number, replicas)}
            for step, number in microbatches(config).items()
        ],
    }
    if loss is not None:
        value["what_if"] = asdict(loss) | {
            "lost": sorted(lost),
            "microbatches": [
                {"from_step": step, "shares": deal(number, len(loss.whole)) if loss.whole else []}
                for step, number in microbatches(config).items()
            ],
        }
    return value
