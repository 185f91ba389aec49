"""Finds personal data by expressions, and by checks of what they match.

A check keeps false alarms few: Luhn's digit of cards, the remainder of IBANs, the checksum of
Bitcoin addresses, the areas that US numbers have. An item is replaced by its kind, such as
`[EMAIL]`. No function here returns or logs an item itself.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.data.filters.verdict import Stage, Verdict

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_IBAN_LENGTHS = {
    "AD": 24,
    "AE": 23,
    "AT": 20,
    "BE": 16,
    "BG": 22,
    "CH": 21,
    "CY": 28,
    "CZ": 24,
    "DE": 22,
    "DK": 18,
    "EE": 20,
    "ES": 24,
    "FI": 18,
    "FR": 27,
    "GB": 22,
    "GR": 27,
    "HR": 21,
    "HU": 28,
    "IE": 22,
    "IL": 23,
    "IS": 26,
    "IT": 27,
    "LI": 21,
    "LT": 20,
    "LU": 20,
    "LV": 21,
    "MC": 27,
    "MT": 31,
    "NL": 18,
    "NO": 15,
    "PL": 28,
    "PT": 25,
    "RO": 24,
    "SA": 24,
    "SE": 24,
    "SI": 19,
    "SK": 24,
    "SM": 27,
    "TR": 26,
}
_DOCUMENTED = ("example.com", "example.org", "example.net", "localhost", "invalid")
_CARD_STARTS = re.compile(r"4|5[1-5]|2[2-7]|3[47]|6(?:011|5|4[4-9])|35|30[0-5]|3[68]|62")


def _is_email(text: str) -> bool:
    domain = "." + text.lower().rpartition("@")[2]
    return not domain.endswith(tuple(f".{name}" for name in _DOCUMENTED))


def is_luhn(digits: str) -> bool:
    """Return True if the last digit is the check digit of the rest (ISO/IEC 7812-1)."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def _is_card(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    is_real = len(set(digits)) > 2 and _CARD_STARTS.match(digits) is not None
    return 13 <= len(digits) <= 19 and is_real and is_luhn(digits)


def is_iban(text: str) -> bool:
    """Return True for a known country's length and a remainder of 1 (ISO 13616)."""
    code = re.sub(r"\s", "", text).upper()
    if len(code) != _IBAN_LENGTHS.get(code[:2]):
        return False
    return int("".join(str(int(c, 36)) for c in code[4:] + code[:4])) % 97 == 1


def _is_ssn(text: str) -> bool:
    area, group, serial = re.split(r"[- ]", text)
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def _is_public(text: str) -> bool:
    """Return True for an address that the internet routes."""
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _is_bitcoin(text: str) -> bool:
    """Return True if the checksum of a base58 address fits. Other addresses have a form alone."""
    if text.startswith(("0x", "bc1")):
        return True
    number = 0
    for letter in text:
        number = number * 58 + _BASE58.index(letter)
    try:
        raw = number.to_bytes(25, "big")
    except OverflowError:
        return False
    return hashlib.sha256(hashlib.sha256(raw[:-4]).digest()).digest()[:4] == raw[-4:]


def _is_phone(text: str) -> bool:
    digits = re.sub(r"\D", "", text)
    return 9 <= len(digits) <= 15 and len(set(digits)) > 2


def _is_any(_: str) -> bool:
    return True


@dataclass(frozen=True)
class _Item:
    """One kind of personal data. The expression is searched if the text has one of `signs`."""

    signs: tuple[str, ...]
    expression: re.Pattern[str]
    is_real: Callable[[str], bool] = _is_any


