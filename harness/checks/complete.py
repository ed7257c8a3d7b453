"""Is a run whole? Every rank, step and digest, all that graphs and a soak owe, and nothing else.

    outcome -> ranks -> one rank: lines, start, steps, end, initial state, digests
      -> graphs and compiled parts, as owed -> the soak's length -> exit codes

The first flaw found is returned. Nothing is compared before both runs are known to be whole: a
missing step would otherwise be a step that did not differ.

    scope            owed by a rank of the built-in program    replays
    partial ones     each layer of its pipeline stages that    (steps - warm-up) x microbatches,
                     the scope captures, forward, backward     forward and backward each
    full_iteration   gradients; `optimizer` if it holds it     steps - warm-up

Captures are one at least: a pipeline has graphs for each slot, dynamic context parallelism for each
size. Replays are exact: one short is a microbatch that ran eagerly. Of another program a scenario
asks for `graphs`: what the recorder found on its replays is a failure whether it asks or not.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fsdp_core.config import TrainConfig
from fsdp_core.config.scopes import captured_layers, layers_with
from fsdp_core.parallel.pipeline_split import split_layers
from harness.checks import Option, check
from harness.checks.evidence import (
    Options,
    Runs,
    count,
    error,
    failed,
    passed,
    rank_table,
    show_ranks,
)
from harness.infrastructure import SHARED_GPU, machine_failure
from harness.records import (
    ABSENT,
    DIGEST_GROUPS,
    DIGEST_HEX_CHARS,
    SAMPLES,
    SCHEMA_VERSION,
    TAP_HEX_CHARS,
    TOKENS,
    CheckResult,
    Difference,
    EndRecord,
    EventRecord,
    GraphUse,
    InitialRecord,
    RankRecords,
    RunResult,
    StartRecord,
    StepRecord,
    What,
)
from harness.soaking import taking_turns

HEX_DIGITS = "0123456789abcdef"
PROVING_GROUPS = ("grads", "weights", "optim")
"""Digest groups that must cover at least one tensor of a run; it may hold no RNG."""
OF_INITIAL = ("weights", "optim", "rng")
"""Digest groups of the state before step 0."""
NO_BLAME: tuple[What, ...] = ("interrupted", "not_run", "unsupported", SHARED_GPU)
"""What may end a candidate's run through no fault of its own: no verdict rather than a failure."""
WHOLE = "full_iteration"
NO_STEP = (
    ": the recorder saw no step of a torch optimizer after a backward pass; "
    "say where steps are with `with recorder.step():` of harness.recorder.record"
)


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """Why a run is not whole. None, or "" as `module`, where a field does not apply.

    Of `ranks` that share one flaw, `rank` is the lowest. `module` is the layer of a graph.
    """

    what: What
    message: str
    rank: int | None = None
    step: int | None = None
    difference: Difference | None = None
    module: str = ""
    ranks: tuple[int, ...] = ()


def failure_of_machine(run: RunResult, flaw: Flaw) -> str:
    """Name of the machine's failure that crashed a run, else ""; who hung alone knows why."""
    return machine_failure(run) if flaw.what == "crashed" else ""


def find_flaw(run: RunResult) -> Flaw | None:
    """The first reason why `run` must not be compared, or None if it is whole."""
    return next(_flaws(run), None)


def _flaws(run: RunResult) -> Iterator[Flaw]:
    """Each part may take for granted that those before it have no flaw."""
    yield from _of_outcome(run)
    yield from _of_ranks(run)
    steps, due = steps_due(run), ("steps", "microbatches") if run.spec.is_builtin else ("steps",)
    for name in due:
        value = run.spec.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            message = f"expected an integer >= 1, got {value!r}"
            yield _corrupt(f"the specification's {name}: {message}")
    assert steps is not None
    for records in rank_table(run).values():
        for flaw in _of_rank(run, records, steps):
            yield _of_all(flaw, run, steps) if flaw.what == "missing_step" else flaw
    yield from _of_soak(run)
    # A rank may own no row of a small model; all of them together must own some.
    for group in PROVING_GROUPS:
        if not any(_holds(records, group) for records in run.ranks):
            message = f"no rank digests a tensor of {group}: empty digests prove nothing"
            yield Flaw(what="empty_run", message=message)
    yield from _of_exits(run)


