"""What comes from outside, entry by entry: used, known to be harmless, or named.

Files, rows, objects, tables and addresses of other programs say more than Holdfast computes. A
`Border` lists for one of them what Holdfast uses, what changes nothing here, and what changes
something only at other than its plain values. An entry in none of these lists is refused, or
counted in one line, as the border says. docs/reference/borders.md lists the borders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.errors import UserError, nearest_of

_SHOWN = 8


def says_nothing(value: object) -> bool:
    """Return True for null, false and what is empty. 0 says something."""
    return (
        value is None
        or value is False
        or (isinstance(value, str | list | tuple | dict) and not value)
    )


@dataclass(frozen=True)
class Border:
    """The allow-list of one kind of thing from outside."""

    name: str
    """What a user calls it: "adapter_config.json", "columns of a price table"."""
    used: frozenset[str]
    """Entries that Holdfast reads."""
    harmless: frozenset[str] = frozenset()
    """Entries that change nothing of what Holdfast does."""
    plain: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Entry -> the values at which it changes nothing. What says nothing is always plain."""
    unknown: Literal["refuse", "count"] = "refuse"
    """What becomes of an entry that no list names, and that says something."""
    entry: str = "key"
    """What an entry is called: key, column, hook, option, parameter."""

    def unread(self, entries: Mapping[str, object]) -> tuple[str, ...]:
        """Return the entries that no list names and that say something."""
        lists = (self.used, self.harmless, self.plain)
        return tuple(
            name
            for name, value in entries.items()
            if not any(name in each for each in lists) and not says_nothing(value)
        )

    def problems(self, entries: Mapping[str, object]) -> tuple[str, ...]:
        """Return one clause for each entry that is refused."""
        out = [
            f"{name} {_shown(entries[name])}"
            for name, plain in self.plain.items()
            if name in entries
            and not says_nothing(entries[name])
            and not any(entries[name] is each or _equal(entries[name], each) for each in plain)
        ]
        if self.unknown == "refuse":
            for name in self.unread(entries):
                near = nearest_of(name, (*self.used, *self.plain), 0.75)
                hint = f", did you mean {near}?" if near else ""
                out.append(f"the {self.entry} {name!r} that Holdfast does not know{hint}")
        return tuple(out)

    def check(
        self, entries: Mapping[str, object], where: str, error: type[UserError], remedy: str
    ) -> tuple[str, ...]:
        """Return the entries to count.

        Raises `error`, one message with each entry that is refused, `where` and `remedy`."""
        if problems := self.problems(entries):
            message = f"this has {', '.join(problems)}, and Holdfast would continue without it"
            raise error(message, where=where, remedy=remedy)
        return () if self.unknown == "refuse" else self.unread(entries)


class Unread:
    """Counts of entries that a border lets pass unread, for one line."""

    def __init__(self, border: Border):
        self.border = border
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, names: Iterable[str], where: str, count: int = 1) -> None:
        """Count names, seen at `where` (a file, or a file and line)."""
        for name in names:
            self._counts[name] = self._counts.get(name, 0) + count
            self._first.setdefault(name, where)

    def line(self) -> str:
        """Return "not read: ..." with counts and the first place of each; "" if all was read."""
        names = sorted(self._counts)
        if not names:
            return ""
        parts = [
            f"{n} ({self._counts[n]:,} times, first in {self._first[n]})" for n in names[:_SHOWN]
        ]
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"not read of {self.border.name}: {self.border.entry} {', '.join(parts)}{rest}"


def _equal(value: object, plain: object) -> bool:
    """Return True for equal values; true is not 1, and false is not 0."""
    return isinstance(value, bool) == isinstance(plain, bool) and value == plain


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, str | int | float) else repr(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= 60 else text[:57] + "..."
