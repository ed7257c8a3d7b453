"""Which collective this rank is in, for whoever has to explain a hang.

    rank<R>.place    written as it goes: the methods of torch's process groups are wrapped where
                     Python calls them, and each entry is noted in a file that is mapped into memory
    rank<R>.ask      a pipe that the run's leader makes and writes to once it gives the run up
    rank<R>.answer   what a thread that waits at that pipe then writes

DDP's reducer and functional collectives call C++ and pass no wrapped method. The answer has them:
torch's own flight recorder holds every collective that is not over, with the stack that started it,
and a group counts its collectives whoever calls them. Nothing is paid for that before the hang.
`harness.engine.evidence` reads both files; what was written is there whatever ends the rank.
"""

import functools
import json
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from harness.recorder import PLACE_BYTES, PlaceFile
from harness.recorder.observer import Observer
from harness.recorder.session import patch
from harness.recorder.state import OUTSIDE, tracked

COLLECTIVES = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "reduce": "reduce",
    "broadcast": "broadcast", "allgather": "all_gather", "gather": "gather", "scatter": "scatter",
    "_allgather_base": "all_gather_into_tensor", "all_gather_single": "all_gather_into_tensor",
    "_all_gather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single", "all_to_all_single": "all_to_all_single",
    "all_to_all_base": "all_to_all_single", "barrier": "barrier", "all_reduce_barrier": "barrier",
}  # fmt: skip
"""Methods of `ProcessGroup` and names in torch's flight recorder, as `torch.distributed` says."""
BETWEEN_TWO = ("send", "recv", "recv_anysource")
"""Methods that some groups count with their collectives, though ranks need not call as many."""
MOST_MARKS = 4096
MOST_RECENT = 32
"""Collectives that a rank names when it is asked, where `PLACE_BYTES` has room for them."""
RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""Functions of torch that give what is recorded of collectives: of NCCL, of the other backends."""
REDUCER = "DistributedDataParallel's reducer"
SIZED = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
"""Collectives in which every rank has a tensor of one size."""
Entry = dict[str, Any]
"""A collective of torch's flight recorder."""


