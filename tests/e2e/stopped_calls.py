"""A child stopped before each of its system calls that change files, so that it can be killed there: seccomp and ptrace(2).

The child puts a filter on itself that lets all other calls pass at full speed; its threads and children inherit it. Linux on
x86-64 only; `why_not` says why it does not work somewhere. Transfers must go by system calls (backend="threads"): those of
io_uring are no calls of the process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = {
    1: "write", 18: "pwrite64", 20: "writev", 296: "pwritev", 328: "pwritev2", 77: "ftruncate", 285: "fallocate",
    74: "fsync", 75: "fdatasync", 91: "fchmod", 326: "copy_file_range", 76: "truncate", 82: "rename", 83: "mkdir",
    86: "link", 87: "unlink", 90: "chmod", 257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat",
    268: "fchmodat", 316: "renameat2",
}  # fmt: skip
BY_DESCRIPTOR = {1, 18, 20, 296, 328, 77, 285, 74, 75, 91, 326}
"""Calls that count only on files below the watched directory; those by path always do, but opening only to create."""
TORN = {1, 18}
"""Calls that can be made to do half of their work before the kill: their third argument is a length."""
OPENAT = 257

_PTRACE_CONT, _PTRACE_GETREGS, _PTRACE_SETREGS, _PTRACE_SYSCALL, _PTRACE_SEIZE = 7, 12, 13, 24, 0x4206
_OPTIONS = 0x100000 | 0x80 | 0x02 | 0x04 | 0x08 | 0x01  # EXITKILL, SECCOMP, FORK, VFORK, CLONE, SYSGOOD
_EVENT_SECCOMP = 7
_WALL = 0x40000000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_RET_ALLOW, _RET_TRACE = 0x7FFF0000, 0x7FF00000
_NAMES = "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class Registers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in _NAMES.split(" ")]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def why_not() -> str:
    """Return why this cannot be done here; empty if it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "stopping system calls is written for Linux on x86-64"
    child = os.fork()
    if child == 0:
        signal.pause()
    refused = _libc.ptrace(_PTRACE_SEIZE, child, None, None) != 0
    error = os.strerror(ctypes.get_errno())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"ptrace is not permitted here: {error}" if refused else ""


def stop_from_here() -> None:
    """In the child: stop at CALLS of this thread, and of those that it starts, from now on."""
    instructions = [(0x20, 0, 0, 0)]  # load the call's number
    numbers = sorted(CALLS)
    for index, number in enumerate(numbers):
        instructions.append((0x15, len(numbers) - index, 0, number))  # jump if equal to the last
    instructions += [(0x06, 0, 0, _RET_ALLOW), (0x06, 0, 0, _RET_TRACE)]
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)
    program = _Program(len(instructions), code)
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp filter refused")


def run_until(
    work: Callable[[], Any],
    fork: Callable[[Callable[[], Any]], int],
    directory: Path,
    kill_at: int,
    torn: bool = False,
    *,
    later: bool = False,
) -> tuple[int, list[str]]:
    """Run `work` in a child and kill it before its call number `kill_at` (from 0; -1: never) that changes `directory`.

    Args:
        fork: makes a child that does what it is given, and returns its number.
        torn: let the call do half of its work, where it can, and kill after it.
        later: `work` calls `stop_from_here` itself; calls before that do not count.

    Returns:
        The child's status as of waitpid(2), and the names of the calls so far.
    """
    ready, go = os.pipe()

    def prepared() -> None:
        os.close(go)
        os.read(ready, 1)
        if not later:
            stop_from_here()
        work()

    child = fork(prepared)
    os.close(ready)
    if _libc.ptrace(_PTRACE_SEIZE, child, None, _OPTIONS) != 0:
        raise OSError(ctypes.get_errno(), "ptrace refused")
    os.write(go, b"g")
    os.close(go)
    calls: list[str] = []
    final: int | None = None
    torn_thread = 0
    while final is None:
        thread, status = os.waitpid(-1, _WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            final = status if thread == child else None
            continue
        event, request, deliver = status >> 16, _PTRACE_CONT, 0
        stop = os.WSTOPSIG(status)
        if thread == torn_thread and stop == signal.SIGTRAP | 0x80:  # the half call is done
            os.kill(child, signal.SIGKILL)
        elif event == _EVENT_SECCOMP:
            registers = Registers()
            _libc.ptrace(_PTRACE_GETREGS, thread, None, ctypes.addressof(registers))
            if _counts(thread, registers, str(directory)):
                calls.append(CALLS[registers.orig_rax])
                if len(calls) == kill_at + 1:
                    if torn and registers.orig_rax in TORN and registers.rdx >= 1024:
                        registers.rdx = registers.rdx // 1024 * 512
                        _libc.ptrace(_PTRACE_SETREGS, thread, None, ctypes.addressof(registers))
                        torn_thread, request = thread, _PTRACE_SYSCALL
                    else:
                        os.kill(child, signal.SIGKILL)
        elif event == 0 and stop != signal.SIGTRAP:
            deliver = stop
        _libc.ptrace(request, thread, None, deliver)
    return final, calls


def _counts(thread: int, registers: Registers, directory: str) -> bool:
    call = registers.orig_rax
    if call == OPENAT:
        return bool(registers.rdx & os.O_CREAT)
    if call not in BY_DESCRIPTOR:
        return True
    try:
        return str(Path(f"/proc/{thread}/fd/{registers.rdi}").readlink()).startswith(directory)
    except OSError:
        return False
