"""`holdfast registry`: versions of a model, and the gate before one is promoted."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import CheckpointStep, Json, RunArgument, refuse_beside
from holdfast.errors import ConfigError
from holdfast.export.texts import is_model_folder
from holdfast.show.output import print_json, print_table, say

if TYPE_CHECKING:
    from holdfast_platform.registry.registry import Registry

app = make_app("Keep versions of a model, and promote the better ones.")

Place = Annotated[
    str, typer.Argument(help="folder or address of the registry, or mlflow:NAME for MLflow's")
]
Version = Annotated[str, typer.Argument(help="number of a version, or promoted")]
Rules = Annotated[Path, typer.Option("--gate", help="file of rules (docs/guide/evaluation.md)")]


def open_registry(place: str, may_be_new: bool = False) -> Registry:
    """Open the registry at a folder, an address, or mlflow:NAME. Raises UserError, also if there is
    none and it may not be new, or if a new one would lie among other files."""
    from holdfast_platform.registry.registry import FOLDERS, RegistryError, StoreRegistry

    if place.startswith("mlflow:"):
        store, registry = None, _open_mlflow(place)
    else:
        from holdfast.wire.store.location import open_store

        store = open_store(place)
        registry = StoreRegistry(store)
    if registry.state().versions:
        return registry
    if not may_be_new:
        remedy = f"make one: holdfast registry add {place} RUN"
        raise RegistryError("there is no registry", where=place, remedy=remedy)
    keys = [] if store is None else store.list("")
    if foreign := [key for key in keys if not key.startswith(FOLDERS)]:
        what = f"this place has {foreign[0]}, which is no part of a registry"
        raise RegistryError(what, where=place, remedy="name a new or empty folder")
    return registry


def _open_mlflow(place: str) -> Registry:
    if find_spec("mlflow") is None:
        raise ConfigError(
            "MLflow's registry needs mlflow, which is not installed",
            where=place,
            remedy="pip install 'holdfast[mlflow]'",
        )
    from holdfast_platform.registry.mlflow import MlflowRegistry

    return MlflowRegistry(place.removeprefix("mlflow:"))


@app.command()
def add(registry: Place, run: RunArgument, step: CheckpointStep = None, json: Json = False) -> None:
    """Add a checkpoint, or the folder of a model, as a version.

    \b
    Example:
      holdfast registry add models/qa runs/tuned
      holdfast registry add s3://bucket/qa exported-model
    """
    from holdfast.launch.start.regions import note_regions, noted_regions, refuse_copy_elsewhere

    if is_model_folder(run):
        refuse_beside("the folder of a model", {"--step": step is not None})
        refuse_copy_elsewhere(noted_regions(run), registry, "registry")
        kept = open_registry(registry, may_be_new=True)
        version, source = kept.add(run, {"folder": str(run.absolute())}), str(run)
    else:
        from holdfast.export.weights import with_checkpoint, write_folder
        from holdfast.launch.run.runs import open_run

        found = open_run(run)
        refuse_copy_elsewhere(found.config.governance, registry, "registry")
        kept = open_registry(registry, may_be_new=True)
        tokenizer: Path | None = found.dataset_files / "tokenizer.json"
        tokenizer = tokenizer if tokenizer and tokenizer.is_file() else None
        with TemporaryDirectory() as folder:
            to = Path(folder, "model")
            checkpoint, _ = with_checkpoint(
                found,
                step,
                lambda one: write_folder(to, found, one, tokenizer, None, 5 * 10**9),
                say,
            )
            note_regions(to, found.config.governance)
            about = {
                "run": found.place,
                "run_id": found.resolved.get("run_id", ""),
                "step": checkpoint.step,
                "dataset_version": found.dataset_version,
            }
            version, source = kept.add(to, about), f"step {checkpoint.step} of {found.place}"
    print_json({"version": version}) if json else say(f"version {version} is {source}")


@app.command("list")
def list_versions(registry: Place, json: Json = False) -> None:
    """List the versions, and which one is promoted.

    \b
    Example:
      holdfast registry list models
    """
    state = open_registry(registry).state()
    rows = [
        {**entry, "is_promoted": number == state.current}
        for number, entry in sorted(state.versions.items())
    ]
    if json:
        print_json(rows)
        return
    table: list[tuple[Any, ...]] = []
    for row in rows:
        source = row["source"]
        where = source.get("folder") or f"step {source['step']} of {source['run']}"
        size = sum(file["bytes"] for file in row["files"].values())
        table.append((row["version"], "promoted" if row["is_promoted"] else "", size, where))
    print_table(table, ("version", "", "bytes", "source"))


@app.command()
def promote(registry: Place, version: Version, gate: Rules, json: Json = False) -> None:
    """Promote a version if it keeps the rules of a gate. Exit code 3: the gate refuses it.

    \b
    Example:
      holdfast registry promote models/qa 3 --gate gate.yaml
    """
    from holdfast_platform.registry.gate import Gate, read_rules

    entry = Gate(open_registry(registry), read_rules(gate), say).promote(version)
    print_json(entry) if json else say(f"version {entry['version']} is promoted")


@app.command()
def rollback(registry: Place, json: Json = False) -> None:
    """Promote the version before the present one. No gate is asked.

    \b
    Example:
      holdfast registry rollback models
    """
    entry = open_registry(registry).roll_back()
    print_json(entry) if json else say(f"version {entry['version']} is promoted again")


@app.command()
def compare(
    registry: Place, version: Version, other: Version, gate: Rules, json: Json = False
) -> None:
    """Compare two versions on the tasks of a gate.

    Nothing is promoted.

    \b
    Example:
      holdfast registry compare models --gate gate.yaml 4 5
    """
    from holdfast_platform.registry.gate import Gate, read_rules

    kept = open_registry(registry)
    state = kept.state()
    found = Gate(kept, read_rules(gate), say).compare(state.find(version), state.find(other))
    if json:
        print_json([vars(one) for one in found])
    else:
        print("\n".join(map(str, found)))


@app.command()
def fetch(
    registry: Place,
    version: Version,
    to: Annotated[Path, typer.Option("--to", help="a new or empty folder")],
) -> None:
    """Write a version as a folder in Hugging Face form.

    \b
    Example:
      holdfast registry fetch models 5 --to folder
    """
    kept = open_registry(registry)
    number = kept.state().find(version)
    kept.fetch(number, to)
    say(f"wrote version {number} to {to}")
