"""Who made what: data flow between modules, read off the digests of what went through them.

What one module returns and another is given has one digest, so the reference's rows tell who
consumed whose output; a gradient was computed by whoever consumed the output that it belongs to.
"""

from collections.abc import Iterable, Sequence

from harness.bisector.legs import INPUT, OUTPUT, Row

_PARTS_OF_STATE = (".exp_avg_sq", ".exp_avg", ".main_weight", ".model_weight")


def module_of(tensor: str) -> str:
    """The module that holds a tensor of the records: `norm.weight` is `norm`'s.

    Words behind the name, as the ledger and the race detector have them, say what of it is meant.
    """
    name, _, words = tensor.partition(" ")
    if words and (name == "root" or name.rpartition(".")[2].isdigit()):
        return "" if name == "root" else name  # a unit's own buffer
    for part in _PARTS_OF_STATE:
        name = name.removesuffix(part)
    return name.rpartition(".")[0]


def unit_of(tensor: str) -> str:
    """The FSDP unit whose buffers a parameter travels in: its layer, or the root.

    Experts are sharded over other ranks than the rest of their layer.
    """
    parts = tensor.split(".")
    if parts[0] != "layers" or len(parts) < 2:
        return "root"
    unit = ".".join(parts[:2])
    return f"{unit} experts" if "experts" in parts[2:] else unit


def parent_of(module: str, known: Iterable[str]) -> str:
    """The closest module around it that was looked into; "" if there is none."""
    names = set(known)
    while module := module.rpartition(".")[0]:
        if module in names:
            return module
    return ""


def is_inside(module: str, other: str) -> bool:
    """Whether `module` is a part of `other`."""
    return module.startswith(f"{other}.")


def innermost(modules: Iterable[str]) -> list[str]:
    """Without those that hold another of them."""
    names = list(dict.fromkeys(modules))
    return [name for name in names if not any(is_inside(other, name) for other in names)]


def consumers(row: Row, rows: Sequence[Row]) -> list[str]:
    """The modules that were given what `row`'s module returned, by the reference's digests."""
    given = next((r.reference for r in rows if _is_output_of(r, row)), "")
    if not given:
        return []
    return innermost(
        other.module
        for other in rows
        if other.kind == INPUT
        and (other.rank, other.microbatch, other.reference) == (row.rank, row.microbatch, given)
        and not is_inside(row.module, other.module)
        and not is_inside(other.module, row.module)
        and other.module != row.module
    )


def returned_by(row: Row, rows: Sequence[Row]) -> str:
    """The outermost module that returns just what `row`'s module does, as the last of its parts."""
    given = next((r.reference for r in rows if _is_output_of(r, row)), "")
    around = [
        other.module
        for other in rows
        if other.kind == OUTPUT
        and (other.rank, other.microbatch, other.reference) == (row.rank, row.microbatch, given)
        and is_inside(row.module, other.module)
    ]
    return min(around, key=len, default=row.module) if given else row.module


def _is_output_of(other: Row, row: Row) -> bool:
    return (other.module, other.kind, other.number, other.rank) == (
        row.module, OUTPUT, row.number, row.rank
    )  # fmt: skip


def common(modules: Sequence[str], known: Iterable[str]) -> str:
    """The module itself, or of several the closest known one that holds all of them."""
    if len(modules) == 1:
        return modules[0]
    if not modules:
        return ""
    shared = []
    for parts in zip(*(module.split(".") for module in modules), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    path = ".".join(shared)
    names = set(known)
    return path if path in names else parent_of(path, names)
