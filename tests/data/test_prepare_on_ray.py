"""A preparation on Ray gives the bytes of a local one; with a fake Ray, and on a real cluster."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from holdfast.data.dataset import Dataset
from holdfast.data.prepare import prepare_dataset
from holdfast.data.ray_pool import RayPool
from holdfast.errors import DataError, HoldfastError
from tests.support.corpus import data_config, make, text_folder, text_source, tree
from tests.support.fake_ray import write_fake_ray


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
HEAD = "127.0.0.2"  # not 127.0.0.1: Ray would wait for ever
STORE_BYTES = 80 * 2**20
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_health_check_initial_delay_ms": "0",
}


@contextmanager
def _cluster() -> Iterator[Any]:
    """The head of a cluster without machines; no process of it is left afterwards."""
    folder = tempfile.mkdtemp(prefix="hfray-", dir="/tmp")  # short: names of sockets are limited
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        cluster = import_module("ray.cluster_utils").Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "node_ip_address": HEAD,
                "temp_dir": folder,
            },
        )
        try:
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _machine(cluster: Any, number: int) -> Any:
    return cluster.add_node(
        num_cpus=1, object_store_memory=STORE_BYTES, node_ip_address=f"127.0.0.{30 + number}"
    )


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs: pip install 'ray[default]' pandas"
)
def test_a_machine_that_is_lost_changes_no_byte(tmp_path: Path) -> None:
    """Two machines; one is killed once a third of the pieces are tokenised, another one comes."""
    source = text_folder(tmp_path / "in", files=24, words=20_000)
    local = make(data_config(tmp_path / "local", text_source(source)))
    with _cluster() as cluster:
        first, _ = _machine(cluster, 0), _machine(cluster, 1)
        lost: list[int] = []

        def progress(what: str, done: int, total: int) -> None:
            if what == "tokenising" and done >= total // 3 and not lost:
                lost.append(done)
                cluster.remove_node(first, allow_graceful=False)
                _machine(cluster, 2)

        config = data_config(tmp_path / "ray", text_source(source))
        made = prepare_dataset(
            config,
            lambda text: None,
            progress,
            pool=lambda processes: RayPool(str(cluster.address)),
        )
    assert lost
    assert tree(made.folder) == tree(local.folder)
