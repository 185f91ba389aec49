"""The section `objective.reference`: the model that a preference loss compares with, or the
teacher of a distillation."""

from __future__ import annotations

from pydantic import Field

from holdfast.config.sections.base import InPlace, Section


class ReferenceConfig(Section):
    """A frozen model, of which only log-probabilities are used. They are computed once, and kept
    next to the dataset; those of completions are computed when a step needs them."""

    model: InPlace[str] = ""
    """folder in Hugging Face form; empty: the weights that the run begins with. distill: the
    teacher, of any shape, with the vocabulary of the data"""
    checksum: InPlace[str] = ""
    """of its weights; other ones are refused (planned)"""
    parameters: InPlace[int] = Field(0, ge=0)
    """weights of the teacher that the trainers keep, in a run with rollout (planned)"""
    key: InPlace[str] = ""
    """folder with the log-probabilities, below `reference` of the dataset (planned)"""
