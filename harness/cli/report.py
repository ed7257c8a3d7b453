"""What shows run folders that are there: `harness report | merge | show`."""

import os
from pathlib import Path

import click

from harness.cli import options, output
from harness.cli.check import code_of, judged_again, show_damage
from harness.cli.options import PATH, print_json
from harness.records import ExitCode
from harness.store import LEGS, RunFolder, load_case
from harness.store.merge import merge
from harness.store.verify import DEFAULT_OUT, find_answer, inspect, unused
from harness.terminal import make_console


def build_reports(folder: Path, database: Path | None = None) -> dict[str, Path]:
    """Write the reports of a run folder; their paths by kind."""
    # pandas and matplotlib come with it: only those who make a report wait for them.
    import reports

    # Where GitHub Actions wants the summary of the step that runs us.
    step = os.environ.get("GITHUB_STEP_SUMMARY")
    return reports.build(folder, history=database, step=Path(step) if step else None)


def open_page(reports: dict[str, Path]) -> None:
    """Open the page in a browser; one line where there is none, which fails nothing."""
    page = reports.get("html")
    if page is not None and click.launch(str(page.absolute())):
        click.echo(f"harness: no browser could open {page}", err=True)


@click.command("report")
@click.argument("folder", type=PATH, metavar="RUN")
@options.opens
@options.as_json
def report_command(*, folder: Path, opens: bool, as_json: bool) -> int:
    """Write the reports of a RUN folder again.

    Exit code 0 whatever they say; 6 if files are damaged or cases have no verdict.
    """
    built = build_reports(RunFolder.open(folder).path)
    found = inspect(folder)
    show_damage(found)
    if as_json:
        print_json(output.as_text(built))
    else:
        for name, path in built.items():
            click.echo(f"{name}: {path}")
    if opens:
        open_page(built)
    return ExitCode.NO_VERDICT if found.damage or found.unjudged else ExitCode.PASSED


@click.command("merge")
@click.argument("folders", type=PATH, nargs=-1, required=True, metavar="RUN...")
@options.out
@options.as_json
def merge_command(*, folders: tuple[Path, ...], out: Path | None, as_json: bool) -> int:
    """Put the RUN folders of shards together into one, and report.

    A shard that is missing shows: its cases are errors. Exit codes as those of a run.
    """
    place = out or unused(DEFAULT_OUT / "merged")
    with merge(folders, place, options.command_line()) as merged:
        reports = build_reports(merged.path)
    found = judged_again(place)
    code, console = code_of(found), make_console(stderr=as_json)
    for note in merged.manifest["notes"]:
        output.print_line(console, note)
    console.print(output.counts_line(found.verdicts, found.num_cases), end="")
    output.print_line(console, f"; run folder {merged.path}")
    show_damage(found)
    if as_json:
        print_json({"exit_code": int(code), "folder": str(merged.path),
                    "reports": output.as_text(reports)})  # fmt: skip
    return code


@click.command("show")
@click.argument("case")
@click.argument("folder", type=PATH, metavar="[RUN]", required=False)
@options.as_json
def show_command(*, case: str, folder: Path | None, as_json: bool) -> int:
    """Show one case: verdict, first difference, exits.

    CASE is a case folder, or an id in RUN (the newest run under out/ by default). Exit code 0
    whatever the verdict says; 6 if there is none that can be read.
    """
    place, spec, verdict, why = find_answer(case, folder)
    if as_json:
        print_json({"case": spec.to_json(), "folder": str(place), "why": why,
                    "verdict": verdict.to_json() if verdict else None})  # fmt: skip
    else:
        held = load_case(place) if (place / "case.json").is_file() else None
        runs = {role: (place / role, getattr(held, role)) for role in LEGS} if held else {}
        output.print_case(make_console(), spec, verdict, runs, why=why)
    return ExitCode.PASSED if verdict else ExitCode.NO_VERDICT
