#!/usr/bin/env python3
"""Writes models of one framework, and their expected answers, which are computed without a server.

    framework_models.py sklearn|xgboost|pytorch FOLDER      with a Python that has the framework

Writes the repository FOLDER/models, and FOLDER/cases.json: model, inputs and outputs as `[datatype, shape, values]`.
"""

import json
import sys
from pathlib import Path

import numpy as np

CASES = []
CPU = "instance_group [ { kind: KIND_CPU } ]\n"
TOGETHER = "dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 5000000 }\n"


def entry(kind: str, name: str, datatype: str, dims) -> str:
    """Returns an input or output of a configuration."""
    return f'{kind} [ {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {", ".join(map(str, dims))} ] }} ]\n'


def place(folder: Path, model: str, file: str, config: str) -> str:
    """Writes a model's folder with its configuration; returns the path for the model file."""
    version = folder / "models" / model / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config + CPU)
    return str(version / file)


def tensor(array) -> list:
    """Returns an array in the format of the cases."""
    array = np.asarray(array)
    texts = array.dtype.kind in "OUS"
    names = {"f": "FP", "i": "INT", "u": "UINT"}
    datatype = "BYTES" if texts else "BOOL" if array.dtype == bool else f"{names[array.dtype.kind]}{array.itemsize * 8}"
    return [datatype, list(array.shape), array.ravel().tolist()]


def case(model: str, inputs: dict, outputs: dict):
    """Adds the expected answer of a model to the cases."""
    sides = ({name: tensor(array) for name, array in side.items()} for side in (inputs, outputs))
    CASES.append([model, *sides])


