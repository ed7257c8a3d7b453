"""What a plan asks of whoever carries it out, or keeps it: whole configurations, and no secrets.

cases.json, case.json -> a configuration that its own rules accept, with every key -> runs
scenario -> settings that are stored with each run, so that none may be a password
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fsdp_core.config import ConfigError, TrainConfig
from harness.errors import UsageError, one_line
from harness.faults.catalogue import CATALOGUE
from harness.masking import Masker
from harness.plant_spec import PlantSpec, each_of
from harness.program.spec import program_of
from harness.records import CaseSpec, RecordError, RunSpec
from harness.repeats import runs_of


def check_whole(place: Path, cases: Iterable[CaseSpec]) -> None:
    """See that every run of a stored plan can be made.

    Raises:
        UsageError: a configuration lacks a key, has an unknown one, or breaks a rule.
    """
    seen: set[str] = set()
    for case in cases:
        if case.skip_reason:
            continue
        for spec in runs_of(case):
            if spec.key not in seen and (why := _flaw(spec)):
                raise UsageError(f"{place} is a damaged run folder: case {case.id}: {why}")
            seen.add(spec.key)


def _flaw(spec: RunSpec) -> str:
    if not spec.is_builtin:
        try:
            program_of(spec.config)
        except RecordError as error:
            return f"its program is none: {one_line(str(error))}"
        return ""
    try:
        whole = TrainConfig.from_dict(spec.config).to_dict()
    except ConfigError as error:
        return f"its configuration is none: {one_line(str(error))}"
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        return f"its configuration is none: {one_line(f'{type(error).__name__}: {error}')}"
    if missing := sorted(set(_leaves(whole)) - set(_leaves(spec.config))):
        return f"its configuration lacks {', '.join(missing[:4])}"
    return _flaw_of_plant(spec.plant)


def _flaw_of_plant(plant: PlantSpec | None) -> str:
    faults = each_of(plant)
    names = [fault.fault for fault in faults]
    for fault in faults:
        if fault.fault not in CATALOGUE:
            return f"no fault is named {fault.fault}"
        if names.count(fault.fault) > 1:
            return f"the fault {fault.fault} is planted twice"
        if fault.beside:
            return f"faults beside {fault.fault}, which is beside another itself"
        if not 0 < fault.chance <= 1:
            return f"the fault {fault.fault} has a chance of {fault.chance}"
    return ""


def _leaves(config: dict[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from (f"{key}.{name}" for name in value)
        else:
            yield key


def refuse_secrets(cases: Iterable[CaseSpec], arguments: Iterable[str] = ()) -> None:
    """See that nothing which runs are made from, and which is stored with them, is a secret.

    Args:
        cases: their free texts are looked at: paths, patterns, names of tensors.
        arguments: further texts that are stored as they are.

    Raises:
        UsageError: one is; it is not quoted.
    """
    masker = Masker(os.environ)
    seen: set[str] = set()
    for key, text in (*_texts(cases), *(("launch.slurm.args", text) for text in arguments)):
        if text in seen:
            continue
        seen.add(text)
        if masker.text(text) != text:
            raise UsageError(
                f"{key}: expected no secret, as this is stored with every run; got one (not "
                f"shown): leave it to a file or a variable that the machine holds"
            )


def _texts(cases: Iterable[CaseSpec]) -> Iterator[tuple[str, str]]:
    for case in cases:
        for spec in (case.reference, case.candidate):
            if (program := program_of(spec.config)) is not None:
                yield from ((f"args.{k}", str(v)) for k, v in program.args.items())
                yield from ((f"env.{k}", v) for k, v in program.env.items())
                continue
            yield "data.path", str(spec.config.get("data", {}).get("path") or "")
            yield from (("taps", str(pattern)) for pattern in spec.config.get("taps", ()))
            yield from (("plant.tensor", fault.tensor) for fault in each_of(spec.plant))