def _corrupt(message: str, rank: int | None = None, step: int | None = None) -> Flaw:
    return Flaw(what="corrupt_record", message=message, rank=rank, step=step)


def _of_outcome(run: RunResult) -> Iterator[Flaw]:
    outcome = run.outcome
    if outcome.key != run.spec.key:
        yield _corrupt(f"the outcome belongs to run {outcome.key}, expected {run.spec.key}")
    if outcome.undecided:
        how = f"ended as {outcome.what}" if outcome.what else "then finished alone"
        message = f"the run shared a GPU under MPS and {how}: --resume finds out which one failed"
        yield Flaw(what=SHARED_GPU, message=message)
    if outcome.what:
        message = outcome.message or f"the run ended as {outcome.what}"
        yield Flaw(what=outcome.what, message=message, rank=outcome.culprit_rank)


def _of_ranks(run: RunResult) -> Iterator[Flaw]:
    expected, numbers = set(range(run.spec.world_size)), [records.rank for records in run.ranks]
    if not expected:
        yield Flaw(what="empty_run", message="the run has no ranks")
    if not any(r.steps or r.problems or r.error for r in run.ranks):
        hint = "" if run.spec.is_builtin else NO_STEP
        yield Flaw(what="empty_run", message=f"no rank recorded a step{hint}")
    if len(set(numbers)) != len(numbers) or set(numbers) - expected:
        last = run.spec.world_size - 1
        yield _corrupt(f"expected records of ranks 0 to {last} once, got {numbers}")
    silent = {r.rank for r in run.ranks if not (r.start or r.steps or r.problems or r.error)}
    if missing := sorted((expected - set(numbers)) | silent):
        message = (
            f"no records of rank {missing[0]} ({len(missing)} of {len(expected)} ranks missing)"
        )
        yield Flaw(what="missing_rank", message=message, rank=missing[0])


def _holds(records: RankRecords, group: str) -> bool:
    """Whether a rank digests a tensor of a group in any step."""
    if records.start is None or not records.start.tensors[group]:
        return False
    return any(record.digests[group].replace(ABSENT, "") for record in records.steps)


def _of_rank(run: RunResult, records: RankRecords, steps: int) -> Iterator[Flaw]:
    yield from _of_lines(records)
    start, end, rank = records.start, records.end, records.rank
    if start is None:
        yield _corrupt(f"rank {rank} has no start record", rank)
    assert start is not None
    key = run.spec.recorded or run.spec.key
    yield from _unlike(records, "start", (
        ("schema", start.schema, SCHEMA_VERSION), ("rank", start.rank, rank),
        ("world_size", start.world_size, run.spec.world_size), ("run", start.run or key, key),
    ))  # fmt: skip
    if not set(start.tensors) >= set(DIGEST_GROUPS):
        expected = f"expected {sorted(DIGEST_GROUPS)}"
        yield _corrupt(f"rank {rank} names tensors of {sorted(start.tensors)}, {expected}", rank)
    if len(start.taps) != len(start.tap_stages):
        stages = f"{len(start.tap_stages)} stages of them"
        yield _corrupt(f"rank {rank} names {len(start.taps)} taps and {stages}", rank)
    yield from _of_sequence(records, steps)
    if end is None:
        message = f"rank {rank} has no end record: its file stops after step {steps - 1}"
        yield _corrupt(message, rank)
    assert end is not None
    yield from _unlike(records, "end", (("rank", end.rank, rank), ("steps", end.steps, steps)))
    # Without it a difference of that state would be blamed on the first step.
    if records.initial is None:
        yield _corrupt(f"rank {rank} has no record of the state before step 0", rank)
    assert records.initial is not None
    if wrong := _wrong_before(records.initial, rank, start):
        yield _corrupt(f"rank {rank}, before step 0: {wrong}", rank)
    for record in records.steps:
        if wrong := _wrong_in(run, record, rank, start):
            yield _corrupt(f"rank {rank}, step {record.step}: {wrong}", rank, record.step)
    if run.spec.is_builtin:
        if start.tensors.get(SAMPLES, ())[:1] != (TOKENS,):
            yield _corrupt(f"rank {rank} has no digests of the tokens that it read", rank)
        yield from _of_graphs(run, rank, steps, end)


