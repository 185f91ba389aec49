"""Remedies of messages about datasets with an address, and the cache of a node."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from re import Match

import pytest

from holdfast.data.prepare import remote_prepare
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.stream.dataset_location import open_dataset
from tests.runtime.cli.remedies.lab import Case, Lab, case, fixed
from tests.support.corpus import data_config, text_folder, text_source

C, L, P = (
    "data/stream/node_cache.py: ",
    "data/stream/dataset_location.py: ",
    "data/prepare/remote_prepare.py: ",
)
CLAIM = "preparing/00000003"
DAMAGE = (
    r"remove everything at this address and run holdfast data prepare again, or name another "
    r"data.folder"
)


def begin(lab: Lab) -> None:
    text_folder(lab.folder / "in", files=4, words=200)
    lab.settings.update(cache="cache", options="")


def prepare(lab: Lab) -> None:
    config = data_config(Path(), text_source(lab.folder / "in"), cache=lab.path("cache"))
    address = f"file://{lab.path('there')}{lab.settings['options']}"
    prepare_dataset(config.model_copy(update={"folder": address}), say=lambda text: None)


def read(lab: Lab) -> None:
    """What a node does that has nothing of the dataset yet."""
    config = data_config(Path(), cache=lab.path(lab.settings["cache"]), sources=[{}])
    dataset = open_dataset(f"file://{lab.path('there')}", config, ask=True)
    with pytest.MonkeyPatch.context() as patch:
        if number := lab.settings.get("fails"):
            patch.setattr(os, "fsync", _failing(number, lab))
        dataset.path(dataset.files()[0])


def _failing(number: int, lab: Lab) -> Callable[[int], None]:
    def fsync(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    return fsync


def damaged(name: str, content: bytes | None) -> Callable[[Lab], None]:
    def start(lab: Lab) -> None:
        begin(lab)
        prepare(lab)
        lab.settings["cache"] = "second"
        path = lab.folder / "there" / name
        path.unlink() if content is None else path.write_bytes(content)

    return start


def remake(lab: Lab, found: Match[str]) -> None:
    shutil.rmtree(lab.folder / "there")
    prepare(lab)


def failing_disk(number: int) -> Callable[[Lab], None]:
    def start(lab: Lab) -> None:
        begin(lab)
        prepare(lab)
        lab.settings.update(cache="second", fails=number)

    return start


def elsewhere(lab: Lab, found: Match[str]) -> None:
    lab.settings.update(cache="third", fails=0)


def begin_claimed(lab: Lab) -> None:
    begin(lab)
    lab.write(f"there/{CLAIM}", '{"node": "other", "by": "b"}')


def prepare_beside(lab: Lab) -> None:
    """Prepare while another node shows signs of life, until it has ended."""

    def wait(seconds: float) -> None:
        claims = sorted((lab.folder / "there" / "preparing").glob("*"))
        if claims:
            claims[-1].rename(claims[-1].with_name(f"{int(claims[-1].name) + 1:08d}"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_prepare.time, "sleep", wait)
        prepare(lab)


def end_other(lab: Lab, found: Match[str]) -> None:
    shutil.rmtree(lab.folder / "there" / "preparing")


def begin_overtaken(lab: Lab) -> None:
    begin(lab)
    lab.settings["overtakes"] = True


def prepare_overtaken(lab: Lab) -> None:
    """Prepare; the first time another node takes over meanwhile."""
    upload = remote_prepare._upload_shards

    def late(*arguments: object) -> None:
        upload(*arguments)  # type: ignore[arg-type]
        if lab.settings.pop("overtakes", False):
            lab.write("there/preparing/00000002", b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_prepare, "_upload_shards", late)
        prepare(lab)


CASES: list[Case] = [
    case(
        C + "the shard … is missing",
        damaged("shards/train-000-00000.bin", None),
        read,
        DAMAGE,
        remake,
    ),
    case(
        C + "… at the address has other bytes than were written, in two readings",
        damaged("shards/train-000-00000.bin", b"x"),
        read,
        DAMAGE,
        remake,
    ),
    case(
        L + "… is missing there, or is not the one the tokens were made with",
        damaged("tokenizer.json", b"{}"),
        read,
        DAMAGE,
        remake,
    ),
    case(
        C + "the disk of the dataset's cache is full",
        failing_disk(errno.ENOSPC),
        read,
        r"free some space, or name a folder on another disk with data.cache=<path>",
        elsewhere,
    ),
    case(
        C + "the dataset's cache cannot be written (…)",
        failing_disk(errno.EROFS),
        read,
        r"name another folder with data.cache=<path>",
        elsewhere,
    ),
    case(
        L + "there is no prepared dataset",
        begin,
        read,
        r"run holdfast data prepare",
        lambda lab, found: prepare(lab),
    ),
    case(
        L + "a dataset is not sealed, and this address has the option seal",
        lambda lab: (begin(lab), lab.settings.update(options="?seal=env")),
        prepare,
        r"leave out seal and compress in data.folder",
        fixed(options=""),
    ),
    case(
        P + "another node is preparing this dataset (…)",
        begin_claimed,
        prepare_beside,
        r"wait for it, or name another data.folder",
        end_other,
    ),
    case(
        P + "another node has taken over the preparation of this dataset, because this one gave no "
        "sign of life",
        begin_overtaken,
        prepare_overtaken,
        r"run the same command again",
        lambda lab, found: None,
    ),
]
