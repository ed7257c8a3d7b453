"""How far a mixture of experts may be from exact arithmetic, element by element.

A `Rounded` is an exact value with a bound of the error of what was computed in its place. Each
operation adds the error that its operands bring and its own rounding (running error analysis:
Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.3). A sum of n products in
any order, also split over ranks, is within gamma_n = n u / (1 - n u) of its exact value, times the
sum of magnitudes (section 3.1). `bounds` runs the layer forward and backward by formulas of its
own; its values must be those that autograd gives the reference, so a wrong formula here shows.

Accumulation and storage have a unit roundoff each: bfloat16 is stored with 2^-8 and summed in
float32. `stores` counts how often a partial sum is rounded to storage where it is split over ranks.
"""

from dataclasses import dataclass

import torch

from tests.dist.moe_reference import NUM_EXPERTS, Expected, Problem, Weights
from tests.dist.parity_bounds import unit_roundoff

UNIT = {dtype: unit_roundoff(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)}


@dataclass(frozen=True)
class Rounded:
    """An exact value and a bound of the error, both float64."""

    value: torch.Tensor
    error: torch.Tensor

    def __getitem__(self, index: object) -> "Rounded":
        return Rounded(self.value[index], self.error[index])  # type: ignore[index]

    @property
    def t(self) -> "Rounded":
        """Transposed."""
        return Rounded(self.value.t(), self.error.t())

    @property
    def most(self) -> torch.Tensor:
        """The largest magnitude that the computed value may have."""
        return self.value.abs() + self.error


def exact(value: torch.Tensor) -> Rounded:
    """A value without error."""
    return Rounded(value, torch.zeros_like(value))


class Arithmetic:
    """Operations whose results are stored with roundoff `u` and summed with roundoff `u_sum`."""

    def __init__(self, u: float, u_sum: float) -> None:
        self.u, self.u_sum = u, u_sum

    def matmul(self, a: Rounded, b: Rounded, stores: int = 1) -> Rounded:
        """a @ b."""
        gamma = a.value.shape[-1] * self.u_sum
        size = a.most @ b.most
        brought = a.error @ b.most + a.value.abs() @ b.error
        return Rounded(a.value @ b.value, brought + (gamma / (1 - gamma) + stores * self.u) * size)

    def mul(self, a: Rounded, b: Rounded) -> Rounded:
        """a * b."""
        brought = a.error * b.most + a.value.abs() * b.error
        return Rounded(a.value * b.value, brought + self.u * a.most * b.most)

    def add(self, *terms: Rounded, stores: int = 1) -> Rounded:
        """The sum of tensors in any order, `stores` roundings more than there are terms."""
        size = torch.stack([term.most for term in terms]).sum(0)
        value = torch.stack([term.value for term in terms]).sum(0)
        error = torch.stack([term.error for term in terms]).sum(0)
        return Rounded(value, error + (len(terms) - 1 + stores) * self.u * size)

    def sum(self, a: Rounded, stores: int = 1) -> Rounded:
        """Sum over the last dim, kept."""
        gamma = (a.value.shape[-1] + stores) * self.u
        return Rounded(
            a.value.sum(-1, keepdim=True),
            a.error.sum(-1, keepdim=True) + gamma * a.most.sum(-1, keepdim=True),
        )

    def apply(self, a: Rounded, value: torch.Tensor, slope: float, roundings: int = 4) -> Rounded:
        """A function of `a` with the given value and largest slope, good to some roundings."""
        error = slope * a.error
        return Rounded(value, error + (self.u + roundings * self.u_sum) * (value.abs() + error))

    def silu(self, a: Rounded) -> Rounded:
        """a * sigmoid(a); its slope is below 1.1."""
        return self.apply(a, torch.nn.functional.silu(a.value), 1.1)

    def silu_slope(self, a: Rounded) -> Rounded:
        """The derivative of silu, whose own slope is at most 0.5; inside one kernel, so not stored.

        It is sigmoid times (1 + a (1 - sigmoid)), computed with a handful of roundings of terms of
        magnitude at most 1 + |a|.
        """
        s = a.value.sigmoid()
        value = s * (1 + a.value * (1 - s))
        return Rounded(value, 0.5 * a.error + 6 * self.u_sum * (1 + a.most))

    def relative(self, a: Rounded, error: torch.Tensor) -> Rounded:
        """`a` with a relative error on top."""
        return Rounded(a.value, a.error + error * a.most)


