"""Checks documents with the models of KServe's SDK: `python check_kserve.py FOLDER < documents.json`.

Reads a JSON array of documents, and prints a JSON array with an error or "" for each. FOLDER has the packages `kserve` and
`kubernetes`. Only the models are imported, without the packages themselves, which have many dependencies. A field that a model does not have is an
error; the models themselves check required fields.
"""

import json
import re
import sys
import types
from pathlib import Path

FOLDER = Path(sys.argv[1])
sys.path.insert(0, str(FOLDER))
for name in ("kserve", "kubernetes"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(FOLDER / name)]

from kserve import models  # noqa: E402
from kubernetes import client  # noqa: E402

KINDS = {
    "serving.kserve.io/v1alpha1": "V1alpha1",
    "serving.kserve.io/v1beta1": "V1beta1",
}
PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float)}
QUANTITIES = ("V1beta1MetricQuantity", "ResourceQuantity")
"""Types without a model: a number, or a text such as 500m."""


def model_of(name: str):
    """Returns the model of a type: KServe's, or that of Kubernetes; None for an object of any form."""
    known = getattr(models, name, None) or getattr(client, name, None)
    if known is None and name.startswith("K8sIoApiAutoscalingV2"):
        known = getattr(client, "V2" + name.removeprefix("K8sIoApiAutoscalingV2"))
    assert known or name == "object", f"no model for the type {name}"
    return known


def value(kind: str, found, place: str):
    """Returns a document's value as an object of the models; raises ValueError with the place of an error."""
    if match := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        if not isinstance(found, list):
            raise ValueError(f"{place}: expected a list")
        return [value(match[1], item, f"{place}[{at}]") for at, item in enumerate(found)]
    if match := re.fullmatch(r"[Dd]ict[(\[]str, (.*)[)\]]", kind):
        if not isinstance(found, dict):
            raise ValueError(f"{place}: expected a map")
        return {key: value(match[1], item, f"{place}.{key}") for key, item in found.items()}
    if kind in PLAIN or kind in QUANTITIES:
        if not isinstance(found, PLAIN.get(kind, (str, int))) or (kind != "bool" and isinstance(found, bool)):
            raise ValueError(f"{place}: expected {kind}, found {found!r}")
        return found
    model = model_of(kind)
    return found if model is None else structure(model, found, place)


def structure(model, found, place: str):
    """Returns a map of a document as an object of `model`."""
    if not isinstance(found, dict):
        raise ValueError(f"{place}: expected a map")
    attributes = {name: attribute for attribute, name in model.attribute_map.items()}
    if unknown := found.keys() - attributes.keys():
        raise ValueError(f"{place}: unknown fields {sorted(unknown)} of {model.__name__}")
    kinds = model.openapi_types
    fields = {attributes[name]: value(kinds[attributes[name]], item, f"{place}.{name}") for name, item in found.items()}
    try:
        return model(**fields)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def check(document: dict) -> str:
    """Returns the error of a document; empty if it is valid."""
    try:
        prefix = KINDS[document["apiVersion"]]
        structure(model_of(prefix + document["kind"]), document, document["kind"])
    except (KeyError, ValueError, AssertionError) as error:
        return str(error) or repr(error)
    return ""


print(json.dumps([check(document) for document in json.load(sys.stdin)]))
