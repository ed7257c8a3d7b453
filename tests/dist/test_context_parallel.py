"""Attention over context ranks: that of one process, and of each sequence alone."""

import gc
import math
import weakref
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fsdp_core.data import PackedDocuments
from fsdp_core.graph.capture_session import CaptureAborted
from fsdp_core.graph.recorder import StaleAddress
from fsdp_core.model.batch import Capacity, Document, PackedBatch, Part, pack
from fsdp_core.model.cp_attention import causal_attention
from fsdp_core.parallel.context import ContextPlan, dense_plan
from fsdp_core.parallel.mesh import Axis, build_axes
from fsdp_core.train import Trainer
from fsdp_core.train.inputs import PackInputs
from tests.dist.parity_bounds import WIDE, Bounded, unit_roundoff
from tests.dist.rank_pool import RankPool
from tests.dist.train_layout_programs import DEVICE, STEPS, WARMUP, Run, bits

RESULTS = ("out", "dq", "dk", "dv")


def attention_with_bounds(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    *,
    scale: float,
    joins: int,
    dtype: torch.dtype,
    kernel_dtype: torch.dtype = torch.float64,
) -> dict[str, Bounded]:
    """Causal attention of one sequence, and of the way back, in float64 with bounds.

    Args:
        q, k, v, grad: float64 [T, N, D], [T, K, D], [T, K, E], [T, N, E].
        joins: blocks that an algorithm may join, or parts that it may add up, at most.
        dtype: that results are kept in; sums are in float32, in float64 for float64.
        kernel_dtype: that a kernel rounds to between its products and after each block, if
            narrower than what it sums in.
    """
    u = unit_roundoff(WIDE[dtype])
    kept, rounded = unit_roundoff(dtype), unit_roundoff(kernel_dtype)
    kept, between = (kept if kept > u else 0.0), (2 * rounded if rounded > u else 0.0)
    time, group, value_width = q.shape[0], q.shape[1] // k.shape[1], v.shape[2]
    q, grad = q.transpose(0, 1), grad.transpose(0, 1)
    k, v = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))

    p, r = _weights(q, k, scale, joins, u)
    out = p @ v
    raw = grad @ v.mT - (grad * out).sum(-1, keepdim=True)
    ds = p * raw
    rows, keys = (time + joins) * u + between, (group * time + joins) * u + between

    out_bound = (p * (r + rows)) @ v.abs() + kept * out.abs()
    raw_error = value_width * u * grad.abs() @ v.abs().mT + (
        grad.abs() * (value_width * u * out.abs() + out_bound)
    ).sum(-1, keepdim=True)
    ds_error = p * (raw.abs() * (r + 2 * u) + raw_error)
    dq, dk, dv = scale * ds @ k, scale * ds.mT @ q, p.mT @ grad
    bounds = {
        "out": out_bound,
        "dq": scale * (ds_error + (rows + 2 * u) * ds.abs()) @ k.abs() + kept * dq.abs(),
        "dk": scale * (ds_error + (keys + 2 * u) * ds.abs()).mT @ q.abs() + kept * dk.abs(),
        "dv": (p * (r + keys)).mT @ grad.abs() + kept * dv.abs(),
    }
    values = {"out": out, "dq": dq, "dk": dk, "dv": dv}

    def whole(name: str, x: torch.Tensor) -> torch.Tensor:
        """[N, T, ...] -> [T, N, ...]; keys' heads that were repeated are added up."""
        x = x.unflatten(0, (-1, group)).sum(1) if name in ("dk", "dv") else x
        return x.transpose(0, 1)

    # This reference is itself computed in float64, and errs by what float64 may; and 1 % for
    # products of errors.
    share = 1.01 * (1.0 + unit_roundoff(torch.float64) / u)
    return {name: Bounded(whole(name, values[name]), share * whole(name, bounds[name]))
            for name in RESULTS}  # fmt: skip