def data(seed=0):
    """Returns 200 rows of four features, one of three classes for each row, and a number for each row."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(200, 4)).astype(np.float32)
    return rows, (rows[:, 0] + rows[:, 1] > 0).astype(int) + (rows[:, 2] > 0.5), rows @ [1.0, 2.0, 3.0, 4.0]


def sklearn(folder: Path):
    """Classifiers without and with a configuration, for named classes and for texts; a regression of two numbers; failures."""
    import joblib
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline

    rows, classes, numbers = data()
    few = rows[:5]
    model = LogisticRegression().fit(rows, classes)
    joblib.dump(model, place(folder, "classifier", "model.joblib", 'backend: "sklearn"\n'))
    case(
        "classifier",
        {"input": few},
        {"predict": model.predict(few)[:, None], "predict_proba": model.predict_proba(few)},
    )
    config = 'backend: "sklearn"\nmax_batch_size: 16\ndynamic_batching { }\n' + entry("input", "features", "FP32", [4])
    outputs = entry("output", "label", "INT32", [1]) + entry("output", "decision_function", "FP32", [3])
    joblib.dump(model, place(folder, "classifier_as_told", "model.pkl", config + outputs))
    told = {"label": model.predict(few)[:, None].astype(np.int32), "decision_function": model.decision_function(few)}
    case(
        "classifier_as_told",
        {"features": few},
        told | {"decision_function": told["decision_function"].astype(np.float32)},
    )
    model = LinearRegression().fit(rows, np.stack([numbers, -numbers], axis=1))
    joblib.dump(model, place(folder, "regression", "model.joblib", 'backend: "sklearn"\n'))
    case("regression", {"input": few}, {"predict": model.predict(few)})
    named = np.array(["low", "middle", "high"])[classes]
    model = LogisticRegression().fit(rows, named)
    joblib.dump(model, place(folder, "named_classes", "model.joblib", 'backend: "sklearn"\n'))
    case(
        "named_classes",
        {"input": few},
        {"predict": model.predict(few)[:, None], "predict_proba": model.predict_proba(few)},
    )
    model = LogisticRegression().fit(rows, classes)
    # As after a fit with a table of pandas.
    model.feature_names_in_ = np.array(["length", "width", "height", "weight"], object)
    joblib.dump(model, place(folder, "named_features", "model.joblib", 'backend: "sklearn"\n'))
    case(
        "named_features",
        {"input": few},
        {"predict": model.predict(few)[:, None], "predict_proba": model.predict_proba(few)},
    )
    texts = ["a good day", "a bad day", "good good", "bad luck", "grün ist good"]
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(texts, [1, 0, 1, 0, 1])
    config = 'backend: "sklearn"\nmax_batch_size: 16\n' + entry("input", "text", "STRING", [1])
    config += entry("output", "predict", "INT64", [1])
    joblib.dump(model, place(folder, "texts", "model.joblib", config))
    case("texts", {"text": np.array(texts)[:, None]}, {"predict": model.predict(texts)[:, None]})
    joblib.dump(model, place(folder, "together", "model.joblib", config + TOGETHER))
    Path(place(folder, "no_model", "model.joblib", 'backend: "sklearn"\n')).write_bytes(b"no pickle")
    place(folder, "no_file", "model.joblib", 'backend: "sklearn"\n')
    config = 'backend: "sklearn"\nmax_batch_size: 16\n' + entry("input", "x", "FP32", [4])
    joblib.dump(model, place(folder, "no_method", "model.joblib", config + entry("output", "transform", "FP32", [4])))


def xgboost(folder: Path):
    """A classifier with all kinds of outputs and missing values, the same with fewer rounds, a regression without a
    configuration, and models that fail to load."""
    import xgboost as xgb

    rows, classes, numbers = data()
    few = rows[:5].copy()
    few[0, 1] = np.nan
    matrix = xgb.DMatrix(few)
    wanted = {"objective": "multi:softprob", "num_class": 3, "seed": 0, "max_depth": 3}
    model = xgb.train(wanted, xgb.DMatrix(rows, classes), 10)
    config = 'backend: "xgboost"\nmax_batch_size: 16\ndynamic_batching { }\n' + entry("input", "features", "FP32", [4])
    shapes = {"predict": [3], "margin": [3], "leaf": [30], "contributions": [3, 5]}
    outputs = "".join(entry("output", name, "FP32", dims) for name, dims in shapes.items())
    model.save_model(place(folder, "classifier", "model.ubj", config + outputs))
    answers = {
        "predict": model.predict(matrix),
        "margin": model.predict(matrix, output_margin=True),
        "leaf": model.predict(matrix, pred_leaf=True),
        "contributions": model.predict(matrix, pred_contribs=True),
    }
    case("classifier", {"features": few}, answers)
    model.save_model(place(folder, "together", "model.ubj", config.replace("dynamic_batching { }\n", TOGETHER) + outputs))
    fewer = 'parameters { key: "iterations" value { string_value: "0:4" } }\n' + entry("output", "predict", "FP32", [3])
    model.save_model(place(folder, "fewer_rounds", "model.json", config + fewer))
    case("fewer_rounds", {"features": few}, {"predict": model.predict(matrix, iteration_range=(0, 4))})
    model = xgb.train({"seed": 0, "max_depth": 3}, xgb.DMatrix(rows, numbers), 10)
    model.save_model(place(folder, "regression", "model.json", 'backend: "xgboost"\n'))
    case("regression", {"input": few}, {"predict": model.predict(matrix)[:, None]})
    Path(place(folder, "no_model", "model.json", 'backend: "xgboost"\n')).write_text("{}")
    wrong = 'parameters { key: "iterations" value { string_value: "all" } }\n'
    model.save_model(place(folder, "wrong_parameter", "model.json", 'backend: "xgboost"\n' + wrong))


def pytorch(folder: Path):
    """Inputs by name and by position, outputs by position and by key, texts, several datatypes; an exported program."""
    import pytorch_modules as modules
    import torch

    head = 'platform: "pytorch_libtorch"\nmax_batch_size: 16\ndynamic_batching { }\n'
    few = [np.arange(8, dtype=np.float32).reshape(2, 4), np.ones((2, 4), np.float32)]

    def script(model, name, config):
        torch.jit.script(model.eval()).save(place(folder, name, "model.pt", config))

    pair = entry("input", "left", "FP32", [4]) + entry("input", "right", "FP32", [4])
    script(
        modules.Two(),
        "by_name",
        head + pair + entry("output", "sum", "FP32", [4]) + entry("output", "product", "FP32", [4]),
    )
    case("by_name", dict(zip(("left", "right"), few)), {"sum": few[0] + 2 * few[1], "product": few[0] * few[1]})
    pair = entry("input", "INPUT__1", "FP32", [4]) + entry("input", "INPUT__0", "FP32", [4])
    script(modules.Two(), "by_position", head + pair + entry("output", "OUTPUT__1", "FP32", [4]))
    case("by_position", {"INPUT__0": few[0], "INPUT__1": few[1]}, {"OUTPUT__1": few[0] * few[1]})
    script(modules.Two(), "outputs_tried", head + entry("input", "a", "FP32", [4]) + entry("input", "b", "FP32", [4]))
    case("outputs_tried", dict(zip("ab", few)), {"OUTPUT__0": few[0] + 2 * few[1], "OUTPUT__1": few[0] * few[1]})
    keyed = (
        entry("input", "x", "INT64", [-1])
        + entry("output", "negative", "BOOL", [-1])
        + entry("output", "twice", "INT64", [-1])
    )
    script(modules.Keyed(), "by_key", head + keyed)
    numbers = np.array([[1, -2, 3]])
    case("by_key", {"x": numbers}, {"negative": numbers < 0, "twice": numbers * 2})
    texts = head.replace("16", "0").replace("dynamic_batching { }\n", "")
    script(modules.Texts(), "texts", texts + entry("input", "t", "STRING", [-1]) + entry("output", "u", "STRING", [-1]))
    case("texts", {"t": np.array(["a", "grün"])}, {"u": np.array(["a!", "grün!"])})
    script(
        modules.Two(),
        "wrong_names",
        head + "".join(entry("input", n, "FP32", [4]) for n in "abc") + entry("output", "o", "FP32", [4]),
    )
    script(modules.Two(), "says_nothing", 'platform: "pytorch_libtorch"\n')
    config = (
        head
        + entry("input", "left", "FP32", [-1])
        + entry("input", "right", "FP32", [-1])
        + entry("output", "sum", "FP32", [-1])
    )
    script(modules.Two(), "any_width", config)
    if hasattr(torch, "export"):
        batch = {0: torch.export.Dim("batch", max=64)}
        example = tuple(torch.as_tensor(array) for array in few)
        program = torch.export.export(modules.Two(), example, dynamic_shapes={"left": batch, "right": batch})
        torch.export.save(program, place(folder, "exported", "model.pt2", 'platform: "pytorch_libtorch"\n'))
        case(
            "exported",
            dict(zip(("left", "right"), few)),
            {"OUTPUT__0": few[0] + 2 * few[1], "OUTPUT__1": few[0] * few[1]},
        )


def main():
    """The command line."""
    framework, folder = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    {"sklearn": sklearn, "xgboost": xgboost, "pytorch": pytorch}[framework](folder)
    plain = json.dumps(CASES)
    (folder / "cases.json").write_text(plain)


if __name__ == "__main__":
    main()
