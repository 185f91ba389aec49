"""`holdfast cloud follow` against a server that speaks EC2, with agents as its instances."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.plan.catalogue import COLUMNS
from holdfast.wire.secret_managers.aws import AwsService
from holdfast.wire.secret_managers.request import ask
from holdfast.wire.store.location import open_store
from tests.support import s3
from tests.support.instances import instances_of
from tests.support.journal_reader import Journal
from tests.support.nodes import QUICK, Nodes, losses_of_one_worker
from tests.support.ranks import wait_until

ROOT = Path(__file__).resolve().parents[2]
MACHINE = "p3.2xlarge"
RUN_FILE = """\
name: followed
device: cpu
folder: {folder}
task: {{name: "tests.support.paced_task:Paced", args: {{pause: {pause}}}}}
train:
  steps: 260
  batch_size: 12
  microbatch_size: 2
  optimizer: {{learning_rate: 0.01, clip_norm: 0.05}}
checkpoint: {{every_steps: 20}}
"""


def prices(path: Path, spot: float) -> None:
    row = f"aws,us-east-1,{MACHINE},V100,1,125,3.0,{spot},0.1,2026-07-22"
    path.write_text(f"{','.join(COLUMNS)}\n{row}\n")


@pytest.mark.slow
def test_the_mix_follows_a_price_and_a_reclaim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses are those of an undisturbed run, and the dollars those of the instances' times.

    The first loop is interrupted: a second one takes its instances over. A run of minutes cannot
    keep the plan's dollars, because a node starts for a good part of it. `test_follow.py` has that,
    with a clock of the test.
    """
    host, port = s3.server()
    environ = {**s3.CREDENTIALS, "AWS_REGION": "us-east-1"}
    environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "PYTHONPATH": str(ROOT)}
    for name, value in (environ | {"XDG_CACHE_HOME": str(tmp_path / "here")}).items():
        monkeypatch.setenv(name, value)
    secret = {"Name": "followed", "SecretString": "5e" * 32, "ClientRequestToken": "t" * 32}
    target = {"x-amz-target": "secretsmanager.CreateSecret"}
    kind = {"content-type": "application/x-amz-json-1.1"}
    AwsService("secretsmanager", environ, ask).post(kind | target, json.dumps(secret).encode())

    place = s3.location(s3.server())
    run_file, catalogue = tmp_path / "run.yaml", tmp_path / "prices.csv"
    run_file.write_text(RUN_FILE.format(folder=place, pause=0.15))
    spot_prices: list[tuple[float, float]] = []

    def price(spot: float) -> None:
        prices(catalogue, spot)
        spot_prices.append((time.time(), spot))

    price(1.0)
    command = [
        *(sys.executable, "-m", "holdfast.cli.main", "cloud", "follow", str(run_file)),
        *(
            "--work",
            "0.06",
            "--nodes",
            "2",
            "--least",
            "2",
            "--finish-by",
            "1",
            "--machine",
            MACHINE,
        ),
        *("--image", "ami-12c6146b", "--secret", "followed", "--catalogue", str(catalogue)),
        *("--every", "1", "--change", "0.004", *QUICK, "cluster.interface=127.0.0.1"),
    ]
    said: list[str] = []

    def loop() -> subprocess.Popen[str]:
        started = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"HOLDFAST_SECRET_FROM": "aws:followed"},
        )
        assert started.stdout is not None
        lines = started.stdout
        threading.Thread(target=lambda: said.extend(lines), daemon=True).start()
        return started

    def has(words: str) -> bool:
        return any(re.search(words, line) for line in said)

    def until(condition: Callable[[], bool], seconds: float) -> None:
        wait_until(condition, seconds, lambda: "".join(said), pause_s=0.3)

    run = Nodes(run_file, tmp_path / "none")
    run.store, run.outside = open_store(place), place
    run._journal = Journal(tmp_path, run.store)
    following = loop()
    with instances_of(place, environ, tmp_path / "machines") as cloud:
        try:
            until(lambda: max(run.losses(), default=0) >= 15, 300)
            price(1.1)  # too small to act on
            until(lambda: max(run.losses(), default=0) >= 30, 300)
            assert {each.offer.rpartition("/")[2] for each in cloud.live()} == {"spot"}
            following.send_signal(signal.SIGINT)
            assert following.wait(60) == 130
            assert has("2 instances are still at work")
            assert has("holdfast cloud end")
            following = loop()
            until(lambda: has("taken over: node-0"), 300)
            price(6.0)
            until(lambda: has(r"ended node-1"), 300)
            live = cloud.live()
            assert [each.offer.rpartition("/")[2] for each in live] == ["on-demand"] * 2
            step = max(run.losses())
            until(lambda: max(run.losses(), default=0) >= step + 20, 300)
            cloud.reclaim(live[0])
            until(lambda: has("the cloud took back node-2"), 300)
            assert following.wait(600) == 0, "".join(said)
            assert not cloud.live()
        finally:
            following.kill()
            following.wait(60)
            print("".join(said))
    undisturbed = tmp_path / "alone.yaml"
    undisturbed.write_text(RUN_FILE.format(folder=tmp_path / "alone", pause=0.0))
    run.assert_same_run(losses_of_one_worker(undisturbed))
    found = re.search(r"spent \$([0-9.]+), [+-][0-9.]+% of the latest plan", "".join(said))
    assert found is not None
    assert float(found[1]) == pytest.approx(bill(cloud.seen, spot_prices), rel=0.05)


def bill(seen: dict[str, tuple[str, float, float]], spot: list[tuple[float, float]]) -> float:
    """What the instances cost, by hand. spot: (from when, dollars an hour)."""
    ends = [at for at, _ in spot[1:]] + [float("inf")]
    dollars = 0.0
    for offer, first, last in seen.values():
        if offer.endswith("on-demand"):
            dollars += 3.0 * (last - first) / 3600
            continue
        for (begin, price), end in zip(spot, ends, strict=True):
            dollars += price * max(0.0, min(last, end) - max(first, begin)) / 3600
    return dollars
