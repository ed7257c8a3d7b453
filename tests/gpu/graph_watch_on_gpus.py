"""Programs that capture graphs as users do, with a watch on them: what it says, and the bits."""

import gc
import importlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_core.model.decoder import make_layers
from harness.recorder import capture
from harness.recorder.capture import HostGraph
from harness.recorder.graphs import METHODS, GraphWatch, StaleGraphAddress

WIDTH, ROWS, STEPS = 64, 16, 5
Found = dict[str, Any]
Named = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def observed(
    program: Callable[[], Any], named: Named = lambda: (), stress: tuple[str, ...] = ()
) -> Found:
    """Runs a program under a watch: its result, findings, graphs, and what was raised as stale."""
    events: list[tuple[str, dict[str, Any]]] = []
    watch = GraphWatch(lambda name, detail: events.append((name, detail)), named, stress)
    # Graphs of `make_graphed_callables` are in a cycle, through the class of their function: those
    # of an earlier case in this process break a capture in which the collector frees them.
    gc.collect()
    result, stale = None, ""
    with pytest.MonkeyPatch.context() as own:
        for kind, name in itertools.product((torch.cuda.CUDAGraph, HostGraph), METHODS):
            own.setattr(kind, name, getattr(kind, name))  # put back afterwards
        watch.install()
        try:
            result = program()
        except StaleGraphAddress as error:
            stale = str(error)
    torch.cuda.synchronize()
    return {
        "result": result,
        "stale": stale,
        "findings": [event for event in events if event[0] != "graph_captured"],
        "graphs": watch.summary()["graphs"],
    }


def batches(count: int, rows: int = ROWS) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)
    return [torch.randn(rows, WIDTH, device="cuda", generator=generator) for _ in range(count)]


def model_of(layers: int = 1) -> nn.Sequential:
    torch.manual_seed(3)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*parts).cuda()


def bits(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    return [t.detach().flatten().view(torch.int32).tolist() for t in tensors]


def named_by(model: nn.Module) -> Named:
    return lambda: ((f"{name} (weights)", p) for name, p in model.named_parameters())


# --- gradients


def accumulate(
    *, graphed: bool, clone: bool, microbatches: int, to_none: bool, stress: tuple[str, ...] = ()
) -> Found:
    """Gradients at the end of each step of a training by `make_graphed_callables`.

    As many rows as columns: a gradient may take the place of an activation within the capture.
    """
    model = model_of()

    def program() -> list[Any]:
        function: Any = model
        if graphed:
            function = torch.cuda.make_graphed_callables(model, (batches(1, WIDTH)[0],))
        if clone:
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: gradient.clone())
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for x in batches(STEPS, WIDTH):
            optimizer.zero_grad(set_to_none=to_none)
            for part in range(microbatches):
                function(x + part).square().mean().backward()
            found.append(bits(p.grad for p in model.parameters() if p.grad is not None))
            optimizer.step()
        return found

    return observed(program, named_by(model), stress)


def accumulated(
    clone: bool, microbatches: int, to_none: bool, stress: tuple[str, ...] = ()
) -> tuple[bool, Found]:
    """Whether the gradients are eager's, and what the watch found."""
    shape: dict[str, Any] = {"clone": clone, "microbatches": microbatches, "to_none": to_none}
    eager = accumulate(graphed=False, **shape)["result"]
    found = accumulate(graphed=True, stress=stress, **shape)
    return found.pop("result") == eager, found


def overtaken() -> tuple[bool, Found]:
    """Two forwards, then their backwards; whether the gradients are eager's."""
    results = []
    for graphed in (False, True):
        model = model_of()

        def program(model: nn.Module = model, graphed: bool = graphed) -> Any:
            function: Any = model
            if graphed:
                function = torch.cuda.make_graphed_callables(model, (batches(1)[0],))
            losses = [function(x).square().mean() for x in batches(2)]
            sum(losses[1:], losses[0]).backward()
            return bits(p.grad.clone() for p in model.parameters() if p.grad is not None)

        results.append(observed(program, named_by(model)))
    return results[0]["result"] == results[1].pop("result"), results[1]


