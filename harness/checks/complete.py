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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fsdp_core.config import (
    SAME_LAYOUT,
    TrainConfig,
    captured_layers,
    layers_with,
    to_plain,
)
from fsdp_core.parallel.pipeline_schedule import split_layers
from harness.checks.evidence import (
    Option,
    Options,
    Runs,
    check,
    count,
    error,
    failed,
    passed,
    rank_table,
    show_ranks,
)
from harness.provenance import HOST_KEY, SHARED_HOST, fingerprint
from harness.recorder.session import failures_of
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
    ErrorRecord,
    GraphUse,
    InitialRecord,
    RankRecords,
    RunOutcome,
    RunResult,
    StartRecord,
    StepRecord,
    What,
)
from harness.values import SoakSpec

HEX_DIGITS = "0123456789abcdef"
PROVING_GROUPS = ("grads", "weights", "optim")  # of which a run digests a tensor at least
OF_INITIAL = ("weights", "optim", "rng")  # groups of the state before step 0
SHARED_GPU: What = "shared_gpu"
"""Of a run that shared a GPU with failing ones: nobody knows which of them ended it."""
NO_BLAME: tuple[What, ...] = ("interrupted", "not_run", "unsupported", SHARED_GPU)
"""What may end a candidate's run through no fault of its own: no verdict rather than a failure."""
WHOLE = "full_iteration"
NO_STEP = (
    ": the recorder saw no torch optimizer that stepped by a gradient; of updates by hand and of "
    "steps inside torch.compile say where they are with `with recorder.step():` of "
    "harness.recorder.record; of processes that the script spawns nothing is seen: set ranks"
)


@dataclass(eq=False)
class Flaw(Exception):
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


def _need(
    ok: object, what: What, message: str, rank: int | None = None, step: int | None = None
) -> None:
    if not ok:
        raise Flaw(what, message, rank, step)


def failure_of_machine(run: RunResult, flaw: Flaw) -> str:
    """Name of the machine's failure that crashed a run, else ""; who hung alone knows why."""
    return machine_failure(run) if flaw.what == "crashed" else ""


def find_flaw(run: RunResult) -> Flaw | None:
    """The first reason why `run` must not be compared, or None if it is whole."""
    try:
        _look_at(run)
    except Flaw as found:
        return found
    return None


def _look_at(run: RunResult) -> None:
    """Each part may take for granted that those before it have no flaw."""
    outcome, size, is_builtin = run.outcome, run.spec.world_size, run.spec.is_builtin
    message = f"the outcome belongs to run {outcome.key}, expected {run.spec.key}"
    _need(outcome.key == run.spec.key, "corrupt_record", message)
    message = f"the run ended as {outcome.what} beside another on its GPUs: --resume makes it again"
    _need(not outcome.undecided, SHARED_GPU, message)
    message = outcome.message or f"the run ended as {outcome.what}"
    _need(not outcome.what, outcome.what, message, outcome.culprit_rank)
    numbers = [records.rank for records in run.ranks]
    said = {r.rank for r in run.ranks if r.steps or r.problems or r.error}
    _need(said, "empty_run", f"no rank recorded a step{'' if is_builtin else NO_STEP}")
    once = len(set(numbers)) == len(numbers) and set(numbers) <= set(range(size))
    message = f"expected records of ranks 0 to {size - 1} once, got {numbers}"
    _need(once, "corrupt_record", message)
    missing = sorted(set(range(size)) - said - {r.rank for r in run.ranks if r.start})
    for rank in missing:
        message = f"no records of rank {rank} ({len(missing)} of {size} ranks missing)"
        raise Flaw("missing_rank", message, rank)
    for name in ("steps", "microbatches") if is_builtin else ("steps",):
        value = run.spec.config.get(name)
        message = f"the specification's {name}: expected an integer >= 1, got {value!r}"
        _need(type(value) is int and value > 0, "corrupt_record", message)
    for records in rank_table(run).values():
        _rank(run, records, steps_due(run))
    if run.spec.soak is not None:
        _soak(run, run.spec.soak)
    # A rank may own no row of a small model; all of them together must own some.
    for group in PROVING_GROUPS if is_builtin else PROVING_GROUPS[:2]:  # theirs may keep no state
        message = f"no rank digests a tensor of {group}: empty digests prove nothing"
        if group == "grads" and not is_builtin:
            message += (
                "; the optimizer must hold the parameters that are trained and, with lines in the "
                "script, gradients are cleared as the next step begins"
            )
        texts = (step.digests[group] for records in run.ranks for step in records.steps)
        _need(any(text.replace(ABSENT, "") for text in texts), "empty_run", message)
    codes = {state.rank: state.code for state in outcome.ranks}
    message = f"expected exit states of {size} ranks, got {[each.rank for each in outcome.ranks]}"
    once = len(codes) == len(outcome.ranks) and set(codes) <= set(range(size))
    _need(once, "corrupt_record", message)
    for rank in range(size):
        code = codes.get(rank)
        _need(code is not None, "missing_rank", f"rank {rank} has no exit state", rank)
        message = f"rank {rank} exited with {code} after its last record"
        _need(code == 0, "crashed" if code is not None and code > 0 else "killed", message, rank)


