"""Calls one command's Typer application and settles how it ended."""

from __future__ import annotations

import _thread
import errno
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import typer

from holdfast.api.early_end import CrashedInError, EndedBySignal
from holdfast.errors import UserError


class _App(typer.Typer):
    """A Typer application whose commands get paths with `~` filled in.

    A command that names a run, and lists nothing, takes keys of its run file as well."""

    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            @wraps(function)  # Typer reads the signature behind it
            def with_paths(**given: Any) -> Any:
                given = {name: _expanded(name, value) for name, value in given.items()}
                context = given.pop(_CONTEXT, None)
                if context is not None and context.args:
                    run = given["run"]
                    given["run"] = type(run)(folder_with_keys(Path(run), context.args))
                return function(**given)

            known = signature(function, eval_str=True)
            if "run" in known.parameters:
                settings["context_settings"] = _CONTEXT_SETTINGS | {"allow_extra_args": True}
                more = Parameter(_CONTEXT, Parameter.KEYWORD_ONLY, annotation=typer.Context)
                both = [*known.parameters.values(), more]
                with_paths.__signature__ = known.replace(parameters=both)  # type: ignore[attr-defined]
                with_paths.__annotations__ = function.__annotations__ | {_CONTEXT: typer.Context}
            super(_App, self).command(*args, **settings)(with_paths)
            return function

        return decorate


_CONTEXT_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}

_CONTEXT = "typer_context"  # the parameter for words that a command has no argument for


def is_key(word: str) -> bool:
    """Return True for `key=value`."""
    return "=" in word and word.partition("=")[0].replace(".", "").replace("_", "").isalnum()


def folder_with_keys(run: Path, words: Sequence[str]) -> Path:
    """Return the run folder that a run file names if `words` give some of its keys. Raises
    ConfigError."""
    from holdfast.config.loading.load import load_config
    from holdfast.errors import ConfigError
    from holdfast.launch.run.runs import run_folder_of

    if strange := [word for word in words if not is_key(word)]:
        raise ConfigError(
            f"{strange[0]!r} is no key=value of a run file",
            where="command line",
            remedy=f"compare several runs with: holdfast status {run} {strange[0]}"
            if Path(strange[0]).exists()
            else "leave it out",
        )
    if not run.is_file():
        raise ConfigError(
            f"{words[0]} goes with a run file, and {run} is none",
            where="command line",
            remedy="leave it out, or name the run file",
        )
    return run_folder_of(load_config(run, list(words)).config)


def _expanded(name: str, value: Any) -> Any:
    if not isinstance(value, Path) or not ({"~", "$"} & set(str(value))):
        return value
    return Path(expand_argument(name, str(value)))


def expand_argument(name: str, text: str) -> str:
    """A path of the command line with `~` filled in. Raises UserError with its place."""
    from holdfast.config.loading.paths import expand_path

    try:
        return expand_path(text)
    except UserError as error:
        where = f"command line, {name.replace('_', ' ')}"
        raise UserError(error.message, where=where, remedy=error.remedy) from None


def app(help_text: str) -> typer.Typer:
    """A command's Typer application in the house style: plain text, our own errors."""
    return _App(
        help=help_text,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=False,
        context_settings=_CONTEXT_SETTINGS,
    )


def call(module: str, program: str, arguments: Sequence[str]) -> int:
    """Import `module`, run its `app`; returns the exit code."""
    try:
        if "HOLDFAST_SECRET" in os.environ:  # before anything is started that would inherit it
            from holdfast.wire.secret import given_secret_file

            given_secret_file(os.environ)
        command = typer.main.get_command(import_module(module).app)
        # Not command.main(): it has its own way with Ctrl-C, broken pipes and errors.
        with _interrupts_kept(), command.make_context(program, list(arguments)) as context:
            result = command.invoke(context)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt as stop:  # its text says what is kept
        print(f"{program}: " + "; ".join(["interrupted", *map(str, stop.args)]), file=sys.stderr)
        return 130
    except EndedBySignal as ending:
        remedy = "nothing was under way; the same command starts it again"
        print(f"{program}: ended by {ending}; {remedy}", file=sys.stderr)
        return ending.exit_code
    except BrokenPipeError:
        raise
    except typer.Exit as ending:  # --help, for example
        sys.stdout.flush()
        return ending.exit_code
    except CrashedInError as crash:
        return _report_failure(program, crash.__cause__ or crash, crash.folder)
    except Exception as error:
        return _report_failure(program, error, Path())


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Deliver a Ctrl-C again if the interpreter has dropped it.

    Python ignores exceptions of hooks that it calls while it starts a process, and `logging`
    has such a hook."""
    before = sys.unraisablehook

    def again(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        # Not in this call: an exception of it would be ignored too.
        timer = threading.Timer(0.01, _thread.interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _report_failure(program: str, error: BaseException, folder: Path) -> int:
    """One sentence for what the person can mend (2), sentence and log file for the rest (1)."""
    if isinstance(error, UserError):
        print(f"holdfast: {error}", file=sys.stderr)
        return error.exit_code
    usage = getattr(error, "format_message", None)  # the parser's own errors
    if usage is not None and hasattr(error, "exit_code"):
        words = " ".join(usage().split()).rstrip(".").replace("Value error, ", "")
        option = str(getattr(error, "option_name", ""))
        if "." in option:  # as argparse writes keys
            print(f"{program}: keys have no dashes; write {option[2:]}=VALUE", file=sys.stderr)
            return 2
        context = getattr(error, "ctx", None)
        path = getattr(context, "command_path", program) if context else program
        print(f"{path}: {words or 'a command is missing'}; see '{path} --help'", file=sys.stderr)
        return 2
    if type(error).__name__ == "Abort":
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    if isinstance(error, OSError) and (sentence := _describe_os_error(error)):
        print(f"holdfast: {sentence}", file=sys.stderr)
        return 2
    where = _write_log(program, error, folder)
    kind = type(error).__name__
    print(f"holdfast: {kind}: {_first_line(error)}; the traceback is in {where}", file=sys.stderr)
    return 1


def _describe_os_error(error: OSError) -> str | None:
    """A refusal of the file system that no room turned into its own sentence."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}the disk is full; free some space and run the same command again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{where}no permission; choose a folder that you can write, or change its owner"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().split("\n")[0] or "no message").rstrip(".")


def _write_log(program: str, error: BaseException, folder: Path) -> str:
    """Return the path of the traceback, written to the run folder, or here. If both fail, print
    it."""
    text = "".join(traceback.format_exception(error))
    name = f"holdfast-error-{datetime.now():%Y%m%d-%H%M%S}.log"
    for place in (folder / "logs" / name, Path(name)):
        if place.parent.is_dir():
            try:
                place.write_text(
                    f"{program} {' '.join(sys.argv[1:])}\n\n{text}", "utf-8", "backslashreplace"
                )
            except OSError:
                continue
            return str(place)
    print(text, file=sys.stderr)
    return "the lines above"
