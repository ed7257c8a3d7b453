"""What a rank has of the microbatches of a step, and what graphs of layers read of them.

    rows     each sequence has `seq` tokens, cut over cp; tensors are static, plans made once
    packs    with dynamic_cp: documents of many lengths, packed; each microbatch is cut over as many
             ranks as its longest document needs, so only its number of local tokens is constant

Ranks of dp and dp_outer have sequences of their own, ranks of cp their chunks of the same ones,
ranks of tp, pp, ep and etp what their dense coordinates say.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch

from fsdp_core.config import TrainConfig
from fsdp_core.config.parallel import groups
from fsdp_core.data import MAX_DOCUMENTS, Batches, PackedDocuments, token_source
from fsdp_core.device import Device
from fsdp_core.dispatch import leaves, tensors_in
from fsdp_core.model.batch import (
    Capacity,
    Document,
    LocalTokens,
    Part,
    loss_weight,
    pack,
    packed_part,
    padding_multiple,
)
from fsdp_core.parallel.context import DynamicContext, dense_plan, split
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.pipeline import Microbatch

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def make_inputs(config: TrainConfig, axes: Axes, device: Device) -> "RowInputs | PackInputs":
    """The inputs that a configuration asks for. Collective."""
    kind = PackInputs if config.parallel.dynamic_cp else RowInputs
    return kind(config, axes, device)


class Inputs:
    """A rank's microbatches.

    checksum: of the token source.
    shape: rows and tokens of a microbatch on this rank, before sequence parallel cuts them.
    tokens, targets: int64 [microbatches, *shape], what this rank reads in the step.
    """

    checksum: str

    def __init__(self, config: TrainConfig, shape: tuple[int, int], device: Device) -> None:
        self.shape, self._device = shape, device
        whole = (config.microbatches, *shape)
        self.tokens = torch.zeros(whole, dtype=torch.int64, device=device.torch_device)
        self.targets = torch.zeros_like(self.tokens)

    def named_tensors(self) -> NamedTensors:
        yield "tokens", self.tokens
        yield "targets", self.targets


class RowInputs(Inputs):
    """Rows of one sequence each, all of whose tokens count; the same static tensors each step."""

    def __init__(self, config: TrainConfig, axes: Axes, device: Device) -> None:
        seq, cp = config.model.seq, axes.cp
        ranks = axes.dp_outer.size * axes.dp.size
        super().__init__(config, (config.micro_batch_size, seq // cp.size), device)
        self._cp = cp
        self._batches = Batches(
            token_source(config.data, config.model.vocab_size), config.seed,
            axes.dp_outer.rank * axes.dp.size + axes.dp.rank,
            config.microbatches, config.micro_batch_size, seq, ranks, config.data.ranks or ranks,
        )  # fmt: skip
        self.checksum = self._batches.source.checksum
        self._plan = dense_plan(seq, cp.size, cp.rank, device.torch_device)
        weight = 1.0 / (self.shape[0] * self.shape[1])
        self._microbatches = [
            Microbatch(mine, {"part": Part(self._plan, cp, theirs, None, weight)})
            for mine, theirs in zip(self.tokens, self.targets, strict=True)
        ]

    def fill(self, step: int) -> None:
        """Copy this rank's chunks in."""
        whole = self._batches.tokens(step)
        for static, tokens in ((self.tokens, whole[..., :-1]), (self.targets, whole[..., 1:])):
            mine = split(tokens, 2, self._cp.size, self._cp.rank)
            if self._device.is_cuda:
                mine = mine.pin_memory()
            static.copy_(mine, non_blocking=True)

    def microbatches(self) -> list[Microbatch]:
        return self._microbatches

    def samples(self) -> dict[int, Part]:
        """The part of the first microbatch: plans never change."""
        return {self._cp.size: self._microbatches[0].keywords["part"]}

    def named_tensors(self) -> NamedTensors:
        yield from super().named_tensors()
        yield from tensors_in(self._plan, "context plan")


