"""A program `ssh` that runs the command on this machine, with a home for each host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_SSH = """\
#!/bin/sh
# The host is the last word but one. Names of hosts are faults of ssh.
while [ $# -gt 2 ]; do shift; done
case "$1" in
  unknown*) echo "ssh: Could not resolve hostname $1: Name or service not known" >&2; exit 255;;
  changed*) echo "Host key verification failed." >&2; exit 255;;
  locked*) echo "$1: Permission denied (publickey)." >&2; exit 255;;
  off*) echo "ssh: connect to host $1 port 22: Connection refused" >&2; exit 255;;
  bare*) set -- "$1" "exec env -i {bare} -P -m holdfast.launch.owners.ssh.node_host";;
esac
[ ! -e "{root}/$1.off" ] || {{ echo "ssh: connect to host $1: No route to host" >&2; exit 255; }}
mkdir -p "{root}/$1"
echo "a banner of the login shell"
HOME="{root}/$1" exec /bin/sh -c "$2"
"""
_PYTHON = """\
#!{python}
import sys

from holdfast.launch.owners.ssh import node_host

SCRIPT = {script!r}
{more}
node_host.module_command = lambda _, *a: ["/bin/sh", "-c", SCRIPT, a[a.index("--node") + 1], *a]
sys.exit(node_host.main())
"""


class FakeSsh:
    """root: has `bin/ssh`, and the homes of the hosts. The PATH finds that ssh."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        (root / "bin").mkdir(parents=True)
        self._write("bin/ssh", _SSH.format(root=root, bare=sys.base_prefix + "/bin/python3"))
        patch.setenv("PATH", str(root / "bin"), prepend=":")

    def python(self, script: str, more: str = "") -> Path:
        """A Python of the hosts whose agents are shells that run a script. more: lines of Python
        before the request."""
        text = _PYTHON.format(python=sys.executable, script=script, more=more)
        return self._write("bin/python", text)

    def home(self, host: str) -> Path:
        return self.root / host

    def switch_off(self, host: str) -> None:
        (self.root / f"{host}.off").touch()

    def _write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.write_text(text)
        path.chmod(0o755)
        return path
