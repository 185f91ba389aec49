"""Remedies of messages about adapters: the section `lora`, and folders as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from re import Match
from typing import Any

from safetensors.torch import load_file, save_file

from holdfast.config.loading.load import load_config
from holdfast.config.sections.lora import LoraConfig
from holdfast.config.sections.model import ModelConfig
from holdfast.core.sharding.adapters import lora_parameters
from holdfast.launch.run.lora_run import check_base
from holdfast.launch.run.runs import open_run
from holdfast.model.init import initial_tensor
from holdfast.model.peft_folder import WEIGHTS, read_adapter, write_adapter
from tests.runtime.cli.remedies.lab import Case, Lab, Mend, case, fetch_again, fixed
from tests.runtime.cli.remedies.of_models import export
from tests.runtime.cli.remedies.of_runs import attempt, leave_out, line, replace
from tests.support.models import SMALL, config

FUSED: dict[str, Any] = {"window": 64, "family": "phi3"}
LORA = LoraConfig(rank=4, alpha=8, targets=("q_proj",))
Change = Callable[[Lab], object]


def write_peft(folder: Path, model: ModelConfig, lora: LoraConfig) -> None:
    rows = lora_parameters(model, lora)
    write_adapter(folder, model, lora, {row.name: initial_tensor(row, 1) for row in rows}, {})


# --- a run file of adapters -----------------------------------------------------------------
def begin(*words: str, change: Change = lambda lab: None) -> Callable[[Lab], None]:
    """Begin with a base, an adapter and a command line; {0} stands for the folder of both."""

    def start(lab: Lab) -> None:
        export(lab.folder / "hf")
        export(lab.folder / "wide", dim=64)
        write_peft(lab.folder / "peft", config(), LORA)
        change(lab)
        lab.settings["overrides"] = [word.format(lab.folder) for word in words]

    return start


def load(lab: Lab) -> None:
    """What a start does about adapters, up to the checksums."""
    check_base(load_config(None, lab.settings["overrides"]), {})


def use(*words: str, instead_of: str = "nothing") -> Mend:
    """Write these overrides, for those that begin so; {0} is the first group of the remedy."""

    def mend(lab: Lab, found: Match[str]) -> None:
        kept = [one for one in lab.settings["overrides"] if not one.startswith(instead_of)]
        shown = (found.groups() or ("",))[0]
        new = [word.format(shown, folder=lab.folder) for word in words]
        lab.settings["overrides"] = [*kept, *new]

    return mend


def change_peft(**values: Any) -> Change:
    def change(lab: Lab) -> None:
        path = lab.folder / "peft/adapter_config.json"
        lab.spoil(path, json.dumps(json.loads(path.read_text()) | values).encode())

    return change


def trade_weights(lab: Lab) -> None:
    """The run has begun; its base has other weights since then."""
    values = check_base(load_config(None, [f"model.from={lab.folder}/hf", "lora.rank=4"]), {})
    lab.settings["checksum"] = values["lora.base_checksum"][0]
    path = lab.folder / "hf/model.safetensors"
    before = path.read_bytes()
    save_file({name: -tensor for name, tensor in load_file(path).items()}, path)
    lab.good[str(path)] = before


def load_begun(lab: Lab) -> None:
    loaded = load_config(None, [f"model.from={lab.folder}/hf", "lora.rank=4"])
    checksum = {"lora.base_checksum": lab.settings["checksum"]}
    check_base(loaded.with_planned(checksum, "the run's"), {})


def spoil_index(lab: Lab) -> None:
    lab.good[lab.path("hf/model.safetensors.index.json")] = json.dumps(
        {"weight_map": dict.fromkeys(load_file(lab.folder / "hf/model.safetensors"), FILE)}
    ).encode()
    lab.write("hf/model.safetensors.index.json", "{}")


FILE = "model.safetensors"


def move_weights(lab: Lab) -> None:
    """The index names a file that is not there."""
    path = lab.folder / "hf" / FILE
    index = {"weight_map": dict.fromkeys(load_file(path), FILE)}
    lab.write("hf/model.safetensors.index.json", json.dumps(index))
    lab.good[str(path)] = path.read_bytes()
    path.unlink()


def without_weights(lab: Lab) -> None:
    (lab.folder / "hf" / FILE).rename(lab.folder / "elsewhere")


# --- the adapter's tensors ------------------------------------------------------------------
def read(lab: Lab) -> None:
    read_adapter(lab.folder / "peft", config(**lab.settings.get("model", {})), LORA)


def cut_weights(lab: Lab) -> None:
    path = lab.folder / "peft" / WEIGHTS
    lab.spoil(path, path.read_bytes()[:-8])


def fused(lab: Lab) -> None:
    """An adapter of a base whose layers PEFT sees as one."""
    model = ModelConfig.model_validate({**SMALL, **FUSED})
    if lab.settings["format"] == "peft":
        write_peft(lab.folder / "out", model, LoraConfig(rank=4))
    else:
        export(lab.folder / "out", **FUSED)


def merged_base(lab: Lab, found: Match[str]) -> None:
    """What PEFT's merge_and_unload leaves: a model in Hugging Face form."""
    export(lab.folder / "merged")
    lab.settings["overrides"] = [f"model.from={lab.folder}/merged", "lora.rank=4"]


