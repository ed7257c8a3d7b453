"""Processes that may die: forked from one that has imported what they need and does nothing itself.

    test -> FreshProcess.run(function, *args) -> a process of its own calls it
         <- its result, or AssertionError with its traceback
    inside it: fork_each(function, 3) -> processes that may be killed; how each ended

A warm rank has threads and a process group, so neither may be forked nor killed cheaply: its
successor imports torch's distributed part anew. Here only the first process does.
"""

import ctypes
import importlib
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from typing import Any

LIMIT_S = 120.0
_PR_SET_PDEATHSIG = 1


class FreshProcess:
    """Calls functions, each in a process of its own. Starts with the first call.

    Args:
        modules: imported before any call.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._started: tuple[Any, Any] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(*args)` returns; both travel by pickle.

        Raises:
            AssertionError: it raised, died, or did not answer within `LIMIT_S`.
        """
        if self._started is None:
            context = get_context("forkserver")
            pipe, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._modules), daemon=True)
            process.start()
            theirs.close()
            self._started = process, pipe
        pipe = self._started[1]
        try:
            pipe.send((function, args))
            assert pipe.poll(LIMIT_S), f"{function.__name__} did not answer within {LIMIT_S} s"
            value, error = pipe.recv()
        except BaseException:
            self.close()
            raise
        assert not error, error
        return value

    def close(self) -> None:
        if self._started is not None:
            process, pipe = self._started
            process.kill()
            process.join()
            pipe.close()
            self._started = None


def fork_each(function: Callable[[int], Any], num: int) -> list[int]:
    """Call `function(0)`, ... in `num` processes at once; their exit codes, -n if signal n did it.

    For a process with one thread. An exception is printed and makes the code 1.
    """
    pids = []
    for number in range(num):
        pid = os.fork()
        if not pid:
            _end_with(function, number)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _end_with(function: Callable[[int], Any], number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        function(number)
    except BaseException:  # noqa: BLE001  (whatever it was, this copy of the caller ends here)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve(pipe: Any, modules: tuple[str, ...]) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test session's own interrupt ends us
    # The math library's idle threads count as threads: 3.12 warns, and they are of no matter.
    warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
    torch.set_num_threads(1)
    for name in modules:
        importlib.import_module(name)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        code = fork_each(partial(_answer, pipe, task), 1)[0]
        if code:
            pipe.send((None, f"the process ended with code {code}"))


def _answer(pipe: Any, task: tuple[Callable[..., Any], tuple[Any, ...]], _: int) -> None:
    function, args = task
    try:
        answer = function(*args), ""
    except BaseException:  # noqa: BLE001  (whatever ended it is the answer)
        answer = None, traceback.format_exc()
    pipe.send(answer)
