"""Code rewards: real hostile programs in real sandboxes, and what is left of them afterwards."""

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from code_sandboxes import LIMITS, judge, passes_again, run_without
from hostile_code import HONEST, QUICK, SLOW, TEST
from processes import children, is_alive, least_seconds, wait_until

import torchtune_grpo
from torchtune_grpo.rewards import RewardSet
from torchtune_grpo.sandbox import code as _code
from torchtune_grpo.sandbox import seccomp, syscalls
from torchtune_grpo.sandbox import server as _server
from torchtune_grpo.sandbox.code import CodeSandbox, Limits, SandboxError


def servers_tasks() -> list[int]:
    """Processes that belong to a task of any sandbox of this process."""
    return [task for server in children() for task in children(of=server)]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_hostile_programs_earn_nothing_and_leave_nothing(sandbox, name):
    """And what comes after them in the same sandbox is judged as ever."""
    before = servers_tasks()
    start = time.monotonic()
    code = QUICK.get(name) or SLOW[name].replace("PORT", "1")
    verdict = judge(sandbox, code, seconds=0.35)  # several times what any needs to do its worst
    assert not verdict.passed
    assert time.monotonic() - start < 5  # a second, and the time to kill and reap on a busy machine
    assert servers_tasks() == before
    assert any(passes_again(sandbox) for _ in range(3))  # its second can be short on a busy machine


def test_a_planted_file_is_nowhere(sandbox):
    """The program of the zoo that writes to a dozen folders, among them Python's own library."""
    judge(sandbox, QUICK["writes everywhere"])
    folders = "/ /tmp /var/tmp /dev/shm /root /home /etc /usr/lib".split()
    places = [Path(f) / "planted_by_a_completion" for f in [*folders, os.path.dirname(os.__file__)]]
    assert not any(place.exists() for place in places)


