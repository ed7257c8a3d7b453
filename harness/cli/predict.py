"""The command `harness predict`: how much memory a scenario's runs will take, without running them.

Nothing here imports torch: `python -m harness.worker predict` finds it out in a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from harness import terminal as display
from harness.engine.process import server_environment
from harness.errors import Infrastructure, NothingSelected, UsageError
from harness.program.spec import capabilities_of
from harness.records import CaseSpec, ExitCode, RunSpec
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario
from harness.scenario.selection import select

MIB = 1 << 20
COLUMNS = ("parameters", "gradients", "optimizer", "largest_unit")
COMMAND = (sys.executable, "-P", "-m", "harness.worker", "predict")


@click.command("predict")
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option(
    "-k", "keyword", metavar="EXPR", help="Only cases whose id or labels match, as in pytest."
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=YAML",
    help="Replace a value of base, as fsdp.strategy=no_shard.",
)
@click.option(
    "--axis",
    "axes",
    multiple=True,
    metavar="NAME=LIST",
    help="Replace the values of an axis, as graph=[eager,[attn]].",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value on stdout; messages go to stderr."
)
def predict_command(
    *, scenario: Path, keyword: str | None, sets: tuple[str, ...], axes: tuple[str, ...],
    as_json: bool,
) -> int:  # fmt: skip
    """How much memory each rank of a SCENARIO's runs will take: exact at rest, rehearsed at peak.

    Layouts of any size: no rank is started, and models that fit nowhere are not given memory.
    """
    cases = select(expand(load_scenario(scenario, overrides=Overrides(sets, axes)), "cpu"), keyword)
    if not cases:
        raise NothingSelected("no case is selected")
    runs = _layouts(cases)
    answers = dict(zip(runs, ask([spec.config for spec in runs.values()]), strict=True))
    if as_json:
        click.echo(json.dumps(answers, allow_nan=False))
    else:
        console = display.make_console()
        for name, answer in answers.items():
            for line in _lines(name, runs[name], answer):
                console.print(line, soft_wrap=True, markup=False, highlight=False)
    return ExitCode.PASSED


def ask(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the worker predicts of plain configurations, in their order.

    Raises:
        Infrastructure: it died.
    """
    done = subprocess.run(
        COMMAND, input=json.dumps(configs), capture_output=True, text=True, check=False,
        env=server_environment(os.environ),
    )  # fmt: skip
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise Infrastructure(f"the prediction ended with code {done.returncode}: {last[0]}")
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def _layouts(cases: Iterable[CaseSpec]) -> dict[str, RunSpec]:
    """Runs whose memory may differ, by the first case that has them: graphs and seeds do not."""
    found: dict[str, RunSpec] = {}
    seen: set[str] = set()
    for case in cases:
        if not capabilities_of(case.candidate.config).memory_prediction:
            raise UsageError(
                f"predict: expected the built-in trainer, got a program in {case.id}: its memory "
                "is measured by harness run"
            )
        engines = {case.reference.config["engine"], case.candidate.config["engine"]}
        if others := sorted(engines - {"ours"}):
            raise UsageError(f"{case.id}: expected engine ours to predict, got {', '.join(others)}")
        for leg, spec in (("reference", case.reference), ("candidate", case.candidate)):
            config = spec.config | {"graph": [], "seed": 0, "stress": [], "compile": [], "steps": 1}
            identity = json.dumps(config, sort_keys=True)
            if identity not in seen:
                seen.add(identity)
                found[f"{case.id} {leg}"] = spec
    return found


def _lines(name: str, spec: RunSpec, answer: Mapping[str, Any]) -> list[str]:
    lines = [f"{name}, {spec.world_size} ranks"]
    for rank, kept in answer["at_rest"].items():
        sizes = ", ".join(f"{key.replace('_', ' ')} {_mib(kept[key])}" for key in COLUMNS)
        lines.append(f"  at rest, stage of rank {rank}: {sizes}")
    peak = answer["peak"]
    if peak is None:
        return [*lines, f"  peak: not known, {answer['why_no_peak']}"]
    owners = sorted(peak["owners"].items(), key=lambda item: -item[1])
    shares = ", ".join(f"{owner} {_mib(nbytes)}" for owner, nbytes in owners if nbytes)
    return [
        *lines,
        f"  peak of eager steps, rank {peak['rank']}: {_mib(peak['peak_bytes'])}: {shares}",
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"
