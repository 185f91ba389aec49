"""Rules for every refusal of `src`: a place, a remedy, and names in it that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import typer

from holdfast.cli.table import all_commands
from holdfast.config.loading.fields import field_at
from tests.runtime.cli.remedies.sites import VALUE, Refusal

EXEMPT = {
    "caught inside: a reader takes the next copy, or a writer tries again": """
        checkpoint/bucket/copy_lease.py checkpoint/bucket/uploader.py
        checkpoint/capture/copy_plan.py checkpoint/interop/dcp.py:cast_bits
        checkpoint/memory/arena_pool.py checkpoint/restore/fallback_store.py
        checkpoint/save/single_writer.py core/format/flat_names.py core/format/manifest.py
        elastic/agent/run_folder_monitor.py layout.py:index_of layout.py:replica_of
        parallel/axes/process_groups.py""",
    "checked before, with a remedy": """
        core/data/sample_order.py core/schedule/check.py launch/local.py layout.py:__post_init__
        layout.py:place_replicas parallel/pipeline/pipeline.py""",
    "an error of another program or of a user's code, as it came": """
        elastic/run_result.py launch/owners/kubernetes/kubectl.py
        launch/owners/ray/errors.py:explain tasks/task/loading.py:user_code tasks/script.py
        training/engine/lora_task.py wire/store/bucket_errors.py:_unreachable_error
        wire/store/run_store.py:translate_os_error""",
    "the caller names the place": """
        checkpoint/restore/inspect.py:find_commit_key config/loading/paths.py:_located
        model/generate.py:generate""",
}
"""Reason -> modules, or functions, whose refusals need no remedy or no place."""
NO_KEYS = ("holdfast", "torch", "run", "self", "step", "metadata", "my_task", "trainer")
"""First words of dotted names that are no keys: modules, and what a script has."""
NO_SETTINGS = frozenset(
    {"allow_http", "args", "ca", "collate", "compress", "credentials", "cycle_momentum"}
    | {"endpoint", "eval_strategy", "format", "key", "lost", "mode", "nodes", "nofile", "on"}
    | {"red", "reduction", "region", "report_to", "requires_grad", "retries", "seal", "timeout"}
    | {"store_interval_s", "tp", "user", "version", "virtual_host", "workers"}
)
"""Names before `=` of other things than the run file: of addresses, of Python, of a layout."""
MORE_KEYS = {"model.from", "lora.from", "model.code", "model.dropout"}
"""Three stand for other keys until the file is read; the last one is a tokenizer's."""
OTHER_OPTIONS = {"--head", "--ulimit", "--namespace"}
_FILE = r"\.(?:py|md|json|ya?ml|csv|txt|toml|jsonl|html|com|io|org|safetensors|log|so|bin|index)$"
_KEY = rf"(?<![\w./:@%{VALUE}*-])[a-z_]+(?:\.[a-z_0-9{VALUE}]+)*(?:\.[a-z_{VALUE}]+|=)"
_PLACE = rf"{VALUE}|--[a-z]|\b[a-z_]+\.[a-z_]+|holdfast|'|[a-z]_[a-z]"
_USAGE_ERROR: Any = typer.BadParameter.__base__
_PROSE = re.compile(r"(?:and|or|again|it|writes|wrote|prints|with|does|to|first|there)\W*$")


def complaints(refusal: Refusal) -> Iterator[str]:
    """Say what is wrong with a refusal."""
    remedies = refusal.remedy or frozenset()
    texts = [*refusal.message, *remedies, *(refusal.where or ())]
    is_literal = any(text.replace(VALUE, "").strip() for text in refusal.message)
    is_literal = is_literal and not _is_exempt(refusal)
    if is_literal and not any(remedies):
        yield "has no remedy"
    if is_literal and refusal.where is None and not any(re.search(_PLACE, t) for t in texts):
        yield "names no place, key, option, path or command"
    for text in [*remedies, *(refusal.where or ())]:
        yield from (f"{key} is no key" for key in _keys(text) if not _is_key(key))
        yield from (f"{option} is no option" for option in _options(text) - _all_options())
        yield from filter(None, map(command_fault, commands_in(text)))


def _is_exempt(refusal: Refusal) -> bool:
    module = refusal.module.rpartition(":")[0].partition("/")[2]
    names = " ".join(EXEMPT.values()).split()
    return module in names or f"{module}:{refusal.function}" in names


def _keys(text: str) -> Iterator[str]:
    """Yield what stands like a key of the run file: a.b, a.b=, a=."""
    for match in re.finditer(_KEY, text):
        key = match[0].partition(VALUE)[0].rstrip("=.")
        is_call = text[match.end() : match.end() + 1] in ("(", "/")
        if is_call or re.search(_FILE, key) or key.split(".")[0] in NO_KEYS:
            continue
        if "." in key or (match[0].endswith("=") and key not in NO_SETTINGS):
            yield key


def _is_key(key: str) -> bool:
    return key in MORE_KEYS or field_at(key.split(".")) is not None


def _options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - OTHER_OPTIONS


@cache
def _command(name: str) -> Any:
    return typer.main.get_command(import_module(all_commands()[name].module).app)


@cache
def _all_options() -> set[str]:
    waiting = [_command(name) for name in all_commands()]
    options = {"--help", "--version"}
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        options |= {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    return options


def commands_in(text: str) -> list[str]:
    """Return the command lines of a text; prose after one is cut off."""
    return re.findall(r"holdfast (?![-a-z]*_)([^;,`'\")\n]+)", text)


def command_fault(line: str) -> str:
    """Return why a command line cannot be parsed; "" if it can. Values may be placeholders."""
    words = shlex.split(line.replace(VALUE, "1"))
    if not words or words[0] in ("1", "COMMAND", "--help"):
        return ""
    if words[0] not in all_commands():
        return f"there is no command {words[0]}"
    command, arguments = _command(words[0]), words[1:]
    while hasattr(command, "commands") and arguments and not _PROSE.match(arguments[0]):
        if arguments[0] not in command.commands:
            return f"{words[0]} has no command {arguments[0]}"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    if hasattr(command, "commands"):
        return ""
    ends = [i for i, word in enumerate(arguments) if _PROSE.match(word)]
    try:
        parser = command.make_parser(typer.Context(command))
        parser.parse_args(arguments[: min(ends, default=None)])
    except _USAGE_ERROR as error:
        return f"{line.strip()}: {error.format_message()}"
    return ""
