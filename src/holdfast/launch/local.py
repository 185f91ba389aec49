"""Training on this machine: one agent, in the process that the person started."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint.beginning import begin_above
from holdfast.checkpoint.fence import take_over
from holdfast.checkpoint.peer_wire import identity
from holdfast.checkpoint.uploading import bring_back
from holdfast.config.identity import config_hash
from holdfast.config.load import Loaded
from holdfast.data.dataset import Dataset
from holdfast.elastic.agent import Agent
from holdfast.elastic.board import Observer, Say
from holdfast.elastic.boot import DEFAULT_ENTRY
from holdfast.elastic.peering import peer_settings
from holdfast.errors import HoldfastError, RunFolderError
from holdfast.wire.runstore import FolderStore, RunStore
from holdfast.wire.secret import open_secret
from holdfast.wire.server import address_of, bind
from holdfast.wire.term import open_term


def run(
    loaded: Loaded,
    *,
    observers: Sequence[Observer] = (),
    render_metrics: Callable[[], bytes] = lambda: b"",
    say: Say = print,
    dataset_version: str | None = None,
    entry: str = DEFAULT_ENTRY,
    fresh: bool = False,
) -> int:
    """Train in the run folder of a planned configuration; the exit code (0, 1, 130).

    `observers` see every record of the journal as it is written, `render_metrics` answers
    `/metrics`, `say` prints one line. The dataset's version is read from its folder unless given.
    `fresh`: this is to be a beginning, whatever a bucket or peers hold.
    Raises UserError: the folder is in use, not writable, holds no trustworthy checkpoint, ...
    """
    config = loaded.config
    folder = Path(config.run_folder)
    if not config.layout.workers or config.device == "auto":
        raise RunFolderError(
            "the number of workers and the device have not been planned", where="layout.workers"
        )
    version = (
        Dataset.open(config.data.folder).version if dataset_version is None else dataset_version
    )
    store: RunStore = FolderStore(folder)
    secret = open_secret(folder)
    bucket = None
    if config.checkpoint.bucket:
        bucket = bring_back(store, config.checkpoint.bucket, config_hash(config), fresh, say)
    # The agent listens before the term names its address: whoever finds the term can ask.
    control = bind(config.cluster.interface, 0, "cluster.interface")
    with control:
        term = open_term(store, address_of(control), secret)
        try:
            peers = peer_settings(config.checkpoint)
            above = begin_above(
                store, () if peers is None else peers.peers, secret,
                identity(config_hash(config), version), fresh, say,
            )  # fmt: skip
            if bucket is not None:
                take_over(store, bucket, say)
            return Agent(
                config,
                store,
                secret,
                term,
                control,
                folder=folder,
                above=above,
                config_hash=config_hash(config),
                dataset_version=version,
                observers=observers,
                render_metrics=render_metrics,
                say=say,
                resume=resume_command(loaded),
                entry=entry,
            ).run()
        finally:
            with suppress(HoldfastError):  # a full disk: the next trainer asks, and gets no answer
                term.close()


def resume_command(loaded: Loaded) -> str:
    """What to type to go on with this run."""
    return shlex.join(["holdfast", "train", loaded.name, *loaded.overrides])