# --- addresses


def change(model: nn.Sequential, how: str) -> None:
    """What makes a graph over the first linear stale."""
    linear: Any = model[0][0]  # type: ignore[index]
    if how == "freed":
        del linear.weight
    elif how == "parameter":
        linear.weight = nn.Parameter(torch.ones_like(linear.weight))
    elif how == "data":
        linear.weight.data = torch.ones_like(linear.weight)
    elif how == "resized":
        linear.weight.untyped_storage().resize_(0)


def made_stale(how: str, unnamed: bool) -> Found:
    """Replays before and after a change; the result is how many replays came through."""
    model, counts = model_of(), [0]

    def program() -> None:
        held, graph = [torch.ones(3000, device="cuda")], torch.cuda.CUDAGraph()
        x = batches(1)[0]
        with torch.no_grad():
            model(x)
            with torch.cuda.graph(graph):
                model(x) + held[0].sum()
        for _ in range(2):
            graph.replay()
            counts[0] += 1
        if how == "unnamed":
            held.clear()
        else:
            change(model, how)
        graph.replay()
        counts[0] += 1

    found = observed(program, (lambda: ()) if unnamed else named_by(model))
    return found | {"result": counts[0]}


# --- whole steps


def full_iteration(
    to_none: bool, stress: tuple[str, ...] = (), sharded: bool = False
) -> tuple[bool, Found]:
    """Adam inside of a graph, over torch FSDP2 or not: whether its weights are an eager run's."""

    def train(graphed: bool, model: nn.Module) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=True)
        static, inputs = batches(1)[0], batches(STEPS + 3)

        def step() -> torch.Tensor:
            loss: torch.Tensor = model(static).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss

        side, losses, loss = torch.cuda.Stream(), [], torch.zeros(())
        side.wait_stream(torch.cuda.current_stream())  # for the inputs
        with torch.cuda.stream(side):
            for x in inputs[:3]:
                static.copy_(x)
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if graphed:
            if to_none:
                optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                loss = step()
        for x in inputs[3:]:
            static.copy_(x)
            if graphed:
                graph.replay()
            else:
                loss = step()
            losses.append(loss.detach().clone())
        torch.cuda.synchronize()
        local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        found = bits([*losses, *local])
        graph.reset()  # before its process group
        return found

    results = []
    for graphed in (False, True):
        model = model_of(3)
        if sharded:
            mesh = init_device_mesh("cuda", (1,))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        watched = stress if graphed else ()
        results.append(
            observed(lambda g=graphed, m=model: train(g, m), named_by(model), watched)  # type: ignore[misc]
        )
    return results[0]["result"] == results[1].pop("result"), results[1]


def compiled(microbatches: int, stress: tuple[str, ...]) -> tuple[bool, Found]:
    """Reduce-overhead, forward, backward and optimizer: whether the watch leaves its bits."""

    def train(model: nn.Module) -> Any:
        torch._dynamo.reset()
        function = torch.compile(model, mode="reduce-overhead")
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for x in batches(STEPS + 3):
            for part in range(microbatches):
                torch.compiler.cudagraph_mark_step_begin()
                loss = function(x + part).square().mean()
                loss.backward()
                losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return bits([*losses, *model.parameters()])

    # Its own choice of kernels is by time, which others on the GPU decide, too.
    inductor: Any = importlib.import_module("torch._inductor.config")
    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True
    plain = train(prepared())
    model = prepared()
    found = observed(lambda: train(model), named_by(model), stress)
    return found.pop("result") == plain, found


