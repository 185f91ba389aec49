"""The prompts of a run: rows of JSON lines, as token ids, with what the rewards need of them.

The number of a prompt is its row over all files. So each row is a prompt, or is refused with its
place. docs/guide/rewards.md is the user's page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from holdfast.config.sections.data import DataConfig, SourceConfig
from holdfast.config.sections.rewards import PromptsConfig
from holdfast.core.json_parsing import parse_json
from holdfast.data.read.chat_borders import KWARGS, PROMPT_COLUMNS, ChatNotes
from holdfast.data.read.chat_documents import ChatReader, texts_of
from holdfast.data.read.chat_format import read_chat_format, special_tokens
from holdfast.data.read.chat_rows import holds_messages
from holdfast.data.read.files import canonical_json
from holdfast.data.read.source_files import find_files
from holdfast.data.read.text_sources import clean_text, json_documents
from holdfast.data.read.vocabulary import describe_tokenizer, load_tokenizer, tokenizer_file
from holdfast.errors import DataError

_DIGEST_BYTES = 16
_TO_TEMPLATE = ("tools", "documents", KWARGS)


@dataclass(frozen=True)
class Prompt:
    """One prompt, as actors and rewards see it."""

    number: int  # its row, from 0, over all files
    ids: tuple[int, ...]  # token ids
    said: str | tuple[Mapping[str, Any], ...]  # the text or the messages of the row
    source: str  # name of its entry of rollout.prompts
    answer: str | None  # None: the row has none
    columns: Mapping[str, Any]  # all but that of the prompt, JSON values
    where: str  # file and line

    def to_json(self) -> dict[str, Any]:
        """What decides ids and rewards, JSON-safe."""
        return {
            "ids": self.ids,
            "said": self.said,
            "source": self.source,
            "answer": self.answer,
            "columns": dict(self.columns),
        }


class Prompts(Sequence[Prompt]):
    """All prompts of a run, by number."""

    def __init__(self, rows: Sequence[Prompt]):
        self._rows = tuple(rows)
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for row in self._rows:
            digest.update(hashlib.blake2b(canonical_json(row.to_json())).digest())
        self.version = digest.hexdigest()
        """Digest of all that the completions and rewards of a run depend on."""
        self.sources = tuple(sorted({row.source for row in self._rows}))
        """Names by which rewards are reported."""
        self.max_tokens = max((len(row.ids) for row in self._rows), default=0)
        """Tokens of the longest prompt."""

    def __getitem__(self, number: Any) -> Any:
        return self._rows[number]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._rows)


def read_prompts(
    entries: Sequence[PromptsConfig],
    data: DataConfig,
    source_column: str | None = None,
    key: str = "rollout.prompts",
) -> Prompts:
    """Read and tokenise all prompts. data: names tokenizer and chat template. source_column: names
    the source of a row. key: of `entries`.

    Raises DataError for a file, a row or a template that does not fit."""
    if data.tokenizer.place is None:
        raise DataError(
            "prompts need the tokenizer of a model",
            where="data.tokenizer.path",
            remedy="name a folder with a tokenizer.json, or set model.from",
        )
    rows: list[Prompt] = []
    for number, entry in enumerate(entries):
        reader = _Reader(entry, data, len(rows), source_column)
        rows += reader.read_all(f"{key}.{number}")
    return Prompts(rows)


class _Reader:
    """Reads the rows of one entry."""

    def __init__(
        self, entry: PromptsConfig, data: DataConfig, begin: int, source_column: str | None
    ):
        self._source_column = source_column
        self._entry, self._data, self._begin = entry, data, begin
        path = tokenizer_file(str(data.tokenizer.place))
        self._tokenizer = load_tokenizer(path)
        self._special = tuple(special_tokens(self._tokenizer))
        self._begin_id = describe_tokenizer(self._tokenizer, path).begin_id
        self._chat: ChatReader | None = None
        self._rows: list[Prompt] = []

    def read_all(self, where: str) -> list[Prompt]:
        source = SourceConfig(kind="jsonl", path=self._entry.path).at(self._entry.place)
        found = find_files(source, where)
        if found.refused:
            raise found.refused[0]
        limit = self._data.max_document_bytes
        for path in (path for path, _ in found.files if Path(path).stat().st_size):
            for _ in json_documents(path, 0, 0, self._take, limit, xxh3_128()):
                pass
        if not self._rows:
            remedy = "write one object a line, with a column prompt"
            raise DataError(f"{self._entry.place} has no prompt", where=where, remedy=remedy)
        return self._rows

    def _take(self, value: Any, where: str, *, bare: bool = False) -> str:
        column = self._entry.prompt
        if not isinstance(value, Mapping) or value.get(column) is None:
            has = f"it has {sorted(value)}" if isinstance(value, Mapping) else "it is no object"
            remedy = "mend the row, or set prompt in rollout.prompts to the name of its column"
            raise DataError(f"the row has no {column!r} ({has})", where=where, remedy=remedy)
        remedy = f"put it into {KWARGS} if the template reads it, or leave it out"
        PROMPT_COLUMNS.check(value, where, DataError, remedy)
        is_chat = holds_messages(value[column])
        ids, said = (self._messages if is_chat else self._text)(value, where)
        if not ids:
            raise DataError("the prompt is empty", where=where, remedy="leave the row out")
        mine = (column, *(_TO_TEMPLATE if is_chat else ()))
        columns = {name: given for name, given in value.items() if name not in mine}
        name = self._source(value, where)
        number, answer = self._begin + len(self._rows), self._answer(value, where)
        self._rows.append(Prompt(number, tuple(ids), said, name, answer, columns, where))
        return ""

    def _answer(self, row: Mapping[str, Any], where: str) -> str | None:
        given = row.get(self._entry.answer)
        if given is None or isinstance(given, str):
            return given
        if isinstance(given, int | float) and not isinstance(given, bool):
            return str(given)
        what = f"{self._entry.answer!r} is no text and no number, but {type(given).__name__}"
        raise DataError(what, where=where, remedy="write it as a text")

    def _source(self, row: Mapping[str, Any], where: str) -> str:
        """Return the name by which the rewards of a row are reported."""
        if self._source_column is None:
            return self._entry.name or Path(self._entry.path).stem
        named = row.get(self._source_column)
        if not isinstance(named, str) or not named:
            what = f"the row has no text in {self._source_column!r}, which names its source"
            remedy = "mend the row, or leave rollout.source_column out"
            raise DataError(what, where=where, remedy=remedy)
        return named

    def _text(self, row: Mapping[str, Any], where: str) -> tuple[list[int], str]:
        text = row[self._entry.prompt]
        if not isinstance(text, str):
            what = f"{self._entry.prompt!r} is no text and no list of messages"
            raise DataError(what, where=where, remedy="mend the row")
        text = clean_text(text, where)
        for name in _TO_TEMPLATE:
            if row.get(name):
                what = f"a prompt that is a text uses no template, and the row has {name}"
                raise DataError(what, where=where, remedy="make the prompt a list of messages")
        self._refuse_special([text], where)
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids if text else []
        return ([] if self._begin_id is None or not ids else [self._begin_id]) + ids, text

    def _messages(
        self, row: Mapping[str, Any], where: str
    ) -> tuple[list[int], tuple[Mapping[str, Any], ...]]:
        given = row[self._entry.prompt]
        messages = parse_json(given) if isinstance(given, str) else given
        self._refuse_special(texts_of(messages), where)
        text = self._reader().read_prompt(row, where)
        self._tokenizer.encode_special_tokens = False  # the template writes special tokens
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids, tuple(messages)

    def _reader(self) -> ChatReader:
        if self._chat is None:
            rows = SourceConfig(kind="jsonl", path=self._entry.path, rows="messages")
            form = read_chat_format(self._data.model_copy(update={"sources": (rows,)}))
            assert form is not None, "the rows are messages"
            self._chat = ChatReader("messages", self._entry.prompt, form, ChatNotes())
        return self._chat

    def _refuse_special(self, texts: Iterator[str] | list[str], where: str) -> None:
        if spelt := [token for text in texts for token in self._special if token in text]:
            what = f"the prompt spells the special token {spelt[0]}"
            raise DataError(what, where=where, remedy="leave the row out, or mend its text")
