"""What the files next to a tokenizer.json say: used, named or refused.

Holdfast tokenises by tokenizer.json alone, transformers by a class that the folder names. If the
two would differ, the key or the ids are named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from holdfast.borders import Border, Unread
from holdfast.data.read.vocabulary import read_object
from holdfast.errors import DataError

_LISTS = ("additional_special_tokens", "extra_special_tokens")
TOKENIZER_KEYS = Border(
    "tokenizer_config.json",
    frozenset((*_LISTS, "add_bos_token", "chat_template", "added_tokens_decoder"))
    | {"bos_token", "eos_token", "pad_token", "unk_token", "tokenizer_class", "add_prefix_space"},
    frozenset(("sep_token", "cls_token", "mask_token", "model_max_length", "padding_side"))
    | {"truncation_side", "clean_up_tokenization_spaces", "add_eos_token", "processor_class"}
    | {"model_input_names", "name_or_path", "special_tokens_map_file", "tokenizer_file", "legacy"}
    | {"use_fast", "errors", "backend", "is_local", "local_files_only", "response_schema"},
    plain=dict.fromkeys(("split_special_tokens", "fast_tokenizer_files", "do_lower_case"), ()),
    unknown="count",
)
"""special_tokens_map.json has the tokens among them. Sections of tokenizer.json are used by the
library, but truncation and padding, which are off here and in transformers."""
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
"""Of an added token. One that added_tokens_decoder leaves out has the library's default."""
REMEDY = "Holdfast tokenises as tokenizer.json says: mend the two in a copy of the folder"
_THEIRS = """import json, sys
from transformers import AutoTokenizer
folder, texts = json.load(sys.stdin)
found = AutoTokenizer.from_pretrained(folder)
ids = [found(text, add_special_tokens=False)["input_ids"] for text in texts]
print("\\n" + json.dumps([type(found).__name__, ids]))
"""
_GENERIC = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")
"""Classes of transformers that take tokenizer.json as it is."""


def check_tokenizer_files(path: Path, tokenizer: Tokenizer) -> list[str]:
    """Return lines about what is not read of the files next to a tokenizer.json. Raises DataError
    for what would give other ids."""
    if path.name != "tokenizer.json":
        return []
    unread, ids = Unread(TOKENIZER_KEYS), tokenizer.get_vocab(with_added_tokens=True)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings, where = read_object(path.parent / name), str(path.parent / name)
        if json.loads(tokenizer.to_str())["normalizer"]:  # which may be what makes letters small
            settings.pop("do_lower_case", None)
        unread.add(TOKENIZER_KEYS.check(settings, where, DataError, REMEDY), where)
    pre, space = tokenizer.pre_tokenizer, settings.get("add_prefix_space")
    is_list = isinstance(pre, pre_tokenizers.Sequence)
    for part in list(pre) if is_list else [pre]:
        if space is not None and getattr(part, "add_prefix_space", space) != space:
            what = f"add_prefix_space is {space}, and not so in tokenizer.json"
            raise DataError(what, where=where, remedy=REMEDY)
    for token, number in _added(settings, path.parent):
        there = ids.get(token)
        if there is None or number not in (None, there):
            what = f"the token {token!r} has the id {number}, and in tokenizer.json {there}"
            raise DataError(what, where=where, remedy=REMEDY)
    _refuse_other_flags(settings, tokenizer, where)
    return [unread.line()] if unread.line() else []


def _refuse_other_flags(settings: dict[str, Any], tokenizer: Tokenizer, where: str) -> None:
    """Raises DataError for a flag of a token that transformers sets otherwise."""
    ours = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for said in (settings.get("added_tokens_decoder") or {}).values():
        given = {flag: said[flag] for flag in _FLAGS if flag in said}
        there, theirs = ours.get(said["content"]), AddedToken(said["content"], **given)
        for flag in _FLAGS if there else ():
            if getattr(theirs, flag) != getattr(there, flag):
                what = f"{flag} of the token {theirs.content!r} is {getattr(theirs, flag)}"
                raise DataError(
                    f"{what} in added_tokens_decoder, and {getattr(there, flag)} in tokenizer.json",
                    where=where,
                    remedy="make both say the same: save the tokenizer again with transformers",
                )


def _added(settings: dict[str, Any], folder: Path) -> Iterator[tuple[str, int | None]]:
    """Yield each token that transformers adds to those of the model, and its id or None."""
    for number, token in (settings.get("added_tokens_decoder") or {}).items():
        yield token["content"], int(number)
    yield from read_object(folder / "added_tokens.json").items()
    for token in (token for key in _LISTS for token in settings.get(key) or ()):
        yield (token["content"] if isinstance(token, dict) else token), None


def compare_ids(path: Path, tokenizer: Tokenizer, texts: list[str]) -> str:
    """Return how AutoTokenizer's ids of texts differ from those here. Return "" if they do not, or
    if transformers is not installed or would take tokenizer.json as it is."""
    settings, model = (read_object(path.parent / f"{n}config.json") for n in ("tokenizer_", ""))
    names = (settings.get("tokenizer_class"), model.get("tokenizer_class"), model.get("model_type"))
    named = next(filter(None, names), _GENERIC[0])
    if path.name != "tokenizer.json" or named in _GENERIC or not find_spec("transformers"):
        return ""
    done = subprocess.run(
        [sys.executable, "-c", _THEIRS],
        input=json.dumps([str(path.parent), texts]),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"the ids of {path} could not be compared with AutoTokenizer's: {why}"
    class_name, theirs = json.loads(done.stdout.splitlines()[-1])
    tokenizer.encode_special_tokens = False  # as transformers
    for text, other in zip(texts, theirs, strict=True):
        mine = tokenizer.encode(text, add_special_tokens=False).ids
        if mine != other:
            at = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), 0)
            return (
                f"{path} gives other ids than AutoTokenizer ({class_name}), which reads what is "
                f"exported: {mine[at : at + 8]}, not {other[at : at + 8]}, from token {at} of "
                f"{text[:60]!r} on. If tokenizer.json is right, say tokenizer_class: {_GENERIC[0]} "
                "in tokenizer_config.json; if not, save the folder with AutoTokenizer"
            )
    return ""
