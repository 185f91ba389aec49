"""Renders chat templates in jinja2's sandbox, and finds what `{% generation %}` encloses.

A template comes with a model and is foreign code, so it runs in the immutable sandbox. It
knows no clock: the same rows give the same dataset on every day.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from holdfast.data.read.chat_borders import THOUGHTS
from holdfast.errors import DataError

NEEDED = (3, 1, 6)
"""Older releases of jinja2 have known ways out of the sandbox."""

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode; they stand around what `{% generation %}` encloses."""

_MARKS = re.compile(f"[{OPEN}{CLOSE}]")
_ASKS_NULL = re.compile(r"(\w+)['\"\])]*\s*(?:\bis(?:\s+not)?|[!=]=)\s*[nN]one\b")
_FILE = "<template>"

Span = tuple[int, int]  # characters [start, stop)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the parts that `{% generation %}` marks."""

    text: str
    marked: tuple[Span, ...]


class ChatTemplate:
    """A compiled template. Raises DataError if jinja2 is missing, or cannot compile it."""

    def __init__(self, text: str, variables: Mapping[str, Any]):
        self._variables = dict(variables)
        jinja = _jinja()
        try:
            self._template = _environment().from_string(text)
        except jinja.TemplateError as error:
            raise DataError(
                f"line {getattr(error, 'lineno', 1)} is not a template that jinja2 knows ({error})",
                where="the chat template",
                remedy="mend it, or name another in data.chat",
            ) from None
        self.marks_replies = bool(re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text))
        tree = _environment().parse(text)
        self.variables: frozenset[str] = frozenset(jinja.meta.find_undeclared_variables(tree))
        """Names that the template asks the caller for."""
        texts = tree.find_all(jinja.nodes.Const)
        self.spelt = frozenset(one.value for one in texts if isinstance(one.value, str))
        """Texts that the template compares or writes, such as roles."""
        self.asks_null = frozenset(_ASKS_NULL.findall(text))
        """Keys of which the template tells null from what is missing."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        where: str,
        *,
        begins_reply: bool = False,
        **given: Any,
    ) -> Rendered:
        """begins_reply: up to where the model would begin its reply. given: tools and what else the
        row has for the template. Raises DataError, with the row's place and the template's line, if
        the template fails."""
        try:
            marked: str = self._template.render(
                messages=[_with_thoughts(message) for message in messages],
                add_generation_prompt=begins_reply,
                **{"tools": None, "documents": None, **self._variables, **given},
            )
        except Exception as error:  # a template can fail in any way that Python can
            raise DataError(
                f"the chat template fails in line {_line(error)}: "
                f"{type(error).__name__}: {str(error) or 'no reason given'}",
                where=where,
                remedy=_remedy(error),
            ) from None
        spans, text, at = [], [], 0
        begun = 0
        for piece in re.split(f"({_MARKS.pattern})", marked):
            if piece == OPEN:
                begun = at
            elif piece == CLOSE:
                spans.append((begun, at))
            else:
                text.append(piece)
                at += len(piece)
        return Rendered("".join(text), tuple(spans))


def _with_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers does: thoughts have both of the names that templates read."""
    said = next((message[key] for key in THOUGHTS if message.get(key) is not None), None)
    if said is None:
        return dict(message)
    return {"thinking": said, **message, "reasoning_content": said}


def has_marks(text: str) -> bool:
    return _MARKS.search(text) is not None


@cache
def compiled(text: str, variables: tuple[tuple[str, Any], ...]) -> ChatTemplate:
    """Each template once in a process."""
    return ChatTemplate(text, dict(variables))


def _line(error: Exception) -> int | str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == _FILE]
    return lines[-1] if lines and lines[-1] is not None else "?"


def _remedy(error: Exception) -> str:
    if "strftime_now" in str(error):
        return "write the date into a copy of the template: with a clock each day has other tokens"
    return "mend the row or leave it out, or name another template in data.chat"


def _jinja() -> Any:
    try:
        import jinja2
        import jinja2.meta
    except ImportError:
        found: tuple[int, ...] = ()
    else:
        found = tuple(int(n) for n in re.findall(r"\d+", jinja2.__version__)[:3])
        if found >= NEEDED:
            return jinja2
    what = f"this is jinja2 {'.'.join(map(str, found))}" if found else "jinja2 is not installed"
    raise DataError(
        f"chat templates need jinja2 {'.'.join(map(str, NEEDED))} or newer, and {what}",
        where="data.chat",
        remedy="pip install 'holdfast[chat]'",
    )


@cache
def _environment() -> Any:
    """Everything that transformers gives to a template, but for the clock."""
    jinja2 = _jinja()
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` ... `{% endgeneration %}`, with marks around what is between."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.globals["raise_exception"] = raise_exception
    made.filters["tojson"] = tojson
    return made
