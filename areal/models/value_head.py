"""One number per hidden state: what the critic thinks the rest of the episode will earn.

    values = ValueHead(hidden_size)(hidden)                # [m, d] -> [m], float32

Linear, float32 whatever the body's dtype, zero at the start: a critic that knows nothing yet adds no noise to advantages.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """A linear map to one number."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [m] of hidden states [m, d]."""
        return torch.mv(hidden.float(), self.weight) + self.bias
