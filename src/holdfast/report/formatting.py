"""Formats quantities for people: one place, so that every view agrees."""

from __future__ import annotations

import math

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_si(value: float, digits: int = 3) -> str:
    """1234567 -> "1.23 M"; three significant digits, no prefix below a thousand."""
    for size, prefix in _SI:
        if abs(value) >= size:
            return f"{_significant(value / size, digits)} {prefix}"
    return _significant(value, digits)


def format_count(value: int) -> str:
    """1234567 -> "1,234,567"."""
    return f"{value:,}"


def format_bytes(value: float) -> str:
    """Bytes in binary units: 5242880 -> "5.0 MiB"."""
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_duration(seconds: float) -> str:
    """0.0123 -> "12 ms", 3.21 -> "3.2 s", 75 -> "1 min 15 s", 8000 -> "2 h 13 min"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 0.9995:
        return f"{seconds * 1e3:.0f} ms" if abs(seconds) >= 0.001 else f"{seconds * 1e6:.0f} µs"
    if abs(seconds) < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for big, small, ratio, per in (("d", "h", 86_400, 3_600), ("h", "min", 3_600, 60)):
        if whole >= ratio:
            high, low = divmod(whole, ratio)
            return _format_pair(high, big, low // per, small)
    return _format_pair(whole // 60, "min", whole % 60, "s") if whole >= 60 else f"{whole} s"


def format_clock(seconds: float) -> str:
    """A moment of a run: 75 -> "1:15", 4000 -> "1:06:40"."""
    minutes, second = divmod(int(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def format_percent(ratio: float) -> str:
    """0.9123 -> "91.2 %"."""
    return f"{100 * ratio:.1f} %"


def format_plural(number: int, word: str) -> str:
    """1 step, 2 steps."""
    return f"{format_count(number)} {word}" + ("" if number == 1 else "s")


def _format_pair(high: int, big: str, low: int, small: str) -> str:
    return f"{high} {big} {low} {small}" if low else f"{high} {big}"


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_validation(loss: float, bits_per_byte: float | None) -> str:
    """The number of a validation: bits per byte of text, or the loss where the data is no text."""
    return f"loss {loss:.4f}" if bits_per_byte is None else f"{bits_per_byte:.3f} bits per byte"
