"""What a run leaves behind when it dies or hangs: NCCL's recorder, CUDA's core dump, answers.

    NCCL's flight recorder   nccl_rank<R>     of soaks and programs on GPUs; written by the rank's
                                              watchdog thread when the leader asks by the pipe
                                              nccl_rank<R>.pipe
    a program's answer       rank<R>.answer   by a thread of the recorder, asked by rank<R>.ask
    CUDA's core dump         cuda<R>.core     a light one: registers and the kernel, no memory; the
                                              program goes on and gets its error; of soaks

What the user has set of these variables stands. A dump holds only plain values, so it is unpickled
with all classes refused. Replays of graphs enqueue nothing that NCCL records: a rank that waits in
one shows the last collectives outside of it.
"""

import ast
import errno
import io
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from harness.engine.collective_log import Place, answer_path, group_key, place_path, read_place
from harness.records import RunSpec
from harness.store.files import read_plain, read_tail

BUFFER_ENTRIES = 2000
MAX_DUMP_BYTES = 256 << 20
EVIDENCE_TAIL_BYTES = 64 << 10
DUMP_S = 5.0
"""Given to watchdogs, which look for requests once a second, and write."""
ANSWER_S = 2.0
"""Given to a program's ranks to say where they are."""
_COREDUMP_FLAGS = (
    "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,"
    "skip_constbank_memory,skip_abort"
)
DEFAULT_GROUP = "default_pg"
_NOT_UNDERSTOOD = (
    OSError, EOFError, pickle.UnpicklingError, ValueError, SyntaxError, LookupError, TypeError,
    AttributeError,
)  # fmt: skip
"""What comes of a dump that is damaged, or of another version."""
NOT_OF_PROGRAM = re.compile(r"/(site|dist)-packages/torch/|/harness/recorder/|^<|^\?\?")
"""Files that every program's stack goes through."""
_EXCEPTION = re.compile(r"coredump: Detected an exception of type (\w+)")
_FRAME = re.compile(r"coredump:\s+#\d+\s+0x[0-9a-f]+\s+(\S.*)")
"""Of the stack of the warp that failed, innermost first: the last one is the kernel."""


def evidence_environment(
    spec: RunSpec, folder: Path, rank: int, set_already: Mapping[str, str]
) -> dict[str, str]:
    """Variables that make a rank leave evidence; none but for soaks and programs on GPUs."""
    if spec.device != "cuda" or not (_is_program(spec) or spec.soak is not None):
        return {}
    prefix = str(folder.absolute() / "nccl_rank")
    files = ("NCCL_DEBUG_INFO_TEMP_FILE", "FR_DUMP_TEMP_FILE", "NCCL_DEBUG_INFO_PIPE_FILE")
    wanted = {f"TORCH_{name}": prefix for name in files} | {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(BUFFER_ENTRIES), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }  # fmt: skip
    if spec.soak is not None:
        # A core dump takes time, and in a program an error may be meant to be caught.
        switches = ("ENABLE_COREDUMP_ON_EXCEPTION", "ENABLE_LIGHTWEIGHT_COREDUMP",
                    "COREDUMP_SHOW_PROGRESS")  # fmt: skip
        wanted |= {f"CUDA_{name}": "1" for name in switches} | {
            "CUDA_COREDUMP_GENERATION_FLAGS": _COREDUMP_FLAGS,
            "CUDA_COREDUMP_FILE": str(folder.absolute() / f"cuda{rank}.core"),
        }
    return {name: value for name, value in wanted.items() if name not in set_already}


def dumps_take_s(spec: RunSpec) -> float:
    """Seconds that ranks need to answer when they are asked where they are."""
    if evidence_environment(spec, Path(), 0, {}):
        return DUMP_S
    return ANSWER_S if _is_program(spec) and spec.world_size > 1 else 0.0


def _is_program(spec: RunSpec) -> bool:
    return spec.config.get("program") is not None


def prepare_to_ask(spec: RunSpec, folder: Path, ranks: Iterable[int]) -> None:
    """Make the pipes at which ranks of a program wait to be asked where they are."""
    if not _is_program(spec) or spec.world_size == 1:
        return
    for rank in ranks:
        with suppress(OSError):  # a file system without pipes: such a rank is not asked
            os.mkfifo(folder / f"rank{rank}.ask")


def ask_for_dumps(folder: Path, ranks: Iterable[int]) -> None:
    """Ask ranks where they are: NCCL's watchdogs and the recorder's threads, if there are any."""
    names = ("nccl_rank{}.pipe", "rank{}.ask")
    for path in (folder / name.format(rank) for rank in ranks for name in names):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENXIO):
                continue  # no pipe, or nobody reads it
            raise
        os.write(fd, b"1\n")
        os.close(fd)


