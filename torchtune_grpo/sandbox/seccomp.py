"""The system calls that a completion may make; every other one is an error. See seccomp(2).

The list omits what would reach other processes, outlast a completion, or take memory that no
limit counts: keys, SysV and POSIX IPC, memfd, sockets, new namespaces, tracing, scheduling, mounts,
starting programs, the page cache, other processes' clocks.
The filter is classic BPF, written here by hand because pip cannot install libseccomp.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from functools import cache

from torchtune_grpo.sandbox import syscalls

# Names, and the kernel's numbers on x86_64 and aarch64 (-: it has no such call).
_CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
pwritev 296 70, lseek 8 62, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24,
pipe 22 -, pipe2 293 59, open 2 -, openat 257 56, creat 85 -, stat 4 -, lstat 6 -, fstat 5 80,
newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, getdents 78 -,
getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, mkdir 83 -, mkdirat 258 34, rmdir 84 -,
unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -,
linkat 265 37, symlink 88 -, symlinkat 266 36, ftruncate 77 46, fallocate 285 47, fsync 74 82,
fdatasync 75 83, umask 95 166, sendfile 40 71, copy_file_range 326 285, poll 7 -, ppoll 271 73,
select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19,
signalfd 282 -, signalfd4 289 74, timerfd_create 283 85, timerfd_settime 286 86,
timerfd_gettime 287 87, sendto 44 206, sendmsg 46 211, recvfrom 45 207, recvmsg 47 212,
shutdown 48 210, getsockname 51 204, getpeername 52 205, brk 12 214, mmap 9 222, munmap 11 215,
mprotect 10 226, mremap 25 216, msync 26 227, rt_sigprocmask 14 135, rt_sigreturn 15 139,
rt_sigpending 127 136, rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132,
kill 62 129, tkill 200 130, tgkill 234 131, restart_syscall 219 128, alarm 37 -, pause 34 -,
getitimer 36 102, setitimer 38 103, timer_settime 223 110, timer_gettime 224 108,
timer_getoverrun 225 109, timer_delete 226 111, nanosleep 35 101, gettimeofday 96 169, time 201 -,
times 100 153, fork 57 -, vfork 58 -, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95,
set_tid_address 218 96, set_robust_list 273 99, rseq 334 293, sched_yield 24 124, arch_prctl 158 -,
getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgrp 111 -,
setpgid 109 154, setsid 112 157, getrlimit 97 163, setrlimit 160 164, getrusage 98 165,
getrandom 318 278, getcpu 309 168, uname 63 160, sched_get_priority_max 146 125,
sched_get_priority_min 147 126
"""

# Calls that do nothing and report success, because honest programs make them (sqlite, shutil). They
# set modes, times, owners and attributes of files, which without namespaces could be other users',
# or locks, which could carry messages on files that all may read.
_WITHOUT_EFFECT = """
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -,
fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, flock 73 32,
setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, listxattr 194 11, llistxattr 195 12,
flistxattr 196 13
"""