def _weights(
    q: torch.Tensor, k: torch.Tensor, scale: float, joins: int, u: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """p [N, T, T] of q and k [N, T, D], and the relative error of each."""
    time, width = q.shape[1:]
    s = scale * q @ k.mT
    seen = torch.ones(time, time, dtype=torch.bool).tril()
    lse = torch.logsumexp(s.masked_fill(~seen, -math.inf), -1, keepdim=True)
    p = torch.exp((s - lse).masked_fill(~seen, -math.inf))
    e = (width + 2) * u * scale * q.abs() @ k.abs().mT
    logs = torch.stack((s.abs(), (s - lse).abs())) * seen
    a = torch.maximum(logs.amax((0, -1)), lse.abs()[..., 0])[..., None]
    lse_error = (p * e).sum(-1, keepdim=True) + u * (time + 3 + 3 * a + joins * (4 + a))
    return p, e + lse_error + u * (joins + 1) * (a + 4)


CPU = torch.device("cpu")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k, v and the gradient of the output."""
Errors = dict[str, float]


@dataclass(frozen=True)
class Shape:
    """Heads of queries and of keys, widths of queries and keys, and of values."""

    heads: int
    kv_heads: int
    width: int
    value_width: int


SHAPES = {
    "mha": Shape(2, 2, 8, 8),
    "gqa": Shape(4, 2, 8, 8),
    "mqa": Shape(3, 1, 6, 6),
    "mla": Shape(2, 2, 12, 8),
    "wide_values": Shape(4, 2, 4, 6),
}
BATCH, LENGTH = 2, 48
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def world_axis() -> Axis:
    group = dist.group.WORLD
    assert group is not None
    return Axis("cp", dist.get_world_size(), dist.get_rank(), group)


def draw(shape: Shape, batch: int, length: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Whole inputs, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (shape.heads, shape.width), (shape.kv_heads, shape.width),
        (shape.kv_heads, shape.value_width), (shape.heads, shape.value_width),
    )  # fmt: skip
    q, k, v, grad = (
        torch.randn(batch, length, *size, generator=generator, dtype=torch.float64).to(dtype)
        for size in sizes
    )
    return q, k, v, grad


def zigzag(length: int, axis: Axis) -> list[int]:
    """The rows of this rank, counted out: an early and a late chunk of 2 * size."""
    if axis.size == 1:
        return list(range(length))
    chunk = length // (2 * axis.size)
    early, late = axis.rank * chunk, (2 * axis.size - 1 - axis.rank) * chunk
    return [*range(early, early + chunk), *range(late, late + chunk)]


def run_attention(inputs: Inputs, plan: ContextPlan, axis: Axis) -> dict[str, torch.Tensor]:
    """Attention and its gradients, of this rank's inputs."""
    q, k, v = (t.clone().requires_grad_() for t in inputs[:3])
    out = causal_attention(q, k, v, plan=plan, axis=axis)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs[3])
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def compare(
    got: dict[str, torch.Tensor], expected: dict[str, Bounded], mine: list[int], rows: list[int]
) -> Errors:
    """Worst error of `mine`, rows of [T, ...] results, against `rows` of a sequence's reference."""
    return {
        name: Bounded(expected[name].exact[rows], expected[name].bound[rows]).units(got[name][mine])
        for name in RESULTS
    }


def copy_contents(batch: PackedBatch, other: PackedBatch) -> None:
    """What a graph reads is that of another batch of the same capacity."""
    for name in ("tokens", "targets", "loss_mask", "offsets", "padded_offsets"):
        getattr(batch, name).copy_(getattr(other, name))


def largest(errors: list[Errors]) -> Errors:
    return {name: max(e[name] for e in errors) for name in RESULTS}


def dense_errors(shape: Shape, dtype: torch.dtype) -> Errors:
    """Worst errors of a batch of whole sequences."""
    axis = world_axis()
    inputs = draw(shape, BATCH, LENGTH, dtype)
    rows = zigzag(LENGTH, axis)
    plan = dense_plan(LENGTH, axis.size, axis.rank, CPU)
    q, k, v, grad = (t[:, rows] for t in inputs)
    got = run_attention((q, k, v, grad), plan, axis)
    found = []
    for b in range(BATCH):
        q, k, v, grad = (t[b].double() for t in inputs)
        expected = attention_with_bounds(
            q, k, v, grad, scale=shape.width**-0.5, joins=2 * axis.size, dtype=dtype
        )
        one = {name: t[b] for name, t in got.items()}
        found.append(compare(one, expected, list(range(len(rows))), rows))
    return largest(found)