def prepared() -> nn.Module:
    """A model whose gradients are there already, so that compiled graphs own none of them."""
    model = model_of(2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def te_callables(stress: tuple[str, ...], clones: bool = True) -> tuple[bool, Found]:
    """TransformerEngine's graphs over two layers, two microbatches: whether eager's bits."""
    make_layers("te")
    import transformer_engine.pytorch as te

    def train(graphed: bool, layers: nn.ModuleList) -> Any:
        functions: Any = tuple(layers)
        if graphed:
            samples = tuple((x.requires_grad_(),) for x in batches(2))
            options = {} if clones else {"clone_param_grads_on_return": False}
            functions = te.make_graphed_callables(functions, samples, **options)
        optimizer, found = torch.optim.SGD(layers.parameters(), lr=0.1), []
        for x in batches(STEPS):
            for part in range(2):
                y = x + part
                for function in functions:
                    y = function(y)
                y.square().mean().backward()
            found += bits(p.grad for p in layers.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return found

    results = []
    for graphed in (False, True):
        torch.manual_seed(3)
        layers = nn.ModuleList(te.LayerNormMLP(WIDTH, 2 * WIDTH).cuda() for _ in range(2))
        watched = stress if graphed else ()
        results.append(
            observed(lambda g=graphed, m=layers: train(g, m), named_by(layers), watched)  # type: ignore[misc]
        )
    return results[0]["result"] == results[1].pop("result"), results[1]


# --- more right programs, each with its graphs; they return what they computed


def layers_in_one_pool(model: nn.Sequential) -> Any:
    """Four graphed layers, two microbatches, gradients cloned by hooks."""
    samples = tuple((x.requires_grad_(),) for x in batches(4))
    functions = torch.cuda.make_graphed_callables(tuple(model), samples)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clone())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x in batches(STEPS):
        for part in range(2):
            y: Any = x + part
            for function in functions:
                y = function(y)
            y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return bits(model.parameters())


def gradients_of_a_graph(model: nn.Sequential) -> Any:
    """Forward and backward in a graph, into memory of its own; clipped and stepped outside."""
    optimizer, static = torch.optim.SGD(model.parameters(), lr=0.1), batches(1)[0]
    for _ in range(3):
        model(static).square().mean().backward()
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(static).square().mean()
        loss.backward()
    losses = []
    for x in batches(STEPS):
        static.copy_(x)
        graph.replay()
        losses.append(loss.detach().clone())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return bits([*losses, *model.parameters()])


def by_the_recorders_names(model: nn.Sequential) -> Any:
    """Graphs of `harness.recorder.capture`: torch's own, of a function and of a module."""
    static, function = batches(1)[0], capture.make_graphed_callables(model, (batches(1)[0],))
    graph = capture.CUDAGraph()
    assert type(graph) is torch.cuda.CUDAGraph
    with capture.graph(graph, capture_error_mode="thread_local"):
        result = static * 2
    assert not capture.is_capturing()
    losses = []
    for x in batches(STEPS):
        static.copy_(x)
        graph.replay()
        function(result.clone()).square().mean().backward()
        losses += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
    return bits(losses)


def scaled_with_dropout(model: nn.Sequential) -> Any:
    """Autocast, dropout and a scaler in the graph; inputs come from pinned memory inside of it."""
    torch.cuda.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True, fused=True)
    scaler, pinned = torch.amp.GradScaler("cuda"), torch.zeros(ROWS, WIDTH).pin_memory()

    def step() -> torch.Tensor:
        static = pinned.to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.float16, cache_enabled=False):
            loss = nn.functional.dropout(model(static), 0.2).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    side, losses = torch.cuda.Stream(), []
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for x in batches(STEPS):
        pinned.copy_(x)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        losses.append(loss.clone())
    return bits([*losses, *model.parameters()])


