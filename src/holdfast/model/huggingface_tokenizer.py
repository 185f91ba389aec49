"""Puts a tokenizer.json next to a model, so that `AutoTokenizer` finds it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from holdfast.config.huggingface.folder import (
    KEPT_FILES,
    OF_MODEL,
    TOKENIZER_SETTINGS,
    read_json_object,
)
from holdfast.core.data.special_tokens import KNOWN_BEGINS, KNOWN_ENDS
from holdfast.core.json_parsing import parse_json
from holdfast.errors import ModelFolderError


def give_back(kept: Path | None, folder: Path, tokenizer: bool) -> dict[str, Any]:
    """Copy what `keep_settings` kept into an exported folder, but not config.json. Return the token
    ids that were in that. tokenizer: the exported folder has one."""
    if kept is None or not kept.is_dir():
        return {}
    for name in (KEPT_FILES if tokenizer else OF_MODEL)[1:]:
        if (kept / name).is_file():
            shutil.copyfile(kept / name, folder / name)
    config: dict[str, Any] = {}
    for name in ("generation_config.json", "config.json"):
        if (kept / name).is_file():
            config |= read_json_object(kept / name)
    return {key: value for key, value in config.items() if key.endswith("_token_id")}


def copy_tokenizer(
    source: Path | None, folder: Path, max_length: int, end_token: str | None = None
) -> dict[str, int]:
    """Copy `source` (a tokenizer.json, or the folder of one) into `folder`.

    A tokenizer_config.json in a given folder is kept. Otherwise one is written, with the tokens for
    the begin and the end of a text. They are found among the special tokens, or the end is
    `end_token`. Return `eos_token_id` and
    `bos_token_id`, if there are such tokens. Raises ModelFolderError if `source` cannot be read.
    """
    if source is None:
        return {}
    path = source / "tokenizer.json" if source.is_dir() else source
    try:
        table: dict[str, Any] = parse_json(path.read_text("utf-8"))
        special = {
            t["content"]: int(t["id"]) for t in table.get("added_tokens", ()) if t.get("special")
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelFolderError(
            f"this is not a tokenizer.json ({error})",
            where=str(path),
            remedy="name a file that the tokenizers library wrote",
        ) from error
    shutil.copyfile(path, folder / "tokenizer.json")
    for name in TOKENIZER_SETTINGS:
        if source.is_dir() and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    settings_path = folder / "tokenizer_config.json"
    if settings_path.is_file():
        settings: dict[str, Any] = parse_json(settings_path.read_text("utf-8"))
    else:
        settings = _settings(special, max_length)
        if end_token is not None:
            settings["eos_token"] = end_token
        settings_path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    tokens = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token")}
    known = special | _all_ids(table) if end_token not in (None, *special) else special
    return {f"{key}_id": known[token] for key, token in tokens.items() if token in known}


def _all_ids(table: dict[str, Any]) -> dict[str, int]:
    """Token -> id of the model's own vocabulary, where it is a table."""
    vocabulary = table.get("model", {}).get("vocab")
    return vocabulary if isinstance(vocabulary, dict) else {}


def _settings(special: dict[str, int], max_length: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,  # decoding must give back the bytes
    }
    for key, known in (("eos_token", KNOWN_ENDS), ("bos_token", KNOWN_BEGINS)):
        found = next((name for name in known if name in special), None)
        if found is not None:
            settings[key] = found
    return settings


def _content(token: Any) -> Any:
    """Special tokens stand in settings as text, or as an object with the text inside."""
    return token.get("content") if isinstance(token, dict) else token