def _unlike(
    records: RankRecords, kind: str, facts: Iterable[tuple[str, object, object]]
) -> Iterator[Flaw]:
    for name, got, expected in facts:
        if got != expected:
            message = f"rank {records.rank} {kind} record, {name}: expected {expected}, got {got}"
            yield _corrupt(message, records.rank)


def _of_lines(records: RankRecords) -> Iterator[Flaw]:
    rank, error = records.rank, records.error
    # A line after the end may be out of sequence too; what it says of itself comes first.
    for problem in (*records.after_end, *records.problems):
        what: What = "record_after_end" if records.after_end else "corrupt_record"
        yield Flaw(what=what, message=f"rank {rank}: {problem}", rank=rank)
    if error is not None and records.end is not None:
        message = f"rank {rank} recorded both an error and an end"
        yield Flaw(what="record_after_end", message=message, rank=rank, step=error.step)
    if error is not None:
        message = f"rank {rank}, step {error.step}: {error.type}: {error.message}"
        yield Flaw(what=error.what or "crashed", message=message, rank=rank, step=error.step)


def _of_sequence(records: RankRecords, steps: int) -> Iterator[Flaw]:
    rank, seen = records.rank, [record.step for record in records.steps]
    if len(seen) == steps and seen == list(range(steps)):
        return
    # Never by the steps that are due: a forged plan may ask for any number.
    found = {step for step in seen if 0 <= step < steps}
    if len(found) < steps:
        first = next(step for step in range(steps) if step not in found)
        missing = f"({steps - len(found)} of {steps} steps missing)"
        message = f"rank {rank} has no record of step {first} {missing}"
        yield Flaw(what="missing_step", message=message, rank=rank, step=first)
    if extra := sorted(set(seen) - found):
        message = f"rank {rank} recorded step {extra[0]}, the run ends with step {steps - 1}"
        yield Flaw(what="record_after_end", message=message, rank=rank, step=extra[0])
    place = next(i for i, step in enumerate(seen) if step != i)
    message = f"rank {rank}: expected step {place} next, got step {seen[place]}"
    yield _corrupt(message, rank, seen[place])


def _of_all(flaw: Flaw, run: RunResult, steps: int) -> Flaw:
    """A missing step with all ranks that lack the same one, and how those exited."""
    lack = [(records.rank, next(_of_sequence(records, steps), None)) for records in run.ranks]
    ranks = tuple(sorted(rank for rank, own in lack if own is not None and own.step == flaw.step))
    left = {each.rank for each in run.outcome.ranks if each.code == 0}
    left -= {records.rank for records in run.ranks if records.end is not None}
    message = flaw.message
    if len(ranks) > 1:
        message = f"{show_ranks(set(ranks))} have no record of step {flaw.step} of {steps} steps"
    if left >= set(ranks):
        message += ", exited with code 0 without an end record"
    return replace(flaw, ranks=ranks, message=message)


def _wrong_in(run: RunResult, record: StepRecord, rank: int, start: StartRecord) -> str:
    """What is wrong with the record of a step, in words; "" if nothing is."""
    due, got = run.spec.config.get("microbatches"), len(record.microbatch_losses)
    if record.rank != rank:
        return f"the record says rank {record.rank}"
    if due is not None and got != due:
        return f"expected {due} microbatch losses, got {got}"
    if set(record.digests) != set(start.tensors):
        return f"digests of {sorted(record.digests)}, expected {sorted(start.tensors)}"
    return _wrong_digests(record.digests, start) or _wrong_text(
        "the taps", record.taps, TAP_HEX_CHARS * len(start.taps)
    )


