"""What differs before a run is started when Slurm starts it: device, slots, what is stored.

The machine at hand is then only where the harness waits: what it lacks says nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from harness.engine.slurm_job import SlurmOptions
from harness.errors import UsageError
from harness.records import CaseSpec, RecordError
from harness.repeats import confirming_runs, runs_of
from harness.schedule import unique_runs

MANIFEST_KEY = "slurm"


def device_on_slurm(wanted: str, options: SlurmOptions) -> Literal["cpu", "cuda"]:
    """The device that `auto`, `cpu` or `cuda` means on nodes that nobody has seen yet.

    Raises:
        UsageError: GPUs wanted, but none asked for.
    """
    if wanted == "cpu" or (wanted == "auto" and options.gpus_per_node is None):
        return "cpu"
    if options.gpus_per_node is None:
        raise UsageError(
            "device cuda on Slurm: expected launch.slurm.gpus_per_node (--slurm "
            "gpus_per_node=8), got nothing"
        )
    return "cuda"


def slots_on_slurm(wanted: int | None, cases: Sequence[CaseSpec]) -> int:
    """Ranks that may be submitted at a time: all of them, as Slurm has a queue of its own."""
    return wanted or max(1, sum(run.world_size for run in unique_runs(cases).values()))


def references_of(cases: Sequence[CaseSpec]) -> dict[str, str]:
    """By key of a run, that of the reference which it is compared with, if it is not one itself."""
    references = {case.reference.key for case in cases}
    return {
        spec.key: case.reference.key
        for case in cases
        if not case.skip_reason
        for spec in (*runs_of(case), *confirming_runs(case).values())
        if spec.key not in references
    }


def stored_options(manifest: Mapping[str, Any]) -> SlurmOptions | None:
    """What an earlier harness asked of Slurm; None if it ran on its own machine.

    Raises:
        UsageError: the manifest is damaged there.
    """
    stored = manifest.get(MANIFEST_KEY)
    if stored is None:
        return None
    try:
        return SlurmOptions.from_json(stored)
    except RecordError as error:
        raise UsageError(f"the run folder's manifest is damaged: {error}") from error
