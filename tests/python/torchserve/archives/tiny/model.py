"""A model of one layer."""

import torch


class Tiny(torch.nn.Module):
    """y = 2 x + 1, with weights that are loaded from a file."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, values):
        """Input and output have the shape [n, 1]."""
        return self.line(values)
