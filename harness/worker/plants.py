"""What single faults do that no general injector does; the catalogue calls each by its name.

Most are bodies of calls, named by what takes a call's place; what they mean is said in the
catalogue. On the CPU, and on a GPU that has nothing else to do, a plain run shows none of the
faults of the order of work but `gathered_ahead`. But for those that hang, ranks keep the number and
the order of collectives.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_core.fsdp.api import units_in
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.fsdp.pool import DynamicPool, Key, SlotPool
from fsdp_core.fsdp.unit import in_backward
from fsdp_core.parallel.pipeline import Microbatch
from fsdp_core.stress.stressors import WatchedPool
from fsdp_core.train import Trainer
from fsdp_core.train.graphs import CapturedRegion
from harness.worker.plant import (
    TENSORS,
    NotHere,
    Site,
    first_unit,
    group_of_layer_1,
    keep,
    layers,
    on_its_stream,
    schedules,
    surround,
    unit_named,
)  # fmt: skip

# ---- how a process fails

wait_s: Callable[[float], None] = time.sleep
"""What one that hangs does."""


class PlantedError(RuntimeError):
    """The exception that faults raise."""


def _fail(trainer: Any, how: str, path: str = "", number: str = "0") -> None:
    """`hang`, `exit`, `raise`, `oom` or by a signal; now, or in that call of a path, from 0.

    In a scope that is not partial it is the first call: there is no warm-up.
    """

    def failing(site: Site, *args: Any, **more: Any) -> Any:
        whole = trainer.config.graph == ("full_iteration",)
        if site.number - 1 == (0 if whole else int(number)):
            _fail(trainer, how)
        return site.call(*args, **more)

    held, nbytes = [], 1 << 30
    if path:
        surround(trainer, path, failing)
    elif how == "exit":
        os._exit(13)
    elif how == "raise":
        raise PlantedError("planted exception")
    elif how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    else:
        while how == "hang":
            wait_s(3600)
        while how == "oom":
            held.append(torch.empty(nbytes, dtype=torch.uint8, device=trainer.device.torch_device))
            # The CPU hands out address space without memory behind it: ask for more than exists.
            nbytes = nbytes if trainer.device.is_cuda else nbytes * 1024


def _hold(trainer: Trainer, number: str, unit: str) -> None:
    nbytes = int(number) * (trainer.device.peak_bytes() if unit == "peaks" else 1)
    keep(trainer, torch.zeros(nbytes, dtype=torch.uint8, device=trainer.device.torch_device))


def _access_illegally(trainer: Trainer) -> None:
    """Replay a graph over memory that was given back to the driver and unmapped."""
    device = trainer.device
    with device.on(trainer.stream):
        # Larger than any block that the allocator would cut from a shared segment.
        source = torch.ones(256 << 20, dtype=torch.uint8, device=device.torch_device)
        total = torch.zeros(256 << 20, dtype=torch.uint8, device=device.torch_device)
        graph = torch.cuda.CUDAGraph()
        device.synchronize()
        with torch.cuda.graph(graph, stream=trainer.stream, capture_error_mode="thread_local"):
            total.copy_(source)
        del source
        torch.cuda.empty_cache()
        graph.replay()
        device.synchronize()


class _Ramp:
    """A hook that scales a module's output by more each time; it says that graphs may hold it."""

    _cuda_graph_capturable = True
    num_calls = 0

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return output * (1 + self.num_calls / 64)


def _every_other(site: Site, index: int) -> None:
    """As `arrived`, which of the first parameter hears only every other time."""
    site.kept = (site.kept or 0) + (index == 0)
    if index or site.kept % 2:
        site.call(index)


class Kept(ParamGroup):
    """A group that holds what it has gathered for what there is; the buffer stays."""

    is_current = True

    def reshard(self, stream: Any) -> None:
        if self.is_registered:
            self._register(self.sharded)
            self.is_registered = False


# ---- memory: tensors that others take the place of, that move, or have two owners


class _RestlessPool(DynamicPool):
    """A dynamic pool that gives no block twice: what is freed is taken at once, and kept."""

    _taken: tuple[torch.Tensor, ...] = ()

    def release(self, key: Any, stream: Any) -> None:
        """See `DynamicPool`."""
        tensor = self._buffers[key].tensor
        numel, dtype = tensor.numel(), tensor.dtype
        super().release(key, stream)
        self._taken += (torch.empty(numel, dtype=dtype, device=tensor.device),)


