"""Hosts as `launch.ssh.hosts` names them, or a file as mpirun, DeepSpeed and PBS write it."""

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
REMEDY = "write HOST or USER@HOST:PORT, and in a file also 'slots=4 port=2222 user=me', each once"
MAX_PLACES = MAX_RANGE = 10_000
DEFAULT_PORT = 22
MIN_PORT, MAX_PORT = 1024, 65535  # of HOST:PORT, as is 22; mpirun also writes HOST:PLACES
_ADDRESS = re.compile(
    r"(?:(?P<user>\w[\w.-]*)@)?"
    r"(?:\[(?P<v6>[\w.:]+(?:%[\w.-]+)?)\]|(?P<name>\w[\w.-]*))(?::(?P<port>\d{1,5}))?",
    re.ASCII,
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
        name = f"[{self.name}]" if ":" in self.name else self.name
        return (f"{self.user}@" * bool(self.user)) + name + f":{self.port}" * bool(self.port)

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of ssh that name the host; the host itself is the last one."""
        port = ["-p", str(self.port)] if self.port else []
        return [*port, f"{self.user}@{self.name}" if self.user else self.name]

    @property
    def machine(self) -> tuple[str, int]:
        """Return what is equal for two spellings of one host."""
        port = self.port or DEFAULT_PORT
        with suppress(ValueError):
            return str(ipaddress.ip_address(self.name)), port
        return self.name.lower().rstrip("."), port


def hosts_of(settings: SshConfig) -> list[Host]:
    """Return the hosts in their order, each once. Raises ConfigError."""
    where, found = "launch.ssh.hosts", []
    if settings.hosts_file:
        found = _read_file(Path(settings.hosts_file))
    for host in (each for text in settings.hosts for each in read_hosts(text, where)):
        if host.machine in [each.machine for each in found]:
            raise _wrong(f"{host} is named twice", where, "name each host once")
        found.append(host)
    return [replace(host, user=host.user or settings.user) for host in found]


def read_hosts(text: str, where: str) -> Iterator[Host]:
    """Yield the hosts of a text such as me@gpu-1:2222, [::1]:2222 or gpu[1-4]. Raises ConfigError
    with `where`."""
    user, at, name = text.rpartition("@")
    if name.count(":") > 1 and not name.startswith("["):
        name = f"[{name}]"  # an IPv6 address
    if ranges := _RANGE.search(name):
        for part in ranges[1].split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            if not 0 < len(numbers) <= MAX_RANGE:
                raise _wrong(f"{text!r} is no range", where, "use gpu[1-4]")
            for number in numbers:
                digits = str(number).zfill(len(first) if first.startswith("0") else 0)
                yield from read_hosts(f"{user}{at}{_RANGE.sub(digits, name, count=1)}", where)
        return
    host = read_host(f"{user}{at}{name}", where)
    if host.port not in (0, DEFAULT_PORT) and host.port < MIN_PORT:
        raise _wrong(
            f"{text!r} ends with a port or a number of places",
            where,
            f"write 'slots={host.port}' or 'port={host.port}' in launch.ssh.hosts_file",
        )
    yield host


def read_host(text: str, where: str) -> Host:
    """Return the host of a text that `str(Host)` wrote. Raises ConfigError."""
    parts = _ADDRESS.fullmatch(text)
    with suppress(ValueError):
        if parts and int(parts["port"] or 0) <= MAX_PORT:
            name = parts["name"] or str(ipaddress.IPv6Address(parts["v6"]))
            return Host(name, parts["user"] or "", int(parts["port"] or 0))
    raise _wrong(f"{text!r} is no host", where)


def _wrong(what: str, where: str, remedy: str = REMEDY) -> ConfigError:
    return ConfigError(what, where=where, remedy=remedy)


def _read_file(path: Path) -> list[Host]:
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        what, remedy = f"this cannot be read ({error})", "name a text file (UTF-8) of hosts"
        raise _wrong(what, "launch.ssh.hosts_file", remedy) from None
    found: dict[tuple[str, int], Host] = {}
    for number, line in enumerate(lines, 1):
        where, words = f"{path}:{number}", re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        for host in _read_line(words, where) if words else ():
            before = found.get(host.machine, host)
            if before.user != host.user:
                raise _wrong(f"{host} had another user", where)
            # A line without slots is one place if the host has further lines, as in PBS' files.
            places = host.places if before is host else (before.places or 1) + (host.places or 1)
            found[host.machine] = replace(before, places=places)
    return list(found.values())


def _read_line(words: list[str], where: str) -> Iterator[Host]:
    pairs = [word.partition("=") for word in words[1:]]
    given = {key.lower().replace("-", "_"): value for key, mark, value in pairs if mark}
    said = given | {word: "" for word, mark, _ in pairs if not mark}
    HOSTS_LINE.check({k: v or "nothing" for k, v in said.items()}, where, ConfigError, REMEDY)
    limit, places, port = (
        _number(key, given.get(key), where, largest)
        for key, largest in (("max_slots", MAX_PLACES), ("slots", MAX_PLACES), ("port", MAX_PORT))
    )
    if limit and not places:
        remedy = f"write slots={limit}, or fewer"
        raise _wrong(f"max_slots={limit} is there without slots", where, remedy)
    for host in read_hosts(words[0], where):
        user, port = given.get("user", host.user), port or host.port
        is_once = (host.user or user, host.port or port) == (user, port)
        if not is_once or len(given) < len(pairs) or places > (limit or places):
            raise _wrong("user, port or a key is there twice, or slots exceeds max_slots", where)
        yield replace(read_host(str(replace(host, user=user, port=port)), where), places=places)


def _number(key: str, text: str | None, where: str, largest: int) -> int:
    """Return a number from 1 on; 0 if there is none."""
    if text is None:
        return 0
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= largest):
        raise _wrong(f"{key}={text} is no number from 1 to {largest}", where)
    return int(text)