def _rank(run: RunResult, records: RankRecords, steps: int) -> None:
    rank, start, end, initial = records.rank, records.start, records.end, records.initial
    # A line after the end may be out of sequence too; what it says of itself comes first.
    what: What = "record_after_end" if records.after_end else "corrupt_record"
    for problem in (*records.after_end, *records.problems):
        raise Flaw(what, f"rank {rank}: {problem}", rank)
    if (error := records.error) is not None:
        message = f"rank {rank} recorded both an error and an end"
        _need(end is None, "record_after_end", message, rank, error.step)
        message = f"rank {rank}, step {error.step}: {error.type}: {error.message}"
        raise Flaw(error.what or "crashed", message, rank, error.step)
    if start is None:
        raise Flaw("corrupt_record", f"rank {rank} has no start record", rank)
    key = run.spec.recorded or run.spec.key
    _facts(rank, "start record", {
        "schema": (start.schema, SCHEMA_VERSION), "rank": (start.rank, rank),
        "world_size": (start.world_size, run.spec.world_size), "run": (start.run or key, key),
        "groups": ([group for group in DIGEST_GROUPS if group in start.tensors], [*DIGEST_GROUPS]),
        "stages of taps": (len(start.tap_stages), len(start.taps)),
    })  # fmt: skip
    _sequence(run, records, range(first_step(run), steps))
    # Without the state before step 0 a difference of it would be blamed on that step.
    if end is None or initial is None:
        gone = "end record" if end is None else "record of the state before step 0"
        raise Flaw("corrupt_record", f"rank {rank} has no {gone}", rank)
    _facts(rank, "end record", {"rank": (end.rank, rank), "steps": (end.steps, steps)})
    missing = [group for group in OF_INITIAL if group not in initial.digests]
    unknown = sorted(set(initial.digests) - set(start.tensors))
    _facts(rank, "before step 0", {
        "rank": (initial.rank, rank), "groups without digests": (missing, []),
        "groups without tensors": (unknown, []),
    })  # fmt: skip
    _texts(rank, "before step 0", initial, start)
    taken = next((step.step for step in records.steps if not step.skipped), None)
    for record in records.steps:
        due, got = run.spec.config.get("microbatches"), len(record.microbatch_losses)
        _facts(rank, f"step {record.step}", {
            "rank": (record.rank, rank), "microbatch losses": (got, got if due is None else due),
            "groups": (sorted(record.digests), sorted(start.tensors)),
        }, record.step)  # fmt: skip
        _texts(rank, f"step {record.step}", record, start)
        owes = run.spec.sketch == "all" or (run.spec.sketch == "first" and record.step == taken)
        message = f"rank {rank}, step {record.step}: gradients without their sketches"
        lacks = record.digests["grads"].replace(ABSENT, "") and not record.sketches
        _need(not (owes and lacks), "corrupt_record", message, rank, record.step)
    if run.spec.is_builtin:
        tokens = start.tensors.get(SAMPLES, ())[:1]
        _facts(rank, "start record", {"digests of the tokens read": (tokens, (TOKENS,))})
        _graphs(run, rank, steps, end)


def _facts(
    rank: int, of: str, facts: Mapping[str, tuple[object, object]], step: int | None = None
) -> None:
    for name, (got, due) in facts.items():
        if got != due:
            message = f"rank {rank}, {of}, {name}: expected {due}, got {got}"
            raise Flaw("corrupt_record", message, rank, step)


def _texts(rank: int, of: str, record: StepRecord | InitialRecord, start: StartRecord) -> None:
    texts = [
        (f"digests of {group}", text, DIGEST_HEX_CHARS * len(start.tensors[group]))
        for group, text in record.digests.items()
    ]
    step = None
    if isinstance(record, StepRecord):
        step = record.step
        texts.append(("taps", record.taps, TAP_HEX_CHARS * len(start.taps)))
    for name, text, due in texts:
        # Stripping both ends leaves nothing exactly when every character is a hex digit.
        if len(text) != due or text.strip(HEX_DIGITS):
            message = f"expected {due} lower-case hex digits, got {len(text)} characters"
            raise Flaw("corrupt_record", f"rank {rank}, {of}, {name}: {message}", rank, step)


