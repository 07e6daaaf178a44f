"""Kill a forked process at each of its file operations, and in the middle of what it writes."""

import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

# What Python announces before it happens. Writes are not among them; for those there are sizes.
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.symlink")
_KILLED = 99


def kill_points(
    action: Callable[[], object],
    *,
    folder: Path,
    prepare: Callable[[], object],
    sizes: Iterable[int] = (),
) -> Iterator[str]:
    """Run ``action`` in a forked process again and again, killed elsewhere each time.

    Before the first, the second, ... file operation below ``folder``, until there are no more; then
    where a file grows beyond each of ``sizes`` bytes; and at last not at all.

    Args:
        prepare: called before each of them, when the folder is empty.

    Yields:
        Where it was killed, once the process is dead.
    """

    def killed(limit: Callable[[], object]) -> int:
        """Return the exit code of a process that acts under a limit; no other error is allowed."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        prepare()
        if (child := os.fork()) == 0:
            try:
                limit()
                action()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert (code := os.waitstatus_to_exitcode(status)) != 1
        return code

    number = 0
    while killed(partial(_die_at, number, folder)) == _KILLED:
        yield f"before file operation {number}"
        number += 1
    assert number, "there was no file operation"
    for size in sizes:
        assert killed(partial(_die_beyond, size)) == -signal.SIGXFSZ, size
        yield f"beyond {size} bytes"
    killed(lambda: None)
    yield "nowhere"


def _die_at(number: int, folder: Path) -> None:
    operations = count()

    def audit(event: str, arguments: tuple) -> None:
        if event in _EVENTS:
            # A relative path is that of shutil.rmtree, from an open folder.
            path = os.path.join(folder, str(arguments[0]))
            if path.startswith(str(folder)) and next(operations) == number:
                os._exit(_KILLED)

    sys.addaudithook(audit)


def _die_beyond(size: int) -> None:
    """Let the kernel kill this process when a file would grow beyond that; the rest is written."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # Python ignores the signal
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