def _unstable_buffers(trainer: Trainer) -> None:
    for schedule in schedules(trainer):
        unstable, pool = _RestlessPool(schedule.device), schedule.pool
        if isinstance(pool, WatchedPool):
            pool.inner = unstable
            continue
        schedule.pool = unstable
        for unit in schedule.units:
            for group in unit.groups:
                group.pool = unstable


def _assign_weights(trainer: Trainer) -> None:
    """As a checkpoint that is loaded by assignment: the same values in other memory."""
    optimizer = trainer.optimizer
    with on_its_stream(trainer):
        for group in trainer.groups:
            group.main_weight = group.main_weight.clone()
            for index, name in enumerate(group.names):
                rows = group.local_rows(group.main_weight, index)
                if name in optimizer.names:
                    optimizer.params[optimizer.names.index(name)] = rows


def _move_parameter(trainer: Trainer, name: str) -> str:
    """Move a parameter's storage; a tensor of NaN takes the old place."""
    held = {
        name: parameter
        for group in trainer.groups
        for name, parameter in zip(group.names, group.unsharded, strict=True)
    }
    if name == "-":
        # The first that every graph scope reads: attention's, of this rank's first layer.
        name = next(name for name in held if ".attn.attention." in name)
    if name not in held:
        raise ValueError(
            f"plant.tensor: expected a parameter, got {name!r}; legal values: {', '.join(held)}"
        )
    device = trainer.device
    device.synchronize()
    storage = held[name].data.untyped_storage()
    nbytes, address = storage.nbytes(), storage.data_ptr()
    if not nbytes:
        raise ValueError(
            f"plant.fault: expected {name} to have memory between steps, which stale_parameter "
            "moves; with fsdp.pool dynamic it has none"
        )
    # Growing allocates the new block before it frees the old one, so the address must change.
    device.resize_storage(storage, 2 * nbytes)
    assert storage.data_ptr() != address
    keep(trainer, torch.full((nbytes // 4,), float("nan"), device=device.torch_device))
    device.synchronize()
    return name


def _move_gradient_buffer(trainer: Trainer) -> None:
    """As `move_parameter`, of the buffer that the first layer's gradients are reduced from."""
    with on_its_stream(trainer):
        for group in first_unit(trainer).groups:
            assert group.gradients.pooled is not None
            storage = group.gradients.pooled.untyped_storage()
            trainer.device.resize_storage(storage, 2 * storage.nbytes())


def _share_buffer(trainer: Trainer, role: str) -> None:
    """What the pool believes stays: two slots, and whoever asks for the second gets the first."""
    pool: Any = schedules(trainer)[0].pool
    pool = pool.inner if isinstance(pool, WatchedPool) else pool
    assert isinstance(pool, SlotPool)
    owners = [units_in(layer)[0].groups[0].owner for layer in layers(trainer)[:2]]
    homes = [pool._homes[key] for owner in owners if (key := Key(owner, role)) in pool._homes]
    if len(homes) < 2:
        raise NotHere(f"second {role} buffer")
    first, second = homes
    with on_its_stream(trainer):
        second.tensor = first.tensor[: second.tensor.numel()]


# ---- the order of work: but for the last they change no collective


def _drain_at_once(site: Site, keep: int) -> None:
    schedule = site.owner
    while len(schedule.reductions) > keep:
        gradients = schedule.reductions.pop(0).gradients
        gradients.release_full(schedule.device.current_stream())


def _reduce_and_drop(site: Site, stream: Any, *, final: bool) -> list[Any]:
    site.call(stream, final=final)
    return []


def _release_early(site: Site) -> None:
    """Release the unit's buffers as soon as they are gathered."""
    site.call()
    for group in site.owner.groups:
        if group.is_unsharded and group.nest.weight_level and not vars(group).get("_is_out"):
            vars(group)["_is_out"] = True
            group.pool.release(group._gather_key, site.trainer.device.current_stream())


def _reshard_released(site: Site, stream: Any) -> None:
    pool, is_out = site.owner.pool, vars(site.owner).pop("_is_out", False)
    release = pool.release
    pool.release = (lambda *args: None) if is_out else release
    try:
        site.call(stream)
    finally:
        pool.release = release


def _end_without_joining(site: Site) -> None:
    """The end of backward as if there were no stream of reductions."""
    schedule = site.owner
    streams = schedule.side_streams
    for reduction in schedule.reductions:
        reduction.event = None
    schedule.__dict__["side_streams"] = (streams[0], streams[0])
    try:
        site.call()
    finally:
        schedule.__dict__["side_streams"] = streams


def _unordered(site: Site, *args: Any) -> Any:
    """The same work on a stream of its own, which waits for none and for which none waits."""
    if site.kept is None:
        site.kept = site.trainer.device.new_stream("unordered")
    with site.trainer.device.on(site.kept):
        return site.call(*args)


def _gather_ahead(trainer: Trainer) -> None:
    """The next step finds the layer gathered, from main weights before the last update."""
    unit = unit_named(trainer, "layers.1")
    group = unit.groups[0]
    with on_its_stream(trainer):
        with other_main_weight(group, before_last_update(trainer, group)):
            unit.unshard()
        group.gathered_version = group.main_weight._version


# ---- graphs


def _replay_first_alone(site: Site, graphs: Any, *args: Any) -> None:
    """Other microbatches than a step's first run eagerly; early, a site has the configuration."""
    site.call(graphs, *args)
    if (site.number - 1) % site.trainer.microbatches:
        graphs._chosen = None


def _freeze_masks(trainer: Trainer) -> None:
    """Each replay draws the numbers that are next now, and none are used up."""
    streams, baked = trainer.streams, trainer.streams.get_states()

    def frozen(site: Site, graph: Any) -> None:
        own = streams.get_states()
        streams.set_states(baked)
        site.call(graph)
        streams.set_states(own)

    surround(trainer, "graphs.replay", frozen)


def _put_back_draws(site: Site, graph: Any) -> None:
    own = site.trainer.streams.get_states()
    site.call(graph)
    site.trainer.streams.set_states(own)


def _replay_so_often(site: Site, function: Any, number: int) -> Any:
    """The step that is captured, right after."""
    for _ in range(number if site.number == 1 else 1):
        site.call(function)
    return function.result


def _count_on_host(trainer: Trainer) -> None:
    """The optimizer is told the number of its step by Python, as a capture would bake it in."""
    optimizer, count = trainer.optimizer, trainer.optimizer.step_count
    num_steps = int(count.item())

    @torch.no_grad()
    def stepped(site: Site) -> None:
        # `step` adds one to it.
        optimizer.step_count = torch.full_like(count, float(num_steps + site.number - 1))
        site.call()
        count.add_(1.0)
        optimizer.step_count = count

    surround(trainer, "trainer.optimizer.step", stepped)


def _replay_old_input(site: Site, graph: Any, tensors: Any, pending: Any) -> Any:
    if graph.name == "layers.0.attn":
        tensors = tuple(static.detach().clone() for static in graph.inputs)
    return site.call(graph, tensors, pending)


def _replay_old_gradient(site: Site, graph: Any, grads: Any, pending: Any) -> Any:
    if graph.name == "layers.0.attn":
        # The memory is shared by the graphs of all layers: keep what this one was given first.
        site.kept = site.kept or {}
        grads = site.kept.setdefault(graph, [grad.clone() for grad in grads])
    return site.call(graph, grads, pending)


def _slots(trainer: Trainer) -> list[list[CapturedRegion]]:
    """Regions of the first stage in the order in which they run, of each size and slot."""
    found = [list(found.values()) for found in trainer._graphs.parts[0].graphs.values()]
    if min(map(len, found), default=0) < 2:
        raise NotHere("second graphed layer")
    return found


def _exchange_graphs(trainer: Trainer) -> None:
    for first, second, *_ in _slots(trainer):
        first.graph, second.graph = second.graph, first.graph


def _share_graphs(trainer: Trainer) -> None:
    for first, second, *_ in _slots(trainer):
        mine, other = cast("Any", second.graph), cast("Any", first.graph)
        mine._forward, mine._backward = other._forward, other._backward


def _fork_side_stream(site: Site, x: torch.Tensor, *args: Any) -> None:
    side = torch.cuda.Stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        x.detach().sum()


def _wait_for_old_event(trainer: Trainer) -> None:
    """As a gather that was begun before the capture, and is waited for inside it."""
    device = trainer.device
    with device.on(trainer.stream):
        event = device.new_stream().record_event()

    def waiting(site: Site, *args: Any, **how: Any) -> Any:
        device.current_stream().wait_event(event)
        return site.call(*args, **how)

    surround(trainer, "layers.0.attn.attention.forward", waiting)


# ---- what ranks exchange


def _keep_own(
    site: Site, buffer: torch.Tensor, outputs: list[torch.Tensor], level: int
) -> torch.Tensor:
    for axis, output in enumerate(outputs, start=level):
        output.copy_(site.owner.slice(buffer, axis, axis + 1))
        buffer = output
    return buffer


@contextlib.contextmanager
def other_main_weight(group: ParamGroup, weight: torch.Tensor) -> Iterator[None]:
    """Inside, what is gathered or copied from a group's main weight is another one."""
    now, group.main_weight = group.main_weight, weight
    try:
        yield
    finally:
        group.main_weight = now


def before_last_update(trainer: Trainer, group: ParamGroup) -> torch.Tensor:
    """This rank's main weights of a group as they were before the last AdamW step, but for bits."""
    optimizer, options = trainer.optimizer, trainer.config.optim
    with on_its_stream(trainer):
        old, taken = group.main_weight.clone(), optimizer.step_count
        for index, name in enumerate(group.names):
            if name not in optimizer.names:
                continue
            place, rows = optimizer.names.index(name), group.local_rows(old, index)
            mean = optimizer.exp_avg[place] / (1.0 - options.beta1**taken)
            square = optimizer.exp_avg_sq[place] / (1.0 - options.beta2**taken)
            rows.add_(optimizer.lr * mean / (square.sqrt() + options.eps))
            if rows.dim() >= 2:
                rows.div_(1.0 - optimizer.lr * options.weight_decay)
    return old


def _gather_old(trainer: Trainer) -> None:
    """From now on a rank gives its shard of before the last update to gathers."""
    group = group_of_layer_1(trainer)
    old = before_last_update(trainer, group)

    def gather_old(site: Site, full: torch.Tensor) -> None:
        with other_main_weight(site.owner, old):
            site.call(full)

    surround(trainer, (group, "_gather"), gather_old)


def _swap_shards(site: Site, full: torch.Tensor) -> None:
    site.call(full)
    shards = full.view(site.owner.nest.num_shards, -1)
    shards.copy_(shards.flip(0))


def _second_first(site: Site) -> None:
    if not in_backward():
        unit_named(site.trainer, "layers.1").unshard()
    site.call()


def _lose_first(site: Site, *args: Any) -> None:
    """Of the experts' gradients the first expert's of the first parameter."""
    with torch.no_grad():
        site.owner._views[0][0].zero_()


def _update_alone(site: Site, rate: float) -> None:
    router = site.owner
    axes = router._axes
    router._axes = SimpleNamespace(tokens=())
    site.call(rate)
    router._axes = axes


def _count_copies(site: Site, stages: Any) -> Any:
    found = site.call(stages)
    return found | {(): [], ("tp",): [*found["tp",], *found[()]]}


def _without_hooks(site: Site, modules: Any, kernel: Any, *args: Any) -> Any:
    del site, modules
    return kernel(*args)


def _with_pre_hooks(site: Site, modules: Any, kernel: Any, *args: Any) -> Any:
    del site
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            hook(module, args, {})
    return kernel(*args)


def _skip_hop(site: Site, hop: Any) -> Any:
    """Keys and values that came round the ring are dropped; a rank uses its own once more."""
    site.call(hop)
    return hop._sent


def _mean_of_blocks(site: Site, one: Any, other: Any) -> Any:
    _, lse = site.call(one, other)
    is_seen = other[1].isfinite()[..., None]
    return torch.where(is_seen, (one[0] + other[0]) / 2, one[0]), lse


def _give_old(
    site: Site, state: Any, transfer: Any, tensor: torch.Tensor, activations: Any
) -> None:
    """A stage sends what it made of the microbatch before."""
    if (transfer.target > transfer.source) is activations:
        old = site.kept if transfer.microbatch and site.kept is not None else tensor
        site.kept = tensor.detach().clone()
        tensor = old
    site.call(state, transfer, tensor)


def _one_nan(site: Site, *args: Any, **how: Any) -> torch.Tensor:
    out: torch.Tensor = site.call(*args, **how)
    mask = torch.zeros_like(out, dtype=torch.bool)
    mask.view(-1)[0] = True
    return out.masked_fill(mask, torch.nan)


def _last_undivided(site: Site, state: Any, i: int, value: torch.Tensor) -> torch.Tensor:
    """Backward begins with the loss of the last microbatch undivided."""
    number = len(state.microbatches)
    scaled: torch.Tensor = site.call(state, i, value)
    return scaled * number if i == number - 1 else scaled


def _forget_sum(site: Site, *args: Any) -> None:
    """A microbatch's gradient takes the place of the sum so far."""
    for parameter in group_of_layer_1(site.trainer).sharded:
        parameter.grad = None


def _deposit_twice(site: Site, rows: Any, every: int) -> None:
    """Of so many reductions what one gives is added twice."""
    if site.number % every == 0:
        site.call({index: row.clone() for index, row in rows.items()})
    site.call(rows)


def _double_last(site: Site, full: torch.Tensor | None, *others: Any) -> Any:
    """What a rank adds to the sum over ranks is, in the last microbatch, twice its own."""
    gradients = site.owner
    site.kept = (site.kept or 0) + (full is not None)
    if full is not None and site.kept % site.trainer.config.microbatches == 0:
        torch._foreach_mul_([gradients._views[i] for i in sorted(gradients._copied)], 2)
    return site.call(full, *others)


def _update_neighbour(trainer: Trainer) -> None:
    """The kernel takes a matrix to begin an element too soon, as after a shard without elements."""
    params = trainer.optimizer.params
    weight = params[-1]
    params[-1] = weight.as_strided(weight.shape, weight.stride(), weight.storage_offset() - 1)


def _spoil_second_moment(site: Site, states: Any, loaded: Any, how: str, *values: float) -> None:
    """What was loaded of the last parameter's is changed."""
    site.call(states, loaded)
    *_, last = states.state.values()
    TENSORS[how](last["exp_avg_sq"].to_local(), *values)


def _copy_old_weights(trainer: Trainer) -> None:
    """The copies that are computed with are those of before the last update."""
    group = group_of_layer_1(trainer)
    old = before_last_update(trainer, group)
    with on_its_stream(trainer), other_main_weight(group, old):
        group.main_weight_changed()


def _weigh_alone(site: Site) -> list[Microbatch]:
    """The loss of a pack is divided by its own tokens, not by the mean of all packs."""
    return [
        Microbatch(each.tokens, {"part": replace(part, weight=weight)})
        for each in site.call()
        for part in [each.keywords["part"]]
        for weight in [1.0 / part.num_counted.clamp(min=1.0)]
    ]


def _seed(trainer: Trainer, how: str) -> None:
    """The first stage's dropout draws what a generator does that was just seeded."""
    seed = {
        "alike": lambda: trainer.config.seed,
        "by_rank": lambda: trainer.config.seed + dist.get_rank(),
        "by_entropy": lambda: int.from_bytes(os.urandom(7), "little"),
    }[how]()
    generator = torch.Generator(trainer.device.torch_device).manual_seed(seed)
    layers(trainer)[0].attn.residual.stream.set_state(generator.get_state())


def _draw_in_place(site: Site, *args: Any, **how: Any) -> Any:
    """Drawing does not advance the generator."""
    kept = site.owner.get_state()
    out = site.call(*args, **how)
    site.owner.set_state(kept)
    return out


LINES: Mapping[str, Callable[..., Any]] = {
    # Injectors.
    "decay_all": lambda trainer: setattr(
        trainer.optimizer, "_groups",
        [(of, trainer.config.optim.weight_decay) for of, _ in trainer.optimizer._groups],
    ),
    "draw_aside": lambda trainer: torch.rand(1, device=trainer.device.torch_device),
    "hook_that_counts": lambda trainer: layers(trainer)[0].attn.norm.register_forward_hook(_Ramp()),
    "hook_that_doubles": lambda trainer: first_unit(trainer).groups[0].unsharded[0].register_hook(
        lambda grad: grad * 2
    ),
    # Bodies of calls.
    "forget_gather": lambda site: setattr(site.owner, "gathered_event", None),
    "leave_one": lambda site, gradients: gradients.is_pending or site.owner.drain(keep=1),
    # The kernel is told a step at which nothing is left to correct.
    "leave_uncorrected": lambda site, *args, **how: site.call(
        *args[:-1], [torch.full_like(step, 1e6) for step in args[-1]], **how
    ),
    "mean_of_own": lambda site, losses, axes: losses.double().mean().float(),
    "norm_of_own": lambda site, parameters: torch.nn.utils.get_total_norm(
        [p.grad.to_local() for p in parameters if p.grad is not None]
    ),
    "nothing_to_restore": lambda site, hooks: [taken[2].clear() for taken in hooks._taken],
    # All that `begin_backward` does but to ask for a call of the end.
    "only_wait": lambda site: site.owner.reduce_stream.wait_stream(
        site.owner.device.current_stream()
    ),
    "product_alone": lambda site, x: F.linear(x, site.owner.weight),
    "read_on_host": lambda site, x, *args: float(x.detach().sum()),
    "spare_layer": lambda site, parameters, *how: site.call(
        [p for p in parameters if id(p) not in map(id, group_of_layer_1(site.trainer).sharded)],
        *how,
    ),
    # Of shards, tp and pp, the last is left out where there are all three.
    "sum_of_two_axes": lambda site, power, axis: (
        power
        if axis is site.trainer.axes.pp and site.trainer.axes.dense_mesh.size() > 1
        and site.trainer.axes.tp.size > 1
        else site.call(power, axis)
    ),
    "wait_for_device": lambda site, x, *args: torch.cuda.synchronize(x.device),
}  # fmt: skip
"""What takes one: injectors, and bodies of calls."""
