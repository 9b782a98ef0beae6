"""Completes the configuration of a model by calling its `auto_complete_config`.

Reads `{"config": {...}, "directory": ..., "model_directory": ..., "version": N, "backend": NAME}` from standard input. Writes
`{"config": {...}}` or `{"error": TEXT}` to the file.
"""

import json
import os
import sys
import traceback

from pharos_worker import _native, driver
from pharos_worker.model_config import ModelConfig


def main(out):
    """Reads the description, completes it and writes the result; returns the exit status."""
    _native.end_with_the_server()
    try:
        # Here: a model can add values that JSON does not have, such as numbers of numpy.
        answer = json.dumps({"config": complete(json.load(sys.stdin))})
    except BaseException as error:  # noqa: B902: whatever a model raises is the user's to read
        traceback.print_exc()
        answer = json.dumps({"error": shortened(error)})
    with open(out + ".part", "w", encoding="utf-8") as file:
        file.write(answer)
    os.replace(out + ".part", out)
    return 0


def complete(described):
    """Returns the configuration completed by `auto_complete_config`; unchanged if the model has none."""
    config = described["config"]
    file = config.get("default_model_filename") or ""
    module = driver.model_module(described["backend"], described["directory"], file, described["version"])
    function = getattr(module.TritonPythonModel, "auto_complete_config", None)
    if function is None:
        return config
    completed = function(ModelConfig(config))
    if not isinstance(completed, ModelConfig):
        raise TypeError(f"auto_complete_config function in model '{config.get('name', '')}' must return a valid "
                        f"pb.ModelConfig object.")
    return completed.as_dict()


def shortened(error):
    """Formats an exception's type, message and locations, innermost first, like the native part does for requests."""
    own = os.path.dirname(os.path.abspath(__file__)) + os.sep
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((own, "<frozen "))]
    places = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames))
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__}: <no message>"
    return f"{text}\n\nAt:\n{places}" if places else text
