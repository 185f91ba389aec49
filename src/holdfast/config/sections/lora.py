"""The `lora` section: adapters of a frozen base model, which are all that is trained and kept."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from holdfast.config.sections.base import InPlace, Section
from holdfast.errors import ConfigError

ALL_LINEAR = "all-linear"
MAX_RANK = 2**16
NF4, NF4_BLOCK = "nf4", 64
"""A kind of weights in 4 bits, and how many share a scale."""


class LoraConfig(Section):
    """Adapters (Hu et al. 2021): `W x + alpha / rank * B A dropout(x)`, with `W` frozen."""

    rank: int = Field(0, ge=0, le=MAX_RANK)
    """rows of A; 0: no adapters, the full model is trained"""
    alpha: float = Field(16.0, gt=0, description="alpha / rank is the scale of what B A adds")
    targets: tuple[str, ...] = Field((ALL_LINEAR,), min_length=1)
    """linear layers with an adapter: names (`q_proj`), patterns (`layers.0.*`), or `all-linear`,
    which leaves out the head"""
    dropout: float = Field(0.0, ge=0, lt=1, description="of the input of A")
    name: InPlace[str] = Field("default", pattern=r"^[A-Za-z0-9_-]+$")
    """the adapter's name in an export"""
    base: InPlace[str] = ""
    """folder of the frozen weights; empty: that of model.from"""
    base_dtype: Literal["compute", "nf4"] = "compute"
    """of the frozen weights. compute: that of train.precision. nf4: matrices of blocks in 4 bits,
    with a scale for 64 weights (QLoRA, Dettmers et al. 2023)"""
    base_checksum: str = ""
    """of the frozen weights' files; another one is refused (planned)"""
    adapter: InPlace[str] = Field("", description="folder that lora.from names (planned)")
    adapter_checksum: str = ""
    """of the weights that the adapters begin with (planned)"""

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def scale(self) -> float:
        """The factor of what an adapter adds."""
        return self.alpha / self.rank


def refuse_lora(lora: LoraConfig, what: str, remedy: str) -> None:
    """Raises ConfigError for a run of adapters. what: the subject of the sentence."""
    if lora.rank:
        raise ConfigError(
            f"{what} is for all weights of a model, and this run trains adapters alone",
            where="lora",
            remedy=remedy,
        )
