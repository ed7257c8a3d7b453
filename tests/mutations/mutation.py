"""One slip, and how those of a file are written."""

from dataclasses import dataclass

ROOM = "tests/unit/harness/"


@dataclass(frozen=True)
class Mutation:
    """One slip.

    Attributes:
        name: unique, for `-k` and the table.
        file: from the repository's root.
        old: occurs in it exactly once.
        new: in its place.
        tests: files that are to see it, or tests in them, from the repository's root.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def slips_of(
    file: str, tests: str, *slips: tuple[str, str, str] | tuple[str, str, str, str]
) -> list[Mutation]:
    """Mutations of a file: name, old, new, and test files where they are not `tests`."""
    found = []
    for name, old, new, *own in slips:
        names = own[0] if own else tests
        paths = tuple(f"{ROOM}{test}.py" for test in names.split())
        found.append(Mutation(name, f"harness/{file}", old, new, paths))
    return found
