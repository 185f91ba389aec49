"""What a run file and the folder of its tokenizer say of chat data: template, roles, stops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from holdfast.config.sections.data import DataConfig
from holdfast.data.read import vocabulary
from holdfast.data.read.chat_borders import TEMPLATE_KWARGS, TEXTS
from holdfast.data.read.chat_documents import ChatFormat
from holdfast.data.read.chat_render import compiled
from holdfast.data.read.chat_templates import DEFAULT, TOOL_USE, read_templates
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
    needs_template = any(s.rows not in ("text", *TEXTS) for s in config.sources)
    chat = config.chat
    try:
        named = read_templates(chat.template, chat.template_file, path.parent, chat.template_name)
    except DataError:
        if needs_template or chat.template_file is not None:
            raise
        named = {DEFAULT: ""}
    neighbours = vocabulary.read_neighbours(path)
    found = {"bos_token": "", "eos_token": vocabulary.describe_tokenizer(tokenizer, path).end_token}
    for key in TOKENS:
        token = neighbours.settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[key] = text
    return ChatFormat(
        named[DEFAULT],
        tuple(sorted({**found, **chat.template_kwargs}.items())),
        tuple(sorted(special_tokens(tokenizer))),
        chat.train_on,
        chat.weights,
        named.get(TOOL_USE, ""),
        tuple(name for name in named if name not in (DEFAULT, TOOL_USE)),
    )


def compile_templates(chat: ChatFormat, kwargs: Mapping[str, Any]) -> None:
    """Raises DataError if jinja2 is missing, if a template is none, or if none reads one of the run
    file's kwargs."""
    found = [compiled(text, chat.variables) for text in (chat.template, chat.tool_template) if text]
    where, remedy = "data.chat.template_kwargs", "take it out, or mend its name"
    TEMPLATE_KWARGS.check(kwargs, where, DataError, remedy)
    for name in kwargs:
        if not any(name in template.variables for template in found):
            raise DataError(f"the template does not read {name}", where=where, remedy=remedy)


def chat_settings(chat: ChatFormat) -> dict[str, Any]:
    """What of it decides the content of a dataset."""
    template = {"text": chat.template, "variables": dict(chat.variables)}
    found: dict[str, Any] = {
        "template": checksum(canonical_json(template)),
        "train_on": list(chat.train_on),
    }
    if chat.tool_template:
        found[TOOL_USE] = checksum(chat.tool_template.encode())
    return found | ({"weights": True} if chat.weights else {})


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Spelling -> id of the tokens that no text may spell."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.special}