def convert(a: Rounded, u: float) -> Rounded:
    """`a` stored with another roundoff."""
    return Rounded(a.value, a.error + u * a.most)


@dataclass(frozen=True)
class Roundings:
    """Roundoffs of a run, and over how many ranks its sums are split."""

    dtype: torch.dtype
    ep: int
    etp: int
    tp: int

    @property
    def narrow(self) -> Arithmetic:
        """Of the experts."""
        return Arithmetic(UNIT[self.dtype], self.wide.u)

    @property
    def wide(self) -> Arithmetic:
        """Of the router and of combine."""
        u = UNIT[torch.promote_types(self.dtype, torch.float32)]
        return Arithmetic(u, u)


def network(
    x: Rounded, grad: Rounded, mats: list[Rounded], arithmetic: Arithmetic, parts: int
) -> tuple[Rounded, Rounded, list[Rounded]]:
    """SwiGLU of rows: output, gradient of x, gradients of gate, up and down.

    `parts` ranks have a slice of the width each; their sums are stored, then added in storage.
    """
    gate, up, down = mats
    ar = arithmetic
    a, b = ar.matmul(x, gate.t), ar.matmul(x, up.t)
    s = ar.silu(a)
    h = ar.mul(s, b)
    out = ar.matmul(h, down.t, stores=2 * parts)
    dh = ar.matmul(grad, down)
    db = ar.mul(dh, s)
    da = ar.mul(ar.mul(dh, b), ar.silu_slope(a))
    dx = ar.add(ar.matmul(da, gate), ar.matmul(db, up), stores=2 * parts)
    return out, dx, [ar.matmul(da.t, x), ar.matmul(db.t, x), ar.matmul(grad.t, h)]


def bounds(
    task: Problem, run: Roundings, experts_nk: torch.Tensor, kept_nk: torch.Tensor | None = None
) -> dict[str, Rounded]:
    """Exact values and error bounds of "y", "x" (its gradient) and every weight's gradient."""
    rule, ar, wide = task.rule, run.narrow, run.wide
    weights = {name: exact(weight) for name, weight in task.weights.items()}
    counts = torch.ones(len(experts_nk)) if task.valid is None else task.valid.flatten()
    counts = counts.double()[:, None]
    x, dy = exact(task.x.flatten(0, 1) * counts), exact(task.cotangent.flatten(0, 1))
    there = experts_nk < NUM_EXPERTS
    kept = there if kept_nk is None else kept_nk
    index = experts_nk.clamp(max=NUM_EXPERTS - 1)
    logits = wide.matmul(x, weights["router.weight"].t)
    scores = _scores(task, logits, wide)
    chosen = Rounded(scores.value.gather(1, index) * there, scores.error.gather(1, index) * there)
    total = wide.sum(chosen)
    probs = _divide(chosen, total, wide) if rule.normalised else chosen
    probs = wide.mul(probs, exact(torch.full_like(probs.value, rule.scale)))

    found: dict[str, Rounded] = {}
    grads: dict[str, list[Rounded]] = {name: [] for name in ("gate", "up", "down")}
    outs, dxs = _zeros(experts_nk, x), _zeros(experts_nk, x)
    for e in range(NUM_EXPERTS):
        at = ((experts_nk == e) & kept).nonzero(as_tuple=True)
        mats = [weights[f"experts.{name}.weight"][e] for name in grads]
        dr = convert(wide.mul(probs[(*at, None)], dy[at[0]]), ar.u)
        out, dx, dmats = network(x[at[0]], dr, mats, ar, run.etp)
        for name, dmat in zip(grads, dmats, strict=True):
            grads[name].append(dmat)
        for whole, rows in ((outs, out), (dxs, dx)):
            whole.value[at], whole.error[at] = rows.value, rows.error
    for name, parts in grads.items():
        found[f"experts.{name}.weight"] = Rounded(
            torch.stack([part.value for part in parts]), torch.stack([part.error for part in parts])
        )
    splits = run.ep + run.etp
    y_terms, dx_terms, dprobs = [], [], []
    for choice in range(rule.top_k):
        out = outs[:, choice]
        y_terms.append(wide.mul(probs[:, choice, None], out))
        dx_terms.append(dxs[:, choice])
        dprobs.append(wide.sum(wide.mul(dy, out), stores=splits))
    routed = convert(wide.add(*y_terms, stores=splits), ar.u)

    dlogits = _router_gradient(task, wide, logits, scores, chosen, total, probs, dprobs, index)
    found["router.weight"] = convert(wide.matmul(dlogits.t, x, stores=2), ar.u)
    dx_router = convert(wide.matmul(dlogits, weights["router.weight"]), ar.u)
    shared, dx_shared = _shared(run, weights, x, dy, found)
    found["y"] = ar.add(routed, shared)
    dx_routed = ar.add(*dx_terms, stores=1 + 2 * splits)
    dx_all = ar.add(dx_routed, dx_router, *dx_shared)
    found["x"] = Rounded(dx_all.value * counts, dx_all.error * counts)
    return found


