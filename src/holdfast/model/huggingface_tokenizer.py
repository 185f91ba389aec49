"""Puts a tokenizer.json next to a model, so that `AutoTokenizer` finds it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from holdfast.core.data.special_tokens import KNOWN_BEGINS, KNOWN_ENDS
from holdfast.core.json_parsing import parse_json
from holdfast.errors import ModelFolderError

_ALONGSIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def copy_tokenizer(source: Path | None, folder: Path, max_length: int) -> dict[str, int]:
    """Copy `source` (a tokenizer.json, or the folder of one) into `folder`.

    A tokenizer_config.json in a given folder is kept. Otherwise one is written, with the tokens for
    the begin and the end of a text, found among the special tokens. Return `eos_token_id` and
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
    for name in _ALONGSIDE:
        if source.is_dir() and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    settings_path = folder / "tokenizer_config.json"
    if settings_path.is_file():
        settings: dict[str, Any] = parse_json(settings_path.read_text("utf-8"))
    else:
        settings = _settings(special, max_length)
        settings_path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    tokens = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token")}
    return {f"{key}_id": special[token] for key, token in tokens.items() if token in special}


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