F, A, W = "config/loading/lora_from.py: ", "model/peft_folder.py: ", "data/read/weight_files.py: "
R = "launch/run/lora_run.py: "
BASE, PEFT = "model.from={0}/hf", "lora.from={0}/peft"


def begin_moved(lab: Lab) -> None:
    lab.settings["run"] = lab.write("run.yaml", f"folder: {lab.trained}\nmodel: {{from: gone}}\n")


def open_it(lab: Lab) -> None:
    open_run(Path(lab.settings["run"]))


CASES: list[Case] = [
    case(
        "launch/run/runs.py: … reads this folder, and …",
        begin_moved,
        open_it,
        r"name the run folder in the place of the run file",
        lambda lab, found: lab.settings.update(run=lab.trained),
    ),
    case(
        F + "there is no … here",
        begin(BASE, "lora.from={0}/hf"),
        load,
        r"name the folder of an adapter as PEFT writes it",
        use("lora.from={folder}/peft", instead_of="lora.from"),
    ),
    case(
        F + "this adapter has …, which Holdfast does not compute",
        begin(BASE, PEFT, change=change_peft(use_dora=True)),
        load,
        r"merge it into its base with PEFT, and train adapters of that",
        merged_base,
    ),
    case(
        F + "this has no r, lora_alpha and target_modules",
        begin(BASE, PEFT, change=change_peft(r=None)),
        load,
        r"fetch it again",
        fetch_again,
    ),
    case(
        F + "… … is not a path",
        begin(BASE, "lora.from="),
        load,
        r"name a folder",
        use("lora.from={folder}/peft", instead_of="lora.from"),
    ),
    case(
        F + "the adapter of … is another one: …",
        begin(BASE, PEFT, "lora.rank=8"),
        load,
        r"remove it from the run file, for lora.from gives it",
        use(instead_of="lora.rank"),
    ),
    case(
        "core/sharding/adapters.py: lora.targets …: no linear layer has such a name",
        begin(BASE, "lora.rank=4", "lora.targets=[query]"),
        load,
        r"use all-linear, or some of (\w+), .*",
        use("lora.targets=[{0}]", instead_of="lora.targets"),
    ),
    case(
        R + "lora.rank is …, and no folder gives the weights of the base",
        begin("lora.rank=4"),
        load,
        r"add model: \{(from): FOLDER\}",
        use("model.{0}={folder}/hf"),
    ),
    case(
        R + "(check_base)",
        begin(BASE, "lora.rank=4", "lora.base={0}/wide"),
        load,
        r"give the shape with (model.from), or name the base of that shape",
        use("{0}={folder}/wide", instead_of="model.from"),
    ),
    case(
        W + "the weights here are not those that the run was begun with: their checksum is …, and "
        "it was …",
        begin(change=trade_weights),
        load_begun,
        r"put the files back, or name a folder that has them in lora\.base",
        fetch_again,
    ),
    case(
        W + "this index has no weight_map from tensors to files",
        begin(BASE, "lora.rank=4", change=spoil_index),
        load,
        r"fetch it again",
        fetch_again,
    ),
    case(
        W + "the weights cannot be read (…: …)",
        begin(BASE, "lora.rank=4", change=move_weights),
        load,
        r"put the folder back, or name where it is now",
        fetch_again,
    ),
    case(
        W + "there are no safetensors files of weights here",
        begin(BASE, "lora.rank=4", change=without_weights),
        load,
        r"name a folder that has them",
        use("model.from={folder}/wide", instead_of="model.from"),
    ),
    case(
        A + "this is not a complete safetensors file (…)",
        begin(change=cut_weights),
        read,
        r"fetch it again",
        fetch_again,
    ),
    case(
        A + "tensor … …",
        begin(change=lambda lab: lab.settings.update(model={"dim": 64})),
        read,
        r"name the base that the adapter was trained on in model.from",
        fixed(model={}),
    ),
    case(
        A + "… is one layer for PEFT and several of Holdfast's, so their adapters do not fit each "
        "other",
        lambda lab: lab.settings.update(format="peft"),
        fused,
        r"export the merged model with --format (hf)",
        lambda lab, found: lab.settings.update(format=found[1]),
    ),
    case(
        "export/adapters.py: this run trains the full model, so it has no adapters",
        line("export run --to out --format peft"),
        attempt,
        r"use --format (hf)",
        replace("peft"),
    ),
    case(
        "launch/run/runs.py: this run has no folder of frozen weights",
        line("export run --to out --format hf --base base"),
        attempt,
        r"leave out --base",
        leave_out("--base", "base"),
    ),
]
