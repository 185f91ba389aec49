"""Remedies of messages about folders of models, imports, exports and generated text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from re import Match
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from holdfast.checkpoint.interop.huggingface import import_huggingface
from holdfast.config.huggingface.folder import read_folder_model
from holdfast.config.loading.load import resolve_config
from holdfast.model.generate import DecodingSession, generate
from holdfast.model.huggingface import export_folder, import_folder
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.cli.remedies.lab import Case, Lab, case, fetch_again, fixed, setting
from tests.support.models import config, decoder, train_tokenizer

MODEL = config()
WEIGHTS, INDEX = "hf/model.safetensors", "hf/model.safetensors.index.json"


def export(folder: Path, **changes: Any) -> None:
    model = config(**changes)
    export_folder(folder, model, decoder(model).state_dict(), None)


def read_model(lab: Lab) -> None:
    import_folder(lab.folder / lab.settings.get("folder", "hf"))


def with_folder(damage: Callable[[Lab], object], **changes: Any) -> Callable[[Lab], None]:
    """Begin with a folder that is right, and change it."""

    def begin(lab: Lab) -> None:
        export(lab.folder / "hf", **changes)
        damage(lab)

    return begin


def spoil(name: str, content: bytes) -> Callable[[Lab], None]:
    return lambda lab: lab.spoil(lab.folder / name, content)


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Lab], None]:
    def begin(lab: Lab) -> None:
        path = lab.folder / WEIGHTS
        tensors = load_file(path)
        lab.good[str(path)] = path.read_bytes()
        change(tensors)
        save_file(tensors, path)

    return begin


def change_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Lab], None]:
    """Begin with an index that is right, and spoil it."""

    def begin(lab: Lab) -> None:
        names = load_file(lab.folder / WEIGHTS)
        index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
        path = lab.write(INDEX, json.dumps(index))
        change(index)
        lab.spoil(path, json.dumps(index).encode())

    return begin


def to_pickle(lab: Lab) -> None:
    path = lab.folder / WEIGHTS
    torch.save(load_file(path), lab.folder / "hf/pytorch_model.bin")
    path.unlink()


def to_safetensors(lab: Lab, found: Match[str]) -> None:
    save_file(torch.load(lab.folder / "hf/pytorch_model.bin"), lab.folder / WEIGHTS)


def to_float(lab: Lab, found: Match[str]) -> None:
    tensors = load_file(lab.folder / WEIGHTS)
    save_file({n: t.to(getattr(torch, found[1])) for n, t in tensors.items()}, lab.folder / WEIGHTS)


def edit_config(lab: Lab, found: Match[str]) -> None:
    """Write the key of config.json that the remedy shows."""
    path = lab.folder / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(f"{{{found[1]}}}")))


def tie(lab: Lab) -> None:
    edit_config(lab, _match('"tie_word_embeddings": true'))


def _match(text: str) -> Match[str]:
    found = re.match("(.*)", text)
    assert found is not None
    return found


def empty_folder(lab: Lab) -> None:
    lab.write("hf/readme.md", "nothing")
    export(lab.folder / "real")
    lab.settings["folder"] = "hf"


def no_weights(lab: Lab) -> None:
    (lab.folder / WEIGHTS).unlink()
    export(lab.folder / "real")


# --- export ---------------------------------------------------------------------------------
def write_model(lab: Lab) -> None:
    tokenizer = lab.settings.get("tokenizer")
    folder = lab.folder / lab.settings["to"]
    export_folder(folder, MODEL, decoder(MODEL).state_dict(), tokenizer and lab.folder / tokenizer)


def begin_full_folder(lab: Lab) -> None:
    lab.write("out/a", "x")
    lab.settings["to"] = "out"


def begin_file_as_parent(lab: Lab) -> None:
    lab.write("file", "x")
    lab.settings["to"] = "file/out"


def begin_no_tokenizer(lab: Lab) -> None:
    lab.write("tokenizer.txt", "a b c")
    train_tokenizer(lab.folder / "tokenizer.json")
    lab.settings.update(to="out", tokenizer="tokenizer.txt")


# --- import ---------------------------------------------------------------------------------
def begin_import(lab: Lab) -> None:
    export(lab.folder / "hf")
    lab.settings.update(run="run", model=MODEL)


def import_model(lab: Lab) -> None:
    (lab.folder / lab.settings["run"]).mkdir(exist_ok=True)
    store = FolderStore(lab.folder / lab.settings["run"])
    import_huggingface(store, lab.folder / "hf", lab.settings["model"])


def begin_second_import(lab: Lab) -> None:
    begin_import(lab)
    import_model(lab)


def begin_other_shape(lab: Lab) -> None:
    begin_import(lab)
    lab.settings["model"] = config(dim=64)


def use_overrides(lab: Lab, found: Match[str]) -> None:
    changes = dict(pair.removeprefix("model.").split("=") for pair in found[1].split())
    lab.settings["model"] = config(**{key: json.loads(value) for key, value in changes.items()})


def resolve(lab: Lab) -> None:
    resolve_config(None, "command line", lab.settings["overrides"])


def begin_not_a_path(lab: Lab) -> None:
    export(lab.folder / "hf")
    lab.settings["overrides"] = ["model.from="]


# --- text -----------------------------------------------------------------------------------
def open_session(lab: Lab) -> None:
    DecodingSession(decoder(MODEL), lab.settings["capacity"])


def sample(lab: Lab) -> None:
    tokens = torch.zeros((1, lab.settings["prompt"]), dtype=torch.long)
    generate(decoder(MODEL), tokens, 1, temperature=lab.settings.get("temperature", 1.0))


H, F, X = "model/huggingface.py: ", "model/new_folder.py: ", "checkpoint/interop/huggingface.py: "
FETCH = r"fetch it again"
NAME = r"name the folder of a model in Hugging Face form"

CASES: list[Case] = [
    case(
        "config/huggingface/folder.py: (refuse_pointer)",
        with_folder(spoil(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\nsize 1\n")),
        read_model,
        r"run git lfs pull where it was cloned",
        fetch_again,
    ),
    case(
        "config/huggingface/folder.py: (refuse_pointer)",
        with_folder(spoil("hf/config.json", b"version https://git-lfs.github.com/spec/v1\n")),
        read_model,
        r"run git lfs pull where it was cloned",
        fetch_again,
    ),
    case(
        "config/huggingface/folder.py: there is no config.json here",
        empty_folder,
        lambda lab: read_folder_model(lab.folder / lab.settings["folder"]),
        NAME,
        fixed(folder="real"),
    ),
    case(
        "config/huggingface/convert.py: model_type … is not supported",
        with_folder(lambda lab: edit_config(lab, _match('"model_type": "lama"'))),
        read_model,
        r".*use one of .*\bllama\b.*",
        lambda lab, found: edit_config(lab, _match('"model_type": "llama"')),
    ),
    case(
        H + "this is not a whole safetensors file (…)",
        with_folder(spoil(WEIGHTS, b"\x08\0\0\0\0\0\0\0{}")),
        read_model,
        FETCH,
        fetch_again,
    ),
    case(
        H + "tensor … is missing",
        with_folder(change_weights(lambda tensors: tensors.pop("model.norm.weight"))),
        read_model,
        FETCH,
        fetch_again,
    ),
    case(
        H + "tensor … is of dtype …, which is not among …",
        with_folder(
            change_weights(
                lambda tensors: tensors.update({n: t.to(torch.int16) for n, t in tensors.items()})
            )
        ),
        read_model,
        r"convert the weights to bfloat16 or (float32)",
        to_float,
    ),
    case(
        H + "config.json ties … to …, but their numbers differ",
        with_folder(tie),
        read_model,
        r'set ("tie_word_embeddings": false)',
        edit_config,
    ),
    case(
        H + "the weights are a pickle, which could run code when it is read",
        with_folder(to_pickle),
        read_model,
        r"convert them to safetensors \(save_pretrained does\) and try again",
        to_safetensors,
    ),
    case(
        H + "there is no model.safetensors here",
        with_folder(no_weights),
        read_model,
        NAME,
        fixed(folder="real"),
    ),
    case(
        H + "this index has no weight_map from tensors to files",
        with_folder(change_index(lambda index: index.pop("weight_map"))),
        read_model,
        FETCH,
        fetch_again,
    ),
    case(
        H + "the index names …, which is not in the folder",
        with_folder(change_index(lambda index: index["weight_map"].update(x="none"))),
        read_model,
        FETCH,
        fetch_again,
    ),
    case(
        H + "the index looks for … in …, which has no such tensor",
        with_folder(change_index(lambda index: index["weight_map"].update(x="model.safetensors"))),
        read_model,
        FETCH,
        fetch_again,
    ),
    case(
        H + "… has …, which the index does not name there",
        with_folder(change_index(lambda index: index["weight_map"].pop("model.norm.weight"))),
        read_model,
        FETCH,
        fetch_again,
    ),
    case(
        F + "this is not an empty folder",
        begin_full_folder,
        write_model,
        r"name a new one",
        fixed(to="new"),
    ),
    case(
        F + "the folder cannot be written (…)",
        begin_file_as_parent,
        write_model,
        r"name a folder on a disk that you may write to",
        fixed(to="out"),
    ),
    case(
        "model/huggingface_tokenizer.py: this is not a tokenizer.json (…)",
        begin_no_tokenizer,
        write_model,
        r"name a file that the tokenizers library wrote",
        fixed(tokenizer="tokenizer.json"),
    ),
    case(
        X + "the run has checkpoints already (…)",
        begin_second_import,
        import_model,
        r"import into a new run folder, with folder=<path>",
        fixed(run="new"),
    ),
    case(
        X + "(import_huggingface)",
        begin_other_shape,
        import_model,
        r"use (model\.dim=\d+(?: model\.\w+=\S+)*), or '?model\.from=\S+'? in place of these keys",
        use_overrides,
    ),
    case(
        "config/loading/model_from.py: … … is not a path",
        begin_not_a_path,
        resolve,
        r"name a folder",
        lambda lab, found: lab.settings.update(overrides=[f"model.from={lab.folder}/hf"]),
    ),
    case(
        "model/generate.py: … tokens are more than the model's … positions",
        lambda lab: lab.settings.update(capacity=1000),
        open_session,
        r"ask for at most (\d+), the prompt's included",
        setting("capacity", int),
    ),
    case(
        "model/generate.py: the prompt is empty",
        lambda lab: lab.settings.update(prompt=0),
        sample,
        r"give at least one token of text",
        fixed(prompt=1),
    ),
    case(
        "model/generate.py: temperature … with top_p … cannot be sampled from",
        lambda lab: lab.settings.update(prompt=1, temperature=-1.0),
        sample,
        r"use a temperature of at least (\d) and a top_p above 0 and at most 1",
        setting("temperature", float),
    ),
]
