"""Layers with a state, in torch: the reference on every device, and the CPU's path.

A head's state S [K, V] takes in a token by S <- e^g S + k d^T, and gives it the output q S. With a
rate beta, d = beta (v - e^g S^T k) is what S does not yet say of v at k (gated delta rule: Yang et
al. 2024, arXiv 2412.06464, equation 10); without, d = v (Mamba-2: Dao and Gu 2024, arXiv
2405.21060). A window of tokens is computed at once, and reads S once (the same paper's section
3.3): with c_t the sum of g up to token t,

    d_t = beta_t (v_t - e^c_t S^T k_t - sum over j < t of e^(c_t - c_j) (k_t . k_j) d_j)
    out_t = e^c_t S^T q_t + sum over j <= t of e^(c_t - c_j) (q_t . k_j) d_j
    S behind token n: e^c_n S + sum over j <= n of e^(c_n - c_j) k_j d_j^T

Shape legend: R rows, W tokens of a window, H heads, K and V width of keys and values, C channels of
a convolution, k its taps.
"""

import torch
from torch import promote_types
from torch.nn.functional import pad


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., K] at length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def window(
    state: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs and d, [R, H, W, V] each, and c [R, H, W] of a window behind a state.

    state: [R, H, K, V], or None for zeros; q, k: [R, H, W, K]; v: [R, H, W, V]; log_decay, g above,
    and beta: [R, H, W]."""
    width, sums = v.shape[2], log_decay.cumsum(-1)
    if width == 1:
        between = None
    else:
        ahead = torch.ones(width, width, dtype=torch.bool, device=v.device).triu(1)
        between = sums.unsqueeze(-1) - sums.unsqueeze(-2)
        between = between.masked_fill(ahead, float("-inf")).exp()  # e^(c_t - c_j), j <= t
    grown, old_q, old_k = sums.exp().unsqueeze(-1), None, None
    if state is not None and beta is None:
        old_q = q @ state
    elif state is not None:
        old_q, old_k = (torch.cat((q, k), 2) @ state).split(width, 2)
    d = v
    if beta is not None:
        d = v if old_k is None else v - grown * old_k
        d = beta.unsqueeze(-1) * d
        if between is not None:
            system = (k @ k.transpose(2, 3)) * between * beta.unsqueeze(-1)
            d = torch.linalg.solve_triangular(system.tril(-1), d, upper=False, unitriangular=True)
    read = q @ k.transpose(2, 3)
    out = (read if between is None else read * between) @ d
    return out if old_q is None else out + grown * old_q, d, sums


def behind(
    state: torch.Tensor | None, k: torch.Tensor, d: torch.Tensor, sums: torch.Tensor
) -> torch.Tensor:
    """Return the state behind a whole window; see `window`."""
    total = sums[..., -1:]
    added = (k * (total - sums).exp().unsqueeze(-1)).transpose(2, 3) @ d
    return added if state is None else state * total.exp().unsqueeze(-1) + added


def fold(
    state: torch.Tensor,
    k: torch.Tensor,
    d: torch.Tensor,
    sums: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    """Let a state [R, H, K, V] be that behind the first `kept` tokens of a window, int64 [R].

    k, d and sums: see `window`; kept: from 0 to W."""
    width = sums.shape[2]
    if width > 1:
        count = kept[:, None, None]
        total = pad(sums, (1, 0)).gather(2, count.expand(-1, sums.shape[1], 1))
        is_kept = torch.arange(width, device=kept.device) < count
        weight = (total - sums).masked_fill(~is_kept, float("-inf")).exp()
    else:  # a token has all of its weight
        weight = kept.to(sums.dtype)[:, None, None].expand_as(sums)
        total = weight * sums
    state.mul_(total.exp().unsqueeze(-1))
    added = (k * weight.unsqueeze(-1)).transpose(2, 3)
    flat = state.view(-1, *state.shape[2:])
    flat.baddbmm_(added.flatten(0, 1), d.flatten(0, 1))


def taps(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the causal convolution of each channel, [R, W, C], of x [R, k - 1 + W, C].

    weight: [C, k]; bias: [C]. It is rounded once."""
    given, count = x.dtype, weight.shape[1]
    x, weight = (of.to(promote_types(given, torch.float32)) for of in (x, weight))
    width = x.shape[1] - (count - 1)
    out = x[:, :width] * weight[:, 0]
    for tap in range(1, count):
        out = torch.addcmul(out, x[:, tap : tap + width], weight[:, tap])
    return (out if bias is None else out + bias).to(given)


def taps_of_sequences(
    x: torch.Tensor, position: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return `taps` of whole sequences one after the other: x [N, C], positions int64 [N]."""
    given, count = x.dtype, weight.shape[1]
    x, weight = (of.to(promote_types(given, torch.float32)) for of in (x, weight))
    out = x * weight[:, -1]
    for back in range(1, count):
        is_own = (position >= back).to(x.dtype).unsqueeze(-1)
        before = pad(x, (0, 0, back, 0))[: len(x)] * is_own
        out = torch.addcmul(out, before, weight[:, -1 - back])
    return (out if bias is None else out + bias).to(given)
