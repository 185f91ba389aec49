"""Why ssh refuses a host's key: it has not seen the host yet, or the key has changed.

Under BatchMode ssh ends with "Host key verification failed." in both cases. Only for a changed key
it says so in the lines before, and names the file that has the old key.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.launch.owners.ssh.hosts import Host

DEFAULT_FILE = "~/.ssh/known_hosts"
TIMEOUT_S = 10.0
_OFFENDING = re.compile(r"^Offending .* in (.+):\d+\s*$", re.MULTILINE)


def explain_host_key(said: str, options: Sequence[str], host: Host) -> tuple[str, str]:
    """Return what is wrong with a host's key, and what to do.

    Args:
        said: what ssh has printed
        options: launch.ssh.options
        host: the host of the key
    """
    *own, named = host.arguments
    words = [*own, *options, named]
    settings = _settings_of(words)
    name, port = settings.get("hostname", host.name), settings.get("port", "22")
    name = settings.get("hostkeyalias", name)
    listed = name if port == "22" else f"[{name}]:{port}"
    if "HAS CHANGED" in said or "has changed" in said or "REVOKED" in said:
        found = _OFFENDING.search(said)
        file = ["-f", found[1]] if found else []
        remove = shlex.join(["ssh-keygen", *file, "-R", listed])
        return f"its host key has changed since {listed} was last seen here", (
            "a machine that was installed again has a new one, and so has an impostor: ask its "
            f"administrator, and then remove the old key with: {remove}"
        )
    accepting = json.dumps(["-o", "StrictHostKeyChecking=accept-new", *options])
    accept = shlex.quote(f"launch.ssh.options={accepting}")
    is_direct = settings.keys().isdisjoint(("proxyjump", "proxycommand", "hostkeyalias"))
    listed_in = next(iter(settings.get("userknownhostsfile", "").split()), DEFAULT_FILE)
    folder = Path(listed_in).expanduser().parent
    scan = f"ssh-keyscan -p {port} {name} >> {listed_in}"
    scan = scan if folder.is_dir() else f"mkdir -p {folder} && {scan}"
    if not (is_direct and settings):  # ssh-keyscan knows neither ssh's configuration nor proxies
        scan = shlex.join(["ssh", *words])
    return f"its host key is not known here yet (as {listed})", (
        f"accept it once with: {scan}, or at the first contact with {accept}"
    )


def _settings_of(words: Sequence[str]) -> dict[str, str]:
    """Return what ssh's own configuration says of a host; empty if ssh does not say."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["ssh", "-G", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        pairs = (line.partition(" ") for line in done.stdout.splitlines())
        return {key: value for key, _, value in pairs if value not in ("", "none")}
    return {}
