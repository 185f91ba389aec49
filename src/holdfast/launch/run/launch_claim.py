"""The claim of one launcher on a run in a bucket: of several machines, one starts the nodes.

A run in a folder has a lock there. In a bucket, the claim is the newest object of a row,
`launches/00000001.json`, made if absent. It holds until its launcher gives the nodes back, or until
no trainer is at work and the claim is old.
"""

from __future__ import annotations

import getpass
import json
import time
from pathlib import Path
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import RunFolderError
from holdfast.launch.run.holder import HolderWatch
from holdfast.wire.store.run_location import bucket_of_run, store_of_run, where_of_run
from holdfast.wire.store.run_store import AlreadyExistsError
from holdfast.wire.term import this_host

CLAIMS = "launches/"
RELEASED = ".released"
START_TIME_S = 600.0
"""Seconds that nodes may take until one is at work; the clocks of the launchers are compared."""


def claim_launch(folder: Path, owner: str, watch: HolderWatch) -> None:
    """Claim the nodes of a run in a bucket for this machine and folder. Raises RunFolderError if
    another launcher has them.

    owner: of the machines. watch: over the run's trainer."""
    if not bucket_of_run(folder):
        return
    store, (number, newest, is_released) = store_of_run(folder), _newest_claim(folder)
    if newest and not is_released and not _is_own(newest, folder):
        is_young = time.time() - float(newest["since"]) < START_TIME_S
        if is_young or watch.wait_for_verdict():
            raise _claimed_error(folder, newest)
    host, user = this_host(), getpass.getuser()
    claim = {"machine": host.name, "boot": host.boot, "folder": str(folder.absolute())}
    claim |= {"user": user, "owner": owner}
    try:
        store.create(_key(number + 1), json.dumps({**claim, "since": time.time()}).encode())
    except AlreadyExistsError:
        raise _claimed_error(folder, _newest_claim(folder)[1]) from None


def release_claim(folder: Path) -> None:
    """Let another machine launch a run in a bucket, whose nodes this one gives back."""
    if not bucket_of_run(folder):
        return
    number, newest, is_released = _newest_claim(folder)
    if newest and not is_released and _is_own(newest, folder):
        store_of_run(folder).create(_key(number) + RELEASED, b"")


def _key(number: int) -> str:
    return f"{CLAIMS}{number:08d}.json"


def _newest_claim(folder: Path) -> tuple[int, dict[str, Any], bool]:
    """Return the number of the newest claim, the claim, and whether it was released."""
    store = store_of_run(folder)
    keys = store.list(CLAIMS)
    newest = max((key for key in keys if not key.endswith(RELEASED)), default="")
    if not newest:
        return 0, {}, False
    number = int(newest.removeprefix(CLAIMS).partition(".")[0])
    return number, dict(parse_json(store.get(newest).decode())), newest + RELEASED in keys


def _is_own(claim: dict[str, Any], folder: Path) -> bool:
    return (claim["machine"], claim["folder"]) == (this_host().name, str(folder.absolute()))


def _claimed_error(folder: Path, claim: dict[str, Any]) -> RunFolderError:
    return RunFolderError(
        f"{claim['user']} has launched this run on {claim['machine']}, with --on {claim['owner']}",
        where=where_of_run(folder),
        remedy="call status, logs and down there. If that machine is lost, the run is free 10 "
        "minutes after its launch, once no node trains",
    )
