"""`python -m tests.damaged_folders`: no damaged run folder passes, each is told in a line."""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from tests.damaged_folders import good
from tests.damaged_folders.corpus import examine, specimens


def main() -> int:
    """Examine all specimens (or those that hold a word); 1 if the harness took one wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only specimens whose name holds this")
    parser.add_argument("--keep", type=Path, help="folder to make them in, and leave them")
    args = parser.parse_args()
    root = args.keep or Path(tempfile.mkdtemp(prefix="damaged-"))
    num_wrong = _corpus(root, args.k, keep=bool(args.keep))
    if not args.keep:
        shutil.rmtree(root)
    return int(num_wrong > 0)


def _corpus(root: Path, word: str, *, keep: bool) -> int:
    began = time.monotonic()
    chosen = [specimen for specimen in specimens() if word in specimen.name]
    bases = {
        kind: good.make(root / f"good-{kind}", kind) for kind in {each.base for each in chosen}
    }
    num_wrong = 0
    for number, specimen in enumerate(chosen):
        wrong = examine(specimen, bases[specimen.base], root / f"{number:03}")
        num_wrong += bool(wrong)
        for why in wrong:
            print(f"{specimen.name}: {why}", flush=True)  # noqa: T201 - a command
        if not keep:
            shutil.rmtree(root / f"{number:03}")
    took = time.monotonic() - began
    print(f"{len(chosen)} damaged folders, {num_wrong} taken wrongly, {took:.0f} s")  # noqa: T201
    return num_wrong


if __name__ == "__main__":
    raise SystemExit(main())
