"""A dataset with an address: prepared once, fetched by need, checked, and read without a bucket."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.config.sections.data import DataConfig
from holdfast.data.prepare import remote_prepare
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stream import node_cache
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.dataset_location import RemoteDataset, open_dataset
from holdfast.data.stream.verify import check_dataset, find_problems
from holdfast.errors import DataError, StoreError
from tests.support import s3
from tests.support.corpus import batches, data_config, make, text_folder, text_source, tree
from tests.support.ranks import wait_until
from tests.support.s3 import Fault, Proxy

pytestmark = pytest.mark.usefixtures("s3_credentials")
STEPS = range(1, 25)


@pytest.fixture(name="source")
def _source(tmp_path: Path) -> Path:
    return text_folder(tmp_path / "in", files=12, words=900)


@pytest.fixture(name="local")
def _local(source: Path, tmp_path: Path) -> Dataset:
    """The same dataset in a folder."""
    return make(_config(source, str(tmp_path / "local"), tmp_path / "unused"))


def _config(source: Path, location: str, cache: Path, **more: object) -> DataConfig:
    sources = text_source(source)
    config = data_config(Path("unused"), sources, shard_tokens=1024, cache=str(cache), **more)
    return config.model_copy(update={"folder": location})


def _hashes(dataset: Dataset, config: DataConfig) -> list[str]:
    found = batches(dataset, config, steps=len(STEPS))
    return [str(found.microbatch(step, 0).entries[0]["hash"]) for step in STEPS]


def _shards(root: Path) -> list[Path]:
    return [path for path in root.glob("*/shards/*") if path.is_file()]


def _folder_address(folder: Path) -> str:
    return f"file://{folder}"


# --- preparing ------------------------------------------------------------------------------
def test_the_address_has_the_bytes_of_a_prepared_folder(
    source: Path, local: Dataset, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    config = _config(source, _folder_address(there), tmp_path / "cache")
    dataset = make(config)
    assert tree(there) == tree(local.folder)
    assert (dataset.version, dataset.location) == (local.version, config.folder)
    assert _hashes(dataset, config) == _hashes(local, config)
    assert not list((tmp_path / "cache" / "prepare").glob("*/shards"))


def test_of_nodes_that_start_together_one_prepares(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_prepare, "EXPIRY_S", 10.0)  # looked at sixty times within it
    with s3.proxied() as proxy:
        location = s3.location(proxy.address)
        found: list[Dataset] = []

        def start(node: str) -> None:
            config = _config(source, location, tmp_path / node)
            found.append(prepare_dataset(config, say=lambda text: None, wait=True))

        threads = [threading.Thread(target=start, args=(node,)) for node in ("a", "b", "c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({dataset.version for dataset in found}) == 1
        puts = [r.key for r in proxy.log if r.method == "PUT" and "/shards/" in r.key]
        assert len(puts) == len(set(puts)) == len(found[0].files())
        claims = RemoteDataset(location, _config(source, location, tmp_path)).store.list("prep")
        assert claims == []


def test_a_node_takes_over_from_one_that_died(
    source: Path, local: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, said = tmp_path / "there", list[str]()
    (there / "preparing").mkdir(parents=True)
    (there / "preparing" / "00000007").write_text('{"node": "other", "by": "dead"}')
    (there / "shards").mkdir()
    (there / "shards" / "train-000-00000.bin").write_bytes(b"of another preparation")
    monkeypatch.setattr(remote_prepare, "EXPIRY_S", 0.3)
    config = _config(source, _folder_address(there), tmp_path / "cache")
    dataset = prepare_dataset(config, say=said.append)
    assert dataset.version == local.version
    assert tree(there) == tree(local.folder)
    assert any("another node (dead) is preparing" in line for line in said)


def test_an_upload_that_was_cut_short_resumes(source: Path, local: Dataset, tmp_path: Path) -> None:
    with s3.proxied() as proxy:
        location = s3.location(proxy.address, retries=0, timeout=5)
        config = _config(source, location, tmp_path / "cache")
        proxy.rule = lambda request: (
            Fault(500) if request.method == "PUT" and len(_puts(proxy)) > 5 else None
        )
        with pytest.raises(StoreError, match="answers with an error"):
            make(config)
        done = set(_puts(proxy)[:5])
        proxy.rule = lambda request: None
        del proxy.log[:]
        said: list[str] = []
        assert prepare_dataset(config, say=said.append).version == local.version
        assert not any("waiting" in line for line in said), "its own claim"
        assert "tokenising" not in " ".join(said)
        reads = [r.key for r in proxy.log if r.method == "GET"]
        assert {key for key in done if key in reads} == done


def _puts(proxy: Proxy) -> list[str]:
    return [r.key for r in proxy.log if r.method == "PUT" and "/shards/" in r.key]


# --- fetching -------------------------------------------------------------------------------
def test_a_node_fetches_each_file_once_and_keeps_it(
    source: Path, local: Dataset, tmp_path: Path
) -> None:
    """Several readers at once; then a later process, of which the bucket sees no shard."""
    with s3.proxied() as proxy:
        location = s3.location(proxy.address)
        make(_config(source, location, tmp_path / "first"))
        config = _config(source, location, tmp_path / "second")
        del proxy.log[:]
        wanted = _hashes(local, config)
        found: list[list[str]] = []
        readers = [
            threading.Thread(
                target=lambda: found.append(_hashes(open_dataset(location, config), config))
            )
            for _ in range(4)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert found == [wanted] * 4
        gets = [r.key for r in proxy.log if r.method == "GET" and "/shards/" in r.key]
        assert gets
        assert len(gets) == len(set(gets))
        assert not any(key.endswith(".idx") for key in gets), "no batch needs them"
        wait_until(lambda: len(_shards(tmp_path / "second")) >= _token_files(local))
        proxy.rule = lambda request: Fault(503)
        assert _hashes(open_dataset(location, config), config) == wanted
        with pytest.raises(StoreError, match="answers with an error"):
            open_dataset(f"{location}&retries=0&timeout=5", config, ask=True)


def _token_files(dataset: Dataset) -> int:
    return sum(file.path.endswith(".bin") for file in dataset.files())


def test_shards_come_ahead_of_need_and_training_outlasts_the_bucket(
    source: Path, local: Dataset, tmp_path: Path
) -> None:
    """Before the first step the node fetches what all need; then the bucket is away for good."""
    with s3.proxied() as proxy:
        location = s3.location(proxy.address, retries=0, timeout=5)
        make(_config(source, location, tmp_path / "first"))
        config = _config(source, location, tmp_path / "second")
        found = batches(open_dataset(location, config), config, steps=len(STEPS))
        failures = iter(range(6))  # first the bucket fails a few times
        proxy.rule = lambda request: Fault(503) if next(failures, None) is not None else None
        found.fetch_ahead(1)
        wait_until(lambda: len(_shards(tmp_path / "second")) == _token_files(local))
        proxy.rule = lambda request: Fault(503)
        other = batches(local, config, steps=len(STEPS))
        for step in STEPS:
            assert found.microbatch(step, 1).entries == other.microbatch(step, 1).entries
        assert len(found.validation(8).microbatches) == len(other.validation(8).microbatches)


def test_a_full_cache_gives_way_and_the_batches_stay_right(
    source: Path, local: Dataset, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    shutil.copytree(local.folder, there)
    every = sum(file.bytes for file in local.files())
    limit = every // 3
    config = _config(source, _folder_address(there), tmp_path / "cache", cache_gb=limit / 10**9)
    dataset = open_dataset(config.folder, config)
    assert _hashes(dataset, config) == _hashes(local, config)
    kept = sum(path.stat().st_size for path in _shards(tmp_path / "cache"))
    largest = max(file.bytes for file in local.files())
    assert 0 < kept <= limit + 4 * largest  # threads that fetch at the same time


# --- damage ---------------------------------------------------------------------------------
def test_a_damaged_file_in_the_cache_is_fetched_again(
    source: Path, local: Dataset, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    shutil.copytree(local.folder, there)
    config = _config(source, _folder_address(there), tmp_path / "cache")
    wanted = _hashes(local, config)
    assert _hashes(open_dataset(config.folder, config), config) == wanted
    wait_until(lambda: len(_shards(tmp_path / "cache")) == _token_files(local))
    for path in _shards(tmp_path / "cache"):
        path.write_bytes(bytes(path.stat().st_size))
    for name in ("train-000-00000.bin", "train-000-00001.bin"):  # of a process that was killed
        next((tmp_path / "cache").glob("*/.fetch")).joinpath(name).write_bytes(b"half" * 2000)
    shortest = min(_shards(tmp_path / "cache"))
    shortest.write_bytes(b"cut")
    dataset = open_dataset(config.folder, config, ask=True)
    check_dataset(dataset)  # as each start does
    assert _hashes(dataset, config) == wanted
    assert find_problems(dataset) == []


@pytest.mark.parametrize("damage", ["changed", "cut", "removed"])
def test_a_damaged_shard_at_the_address_is_one_sentence(
    damage: str, source: Path, local: Dataset, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    shutil.copytree(local.folder, there)
    path = there / local.files()[0].path
    content = path.read_bytes()
    acts: dict[str, Callable[[], object]] = {
        "changed": lambda: path.write_bytes(bytes(len(content))),
        "cut": lambda: path.write_bytes(content[:-2]),
        "removed": path.unlink,
    }
    acts[damage]()
    config = _config(source, _folder_address(there), tmp_path / "cache")
    dataset = open_dataset(config.folder, config)
    with pytest.raises(DataError, match=r"train-000-00000\.bin") as caught:
        _hashes(dataset, config)
    assert "\n" not in str(caught.value)
    assert len(find_problems(dataset)) == 1


def test_an_address_that_does_not_answer_is_asked_again_and_then_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3.proxied() as proxy:
        location = s3.location(proxy.address, retries=0, timeout=5)
        make(_config(source, location, tmp_path / "first"))
        config = _config(source, location, tmp_path / "second")
        dataset = open_dataset(location, config)
        del proxy.log[:]
        proxy.rule = lambda request: Fault(503)
        monkeypatch.setattr(node_cache, "PATIENCE_S", 0.2)
        with pytest.raises(StoreError, match="answers with an error"):
            dataset.path(dataset.files()[0])
        assert len(proxy.log) > 1


def test_a_long_wait_for_a_shard_is_said_once_and_so_is_its_end(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3.proxied() as proxy:
        location = s3.location(proxy.address, retries=0, timeout=5)
        make(_config(source, location, tmp_path / "first"))
        dataset = open_dataset(location, _config(source, location, tmp_path / "second"))
        assert dataset.cache is not None
        said: list[tuple[str, bool]] = []

        def on_wait(key: str, reason: str) -> None:
            said.append((key, bool(reason)))

        dataset.cache.on_wait = on_wait
        proxy.rule = lambda request: Fault(503) if not said or len(proxy.log) < 5 else None
        del proxy.log[:]
        monkeypatch.setattr(node_cache, "SAY_AFTER_S", 0.0)
        monkeypatch.setattr(node_cache, "MAX_PAUSE_S", 0.01)
        key = dataset.files()[0].path
        dataset.path(dataset.files()[0])
        assert len(proxy.log) >= 5
        assert said == [(key, True), (key, False)]


# --- addresses ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("s3://user:word@bucket/x", "must hold no secret"),
        ("s3://bucket/x?secret_key=abc", "must hold no secret"),
        ("s3://bucket/x?seal=env", "a dataset is not sealed"),
        ("ftp://bucket/x", "no kind of run store"),
    ],
)
def test_an_address_that_cannot_be_right_is_refused(
    location: str, words: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises((StoreError, DataError), match=words) as caught:
        make(_config(source, location, tmp_path))
    assert "word" not in str(caught.value).replace("passwords", "")
    assert "abc" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_one_sentence(source: Path, tmp_path: Path) -> None:
    location = s3.location(s3.server()).replace(f"//{s3.BUCKET}/", "//nothing/")
    with pytest.raises(StoreError, match="there is no such bucket"):
        make(_config(source, location, tmp_path))


def test_a_batch_of_a_folder_starts_no_threads(local: Dataset, tmp_path: Path) -> None:
    config = _config(tmp_path, str(local.folder), tmp_path / "cache")
    before = set(threading.enumerate())  # some of which end by themselves
    found: Batches = batches(local, config)
    found.microbatch(1, 0)
    assert set(threading.enumerate()) <= before
    assert not (tmp_path / "cache").exists()
