"""What a plan asks of whoever carries it out, or keeps it: whole configurations, and no secrets."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsdp_core.config import TrainConfig
from harness.errors import UsageError, one_line
from harness.masking import Masker
from harness.program.spec import program_of
from harness.records import CaseSpec, each_of
from harness.repeats import runs_of


def check_whole(place: Path, cases: Iterable[CaseSpec]) -> None:
    """See that a stored plan has the settings that this version of the trainer has.

    Raises:
        UsageError: a configuration lacks a key, has an unknown one, or breaks a rule.
    """
    specs = {
        spec.key: spec for case in cases if not case.skip_reason for spec in runs_of(case)
        if spec.is_builtin
    }  # fmt: skip
    for spec in specs.values():
        try:
            whole = TrainConfig.from_dict(spec.config).to_dict()
            lacks = [name for name, value in whole.items() if name not in spec.config or (
                isinstance(value, dict) and set(value) - set(spec.config[name])
            )]  # fmt: skip
            if lacks:
                raise ValueError(f"it lacks settings of {', '.join(lacks)}")
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            why = one_line(f"{type(error).__name__}: {error}")
            raise UsageError(
                f"{place} is of another version or damaged: the configuration of {spec.key}: {why}"
            ) from error


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
