"""TensorBoard's event files, written directly: the common libraries import torch for them.

A file is a sequence of records: length (u64), its checksum, payload, the payload's checksum, all
little-endian; checksums are CRC-32C, rotated and shifted (TensorFlow, `lib/io/record_writer.h`).
A payload is the protobuf message tensorflow.Event, of which four fields are enough here:

    wall_time 1 (double)   step 2 (int64)   file_version 3 (string)
    summary 5 { value 1 { tag 1 (string), simple_value 2 (float) } }   session_log 7 { status 1 }
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

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


def version_record(time: float) -> bytes:
    """The record that every file begins with."""
    return _record(_event(time, 0, _field(3, b"brain.Event:2")))


def restart_record(time: float, step: int) -> bytes:
    """Makes TensorBoard forget, in older files of the folder, `step` and all after it."""
    return _record(_event(time, step, _field(7, _number(1, _START))))


def scalars_record(time: float, step: int, values: Mapping[str, float]) -> bytes:
    """One record with all of a step's values."""
    parts = [
        _field(1, _field(1, tag.encode()) + _key(2, _FLOAT) + struct.pack("<f", value))
        for tag, value in values.items()
    ]
    return _record(_event(time, step, _field(5, b"".join(parts))))


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