def _sequence(run: RunResult, records: RankRecords, due: range) -> None:
    rank, seen, steps = records.rank, [record.step for record in records.steps], due.stop
    if len(seen) == len(due) and seen == list(due):
        return
    if (first := _first_missing(records, due)) < steps:
        lack = {each.rank for each in run.ranks if _first_missing(each, due) == first}
        left = {each.rank for each in run.outcome.ranks if each.code == 0}
        left -= {records.rank for records in run.ranks if records.end is not None}
        who = f"{show_ranks(lack)} {'have' if len(lack) > 1 else 'has'}"
        how = ", exited with code 0 without an end record" if left >= lack else ""
        message = f"{who} no record of step {first} of {steps} steps{how}"
        raise Flaw("missing_step", message, rank, first, ranks=tuple(sorted(lack)))
    place = next((i for i, step in enumerate(seen) if step != due.start + i), len(due))
    message = (
        f"rank {rank}: expected {steps} steps in order, got step {seen[place]} as number {place}"
    )
    if seen == list(range(due.start, due.start + len(seen))):
        message = f"rank {rank} recorded {len(seen)} steps, expected {len(due)}"
    what: What = "record_after_end" if max(seen) >= steps else "corrupt_record"
    raise Flaw(what, message, rank, seen[place])


def _first_missing(records: RankRecords, due: range) -> int:
    """Never by the steps that are due: a forged plan may ask for any number."""
    seen = {record.step for record in records.steps}
    return next((step for step in due[: len(seen) + 1] if step not in seen), due.stop)


# --- the length of a soak ---------------------------------------------------------------------


def first_step(run: RunResult) -> int:
    """The first step that ranks record: those in another layout, before a run resumes, are not."""
    config, same = run.spec.config, to_plain(SAME_LAYOUT)
    resumed = config.get("resume_at", 0) if config.get("resume_from", same) != same else 0
    return resumed if type(resumed) is int else 0


def steps_due(run: RunResult) -> int:
    """Steps that every rank must have recorded: of an open run as many as any end record says."""
    steps: int = run.spec.config["steps"]
    if run.spec.soak is None or not run.spec.soak.is_open:
        return steps
    return max([steps, *(rank.end.steps for rank in run.ranks if rank.end is not None)])


def _soak(run: RunResult, soak: SoakSpec) -> None:
    """A run that ends by replays or by duration says itself how long it was."""
    for rank, records in rank_table(run).items():
        said = records.said("soaked")
        trained_s = said[0].get("trained_s") if len(said) == 1 else None
        if records.end is None or type(trained_s) not in (int, float):
            raise Flaw("corrupt_record", f"rank {rank} does not say how long it trained", rank)
        # Rank 0 keeps the time: others may have begun a little later.
        kept_s = float(trained_s or 0) if rank == 0 else soak.amount
        got = {"steps": records.end.steps, "replays": records.end.replays, "duration": kept_s}
        what: What = "not_replayed" if soak.by == "replays" else "missing_step"
        message = f"rank {rank} was soaked for {got[soak.by]:g} of {soak.asked}"
        _need(got[soak.by] >= soak.amount, what, message, rank)


# --- graphs and compiled parts of the built-in program ----------------------------------------


def _graphs(run: RunResult, rank: int, steps: int, end: EndRecord) -> None:
    """A graphed run that never replayed, or an eager one that did, would test nothing."""
    config = run.spec.config
    try:
        owes = config if config.get("graph") or config.get("compile") else {"graph": ()}
        train = TrainConfig.from_dict(owes)
    except (ValueError, TypeError) as error:
        raise Flaw("corrupt_record", f"the specification's config: {error}") from error
    for part in train.compile:
        # Layers share the code of a part, so each part is proven once a rank.
        if part not in end.compiled and _layers_of(train, rank) & {*layers_with(train.model, part)}:
            message = f"rank {rank}: the compiler made no code of {part}, which was to be compiled"
            found = Difference(step=0, rank=rank, quantity="compiled", tensor=part)
            raise Flaw("not_compiled", message, rank, difference=found)
    if flaw := not_as_owed(train, rank, steps, end):
        raise flaw