_ALL_BITS = 0xFFFFFFFF
_CLONE_REFUSED = 0x7E02A000  # new namespaces, PARENT, PTRACE
# Calls that depend on arguments: the argument's index, the bits that count, and allowed values.
_CONDITIONS: dict[str, list[tuple[int, int, list[int]]]] = {
    "clone 56 220": [(0, _CLONE_REFUSED, [0])],
    "prlimit64 302 261": [(0, _ALL_BITS, [0])],  # of the caller only
    "sched_getaffinity 204 123": [(0, _ALL_BITS, [0])],
    # A stream between two descriptors. A datagram socket could send to any path.
    "socketpair 53 199": [(0, _ALL_BITS, [1]), (1, 0xF, [1])],
    "getsockopt 55 209": [(2, _ALL_BITS, [3, 4, 38, 39])],  # TYPE, ERROR, PROTOCOL, DOMAIN
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl 16 29": [(1, _ALL_BITS, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451])],
    # All signals but SIGCHLD: ignoring it would keep children's CPU time from being accounted.
    "rt_sigaction 13 134": [(0, _ALL_BITS, [*range(1, 17), *range(18, 65)])],
    # DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC; what remains is locks
    "fcntl 72 25": [(1, _ALL_BITS, [0, 1, 2, 3, 4, 1030])],
    # Only within a process (PRIVATE): on a page of a file that others see, the kernel would let
    # processes wake each other. The bit CLOCK_REALTIME does not count.
    "futex 202 98": [(1, ~256 & _ALL_BITS, [*range(128, 142)])],
    # Advice on a process's own memory: not to share equal pages, or to push out those of files,
    # which other processes could tell by how long theirs take.
    "madvise 28 233": [(2, _ALL_BITS, [*range(5), 8, 10, 11, *range(14, 20), 102, 103])],
    "prctl 157 167": [(0, _ALL_BITS, [15, 16])],  # SET_NAME, GET_NAME
    "getpgid 121 155": [(0, _ALL_BITS, [0])],
    "getsid 124 156": [(0, _ALL_BITS, [0])],
    # Negative clocks are processes' clocks.
    "clock_gettime 228 113": [(0, _ALL_BITS, [*range(12)])],
    "clock_getres 229 114": [(0, _ALL_BITS, [*range(12)])],
    "clock_nanosleep 230 115": [(0, _ALL_BITS, [*range(12)])],
    "timer_create 222 107": [(0, _ALL_BITS, [*range(12)])],
}
_SIGNALS = ("kill 62 129", "tkill 200 130", "tgkill 234 131")  # also in the list above
# The error where a condition is not met, if not EPERM. With any other error from futex, libc would
# abort when it joins a thread.
_REFUSALS = {"futex": errno.EAGAIN, "fcntl": 0}

# Calls from this number on are so new that libc has a fallback where they do not exist.
_FIRST_NEW = 424

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _AND, _JUMP_EQUAL, _JUMP_FROM, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.c_char_p)]


def can_filter() -> bool:
    """Whether the kernel filters system calls, and their numbers on this machine are known."""
    syscalls.libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    return platform.machine() in _ARCHITECTURES and ctypes.get_errno() == errno.EFAULT


def restrict_calls(*, signals_to: int | None = None) -> None:
    """Deny this process and its children all system calls but those listed, for good; signals to
    other processes, too, if one is named."""
    program = _program(*_ARCHITECTURES[platform.machine()], signals_to)
    arguments = ctypes.byref(_Program(len(program) // 8, program))
    syscalls.call_libc("prctl", _PR_SET_SECCOMP, _MODE_FILTER, arguments, 0, 0)


@cache
def _program(column: int, architecture: int, signals_to: int | None = None) -> bytes:
    def number(call: str) -> int | None:
        text = call.split()[1 + column]
        return None if text == "-" else int(text)

    code = [_step(_LOAD, _ARCHITECTURE), _step(_JUMP_EQUAL, architecture, 1, 0)]
    code += [_step(_RETURN, _ERROR | errno.ENOSYS), _step(_LOAD, _NUMBER)]
    for_signals = dict.fromkeys(_SIGNALS, [(0, _ALL_BITS, [signals_to])]) if signals_to else {}
    for call, conditions in {**_CONDITIONS, **for_signals}.items():
        refusal = _REFUSALS.get(call.split()[0], errno.EPERM)
        checks = [step for condition in conditions for step in _check(*condition, refusal)]
        code.append(_step(_JUMP_EQUAL, number(call) or 0, 0, len(checks) + 1))
        code += [*checks, _step(_RETURN, _ALLOW)]
    for calls, action in ((_CALLS, _ALLOW), (_WITHOUT_EFFECT, _ERROR)):
        for value in map(number, calls.split(",")):
            if value is not None:
                code += [_step(_JUMP_EQUAL, value, 0, 1), _step(_RETURN, action)]
    code += [_step(_JUMP_FROM, _FIRST_NEW, 0, 1), _step(_RETURN, _ERROR | errno.ENOSYS)]
    return b"".join([*code, _step(_RETURN, _ERROR | errno.EPERM)])


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)


def _check(argument: int, bits: int, values: list[int], refusal: int) -> list[bytes]:
    """Continue after the last step if the argument's bits are one of the values, else refuse."""
    jumps = [_step(_JUMP_EQUAL, v, len(values) - i, 0) for i, v in enumerate(values)]
    load = [_step(_LOAD, _ARGUMENTS + 8 * argument), _step(_AND, bits)]
    return [*load, *jumps, _step(_RETURN, _ERROR | refusal)]
