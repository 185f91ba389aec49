"""Texts for the tests of `data.stages`: English pages, near copies of them, and personal data."""

from __future__ import annotations

import hashlib
import random

_VOCABULARY = (
    "the of and to that have with be river stone market garden winter letter window captain "
    "harbour village teacher science morning evening question answer history machine mountain "
    "forest summer painter doctor kitchen library journey engine signal bridge island farmer"
)
WORDS = tuple(_VOCABULARY.split(" "))
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def sentence(rng: random.Random) -> str:
    """A sentence of 8 to 14 words, with a number that makes it one of a kind."""
    words = [rng.choice(WORDS) for _ in range(rng.randint(8, 14))]
    words.insert(rng.randrange(len(words)), f"{rng.choice(WORDS)}{rng.randrange(10**6)}")
    return " ".join(words).capitalize() + "."


def page(seed: int, sentences: int = 12) -> str:
    """A page that each heuristic lets pass."""
    rng = random.Random(seed)
    return "\n".join(
        " ".join(sentence(rng) for _ in range(3)) for _ in range(max(1, sentences // 3))
    )


def near_copy(text: str, changes: int, seed: int) -> str:
    """The text with some words replaced."""
    rng = random.Random(f"{seed} {changes}")
    lines = [line.split(" ") for line in text.split("\n")]
    places = [(i, j) for i, line in enumerate(lines) for j in range(len(line))]
    for i, j in rng.sample(places, changes):
        lines[i][j] = f"changed{rng.randrange(10**6)}"
    return "\n".join(" ".join(line) for line in lines)


def jaccard(one: str, other: str, words: int = 5) -> float:
    """The exact similarity of two texts by their shingles."""

    def shingles(text: str) -> set[tuple[str, ...]]:
        found = text.lower().replace(".", " ").split()
        return {tuple(found[i : i + words]) for i in range(max(1, len(found) - words + 1))}

    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


def personal_item(kind: str, rng: random.Random) -> str:
    """A made item of a kind of personal data, with the check digits that it needs."""
    return str(globals()[f"_{kind}"](rng))


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def _email(rng: random.Random) -> str:
    first, last = rng.sample(("anna", "j.smith", "maria-lopez", "k_ito", "paul+news", "o.brien"), 2)
    host = rng.choice(("mail.test.de", "post.co.uk", "uni-berlin.de", "company.com", "web.io"))
    return f"{rng.choice((first, last.upper(), first + _digits(rng, 3)))}@{host}"


def _phone(rng: random.Random) -> str:
    a, b, c = _digits(rng, 3), _digits(rng, 3), _digits(rng, 4)
    return rng.choice(
        (
            f"+49 {rng.randint(30, 99)} {_digits(rng, 7)}",
            f"+44 20 {_digits(rng, 4)} {c}",
            f"+1-2{a[:2]}-{b}-{c}",
            f"(2{a[:2]}) {b}-{c}",
            f"2{a[:2]}-{b}-{c}",
            f"+33 6 12 {b[:2]} {c[:2]} {c[2:]}",
            f"030 {_digits(rng, 4)} {_digits(rng, 4)}",
        )
    )


def _payment_card(rng: random.Random) -> str:
    start, length = rng.choice((("4", 16), ("51", 16), ("37", 15), ("6011", 16), ("2221", 16)))
    body = start + _digits(rng, length - len(start) - 1)
    total = 0
    for place, digit in enumerate(reversed(body + "0")):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    digits = body + str(-total % 10)
    mark = rng.choice(("", " ", "-"))
    return mark.join(digits[i : i + 4] for i in range(0, len(digits), 4))


def _iban(rng: random.Random) -> str:
    country, length = rng.choice((("DE", 22), ("FR", 27), ("ES", 24), ("NL", 18), ("GB", 22)))
    letters = {"NL": "ABNA", "GB": "NWBK"}.get(country, "")
    body = letters + _digits(rng, length - 4 - len(letters))
    number = int("".join(str(int(c, 36)) for c in f"{body}{country}00"))
    code = f"{country}{98 - number % 97:02d}{body}"
    if rng.random() < 0.5:
        return code
    return " ".join(code[i : i + 4] for i in range(0, len(code), 4))


def _us_ssn(rng: random.Random) -> str:
    mark = rng.choice(("-", " "))
    return mark.join(
        (str(rng.randint(100, 665)), f"{rng.randint(1, 99):02d}", f"{rng.randint(1, 9999):04d}")
    )


def _ipv4(rng: random.Random) -> str:
    first, second = rng.choice((8, 23, 52, 81, 93, 185)), rng.randint(1, 99)
    return f"{first}.{second}.{rng.randint(0, 255)}.{rng.randint(1, 254)}"


def _ipv6(rng: random.Random) -> str:
    parts = [f"{rng.randrange(1, 65536):x}" for _ in range(5)]
    return rng.choice(
        (
            "2001:4860:" + "::".join((":".join(parts[:3]), parts[4])),
            "2a00:1450:" + ":".join(parts) + ":1",
        )
    )


def _mac_address(rng: random.Random) -> str:
    mark = rng.choice((":", "-"))
    return mark.join(f"{rng.randrange(256):02x}" for _ in range(6))


def _url_credentials(rng: random.Random) -> str:
    return f"https://user{_digits(rng, 3)}:pw{_digits(rng, 6)}@files.company.com/data"


def _letters(rng: random.Random, count: int) -> str:
    return "".join(
        rng.choice("abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(count)
    )


def _api_key(rng: random.Random) -> str:
    return rng.choice(
        (
            "AK" + "IA" + _letters(rng, 16).upper(),
            "gh" + "p_" + _letters(rng, 36),
            "sk" + "-proj-" + _letters(rng, 40),
            "xo" + "xb-" + _digits(rng, 12) + "-" + _letters(rng, 24),
            "AI" + "za" + _letters(rng, 35),
        )
    )


def _private_key(rng: random.Random) -> str:
    kind = rng.choice(("", "RSA ", "EC ", "OPENSSH "))
    body = "\n".join(_letters(rng, 64) for _ in range(4))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----"


def _crypto_address(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return "0x" + "".join(rng.choice("0123456789abcdef") for _ in range(40))
    raw = b"\0" + rng.randbytes(20)
    raw += hashlib.sha256(hashlib.sha256(raw).digest()).digest()[:4]
    number, code = int.from_bytes(raw, "big"), ""
    while number:
        number, rest = divmod(number, 58)
        code = BASE58[rest] + code
    return "1" + code
