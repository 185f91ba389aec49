"""Hosts as a list names them: in `launch.ssh.hosts`, or in a file with one host a line.

A file may have what mpirun, DeepSpeed and PBS write: `HOST slots=N max_slots=N`, `#` comments, and
a host on several lines. The lines of one host are one node, whose places add up.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.borders import Border
from holdfast.config.sections.launch import SshConfig
from holdfast.errors import ConfigError

HOSTS_LINE = Border(
    "a line of a hosts file", frozenset({"slots", "max_slots", "port", "user"}), entry="word"
)
HOST_REMEDY = "write HOST, USER@HOST or USER@HOST:PORT, such as gpu-1"
MIN_PLAIN_PORT = 1024
"""Smallest port that HOST:PORT may have, besides 22. mpirun writes HOST:PLACES."""
MAX_PORT = 65535
MAX_RANGE = MAX_PLACES = 10_000
USER = r"([A-Za-z0-9_][A-Za-z0-9_.-]*)?"
_ADDRESS = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9._-]*))"
    r"(?::(?P<port>\d+))?"
)
_RANGE = re.compile(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]")


@dataclass(frozen=True)
class Host:
    """A host that ssh reaches."""

    name: str  # name or address; an IPv6 address without brackets
    user: str = ""  # "" for ssh's
    port: int = 0  # 0 for ssh's
    places: int = 0  # workers that fit on it; 0 for cluster.places of the run

    def __str__(self) -> str:
        """Return the text that `read_host` reads."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        user = f"{self.user}@" if self.user else ""
        return f"{user}{name}:{self.port}" if self.port else f"{user}{name}"

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of ssh that name the host."""
        port = ["-p", str(self.port)] if self.port else []
        return [*port, f"{self.user}@{self.name}" if self.user else self.name]

    @property
    def machine(self) -> tuple[str, int]:
        """Return what is equal for two spellings of one host."""
        with suppress(ValueError):
            return str(ipaddress.ip_address(self.name)), self.port
        return self.name.lower().rstrip("."), self.port


def hosts_of(settings: SshConfig) -> list[Host]:
    """Return the hosts in their order, each once. Raises ConfigError."""
    if not settings.hosts and settings.hosts_file:
        found = _read_file(Path(settings.hosts_file))
    else:
        where = "launch.ssh.hosts"
        found = [host for text in settings.hosts for host in read_hosts(text, where)]
        for index, host in enumerate(found):
            if host.machine in [each.machine for each in found[:index]]:
                raise ConfigError(
                    f"{host} is named twice, and each host gets one node",
                    where=where,
                    remedy="name it once; cluster.places has the workers of a node",
                )
    return [replace(host, user=host.user or settings.user) for host in found]


def read_hosts(text: str, where: str) -> Iterator[Host]:
    """Yield the hosts of a text such as me@gpu-1:2222, [::1]:2222 or gpu[1-4]. Raises ConfigError
    with `where`."""
    user, at, name = text.rpartition("@")
    if name.count(":") > 1 and not name.startswith("["):
        name = f"[{name}]"  # an IPv6 address
    for spelled in _expand(name, where):
        yield read_host(f"{user}{at}{spelled}", where, is_stored=False)


def read_host(text: str, where: str, *, is_stored: bool = True) -> Host:
    """Return the one host of a text. is_stored: `str(Host)` wrote it. Raises ConfigError."""
    parts = _ADDRESS.fullmatch(text)
    if parts is None or (parts["v6"] and not _is_v6(parts["v6"])):
        raise ConfigError(f"{text!r} is no host", where=where, remedy=HOST_REMEDY)
    port = int(parts["port"] or 0)
    if parts["port"] and not is_stored and port != 22 and not MIN_PLAIN_PORT <= port <= MAX_PORT:
        name = text.rpartition(":")[0]
        raise ConfigError(
            f"{text!r} ends with {port}, which may be a port or a number of places",
            where=where,
            remedy=f"write '{name} slots={port}' or '{name} port={port}' in launch.ssh.hosts_file",
        )
    return Host(parts["v6"] or parts["name"], parts["user"] or "", port)


def _is_v6(text: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(text).version == 6
    return False


def _expand(text: str, where: str) -> Iterator[str]:
    """Yield the names of a text with ranges, such as gpu[1-2,7]; leading zeros are kept."""
    found = _RANGE.search(text)
    if found is None:
        yield text
        return
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        count = int(last or first) - int(first)
        if not 0 <= count < MAX_RANGE:
            raise ConfigError(
                f"the range [{part}] of {text!r} goes from the larger number to the smaller, or "
                f"has more than {MAX_RANGE} hosts",
                where=where,
                remedy="write a range as gpu[1-4]",
            )
        for number in range(int(first), int(first) + count + 1):
            digits = f"{number:0{len(first)}d}" if first.startswith("0") else str(number)
            yield from _expand(text[: found.start()] + digits + text[found.end() :], where)


# --- files --------------------------------------------------------------------------------------
def _read_file(path: Path) -> list[Host]:
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the list of hosts cannot be read ({error})",
            where="launch.ssh.hosts_file",
            remedy="name a text file (UTF-8) with one host a line",
        ) from None
    found: dict[tuple[str, int], tuple[Host, int, str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0]
        for host in _read_line(words, f"{path}:{number}") if words.strip() else ():
            before, times, place = found.get(host.machine, (host, 0, f"{path}:{number}"))
            if times and before.user != host.user:
                raise ConfigError(
                    f"{host.name} has another user here than in {place}",
                    where=f"{path}:{number}",
                    remedy="name one user for the host: each host gets one node",
                )
            # A line without slots is one place if the host has further lines, as in PBS' files.
            places = (before.places or 1) + (host.places or 1) if times else host.places
            found[host.machine] = replace(before, places=places), times + 1, place
    return [host for host, _, _ in found.values()]


def _read_line(words: str, where: str) -> Iterator[Host]:
    name, *more = re.sub(r"\s*=\s*", "=", words).split()
    pairs = [word.partition("=") for word in more]
    given = {key.lower().replace("-", "_"): value for key, mark, value in pairs if mark}
    said = {key: value or "nothing" for key, value in given.items()}
    said |= {word: "nothing" for word, mark, _ in pairs if not mark}
    remedy = "write HOST slots=N port=N user=NAME, each key once; # begins a comment"
    HOSTS_LINE.check(said, where, ConfigError, remedy)
    if len(given) < len(more):
        raise ConfigError("a key has no =, or is there twice", where=where, remedy=remedy)
    numbers = {key: _number(key, given[key], where) for key in given if key != "user"}
    places, largest = numbers.get("slots", 0), numbers.get("max_slots", MAX_PLACES)
    if places > largest:
        raise ConfigError(
            f"slots={places} is more than max_slots={largest}",
            where=where,
            remedy=f"use slots={largest}",
        )
    for host in read_hosts(name, where):
        user, port = given.get("user", host.user), numbers.get("port", host.port)
        if (
            not re.fullmatch(USER, user)
            or host.user not in ("", user)
            or host.port not in (0, port)
        ):
            raise ConfigError(
                "user or port of this line is empty, or named twice", where=where, remedy=remedy
            )
        yield Host(host.name, user, port, places)


def _number(key: str, text: str, where: str) -> int:
    largest = MAX_PORT if key == "port" else MAX_PLACES
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= largest:
        raise ConfigError(
            f"{key}={text} is no number from 1 to {largest}", where=where, remedy=f"use {key}=4"
        )
    return int(text)