def all_dense_errors() -> dict[tuple[str, str], Errors]:
    """Worst errors of every shape and dtype."""
    return {
        (name, dtype): dense_errors(shape, DTYPES[dtype])
        for name, shape in SHAPES.items()
        for dtype in DTYPES
    }


# --- packed sequences -------------------------------------------------------------------------

DOCUMENTS = (5, 1, 16, 9, 23)
SLOTS = 8


def packed_batch(lengths: tuple[int, ...], tokens: int, size: int) -> PackedBatch:
    """Documents of these lengths; what their tokens are does not matter here."""
    multiple = 2 * size
    documents = [Document(torch.arange(n) + 1, torch.arange(n) + 2) for n in lengths]
    return pack(documents, Capacity(tokens=tokens, slots=SLOTS, multiple=multiple))


def packed_errors(lengths: tuple[int, ...], dtype_name: str, tokens: int) -> Errors:
    """Worst errors over sequences packed together, each against itself alone.

    Rows of padding hold NaN, in inputs and in the gradient of the output; they must come out as
    zeros.
    """
    axis, dtype = world_axis(), DTYPES[dtype_name]
    shape = SHAPES["mla"]
    batch = packed_batch(lengths, tokens, axis.size)
    plan = batch.plan(axis.size, axis.rank)
    whole = draw(shape, 1, tokens, dtype)
    starts = batch.padded_offsets.tolist()
    real = {starts[d] + i: (d, i) for d, n in enumerate(lengths) for i in range(n)}
    padding = [row for row in range(tokens) if row not in real]
    for tensor in whole:
        tensor[:, padding] = math.nan

    rows = plan.rows.tolist()
    q, k, v, grad = (t[:, rows] for t in whole)
    got = {n: t[0] for n, t in run_attention((q, k, v, grad), plan, axis).items()}
    found = []
    for d, length in enumerate(lengths):
        inside = slice(starts[d], starts[d] + length)
        q, k, v, grad = (t[0, inside].double() for t in whole)
        expected = attention_with_bounds(
            q, k, v, grad, scale=shape.width**-0.5, joins=2 * axis.size, dtype=dtype
        )
        mine = [i for i, row in enumerate(rows) if row in real and real[row][0] == d]
        found.append(compare(got, expected, mine, [real[rows[i]][1] for i in mine]))
    blank = [i for i, row in enumerate(rows) if row not in real]
    for name in RESULTS:
        assert not got[name][blank].any(), (name, "padding is not zero")
    return largest([*found, dict.fromkeys(RESULTS, 0.0)])


def all_packed_errors(tokens: int) -> dict[str, Errors]:
    return {dtype: packed_errors(DOCUMENTS, dtype, tokens) for dtype in ("float64", "bfloat16")}


def sparse_packs_errors(tokens: int) -> dict[tuple[int, ...], Errors]:
    """The same of packs that leave ranks without a valid token, of some sequences or of all."""
    return {lengths: packed_errors(lengths, "float64", tokens) for lengths in ((), (1,), (3, 2))}


SIZES = (1, 2, 4, 8)
PACK_TOKENS = 112
"""A multiple of 16 that holds the documents, padded for 8 ranks, and leaves a tail."""


@pytest.mark.parametrize("size", SIZES)
def test_attention_is_that_of_one_process(warm_ranks: RankPool, size: int) -> None:
    """Outputs and all gradients, GQA and MLA shapes, are off by rounding alone."""
    for rank, cases in enumerate(warm_ranks.run(all_dense_errors, world_size=size)):
        for case, errors in cases.items():
            assert max(errors.values()) <= 1.0, (rank, case, errors)


@pytest.mark.parametrize("size", SIZES)
def test_packed_sequences_are_as_if_alone(warm_ranks: RankPool, size: int) -> None:
    """Each packed sequence has the attention it has by itself."""
    for rank, cases in enumerate(warm_ranks.run(all_packed_errors, PACK_TOKENS, world_size=size)):
        for case, errors in cases.items():
            assert max(errors.values()) <= 1.0, (rank, case, errors)


