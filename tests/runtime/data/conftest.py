"""One small dataset that the reading tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.config.sections.data import DataConfig
from holdfast.data.stream.dataset import Dataset
from tests.support.corpus import data_config, make, text_folder, text_source


@pytest.fixture(scope="session")
def small_config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Two sources of 3:1, some thousand tokens in several shards."""
    root: Path = tmp_path_factory.mktemp("small")
    a = text_folder(root / "a", files=12, words=120, seed=1)
    b = text_folder(root / "b", files=6, words=90, seed=2)
    return data_config(root / "set", text_source(a, "a", weight=3.0), text_source(b, "b"))


@pytest.fixture(scope="session")
def small(small_config: DataConfig) -> Dataset:
    return make(small_config)
