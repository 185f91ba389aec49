"""What a run file and the folder of its tokenizer say of chat data: template, roles, stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from holdfast.config.sections.data import DataConfig
from holdfast.core.json_parsing import parse_json
from holdfast.data.read import vocabulary
from holdfast.data.read.chat_documents import ChatFormat
from holdfast.data.read.chat_render import compiled
from holdfast.data.read.chat_templates import read_template
from holdfast.data.read.files import canonical_json, checksum
from holdfast.errors import DataError

TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""What transformers lets a template know of the tokenizer."""


def read_chat_format(config: DataConfig) -> ChatFormat | None:
    """None for a run without chat data. Raises DataError for a template that cannot be read."""
    if not config.has_chat or config.tokenizer.place is None:
        return None
    path = vocabulary.tokenizer_file(config.tokenizer.place)
    tokenizer = vocabulary.load_tokenizer(path)
    needs_template = any(s.rows not in ("text", "prompt") for s in config.sources)
    try:
        template = read_template(config.chat.template, config.chat.template_file, path.parent)
    except DataError:
        if needs_template or config.chat.template_file is not None:
            raise
        template = ""
    neighbours = vocabulary.read_neighbours(path)
    found = {"bos_token": "", "eos_token": vocabulary.describe_tokenizer(tokenizer, path).end_token}
    for settings in (_read_object(path.parent / "special_tokens_map.json"), neighbours.settings):
        for key in TOKENS:
            token = settings.get(key)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[key] = text
    return ChatFormat(
        template,
        tuple(sorted(found.items())),
        tuple(sorted(special_tokens(tokenizer))),
        config.chat.train_on,
        config.chat.weights,
    )


def compile_template(chat: ChatFormat) -> None:
    """Raises DataError if jinja2 is missing, or the template is none."""
    if chat.template:
        compiled(chat.template, chat.variables)


def chat_settings(chat: ChatFormat) -> dict[str, Any]:
    """What of it decides the content of a dataset."""
    template = {"text": chat.template, "variables": dict(chat.variables)}
    found = {"template": checksum(canonical_json(template)), "train_on": list(chat.train_on)}
    return found | ({"weights": True} if chat.weights else {})


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Spelling -> id of the tokens that no text may spell."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.special}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
