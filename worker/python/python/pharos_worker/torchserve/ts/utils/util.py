"""Utilities that handlers import: classes of modules, configuration, errors with a status."""

import enum
import functools
import inspect
import json
import logging
import os
import re
import warnings

logger = logging.getLogger(__name__)

CLEANUP_REGEX = re.compile(r"<.*?>|&(?:[a-z0-9]+|#\d{1,6}|#x[0-9a-f]{1,6});")
"""HTML tags and entities."""


class PT2Backend(str, enum.Enum):
    """The allowed names in `pt2: {compile: {backend: ...}}` of a model's configuration."""

    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    NVFUSER = "nvfuser"
    AOT_NVFUSER = "aot_nvfuser"
    AOT_CUDAGRAPHS = "aot_cudagraphs"
    OFI = "ofi"
    FX2TRT = "fx2trt"
    ONNXRT = "onnxrt"
    IPEX = "ipex"
    TORCHXLA_TRACE_ONCE = "torchxla_trace_once"
    OPENVINO = "openvino"
    TENSORRT = "tensorrt"
    HPU_BACKEND = "hpu_backend"


class PredictionException(Exception):
    """Fails the requests of a batch with this message and status."""

    def __init__(self, message, error_code=500):
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self):
        return f"{self.message} : {self.error_code}"


def list_classes_from_module(module, parent_class=None):
    """Returns the classes defined in a module, sorted by name; only subclasses of `parent_class` if given."""
    own = [member for _, member in inspect.getmembers(module, inspect.isclass) if member.__module__ == module.__name__]
    return own if parent_class is None else [member for member in own if issubclass(member, parent_class)]


def check_valid_pt2_backend(backend):
    """Returns whether `torch.compile` supports this backend."""
    known = any(backend == member.value for member in PT2Backend)
    if not known:
        logger.warning("'%s' is not a supported backend of torch.compile; allowed are %s", backend, ", ".join(PT2Backend))
    return known


def load_label_mapping(mapping_file_path):
    """Returns class labels by class number from a JSON file `{"0": "tench", ...}`; None if the file does not exist.

    A value may be a list, whose last element is used. `{"object_type_names": [...]}` is also supported.
    """
    if not os.path.isfile(mapping_file_path):
        logger.warning("'%s' does not exist; responses will not contain class labels", mapping_file_path)
        return None
    with open(mapping_file_path, encoding="utf-8") as file:
        mapping = json.load(file)
    if not isinstance(mapping, dict):
        raise Exception(f'index->name JSON mapping should be in "class": "label" format. The file is {mapping_file_path}')
    names = mapping.get("object_type_names")
    if isinstance(names, list):
        return {str(number): name for number, name in enumerate(names)}
    labels = {key: value[-1] if isinstance(value, list) else value for key, value in mapping.items()}
    for key, label in labels.items():
        if not isinstance(label, str):
            raise Exception(
                f"labels in index->name mapping must be either str or List[str]; that of '{key}' is {label!r}, in "
                f"{mapping_file_path}"
            )
    return labels


def map_class_to_label(probs, mapping=None, lbl_classes=None):
    """Returns a dictionary of label to probability for each row of probabilities. `lbl_classes` has the classes of each row;
    by default, they are numbered from 0. Without a mapping, the class numbers are the labels."""
    if not isinstance(probs, list):
        raise Exception(f"Convert classes to list before doing mapping; they are a {type(probs).__name__}")
    if mapping is not None and not isinstance(mapping, dict):
        raise Exception(f"Mapping must be a dict; it is a {type(mapping).__name__}")
    if lbl_classes is None:
        lbl_classes = [range(len(row)) for row in probs]
    label = str if mapping is None else lambda number: mapping[str(number)]
    return [
        {label(number): probability for number, probability in zip(classes, row)}
        for classes, row in zip(lbl_classes, probs)
    ]


def parse_yaml(text):
    """Parses YAML: with PyYAML if it is installed (YAML 1.1), else with the server's own parser (YAML 1.2)."""
    try:
        import yaml
    except ImportError:
        from pharos_worker import _native

        return json.loads(_native.yaml_to_json(text))
    return yaml.safe_load(text)


def get_yaml_config(yaml_file_path):
    """Returns the contents of a YAML file."""
    with open(yaml_file_path, encoding="utf-8") as file:
        return parse_yaml(file.read())


def deprecated(version, replacement="", klass=PendingDeprecationWarning):
    """Returns a decorator that warns that a function is deprecated since a version."""

    def decorate(function):
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            text = f"{function.__name__} is deprecated since {version}; use {replacement}"
            warnings.warn(text, klass, stacklevel=2)
            return function(*args, **kwargs)

        return wrapped

    return decorate
