"""A preparation on Ray gives the bytes of a local one; with a fake Ray, and on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stages.ray_pool import RayPool
from holdfast.data.stream.dataset import Dataset
from holdfast.errors import DataError, HoldfastError
from tests.support.corpus import data_config, make, text_folder, text_source, tree
from tests.support.fake_ray import write_fake_ray
from tests.support.ray_cluster import needs_ray, ray_cluster


@pytest.fixture(name="fake")
def _fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(write_fake_ray(tmp_path / "packages")))


def _prepare(folder: Path, source: Path, address: str = "") -> Dataset:
    config = data_config(folder, text_source(source))
    return prepare_dataset(config, lambda text: None, pool=lambda processes: RayPool(address))


@pytest.mark.usefixtures("fake")
def test_a_dataset_made_on_ray_has_the_bytes_of_a_local_one(tmp_path: Path) -> None:
    source = text_folder(tmp_path / "in", files=5, words=40_000)
    local = make(data_config(tmp_path / "local", text_source(source)))
    assert tree(_prepare(tmp_path / "ray", source).folder) == tree(local.folder)


@pytest.mark.usefixtures("fake")
def test_a_preparation_that_lost_its_cluster_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = text_folder(tmp_path / "in", files=5, words=40_000)
    monkeypatch.setenv("FAKE_RAY", "dies")
    with pytest.raises(HoldfastError, match=r"has ended .* the same command resumes"):
        _prepare(tmp_path / "ray", source)
    done = list((tmp_path / "ray" / ".prepare" / "scan").iterdir())
    assert done
    monkeypatch.delenv("FAKE_RAY")
    local = make(data_config(tmp_path / "local", text_source(source)))
    assert tree(_prepare(tmp_path / "ray", source).folder) == tree(local.folder)


@pytest.mark.usefixtures("fake")
def test_a_file_that_cannot_be_read_is_named_as_it_is_locally(tmp_path: Path) -> None:
    source = text_folder(tmp_path / "in", files=3, words=20)
    (source / "001.txt").write_bytes(b"\xff\xfe bad")
    sentences = []
    for prepare in (make, lambda config: _prepare(tmp_path / "ray", source)):
        with pytest.raises(DataError) as caught:
            prepare(data_config(tmp_path / "local", text_source(source)))
        sentences.append(str(caught.value))
    assert sentences[0] == sentences[1]
    assert "001.txt" in sentences[0]


# --- a real cluster -------------------------------------------------------------------------
@pytest.mark.slow
@needs_ray
def test_a_machine_that_is_lost_changes_no_byte(tmp_path: Path) -> None:
    """Two machines; one is killed once a third of the pieces are tokenised, another one comes."""
    source = text_folder(tmp_path / "in", files=24, words=20_000)
    local = make(data_config(tmp_path / "local", text_source(source)))
    with ray_cluster("a", "b") as cluster:
        lost: list[int] = []

        def progress(what: str, done: int, total: int) -> None:
            if what == "tokenising" and done >= total // 3 and not lost:
                lost.append(done)
                cluster.lose("a")
                cluster.add("c")

        config = data_config(tmp_path / "ray", text_source(source))
        made = prepare_dataset(
            config, lambda text: None, progress, pool=lambda processes: RayPool(cluster.address)
        )
    assert lost
    assert tree(made.folder) == tree(local.folder)
