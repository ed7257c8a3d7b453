"""`python -m fsdp_core.config`: every rule of a configuration, as a table in Markdown."""

import sys
from collections.abc import Iterator

from fsdp_core.config import RULES


def rows() -> Iterator[str]:
    """The table, line by line, in the order in which rules are checked."""
    yield "| about | rule | what it asks |"
    yield "| --- | --- | --- |"
    for about, rules in RULES.items():
        yield from (f"| {about} | `{rule.name}` | {rule.message} |" for rule in rules)


if __name__ == "__main__":
    sys.stdout.write("".join(f"{row}\n" for row in rows()))
