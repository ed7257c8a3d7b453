"""Draws cases at random: shapes, layouts, modes and scopes that rules may or may not allow."""

import random
from typing import Any

from fsdp_core.config import SCOPES, STRATEGIES, STRESSORS, model_from_preset, scope_sets
from tests.scope_fuzz.case import Case, Event

SCOPE_SETS = scope_sets(
    model_from_preset("mla_moe_tiny", {"first_dense_layers": 1, "capacity_factor": 1.25})
)
TAPS = (
    "layers.*.attn:output", "layers.*.mlp:input", "layers.0:gradient", "**.norm:output",
    "embedding", "head:gradient", "layers.*.**:output",
)  # fmt: skip


class Draw:
    """A source of cases; the same seed gives the same ones.

    Args:
        worlds: numbers of ranks.
        is_small: few layers, microbatches and steps, and nothing that takes long to watch.
    """

    def __init__(
        self, seed: int, worlds: tuple[int, ...] = (1,), *, is_small: bool = False
    ) -> None:
        self._random, self._worlds, self._is_small = random.Random(seed), worlds, is_small
        self._settings: dict[str, Any] = {}

    def case(self) -> Case:
        """The next one; rules may refuse it."""
        self._settings = {"seed": self._random.randrange(1000), "ledger": self._often()}
        self._layout()
        self._model()
        self._modes()
        self._graph()
        if self._rarely():
            self._spoil()
        settings = dict(self._settings)
        if self._is_small:
            settings = {k: _less(k, v) for k, v in settings.items() if not k.startswith("stress")}
            self._settings = settings
        return Case(settings, self._events(), self._rarely() and not self._is_small)

    # ---- chances

    def _often(self) -> bool:
        return self._random.random() < 0.8

    def _maybe(self) -> bool:
        return self._random.random() < 0.4

    def _rarely(self) -> bool:
        return self._random.random() < 0.1

    def _one(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def _set(self, **values: Any) -> None:
        for key, value in values.items():
            self._settings[key.replace("__", ".")] = value

    # ---- parts

    def _layout(self) -> None:
        world = self._one(*self._worlds)
        degrees = dict.fromkeys(("dp", "dp_outer", "tp", "cp", "pp"), 1)
        left = world
        while left > 1:
            degrees[self._one(*degrees, "dp", "tp", "pp")] *= 2
            left //= 2
        self._set(**{f"parallel__{axis}": degree for axis, degree in degrees.items()})
        if degrees["tp"] > 1 and self._often():
            self._set(parallel__sequence_parallel=True)
        if degrees["pp"] > 1 and self._maybe():
            self._set(parallel__pp_chunks=2)
        shared = degrees["dp"] * degrees["cp"]
        if self._random.random() < 0.2:
            sizes = [size for size in (1, 2, 4) if shared % size == 0 and self._often()]
            self._set(**({"parallel__dynamic_cp": tuple(sizes)} if sizes else {}))
        self._set(microbatches=self._microbatches(degrees["pp"]))
        self._set(micro_batch_size=self._one(1, 1, 2, 3))

    def _microbatches(self, pp: int) -> int:
        if "parallel.pp_chunks" in self._settings and self._often():
            return pp * int(self._one(1, 2))
        return int(self._one(1, 1, 2, 2, 3, 4, 5))

    def _model(self) -> None:
        s = self._settings
        preset = self._one("dense_tiny", "moe_tiny", "moe_tiny", "mla_moe_tiny")
        tp = s["parallel.tp"]
        heads = tp * self._one(1, 2, 3)
        multiple = 2 * max(s["parallel.cp"], *s.get("parallel.dynamic_cp", (1,)), 1)
        multiple = multiple * tp if "parallel.sequence_parallel" in s else multiple
        is_cut = multiple > 2 or "parallel.dynamic_cp" in s
        seq = multiple * self._one(1, 2, 3) if is_cut else self._one(1, 5, 7, 8, 13)
        self._set(
            model__preset=preset, model__layers=self._one(1, 1, 2, 2, 2, 3, 4, 5), model__seq=seq,
            model__heads=heads, model__hidden=self._one(8, 9, 15, 16, 22),
            model__vocab_size=tp * self._one(7, 16, 31), model__ffn=tp * self._one(3, 8, 17),
            model__dropout=self._one(0.0, 0.1, 0.5),
        )  # fmt: skip
        if preset == "mla_moe_tiny":
            self._set(
                model__kv_heads=heads, model__kv_lora_rank=self._one(5, 8),
                model__q_lora_rank=self._one(None, 6), model__qk_nope_head_dim=self._one(3, 4),
                model__qk_rope_head_dim=self._one(2, 4), model__v_head_dim=self._one(3, 6),
            )  # fmt: skip
        else:
            groups = [n for n in range(tp, heads + 1, tp) if heads % n == 0]
            self._set(model__kv_heads=self._one(*groups), model__head_dim=self._one(2, 4, 6))
            self._set(model__qk_norm=self._maybe())
        if preset != "dense_tiny":
            self._experts()

    def _experts(self) -> None:
        s = self._settings
        stage = s["parallel.dp"] * s["parallel.dp_outer"] * s["parallel.cp"] * s["parallel.tp"]
        ep = self._one(*(n for n in (1, 2, 4) if stage % n == 0))
        etp = self._one(*(n for n in (1, 2) if stage % (ep * n) == 0))
        if "parallel.sequence_parallel" not in s and self._often():
            ep, etp = (1, s["parallel.tp"]) if s["parallel.tp"] > 1 else (ep, etp)
        experts = ep * self._one(1, 2, 3)
        self._set(
            parallel__ep=ep, parallel__etp=etp, model__experts=experts,
            model__top_k=self._random.randint(1, experts),
            model__expert_ffn=etp * self._one(3, 8),
            model__shared_expert_ffn=s["parallel.tp"] * self._one(0, 0, 5),
            model__first_dense_layers=self._one(0, 1, s["model.layers"] // 2),
            model__score=self._one("softmax", "sigmoid"), model__normalise_top_k=self._maybe(),
            model__aux_loss=self._one(0.0, 0.1), model__z_loss=self._one(0.0, 0.01),
            model__expert_bias=self._maybe(), model__expert_bias_rate=self._one(1e-3, 0.5),
            model__route_scale=self._one(1.0, 2.5),
            model__dispatcher=self._one("all_to_all", "all_gather"),
            model__capacity_factor=self._one(None, 0.5, 1.0, 1.25, 4.0),
        )  # fmt: skip
        if s["model.capacity_factor"] is not None:
            self._set(model__drop=self._one("position", "probs"))

    def _modes(self) -> None:
        self._set(
            dtype=self._one("bf16", "fp32"), steps=self._one(2, 3, 3, 4, 4, 6),
            fsdp__strategy=self._one(*STRATEGIES, "optim_grads_params"),
            fsdp__pool=self._one("double", "traced", "traced", "dynamic"),
            fsdp__reshard_after_forward=self._one(True, True, False),
            fsdp__reduce_dtype=self._one("fp32", "fp32", "bf16"),
            optim__clip_grad_norm=self._one(0.0, 1.0, 0.01), optim__lr=1e-2,
            optim__weight_decay=self._one(0.0, 0.1),
        )  # fmt: skip
        if self._settings["parallel.dp_outer"] > 1:
            self._set(fsdp__outer_strategy=self._one(*STRATEGIES))
        if self._rarely():
            self._set(fsdp__persistent_on_miss=False)
        if self._rarely():
            self._set(data__kind="text", data__path="README.md", model__vocab_size=256)
        if self._rarely():
            self._set(taps=tuple(self._random.sample(TAPS, k=self._one(1, 2, 3))))
        if self._rarely():
            names = self._random.sample(STRESSORS, k=self._one(1, 1, 2, 4))
            self._set(stress=tuple(names), stress_seed=self._random.randrange(9))

    def _graph(self) -> None:
        scopes = list(self._one(*SCOPE_SETS))
        has_experts = "model.experts" in self._settings
        if self._often():
            # What the model has, or most cases would be refused for their scopes alone.
            while not has_experts and any(scope.startswith("moe") for scope in scopes):
                scopes = list(self._one(*SCOPE_SETS))
        self._random.shuffle(scopes)
        warmup = self._one(1, 1, 2)
        self._set(graph=tuple(scopes), graph_warmup_steps=warmup)
        if scopes == ["full_iteration"]:
            self._set(graph_optimizer=self._maybe())
            if self._often() and self._settings.get("model.capacity_factor", 0) is None:
                self._set(model__capacity_factor=1.25)
        elif self._often() and self._settings["fsdp.pool"] == "dynamic":
            self._set(fsdp__pool="double")

    def _spoil(self) -> None:
        """Change a key or two to something that is not made to fit the others."""
        settings = self._settings
        for _ in range(self._one(1, 2)):
            key = self._one(*(key for key in settings if key not in ("seed", "ledger")))
            value = settings[key]
            if isinstance(value, bool):
                settings[key] = not value
            elif isinstance(value, int):
                settings[key] = self._one(0, 1, 2, 3, value + 1, 2 * value, 7)
            elif isinstance(value, float):
                settings[key] = self._one(0.0, -1.0, 1.0, 3.0)
            elif key == "graph":
                settings[key] = tuple(self._random.sample(SCOPES, k=self._one(1, 2, 3)))

    def _events(self) -> tuple[Event, ...]:
        s = self._settings
        steps = s["steps"] if isinstance(s["steps"], int) else 3
        events = [self._between(-1)] if self._rarely() else []
        for index in range(steps):
            events.append(("step", index))
            if self._maybe():
                events.append(self._between(index))
        return tuple(events)

    def _between(self, index: int) -> Event:
        kind = self._one("evaluate", "evaluate", "evaluate", "evaluate", "drop", "resume")
        if kind == "evaluate":
            return (kind, 50 + index)
        return (kind,)


_MOST = {"model.layers": 2, "microbatches": 2, "steps": 3, "graph_warmup_steps": 1}


def _less(key: str, value: Any) -> Any:
    """At most what a small case has."""
    return min(value, _MOST[key]) if key in _MOST else value
