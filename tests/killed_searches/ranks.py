"""Ranks without torch: in any pool but the double one, weights go wrong from step 2 on."""

import dataclasses
from pathlib import Path

from fsdp_core.config import TrainConfig
from harness.checks.complete import launches, owed
from harness.recorder import RecordFile
from harness.records import EndRecord, RunSpec
from harness.store.contents import KeptTensor, write_contents
from tests.kill_and_resume.ranks import note_start
from tests.planted.stub_ranks import initial_record, start_record, step_record


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """Write the records of a run."""
    note_start(spec, folder, rank)
    file = RecordFile(folder / f"rank{rank}.jsonl")
    file.write(dataclasses.replace(start_record(spec, rank), run=spec.key))
    file.write(initial_record(rank))
    steps = spec.config["steps"]
    is_wrong = spec.config["fsdp"]["pool"] != "double" and rank == spec.world_size - 1
    for step in range(steps):
        record = step_record(step, rank)
        if is_wrong and step >= 2:
            record = dataclasses.replace(record, digests=record.digests | {"weights": "1" * 32})
        file.write(record)
    if spec.keep is not None:
        data = bytes([is_wrong] * 4)
        about = KeptTensor(
            name=spec.keep.names[0], part=0, dtype="float32", shape=(1,),
            as_digested=True,
        )  # fmt: skip
        write_contents(folder, spec.key, rank, spec.keep.step, [(about, data)])
    graphs = tuple(owed(TrainConfig.from_dict(spec.config), rank, steps))
    file.write(
        EndRecord(rank=rank, steps=steps, peak_bytes=1, startup_s=0.0, wall_s=0.0,
                  replays=launches(graphs), graphs=graphs)
    )  # fmt: skip
    return 0
