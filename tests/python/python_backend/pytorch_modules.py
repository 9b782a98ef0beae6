"""Modules that `framework_models.py` writes as PyTorch files."""

from typing import Dict, List, Tuple

import torch


class Two(torch.nn.Module):
    """Maps two tensors to two tensors."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        return left + 2 * right, left * right


class Keyed(torch.nn.Module):
    """Maps a tensor to a dictionary of tensors."""

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:
        return {"twice": x * 2, "negative": x < 0}


class Texts(torch.nn.Module):
    """Maps texts to texts."""

    def forward(self, t: List[str]) -> List[str]:
        return [text + "!" for text in t]
