"""Preparing on a disk that really fills up (a tmpfs in a namespace of its own), and on Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stages.ray_pool import RayPool
from holdfast.data.stream.dataset import Dataset
from holdfast.errors import DataError, HoldfastError
from tests.support.corpus import data_config, make, text_folder, text_source, tree
from tests.support.ray_cluster import needs_ray, ray_cluster
from tests.support.small_disk import has_namespaces, run_on_small_disk

SCRIPT = """
import json, os, subprocess, sys
from pathlib import Path
from holdfast.config.sections.data import DataConfig
from holdfast.data.stream.dataset import exists
from holdfast.data.prepare.prepare import prepare_dataset as prepare
from holdfast.data.stream.verify import find_problems
from holdfast.errors import UserError

config = DataConfig.model_validate_json(sys.argv[1])
disk, out = Path(sys.argv[2]), {"failed": []}
(disk / "set").mkdir()
def attempt():
    said = []
    try:
        out["version"] = prepare(config, say=said.append).version
    except UserError as error:
        out["failed"].append([type(error).__name__, str(error)])
    return said
def remount(options):
    subprocess.run(["mount", "-o", "remount," + options, str(disk)], check=True)

remount("ro")
attempt()
remount("rw,size=SIZE")
attempt()
out["kept"] = len(list((disk / "set" / ".prepare" / "tokens").glob("0*")))
out["exists"] = exists(config.folder)
attempt()  # still full: the same sentence again
remount("size=64m")
out["said"] = attempt()
out["problems"] = find_problems(config.folder)
print(json.dumps(out))
"""


@pytest.mark.skipif(not has_namespaces(), reason="no user and mount namespaces here")
@pytest.mark.parametrize(("size", "stage"), [("500k", "tokens"), ("1400k", "shards")])
def test_full_disk_then_room(tmp_path: Path, size: str, stage: str) -> None:
    sources = [
        text_source(text_folder(tmp_path / f"in{i}", files=10, words=4000, seed=i), f"t{i}")
        for i in range(4)
    ]
    disk = tmp_path / "disk"
    disk.mkdir()
    config = data_config(disk / "set", *sources, processes=2)
    script = SCRIPT.replace("SIZE", size)
    out = json.loads(
        run_on_small_disk(disk, "64m", "-c", script, config.model_dump_json(), str(disk))
    )
    kinds = [kind for kind, _ in out["failed"]]
    assert kinds == ["DataError", "OutOfSpaceError", "OutOfSpaceError"]
    assert "Read-only file system" in out["failed"][0][1]
    for _, sentence in out["failed"][1:]:
        assert "the disk is full" in sentence
        assert "make room" in sentence
        assert str(disk / "set") in sentence
    assert out["exists"] is False
    assert 0 < out["kept"] <= 4
    assert (out["kept"] == 4) == (stage == "shards")
    if stage == "tokens":
        assert any("were done before" in line for line in out["said"])
    assert out["problems"] == []
    assert out["version"] == make(data_config(tmp_path / "elsewhere", *sources)).version


# --- on Ray ---------------------------------------------------------------------------------------
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


# --- a package `ray` that does tasks in the process that asks -------------------------------------
_RAY = """
import os, time
from ray import data

if os.environ.get("FAKE_RAY") == "absent":
    raise ImportError("No module named 'ray'")
_held = []

def init(**given):
    if os.environ.get("FAKE_RAY") == "silent":
        time.sleep(3600)
    if os.environ.get("FAKE_RAY") == "refuses":
        raise ConnectionError("Version mismatch")

def put(value):
    _held.append(value)
    return len(_held) - 1

def get(reference):
    return _held[reference]
"""
_DATA = """
import os
import numpy as np

class DataContext:
    @staticmethod
    def get_current():
        return DataContext()

class from_items:
    def __init__(self, rows, override_num_blocks):
        self.rows, self.perform = rows, None

    def map_batches(self, perform, **given):
        self.perform = perform
        return self

    def iter_rows(self):
        for row in reversed(self.rows):
            if os.environ.get("FAKE_RAY") == "dies" and row["number"] == 0:
                os._exit(1)
            done = self.perform({name: np.array([value]) for name, value in row.items()})
            yield {name: values[0] for name, values in done.items()}
"""


def write_fake_ray(folder: Path) -> Path:
    """Write the package into a folder for PYTHONPATH. FAKE_RAY in the environment says what fails:
    absent, silent, refuses or dies."""
    package = folder / "ray"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_RAY)
    (package / "data.py").write_text(_DATA)
    return folder
