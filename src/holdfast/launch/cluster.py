"""Training on several nodes: this process is the agent of one of them.

Whoever is started first makes the run folder and leads; whoever is started later, on whatever
machine, joins by the same run folder and its secret. None of them needs to know of the others.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.config.identity import config_hash
from holdfast.config.run import RunConfig
from holdfast.data.dataset import Dataset
from holdfast.elastic.board import Observer, Say
from holdfast.elastic.boot import DEFAULT_ENTRY
from holdfast.elastic.node_agent import Joining, NodeAgent, check_node_name
from holdfast.plan.places import plan
from holdfast.wire.runstore import FolderStore
from holdfast.wire.secret import open_secret
from holdfast.wire.server import bind


def run(
    config: RunConfig, *, observers: Sequence[Observer] = (),
    render_metrics: Callable[[], bytes] = lambda: b"", say: Say = print,
    dataset_version: str | None = None, entry: str = DEFAULT_ENTRY,
) -> int:  # fmt: skip
    """Take part in the run of a planned configuration as `cluster.node`, until it is over or this
    node leaves it; the exit code.

    Raises UserError: a name or an address that cannot be used, a run folder that cannot be written.
    """
    folder = Path(config.run_folder)
    node = config.cluster.node or platform.node() or "localhost"
    check_node_name(node)
    version = (
        Dataset.open(config.data.folder).version if dataset_version is None else dataset_version
    )
    joining = Joining(
        config, FolderStore(folder), open_secret(folder), folder, node, config_hash(config),
        version, entry,
    )  # fmt: skip
    with bind(config.cluster.interface, 0, "cluster.interface") as control:
        agent = NodeAgent(
            joining, control, plan, observers=observers, render_metrics=render_metrics, say=say
        )
        return agent.run()