class PackInputs(Inputs):
    """Packs of documents, over a number of context ranks that changes with the microbatch. Packs
    come and go; `tokens` and `targets` are copies of what was read. `context`: the groups of every
    size.
    """

    def __init__(self, config: TrainConfig, axes: Axes, device: Device) -> None:
        parallel = config.parallel
        sizes, self._axes = parallel.dynamic_cp, axes
        # The largest group has room for micro_batch_size of the longest sequences.
        local = config.micro_batch_size * config.model.seq // sizes[-1]
        super().__init__(config, (1, local), device)
        self.context = DynamicContext(
            groups(parallel, ("dp", "cp")), sizes, {axes.cp.size: axes.cp}
        )
        self._capacities = {
            size: Capacity(
                tokens=local * size,
                slots=MAX_DOCUMENTS + 1,
                multiple=padding_multiple(size, axes.tp),
                longest=config.model.seq,
                hides_tail=config.data.tail == "hidden",
            )
            for size in sizes
        }
        self._documents = PackedDocuments(
            token_source(config.data, config.model.vocab_size), config.seed, sizes, local,
            {size: each.multiple for size, each in self._capacities.items()}, config.model.seq,
            leaves_tail=config.data.tail != "none",
        )  # fmt: skip
        self.checksum = self._documents.source.checksum
        self._local: list[LocalTokens] = []

    def fill(self, step: int) -> None:
        """Pack the documents of this rank's packs."""
        self._local = []
        for microbatch in range(len(self.tokens)):
            size = self._documents.size(step, microbatch)
            at = self.context.layout(size)
            number = self._axes.dp_outer.rank * at.num_packs + at.pack
            found = self._documents.pack(step, microbatch, number)
            documents = [Document(ids[:-1], ids[1:]) for ids in map(torch.from_numpy, found)]
            self._local.append(self._packed(documents, size))

    def _packed(self, documents: list[Document], size: int) -> LocalTokens:
        batch = pack(documents, self._capacities[size]).to(self._device.torch_device)
        return packed_part(batch, self.context.axis(size), 0.0)

    def microbatches(self) -> list[Microbatch]:
        """Those of the step that was filled in, weighed by the tokens of all ranks. Collective."""
        for number, local in enumerate(self._local):
            self.tokens[number].copy_(local.tokens)
            self.targets[number].copy_(local.part.targets)
        counted = torch.stack([local.part.num_counted for local in self._local]).sum()
        weight = loss_weight(counted, len(self._local), self._axes)
        return [
            Microbatch(local.tokens, {"part": replace(local.part, weight=weight)})
            for local in self._local
        ]

    def samples(self) -> dict[int, Part]:
        """For each context size that a microbatch may have, a part like those to come."""
        return {size: self._sample(size) for size in self.context.sizes}

    def _sample(self, size: int) -> Part:
        capacity = self._capacities[size]
        ids = torch.zeros(min(capacity.tokens, capacity.longest or capacity.tokens)).long()
        return self._packed([Document(ids, ids)], size).part


class StaticPart:
    """The part of packed microbatches of one context size in one slot, to what is captured.

    A graph reads positions, masks and offsets where they lay when it was captured: each microbatch
    is copied here before its replay, once for all layers of a stage. What is no tensor was fixed by
    the capture. Tokens that count and their targets are for the loss, which no partial scope holds.

    like: a part as microbatches will have it; copied, not kept.
    name: of the tensors, in ledgers.
    part: what to capture with.
    """

    def __init__(self, like: Part, name: str) -> None:
        self.part = replace(
            like,
            plan=_copied(like.plan),
            packed=_copied(like.packed),
            # Only its shape is read, where masks are laid out as activations are.
            targets=torch.zeros_like(like.targets),
            counted=None,
            weight=0.0,
        )
        self._name = name
        self._leaves = dict(_leaves_of(self.part))

    def follow(self, part: Part) -> None:
        """Take over the metadata of a microbatch: one copy, on the current stream. Its capacity,
        context size and rank are those that were captured.
        """
        theirs, into, out_of = dict(_leaves_of(part)), [], []
        assert theirs.keys() == self._leaves.keys(), theirs.keys() ^ self._leaves.keys()
        for name, mine in self._leaves.items():
            other = theirs[name]
            fixed, got = _fixed(mine), _fixed(other)
            assert mine is other or fixed == got, f"{name} = {got}, captured as {fixed}"
            if isinstance(mine, torch.Tensor):
                into.append(mine)
                out_of.append(other)
        torch._foreach_copy_(into, out_of)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, leaf in self._leaves.items():
            if isinstance(leaf, torch.Tensor):
                yield f"{self._name}: {name}", leaf


def _copied(value: Any) -> Any:
    """Nested dataclasses and tuples with copies of their tensors; axes stay the same objects."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    if is_dataclass(value) and not isinstance(value, Axis):
        copies = {field.name: _copied(getattr(value, field.name)) for field in fields(value)}
        return replace(cast("Any", value), **copies)
    return value


def _leaves_of(part: Part) -> Iterator[tuple[str, Any]]:
    """What layers read: tensors by name, and what a capture fixes."""
    yield from leaves(part.plan, "plan")
    yield from leaves(part.packed, "packed")
    yield "context group", part.cp.group
    yield "tokens", tuple(part.targets.shape)


def _fixed(value: Any) -> object:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
