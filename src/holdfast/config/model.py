"""`model:` the decoder's shape: a preset, and any number of it overridden."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from holdfast.config.base import Section
from holdfast.config.presets import PRESETS, nearest_preset


class RopeScaling(Section):
    """Llama 3's frequency scaling (Llama 3.1 model card; `rope_type: llama3` in Hugging Face)."""

    factor: float = Field(8.0, gt=0, description="by which long waves are slowed")
    low_freq_factor: float = Field(
        1.0, gt=0, description="a wave of which fewer fit into the original context is long"
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description="a wave of which more fit is short, and kept"
    )
    original_max_position: int = Field(
        8192, gt=0, description="context that the model was first trained with"
    )

    @model_validator(mode="after")
    def _band(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be above low_freq_factor "
                f"{self.low_freq_factor}: use {4 * self.low_freq_factor}"
            )
        return self


class ModelConfig(Section):
    """One decoder. `vocab_size` 0 means: the prepared dataset's (planned)."""

    preset: str | None = Field("tiny", description="a shape of the table below; null: none")
    family: Literal["llama", "qwen3"] = Field("llama", description="which export it maps to")
    layers: int = Field(ge=1, description="blocks")
    dim: int = Field(ge=1, description="model dim D")
    heads: int = Field(ge=1, description="query heads H")
    kv_heads: int = Field(ge=1, description="key/value heads K, a divisor of heads")
    head_dim: int = Field(0, ge=0, description="0: dim / heads")
    ffn_dim: int = Field(ge=1, description="SwiGLU's inner dim")
    vocab_size: int = Field(0, ge=0, description="0: the dataset's (planned)")
    vocab_multiple: int = Field(
        1, ge=1, description="rows of embedding and head are rounded up to a multiple of it"
    )
    max_position: int = Field(8192, ge=1, description="longest sequence")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = None
    norm_eps: float = Field(1e-5, gt=0, description="of RMSNorm")
    qk_norm: bool = Field(False, description="RMSNorm of queries and keys, as in Qwen 3")
    tied_embeddings: bool = Field(False, description="the head is the embedding table")
    init_std: float = Field(0.02, gt=0, description="of matrices at the start")

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        name = value.get("preset", "tiny")
        if name is None or not isinstance(name, str):
            return value
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is unknown; nearest: {nearest_preset(str(name))}")
        return {**PRESETS[name], **value, "preset": name}

    @model_validator(mode="after")
    def _divides(self) -> ModelConfig:
        if self.heads % self.kv_heads:
            good = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            raise ValueError(
                f"kv_heads {self.kv_heads} does not divide heads {self.heads}: use one of {good}"
            )
        if self.head_dim == 0 and self.dim % self.heads:
            nearest = self.dim // self.heads * self.heads or self.heads
            raise ValueError(
                f"heads {self.heads} does not divide dim {self.dim}: use dim {nearest}"
            )
        if self.head_size % 2:
            raise ValueError(
                f"the head dim {self.head_size} is odd and rotary embedding turns pairs: "
                f"use head_dim {self.head_size + 1}"
            )
        return self

    @property
    def head_size(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head.

        Rows beyond `vocab_size` are no tokens. They are zero and stay zero, so the model computes
        the same with and without them.
        """
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
