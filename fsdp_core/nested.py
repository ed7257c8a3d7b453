"""Walks over what is nested in tuples, lists, dicts and dataclasses."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def leaves(value: Any, name: str = "", *, open_records: bool = True) -> Iterator[tuple[str, Any]]:
    """What is nested in `value`, in order, each with its path behind `name`: `plan.spans[0]`.

    Args:
        open_records: also in dataclasses.
    """
    items: Iterable[tuple[str, Any]]
    if isinstance(value, tuple | list):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, dict):
        items = ((f"[{key!r}]", item) for key, item in value.items())
    elif open_records and is_dataclass(value):
        items = ((f".{field.name}", getattr(value, field.name)) for field in fields(value))
    else:
        yield name, value
        return
    for step, item in items:
        yield from leaves(item, name + step, open_records=open_records)


def tensors_in(
    value: Any, name: str = "", *, open_records: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among `leaves`."""
    for path, leaf in leaves(value, name, open_records=open_records):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf
