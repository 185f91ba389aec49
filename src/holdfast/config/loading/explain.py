"""Refusals of the schema -> one sentence each: place, key, what is wrong, a value that works."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticUndefined

from holdfast.config.loading.fields import ITEM, all_keys, as_path, field_at, section_of, siblings
from holdfast.errors import ConfigError, nearest_of

Place = Callable[[tuple[str | int, ...]], str | None]

_KEYS_ELSEWHERE = {
    "train.optimizer.learning_rate": ("lr", "learning_rate"),
    "train.optimizer.weight_decay": ("weight_decay",),
    "train.steps": ("max_steps", "num_steps"),
    "train.schedule.warmup_steps": ("warmup",),
    "train.microbatch_size": ("micro_batch_size",),
    "train.precision": ("dtype",),
    "data.sequence_length": ("seq_len", "seq_length", "max_seq_len", "context_length"),
    "model.layers": ("n_layers", "num_layers", "num_hidden_layers"),
    "model.heads": ("n_heads", "num_attention_heads"),
    "model.kv_heads": ("num_key_value_heads",),
    "model.dim": ("hidden_size",),
    "model.ffn_dim": ("intermediate_size",),
    "model.experts.count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "model.experts.top_k": ("num_experts_per_tok",),
    "model.experts.width": ("moe_intermediate_size",),
    "model.experts.balance_loss": ("router_aux_loss_coef",),
    "model.experts.capacity": ("capacity_factor",),
    "folder": ("output_dir",),
    "lora.rank": ("r", "lora_r"),
    "lora.alpha": ("lora_alpha",),
    "lora.dropout": ("lora_dropout",),
    "lora.targets": ("target_modules", "lora_target_modules", "lora_target_linear"),
    "checkpoint.every_steps": ("save_every",),
    "layout.workers": ("world_size", "num_workers"),
    "layout.schedule": ("pipeline_schedule",),
    **{
        f"layout.{axis}": tuple(
            f"{name}_{word}"
            for word in ("parallel", "parallel_size", "parallel_degree", "model_parallel_size")
        )
        for axis, name in {
            "tp": "tensor",
            "pp": "pipeline",
            "cp": "context",
            "ep": "expert",
        }.items()
    },
}
"""Key -> what other trainers call it. Only for "did you mean", never accepted."""
_ELSEWHERE = {name: key for key, names in _KEYS_ELSEWHERE.items() for name in names}

_VALUES = {
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half"),
    "fp32": ("float32", "float"),
    "float64": ("double", "fp64"),
    "8bit": ("int8",),
    "cuda": ("rocm", "hip", "nvidia", "amd"),
    "xpu": ("intel",),
    "mps": ("metal",),
    "host": ("cpu",),
    "file": ("nvme", "disk"),
    "device": ("gpu",),
}
"""The same for values, by the words in which other trainers, or torch, name them."""
_VALUES_ELSEWHERE = {name: value for value, names in _VALUES.items() for name in names}

MAX_NUMBER = 2**53
"""Largest whole number of a run file: larger ones are no exact steps, bytes or samples any more."""
_LIST_REMEDY = "name at least one, or remove the key"
_LIST_ON_COMMAND_LINE = "write a list in brackets: '{key}=[FIRST, SECOND]'"
_ON_COMMAND_LINE = {
    "tuple_type": _LIST_ON_COMMAND_LINE,
    "list_type": _LIST_ON_COMMAND_LINE,
    "model_type": "name one of its keys: {key}.KEY=VALUE",
    "dict_type": "name one of its keys: {key}.KEY=VALUE",
}
"""Kind of a refusal -> the remedy for a value of the command line."""
_KIND_KEYS = ("mode", "kind", "name")
"""Keys by which a section says what it is."""
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "model": "a section of keys",
    "dict": "a section of keys",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}


def explain_errors(
    error: ValidationError, place: Place, name: str, key: tuple[str | int, ...] = ()
) -> ConfigError:
    """Return one error for all refusals.

    `place(path)` says where a key was given, None if nowhere. `name` stands for the run file if
    a refusal has no place. `key`: the path of what was validated; (): the complete run file.
    """
    sentences: list[str] = []
    everything = error.errors()
    paths = {(*key, *details["loc"]) for details in everything}
    for details in everything:
        path, word = _alternative((*key, *details["loc"]))
        if _follows(details["type"], path, paths) or (word and details["type"] == "literal_error"):
            continue
        subject, what, remedy = _sentence(details, path)
        what += f" or {word}" if word else ""
        rule = what if details["type"] == "value_error" else ""
        where = _where(path, rule, place) or name
        if where.startswith("command line") and details["type"] in _ON_COMMAND_LINE:
            remedy = _ON_COMMAND_LINE[details["type"]].format(key=".".join(map(str, path)))
            if word := next((each for each in _KIND_KEYS if field_at((*path, each))), ""):
                remedy = f"did you mean {_as_kind((*path, word), str(details['input']))}?"
        text = f"{where}: {subject}{what}" + (f"; {remedy}" if remedy else "")
        if text not in sentences:
            sentences.append(text)
    return ConfigError("\n".join(sentences))


def _as_kind(path: tuple[str | int, ...], value: str) -> str:
    """Return `key=value` for a section that was given one word."""
    info = field_at(path)
    choices = get_args(info.annotation) if info is not None else ()
    if choices and value not in choices:
        value = nearest_of(value, choices) or choices[0]
    return f"{'.'.join(map(str, path))}={value}"


def explain_rule(sentence: str, place: Place, name: str) -> ConfigError:
    """Return the error for a broken rule of several sections, "... : use ..."."""
    details = InitErrorDetails(
        type="value_error", loc=(), input=None, ctx={"error": ValueError(sentence)}
    )
    return explain_errors(ValidationError.from_exception_data("", [details]), place, name)


def _alternative(path: tuple[str | int, ...]) -> tuple[tuple[str | int, ...], str]:
    """Return a key's path and the word that it takes instead of a number; "" if it takes none.

    Such a key is refused twice. The refusal as a number stands for both.
    """
    info = field_at(path[:-1]) if len(path) > 1 else None
    if info is None or field_at(path) is not None or section_of(info.annotation) is not None:
        return path, ""
    words = [w for kind in get_args(info.annotation) for w in get_args(kind) if isinstance(w, str)]
    return (path[:-1], words[0]) if words else (path, "")


def _follows(kind: str, path: tuple[str | int, ...], paths: set[tuple[str | int, ...]]) -> bool:
    """Return True if a refusal follows from another one.

    Examples are a list that lost its refused items, and a shape that a refused preset would give.
    """
    if kind == "too_short":
        return any(len(p) > len(path) and p[: len(path)] == path for p in paths)
    return kind == "missing" and path[0] == "model" and ("model", "preset") in paths


def _sentence(details: ErrorDetails, path: tuple[str | int, ...]) -> tuple[str, str, str]:
    """(key with a trailing space or nothing, what is wrong, remedy)."""
    kind, value = details["type"], details["input"]
    context: Mapping[str, Any] = details.get("ctx", {})
    key = ".".join(map(str, path))
    if kind == "extra_forbidden":
        return "", f"unknown key {key}", suggest_key(path)
    if kind == "value_error":
        what, *remedies = re.split(r": (?=use |remove )", str(context["error"]), maxsplit=1)
        first = as_path(what.split()[0])
        names_a_key = isinstance(first[0], str) and field_at((*path, *first)) is not None
        joint = "." if names_a_key else ": "
        return (f"{key}{joint}" if key else ""), what, "".join(remedies)
    if kind == "missing":
        example = find_example(path)
        remedy = f"give it, for example {example}" if example else "give it"
        if path[0] == "model":
            remedy += ", or name a model.preset, for example tiny"
        return f"{key} ", "is missing", remedy
    info = field_at(path)
    example = find_example(path)
    remedy = nearest_value(info, value) or (f"{example} would work" if example else "")
    if example in ("''", "[]"):  # would drop what the user wants
        remedy = "remove it"
    if kind in ("list_type", "tuple_type") and example == "[]" and isinstance(value, str):
        remedy = f"use [{format_value(value)}]"
    if kind == "string_pattern_mismatch" and (number := re.match(r"[0-9.]+[A-Za-z]", str(value))):
        fits = re.search(context["pattern"], number[0])
        remedy = f"use {number[0]}" if fits else remedy
    elif kind == "string_pattern_mismatch" and isinstance(value, str):
        word = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip(".-")
        remedy = f"use {word}" if word and re.search(context["pattern"], word) else remedy
    if kind == "literal_error":
        choices = _choices(context)
        meant = _VALUES_ELSEWHERE.get(str(value).lower().removeprefix("torch."))
        close = meant if meant in choices else nearest_of(str(value), choices)
        remedy = f"did you mean {close}?" if close else f"use {choices[0]}"
        return f"{key} ", what_is_wrong(details), remedy
    if kind in _BOUNDS:
        name, _ = _BOUNDS[kind]
        if not remedy and name in ("ge", "le"):  # an item of a list
            remedy = f"use {context[name]}"
        return f"{key} ", what_is_wrong(details), remedy
    if kind == "string_pattern_mismatch" and key == "task.name":  # its default is no example
        remedy = "write module:Class, for example my_task:Net"
    if kind in ("too_short", "too_long"):
        remedy = remedy or _LIST_REMEDY
    wanted = _KINDS.get(kind.split("_")[0])
    if wanted == "a section of keys":
        remedy = "write its keys indented below it"
    elif wanted == "a list" and not remedy:
        remedy = "write its items below it, each after '- ', or remove it"
    elif wanted == "text" and isinstance(value, int | float):
        remedy = f"put it in quotes: '{format_value(value)}'"
    elif wanted == "text" and not remedy:  # of a pattern: "string_pattern_mismatch"
        remedy = "write a word, in quotes if it has other characters than letters"
    elif not remedy and isinstance(path[-1], int):
        remedy = "remove it"
    return f"{key} ", what_is_wrong(details), remedy


def what_is_wrong(details: ErrorDetails) -> str:
    """Say what a schema refuses, for example "is -1, but must be at least 1"."""
    kind, context = details["type"], details.get("ctx", {})
    shown = f"is {format_value(details['input'])}"
    wanted = "a finite number" if kind == "finite_number" else _KINDS.get(kind.split("_")[0])
    if kind == "missing":
        return "is missing"
    if kind == "literal_error":
        return f"{shown}, not one of {', '.join(_choices(context))}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        limit = context[name]
        return f"{shown}, but must be {words} {limit if isinstance(limit, int) else f'{limit:g}'}"
    if kind == "string_pattern_mismatch":
        return f"{shown}, which does not match {context['pattern']}"
    if kind in ("too_short", "too_long"):
        return f"has {context.get('actual_length')} items"
    return f"{shown}, not {wanted}" if wanted else f"{shown}: {details['msg']}"


def _choices(context: Mapping[str, Any]) -> list[str]:
    expected = str(context.get("expected", ""))  # "'a', 'b' or 'c'", "1, 2 or 3"
    return [choice.strip("'") for choice in re.split(r", | or ", expected)]


def find_example(path: tuple[str | int, ...]) -> str:
    """Return a value that works: the default, or a bound of the field if there is no default."""
    info = field_at(path)
    if info is None or section_of(info.annotation) is not None:
        return ""
    default = info.get_default(call_default_factory=True, validated_data={})
    item = path[-1]
    if isinstance(default, tuple) and isinstance(item, int):  # of a list of plain values
        default = default[item] if item < len(default) else None
    if default is not PydanticUndefined and default is not None:
        return format_value(default)
    for rule in info.metadata:
        for name in ("ge", "le"):
            if getattr(rule, name, None) is not None:
                return str(getattr(rule, name))
    if get_origin(info.annotation) is Literal:
        return format_value(get_args(info.annotation)[0])
    return ""


_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def nearest_value(info: FieldInfo | None, value: object) -> str:
    """Return 'use ...' with the value nearest to the refused one; "" if none is near."""
    if info is None or isinstance(value, bool):
        return ""
    types, rules, words = _alternatives(info)
    if isinstance(value, str) and (near_word := nearest_of(value, words)):
        return f"did you mean {near_word}?"
    if bool in types:
        word = _WORDS.get(str(value).lower())
        return f"use {word}" if word else ""
    is_whole = int in types
    if not (is_whole or float in types):
        return ""
    number = value if isinstance(value, int | float) else _as_number(str(value))
    if number is None or not math.isfinite(number):
        return ""
    near = float(round(number)) if is_whole else float(number)
    bounds = {
        name: float(getattr(rule, name))
        for rule in rules
        for name in ("ge", "le", "gt", "lt")
        if getattr(rule, name, None) is not None
    }
    near = min(max(near, bounds.get("ge", -math.inf)), bounds.get("le", math.inf))
    if near <= bounds.get("gt", -math.inf) and near < 0:
        near = -near
    if near >= bounds.get("lt", math.inf) and near <= 100:
        near /= 100  # a share in percent
    inside = bounds.get("gt", -math.inf) < near < bounds.get("lt", math.inf)
    if not inside:
        return ""
    if is_whole:
        return f"use {int(min(max(near, -MAX_NUMBER), MAX_NUMBER))}"
    return f"use {int(near) if near.is_integer() and abs(near) < MAX_NUMBER else near}"


def _alternatives(info: FieldInfo) -> tuple[set[Any], list[Any], list[str]]:
    """(types, rules of numbers, words) that a field takes."""
    kinds: tuple[Any, ...] = (info.annotation,)
    if get_origin(info.annotation) in (Union, UnionType):
        kinds = get_args(info.annotation)
    types: set[Any] = set()
    rules, words = list(info.metadata), []
    for kind in kinds:
        if get_origin(kind) is Annotated:
            inner, *found = get_args(kind)
            types.add(inner)
            rules += [rule for each in found for rule in getattr(each, "metadata", [each])]
        elif get_origin(kind) is Literal:
            words += [word for word in get_args(kind) if isinstance(word, str)]
        else:
            types.add(kind)
    return types, rules, words


def _as_number(text: str) -> float | None:
    """A number as people write it: 1,000 and 20k and 2M."""
    found = re.fullmatch(r"\s*([-+]?[0-9][0-9,_ ]*(?:\.[0-9]+)?)\s*([kKmMgGbB]?)\s*", text)
    if found is None:
        plain = re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", text.strip())
        return float(plain[0]) if plain and plain[0].count(".") < 2 else None
    digits = re.sub(r"[,_ ]", "", found[1])
    return float(digits) * _UNITS.get(found[2].lower(), 1)


def suggest_key(path: tuple[str | int, ...]) -> str:
    """Return 'did you mean ...?' for an unknown key: a sibling, or a key of another section."""
    rest: tuple[str | int, ...] = ()
    written = ".".join(map(str, path))
    dotted = re.sub(r"\[(\d+)\]", r".\1", written)
    if dotted != written and field_at(as_path(dotted)) is not None:
        return f"did you mean {dotted}?"
    for length in range(1, len(path)):
        if field_at(path[:length]) is None:  # the mistake is further up: trian.steps
            path, rest = path[:length], path[length:]
            break
    last = str(path[-1])
    nested = (*path[:-1], *as_path(last))
    if "." in last and field_at(nested) is not None:  # dots are for the command line
        return f"write '{nested[-1]}:' indented below '{nested[-2]}:'"
    elsewhere = _ELSEWHERE.get(last.lower(), "")
    if not rest and elsewhere.startswith("".join(f"{part}." for part in path[:-1])) and elsewhere:
        return f"did you mean {elsewhere}?"
    if near := nearest_of(last, siblings(path)):
        meant = (*path[:-1], near)
        meant = (*meant, *rest) if field_at((*meant, *rest)) is not None else meant
        return f"did you mean {'.'.join(map(str, meant))}?"
    if not rest and path[0] == "task":  # an argument of the class
        return f"write {'.'.join(map(str, (*path[:-1], 'args', last)))}"
    last = str(rest[-1]) if rest else last
    if last.lower() in _ELSEWHERE:
        return f"did you mean {_ELSEWHERE[last.lower()]}?"
    by_name: dict[str, list[str]] = {}
    sections: dict[str, tuple[str | int, ...]] = {}
    for key, _ in all_keys():
        parts = as_path(key.replace(ITEM, "0"))
        by_name.setdefault(str(parts[-1]), []).append(".".join(map(str, parts)))
        sections.setdefault(str(parts[-2]) if len(parts) > 1 else "", parts[:-1])
    if section := sections.get(str(path[-1])):  # tokenizer.kind
        if not rest:
            return f"did you mean {'.'.join(map(str, section))}?"
        path = (*section, *rest)
        if near := nearest_of(last, siblings(path)):
            return f"did you mean {'.'.join(map(str, (*section, near)))}?"
        rest = ()
    near = nearest_of(last, by_name, cutoff=0.75)
    # A name that several sections have says little about a key that stands in another section.
    if near and (len(path) + len(rest) == 1 or len(by_name[near]) == 1):
        return f"did you mean {by_name[near][0]}?"
    known = siblings(path)
    parent = ".".join(map(str, path[:-1])) or "a run file"
    return f"{parent} has {', '.join(known)}" if known else "remove it"


def _where(path: tuple[str | int, ...], rule: str, place: Place) -> str | None:
    """Return the place of the key itself.

    A rule over several keys names them in its sentence. It is reported at the first of them that
    the user wrote. A rule of one key is reported there.
    """
    info = field_at(path)
    if info is not None and section_of(info.annotation) is None and (found := place(path)):
        return found
    for word in re.findall(r"[a-z_]+(?:\.(?:[a-z_]+|[0-9]+))*", rule):
        parts = as_path(word)
        for candidate in ((*path, *parts), parts):
            if field_at(candidate) is not None and (found := place(candidate)):
                return found
    for length in range(len(path), 0, -1):
        if found := place(path[:length]):
            return found
    return None


def format_value(value: object) -> str:
    """A value in a sentence, as YAML would write it, and never a screenful."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section of keys"
    if isinstance(value, list | tuple):
        value = list(value)
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
