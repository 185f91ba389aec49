"""The process of a reward function: python -m holdfast.rollout.rewards.function_child NAME FOLDER

It reads a JSON object a line and answers with one. What the function prints goes to the log.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from holdfast.core.json_parsing import parse_json

NOT_GIVEN = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL passes, and what would make a reward depend on more than the completion."""
_OURS = ("prompt", "completion", "answer", "completion_ids")
_THEIRS = ("prompts", "completions", "completion_ids")
_TEXT = 300  # characters of an exception's text


class _RefusedError(Exception):
    """The function cannot be asked."""


def load(name: str, folder: str) -> Callable[..., Any]:
    """Import the function. Raises _RefusedError."""
    sys.path.append(folder)
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        raise _RefusedError(f"cannot be imported: {_said(error)}") from None
    function = getattr(module, attribute, None)
    if function is None:
        raise _RefusedError(f"does not exist: {module.__file__} has no {attribute}")
    if not callable(function):
        raise _RefusedError(f"is no function, but {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise _RefusedError("is asynchronous, and rewards are asked one by one")
    if inspect.isclass(function):
        raise _RefusedError("is a class, and not a function")
    return function  # type: ignore[no-any-return]


def sources(name: str, folder: str) -> str:
    """Digest of the modules that came from the folder, or from the function's package."""
    package, digest = name.partition(":")[0].partition(".")[0], hashlib.blake2b(digest_size=16)
    for title, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        is_near = path is not None and Path(path).is_relative_to(folder)
        if path and (title.partition(".")[0] == package or is_near):
            digest.update(f"{title}\0".encode() + hashlib.blake2b(Path(path).read_bytes()).digest())
    return digest.hexdigest()


def call(function: Callable[..., Any], ask: Mapping[str, Any]) -> Any:
    """Ask the function about one completion. Raises _RefusedError for arguments that it lacks."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    is_theirs = "completions" in names or "prompts" in names
    given = dict(ask["columns"])
    if is_theirs:
        chat = not isinstance(ask["prompt"], str)
        reply = ask["completion"]
        own = {
            "prompts": ask["prompt"],
            "completions": [{"role": "assistant", "content": reply}] if chat else reply,
            "completion_ids": ask["completion_ids"],
        }
        given = {key: [value] for key, value in {**given, **own}.items()}
    else:
        given |= {key: ask[key] for key in _OURS if ask[key] is not None}
    needed = [p.name for p in parameters if p.default is p.empty and p.name in names]
    if lacking := [name for name in needed if name not in given]:
        why = "is not given" if lacking[0] in NOT_GIVEN else "is no column of the prompt"
        raise _RefusedError(f"needs the argument {lacking[0]}, which {why}")
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        given = {key: value for key, value in given.items() if key in names}
    found = function(**given)
    if is_theirs:
        if not isinstance(found, list) or len(found) != 1:
            raise _RefusedError(
                f"returned {str(found)[:60]} for one completion, and not a list of one"
            )
        found = found[0]
    if hasattr(found, "item") and not isinstance(found, list | str):
        found = found.item()  # of numpy and torch
    return found


def _said(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<")]
    place = "".join(f" ({os.path.basename(f.filename)}:{f.lineno})" for f in own[-1:])
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_TEXT]}{place}"


def _reply(function: Callable[..., Any], ask: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = call(function, ask)
    except _RefusedError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"raised {_said(error)}"}
    is_json = found is None or isinstance(found, bool | int | float | str)
    return {"reward": found if is_json else repr(found)}


def main() -> None:
    name, folder = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of the function do not come between the answers

    def say(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    try:
        function = load(name, folder)
        say({"source": sources(name, folder)})
    except _RefusedError as error:
        say({"error": str(error)})
        return
    lines: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_read_lines, args=(lines,), daemon=True).start()
    while True:
        say(_reply(function, parse_json(lines.get())))


def _read_lines(lines: SimpleQueue[bytes]) -> None:
    """Queue the lines of stdin. If the scorer is lost, end this process, whatever it does."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
