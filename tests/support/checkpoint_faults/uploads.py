"""The uploader gets SIGKILL in the middle of an upload, and the run folder is lost.

A process saves into a folder and sends its commits to a real S3 server. It does so through a proxy
that kills it at one of its requests. Another uploader may continue from what is stored. Then the
folder is lost, and a new one begins from the bucket alone.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.bucket.recover_folder import open_bucket, recover_folder
from holdfast.checkpoint.bucket.uploader import Uploader
from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.checkpoint.save.retention import RetentionRules
from holdfast.core.format.manifest import commit_key
from holdfast.events import CheckpointUploaded, Event
from holdfast.wire.store.run_store import FolderStore
from tests.support import s3
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.bucket import BOUND, Bucket, _name, _quiet_proxy, killing
from tests.support.checkpoint_faults.histories import NEWEST, Protocol
from tests.support.checkpoint_faults.interrupted import Setting
from tests.support.checkpoint_faults.oracle import expected
from tests.support.checkpoint_faults.verdict import (
    Restored,
    WrongError,
    check_not_lost,
    judge,
    restore,
)

SCRIPT = (
    "import sys; from tests.support.checkpoint_faults.uploads import child; child(*sys.argv[1:])"
)


def killed(folder: Path, setting: Setting, rng: random.Random) -> tuple[str, Restored]:
    setting.pour(folder)
    bucket = Bucket(_name(folder))
    copy_checkpoint(FolderStore(folder), commit_key(NEWEST[1], NEWEST[0]), bucket.store)
    at, before, again = rng.randrange(60), rng.random() < 0.5, rng.random() < 0.5
    with _quiet_proxy() as proxy:
        process = _start(folder, bucket.location(proxy.address), setting, work=True)
        proxy.rule = killing(process, proxy, at, before)
        said = [NEWEST[0], *_said(process)]
    if again:
        said += _said(_start(folder, bucket.location(s3.server()), setting, work=False))
        newest = max(map(step_of, list_commits(FolderStore(folder))))
        if newest not in said and newest not in map(step_of, list_commits(bucket.store)):
            raise WrongError(f"the next uploader did not send step {newest}: {said}")
    what = f"SIGKILL {'before' if before else 'after'} request {at}, {said} sent" + (
        ", another goes on" if again else ""
    )
    return what, _begin_again(folder, bucket, setting, said, rng)


def _begin_again(
    folder: Path, bucket: Bucket, setting: Setting, said: list[int], rng: random.Random
) -> Restored:
    """From the bucket alone, in a new folder."""
    due = expected(bucket.contents(), setting.written)
    topo = states.topology(rng.randrange(8), 5)
    new = folder.with_name("new")
    new.mkdir()
    recover_folder(FolderStore(new), bucket.location(s3.server()), "config", False, lambda s: None)
    for store in (bucket.store, FolderStore(new)):
        found = restore(store, topo)
        judge(found, due)
        check_not_lost(found, said, "the bucket was said to have it")
    return found


def _start(folder: Path, place: str, setting: Setting, *, work: bool) -> subprocess.Popen[str]:
    numbers = map(str, (setting.second, setting.third, setting.order))
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), place, *numbers, "work" if work else ""],
        stdout=subprocess.PIPE,
        text=True,
    )


def _said(process: subprocess.Popen[str]) -> list[int]:
    out, _ = process.communicate(timeout=BOUND)
    return [int(line) for line in out.split()]


def child(folder: str, place: str, second: str, third: str, order: str, work: str) -> None:
    """The process that saves and sends; prints each step that has arrived."""
    store = FolderStore(Path(folder))

    def tell(event: Event) -> None:
        if isinstance(event, CheckpointUploaded):
            print(event.step, flush=True)

    uploader = Uploader(store, lambda: open_bucket(place), RetentionRules(2, 0), tell)
    if work:
        protocol = Protocol(store, (int(second), int(third)), int(order), keep=3)
        generations = {12: 2, 14: 2, 16: 3}
        protocol.note = lambda step: uploader.request_upload(  # type: ignore[method-assign]
            commit_key(generations[step], step)
        )
        protocol.run()
    uploader.close()


KINDS: dict[str, Callable[[Path, Setting, random.Random], tuple[str, Restored]]] = {
    "upload-killed": killed
}
