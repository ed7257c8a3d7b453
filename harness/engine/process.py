"""Processes of Linux: death with the parent, adoption of orphans, an end to every child.

A leader or forkserver is a *subreaper*: what its ranks leave behind becomes its own child, even in
another session. When a parent is killed and cannot clean up, the kernel kills its children; what a
killed subreaper had adopted is found by a mark in its environment, which children inherit.
"""

import ctypes
import errno
import math
import os
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

import harness

GATE_VARIABLE = "HARNESS_GATE"
"""In the environment of a rank that was started early: the descriptor on which to wait for "go"."""
MOST_LOOKS, LOOK_S = 20, 0.05
ORPHANS_S = 2.0
"""Given to what ranks leave behind: trackers of shared memory unlink what nobody else would."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent_pid: int, *, gently: bool = False) -> None:
    """Have the kernel end this process when its parent dies: with SIGKILL, or gently SIGTERM."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM if gently else signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died between the fork and this call


def wait_for_go() -> float:
    """In a rank that was started early: wait until the run whose devices it takes over has ended.

    Returns when that was, by the monotonic clock; in any other rank -inf, at once.
    """
    if not (fd := os.environ.pop(GATE_VARIABLE, "")):
        return -math.inf
    while not os.read(int(fd), 1):
        signal.pause()  # who was to say "go" is gone: the kernel ends us, too
    os.close(int(fd))
    return time.monotonic()


def wake_as_parent_dies() -> None:
    """Have the kernel send SIGCONT when this process' parent dies: one that is stopped goes on,
    sees that its parent is gone, and cleans up."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Process ids of this process' children, zombies included."""
    try:
        lists = [task / "children" for task in Path("/proc/self/task").iterdir()]
        return [int(pid) for each in lists for pid in each.read_text(encoding="utf-8").split()]
    except FileNotFoundError:  # a kernel that does not list them
        return [pid for pid in psutil.pids() if parent_of(pid) == os.getpid()]


def _stat(pid: int) -> list[str]:
    """Fields of proc(5)'s stat after the command's name; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The command name, in parentheses, may itself hold spaces and parentheses.
    return stat.rpartition(")")[2].split()


def parent_of(pid: int) -> int | None:
    """Parent of `pid`, None if there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or a debugger holds a process."""
    return _stat(pid)[:1] in (["T"], ["t"])


def code_of_zombie(pid: int) -> int | None:
    """Exit code (negative: signal) of a process that has ended and was not yet waited for."""
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if fields and fields[0] == "Z" else None


def await_children() -> None:
    """Reap children as they exit by themselves, for `ORPHANS_S` at most."""
    until_s = time.monotonic() + ORPHANS_S
    while children() and time.monotonic() < until_s:
        with suppress(ChildProcessError):
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(LOOK_S)


def kill_children(spare: Collection[int] = ()) -> None:
    """SIGKILL every child but `spare`, and what they leave behind, and wait for all of them."""
    while doomed := [pid for pid in children() if pid not in spare]:
        for pid in doomed:
            signal_quietly(pid, signal.SIGKILL)
        for pid in doomed:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def kill_marked(mark: str) -> None:
    """SIGKILL every process of ours that has `mark`, NAME=VALUE, in its first environment."""
    for _ in range(MOST_LOOKS):  # what is killed may have forked meanwhile
        marks = {pid: has_mark(pid, mark) for pid in psutil.pids() if pid != os.getpid()}
        marked = [pid for pid, is_marked in marks.items() if is_marked]
        if sum(signal_quietly(pid, signal.SIGKILL) for pid in marked) == 0:
            if None not in marks.values():
                return
            time.sleep(LOOK_S)


def has_mark(pid: int, mark: str) -> bool | None:
    """Whether a process of ours has `mark`, NAME=VALUE, in its first environment.

    None during an exec, when the environment cannot be read yet.
    """
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        if not environ and not Path(f"/proc/{pid}/statm").read_text().startswith("0 "):
            return None
    except OSError:
        return False
    return mark.encode() in environ.split(b"\0")


class ChildWakeup:
    """A descriptor that becomes readable when a child ends, by SIGCHLD, for a selector to wait on.

    A forked process inherits it and must `disarm` it before anything else, then `close` it.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        # A Python-level handler must exist for the descriptor to be written.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    @staticmethod
    def disarm() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)


def signal_quietly(pid: int, number: int) -> bool:
    """Send a signal; False if the process is gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def no_process(number: int) -> str:
    """Name of the failure of a fork, by its error number; "" if that is none of the machine's."""
    return "no_process" if number in (errno.EAGAIN, errno.ENOMEM) else ""


def kill_group(leader_pid: int) -> None:
    """SIGKILL a whole process group, if any of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(leader_pid, signal.SIGKILL)


def server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of the forkserver: one OpenMP thread, since a process with threads cannot fork
    safely; one hash seed, so that sets of strings are in the same order in every run."""
    root = Path(harness.__file__).resolve().parent.parent
    paths = [p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if root.name not in ("site-packages", "dist-packages") and str(root) not in paths:
        paths.append(str(root))
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {"PYTHONHASHSEED": "0", **environ, **fixed}
