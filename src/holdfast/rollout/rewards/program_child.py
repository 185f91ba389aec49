"""Runs one program that a model wrote, in a process of its own.

    python -I -S program_child.py FOLDER CPU_S MEMORY ISOLATION

A line with the end code comes from stdin, then the program. Its exit code and output are this
process's. It exits with the end code when the program came to its end; so one that exits before its
tests does not pass. Tests run in the program's own process, so a program that searches its
interpreter can still find the code. Exit code 125: the machine lacks a part of the isolation, which
stderr names. Imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys

NO_ISOLATION = 125
"""Exit code: the machine lacks a part of the isolation."""
FILE_BYTES = 16 << 20
"""Largest file that a program may write; its output is one."""
_PROCESSES, _FILES = 64, 64
_NEW_USER, _NEW_PID, _NEW_NET, _NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # of Landlock, on every processor
_ALL_RIGHTS = (1 << 13) - 1  # of Landlock's first version
_READ_RIGHTS = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, list a folder
_READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")


class _LackingError(Exception):
    """The machine lacks a part of the isolation."""


def isolate(folder: str) -> None:
    """Take away network, other processes, and files outside of the folder. Raises _LackingError.

    Returns in a child that is alone in its namespace; the caller waits for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC):
        raise _LackingError(f"user namespaces ({os.strerror(ctypes.get_errno())})")
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rights = ctypes.c_uint64(_ALL_RIGHTS)
    rules = libc.syscall(_CREATE_RULESET, ctypes.byref(rights), ctypes.c_size_t(8), 0)
    if rules < 0:
        raise _LackingError(f"Landlock ({os.strerror(ctypes.get_errno())})")
    python = (sys.base_prefix, sys.prefix, os.path.dirname(os.path.realpath(sys.executable)))
    for path in (*_READABLE, *python):
        _allow(libc, rules, path, _READ_RIGHTS)
    _allow(libc, rules, folder, _ALL_RIGHTS)
    if libc.syscall(_RESTRICT_SELF, rules, 0):
        raise _LackingError(f"Landlock ({os.strerror(ctypes.get_errno())})")
    os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
    except OSError:
        return  # not on this machine
    if not os.path.isdir(path):
        rights &= 1 << 0 | 1 << 1 | 1 << 2  # those of a file
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place))
    libc.syscall(_ADD_RULE, rules, 1, rule, 0)
    os.close(place)


def limit(cpu_s: float, memory: int) -> None:
    """Set the limits of processor time, memory, files and processes."""
    whole_s = max(1, -int(-cpu_s // 1))
    for what, most in (
        (resource.RLIMIT_CPU, whole_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, _FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, _PROCESSES),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def main() -> None:
    folder, cpu_s, memory, isolation = sys.argv[1:]
    end_code, _, program = sys.stdin.buffer.read().partition(b"\n")
    os.chdir(folder)
    if isolation == "full":
        try:
            isolate(folder)
        except _LackingError as lacking:
            sys.stderr.write(str(lacking))
            sys.stderr.flush()
            os._exit(NO_ISOLATION)
    limit(float(cpu_s), int(memory))
    sys.argv = sys.orig_argv = ["program.py"]
    exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    os._exit(int(end_code))


if __name__ == "__main__":
    main()
