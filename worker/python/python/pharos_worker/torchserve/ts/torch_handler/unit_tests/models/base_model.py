"""A small model for tests of `BaseHandler`."""

import torch


class ArgmaxModel(torch.nn.Module):
    """Returns the position of the largest value in each row of its first input."""

    def forward(self, *input):
        return torch.argmax(input[0], 1)


def save_pt_file(filepath="base_model.pt"):
    """Writes the state of the model to a file."""
    torch.save(ArgmaxModel().state_dict(), filepath)


if __name__ == "__main__":
    save_pt_file()
