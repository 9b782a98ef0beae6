"""A model of one layer."""

import torch


class Tiny(torch.nn.Module):
    """y = 2 x + 1, by weights that come from a file."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, values):
        """Shape [n, 1] in and out."""
        return self.line(values)
