"""Slurm's programs as scripts that only wait: for the life of a cluster without Slurm.

`sinfo` prints a usable node for each slurmd that has started and was not killed since.
"""

from __future__ import annotations

import sys
from pathlib import Path

WAIT = """\
#!{python}
import os, signal, sys, socket
if os.path.exists("{folder}/refuses"):
    sys.exit("error: no such plugin")
config = dict(l.strip().split("=", 1) for l in open(os.environ["SLURM_CONF"]) if "=" in l)
if sys.argv[0].endswith("slurmctld"):
    server = socket.create_server(("127.0.0.1", int(config["SlurmctldPort"])))
else:
    if os.fork() == 0:  # a step, in a session of its own and without a parent
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.pause()
    open(os.path.join(os.path.dirname(os.environ["SLURM_CONF"]), sys.argv[3] + ".up"), "w")
signal.pause()
"""
SINFO = """\
#!/bin/sh
[ -e {folder}/hangs ] && exit 0
for each in "$(dirname "$SLURM_CONF")"/*.up; do echo idle; done
"""


def write_fake_daemons(folder: Path) -> None:
    folder.mkdir()
    for name in ("slurmctld", "slurmd"):
        (folder / name).write_text(WAIT.format(python=f"{sys.executable} -S", folder=folder))
    for name in ("sinfo", "sbatch", "srun", "scontrol"):
        (folder / name).write_text(SINFO.format(folder=folder))
    for each in folder.iterdir():
        each.chmod(0o755)
