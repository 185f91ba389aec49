"""The tracker `tensorboard`: event files in `tensorboard/` of the run folder, written directly.

Neither torch nor another library is needed. A process opens a new file. The file begins with the
mark that makes TensorBoard drop, from older files, all steps that will be logged again.
"""

from __future__ import annotations

import os
import socket
import struct
import time as clock
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from holdfast.report.trackers.tracker import RunInfo, Tracker, folder_problems

FOLDER = "tensorboard"
_PREFIX = "events.out.tfevents."


class TensorBoardTracker(Tracker):
    can_rewind = True
    option_names = ("folder",)

    @classmethod
    def problems(
        cls, options: Mapping[str, str], environment: Mapping[str, str]
    ) -> Iterator[tuple[str, str, str]]:
        return folder_problems(options)

    def start(self, info: RunInfo) -> None:
        self._folder = Path(info.options.get("folder") or info.run_folder / FOLDER)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = None
        self._kept_step = max(info.delivered.values(), default=0)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        if self._file is None:
            self._file = self._open(time)
        # One record with all of a step's values.
        parts = [
            _field(1, _field(1, tag.encode()) + _key(2, _FLOAT) + struct.pack("<f", value))
            for tag, value in values.items()
        ]
        self._file.write(_record(_event(time, step, _field(5, b"".join(parts)))))

    def rewind(self, step: int) -> None:
        self._close()
        self._kept_step = step

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self, reason: str) -> None:
        self._close()

    def _open(self, time: float) -> BinaryIO:
        """Open the next file. TensorBoard reads files in the order of their names."""
        names = sorted(path.name for path in self._folder.glob(f"{_PREFIX}*"))
        now = clock.time()
        if names and (stamp := _stamp_of(names[-1])) >= now:  # the clock was set back
            now = stamp + 1e-3
        file = (self._folder / f"{_PREFIX}{now:017.6f}.{socket.gethostname()}").open("xb")
        file.write(_record(_event(time, 0, _field(3, b"brain.Event:2"))))
        file.write(_record(_event(time, self._kept_step + 1, _field(7, _number(1, _START)))))
        return file

    def _close(self) -> None:
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None


def _stamp_of(name: str) -> float:
    """Return the time in a file's name; 0 for a name that another program made."""
    try:
        return float(".".join(name.removeprefix(_PREFIX).split(".")[:2]))
    except ValueError:
        return 0.0


_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # protobuf wire types
_START = 1  # SessionLog.START: forget everything from this event's step on


def _crc_table() -> tuple[int, ...]:
    out = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        out.append(byte)
    return tuple(out)


_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """CRC-32C (Castagnoli), masked so that checksums of checksums stay useful."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _event(time: float, step: int, what: bytes) -> bytes:
    return _key(1, _DOUBLE) + struct.pack("<d", time) + _number(2, step) + what


def _record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    sums = [struct.pack("<I", masked_crc(part)) for part in (length, payload)]
    return length + sums[0] + payload + sums[1]


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _number(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value)


def _field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, lowest first; the top bit: more follow. `value` is at least 0."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
