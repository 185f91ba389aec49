"""The stage `function`: a user's own function judges or changes a document.

The function takes the text of a document. It returns True if the document stays, False if it is
left out, or the text as it shall be. For `score` it returns a number. Its file stands alone: it may
import what is installed, and not the files around it. So a digest of the file says what the
function does.
"""

from __future__ import annotations

import reprlib
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.data.filters.plain import document_name, hash_document
from holdfast.data.filters.verdict import Stage, Verdict
from holdfast.data.read.files import checksum
from holdfast.errors import DataError

CALLED_TWICE = 16
"""One document in so many is given to the function twice: it must say the same both times."""
MAX_SCORE = 1e30
"""Scores are kept in float32."""


def function_stage(recipe: dict[str, Any]) -> Stage:
    """Return the stage `function`. Raises DataError for a file or function that cannot be used."""
    ask, name = _asker(recipe, (bool, str), "return True, False or a text"), recipe["function"]

    def judge(text: str) -> Verdict:
        answer = ask(text)
        if answer is False:
            return Verdict(text, name)
        if answer is True or answer == text:
            return Verdict(text)
        return Verdict(answer, edits=((name, 1),))

    return judge


def number_function(recipe: dict[str, Any]) -> Callable[[str], float]:
    """Return a user's function that gives a number. Raises DataError as `function_stage` does."""
    ask = _asker(recipe, (int, float), "return a number")

    def score(text: str) -> float:
        found = ask(text)
        if not abs(found) <= MAX_SCORE:
            raise DataError(
                f"{recipe['function']}() returned {reprlib.repr(found)} for the document "
                f"{_name(text)}",
                where=recipe["place"],
                remedy=f"return a number between -{MAX_SCORE:g} and {MAX_SCORE:g}",
            )
        return float(found)

    return score


def _asker(recipe: dict[str, Any], kinds: tuple[type, ...], remedy: str) -> Callable[[str], Any]:
    """Return a user's function, whose answers are checked. It raises DataError for one that fails,
    that is none of `kinds`, or that differs the second time."""
    path, name = recipe["place"], recipe["function"]
    call = _load(path, name, recipe["files"])

    def ask(text: str) -> Any:
        try:
            with redirect_stdout(sys.stderr):  # a command's own output may be JSON
                answer = call(text)
        except (Exception, SystemExit) as error:
            raise _failed(error, path, f"{name}() failed", text) from error
        if not isinstance(answer, kinds):
            kind = type(answer)
            module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            raise DataError(f"{name}() returned {module}{kind.__name__}", where=path, remedy=remedy)
        if isinstance(answer, str):
            try:
                answer.encode()
            except UnicodeEncodeError as error:
                raise _failed(error, path, f"{name}() returned no text", text) from None
        return answer

    def ask_and_check(text: str) -> Any:
        answer = ask(text)
        if hash_document(text)[1] % CALLED_TWICE == 0 and ask(text) != answer:
            raise DataError(
                f"{name}() gave two answers for the document {_name(text)}",
                where=path,
                remedy="use no clock, no random numbers and nothing from an earlier call",
            )
        return answer

    return ask_and_check


def _name(text: str) -> str:
    return document_name(*hash_document(text)[:2])


def _load(path: str, name: str, digest: str) -> Any:
    """Return a function of a file. Raises DataError."""
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"the file of a stage cannot be read ({error.strerror})",
            where=path,
            remedy="name a Python file in data.stages.*.function",
        ) from None
    if checksum(source) != digest:
        raise DataError(
            f"the file of {name}() has changed",
            where=path,
            remedy=f"put back the file whose xxh3-128 is {digest}, or name another data.folder",
        )
    module = ModuleType(f"holdfast_stage_{digest}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        with redirect_stdout(sys.stderr):
            exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise _failed(error, path, "the file of a stage cannot be imported") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise DataError(
            f"the file has no function {name}",
            where=path,
            remedy=f"write def {name}(text): there, or name another one",
        )
    return found


def _failed(error: BaseException, path: str, what: str, text: str = "") -> DataError:
    """Return the refusal of what a user's code did. The document's text is not in it."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
    of = f" for the document {_name(text)}" if text else ""
    cause = type(error).__name__
    if isinstance(error, ImportError | SyntaxError | NameError | AttributeError):
        cause += f": {error}"  # a message that has no text of a document
    return DataError(
        f"{what}{of}: {cause}",
        where=path if line is None else f"{path}:{line}",
        remedy="mend the function; its file may import only what is installed",
    )
