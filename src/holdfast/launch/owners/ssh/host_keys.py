"""Why ssh refuses a host's key: it has never seen the host, or the key has changed.

Under BatchMode ssh ends with "Host key verification failed." in both cases. Of a changed key it
says so before, and names the file that has the old one.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from holdfast.launch.owners.ssh.hosts import Host

TIMEOUT_S = 10.0
_OFFENDING = re.compile(r"^Offending .* in (.+):\d+\s*$", re.MULTILINE)


def explain_host_key(said: str, options: Sequence[str], host: Host) -> tuple[str, str]:
    """Return what is wrong with a host's key, and what to do. said: by ssh with these options."""
    *own, named = host.arguments
    words = [*own, *options, named]
    # what ssh's own configuration says of the host
    asked = subprocess.run(
        ["ssh", "-G", *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    settings = dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)
    name, port = settings.get("hostname", host.name), settings.get("port", "22")
    alias = settings.get("hostkeyalias", name)
    listed = alias if port == "22" else f"[{alias}]:{port}"
    if re.search("HAS CHANGED|has changed|REVOKED", said):
        file = ["-f", found[1]] if (found := _OFFENDING.search(said)) else []
        remove = shlex.join(["ssh-keygen", *file, "-R", listed])
        return f"its host key has changed since {listed} was last seen here", (
            "a machine that was installed again has a new one, and so has an impostor. Ask its "
            f"administrator, and then remove the old key with: {remove}"
        )
    accept = json.dumps(["-o", "StrictHostKeyChecking=accept-new", *options])
    hosts = Path(settings.get("userknownhostsfile", "~/.ssh/known_hosts").split()[0]).expanduser()
    once = f"ssh-keyscan -p {port} {name} >> {shlex.quote(str(hosts))}"
    once = once if hosts.parent.is_dir() else f"mkdir -p {shlex.quote(str(hosts.parent))} && {once}"
    if asked.returncode or alias != name or {"proxyjump", "proxycommand"} & settings.keys():
        once = shlex.join(["ssh", *words])  # ssh-keyscan knows neither proxies nor other names
    return f"its host key is not known here yet (as {listed})", (
        f"accept it once with: {once}, or at the first contact with "
        + shlex.quote(f"launch.ssh.options={accept}")
    )
