"""Modules that `framework_models.py` makes PyTorch files of."""

from typing import Dict, List, Tuple

import torch


class Two(torch.nn.Module):
    """Two tensors to two."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        return left + 2 * right, left * right


class Keyed(torch.nn.Module):
    """A tensor to a dictionary."""

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:
        return {"twice": x * 2, "negative": x < 0}


class Texts(torch.nn.Module):
    """Texts to texts."""

    def forward(self, t: List[str]) -> List[str]:
        return [text + "!" for text in t]