def _zeros(experts_nk: torch.Tensor, x: Rounded) -> Rounded:
    """A row for each choice."""
    shape = (*experts_nk.shape, x.value.shape[1])
    return Rounded(*(torch.zeros(shape, dtype=torch.float64) for _ in range(2)))


def _scores(task: Problem, logits: Rounded, wide: Arithmetic) -> Rounded:
    """Relative errors: twice that of the worst exponent, and the sum's."""
    if task.rule.scores == "sigmoid":
        return wide.apply(logits, logits.value.sigmoid(), 0.25)
    value = logits.value.softmax(-1)
    worst = logits.error.amax(-1, keepdim=True)
    relative = 2 * worst + (NUM_EXPERTS + 8) * wide.u
    return Rounded(value, value * relative * (1 + relative))


def _divide(a: Rounded, total: Rounded, wide: Arithmetic) -> Rounded:
    denominator = total.value.clamp(min=1e-30)
    value = a.value / denominator
    error = (a.error + value * total.error) / (denominator - total.error).clamp(min=1e-30)
    return Rounded(value, error + 2 * wide.u * (value + error))


def _router_gradient(
    task: Problem,
    wide: Arithmetic,
    logits: Rounded,
    scores: Rounded,
    chosen: Rounded,
    total: Rounded,
    probs: Rounded,
    dprobs: list[Rounded],
    index: torch.Tensor,
) -> Rounded:
    """From gradients of the weights of choices and of the losses to those of logits."""
    rule = task.rule
    grad = Rounded(torch.cat([g.value for g in dprobs], 1), torch.cat([g.error for g in dprobs], 1))
    grad = wide.mul(grad, exact(torch.full_like(grad.value, rule.scale)))
    there = (chosen.value > 0).double()
    if rule.normalised:
        inner = wide.sum(wide.mul(grad, _divide(chosen, total, wide)), stores=2)
        spread = Rounded(inner.value.expand_as(grad.value), inner.error.expand_as(grad.value))
        minus = Rounded(-spread.value, spread.error)
        top = wide.add(grad, minus, stores=2)
        grad = _divide_signed(top, total, wide)
    grad = Rounded(grad.value * there, grad.error * there)
    zero = torch.zeros_like(scores.value)
    dscores = Rounded(
        zero.scatter_add(1, index, grad.value), zero.scatter_add(1, index, grad.error)
    )
    valid = torch.ones(len(zero)) if task.valid is None else task.valid.flatten().double()
    slope_e, z_slope = _loss_slopes(task, index, there, valid)
    slopes = Rounded(slope_e * valid[:, None], wide.u * 8 * slope_e * valid[:, None])
    shares = scores
    if rule.scores == "sigmoid":
        whole = wide.sum(scores)
        shares = _divide(scores, whole, wide)
        inner = wide.sum(wide.mul(slopes, shares))
        minus = Rounded(-inner.value.expand_as(zero), inner.error.expand_as(zero))
        slopes = _divide_signed(wide.add(slopes, minus), whole, wide)
    dscores = wide.add(dscores, slopes)
    if rule.scores == "sigmoid":
        one_less = wide.apply(logits, 1 - scores.value, 0.25)
        dlogits = wide.mul(dscores, wide.mul(scores, one_less))
    else:
        inner = wide.sum(wide.mul(dscores, scores))
        minus = Rounded(-inner.value.expand_as(zero), inner.error.expand_as(zero))
        dlogits = wide.mul(scores, wide.add(dscores, minus))
    lse = logits.value.logsumexp(-1, keepdim=True)
    z_value = 2 * z_slope * lse * logits.value.softmax(-1) * valid[:, None]
    worst = logits.error.amax(-1, keepdim=True)
    relative = 3 * worst + (2 * NUM_EXPERTS + 16) * wide.u
    z_part = Rounded(z_value, z_value.abs() * relative + 2 * z_slope * worst)
    return wide.add(dlogits, z_part)


