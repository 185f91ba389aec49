"""The program of a Slurm job's batch step: keeps one agent at work on each node of the job.

    python -m holdfast.launch.owners.slurm.job --script FILE --logs DIR [...] -- holdfast join RUN

Each node's agent is a step of its own, so the loss of a node ends that step and no other. The
program asks Slurm every few seconds which nodes the job has. It starts an agent on each new node.
In place of each node that was lost or is drained, it queues a job of one node. It hands a node back
whose agent has left the run. It ends once no agent is left.

    SIGUSR1   The time limit is near. The program sends SIGTERM to all agents. Once they have saved
              and left, it has the job queued again.
    SIGUSR2   `holdfast down`. The program sends SIGTERM to all agents, which save and leave.
    SIGTERM   Slurm ends the job, and has sent the signal to the agents itself.

If the node of the batch step is lost, Slurm keeps the job, without its batch step. So this program
starts a deputy as a step of another node. The deputy queues a job of one node in place of the lost
one. It has the job itself queued again, with the nodes that are left.

SIGUSR1 itself is not passed on: Slurm signals all processes of a step, and workers would die of it.

If this node's slurmd dies alone, Slurm gives the node up although this process still runs. The
program then ends its own node's agent. If it cannot, the run's terms and generations fence it.
Only the standard library is imported, because every start of a run waits for it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.wire.child_command import module_command

INTERVAL_S = 5.0  # Seconds between two looks at the job
SIGNAL_INTERVAL_S = 0.5  # Seconds between two looks while an agent's step has yet to appear
RELEASE_AFTER_S = 5.0
"""A node is handed back this long after its agent has left. At a run's end all agents leave at
about the same time, and the job ends instead."""
MOST_RESTARTS = 3
"""An agent that is killed, such as for its memory, is started again so often on one node."""
KILLED = 128  # A step's exit code is at least this if a signal killed the agent
COMMAND_TIMEOUT_S = 30.0
STEP_NAME, DEPUTY_NAME = "agent", "deputy"
REQUEUE_TRIES = 25
"""A job that is ending cannot be changed. Its steps are killed after KillWait, 30 s by default."""
DEPUTY_BEGIN = "--begin=now+60"
"""A deputy's job of one node must not take a node from the job that is queued again."""
SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class Agent:
    """The agent of one node.

    step: its `srun`. restarts: after it was killed. ended: clock when it ended, None before.
    drained: it left because Slurm drains its node.
    """

    node: str
    step: subprocess.Popen[bytes]
    restarts: int = 0
    ended: float | None = None
    is_signalled: bool = False
    is_drained: bool = False
    is_lost: bool = False

    @property
    def is_running(self) -> bool:
        return self.ended is None


@dataclass(frozen=True)
class JobView:
    """What Slurm says of the job."""

    state: str
    batch_host: str
    nodes: tuple[str, ...]
    restarts: int


AWAY = "Unable to contact"  # What Slurm's commands say when their controller does not answer