def _wrong_before(record: InitialRecord, rank: int, start: StartRecord) -> str:
    if record.rank != rank:
        return f"the record says rank {record.rank}"
    if missing := sorted(set(OF_INITIAL) - set(record.digests)):
        return f"no digests of {missing}"
    if unknown := sorted(set(record.digests) - set(start.tensors)):
        return f"digests of {unknown}, which name no tensors"
    return _wrong_digests(record.digests, start)


def _wrong_digests(digests: Mapping[str, str], start: StartRecord) -> str:
    wrong = (
        _wrong_text(f"the digest of {group}", text, DIGEST_HEX_CHARS * len(start.tensors[group]))
        for group, text in digests.items()
    )
    return next(filter(None, wrong), "")


def _wrong_text(what: str, text: str, due: int) -> str:
    if len(text) != due:
        return f"{what}: {len(text)} characters, expected {due}"
    # Stripping both ends leaves nothing exactly when every character is a hex digit.
    return f"{what}: not lower-case hex" if text.strip(HEX_DIGITS) else ""


def _of_exits(run: RunResult) -> Iterator[Flaw]:
    codes: dict[int, int | None] = {}
    for state in run.outcome.ranks:
        if state.rank in codes or not 0 <= state.rank < run.spec.world_size:
            yield _corrupt(f"the outcome names rank {state.rank} twice or out of range", state.rank)
        codes[state.rank] = state.code
    for rank in range(run.spec.world_size):
        code = codes.get(rank)
        if code is None:
            yield Flaw(what="missing_rank", message=f"rank {rank} has no exit state", rank=rank)
        if code != 0:
            what: What = "crashed" if code is not None and code > 0 else "killed"
            message = f"rank {rank} exited with {code} after its last record"
            yield Flaw(what=what, message=message, rank=rank)


# --- graphs and compiled parts of the built-in program ----------------------------------------


def _of_graphs(run: RunResult, rank: int, steps: int, end: EndRecord) -> Iterator[Flaw]:
    """A graphed run that never replayed, or an eager one that did, would agree by testing nothing.

    Nothing is owed by an eager run, whatever else its configuration says.
    """
    config = run.spec.config
    try:
        owes = config if config.get("graph") or config.get("compile") else {"graph": ()}
        train = TrainConfig.from_dict(owes)
    except (ValueError, TypeError) as error:
        yield _corrupt(f"the specification's config: {error}")
        return
    for flaw in (not_compiled(train, rank, end), not_as_owed(train, rank, steps, end)):
        if flaw is not None:
            yield replace(flaw, rank=rank, message=f"rank {rank}: {flaw.message}")


def owed(run: TrainConfig, rank: int, steps: int) -> list[GraphUse]:
    """The uses that a rank's end record must state; `captures` are the least."""
    number = max(steps - run.graph_warmup_steps, 1)
    if WHOLE in run.graph:
        due = GraphUse(scope=WHOLE, layer=-1, direction="gradients", captures=1, replays=number)
        return [due, replace(due, direction="optimizer")][: 1 + run.graph_optimizer]
    mine, replays = _layers_of(run, rank), number * run.microbatches
    forward = [
        GraphUse(scope=scope, layer=layer, direction="forward", captures=1, replays=replays)
        for scope in run.graph
        for layer in captured_layers(run, scope)
        if layer in mine
    ]
    return [each for use in forward for each in (use, replace(use, direction="backward"))]


def not_compiled(run: TrainConfig, rank: int, end: EndRecord) -> Flaw | None:
    """The first part that a rank was to compile and ran as Python; None if there is none.

    Layers share the code of a part, so each part is proven once a rank.
    """
    mine = _layers_of(run, rank)
    for part in run.compile:
        if part not in end.compiled and mine & set(layers_with(run.model, part)):
            found = Difference(step=0, rank=rank, quantity="compiled", tensor=part)
            message = f"{part} was to be compiled, and the compiler made no code of it"
            return Flaw(what="not_compiled", message=message, difference=found)
    return None