def _divide_signed(a: Rounded, total: Rounded, wide: Arithmetic) -> Rounded:
    sign = a.value.sign()
    size = _divide(Rounded(a.value.abs(), a.error), total, wide)
    return Rounded(sign * size.value, size.error)


def _loss_slopes(
    task: Problem, index: torch.Tensor, there: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, float]:
    rule, num = task.rule, max(valid.sum().item(), 1.0)
    counts = torch.zeros(NUM_EXPERTS, dtype=torch.float64)
    counts.scatter_add_(0, index.flatten(), there.flatten())
    slope_e = rule.aux_coeff * NUM_EXPERTS / rule.top_k * counts / num**2
    return slope_e[None, :], rule.z_coeff / num


def _shared(
    run: Roundings, weights: dict[str, Rounded], x: Rounded, dy: Rounded, found: dict[str, Rounded]
) -> tuple[Rounded, list[Rounded]]:
    ar, wide = run.narrow, run.wide
    logit = wide.matmul(x, weights["shared.share_weight"].t)
    share = wide.apply(logit, logit.value.sigmoid(), 0.25)
    dshared = convert(wide.mul(dy, share), ar.u)
    mats = [weights[f"shared.{name}.weight"] for name in ("gate", "up", "down")]
    out, dx, dmats = network(x, dshared, mats, ar, run.tp)
    for name, dmat in zip(("gate", "up", "down"), dmats, strict=True):
        found[f"shared.{name}.weight"] = dmat
    dshare = wide.sum(wide.mul(dy, out), stores=2)
    one_less = wide.apply(logit, 1 - share.value, 0.25)
    dlogit = wide.mul(dshare, wide.mul(share, one_less))
    found["shared.share_weight"] = convert(wide.matmul(dlogit.t, x, stores=2), ar.u)
    dx_share = convert(wide.matmul(dlogit, weights["shared.share_weight"]), ar.u)
    return convert(wide.mul(out, share), ar.u), [dx, dx_share]


def worst(found: torch.Tensor, bound: Rounded) -> float:
    """The largest error in units of the bound; infinity for a NaN or where no error is allowed."""
    error = (found.double() - bound.value).abs()
    ratio = torch.where(error == 0, 0.0, error / bound.error)
    return float(ratio.nan_to_num(torch.inf).max())


def agrees(found: dict[str, Rounded], truth: Expected) -> float:
    """Largest difference between the values here and autograd's, relative to each tensor."""
    values: Weights = {"y": truth.y.flatten(0, 1), **truth.grads}
    values["x"] = values["x"].flatten(0, 1)
    return max(
        float((found[name].value - value).norm() / value.norm().clamp(min=1e-300))
        for name, value in values.items()
    )