class Slurm:
    """Slurm's commands, for one job. A command that fails returns None: its controller may be away
    for a while, and agents do not need it."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._is_away = False
        keep = ("SLURM_CONF", "SLURM_CONF_SERVER")
        # Variables of the job would be taken for options; they say what the job was at its start.
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH", "SRUN")) or name in keep
        }

    def run(self, *command: str) -> str | None:
        try:
            done = subprocess.run(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
                preexec_fn=_unblock,
            )
        except (OSError, subprocess.SubprocessError) as error:
            log(f"{command[0]} failed: {error}")
            return None
        if done.returncode != 0 and command[0] == "scancel":
            return None
        said = done.stderr.decode("utf-8", "replace").strip()
        if done.returncode != 0 and AWAY in said:
            if not self._is_away:
                log(f"{said}; agents continue, and no node is replaced until it answers")
            self._is_away = True
            return None
        if self._is_away:
            log("Slurm's controller answers again")
        self._is_away = False
        if done.returncode != 0:
            log(f"{' '.join(command)}: {said}")
            return None
        return done.stdout.decode("utf-8", "replace")

    def start_step(
        self, node: str, log_file: Path, command: Sequence[str], name: str = STEP_NAME
    ) -> subprocess.Popen[bytes]:
        """Start a command as a step of one node, with all that the job has there."""
        arguments = [
            "srun",
            f"--jobid={self.job}",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={node}",
            f"--job-name={name}",
            "--overlap",
            "--mem=0",
            "--cpu-bind=quiet,none",
            "--no-kill",
            "--kill-on-bad-exit=0",
            "--open-mode=append",
            f"--output={output_pattern(log_file)}",
            *command,
        ]
        return subprocess.Popen(
            arguments, env=self._environment, stdin=subprocess.DEVNULL, preexec_fn=_unblock
        )

    def view(self) -> JobView | None:
        text = self.run("scontrol", "show", "job", self.job)
        if text is None:
            return None
        # The record of one job in the output of `scontrol show job`. The number of an array is
        # that of one of its jobs, too; then all of them are shown.
        records = re.split(r"(?m)^(?=JobId=)", text)
        fields = parse_fields(
            next((each for each in records if each.startswith(f"JobId={self.job} ")), "")
        )
        nodes = self.host_names(fields.get("NodeList", ""))
        if nodes is None:
            return None
        restarts = int(fields.get("Restarts", "0"))
        return JobView(fields.get("JobState", ""), fields.get("BatchHost", ""), nodes, restarts)

    def host_names(self, nodes: str) -> tuple[str, ...] | None:
        """Return the names in a list such as n[1-3,7]."""
        if nodes in ("", "(null)"):
            return ()
        if "[" not in nodes:
            return tuple(nodes.split(","))
        text = self.run("scontrol", "show", "hostnames", nodes)
        return None if text is None else tuple(text.split())

    def steps(self) -> dict[str, str]:
        """Return the step of each node's agent."""
        text = self.run("squeue", "-h", "-s", "-j", self.job, "-o", "%i|%j|%N") or ""
        parts = [line.split("|") for line in text.splitlines()]
        return {p[2]: p[0] for p in parts if len(p) == 3 and p[1] == STEP_NAME}

    def draining(self, nodes: Sequence[str]) -> set[str]:
        text = self.run("sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N|%T") or ""
        parts = [line.split("|") for line in text.splitlines()]
        return {p[0] for p in parts if len(p) == 2 and p[1].startswith("drain")}


def output_pattern(path: Path) -> str:
    """Return the value of --output for a path, in which Slurm would fill in %j, %t and so on."""
    return str(path).replace("%", "%%")


