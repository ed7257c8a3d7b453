"""What rounding may do to causal attention and its gradients, and no more.

`attention_with_bounds` is the textbook formula over one sequence, with the whole matrix of weights,
and beside each result the most that rounding errors of an algorithm in blocks can add up to, to
first order in the unit roundoff u. The rules (Higham, Accuracy and Stability of Numerical
Algorithms, 2002, sections 2.2 and 3.1): each operation errs by u of its result; a sum of n terms
by (n - 1) u of the sum of their magnitudes, in whatever order; errors of terms carry over as they
are. Magnitudes are computed, by the same formulas on absolute values.

    s_ij   = scale q_i.k_j                  e_ij  = (D + 2) u scale |q_i|.|k_j|
    lse_i  = log sum_j exp(s_ij)            l_i   = sum_j p_ij e_ij + (T + 3 + 3 A_i) u, each join
                                                    (4 + A_i) u more, A_i the largest logarithm met
    p_ij   = exp(s_ij - lse_i)              r_ij  = e_ij + l_i + (joins + 1) (A_i + 4) u, relative
    o_i    = sum_j p_ij v_j                 sum_j p_ij |v_j| (r_ij + (T + joins) u)
    dv_j   = sum_i p_ij g_i                 sum_i p_ij |g_i| (r_ij + (n + joins) u)
    ds_ij  = p_ij (g_i.v_j - g_i.o_i)       p_ij (|ds_ij / p_ij| (r_ij + 2 u) + errors of both)
    dq_i   = scale sum_j ds_ij k_j          as o_i
    dk_j   = scale sum_i ds_ij q_i          as dv_j

A result kept in a narrower dtype errs by that dtype's u of its magnitude on top, and o_i does so
before g_i.o_i is taken of it. A kernel that rounds p and ds to a narrower dtype before the second
products, and each block's result after them, errs by twice that dtype's u of |p| |v| and so on.
"""

import math

import torch

from tests.dist.parity_bounds import WIDE, Bounded, unit_roundoff

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
