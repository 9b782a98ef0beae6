#!/usr/bin/env python3
"""Trains models of the digits with scikit-learn, XGBoost or PyTorch, and writes them to a model repository.

    python3 examples/frameworks/make_models.py sklearn|xgboost|pytorch [--into FOLDER]

Requires scikit-learn, which also provides the data, and xgboost or torch. Images are rows of 64 pixels from 0 to 16; the
held-out images are those of `train_digits.py`. Seeds are fixed.
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

HERE = Path(__file__).resolve().parent
BRIGHTEST = 16.0
ROUNDS = 30


def data():
    """Returns training images FP32 [n, 64], held-out images, and the digits of both."""
    digits = load_digits()
    pictures = digits.images.reshape(-1, 64).astype(np.float32)
    return train_test_split(pictures, digits.target, test_size=0.2, random_state=0, stratify=digits.target)


def sklearn(folder: Path):
    """Trains a pipeline of scaling and logistic regression with an approximated kernel."""
    import joblib
    from sklearn.kernel_approximation import Nystroem
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train_x, test_x, train_y, test_y = data()
    features = Nystroem(gamma=0.01, n_components=300, random_state=0)
    model = make_pipeline(StandardScaler(), features, LogisticRegression(C=10, max_iter=1000, random_state=0))
    model.fit(train_x, train_y)
    joblib.dump(model, place(folder, "digits_sklearn", "model.joblib"))
    return np.mean(model.predict(test_x) == test_y)


def xgboost(folder: Path):
    """Trains boosted trees, ten in each round."""
    import xgboost as xgb

    train_x, test_x, train_y, test_y = data()
    wanted = {"objective": "multi:softprob", "num_class": 10, "seed": 0, "nthread": 2}
    model = xgb.train(wanted, xgb.DMatrix(train_x, train_y), ROUNDS)
    model.save_model(place(folder, "digits_xgboost", "model.ubj"))
    return np.mean(model.inplace_predict(test_x).argmax(axis=1) == test_y)


def pytorch(folder: Path):
    """Trains a network with one hidden layer; writes TorchScript and, from PyTorch 2.1, a `torch.export` program."""
    import torch

    torch.manual_seed(0)
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in data())
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.005)
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(train_x / BRIGHTEST), train_y).backward()
        optimizer.step()
    model = Scaled(torch, network).eval()
    torch.jit.script(model).save(str(place(folder, "digits_torchscript", "model.pt")))
    if hasattr(torch, "export"):
        batch = torch.export.Dim("batch", min=1, max=1024)
        program = torch.export.export(model, (train_x[:2],), dynamic_shapes={"picture": {0: batch}})
        torch.export.save(program, place(folder, "digits_export", "model.pt2"))
    return (model(test_x).argmax(dim=1) == test_y).double().mean().item()


def Scaled(torch, network):
    """Returns a module that scales its input before calling the network."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            return self.network(picture / 16.0)

    return Module()


def place(folder: Path, model: str, file: str) -> Path:
    """Creates the folder of a model; returns the path of its file."""
    target = folder / model / "1"
    target.mkdir(parents=True, exist_ok=True)
    return target / file


MAKERS = {"sklearn": sklearn, "xgboost": xgboost, "pytorch": pytorch}


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Trains models of the digits.")
    parser.add_argument("framework", choices=MAKERS)
    parser.add_argument("--into", type=Path, help="the model repository (default: models/ of the framework's example)")
    options = parser.parse_args()
    folder = options.into or HERE / options.framework / "models"
    accuracy = MAKERS[options.framework](folder)
    print(f"{options.framework}: {accuracy:.1%} accuracy on the held-out images; written to {folder}")


if __name__ == "__main__":
    main()
