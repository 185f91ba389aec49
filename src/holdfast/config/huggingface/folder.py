"""The model of a folder in Hugging Face form, read from its `config.json` alone.

A git-lfs pointer is a small text in place of a file that was not fetched.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.borders import Border, Unread
from holdfast.config.huggingface.convert import from_their_config
from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ModelFolderError

POINTER_HEAD = b"version https://git-lfs.github.com/spec/"
POINTER_MESSAGE = "this is a git-lfs pointer, not the file"
POINTER_REMEDY = "run git lfs pull where it was cloned"


def is_pointer(head: bytes) -> bool:
    """head: the first bytes of a file."""
    return head.startswith(POINTER_HEAD)


CONFIG = "config.json"
GENERATION = "generation_config.json"
FETCH_AGAIN = "fetch it again"
TOKENIZER = "tokenizer.json"
MAX_BYTES = 16 * 2**20  # a config.json has some thousands

CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
)
STITCHED = "stitched.json"
OF_MODEL = (CONFIG, GENERATION, STITCHED)
KEPT_FILES = (*OF_MODEL, *TOKENIZER_SETTINGS)
"""What a run keeps of the folder that its weights came from. stitched.json: which models
`holdfast stitch` made them of."""


def keep_settings(source: Path, folder: Path, tokenizer: bool) -> None:
    """Copy the settings of a model's folder to `folder`. tokenizer: those of the tokenizer too,
    because it is the run's."""
    folder.mkdir(exist_ok=True)
    for name in KEPT_FILES if tokenizer else OF_MODEL:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


GENERATION_KEYS = Border(
    GENERATION,
    frozenset({"eos_token_id"}),
    frozenset(  # what options of `holdfast generate` say, and what changes no text
        {"bos_token_id", "pad_token_id", "do_sample", "temperature", "top_p", "max_new_tokens"}
        | {"max_length", "transformers_version", "use_cache", "_from_model_config"}
        | {"cache_implementation", "return_dict_in_generate"}
    ),
    unknown="count",
)


def end_ids(folder: Path) -> set[int]:
    """Return the tokens at which a text ends, as `eos_token_id` of the settings in a folder names
    one or several. Settings that are missing or cannot be read name none."""
    found: set[int] = set()
    for name in (CONFIG, GENERATION):
        with suppress(ModelFolderError):
            found |= eos_of(read_json_object(folder / name))
    return found


def eos_of(settings: Mapping[str, Any]) -> set[int]:
    """Return the ids of `eos_token_id`: one, several or none."""
    named = settings.get("eos_token_id")
    return {n for n in (named if isinstance(named, list) else [named]) if n is not None}


def describe_unread_settings(folder: Path) -> str:
    """A line about keys of generation_config.json that `holdfast generate` does not follow."""
    unread, path = Unread(GENERATION_KEYS), folder / GENERATION
    if path.is_file():
        unread.add(GENERATION_KEYS.unread(read_json_object(path)), str(path))
    return unread.line()


def read_folder_model(folder: Path) -> ModelConfig:
    """Raises ModelFolderError, one sentence, for a folder without config.json, or with one that the
    decoder cannot compute."""
    path = folder / CONFIG
    if not path.is_file():
        raise ModelFolderError(
            "there is no config.json here",
            where=str(folder),
            remedy="name the folder of a model in Hugging Face form ('hf download OWNER/NAME' "
            "fetches one from the hub, and prints its folder)",
        )
    return from_their_config(read_json_object(path), where=str(path))


def refuse_pointer(path: Path) -> None:
    """Raises ModelFolderError for a git-lfs pointer, OSError for a file that cannot be read."""
    with path.open("rb") as file:
        head = file.read(len(POINTER_HEAD))
    if is_pointer(head):
        raise ModelFolderError(POINTER_MESSAGE, where=str(path), remedy=POINTER_REMEDY)


def read_json_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ModelFolderError for any other file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        refuse_pointer(path)
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelFolderError(
            f"this is not readable JSON ({error})", where=str(path), remedy=FETCH_AGAIN
        ) from error
    if not isinstance(value, dict):
        raise ModelFolderError("this is not a JSON object", where=str(path), remedy=FETCH_AGAIN)
    return value
