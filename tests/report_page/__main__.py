"""A report of a thousand cases, measured: bytes, seconds to make, milliseconds to filter.

    python -m tests.report_page FOLDER [--cases N] [--failing PART]

Writes a nightly with its history into FOLDER, makes the report, and opens the page in a headless
Chromium if there is one: filters, chips, facets, and the way from a failing cell to the command are
timed; pictures of the page are left in FOLDER. Exits with 1 if the page is 3 MB or more, if a
filter takes a second or more, if that way does not end at the command, or if a width cuts it off.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

import reports
from tests.report_page.browser import NAMES, Browser, find_browser
from tests.report_page.nightly import write_history, write_nightly

MAX_PAGE_BYTES = 3_000_000
MAX_FILTER_MS = 1000
PICTURES = {
    "page": ("", 1400, 1800), "narrow": ("", 500, 1400), "case": ("#{failed}", 1400, 1600),
    "filtered": ("#?k=moe_tiny%20and%20not%20mlp&o=failed", 1400, 900),
}  # fmt: skip


def main() -> int:
    """Measure; 1 if a limit is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.report_page")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--failing", type=float, default=0.06)
    asked = parser.parse_args()
    run = write_nightly(asked.folder / "run", asked.cases, failing=asked.failing)
    write_history(run)
    began, used = time.monotonic(), time.process_time()
    built = reports.build(run)
    seconds = time.monotonic() - began, time.process_time() - used
    say(f"made in {seconds[0]:.1f} s, {seconds[1]:.1f} s of processor")
    for form, path in built.items():
        say(f"{form}: {path.stat().st_size} bytes")
    too_large = built["html"].stat().st_size >= MAX_PAGE_BYTES
    return int(look(built["html"], asked.folder) or too_large)


def look(page: Path, folder: Path) -> bool:
    """Open the page in a browser; whether something in it is too slow or does not work."""
    program = find_browser()
    if program is None:
        say(f"no browser ({', '.join(NAMES)}): nothing was opened")
        return False
    address = page.absolute().as_uri()
    failed = re.search(r'<a class="failed" href="#([^"]+)"', page.read_text("utf-8"))
    with Browser(program) as browser:
        browser.open(address, width=1400, height=1800)
        told = browser.run(Path(__file__).with_name("measure.js").read_text("utf-8"))
        say(json.dumps(told, indent=1))
        for name, (fragment, width, height) in PICTURES.items():
            place = fragment.format(failed=failed[1] if failed else "")
            browser.open(address + place, width=width, height=height)
            browser.run("new Promise((done) => setTimeout(done, 300))")
            browser.picture(folder / f"{name}.png")
        too_wide = list[int]()
        for width in (320, 500, 800, 1000, 1400):
            browser.open(address, width=width, height=900)
            if browser.run("document.documentElement.scrollWidth > innerWidth"):
                too_wide.append(width)
        say(f"cut off at widths: {too_wide}")
    times = [ms for ms, _ in [*told["filters"].values(), told["chip"], told["facet"]]]
    arrived = told["opened"][1:] == [True, True, True] and told["copied"] in ("Copied", "Selected")
    works = arrived and told["unpacked"] and not (told["errors"] or too_wide)
    return max(times) >= MAX_FILTER_MS or not works


def say(line: str) -> None:
    """A line for people."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