_HEX = r"[0-9A-Fa-f]"
# Each expression begins with a set of characters, which Python's search skips to. What stands
# before an item is looked at after that.
_ITEMS = {
    "private_key": _Item(
        ("PRIVATE KEY",),
        re.compile(
            r"-----BEGIN ((?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?)-----[\s\S]*?(?:-----END \1-----|\Z)"
        ),
    ),
    "api_key": _Item(
        (
            *("AKIA", "ASIA", "AIza", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "glpat-", "sk-"),
            *("xox", "hf_", "k_live_"),
        ),
        re.compile(
            r"[Aghrsx](?<!\w.)(?:(?<=A)(?:KI|SI)A[A-Z0-9]{16}\b|(?<=A)Iza[\w-]{35}"
            r"|(?<=g)h[pousr]_[A-Za-z0-9]{36,}\b|(?<=g)lpat-[\w-]{20,}"
            r"|(?<=s)k-(?:proj-|ant-)?[A-Za-z0-9_-]{20,}|(?<=x)ox[abprs]-[A-Za-z0-9-]{10,}\b"
            r"|(?<=h)f_[A-Za-z0-9]{30,}\b|(?<=[sr])k_live_[A-Za-z0-9]{20,}\b)"
        ),
    ),
    "url_credentials": _Item(("://",), re.compile(r"(?<=://)[^\s/:@\"'<>]+:[^\s/@\"'<>]+(?=@)")),
    "email": _Item(
        ("@",),
        re.compile(
            r"[A-Za-z0-9](?<![\w.+%-].)[\w.+%-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.)+"
            r"[A-Za-z]{2,24}(?![\w-]|\.\w)"
        ),
        _is_email,
    ),
    "iban": _Item(
        ("",),
        re.compile(r"[A-Z](?<!\w.)[A-Z]\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"),
        is_iban,
    ),
    "crypto_address": _Item(
        ("0x", "bc1", "1", "3"),
        re.compile(
            rf"[0b13](?<![\w/+=].)(?:(?<=0)x{_HEX}{{40}}\b|(?<=b)c1[02-9ac-hj-np-z]{{25,71}}\b"
            rf"|(?<=[13])[{_BASE58}]{{25,34}}(?![\w/+=]))"
        ),
        _is_bitcoin,
    ),
    "payment_card": _Item(
        ("",), re.compile(r"\d(?<![\w.+-].)(?:[ -]?\d){12,18}(?![\w-]|\.\d)"), _is_card
    ),
    "us_ssn": _Item(
        ("-", " "), re.compile(r"\d(?<![\w.-].)\d\d([- ])\d{2}\1\d{4}(?![\w-]|\.\d)"), _is_ssn
    ),
    "mac_address": _Item(
        (":", "-"),
        re.compile(rf"{_HEX}(?<![\w:.-].){_HEX}([:-])(?:{_HEX}{{2}}\1){{4}}{_HEX}{{2}}(?![\w:-])"),
    ),
    "ipv6": _Item(
        (":",),
        re.compile(
            rf"{_HEX}(?<![\w:.].){_HEX}{{0,3}}:+(?:{_HEX}{{1,4}}:+){{1,6}}(?:{_HEX}{{1,4}})?"
            r"(?![\w:])"
        ),
        _is_public,
    ),
    "ipv4": _Item(
        (".",),
        re.compile(r"\d(?<![\w.-].)(?<!ersion .)\d{0,2}(?:\.\d{1,3}){3}(?![\w-]|\.\d)"),
        _is_public,
    ),
    "phone": _Item(
        ("+", "-", ".", " ", "("),
        re.compile(
            r"[+(\d](?<![\w+.-].)(?:"
            r"(?<=\+)[1-9]\d{0,2}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d(?:[ .-]?\d){6,11}"
            r"|(?<=\()\d{3}\) ?\d{3}[-.]\d{4}|(?<=\d)\d{2}[-.]\d{3}[-.]\d{4}"
            r"|(?<=0)\d{2,4}[ /-]\d{3,4}[ -]?\d{3,5})(?!\w|[-.]\d)"
        ),
        _is_phone,
    ),
}


def personal_data_stage(recipe: dict[str, Any]) -> Stage:
    """Return the stage `personal_data`: it redacts items, or leaves their documents out."""
    wanted = [(name, item) for name, item in _ITEMS.items() if name in recipe["items"]]
    drops = recipe["action"] == "drop"

    def judge(text: str) -> Verdict:
        edits: list[tuple[str, int]] = []
        redacted = text
        for name, item in wanted:
            if not any(sign in redacted for sign in item.signs):
                continue
            redacted, count = _redact(redacted, name, item)
            if count and drops:
                return Verdict(text, name)
            if count:
                edits.append((name, count))
        return Verdict(redacted, edits=tuple(edits))

    return judge


def _redact(text: str, name: str, item: _Item) -> tuple[str, int]:
    """Return the text with the kind in place of each item, and how many there were."""
    count = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal count
        if not item.is_real(match[0]):
            return match[0]
        count += 1
        return f"[{name.upper()}]"

    return item.expression.sub(replace, text), count
