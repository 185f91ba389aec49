"""`config.json` -> ModelConfig and back, by the tables of `architectures.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from holdfast.config.huggingface.architectures import (
    ARCHITECTURES,
    BORDERS,
    BY_TYPE,
    SCORED,
    Architecture,
)
from holdfast.config.huggingface.rules import SCALING_KEYS, NotSupportedError
from holdfast.config.sections.model import ModelConfig
from holdfast.errors import ModelFolderError

FREE_KEYS = (
    *("preset", "family", "vocab_multiple", "max_position", "init_std"),
    *("weights", "weights_checksum", "score_head"),
)
"""Keys of `model:` that do not decide which numbers the same weights compute."""

EXPERT_SHAPE = (
    "count",
    "top_k",
    "width",
    "normalise",
    "scores",
    "scale",
    "shared",
    "first",
    "choice_bias",
)
"""Keys of `model.experts:` that do."""

OWN_CODE = "train it by its own code with model.code: transformers"


def shape_of(model: ModelConfig) -> dict[str, Any]:
    """The keys that decide which numbers the same weights compute. What two ways of writing mean
    alike has one value here."""
    dumped = model.model_dump(mode="json")
    shape = {key: value for key, value in dumped.items() if key not in FREE_KEYS}
    shape["head_dim"] = model.head_size
    shape["attention_scale"] = model.attention_scale or model.head_size**-0.5
    shape["window_layers"] = list(model.windowed)
    scaling = model.rope_scaling
    if scaling is not None:
        names = SCALING_KEYS[scaling.type].values()
        shape["rope_scaling"] = {name: getattr(scaling, name) for name in ("type", *names)}
    experts = model.experts
    del shape["experts"]
    shape |= {f"experts.{key}": experts and getattr(experts, key) for key in EXPERT_SHAPE}
    if experts is not None:
        shape["experts.width"] = model.inner_dim
        if not experts.first:
            shape["ffn_dim"] = model.inner_dim
    same = model.window_rope_theta == model.rope_theta and scaling is None
    if same or not model.windowed:
        shape["window_rope_theta"] = 0.0
    return shape


def shape_differences(one: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Key of `model:` -> its values in the two, of keys that differ."""
    a, b = shape_of(one), shape_of(other)

    def is_alike(a: Any, b: Any) -> bool:
        is_float = isinstance(a, float) and isinstance(b, float | int)
        return math.isclose(a, b, rel_tol=1e-9) if is_float else bool(a == b)

    return {key: (a[key], b[key]) for key in a if not is_alike(a[key], b[key])}