def parse_fields(text: str) -> dict[str, str]:
    """Return the fields of `scontrol show`, each as NAME=VALUE. A value has no spaces."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z:/]+)=(\S*)", text))


class JobKeeper:
    """Keeps one agent on each node of the job."""

    def __init__(self, slurm: Slurm, options: argparse.Namespace, host: str, restarts: int) -> None:
        """host: the node of this process. restarts: how often Slurm had queued the job again."""
        self._slurm, self._options = slurm, options
        self._host, self._restarts = host, restarts
        self._agents: dict[str, Agent] = {}
        self._replacements: list[str] = []
        self._deputy: subprocess.Popen[bytes] | None = None
        self._last_code = 0
        self._must_ask = False
        self._is_ending = False
        self._is_time_over = False

    def run(self) -> int:
        """Return the exit code of the job, once no agent is left."""
        next_look = time.monotonic()
        while True:
            found = signal.sigtimedwait(SIGNALS, max(0.0, next_look - time.monotonic()))
            number = None if found is None else found.si_signo
            if number is not None and number != signal.SIGCHLD:
                log(f"{signal.Signals(number).name}: agents save and leave")
                self._is_ending = True
                self._is_time_over = self._is_time_over or number == signal.SIGUSR1
                # A second SIGTERM might end an agent before it has saved, so Slurm's own is not
                # sent again.
                self._must_ask = self._must_ask or number != signal.SIGTERM
                next_look = 0.0
            if self._reap() or time.monotonic() >= next_look:
                if not self._look():
                    return 0
                has_more = self._must_ask and bool(self._unsignalled())
                next_look = time.monotonic() + (SIGNAL_INTERVAL_S if has_more else INTERVAL_S)
            if self._agents and not any(agent.is_running for agent in self._agents.values()):
                if self._is_time_over and self._options.requeue:
                    log("the time is over: the job is queued again")
                    self._slurm.run("scontrol", "requeue", self._slurm.job)
                    return 0
                if self._replacements:
                    self._slurm.run("scancel", "--state=PENDING", *self._replacements)
                return self._last_code

    # --- signals ----------------------------------------------------------------------------

    def _unsignalled(self) -> list[Agent]:
        return [a for a in self._agents.values() if a.is_running and not a.is_signalled]

    def _ask_to_leave(self, agents: Sequence[Agent]) -> None:
        """Send SIGTERM to the agents whose steps have begun, once to each.

        scancel of 22.05 delivers a step's signal, and still says that the job is unknown.
        """
        steps = self._slurm.steps() if agents else {}
        found = [agent for agent in agents if agent.node in steps]
        if found:
            self._slurm.run("scancel", "--signal=TERM", *(steps[a.node] for a in found))
        for agent in found:
            agent.is_signalled = True

    # --- the job's nodes --------------------------------------------------------------------
    def _look(self) -> bool:
        """Compare the job with the agents; False if this node is no longer the job's."""
        if self._is_ending:
            if self._must_ask:
                self._ask_to_leave(self._unsignalled())
            return True
        view = self._slurm.view()
        if view is None:
            return True
        if view.restarts != self._restarts or (view.nodes and self._host not in view.nodes):
            # Slurm has given up this node, or runs the job again. It ends the other steps itself.
            log("Slurm has taken this node from the job: leaving")
            if (own := self._agents.get(self._host)) is not None and own.is_running:
                own.step.terminate()
            return False
        if view.state not in ("RUNNING", "RESIZING", "SIGNALING"):
            return True
        for node in view.nodes:
            if node not in self._agents:
                self._agents[node] = Agent(node, self._start(node))
        for agent in self._agents.values():
            if agent.node not in view.nodes and not agent.is_lost:
                agent.is_lost = True
                if not (agent.ended is not None and agent.is_signalled):
                    log(f"{agent.node} is lost")
                    self._replace(agent.node)
        self._keep_deputy(view.nodes)
        self._leave_drained(view.nodes)
        self._release(view)
        return True

    def _start(self, node: str) -> subprocess.Popen[bytes]:
        command = [node if word == "{node}" else word for word in self._options.command]
        log(f"starting the agent of {node}")
        return self._slurm.start_step(node, Path(self._options.logs, f"{node}.log"), command)

    def _reap(self) -> bool:
        """Note which steps have ended; return True if any has. The loss of its node may be why."""
        has_ended = False
        for agent in self._agents.values():
            if agent.ended is not None or (code := agent.step.poll()) is None:
                continue
            log(f"the agent of {agent.node} has ended with exit code {code}")
            is_killed = code >= KILLED and not agent.is_signalled and not self._is_ending
            if is_killed and agent.restarts < MOST_RESTARTS and self._has_node(agent.node):
                agent.restarts += 1
                agent.step = self._start(agent.node)
                continue
            agent.ended, self._last_code, has_ended = time.monotonic(), code, True
        return has_ended

    def _has_node(self, node: str) -> bool:
        view = self._slurm.view()
        return view is None or node in view.nodes

    def _leave_drained(self, nodes: Sequence[str]) -> None:
        """Have the agents of drained nodes leave, and ask for other nodes."""
        running = [a for n in nodes if (a := self._agents[n]).is_running]
        drained = self._slurm.draining([a.node for a in running]) if running else set()
        for agent in running:
            if agent.node in drained and not agent.is_drained:
                agent.is_drained = True
                log(f"{agent.node} is drained: its agent leaves the run")
                self._replace(agent.node)
        self._ask_to_leave([a for a in running if a.is_drained and not a.is_signalled])

    def _release(self, view: JobView) -> None:
        """Hand nodes back whose agents have left. The node of this process has to stay."""
        now = time.monotonic()
        left = {
            agent.node
            for agent in self._agents.values()
            if agent.ended is not None and now - agent.ended >= RELEASE_AFTER_S
        } - {view.batch_host}
        kept = [node for node in view.nodes if node not in left]
        if len(kept) == len(view.nodes) or not any(a.is_running for a in self._agents.values()):
            return
        nodes = ",".join(kept)
        given = self._slurm.run(
            "scontrol", "update", f"JobId={self._slurm.job}", f"NodeList={nodes}"
        )
        if given is not None:
            log(f"handed back: {', '.join(sorted(left & set(view.nodes)))}")
            for node in left:
                self._agents[node].is_lost = True

    # --- other jobs -------------------------------------------------------------------------
    def _replace(self, node: str) -> None:
        if self._options.replace and (job := queue_job(self._slurm, self._options, node)):
            self._replacements.append(job)

    def _keep_deputy(self, nodes: Sequence[str]) -> None:
        """Start a deputy on another node, unless there is one."""
        others = [node for node in nodes if node != self._host and self._agents[node].is_running]
        if others and (self._deputy is None or self._deputy.poll() is not None):
            command = module_command("holdfast.launch.owners.slurm.job", "--deputy")
            command += self._options.arguments
            path = Path(self._options.logs, "slurm.log")
            self._deputy = self._slurm.start_step(others[0], path, command, DEPUTY_NAME)

    # --- the end ----------------------------------------------------------------------------