class Notes:
    """Keeps one rank's place, and says it when it is asked."""

    def __init__(self, observer: Observer) -> None:
        self._observer, session = observer, observer.session
        place, self._ask, self._answer = (
            session.folder / f"rank{session.rank}.{kind}" for kind in ("place", "ask", "answer")
        )
        self._entered: dict[str, int] = {}
        self._between_two: dict[str, int] = {}
        self._marks: dict[tuple[str, int], dict[str, Any]] = {}
        self._messages = weakref.WeakKeyDictionary[Any, dict[str, Any]]()
        self._message: dict[str, Any] = {}  # the one that is waited for
        self._uncounted = ""  # key of a group whose own count does not hold
        self._last: dict[str, Any] = {"operator": "", "label": "", "group": [], "name": ""}
        self._is_inside = False
        self._kept: set[Any] = set()
        self._file = PlaceFile(place)

    def install(self) -> Callable[..., None]:
        for method, name in COLLECTIVES.items():
            if hasattr(dist.ProcessGroup, method):
                patch(method, functools.partial(self._enter, name), dist.ProcessGroup)
        for method in BETWEEN_TWO:
            patch(method, functools.partial(self._between, method), dist.ProcessGroup)
        patch("monitored_barrier", self._monitored, dist.ProcessGroup)
        patch("wait", self._wait, dist.Work)
        modules = (dist, dist.distributed_c10d, dist.device_mesh)
        patch("destroy_process_group", self._end, *modules)
        # Not earlier: torch has threads of its own from here on.
        patch("init_process_group", self._listen, *modules)

        def leaving(*, has_failed: bool) -> None:
            self._settle()
            if has_failed:
                self._say(or_last=True)

        return leaving

    def _end(self, original: Any, *args: Any, **kwargs: Any) -> None:
        self._settle()
        # DDP's reducer has the last reference else: as a model is freed, gloo's destructor
        # waits, with Python's lock, for a thread that needs it to free what it worked on.
        self._kept.update(each for each in _groups() if "gloo" in dist.get_backend(each))
        original(*args, **kwargs)

    def _settle(self) -> None:
        self._count()
        if self._entered:
            self._write(is_inside=self._is_inside)

    def _count(self) -> None:
        """Count what each group has entered, collectives that C++ called included."""
        for group in _groups():
            _, key, _ = _named(group)
            number = None if key == self._uncounted else self._number(group, key)
            if number is not None:
                self._entered[key] = number

    def _number(self, group: Any, key: str) -> int | None:
        counted = _counted(group)
        return None if counted is None else counted - self._between_two.get(key, 0)

    # --- as it goes ----------------------------------------------------------------------------

    def _enter(self, name: str, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        ranks, key, group_name = _named(group)
        number = self._number(group, key)
        number = 1 + (self._entered.get(key, 0) if number is None else number)
        # The innermost module at work, by the stack: a hook a call would cost every program.
        label, step = self._module(sys._getframe(1)), self._observer.under_way()
        self._entered[key] = number
        how = _root(args, ranks)
        sizes = _sizes(args) if name in SIZED else ""
        about = {"operator": name, "label": label, "sizes": sizes, "how": how}
        self._marks[key, number] = about | {"step": step}
        if len(self._marks) > MOST_MARKS:
            del self._marks[next(iter(self._marks))]
        self._last = about | {"group": ranks, "name": group_name}
        return self._inside(original, group, *args, **kwargs)

    def _between(self, name: str, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        before = _counted(group)
        result = original(group, *args, **kwargs)
        ranks, key, _ = _named(group)
        if before is not None and (after := _counted(group)) is not None:
            self._between_two[key] = self._between_two.get(key, 0) + after - before
        if isinstance(result, dist.Work):
            *peer, tag = (*args, *kwargs.values())[1:]
            self._messages[result] = {
                "message": f"{name} of tag {tag}" if tag else name,
                "peer": ranks[peer[0]] if peer else -1,
            }  # fmt: skip
        return result

    def _monitored(self, original: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        """A barrier, which gloo counts as several collectives and does not record: it has the next
        number as long as a rank is in it."""
        (_, key, _), before = _named(group), _counted(group)
        self._uncounted = key
        result = self._enter("monitored_barrier", original, group, *args, **kwargs)
        self._uncounted = ""
        if before is not None and (after := _counted(group)) is not None:
            self._between_two[key] = self._between_two.get(key, 0) + after - before
        return result

    def _wait(self, original: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait for a collective, or for a message: then the rank is in no collective."""
        if (message := self._messages.get(work)) is None:
            return self._inside(original, work, *args, **kwargs)
        self._message = message
        self._write(is_inside=False)
        result = original(work, *args, **kwargs)
        self._message = {}
        self._write(is_inside=False)
        return result

    def _inside(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._write(is_inside=True)
        result = original(*args, **kwargs)
        # Not after an exception: who waited in vain has not come back from it.
        self._write(is_inside=False)
        return result

    def _module(self, frame: FrameType | None) -> str:
        modules = (owner for owner, _ in _owners(frame) if isinstance(owner, nn.Module))
        return next(filter(None, map(self._observer.names.of_module, modules)), "")

    def _write(self, *, is_inside: bool) -> None:
        self._is_inside = is_inside
        if self._observer.session.is_mine:
            self._file.write(self._last | self._facts())

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self._observer.under_way(), "is_inside": self._is_inside,
            "entered": dict(self._entered), **self._message,
        }  # fmt: skip

    # --- once it is asked ----------------------------------------------------------------------

    def _listen(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """Wait at the pipe, where the leader has made one: it is asked once, if ever."""
        if self._ask.is_fifo() and self._observer.session.is_mine:
            # For both ends: who only reads would wait here for the other side to come.
            fd = os.open(self._ask, os.O_RDWR | os.O_CLOEXEC)
            self._ask = Path()

            def listen() -> None:
                os.read(fd, 1)
                os.close(fd)
                self._say()

            threading.Thread(target=listen, name="deltazero", daemon=True).start()
        original(*args, **kwargs)

    def _say(self, *, or_last: bool = False) -> None:
        """Write where this rank is; of one that failed, the last collective may be what failed."""
        self._count()
        place = self._last | ({} if or_last else self._at_work()) | self._facts()
        with suppress(Exception):  # whatever a version of torch has there: the rest is known
            place |= self._recorded(place, or_last=or_last)
        half = self._answer.with_suffix(".tmp")
        half.write_text(fitting(place))
        half.replace(self._answer)

    def _at_work(self) -> dict[str, str]:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = list(_owners(main))
        parts = (owner for owner, _ in frames if isinstance(owner, nn.Module | Optimizer))
        phase = next(("optimizer" if isinstance(it, Optimizer) else "forward" for it in parts), "")
        phase = "backward" if self._observer.is_in_backward else phase
        codes = ((each.f_code, each.f_lineno) for _, each in frames)
        lines = (_line(code.co_filename, number, code.co_name) for code, number in codes)
        at = next(filter(None, lines), "")
        return {"module": self._module(main), "phase": phase, "at": at}

    def _recorded(self, place: dict[str, Any], *, or_last: bool) -> dict[str, Any]:
        """The first collective that is not over, which NCCL's host has left, and the last ones."""
        dumps = filter(None, (getattr(torch._C._distributed_c10d, n, None) for n in RECORDERS))
        held = (entry for dump in dumps for entry in pickle.loads(dump()).get("entries", ()))
        entries: list[Entry] = [entry for entry in held if not entry["is_p2p"]]
        entries.sort(key=lambda entry: int(entry["time_created_ns"]))
        kept = ("key", "number", "operator", "step", "sizes", "how", "called_at")
        latest = [self._described(entry, entries, place) for entry in entries[-MOST_RECENT:]]
        recent = {"recent": [{name: each[name] for name in kept} for each in latest]}
        still_open = (e for e in entries if not e.get("retired") and e["state"] != "completed")
        entry = next(still_open, None)
        is_open = entry is not None
        if entry is None and entries and (or_last or self._is_inside) and not self._message:
            entry = entries[-1]
        is_other = entry is not None and _operator(entry) != place["operator"]
        if entry is None or (self._is_inside and not is_open and is_other):
            return recent
        described = self._described(entry, entries, place)
        key, number = described.pop("key"), described.pop("number")
        return described | recent | {
            "is_inside": is_open or self._is_inside, "entered": place["entered"] | {key: number},
            "called_at": described["called_at"] or place.get("at", ""),
        }  # fmt: skip

    def _described(
        self, entry: Entry, entries: list[Entry], place: dict[str, Any]
    ) -> dict[str, Any]:
        """A collective of the flight recorder, by its number in its group."""
        name, at = str(entry["process_group"][0]), int(entry["collective_seq_id"])
        group = next(group for group in _groups() if group.group_name == name)
        ranks, key, group_name = _named(group)
        own = (int(e["collective_seq_id"]) for e in entries if str(e["process_group"][0]) == name)
        number = place["entered"].get(key, at) - len({other for other in own if other > at})
        number -= key == self._uncounted
        operator = _operator(entry)
        mark = self._marks.get((key, number), {})  # as a rank says it that is in this one
        label = mark.get("label", "")
        frames = entry.get("frames") or []
        lines = (_line(frame["filename"], frame["line"], frame["name"]) for frame in frames)
        # Nothing of Python lies between a backward pass and what C++ calls in it.
        is_of_engine = place.get("phase") == "backward"
        if frames:
            is_of_engine = frames[0]["name"] == "_engine_run_backward"
        sizes = _sized(entry["input_sizes"], entry["input_dtypes"]) if operator in SIZED else ""
        if not label and is_of_engine and _is_ddp(group):
            label = REDUCER
        known = {"operator": operator, "step": place["step"], "sizes": sizes, "how": ""} | mark
        return known | {
            "label": label, "group": ranks, "name": group_name, "key": key, "number": number,
            "called_at": next(filter(None, lines), ""),
        }  # fmt: skip


def fitting(place: dict[str, Any]) -> str:
    """A place as a line of at most `PLACE_BYTES`, with as many of its latest collectives as fit."""
    text = json.dumps(place) + "\n"
    while len(text) > PLACE_BYTES and place.get("recent"):
        place = place | {"recent": place["recent"][len(place["recent"]) // 2 + 1 :]}
        text = json.dumps(place) + "\n"
    return text


def _operator(entry: Entry) -> str:
    name = str(entry["profiling_name"]).rpartition(":")[2]
    return COLLECTIVES.get(name, name)


def _groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_names)


def _named(group: Any) -> tuple[list[int], str, str]:
    """Ranks of a group, its key as `Place.entered` has it, and its name unless it is the first."""
    try:
        ranks = dist.get_process_group_ranks(group)
        name = "" if group is dist.group.WORLD else str(group.group_name)
    except (KeyError, ValueError, RuntimeError):
        return [], "", ""
    key = ",".join(map(str, ranks))
    return ranks, f"{key} {name}" if name else key, name


def _sizes(args: tuple[Any, ...]) -> str:
    """Sizes of the inputs, which come after an output if there is one, as torch records them."""
    held = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
    inputs = (held,) if isinstance(held, torch.Tensor) else held
    types = [each.type().rpartition(".")[2].removesuffix("Tensor") for each in inputs]
    return _sized([list(each.shape) for each in inputs], types)


def _sized(sizes: list[Any], types: list[str]) -> str:
    return " ".join(map(str, [sizes, *dict.fromkeys(types)]))


def _root(args: tuple[Any, ...], ranks: list[int]) -> str:
    """Of a collective that has one, as a rank of all."""
    roots = (each.rootRank for each in args if hasattr(each, "rootRank"))
    return next((f", root {ranks[root]}" for root in roots if root < len(ranks)), "")


def _counted(group: Any) -> int | None:
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None  # a backend that does not count


def _is_ddp(group: Any) -> bool:
    """Whether a DDP module reduces in this group; asked once, of a run that is given up."""
    return any(each.process_group is group for each in tracked(DistributedDataParallel))


def _owners(frame: FrameType | None) -> Iterator[tuple[Any, FrameType]]:
    """Frames from the innermost on, each with its `self`.

    Before Python 3.13 asking a frame for its variables keeps what they held until it is asked
    again: the program's own loop, which is no method, keeps no loss or batch for longer.
    """
    while frame is not None:
        is_method = frame.f_code.co_varnames[:1] == ("self",)
        yield frame.f_locals.get("self") if is_method else None, frame
        frame = frame.f_back


def _line(path: str, line: int, name: str) -> str:
    return "" if path.startswith(OUTSIDE) else f"{Path(path).name}:{line} in {name}"