def test_ranks_without_a_valid_token(warm_ranks: RankPool) -> None:
    """An empty pack, or one of a single token, is right on the ranks that have none of it too."""
    for cases in warm_ranks.run(sparse_packs_errors, PACK_TOKENS, world_size=4):
        assert len(cases) == 3
        for case, errors in cases.items():
            assert max(errors.values()) <= 1.0, (case, errors)


# --- graph banks of dynamic context parallelism in the trainer: groups that differ, and errors ----


Bits = list[tuple[Any, ...]]


def trainer_of(run: Run) -> Trainer:
    return Trainer(run.config, build_axes(run.parallel, DEVICE), DEVICE)


def inputs_of(trainer: Trainer) -> PackInputs:
    return cast("PackInputs", trainer._inputs)


# ---- groups that differ


class MixedDocuments(PackedDocuments):
    """Documents whose first ranks choose another size than the last ones in each microbatch."""

    def size(self, step: int, microbatch: int) -> int:
        """In turn: pairs on the left and single ranks on the right, and the other way round."""
        is_left = dist.get_rank() < dist.get_world_size() // 2
        return 2 if is_left == bool((step + microbatch) % 2) else 1


def train_mixed(runs: list[Run]) -> list[Bits]:
    """All steps of each run, with sizes that differ from group to group."""
    found = []
    for run in runs:
        trainer = trainer_of(run)
        inputs = inputs_of(trainer)
        plain = inputs._documents
        inputs._documents = MixedDocuments(*(getattr(plain, f.name) for f in fields(plain)))
        found.append([bits(trainer, step) for step in range(STEPS)])
        trainer.close()
    return found


# ---- what is refused


def _other_capacity(trainer: Trainer) -> Part:
    """A microbatch with room for more sequences than graphs were captured for."""
    inputs = inputs_of(trainer)
    capacity = inputs._capacities[1]
    wider = Capacity(tokens=capacity.tokens, slots=capacity.slots + 1, multiple=capacity.multiple)
    inputs._capacities[1] = wider
    part = inputs.samples()[1]
    inputs._capacities[1] = capacity
    return part


def _other_group(trainer: Trainer) -> Part:
    """A microbatch over a group that was made again, of the same ranks."""
    part = inputs_of(trainer).samples()[2]
    group = dist.new_group(dist.get_process_group_ranks(part.cp.group))
    assert isinstance(group, dist.ProcessGroup)
    return replace(part, cp=replace(part.cp, group=group))


def _forward(trainer: Trainer, part: Part, slot: int) -> str:
    """What a stage says to a microbatch; nothing if it takes it."""
    tokens = torch.zeros_like(part.targets)
    try:
        trainer.stages[0](tokens, part, microbatch=slot)
    except AssertionError as error:
        return str(error)
    return ""


def _waiting(trainer: Trainer) -> str:
    """What is said to a microbatch of another size in a slot whose own awaits its backward."""
    samples = inputs_of(trainer).samples()
    tokens = torch.zeros_like(samples[2].targets)
    loss = trainer.stages[0](tokens, samples[2], microbatch=0)
    message = _forward(trainer, samples[1], 0)
    del loss
    return message


def _between(trainer: Trainer, step: int) -> Any:
    """The loss of an evaluation, which replays nothing."""
    replays = trainer.counts.replays
    loss = trainer.evaluate(step)
    assert trainer.counts.replays == replays
    return [loss.item()]


def refused(run: Run) -> tuple[dict[str, str], Bits, Bits]:
    """What a captured trainer refuses, and its steps, beside those of eager training.

    Between steps there are evaluations, which no graph sees.
    """
    eager, trainer = trainer_of(replace(run, graph=())), trainer_of(run)
    seen, expected, messages = [], [], {}
    for step in range(STEPS):
        if step > WARMUP:
            messages = {
                "capacity": _forward(trainer, _other_capacity(trainer), 0),
                "group": _forward(trainer, _other_group(trainer), 0),
                "waiting": _waiting(trainer),
            }
            seen.append(_between(trainer, step))
            expected.append(_between(eager, step))
        seen.append(bits(trainer, step))
        expected.append(bits(eager, step))
    trainer.close()
    return messages, seen, expected


# ---- a capture that fails