def remove_pipes(folder: Path, ranks: Iterable[int], *, all_went_well: bool) -> None:
    """Take away what ranks were asked by, and of a run that ended well their places, too."""
    for rank in ranks:
        for path in (folder / f"nccl_rank{rank}.pipe", folder / f"rank{rank}.ask"):
            path.unlink(missing_ok=True)
        if all_went_well:
            place_path(folder, rank).unlink(missing_ok=True)
            answer_path(folder, rank).unlink(missing_ok=True)


class _PlainUnpickler(pickle.Unpickler):
    """Takes apart numbers, texts, lists and mappings; a dump has nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a dump of plain values")


def read_dump(path: Path) -> Place | None:
    """Where a rank was by NCCL's recorder; None if it says nothing that can be understood."""
    try:
        dump = _PlainUnpickler(io.BytesIO(read_plain(path, MAX_DUMP_BYTES))).load()
        groups = {
            str(config["name"]): tuple(int(rank) for rank in ast.literal_eval(config["ranks"]))
            for config in dump["pg_config"].values()
        }
        entries = [entry for entry in dump["entries"] if not entry.get("is_p2p")]
        return _place(entries, groups)
    except _NOT_UNDERSTOOD:
        return None


def last_place(folder: Path, rank: int) -> Place | None:
    """Where a rank was: by its answer, by NCCL's recorder, or by its own notes; else None."""
    if (answer := read_place(answer_path(folder, rank))) is not None:
        return answer
    own = read_place(place_path(folder, rank))
    dump = read_dump(folder / f"nccl_rank{rank}")
    if own is None or not (own.operator or own.entered):
        return dump
    if dump is None:
        return own
    # NCCL counts no steps.
    return replace(dump, step=own.step, entered=own.entered | dump.entered)


def last_module(folder: Path, rank: int) -> str:
    """The module that a rank was in, where it noted that; else ""."""
    answer = read_place(answer_path(folder, rank))
    own = answer or read_place(place_path(folder, rank))
    return own.module if own is not None else ""


def _place(entries: list[dict[str, Any]], groups: Mapping[str, tuple[int, ...]]) -> Place | None:
    """The first collective that is not over, or the last one."""
    if not entries:
        return None

    def key_of(entry: dict[str, Any]) -> tuple[tuple[int, ...], str]:
        name, description = map(str, entry["process_group"])
        return groups[name], "" if description == DEFAULT_GROUP else name

    entered: dict[str, int] = {}
    for entry in entries:
        key = group_key(*key_of(entry))
        entered[key] = max(entered.get(key, 0), int(entry["collective_seq_id"]))
    open_ones = [entry for entry in entries if entry["state"] != "completed"]
    at = open_ones[0] if open_ones else entries[-1]
    group, name = key_of(at)
    if open_ones:
        # It waits here, whatever was enqueued after it.
        entered[group_key(group, name)] = int(at["collective_seq_id"])
    operator = str(at["profiling_name"]).rpartition(":")[2]
    return Place(
        step=-1, operator=operator, label="", group=group, is_inside=bool(open_ones),
        entered=entered, name=name, called_at=_called_at(at.get("frames") or []),
    )  # fmt: skip


def _called_at(frames: list[dict[str, Any]]) -> str:
    """The innermost line that is neither torch's nor the recorder's."""
    for frame in frames:
        path = PurePath(frame["filename"])
        if not NOT_OF_PROGRAM.search(path.as_posix()):
            return f"{path.name}:{int(frame['line'])} in {frame['name']}"
    return ""


def kernel_words(stderr_tail: str, folder: Path, rank: int) -> str:
    """What CUDA's core dump says of an illegal access, in words; "" without one."""
    core = folder / f"cuda{rank}.core"
    found, frames = _EXCEPTION.findall(stderr_tail), _FRAME.findall(stderr_tail)
    if not (found or core.exists()):
        return ""
    what = found[0] if found else "an exception"
    if frames:
        function = f"{frames[0].strip()} of " if len(frames) > 1 else ""
        return f"CUDA's core dump says {what} in {function}kernel {frames[-1].strip()}"
    if core.exists():
        command = f"cuda-gdb -ex 'target cudacore {core.name}'"
        return f"CUDA's core dump says {what}; `{command}` names the kernel"
    return f"CUDA says {what}; it left no core dump, so the kernel is not known"


def tail_of(path: Path, size_bytes: int = EVIDENCE_TAIL_BYTES) -> str:
    """The end of a text file; empty if it cannot be read, or is a link or a pipe."""
    return read_tail(path, size_bytes).decode(errors="replace")
