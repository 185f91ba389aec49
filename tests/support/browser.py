"""A headless Chromium that a test drives through a pipe: it opens a page, measures, takes pictures.

The DevTools protocol runs over two descriptors of the process, so no library and no port is needed.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
_EXEC = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from its descriptor 3 and writes answers to 4."""

LOADED = "document.readyState === 'complete'"


class Browser:
    """One tab. Raises RuntimeError for an answer that is an error."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._number = commands, answers, 0
        self._unread = b""
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        self.call("Page.enable")

    def open(self, path: Path | str, width: int, height: int = 900) -> None:
        """Show a file, or a page of HTTP, in a window of that many CSS pixels."""
        mobile = width < 700
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        url = path if isinstance(path, str) else path.resolve().as_uri()
        self.call("Page.navigate", url=url)
        scheme = url.partition(":")[0]
        while self.value(f"{LOADED} && location.protocol === '{scheme}:'") is not True:
            continue

    def paint(self, scheme: str) -> None:
        """Show pages as a system does whose scheme of colours is light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        """Press a key, by its name of the DOM: Tab, ArrowLeft, Enter."""
        for kind in ("rawKeyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "End": 35}[key]
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def value(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def photograph(self, path: Path) -> None:
        """Store a picture of all of the page, below the window's edge too."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(found["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result; events meanwhile are dropped."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._answers, 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile; skips the test where this machine has none."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("this machine has no browser: install chromium to see the report in one")
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", _EXEC, str(to_browser), str(from_browser)),
            *(program, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
        ],
        pass_fds=(to_browser, from_browser),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)  # the browser ends with its pipe
        os.close(answers)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(120)