def failed_capture(run: Run) -> tuple[str, list[str], Bits, Bits]:
    """The last size cannot be captured: the message, what was left, and steps beside eager's."""
    eager = trainer_of(replace(run, graph=()))
    expected = [bits(eager, step) for step in range(STEPS)]
    trainer = trainer_of(run)
    attention: Any = next(iter(trainer.stages[-1].numbered_layers.values())).attn.attention
    plain = attention.forward

    def reads(x: torch.Tensor, part: Part) -> torch.Tensor:
        if part.cp.size == 1:
            x = x + 0.0 * x.sum().item()
        result: torch.Tensor = plain(x, part)
        return result

    seen = [bits(trainer, step) for step in range(WARMUP)]
    attention.forward = reads
    message, left = "", []
    try:
        trainer.step(WARMUP)
    except CaptureAborted as error:
        message = str(error)
    del attention.forward
    for stage in trainer.stages:
        left += ["on_microbatch"] * (stage.on_microbatch is not None)
        for name, module in stage.named_modules():
            left += [f"{name}.forward"] * ("forward" in vars(module))
    left += ["graphs"] * len(trainer._graphs.parts) + ["counts"] * trainer.counts.captured
    seen += [bits(trainer, step) for step in range(WARMUP, STEPS)]
    trainer.close()
    return message, left, seen, expected


# ---- tables


def lifetime_of_tables(run: Run) -> tuple[bool, str, bool]:
    """Tables are there while graphs are, a replay after the model's moved, and gone with them."""
    trainer = trainer_of(run)
    for step in range(WARMUP + 1):
        trainer.step(step)
    rope = trainer.stages[0].rope
    table = weakref.ref(rope.cos)
    # Away and back: the model's tables are new ones then.
    rope.to("meta")
    rope.to_empty(device="cpu")
    gc.collect()
    is_kept, message = table() is not None, ""
    try:
        trainer.step(WARMUP + 1)
    except StaleAddress as error:
        message = str(error)
    trainer.close()
    gc.collect()
    return is_kept, message, table() is None


ATTN, FRONT = ("attn",), ("attn", "moe_router", "moe_preprocess")
ONE: dict[str, Any] = {"layers": 1}
DENSE = "dense_tiny_dropout"


def test_groups_may_differ(warm_ranks: RankPool) -> None:
    """Two ranks on one size beside two on another, in one microbatch: no rank waits, same bits."""
    run = Run({"dp": 4, "dynamic_cp": (1, 2)}, "moe_tiny", ONE)
    runs = [run, replace(run, graph=FRONT)]
    for eager, graphed in warm_ranks.run(train_mixed, runs, world_size=4):
        assert graphed == eager
        assert len({str(step) for step in eager}) == STEPS


def test_what_was_not_captured_is_refused(warm_ranks: RankPool) -> None:
    """Other capacities and groups raise, and training goes on as before, with evaluations in
    between."""
    run = Run({"dp": 2, "dynamic_cp": (1, 2)}, overrides=ONE, graph=ATTN)
    for messages, seen, expected in warm_ranks.run(refused, run, world_size=2):
        assert messages["capacity"].startswith("plan.")
        assert "kept for context size 2" in messages["group"]
        assert "slot 0 still awaits its backward" in messages["waiting"]
        assert seen == expected


def test_a_failed_capture_leaves_no_bank(warm_ranks: RankPool) -> None:
    """The smallest size, the last, is refused: no graph of another is installed; a retry works."""
    run = Run({"dp": 2, "dynamic_cp": (1, 2)}, DENSE, ONE, graph=ATTN)
    for message, left, seen, expected in warm_ranks.run(failed_capture, run, world_size=2):
        assert "_local_scalar_dense" in message
        assert left == []
        assert seen == expected


def test_tables_live_as_long_as_banks(warm_ranks: RankPool) -> None:
    """RoPE tables that a model replaced stay while graphs may read them, and no longer."""
    run = Run({"dp": 2, "dynamic_cp": (1, 2)}, DENSE, ONE, graph=ATTN)
    for is_kept, message, is_gone in warm_ranks.run(lifetime_of_tables, run, world_size=2):
        assert is_kept
        assert "rope.cos: captured at" in message
        assert is_gone
