"""Ends a child when its agent ends, however that ended.

The agent alone holds the write end of a pipe and never writes to it; each child holds the read end.
When the agent has exited (returned, crashed, killed), the kernel closes its end. Two things then
end the child. One is a thread that was blocked in a read. On Linux, the kernel itself also sends
SIGKILL to the child's process group. So neither a held interpreter lock nor a stopped process
(SIGSTOP) outlives its agent. A parent-death signal is not enough: it follows the thread that
forked, and a worker's parent is the fork server, not the agent.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

AGENT_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
    *(() if sys.platform == "darwin" else (signal.SIGPWR,)),
)
"""Signals that a terminal, systemd or a scheduler sends to every process of a run. The agent
answers them, and needs its children for that: they ignore them."""
LIFELINE_EXIT_CODE = 79
"""Exit code of a child whose agent has exited."""


def ignore_agent_signals(*but: signal.Signals) -> None:
    """Ignore the agent's signals in this process, except those named."""
    for number in AGENT_SIGNALS:
        if number not in but:
            signal.signal(number, signal.SIG_IGN)


def let_children_be_ended() -> None:
    """Let the children of this process have the default for signals that it ignores itself.

    A child inherits that a signal is ignored, and `terminate()` would not end it. A handler is not
    inherited by another program. A forked child sets the default itself; what is sent to it before
    waits for that.
    """
    ignored = [n for n in AGENT_SIGNALS if signal.getsignal(n) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, _do_nothing)
        signal.siginterrupt(number, False)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)

    def become_default() -> None:
        for number in ignored:
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    if ignored:
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ignored),
            after_in_parent=unblock,
            after_in_child=become_default,
        )


def _do_nothing(number: int, frame: object) -> None: ...


def is_ignored_hangup(number: signal.Signals) -> bool:
    """Return True for SIGHUP if our starter ignores it, as nohup does: a closed terminal does not
    concern this process. Other signals count even if they are ignored: a shell ignores SIGINT for
    each command that it starts in the background."""
    return number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def open_lifeline() -> tuple[int, int]:
    """(read end, write end), neither inherited unless named (`pass_fds`)."""
    return os.pipe2(os.O_CLOEXEC)


def watch_lifeline(fd: int, on_end: Callable[[], None] | None = None) -> None:
    """End this process, and its process group when it leads one, at the end of pipe `fd`.

    `fd` is the inherited read end. `on_end` replaces how the thread ends the process; the kernel's
    signal is then left out.
    """
    if on_end is None:
        arm_kernel_kill(fd)
    finish = on_end or exit_now
    threading.Thread(target=_wait, args=(fd, finish), name="lifeline", daemon=True).start()


def arm_kernel_kill(fd: int) -> None:
    """Have the kernel kill this process (all of its group, if it leads one) at the pipe's end.

    Linux sends the signal chosen with F_SETSIG to the owner of an O_ASYNC descriptor when the
    other end of the pipe closes. Owner and signal belong to the open file description, which a
    fork or an exec shares, so each process opens one of its own.
    """
    if sys.platform != "linux":
        return  # the thread alone ends this process
    try:
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp() if _is_group_leader() else os.getpid())
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        return  # no /proc here: the thread alone ends this process
    # Whether the write end is closed. Only the inherited descriptor knows: one that was opened
    # after the end would not.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if bool(poll.poll(0)):  # it ended before the signal was armed
        exit_now()


def exit_now() -> None:
    """End this process and its group at once, without cleaning up: no agent is left to notify."""
    if _is_group_leader():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(LIFELINE_EXIT_CODE)


def _is_group_leader() -> bool:
    """Return True if this process leads its group; a group that another leads is not ours to
    kill."""
    return os.getpgrp() == os.getpid()


def _wait(fd: int, finish: Callable[[], None]) -> None:
    os.read(fd, 1)  # nothing is ever written: this returns at the end of the pipe
    finish()