def queue_job(slurm: Slurm, options: argparse.Namespace, node: str, *more: str) -> str | None:
    """Queue a job of one node in place of a node; return its number. more: options of sbatch."""
    comment = f"in place of {node} of job {slurm.job}"
    command = ["sbatch", "--parsable", "--nodes=1", f"--comment={comment}", *more, options.script]
    said = slurm.run(*command)
    if said is None:
        return None
    job = said.strip().partition(";")[0]
    log(f"job {job} is queued in place of {node}")
    return job


def watch_batch_host(slurm: Slurm, options: argparse.Namespace) -> int:
    """Wait until the node of the batch step is lost, and have the job queued again."""
    while True:
        view = slurm.view()
        if view is not None and view.state == "RUNNING" and view.batch_host not in view.nodes:
            log(f"{view.batch_host}, which had the batch step, is lost: the job is queued again")
            if options.replace:
                queue_job(slurm, options, view.batch_host, DEPUTY_BEGIN)
            if options.requeue:
                requeue_smaller(slurm, len(view.nodes))
            else:
                slurm.run("scancel", slurm.job)
            return 0
        time.sleep(INTERVAL_S)


def requeue_smaller(slurm: Slurm, nodes: int) -> None:
    """Queue the job again with so many nodes: Slurm would wait for as many as it had at first."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this step gets it at once, and KillWait later
    slurm.run("scontrol", "requeue", slurm.job)
    size = (f"NumTasks={nodes}", f"NumNodes={nodes}-{nodes}")
    for _ in range(REQUEUE_TRIES):
        time.sleep(1.0)
        if slurm.run("scontrol", "update", f"JobId={slurm.job}", *size) is not None:
            return


def log(text: str) -> None:
    print(
        f"{time.strftime('%H:%M:%S')} job {os.environ.get('SLURM_JOB_ID', '')}: {text}", flush=True
    )


def _unblock() -> None:
    """In a child, before its program: signals are blocked here only."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Keep an agent on each node of a Slurm job.")
    parser.add_argument("--script", required=True, help="the job's script, for further jobs")
    parser.add_argument("--logs", required=True, help="folder of the agents' output")
    parser.add_argument("--replace", action="store_true", help="queue a job for each lost node")
    parser.add_argument("--requeue", action="store_true", help="queue the job again at its end")
    parser.add_argument("--deputy", action="store_true", help="watch the node of the batch step")
    parser.add_argument("command", nargs="+", help="an agent's command; {node}: its node")
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given, argparse.Namespace(arguments=given))
    slurm = Slurm(os.environ["SLURM_JOB_ID"])
    if options.deputy:
        return watch_batch_host(slurm, options)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return JobKeeper(slurm, options, os.environ["SLURMD_NODENAME"], restarts).run()


if __name__ == "__main__":
    sys.exit(main())
