"""Runs on a dataset in a bucket: nodes with caches of their own, and a bucket that goes away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import s3
from tests.support.commands import apart, within, write_run_file
from tests.support.nodes import losses_of_one_worker, nodes_of
from tests.support.ranks import DEADLINE_S
from tests.support.s3 import Fault

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("s3_credentials")]
STEPS = 600
SETTINGS = (f"train.steps={STEPS}", "data.shard_tokens=1024", "layout.workers=2")


def test_two_nodes_train_on_one_bucket_and_outlast_it(tmp_path: Path) -> None:
    """One node begins and one joins, each with an empty cache. Once each has all, the bucket stops
    to answer."""
    run_file = write_run_file(tmp_path, documents=60)
    wanted = losses_of_one_worker(run_file, *SETTINGS[:2])
    with s3.proxied() as proxy:
        location = s3.location(proxy.address, retries=0, timeout=5)
        settings = (*SETTINGS, f"data.folder={location}", "checkpoint.every_steps=5")
        caches = {name: f"data.cache={tmp_path / name}" for name in ("first", "second", "third")}
        within("data", "prepare", run_file, *settings[1:-1], caches["third"]).succeeds()
        shards = len(list((tmp_path / "third").glob("*/shards/train-*.bin")))
        with nodes_of(run_file, tmp_path / "run", *settings) as nodes:
            nodes.start("first", settings=[caches["first"]])
            nodes.wait_step(1)
            nodes.join("second", settings=[caches["second"]])
            nodes.wait_step(3, nodes={"first", "second"})
            for name in ("first", "second"):
                folder = tmp_path / name
                nodes.wait_until(
                    lambda folder=folder: len(list(folder.glob("*/shards/train-*.bin"))) == shards,
                    f"{name} has not all shards",
                )
            proxy.rule = lambda request: Fault(503)
            assert nodes.end() == {"first": 0, "second": 0}, nodes.said
            assert nodes.losses() == wanted
        proxy.rule = lambda request: None
        apart("data", "audit", tmp_path / "run", deadline=DEADLINE_S).succeeds()


def test_a_shard_that_is_damaged_in_the_bucket_ends_the_run_with_one_sentence(
    tmp_path: Path,
) -> None:
    run_file = write_run_file(tmp_path, documents=60)
    address = tmp_path / "there"
    settings = (*SETTINGS, f"data.folder=file://{address}", f"data.cache={tmp_path / 'cache'}")
    assert within("data", "prepare", run_file, *settings).code == 0
    path = sorted(address.glob("shards/train-*.bin"))[1]
    path.write_bytes(bytes(path.stat().st_size))
    shutil.rmtree(tmp_path / "cache")
    done = apart("train", run_file, *settings, deadline=DEADLINE_S)
    done.refuses_last(path.name, "remove everything at this address")