def two_streams_and_a_cache(model: nn.Sequential) -> Any:
    """A branch on another stream, and a buffer that the graph made and keeps values in."""
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    static, at = batches(1)[0], torch.zeros(1, dtype=torch.long, device="cuda")
    with torch.no_grad():
        model(static)
        with torch.cuda.graph(graph):
            cache = torch.empty(STEPS, ROWS, WIDTH, device="cuda")
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                first = model[0](static)
            second = model[1](static)
            torch.cuda.current_stream().wait_stream(other)
            cache.index_copy_(0, at, (first + second)[None])
            at.add_(1)
            del first, second
    for x in batches(STEPS):
        static.copy_(x)
        graph.replay()
    return bits([cache])


def output_of_another_graph(model: nn.Sequential) -> Any:
    """Which nobody holds: its memory is still in the pool of the graph that writes it."""
    graphs, static = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()), batches(1)[0]
    with torch.no_grad():
        model(static)
        with torch.cuda.graph(graphs[0]):
            middle = model[0](static)
        with torch.cuda.graph(graphs[1]):
            out = model[1](middle)
        del middle
    found = []
    for x in batches(STEPS):
        static.copy_(x)
        for graph in graphs:
            graph.replay()
        found.append(out.clone())
    return bits(found)


def compiled_optimizer(model: nn.Sequential) -> Any:
    """Reduce-overhead over the model, and over the optimizer's step."""
    torch._dynamo.reset()
    model = nn.Sequential(*list(model)[:1])
    function = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(batches(1)[0]).square().mean().backward()
    optimizer.step()  # its state must not be an output of a graph
    optimizer.zero_grad(set_to_none=True)
    step = torch.compile(optimizer.step, mode="reduce-overhead")
    for x in batches(STEPS + 3):
        torch.compiler.cudagraph_mark_step_begin()
        function(x).square().mean().backward()
        step()
        optimizer.zero_grad(set_to_none=True)
    return bits(model.parameters())


RIGHT = {
    each.__name__: each
    for each in (
        layers_in_one_pool,
        gradients_of_a_graph,
        by_the_recorders_names,
        scaled_with_dropout,
        two_streams_and_a_cache,
        output_of_another_graph,
        compiled_optimizer,
    )
}


def compared(name: str, stress: tuple[str, ...]) -> tuple[bool, Found]:
    """Whether the watch leaves a program's bits, and what it says."""
    plain = RIGHT[name](model_of(4))
    model = model_of(4)
    found = observed(lambda: RIGHT[name](model), named_by(model), stress)
    return found.pop("result") == plain, found


# --- stressors


def half_written(stress: tuple[str, ...]) -> list[float]:
    """Sums over memory of which the graph writes half; 16 a replay if the rest is 0 by luck."""
    x = torch.ones(16, device="cuda")

    def program() -> list[float]:
        graph, sums = torch.cuda.CUDAGraph(), []
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=pool):
            torch.zeros(32, device="cuda")
        # As new memory is: the first graph writes zeros where the second one's scratch will be.
        graph.replay()
        second = torch.cuda.CUDAGraph()
        with torch.cuda.graph(second, pool=pool):
            scratch = torch.empty(32, device="cuda")
            scratch[:16] = x
            total = scratch.sum()
            del scratch
        for _ in range(3):
            second.replay()
            sums.append(float(total))
        return sums

    found = observed(program, stress=stress)
    assert found["findings"] == []
    result: list[float] = found["result"]
    return result


def unseen_read(free: bool, stress: tuple[str, ...]) -> list[float]:
    """What a kernel that no operator shows reads in three replays; its memory is freed or not."""
    from tests.gpu.copy_kernel import copy  # Triton is where GPUs are

    count = 1 << 20

    def program() -> list[float]:
        held, found = [torch.full((count,), 3.0, device="cuda")], []
        target = torch.empty(count, device="cuda")
        copy[(count // 1024,)](held[0], target, count, block=1024)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            copy[(count // 1024,)](held[0], target, count, block=1024)
        if free:
            held.clear()
        for _ in range(3):
            graph.replay()
            found.append(float(target.double().sum() / count))
        return found

    found = observed(program, stress=stress)
    assert found["findings"] == []
    result: list[float] = found["result"]
    return result