def test_the_network_is_out_of_reach(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        server.accept()[0].close()  # it can be reached from here
        judge(sandbox, QUICK["talks to the network"].replace("PORT", str(port)))
        with pytest.raises(TimeoutError):
            server.accept()


def test_files_of_this_machine_are_out_of_reach(sandbox, tmp_path):
    """Whatever it finds it could turn into answers: the data set's file, this repository."""
    (tmp_path / "tests.jsonl").write_text("answers")
    os.chmod(tmp_path, 0o777)
    for path in (tmp_path / "tests.jsonl", __file__, "/etc/passwd", f"/proc/{os.getpid()}/environ"):
        why = judge(sandbox, f"open({str(path)!r}).read()").why
        assert why.startswith(("FileNotFoundError", "PermissionError")), (path, why)


def test_the_environment_is_scrubbed(sandbox, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "the-token")
    fresh = CodeSandbox(sandbox.limits, namespaces=sandbox.namespaces)
    why = judge(fresh, "import os\nraise ValueError(sorted(os.environ))").why
    fresh.close()
    assert why == "ValueError: ['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH']"


def test_nothing_carries_over_to_the_next_program(sandbox):
    judge(sandbox, "open('kept', 'w').write('x')\nimport math\nmath.kept = 1")
    find = "import os, math\nraise ValueError((os.listdir('.'), hasattr(math, 'kept')))"
    assert judge(sandbox, find).why == "ValueError: ([], False)"


def test_the_servers_memory_tells_nothing_of_the_last_program(sandbox):
    """Neither what it has imported nor where its blocks are, whatever was left to be killed."""
    code = """
import sys
def solve(n): return len(sys.modules), [id(bytearray(n)) for n in (9, 99, 999, 9999)], id([])
"""
    test = "raise ValueError(solve(0))"
    before = judge(sandbox, code, test=test).why
    judge(sandbox, QUICK["daemon"])
    assert before.startswith("ValueError: (") and judge(sandbox, code, test=test).why == before


def test_no_program_finds_another_in_its_memory(sandbox):
    """Neither where the server's freed blocks are, nor anywhere else in its writable memory."""
    other = HONEST["plain"] + "# which is long enough to have a block of its own\n" * 20
    for _ in range(3):
        assert judge(sandbox, other).passed
        thief = QUICK["searches its memory page by page"]
        assert "AssertionError" in judge(sandbox, thief).why  # it went through to the end


def test_every_limit_is_set_and_no_right_is_left(sandbox):
    """The number of processes and of files is that of this program alone."""
    code = """
import os, resource, signal
names = ("CPU", "AS", "NPROC", "FSIZE", "NOFILE", "CORE", "SIGPENDING")
limits = [resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in names]
def solve(n):
    children = files = 0
    try:
        while children < 50:
            if not os.fork(): signal.pause()
            children += 1
    except BlockingIOError: pass
    try:
        while files < 4200:
            open(f'{files}', 'w').close()
            files += 1
    except OSError: pass
    return limits, (children, files), os.getuid(), os.geteuid()
"""
    most = 4095 if "of their own" in sandbox.confinement() else 4200
    expected = [(6, 6), (2**29, 2**29), (16, 16), (2**24, 2**24), (64, 64), (0, 0), (64, 64)]
    test = f"""
import os
def check(candidate):
    limits, made, *users = candidate(0)
    assert limits == {expected}, limits
    assert made == (15, {most}), made
    assert os.getuid() != 0 or 0 not in users
"""
    verdict = judge(sandbox, code, test=test, seconds=5)
    assert verdict.passed, verdict


REFUSED = """
import ctypes, os, platform, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
text, here, parent = ctypes.create_string_buffer(b"x", 512), os.getpid(), os.getppid() or 1
by_number = {  # on x86_64 and aarch64
    "add_key": (248, 217, b"user", b"a", b"b", 1, -4), "keyctl": (250, 219, 0, -4, 1),
    "request_key": (249, 218, b"user", b"a", 0, -4), "pidfd_open": (434, 434, here, 0),
    "clone3": (435, 435, 0, 0), "io_uring_setup": (425, 425, 8, text), "bpf": (321, 280, 0, 0, 9),
    "perf_event_open": (298, 241, text, 0, -1, -1, 0), "userfaultfd": (323, 282, 1),
    "process_vm_readv": (310, 270, here, 0, 0, 0, 0, 0), "kcmp": (312, 272, here, here, 0, 0, 0),
    "fadvise64": (221, 223, 0, 0, 0, 4), "cachestat": (451, 451, 0, text, text, 0),
    "get_robust_list": (274, 100, here, text, text), "memfd_secret": (447, 447, 0),
    "open_by_handle_at": (304, 265, -100, text, 0), "ioprio_set": (251, 30, 1, 0, 0),
    "sched_setattr": (314, 274, 0, text, 0), "rt_sigqueueinfo": (129, 138, parent, 0, text),
    "wake others": (202, 98, text, 1, 1), "wait for others": (202, 98, text, 0, 7),
    "another architecture": (0x40000000 + 39, 10000),
}
column = ("x86_64", "aarch64").index(platform.machine())
attempts = {
    name: lambda n=numbers[column], a=numbers[2:]: libc.syscall(n, *a)
    for name, numbers in by_number.items()
}
for name, arguments in {
    "shmget": (0, 4096, 0o1666), "semget": (0, 1, 0o1666), "msgget": (77, 0o1666),
    "mq_open": (b"/x", 0o102, 0o666, None), "memfd_create": (b"x", 0), "unshare": (0x10000000,),
    "setns": (3, 0), "chroot": (b".",), "mount": (b"x", b".", b"tmpfs", 0, None),
    "ptrace": (0, 0, 0, 0), "inotify_init": (), "personality": (0,), "swapoff": (b"x",),
    "clone": (text, ctypes.byref(text, 256), 0x10000011, None), "quotactl": (0, b"", 0, None),
    "prctl": (1, 0), "setpriority": (0, parent, 19), "sched_setaffinity": (parent, 8, text),
    "sched_setscheduler": (parent, 5, text), "prlimit": (parent, 0, None, text), "nice": (1,),
    "socketpair": (1, 2, 0, text), "acct": (None,), "mincore": (None, 0, text),
    "readlink": (b"/proc/self", text, 9), "getpgid": (parent,),
    "getsid": (parent,), "clock_gettime": (~parent << 3 | 2, text),
    "timer_create": (~parent << 3 | 2, None, text),
    "mknod": (b"fifo", 0o10666, 0),
}.items():
    attempts[name] = lambda f=getattr(libc, name), a=arguments: f(*a)
for family, kind in ((1, 1), (2, 1), (2, 2), (2, 3), (10, 2), (16, 3), (17, 3), (38, 5), (40, 1)):
    attempts[f"socket {family} {kind}"] = lambda f=family, k=kind: socket.socket(f, k).detach()
for advice in (12, 20, 21):  # MERGEABLE, COLD, PAGEOUT
    attempts[f"madvise {advice}"] = lambda a=advice: libc.madvise(None, 0, a)
attempts["tcp fast open"] = lambda: socket.socket(2, 1, 262).detach()
attempts["children without account"] = lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for program in ("/lib64/ld-linux-x86-64.so.2", "/usr/lib/git-core/git", "/bin/sh"):
    attempts[program] = lambda p=program: os.execv(p, [p])
def solve(n):
    done = []
    for name, attempt in attempts.items():
        ctypes.set_errno(0)
        errors = (11,) if "others" in name else (1, 38)  # by the filter
        try: failed = attempt() == -1 and ctypes.get_errno() in errors
        except (PermissionError, FileNotFoundError): failed = True
        if not failed: done.append((name, ctypes.get_errno()))
    return done
"""


def test_calls_that_reach_out_or_last_are_refused(sandbox):
    """Keys, IPC, memory without a limit, sockets, namespaces, tracing, other processes' limits."""
    verdict = judge(sandbox, REFUSED, test="assert solve(0) == [], solve(0)")
    assert verdict.passed, verdict


def test_the_tests_of_a_data_set_are_fenced_in_as_well(sandbox):
    """A model may have written them, too. They can send signals to the completion alone."""
    owner = os.getpid()
    test = f"""{REFUSED.replace("solve", "attempted")}
for victim in (parent, {owner}, here, 0, -1):
    attempts[f"kill {{victim}}"] = lambda v=victim: os.kill(v, 0)
for path in ({str(Path(__file__))!r}, "/etc/passwd", "/proc/{owner}/environ", "/proc/self/maps"):
    attempts[path] = lambda p=path: open(p).read()
assert solve(1) == 1 and attempted(0) == [], attempted(0)
"""
    verdict = judge(sandbox, "def solve(n): return n", test=test)
    assert verdict.passed, verdict


def test_process_ids_tell_nothing_of_other_programs(sandbox):
    """Or the log says that they do."""
    number = "import os\nraise ValueError(os.getpid())"
    first = judge(sandbox, number).why
    assert passes_again(sandbox)
    if "of their own" in sandbox.confinement():
        assert judge(sandbox, number).why == first
    else:
        assert "by process ids, how many were started" in sandbox.confinement()


def test_only_the_library_is_there(sandbox):
    """No program to start, no package that happens to be installed beside it."""
    code = """
import glob, os, sysconfig
def solve(n):
    seen, folders = [], ["/usr/lib/python3/dist-packages", "/usr/lib/git-core"]
    for library in (sysconfig.get_paths()["stdlib"], "/proc/self/fd/1002"):
        folders += [f"{library}/{name}" for name in ("site-packages", "test", "ensurepip")]
    for folder in folders:
        for path in glob.glob(folder + "/*") + glob.glob(folder + "/*/*"):
            try: seen.append((path, open(path, "rb").read(1)))
            except OSError: pass
    return seen
"""
    verdict = judge(sandbox, code, test="assert solve(0) == [], solve(0)", seconds=5)
    assert verdict.passed, verdict


LIBRARY = """
import asyncio, concurrent.futures, csv, ctypes, datetime, email.message, io, locale, os, pickle
import mmap, multiprocessing, zoneinfo
import queue, shutil, socket, sqlite3, tempfile, threading, unittest, uuid, xml.etree.ElementTree
def solve(n):
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        numbers = list(threads.map(lambda x: x * n, range(3)))
    async def one(): return await asyncio.to_thread(lambda: n)
    numbers.append(asyncio.run(one()))
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=theirs.send, args=(n,))
    child.start(); numbers.append(ours.recv()); child.join()
    with open("here", "w") as file: file.write("x")
    pages = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (0, 1, 2, 3, 4, 8): pages.madvise(advice)
    os.rename("here", "there"); os.remove("there")
    for _ in range(2):
        with sqlite3.connect("database") as database:
            database.execute("create table if not exists t (x)")
            database.execute("insert into t values (?)", (n,))
    numbers.append(database.execute("select sum(x) from t").fetchone()[0])
    shutil.copy2("database", "copy"), os.chmod("copy", 0o600)
    locale.setlocale(locale.LC_ALL, "")
    summer = datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    try: exit(3)
    except SystemExit as end: numbers.append(end.code)
    return numbers, "\\u00fc".encode("cp1252"), os.cpu_count() > 0, summer.utcoffset().seconds
"""


def test_the_standard_library_works(sandbox):
    """Wherever it lies, below /root for instance: modules, codecs, threads, children, pipes."""
    test = "assert solve(2) == ([0, 2, 4, 2, 2, 4, 3], b'\\xfc', True, 7200), solve(2)"
    verdict = judge(sandbox, LIBRARY, test=test, seconds=5)
    assert verdict.passed, verdict


# Of an owner who is not root, and whose processes and files completions could reach by their user.
OWNER = """
import json, os, sys, tempfile
from torchtune_grpo.sandbox.code import CodeSandbox, Limits
from torchtune_grpo.sandbox.exam import Exam
folder = tempfile.mkdtemp()
os.chmod(folder, 0o755)
with open(folder + "/mine", "w") as file: os.utime(file.name, (1, 1))
mode = os.stat(folder + "/mine").st_mode
verdicts = []
for namespaces in (True, False):
    sandbox = CodeSandbox(Limits(seconds=3), namespaces=namespaces)
    programs = open(sys.argv[1]).read().replace("OWNER", str(os.getpid()))
    for code, test in json.loads(programs.replace("MINE", folder + "/mine")):
        verdict = sandbox.judge(code, Exam("solve", test=test))
        verdicts.append([verdict.passed, verdict.why])
    assert os.stat(folder + "/mine").st_mtime == 1 and os.stat(folder + "/mine").st_mode == mode
    sandbox.close()
os.remove(folder + "/mine"), os.rmdir(folder)
print(json.dumps(verdicts))
"""


HARM = """
import os
def solve(n):
    for attempt in (lambda: os.chmod("MINE", 0), lambda: os.utime("MINE")):  # without effect
        try: attempt()
        except FileNotFoundError: pass
    for victim in {OWNER, os.getppid(), os.getppid() - 1} - {0, -1}:  # no parent in a namespace
        for harm in (
            lambda: os.kill(victim, 9), lambda: os.setpriority(0, victim, 5),
            lambda: os.remove("MINE"), lambda: os.truncate("MINE", 0),
        ):
            try: harm()
            except OSError: continue
            return "done"
    return "nothing"
"""


OWN_GROUP = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
def solve(n):
    os.kill(0, signal.SIGINT)
    return n
"""


def public_python() -> str | None:
    """An interpreter that any user may start, and that this package runs on."""
    for path in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        with contextlib.suppress(OSError):
            if not subprocess.run(command, user=65534, group=65534, cwd="/").returncode:
                return path
    return None


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="all tests run as another user than root")
def test_as_another_user_than_root():
    """Where completions run as their owner: nothing of the owner's is within reach."""
    if not (python := public_python()):
        pytest.skip("no Python here that another user may start")
    package = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        shutil.copytree(Path(torchtune_grpo.__file__).parent, package / "torchtune_grpo")
        programs = [
            (HONEST["plain"], TEST),
            (HARM, "assert solve(0) == 'nothing', solve(0)"),
            (REFUSED, "assert solve(0) == [], solve(0)"),
            (HONEST["plain"], TEST),
            (OWN_GROUP, "assert solve(1) == 1"),
            (
                "def solve(n): return n",
                f"{HARM.replace('solve', 'harm_done')}\n"
                "assert solve(1) == 1 and harm_done(0) == 'nothing', harm_done(0)",
            ),
            (
                "def solve(n): open('x', 'w').write('y'); return open('x').read()",
                "assert solve(0) == 'y'",
            ),
        ]
        (package / "programs").write_text(json.dumps(programs))
        for path in (package, *package.rglob("*")):
            path.chmod(0o755)
        ran = subprocess.run(
            [python, "-c", OWNER, package / "programs"],
            **{"user": 65534, "group": 65534, "extra_groups": [], "cwd": package},
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(package)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [[True, ""]] * 2 * len(programs)


@pytest.mark.parametrize(
    "build",
    [
        "for _ in range(1500): os.mkdir('x'); os.chdir('x')",
        "os.mkdir('x'); open('x/y', 'w'); os.chmod('x', 0)",
        "open('x', 'w'); os.chmod('x', 0); os.symlink('/', 'y')",
        "for n in range(10 ** 6): open(f'{n}', 'w').close()",
    ],
)
def test_whatever_it_builds_is_gone_at_once(sandbox, build):
    def build_and_delete() -> None:
        assert not judge(sandbox, f"import os\ntry:\n    {build}\nfinally: os._exit(0)").passed

    assert least_seconds(build_and_delete, enough=1.0) < 1.0  # of this process, which deletes
    assert not os.listdir(tempfile.gettempdir())


@pytest.mark.slow
def test_time_used_decides_and_not_time_passed():
    """An honest one passes beside 15 processes, each in its own session, that spin on all CPUs."""
    spin = """
import os
def solve(n):
    for _ in range(14):
        if not os.fork():
            os.setsid()
            break
    while True: pass
"""
    burn = """
import time
def solve(n):
    while time.process_time() < 0.15: pass
"""
    greedy, honest = CodeSandbox(Limits(seconds=2)), CodeSandbox(Limits(seconds=0.35))
    try:
        assert passes_again(greedy) and passes_again(honest)
        server, found = greedy._server.pid, []
        thread = threading.Thread(target=lambda: found.append(judge(greedy, spin).why))
        thread.start()
        assert wait_until(lambda: len(syscalls.processes_of(server)) == 16)
        verdict = judge(honest, burn, test="solve(0)")
        thread.join()
    finally:
        greedy.close(), honest.close()
    assert verdict.passed, verdict
    assert found == ["no verdict within 2 s"]


def test_waits_at_the_same_time_do_not_add_up():
    """Or else processes that wait for each other would stretch the limit as long as they like."""
    spin = "import os, resource\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    spin += "resource.setrlimit(resource.RLIMIT_CPU, (5, 5))\n"  # if this test is killed
    spin += "for _ in range(7):\n    if not os.fork(): break\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin], start_new_session=True) as spinner:
        try:
            assert wait_until(lambda: len(syscalls.processes_of(spinner.pid)) == 7)
            before, start = syscalls.used_by(spinner.pid)[1], time.monotonic()
            time.sleep(0.5)
            waited = syscalls.used_by(spinner.pid)[1] - before
            passed = time.monotonic() - start
        finally:
            os.killpg(spinner.pid, 9)
    assert passed < waited < 2.2 * passed  # of the seven, two that waited seven eighths of it


def test_time_is_of_all_processes_also_of_one_that_answers_in_time(sandbox, monkeypatch):
    """Several CPUs at once: a second of them, in which less than the limit may pass."""
    code = """
import os, time
def solve(n):
    for _ in range(4):
        if not os.fork():
            while time.process_time() < 0.25: pass
            os._exit(0)
    for _ in range(4): os.wait()
    return 1
"""
    why = judge(sandbox, code, test="assert solve(0) == 1").why
    assert why == "no verdict within 0.7 s"
    # As on a machine with CPUs for all at once, where no more time passes than one of them uses.
    monkeypatch.setattr(os, "cpu_count", lambda: 10**6)
    asleep, test = "import time\ndef solve(n): time.sleep(0.1); return n", "assert solve(1) == 1"
    assert judge(sandbox, asleep, test=test).passed
    monkeypatch.setattr(_code, "used_by", lambda server: (0.8, 0.0, 0))
    assert judge(sandbox, asleep, test=test).why == "no verdict within 0.7 s"


@pytest.mark.slow
def test_memory_is_of_all_processes_together(sandbox):
    code = """
import os, time
def solve(n):
    for _ in range(n):
        if not os.fork():
            held = b"x" * 150 * 2**20
            time.sleep(60)
    time.sleep(2)
    return n
"""
    assert judge(sandbox, code, test="assert solve(2) == 2", seconds=5).passed
    why = judge(sandbox, code, test="assert solve(8) == 8", seconds=5).why
    assert why == "more than 512 MB of memory"


class Lost(Limits):
    """Limits that no kernel can set."""

    def for_completion(self):
        return {"LOST": 1}


def test_a_fence_that_fails_is_not_the_completions_fault(sandbox, monkeypatch):
    """It is named, while training and at the start; and nothing of the completion has run."""
    sandbox.limits = Lost(seconds=3)
    with pytest.raises(SandboxError, match="(?s)not even begun.*set_limits.*RLIMIT_LOST"):
        judge(sandbox, HONEST["plain"])
    sandbox.limits = LIMITS
    assert passes_again(sandbox)
    broken = (
        "import torchtune_grpo.sandbox.fences as f; k = f.syscalls; k.restrict_with_landlock = "
    )
    broken += "f._isolate = lambda *_, **__: k.call_libc('mount', *[None] * 5); main("
    monkeypatch.setattr(_server, "_BOOT", _server._BOOT.replace("main({role", broken + "{role"))
    fresh = CodeSandbox(LIMITS, namespaces=sandbox.namespaces)
    with pytest.raises(SandboxError, match="(?s)not even begun.*OSError.*mount: "):
        passes_again(fresh)


def test_a_machine_without_a_folder_is_not_the_completions_fault(sandbox, monkeypatch):
    if sandbox.namespaces:
        pytest.skip("the folder is in memory")
    assert passes_again(sandbox)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(SandboxError, match="this machine refuses what a sandbox needs.*/nowhere"):
        judge(sandbox, HONEST["plain"])
    monkeypatch.undo()
    assert passes_again(sandbox)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_others_fill_is_not_the_completions_fault(tmp_path, monkeypatch):
    """Without namespaces its folder is on this machine's disk. What it fills itself is its own."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=140m,mode=777", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    honest = "def solve(n): return open('x', 'w').write('x' * n)"
    greedy = "for n in range(9): open(f'{n}', 'w').write('x' * 2**24)\nassert 0"
    test = "assert solve(2**21) == 2**21"
    sandbox = CodeSandbox(Limits(seconds=5, megabytes=200), namespaces=False)
    try:
        assert judge(sandbox, honest, test=test).passed
        (tmp_path / "others").write_bytes(b"x" * 139 * 2**20)
        with pytest.raises(SandboxError, match="the disk is full, of which .*torchtune_grpo_code_"):
            judge(sandbox, honest, test=test)
        os.remove(tmp_path / "others")
        assert "No space left" in judge(sandbox, greedy).why
    finally:
        sandbox.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_no_fence_at_all_is_refused():
    """On a kernel with neither namespaces nor Landlock, unless asked for; then it is said."""
    sandbox = CodeSandbox(namespaces=False)
    sandbox._start()
    facts = {**sandbox._server.facts, "landlock": 0, "filter": False, "counted": False}
    missing = "seccomp.* and no namespaces .* and no limit on processes .*set unfenced: true"
    with pytest.raises(SandboxError, match=missing):
        sandbox._check_fences(facts)
    sandbox.unfenced = True
    sandbox._start()
    sandbox._check_fences(facts)
    sandbox._server.facts = facts
    assert "READ THIS MACHINE'S FILES, USE THE NETWORK, " in sandbox.confinement()
    assert "SYSTEM CALLS ARE NOT FILTERED" in sandbox.confinement()
    assert "NUMBER OF PROCESSES HAS NO LIMIT" in sandbox.confinement()
    sandbox.close()


FORKS = """
import sys
from torchtune_grpo.sandbox.code import CodeSandbox
from torchtune_grpo.sandbox.exam import Exam
sandbox = CodeSandbox(unfenced=sys.argv[1] == "True")
code = '''
import os, signal
def solve(n):
    made = 0
    try:
        while made < n:
            if not os.fork(): signal.pause()
            made += 1
    except BlockingIOError: pass
    return made
'''
test = "raise ValueError(solve(60))"
print(sandbox.judge(code, Exam("solve", test=test)).why)
print(sandbox.confinement())
sandbox.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have what it loses here")
@pytest.mark.parametrize(
    ("dropped", "unfenced", "says"),
    [
        ([21], False, ["ValueError: 15\n", "in namespaces of their own"]),  # SYS_ADMIN
        ([21, 31], False, ["ValueError: 15\n", "refuses namespaces"]),  # SETFCAP
        ([21, 7], False, ["no limit on processes of root (be another user"]),  # SETUID
        ([21, 7], True, ["ValueError: 60\n", "NUMBER OF PROCESSES HAS NO LIMIT"]),
    ],
    ids=["container", "no mapping", "no users", "unfenced"],
)
def test_processes_of_root_without_capabilities_are_limited(dropped, unfenced, says):
    """As in many containers: no user is exempt from the limit, or else it is refused."""
    ran = run_without(dropped, FORKS, unfenced)
    assert all(text in ran.stdout + ran.stderr for text in says), ran
    assert ("HAS NO LIMIT" in ran.stdout) == unfenced


@pytest.mark.parametrize("its_folder_too", [False, True])
def test_a_server_that_is_lost_takes_all_along_and_is_replaced(sandbox, its_folder_too):
    """Its completion, too, though it runs as another user, in a session of its own.

    The kernel would end these processes first where memory runs out. It is the completion's fault,
    or one would not count whenever it takes too long to kill.
    """
    assert passes_again(sandbox)
    server, found = sandbox._server.pid, []
    sleeps = {"code": SLOW["sleep"], "seconds": 100}
    thread = threading.Thread(target=lambda: found.append(judge(sandbox, **sleeps).why))
    thread.start()
    assert wait_until(lambda: len(syscalls.processes_of(server)) == 2)
    family = [server, *syscalls.processes_of(server)]
    chosen = [Path(f"/proc/{process}/oom_score_adj").read_text() for process in family]
    if its_folder_too:
        sandbox.kill()
    else:
        os.kill(server, 9)
    thread.join()
    assert chosen == ["1000\n"] * 3
    assert found == ["the completion brought its sandbox down"]
    assert wait_until(lambda: not any(map(is_alive, family)))
    assert passes_again(sandbox)


def own_two_rewards(folder: Path) -> None:
    """Calls, from a folder, a code reward and an isolated one that never end."""
    os.chdir(folder)
    nodes = [
        {"_component_": "torchtune_grpo.rewards.CodeReward", "timeout": 1000},
        {"_component_": "actors.sleeps", "isolation": "process", "timeout": 1000},
    ]
    text = "```python\nimport os, time\ndef solve(n):\n    os.fork(); time.sleep(1000)\n```"
    columns = {"test": ["assert solve(1) == 1"], "entry_point": ["solve"]}
    arguments = {"prompts": [""], "completions": [text], "columns": columns}
    for node in nodes:
        score = RewardSet.from_config([node])
        threading.Thread(target=score, kwargs=arguments, daemon=True).start()
    threading.Event().wait()


ACTOR = """
import subprocess, time
def sleeps(prompts, completions, **columns):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)
"""


def test_nothing_outlives_an_owner_that_is_killed(tmp_path):
    """kill -9 in the middle of a code reward and an isolated reward: all their processes end."""
    (tmp_path / "actors.py").write_text(ACTOR)
    owner = multiprocessing.get_context("fork").Process(target=own_two_rewards, args=(tmp_path,))
    owner.start()
    try:
        # The server, the test, the completion and its child; the reward's server, the reward and
        # its child.
        assert wait_until(lambda: len(syscalls.processes_of(owner.pid)) == 7, seconds=60)
        family = syscalls.processes_of(owner.pid)
    finally:
        owner.kill()
        owner.join()
    assert wait_until(lambda: not any(is_alive(pid) for pid in family), seconds=20)


def test_no_folder_outlives_an_owner_that_is_killed(tmp_path):
    """Nor what a completion has written there."""
    code = """
from torchtune_grpo.sandbox.code import CodeSandbox, Limits
from torchtune_grpo.sandbox.exam import Exam
code = "open('written', 'w').close()\\nimport time; time.sleep(1000)"
sandbox = CodeSandbox(Limits(seconds=1000), namespaces=False)
sandbox.judge(code, Exam("solve", test="solve(0)"))
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as owner:
        try:
            assert wait_until(lambda: list(tmp_path.glob("*/written")), seconds=30)
        finally:
            owner.kill()
    assert wait_until(lambda: not os.listdir(tmp_path))


# --- The table of system calls: its numbers are the kernel's, on both architectures ---------------

HEADERS = (
    "/usr/include/x86_64-linux-gnu/asm/unistd_64.h /usr/include/asm/unistd_64.h",
    "/usr/include/asm-generic/unistd.h",
)


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_are_those_of_the_kernels_headers(column):
    headers = [path for path in map(Path, HEADERS[column].split()) if path.exists()]
    if not headers:
        pytest.skip("the kernel's headers are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", headers[0].read_text())
    known = {"newfstatat": dict(found)["fstatat"]} if column else {}
    known = {**dict(found), **known, "fchmodat2": "452"}  # which older headers lack
    tables = (seccomp._CALLS, seccomp._WITHOUT_EFFECT, *seccomp._CONDITIONS)
    calls = ",".join(tables).split(",")
    assert len(calls) > 150
    for name, *numbers in map(str.split, calls):
        assert numbers[column] == known.get(name, "-"), name


@pytest.mark.parametrize("column", [0, 1])
def test_no_jump_leaves_the_program(column):
    """Which the kernel would refuse, and cannot be tried for another architecture."""
    program = seccomp._program(column, 0)
    steps = [program[i : i + 8] for i in range(0, len(program), 8)]
    for place, (operation, _, if_true, if_false, *_) in enumerate(steps):
        if operation & 7 == 5:  # a jump
            assert place + 1 + max(if_true, if_false) < len(steps)
    assert steps[-1][0] == seccomp._RETURN
