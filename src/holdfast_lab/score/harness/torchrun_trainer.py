"""torchrun with DCP as a trainer of `holdfast score`: torchrun's elastic agent on each node.

A rendezvous store runs outside of the nodes, so no fault hits it. Any loss restarts all processes
from the newest checkpoint, on the nodes that are there; a new node restarts them, too.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from holdfast.wire.child_command import module_command
from holdfast_lab.score.harness.node_processes import ParkedNodes, free_port
from holdfast_lab.score.harness.trainer import TrainerRun, Workplace

_STORE = (
    "import time\nfrom torch.distributed import TCPStore\n"
    "s = TCPStore('{address}', {port}, is_master=True, wait_for_workers=False)\n"
    "while True: time.sleep(60)"
)
_LAST_CALL_S, _KEEP_ALIVE_S = 30.0, 15.0
"""torchrun's own defaults, which are divided by k. A group that is not full waits so long for more
nodes. An agent that is silent for so long is given up. torchrun takes full seconds."""
_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torch 2.13 keeps one store over all restarts, without a prefix for each. Restarted processes
would find the addresses of dead ones."""
_LEAST_ATTEMPTS = 3
"""Heartbeats, one a second, that an agent may miss. With 2, a new agent took three living ones for
dead on a busy machine, and trained as a second group."""


class TorchrunTrainer:
    name = "torchrun-dcp"
    obeys_network = True

    def why_unavailable(self, python: str) -> str:
        return why_no_module(python, "torch", "torch")

    def open(self, workplace: Workplace) -> TrainerRun:
        return _TorchrunRun(workplace)


def why_no_module(python: str, module: str, package: str) -> str:
    """A sentence if an interpreter does not find a top-level module. It is not imported."""
    code = f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, check=False)
    except OSError as error:
        return f"{python} cannot be started ({error.strerror})"
    return "" if done.returncode == 0 else f"{python} has no {module}: install {package} there"


class _TorchrunRun(ParkedNodes):
    variables = _ENVIRONMENT

    def __init__(self, workplace: Workplace) -> None:
        super().__init__(workplace)
        self._port = free_port()
        self._checkpoints = workplace.folder / "checkpoints"
        self._checkpoints.mkdir()
        store = _STORE.format(address=workplace.helper_address, port=self._port)
        self._processes.start_helper("store", [workplace.python, "-c", store])

    def _command(self, node: str) -> list[str]:
        last_call = max(1, round(_LAST_CALL_S / self._at.k))
        attempts = max(_LEAST_ATTEMPTS, round(_KEEP_ALIVE_S / self._at.k))
        settings = {
            "is_host": "false",
            "last_call_timeout": last_call,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": attempts,
            "join_timeout": 300,
            "read_timeout": 30,
        }
        return module_command(
            "holdfast_lab.score.trainers.torchrun_dcp",
            str(self._checkpoints),
            str(self._at.places),
            f"{self._at.helper_address}:{self._port}",
            self._at.address(node),
            *(f"{key}={value}" for key, value in settings.items()),
            python=self._at.python,
        )

    def worker_pids(self, node: str) -> list[int]:
        return self._processes.tree(node)[1:]

    def corrupt_checkpoint(self) -> bool:
        found = sorted(p for p in self._checkpoints.glob("at-*") if (p / ".metadata").exists())
        return bool(found) and flip_tensor_bytes(sorted(found[-1].glob("*.distcp")))


_ZIP_NAME, _ZIP_END = b"archive/data/0", b"PK\x07\x08"


def flip_tensor_bytes(files: Sequence[Path]) -> bool:
    """Turn one bit in each 97th byte of the tensors of DCP's files. In a large checkpoint nearly
    all bytes are those of tensors; in this one, few are. Returns whether a byte was changed."""
    changed = False
    for file in files:
        data = bytearray(file.read_bytes())
        place = data.find(_ZIP_NAME)
        while place >= 0:  # each tensor is a zip archive; its name stands again at the end
            end = data.find(_ZIP_END, place)
            if end >= 0 and data[place - 30 : place - 26] == b"PK\x03\x04":
                extra = int.from_bytes(data[place - 2 : place], "little")
                for at in range(place + len(_ZIP_NAME) + extra, end, 97):
                    data[at] ^= 0x08
                    changed = True
            place = data.find(_ZIP_NAME, place + 1)
        file.write_bytes(bytes(data))
    return changed


def flip_bytes(files: Sequence[Path]) -> bool:
    """Turn one bit in each 97th byte of the middle of some files, headers left alone. Returns
    whether a file was changed."""
    for file in files:
        data = bytearray(file.read_bytes())
        for place in range(len(data) // 3, 2 * len(data) // 3, 97):
            data[place] ^= 0x08
        file.write_bytes(bytes(data))
    return bool(files)