def differences_in(architecture: Architecture, model: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """What the architecture cannot express of `model`: key -> (the model's value, the one that it
    would become)."""
    theirs = _write(architecture, model)
    values: dict[str, Any] = dict(architecture.always)
    for rule in architecture.rules:
        try:
            values |= rule.read(theirs)
        except (NotSupportedError, KeyError):  # a key that the model has no value for
            continue  # its keys stay at their defaults, and differ
    try:
        became = ModelConfig.model_validate({"preset": None, **values})
    except ValidationError:
        return {"family": (model.family, architecture.family)}
    kept = {"vocab_multiple": model.vocab_multiple, "family": model.family}
    return shape_differences(model, became.model_copy(update=kept))


def find_architecture(model: ModelConfig) -> Architecture | None:
    """The architecture to export as: the model's family, or another one with the same shape."""
    rows = (ARCHITECTURES[model.family], *ARCHITECTURES.values())
    alike = (row for row in rows if not differences_in(row, model))
    return next((row for row in alike if row.scored_name or model.has_language_head), None)


def explain_no_architecture(model: ModelConfig) -> str | None:
    """One sentence if no architecture has the model's shape: "... : use ...". None if one has."""
    if find_architecture(model) is not None:
        return None
    rows = (ARCHITECTURES[model.family], *ARCHITECTURES.values())
    if any(not differences_in(row, model) for row in rows):
        return (
            f"model.family {model.family} has no model with a score head in transformers, so "
            "nothing could load an export: use the model of another family"
        )
    nearest = min(rows, key=lambda row: len(differences_in(row, model)))
    differences = differences_in(nearest, model)
    named = ", ".join(f"{key} {_word(had)}" for key, (had, _) in differences.items())
    named_in_full = {key: f"model.{key}" if "." in key else key for key in differences}
    instead = ", ".join(f"{named_in_full[k]} {_word(has)}" for k, (_, has) in differences.items())
    return (
        f"model.{named} is in no architecture of Hugging Face with the model's other keys, so "
        f"nothing could load an export (nearest: {nearest.family}): use {instead}"
    )


def _word(value: Any) -> str:
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(str(value), str(value))


def to_their_config(model: ModelConfig) -> dict[str, Any]:
    """config.json without token ids. Raises ModelFolderError if no architecture has this shape."""
    architecture = find_architecture(model)
    if architecture is None:
        sentence, _, remedy = str(explain_no_architecture(model)).partition(": use ")
        raise ModelFolderError(sentence, remedy=f"use {remedy}")
    scored: dict[str, Any] = {}
    if not model.has_language_head:
        scored = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {
        "architectures": [architecture.scored_name if scored else architecture.class_name],
        **scored,
        "model_type": architecture.their_type,
        **_write(architecture, model),
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def _write(architecture: Architecture, model: ModelConfig) -> dict[str, Any]:
    theirs: dict[str, Any] = {}
    for rule in architecture.rules:
        theirs |= rule.write(model)
    for key, allowed in architecture.all_fixed.items():
        if allowed[0] is not None:
            theirs[key] = allowed[0]
    return theirs


def from_their_config(config: Mapping[str, Any], where: str) -> ModelConfig:
    """config.json -> ModelConfig. Raises ModelFolderError for what the decoder cannot compute, and
    names every key of it."""
    kind = config.get("model_type")
    architecture = BY_TYPE.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        raise ModelFolderError(
            f"model_type {kind!r} is not supported",
            where=where,
            remedy=f"{OWN_CODE}, or use one of " + ", ".join(BY_TYPE),
        )
    # A sentence for each key with a value that is not allowed, or that is not understood.
    border = BORDERS[architecture.their_type]
    unread = border.unread(config)
    listed = {key: value for key, value in config.items() if key not in unread}
    refused = [f"{clause} is not supported" for clause in border.problems(listed)]
    refused += [
        f"key {key} is not understood, and may change what {architecture.their_type} computes"
        for key in unread
    ]
    values: dict[str, Any] = {"preset": None, "family": architecture.family}
    values |= architecture.always
    if any(str(name).endswith(SCORED) for name in config.get("architectures") or ()):
        values["score_head"] = "only"
        labels = config.get("num_labels", len(config.get("id2label") or (0, 0)))
        if labels != 1:
            refused.append(f"{labels} labels are not supported, but one score is")
    remedies: list[str] = []
    for rule in architecture.rules:
        try:
            values |= rule.read(config)
        except NotSupportedError as error:
            refused.append(error.message)
            remedies += [error.remedy] if error.remedy else []
        except KeyError as error:
            refused.append(f"key {error} is missing")
        except (TypeError, ValueError, OverflowError) as error:
            refused.append(f"{', '.join(rule.keys)}: not what they should be ({error})")
    if refused:
        remedies += [OWN_CODE] if _fits_own_code(config, refused) else []
        raise ModelFolderError("; ".join(refused), where=where, remedy="; ".join(remedies) or None)
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        found = []
        for details in error.errors():
            place = ".".join(str(part) for part in details["loc"])
            found.append(f"{place} {details['msg'].removeprefix('Value error, ')}".strip())
        raise ModelFolderError("; ".join(found), where=where) from error


def _fits_own_code(config: Mapping[str, Any], refused: list[str]) -> bool:
    """Return True if only the decoder lacks something. A key that is missing or wrong, and
    weights in few bits, are no better for the model's own code."""
    lacking = ("is not supported", "is not understood")
    return not config.get("quantization_config") and all(
        any(words in sentence for words in lacking) for sentence in refused
    )