def owed(run: TrainConfig, rank: int, steps: int) -> list[GraphUse]:
    """The uses that a rank's end record must state; `captures` are the least.

    Of a run that resumes, those of the processes that went on.
    """
    number = max(steps - run.resume_at - run.graph_warmup_steps, 1)
    if WHOLE in run.graph:
        due = GraphUse(scope=WHOLE, layer=-1, direction="gradients", captures=1, replays=number)
        return [due, replace(due, direction="optimizer")][: 1 + run.graph_optimizer]
    mine, replays = _layers_of(run, rank), number * run.microbatches
    return [
        GraphUse(scope=scope, layer=layer, direction=direction, captures=1, replays=replays)
        for scope in run.graph
        for layer in captured_layers(run, scope)
        if layer in mine
        for direction in ("forward", "backward")
    ]


def _layers_of(run: TrainConfig, rank: int) -> set[int]:
    layout = run.parallel
    stages = split_layers(run.model.layers, layout.pp, layout.pp_chunks)
    return {layer for stage in stages[rank // layout.stage_size % layout.pp] for layer in stage}


def not_as_owed(run: TrainConfig, rank: int, steps: int, end: EndRecord) -> Flaw | None:
    """The first use of a rank in `steps` steps that is not as owed, or that nobody asked for."""
    step = min(run.resume_at + run.graph_warmup_steps, steps - 1)

    def other(use: GraphUse | None, quantity: str, got: int, expected: int) -> Flaw:
        at = Difference(step=step, rank=rank, quantity=quantity, reference=str(expected),
                        candidate=str(got))  # fmt: skip
        if use is not None:
            at = replace(at, quantity=f"{quantity}.{use.direction}", tensor=use.place)
        name = "launches of graphs, by their parts" if use is None else use.name
        message = f"rank {rank}: {name}: {got} {quantity}, expected {expected}"
        module = f"layers.{use.layer}" if use is not None and use.layer >= 0 else ""
        return Flaw("not_replayed", message, rank, difference=at, module=module)

    found = {(use.scope, use.layer, use.direction): use for use in end.graphs}
    for due in owed(run, rank, steps):
        use = found.pop((due.scope, due.layer, due.direction), replace(due, captures=0, replays=0))
        if use.captures < due.captures:
            return other(due, "captures", use.captures, due.captures)
        if use.replays != due.replays:
            return other(due, "replays", use.replays, due.replays)
    for use in found.values():
        return other(use, "replays", use.replays, 0)
    if end.replays != (stated := launches(end.graphs)):
        return other(None, "replays", end.replays, stated)
    return None


def launches(uses: Iterable[GraphUse]) -> int:
    """Launches in all; the graph of moe_preprocess is the router's, the optimizer's the step's."""
    counted = (u for u in uses if u.scope != "moe_preprocess" and u.direction != "optimizer")
    return sum(use.replays for use in counted)


# --- graphs of another program ----------------------------------------------------------------

FINDINGS = {
    "static_gradient": "the gradient of {parameter} lies in the static memory of graph {graph} of "
    "{maker}, {place}: replay {replay} overwrites it while microbatches are accumulated in it",
    "static_activation": "graph {graph} of {maker}, {place}, is a backward pass whose forward graph"
    " was replayed again before it: it reads the activations of the later replay",
}
"""By event of the recorder."""


@check(
    "graphs", "a program's CUDA graphs were replayed, and no replay overwrote memory in use",
    always="program", options={"min_replays": Option(default=1, doc="of every rank")},
)  # fmt: skip
def graphs(runs: Runs, options: Options) -> CheckResult:
    """Look at the candidate's replays and at what was found on them, rank by rank."""
    least, table = options.get("min_replays", 0), rank_table(runs.candidate)
    if not table:
        return error("graphs", "not_run", "the candidate recorded nothing: nothing to look at")
    for rank, event in ((rank, event) for rank, r in table.items() for event in r.events):
        if (text := FINDINGS.get(event.name)) is None:
            continue
        about = dict.fromkeys(("parameter", "graph", "maker", "place", "replay"), "") | event.detail
        tensor = str(about["parameter"])
        found = Difference(step=event.step, rank=rank, quantity=event.name, tensor=tensor)
        message = f"rank {rank}, step {event.step}: {text.format(**about)}"
        return failed("graphs", "static_buffer", message, found)
    replays = {rank: records.end.replays if records.end else 0 for rank, records in table.items()}
    for rank, number in replays.items():
        if number < least:
            held = table[rank].said("cuda_graphs")
            captured = count(len(held[0]["graphs"]), "graph") if held else "none"
            # The built-in trainer does not say what it captured.
            told = f": it captured {captured}" if held or not number else ""
            times = count(number, "time")
            message = f"rank {rank} replayed CUDA graphs {times}, expected at least {least:,}{told}"
            found = Difference(step=0, rank=rank, quantity="replays", reference=str(least),
                               candidate=str(number))  # fmt: skip
            return failed("graphs", "not_replayed", message, found)
    total = sum(replays.values())
    message = f"{count(total, 'replay')} of CUDA graphs on {len(table)} ranks"
    return passed("graphs", message, replays=total)


# --- failures of the machine: the only ones that may be tried again -------------------------------


# A candidate that crashed by one of them is not judged: no verdict, with the name of what failed.
# One that hung is: only its own ranks know why they did not meet. A run whose records hold a NaN,
# or in which some rank saw an illegal access, ran out of memory or refused its graph is the
# program's. What a rank printed counts for nothing: an exception counts if the rank at fault
# recorded it, blames no other, and is in the table of `harness.recorder.session`.
class Signature(NamedTuple):
    """What a run must have ended as; the engine says so in a field, or a rank by its exception."""

    whats: tuple[What, ...]
    from_engine: bool = False
    before_any_step: bool = False


SIGNATURES: dict[str, Signature] = {
    "port_in_use": Signature(("crashed",), before_any_step=True),
    "rendezvous_timeout": Signature(("crashed", "hang"), before_any_step=True),  # of ranks
    "no_process": Signature(("not_run",), from_engine=True),  # by the kernel, or its memory
    "forkserver_died": Signature(("interrupted",), from_engine=True),  # of this machine's runs
    "node_failure": Signature(("interrupted",), from_engine=True),  # NODE_FAIL, BOOT_FAIL, ...
    "nccl_system_error": Signature(("crashed",)),  # a call of the system or network failed
    "device_unavailable": Signature(("crashed",), before_any_step=True),  # CUDA gives no GPU
    "memory_error": Signature(("crashed",)),  # of a GPU, and uncorrectable
}
_OF_THE_PROGRAM: tuple[What, ...] = (
    "diverged", "nonfinite", "illegal_access", "oom", "stale_address", "stale_guards", "race",
    "capture_refused", "unsupported",
)  # fmt: skip
"""What one rank's own error may say that makes the whole run the program's."""


def has_lost_its_groups(error: ErrorRecord) -> bool:
    """Whether process groups were gone."""
    return "no_group" in failures_of(error.type, error.message)


def signature_of(
    outcome: RunOutcome, errors: Sequence[ErrorRecord] = (), *, any_step: bool = False
) -> str:
    """Name of the failure of the machine that ended a run; "" if it was none.

    `errors` are what its ranks recorded as their ends, `any_step` whether one completed a step.
    """
    # Of a hang nobody is known to be at fault: who waited in vain says what for. None is heard of
    # who quotes what another one said.
    recorded = {
        failure for e in errors
        if e.blames in (None, e.rank) and (outcome.what == "hang" or e.rank == outcome.culprit_rank)
        for failure in failures_of(e.type, e.message)
    }  # fmt: skip
    engine = outcome.ending.machine if outcome.ending is not None else ""
    for name, (whats, from_engine, before_any_step) in SIGNATURES.items():
        found = name == engine if from_engine else name in recorded
        if found and outcome.what in whats and not (before_any_step and any_step):
            return name
    return ""


def machine_failure(run: RunResult) -> str:
    """As `signature_of`, of a run with its records: "" too if they tell of the program."""
    if any(_is_of_the_program(records) for records in run.ranks):
        return ""
    errors = [records.error for records in run.ranks if records.error is not None]
    # Steps that waited to be written are lost with a failing rank; its error knows the step.
    any_step = any(records.steps for records in run.ranks) or any(e.step > 0 for e in errors)
    return signature_of(run.outcome, errors, any_step=any_step)


def _is_of_the_program(records: RankRecords) -> bool:
    return (records.error is not None and records.error.what in _OF_THE_PROGRAM) or any(
        any(value is not None and not value.finite for value in (step.loss, step.grad_norm))
        or any(step.nonfinite.values())
        for step in records.steps
    )


def shares_gpus(run: RunResult) -> bool:
    """Whether any rank of the run shared its GPU with another one: its times mean nothing."""
    started = (rank.start.environment for rank in run.ranks if rank.start is not None)
    variables = (fingerprint(environment).get("environment") for environment in started)
    hosts = (str(held.get(HOST_KEY, "")) for held in variables if isinstance(held, Mapping))
    return any(host.startswith(SHARED_HOST) for host in hosts)
