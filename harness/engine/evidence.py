"""What a run leaves behind when it dies or hangs: NCCL's recorder, CUDA's core dump, answers.

    NCCL's flight recorder   nccl_rank<R>     of soaks and programs on GPUs; written by the rank's
                                              watchdog thread, asked by the pipe nccl_rank<R>.pipe
    a program's answer       rank<R>.answer   by a thread of the recorder, asked by rank<R>.ask
    CUDA's core dump         cuda<R>.core     a light one: registers and the kernel, no memory; of
                                              soaks: a program may mean to catch its error

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
_OF_NCCL = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": str(BUFFER_ENTRIES), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    **dict.fromkeys(("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE",
                     "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"), "{folder}/nccl_rank"),
}  # fmt: skip
_OF_CUDA = {
    **dict.fromkeys(("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP",
                     "CUDA_COREDUMP_SHOW_PROGRESS"), "1"),
    "CUDA_COREDUMP_FILE": "{folder}/cuda{rank}.core",
    "CUDA_COREDUMP_GENERATION_FLAGS": "skip_nonrelocated_elf_images,skip_global_memory,"
    "skip_shared_memory,skip_local_memory,skip_constbank_memory,skip_abort",
}  # fmt: skip
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
    if spec.device != "cuda" or (spec.is_builtin and spec.soak is None):
        return {}
    wanted = _OF_NCCL | (_OF_CUDA if spec.soak is not None else {})
    place = str(folder.absolute())
    return {
        name: value.replace("{rank}", str(rank)).replace("{folder}", place)
        for name, value in wanted.items() if name not in set_already
    }  # fmt: skip


def dumps_take_s(spec: RunSpec) -> float:
    """Seconds that ranks need to answer when they are asked where they are."""
    if evidence_environment(spec, Path(), 0, {}):
        return DUMP_S
    return 0.0 if spec.is_builtin or spec.world_size == 1 else ANSWER_S


def prepare_to_ask(spec: RunSpec, folder: Path, ranks: Iterable[int]) -> None:
    """Make the pipes at which ranks of a program wait to be asked where they are."""
    for rank in () if spec.is_builtin or spec.world_size == 1 else ranks:
        with suppress(OSError):  # a file system without pipes: such a rank is not asked
            os.mkfifo(folder / f"rank{rank}.ask")


def _pipes(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"nccl_rank{rank}.pipe", folder / f"rank{rank}.ask"


def ask_for_dumps(folder: Path, ranks: Iterable[int]) -> None:
    """Ask ranks where they are: NCCL's watchdogs and the recorder's threads, if there are any."""
    for path in (path for rank in ranks for path in _pipes(folder, rank)):
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
        places = (place_path(folder, rank), answer_path(folder, rank)) if all_went_well else ()
        for path in (*_pipes(folder, rank), *places):
            path.unlink(missing_ok=True)


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
    own, dump = read_place(place_path(folder, rank)), read_dump(folder / f"nccl_rank{rank}")
    if own is None or not (own.operator or own.entered):
        return dump
    # NCCL counts no steps.
    return own if dump is None else replace(dump, step=own.step, entered=own.entered | dump.entered)


def last_module(folder: Path, rank: int) -> str:
    """The module that a rank was in, where it noted that; else ""."""
    own = read_place(answer_path(folder, rank)) or read_place(place_path(folder, rank))
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
    frames = ((PurePath(frame["filename"]), frame) for frame in at.get("frames") or [])
    called = (
        f"{path.name}:{int(frame['line'])} in {frame['name']}"
        for path, frame in frames if not NOT_OF_PROGRAM.search(path.as_posix())
    )  # fmt: skip
    return Place(
        step=-1, operator=str(at["profiling_name"]).rpartition(":")[2], label="", group=group,
        is_inside=bool(open_ones), entered=entered, name=name, called_at=next(called, ""),
    )  # fmt: skip


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
