"""The building blocks of a net that only runs forward: a linear map in its fastest form, gated maps, experts, rotary positions.

    project = Linear(weight, bias)            # packed once for the CPU's blocked kernels
    y = project(x);  y = project.add(x, residual)
    mlp = GatedMlp(gate, up, down)            # or Experts(...), which routes every token to a few of them
    y = mlp.add(x, residual)

On CPUs that have them, oneDNN's blocked layout makes the small batches of decoding 2-4 times faster than the plain one
(measured, 135M net, fp32); elsewhere, and on CUDA, it is torch's ordinary linear. Inference only: no gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


@functools.cache
def _blocked_kernels_work() -> bool:
    """Whether this torch and this CPU have oneDNN's packed linear; found out by doing it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        weight, x = torch.randn(32, 16), torch.randn(3, 16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        z = torch.ops.mkldnn._linear_pointwise.binary(x, y, packed, None, "add")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(y, F.linear(x, weight), atol=1e-4) and torch.allclose(z, 2 * y, atol=1e-4)


class Linear:
    """x @ weight.T + bias for a fixed weight [out, in]. It is packed, or else copied: the given one may change later."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.float32 and _blocked_kernels_work()
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight.clone()
        self._bias = None if bias is None else bias.clone()

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] -> [n, out]."""
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """self(x) + residual, in one pass where the kernel can; residual [n, out]."""
        if self._packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
            return y
        return F.linear(x, self._weight, self._bias).add_(residual)


class GatedMlp:
    """down(silu(gate(x)) * up(x)) for fixed weights, which are packed or copied."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        self._gate_up = Linear(torch.cat([gate, up]))
        self._down = Linear(down)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """self(x) + residual, both [n, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down.add(F.silu(gate).mul_(up), residual)


class Experts:
    """Gated maps of which each token goes through `per_token`: those whose router probability is highest, weighted with it.

    router [experts, hidden]; gates, ups [experts, width, hidden], downs [experts, hidden, width], copied. normed: the weights of a token are
    divided by their sum. bias [experts], float32, kept: added to the probabilities for the choice alone. The tokens are sorted by expert, and each expert that is used makes two matrix products, which on a CPU is as
    fast as grouped_mm (measured) and takes every width."""

    def __init__(
        self,
        router: Tensor,
        gates: Tensor,
        ups: Tensor,
        downs: Tensor,
        *,
        bias: Tensor | None = None,
        per_token: int,
        normed: bool,
    ) -> None:
        self._router = router.clone()
        self._bias = bias
        self._gate_up = torch.cat([gates, ups], dim=1)
        self._down = downs.clone()
        self._per_token = per_token
        self._normed = normed

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """self(x) + residual, both [n, hidden]."""
        probabilities = F.linear(x, self._router).softmax(-1, dtype=torch.float32)
        chosen = (probabilities if self._bias is None else probabilities + self._bias).topk(self._per_token).indices
        weights = probabilities.gather(1, chosen)
        if self._normed:
            weights /= weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self._router)).tolist()
        sent = x[order // self._per_token]
        back = torch.empty_like(sent)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                gate, up = F.linear(sent[begin : begin + count], self._gate_up[expert]).chunk(2, dim=-1)
                back[begin : begin + count] = F.linear(F.silu(gate).mul_(up), self._down[expert])
                begin += count
        said = torch.empty_like(back)
        said[order] = back
        said = said.view(len(x), self._per_token, -1)
        return torch.baddbmm(residual[:, None], weights.to(x.dtype)[:, None], said)[:, 0]


def rotation_table(inverse_frequencies: Sequence[float], positions: int, device: torch.device) -> Tensor:
    """complex64 [positions, 1, len(inverse_frequencies)]: what `rotate` multiplies by, for positions 0, 1, ..."""
    angles = torch.outer(torch.arange(positions).double(), torch.tensor(inverse_frequencies, dtype=torch.float64))
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None].to(device)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions on x [n, heads, head_dim] whose pairs lie side by side (see `interleave`), rotation [n, 1, d/2].

    In place where x is float32; otherwise computed in float32 and written back."""
    pairs = (*x.shape[:-1], x.shape[-1] // 2, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(x.view(pairs)).mul_(rotation)
        return x
    turned = torch.view_as_complex(x.float().view(pairs)).mul_(rotation)
    return x.copy_(torch.view_as_real(turned).flatten(-2))


def interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the output rows of a q or k projection (or its bias, or a q/k norm) head by head from Hugging Face's
    halves (0..d/2, d/2..d) to pairs side by side, so that a rotation is one complex multiplication. Attention does
    not see the difference: q and k are reordered alike."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
