"""What carries the data of this worker's device, as its backend tells it."""

from __future__ import annotations

import logging
import os
import threading

from holdfast.config.sections.layout import LayoutConfig
from holdfast.core.devices import DeviceKind
from holdfast.core.transports import (
    Channel,
    NodeLinks,
    SlowTransport,
    find_channels,
    find_slow_transport,
    name_transports,
)
from holdfast.errors import LayoutError
from holdfast.layout import Topology
from holdfast.machine.links import TOPOLOGY_TIMEOUT_S, detect_links
from holdfast.parallel.comm.backend_log import BackendLog

logger = logging.getLogger(__name__)


class TransportWatch:
    """Reads a backend's log and the node's links. Create it after the fork.

    If a person has set the variables of the log, the worker's own log gets what the backend says.
    """

    def __init__(self, kind: DeviceKind) -> None:
        self._log: BackendLog | None = None
        self._links = NodeLinks()
        self._channels: frozenset[Channel] = frozenset()
        if kind.log_variable:
            self._is_wanted = any(name in os.environ for name in kind.log_settings)
            self._log = BackendLog(kind.log_settings, kind.log_variable)
            self._reader = threading.Thread(target=self._read_links, name="links", daemon=True)
            self._reader.start()  # the vendor's tool takes a second

    def _read_links(self) -> None:
        self._links = detect_links()

    @property
    def names(self) -> str:
        """What carries the data: "NVLink and InfiniBand"; "" if the backend has told nothing."""
        return name_transports(self._channels, self._links)

    def find_slow(self, topology: Topology) -> SlowTransport | None:
        """Return the way of a generation's data that is slow without need, if there is one. Call it
        once all groups are made."""
        if self._log is None or not (text := self._log.read_new()):
            return None
        self._channels = find_channels(text) or self._channels
        self._reader.join(TOPOLOGY_TIMEOUT_S)
        others = len(set(topology.nodes)) > 1
        slow = find_slow_transport(text, self._links, os.environ, has_other_nodes=others)
        if self._is_wanted or slow is not None:
            _log(text)
        return slow

    def log_unread(self) -> None:
        """Write what the backend has said since the last call into the worker's log."""
        if self._log is not None and (text := self._log.read_new()):
            _log(text)

    def refuse_slow(self, topology: Topology, layout: LayoutConfig) -> None:
        """Raise LayoutError if data takes a slow way without need, unless the run file accepts
        it."""
        slow = self.find_slow(topology)
        if slow is not None and not layout.allow_tcp:
            raise LayoutError(
                slow.sentence,
                where="layout.allow_tcp",
                remedy=f"{slow.advice}, or use layout.allow_tcp=true",
            )


def _log(text: str) -> None:
    logger.info("the device's backend says:\n%s", text.rstrip())
