"""Slurm's commands as scripts in front of PATH. They print what the real ones (22.05) printed.

<folder>/calls            each call of a command, a line each
<folder>/<command>.out    what the command prints; `scontrol` and `squeue`: see the scripts
<folder>/<command>.err    what it prints as an error, and then exits with 1
<folder>/end.<node>       a step of that node ends with the exit code in it
"""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import wait_until

PLAIN = """\
#!/bin/sh
echo "{name} $*" >> {folder}/calls
if [ -e {folder}/{name}.err ]; then cat {folder}/{name}.err >&2; exit 1; fi
"""
BODIES = {
    "sbatch": "cat {folder}/sbatch.out",
    "sinfo": "cat {folder}/sinfo.out",
    "squeue": """\
case "$*" in
*" -s "*) cat {folder}/steps.out;;
*) cat {folder}/squeue.out;;
esac""",
    "scontrol": """\
case "$*" in
"show hostnames "*) cat {folder}/hostnames.out;;
"show job "*) cat {folder}/job.out;;
esac""",
    "scancel": "",
    "srun": """\
node=$(echo "$*" | sed 's/.*--nodelist=\\([^ ]*\\).*/\\1/')
touch {folder}/started.$node
while [ ! -s {folder}/end.$node ]; do sleep 0.02; done
exit $(cat {folder}/end.$node)""",
}
JOB = """\
JobId=7 JobName=tiny-1
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901755 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:01 TimeLimit=01:00:00 TimeMin=N/A
   NodeList={nodes}
   BatchHost={host}
   NumNodes=4 NumCPUs=8 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=8,node=4,billing=8

"""
OTHER = JOB.replace("JobId=7", "JobId=17 ArrayJobId=7")
"""The record of another job of the same array."""


class FakeSlurm:
    """nodes: those of job 7, whose batch step runs on the first one."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder = folder
        folder.mkdir()
        for name, body in BODIES.items():
            path = folder / name
            path.write_text((PLAIN + body).format(name=name, folder=folder) + "\n")
            path.chmod(0o755)
        (folder / "calls").touch()
        names = [f"n{number + 1}" for number in range(nodes)]
        self.set_job(names)
        steps = [f"7.{number}|agent|{name}" for number, name in enumerate(names)]
        self.say("steps", *steps, "7.batch|batch|n1")
        self.say("sinfo", *(f"{name}|allocated" for name in names))
        self.say("sbatch", "8")
        self.say("squeue")

    def say(self, name: str, *lines: str) -> None:
        self._replace(f"{name}.out", "".join(f"{line}\n" for line in lines))

    def refuse(self, name: str, text: str) -> None:
        (self.folder / f"{name}.err").write_text(text)

    def set_job(
        self, nodes: list[str], state: str = "RUNNING", restarts: int = 0, host: str = "n1"
    ) -> None:
        text = ",".join(nodes)
        other = OTHER.format(nodes="n9", state="RUNNING", restarts=5, host="n9")
        own = JOB.format(nodes=text, state=state, restarts=restarts, host=host)
        self.say("job", other, own, other)
        self.say("hostnames", *nodes)

    def end_step(self, node: str, code: int) -> None:
        self._replace(f"end.{node}", f"{code}\n")

    def _replace(self, name: str, text: str) -> None:
        """Write a file at once: a script never reads a part of it."""
        temporary = self.folder / f".{name}"
        temporary.write_text(text)
        temporary.replace(self.folder / name)

    def calls(self, command: str) -> list[str]:
        lines = self._all_calls().splitlines()
        return [
            line.removeprefix(f"{command} ") for line in lines if line.startswith(f"{command} ")
        ]

    def wait_call(self, command: str, *words: str) -> str:
        """Return the first call of a command with these words, once it has come."""

        def come() -> list[str]:
            return [call for call in self.calls(command) if all(word in call for word in words)]

        return wait_until(come, what=lambda: f"{command} {words} in {self._all_calls()}")[0]

    def wait_started(self, *nodes: str) -> None:
        paths = [self.folder / f"started.{node}" for node in nodes]
        wait_until(lambda: all(path.exists() for path in paths), what=self._all_calls)

    def _all_calls(self) -> str:
        return (self.folder / "calls").read_text()