def _layers_of(run: TrainConfig, rank: int) -> set[int]:
    """Layers of a rank's pipeline stages."""
    layout = run.parallel
    stages = split_layers(run.model.layers, layout.pp, layout.pp_chunks)
    return {layer for stage in stages[rank // layout.stage_size % layout.pp] for layer in stage}


def not_as_owed(run: TrainConfig, rank: int, steps: int, end: EndRecord) -> Flaw | None:
    """The first use of a rank in `steps` steps that is not as owed, or that nobody asked for."""
    found = {(use.scope, use.layer, use.direction): use for use in end.graphs}
    at = (min(run.graph_warmup_steps, steps - 1), rank)
    for due in owed(run, rank, steps):
        use = found.pop((due.scope, due.layer, due.direction), None)
        captures, replays = (use.captures, use.replays) if use is not None else (0, 0)
        if captures < due.captures:
            return _other_use(at, due, "captures", captures, due.captures)
        if replays != due.replays:
            return _other_use(at, due, "replays", replays, due.replays)
    if found:
        use = next(iter(found.values()))
        return _other_use(at, use, "replays", use.replays, 0)
    if end.replays != (stated := launches(end.graphs)):
        message = f"graphs were launched {end.replays} times, their parts state {stated}"
        return _not_replayed(message, at, "replays", stated, end.replays)
    return None


def launches(uses: Iterable[GraphUse]) -> int:
    """Launches in all; the graph of moe_preprocess is the router's, the optimizer's the step's."""
    counted = (u for u in uses if u.scope != "moe_preprocess" and u.direction != "optimizer")
    return sum(use.replays for use in counted)


def _other_use(at: tuple[int, int], use: GraphUse, quantity: str, got: int, expected: int) -> Flaw:
    least = " at least" if quantity == "captures" else ""
    message = f"{use.name}: {got} {quantity}, expected {expected}{least}"
    name = f"{quantity}.{use.direction}"
    flaw = _not_replayed(message, at, name, expected, got, use.place)
    return replace(flaw, module=f"layers.{use.layer}" if use.layer >= 0 else "")


def _not_replayed(
    message: str, at: tuple[int, int], quantity: str, expected: int, got: int, tensor: str = ""
) -> Flaw:
    found = Difference(
        step=at[0], rank=at[1], quantity=quantity, tensor=tensor, reference=str(expected),
        candidate=str(got),
    )  # fmt: skip
    return Flaw(what="not_replayed", message=message, difference=found)


# --- graphs of another program ----------------------------------------------------------------

FINDINGS = ("static_gradient", "static_activation")


@check(
    "graphs",
    "a program's CUDA graphs were replayed, and no replay overwrote memory in use",
    always="program",
    options={"min_replays": Option(default=1, doc="of every rank")},
)
def graphs(runs: Runs, options: Options) -> CheckResult:
    """Look at the candidate's replays and at what was found on them, rank by rank."""
    least, table = options.get("min_replays", 0), rank_table(runs.candidate)
    if not table:
        return error("graphs", "not_run", "the candidate recorded nothing: nothing to look at")
    for rank, records in table.items():
        for event in records.events:
            if event.name in FINDINGS:
                return _found(rank, event)
    replays = {rank: records.end.replays if records.end else 0 for rank, records in table.items()}
    for rank, number in replays.items():
        if number < least:
            held = [e.detail.get("graphs") for e in table[rank].events if e.name == "cuda_graphs"]
            captured = f"{len(held[0])} graphs" if held and isinstance(held[0], list) else "none"
            message = f"rank {rank} replayed CUDA graphs {number} times, expected at least {least}"
            flaw = _not_replayed(message, (0, rank), "replays", least, number)
            message += f": it captured {captured}"
            return failed("graphs", flaw.what, message, flaw.difference)
    total = sum(replays.values())
    message = f"{count(total, 'replay')} of CUDA graphs on {len(table)} ranks"
    return passed("graphs", message, replays=total)


def _found(rank: int, event: EventRecord) -> CheckResult:
    detail: Mapping[str, object] = event.detail
    graph = f"graph {detail.get('graph')} of {detail.get('maker')}, {detail.get('place')}"
    tensor = str(detail.get("parameter", ""))
    message = (
        f"{graph}, is a backward pass whose forward graph was replayed again before it: it "
        f"reads the activations of the later replay"
    )
    if event.name == "static_gradient":
        message = (
            f"the gradient of {tensor} lies in the static memory of {graph}: replay "
            f"{detail.get('replay')} overwrites it while microbatches are accumulated in it"
        )
    found = Difference(step=event.step, rank=rank, quantity=event.name, tensor=tensor)
    message = f"rank {rank}, step {event.step}: {message}"
    return failed("graphs", "static_buffer", message, found)


# --- the length of a soak ---------------------------------------------------------------------


def steps_due(run: RunResult) -> int | None:
    """Steps that every rank must have recorded; None if the specification says no number.

    Of a run that is open at its end, the most that any rank's end record says.
    """
    steps = run.spec.config.get("steps")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        return None
    if run.spec.soak is None or not run.spec.soak.is_open:
        return steps
    return max([steps, *(rank.end.steps for rank in run.ranks if rank.end is not None)])


def _of_soak(run: RunResult) -> Iterator[Flaw]:
    """In what a soak fell short of what was asked.

    A run that ends by replays or by duration says itself how many steps it took: that is believed
    only if all ranks say the same in their end record and in the event in which each states what it
    was asked for.
    """
    soak = run.spec.soak
    for rank, records in rank_table(run).items() if soak is not None else ():
        said, end = (
            [event.detail for event in records.events if event.name == "soaked"],
            records.end,
        )
        assert soak is not None
        if len(said) != 1 or end is None:
            yield _corrupt(f"rank {rank} has {len(said)} records of what it soaked", rank)
        assert end is not None
        for name, expected in (("steps", end.steps), ("replays", end.replays)):
            if (got := said[0].get(name)) != expected:
                message = f"rank {rank} says it soaked {got} {name}, its end record {expected}"
                yield _corrupt(message, rank)
        trained_s, message = said[0].get("trained_s"), ""
        if soak.by == "replays" and end.replays < soak.amount:
            message = f"made {end.replays} replays, the soak asks for {soak.amount:.0f}"
        elif soak.by == "steps" and end.steps < soak.amount:
            message = f"took {end.steps} steps of {soak.asked}"
        elif isinstance(trained_s, bool) or not isinstance(trained_s, int | float):
            yield _corrupt(f"rank {rank} says it trained for {trained_s!r} s", rank)
        # Rank 0 keeps the time: others may have begun a little later.
        elif soak.by == "duration" and rank == 0 and trained_s < soak.amount:
            message = f"trained for {trained_s:.1f} s, the soak asks for {soak.amount:g} s"
        if message:
            what: What = "not_replayed" if soak.by == "replays" else "missing_step"
            yield Flaw(what=what, message=f"rank {rank} {message}", rank=rank)


def missed_turns(run: RunResult) -> CheckResult | None:
    """An error that names stressors which were to take turns and had none on some rank.

    One that never had its turn proves nothing: no failure of the program, and no pass.
    """
    soak, stress = run.spec.soak, run.spec.config.get("stress")
    if soak is None or not soak.turn_steps or not isinstance(stress, list | tuple):
        return None
    due = taking_turns([str(name) for name in stress])
    for rank, records in rank_table(run).items():
        turns = [event.detail.get("stress") for event in records.events if event.name == "turn"]
        had = {name for names in turns if isinstance(names, list | tuple) for name in names}
        if missed := [name for name in due if name not in had]:
            message = (
                f"{', '.join(missed)} never had a turn on rank {rank} in {len(records.steps)} "
                f"steps: expected {len(due)} turns at least, of {soak.turn_steps} steps each; make "
                f"soak.period shorter or steps more"
            )
            return error("turns", "not_run", message)
    return None
