"""Fields that httptools' parser finds in one head, for blocking and event-loop connections."""

from __future__ import annotations


class HeadFields:
    """`headers` by their names in small letters; of one that comes several times the first, and its
    name is in `repeated`. size: bytes of the target and of all headers."""

    def __init__(self) -> None:
        self.target = b""
        self.headers: dict[str, str] = {}
        self.repeated: set[str] = set()
        self.size = 0

    def on_url(self, url: bytes) -> None:
        self.target += url
        self.size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.size += len(name) + len(value)
        key = name.decode("latin-1").lower()
        if key in self.headers:
            self.repeated.add(key)
        else:
            self.headers[key] = value.decode("latin-1")
