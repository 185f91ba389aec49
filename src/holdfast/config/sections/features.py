"""The section `data.features:` of a run file: how images and recordings become numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from holdfast.config.sections.base import Section

USED_KEYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "patches": ("image_size", "patch_size", "fit"),
    "log_mel": ("sample_rate", "mels", "seconds"),
}
"""Kind -> the keys that have a meaning for it."""

MEDIA_KINDS = ("files", "webdataset", "parquet", "arrow", "huggingface")
"""Kinds of sources that can hold images and recordings."""

FRAMES_PER_SECOND = 100
"""A frame of log-mel begins every 10 ms, and covers 25 ms."""


class FeaturesConfig(Section):
    """Numbers of each document, next to its text."""

    kind: Literal["none", "patches", "log_mel"] = "none"
    """patches: of an image; log_mel: of a recording (docs/guide/images-and-audio.md)"""
    image_size: int = Field(224, ge=1, le=4096, description="pixels of a side")
    patch_size: int = Field(16, ge=1, description="pixels of a side; divides image_size")
    fit: Literal["crop", "stretch"] = "crop"
    """crop: the shorter side becomes image_size, and the middle is taken; stretch: both sides"""
    sample_rate: int = Field(16000, ge=4000, description="samples a second that recordings have")
    mels: int = Field(80, ge=1, le=512, description="bands of the mel scale")
    seconds: float = Field(30.0, ge=0.1, le=3600)
    """a shorter recording is filled with silence; a longer one is a bad row"""

    @property
    def is_on(self) -> bool:
        return self.kind != "none"

    def broken_rules(self) -> Iterator[str]:
        if self.kind == "patches" and self.image_size % self.patch_size:
            near = max(1, self.image_size // self.patch_size) * self.patch_size
            yield (
                f"image_size {self.image_size} is no multiple of patch_size {self.patch_size}: "
                f"use image_size: {near}"
            )
        if self.kind == "log_mel" and self.sample_rate % 200:
            near = self.sample_rate // 200 * 200
            yield (
                f"sample_rate {self.sample_rate} has no whole number of samples in 5 ms: "
                f"use {near}, or another multiple of 200"
            )
        if self.seconds != round(self.seconds, 2):  # 1.1 * 100 is no whole number
            yield f"seconds {self.seconds:g} is no multiple of 0.01: use {self.seconds:.2f}"
