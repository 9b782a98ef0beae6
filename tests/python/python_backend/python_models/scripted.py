"""A model that follows the instructions of a request: input `DO` is a JSON object, `do` names one of [`ACTIONS`].

It answers with `OUT`, the values of the input `VALUE`, and `SEEN`, the properties of the request as JSON.
"""

import json
import os
import signal
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def text(values, shape):
    """Returns a BYTES tensor with these texts."""
    return pb_utils.Tensor("SEEN", np.array([value.encode() for value in values], np.object_).reshape(shape))


def script(request):
    """Returns the instruction of a request."""
    return json.loads(pb_utils.get_input_tensor_by_name(request, "DO").as_numpy().flat[0])


def seen(request, together):
    """Returns the properties of a request and the size of its batch."""
    return {
        "request_id": request.request_id(),
        "correlation_id": request.correlation_id(),
        "flags": request.flags(),
        "timeout": request.timeout(),
        "parameters": json.loads(request.parameters()),
        "requested": sorted(request.requested_output_names()),
        "inputs": sorted(tensor.name() for tensor in request.inputs()),
        "cancelled": request.is_cancelled(),
        "together": together,
    }


def outputs(request, together=1):
    """Returns the outputs of the ordinary answer: `OUT` if there is a `VALUE`, and `SEEN`."""
    do = pb_utils.get_input_tensor_by_name(request, "DO").as_numpy()
    value = pb_utils.get_input_tensor_by_name(request, "VALUE")
    tensors = [] if value is None else [pb_utils.Tensor("OUT", value.as_numpy())]
    report = json.dumps(seen(request, together), sort_keys=True)
    return [*tensors, text([report] * do.size, do.shape)]


def answer(request, act):
    """Returns the ordinary answer."""
    return pb_utils.InferenceResponse(outputs(request))


def error(request, act):
    """Returns an error, with a code if the instruction has one."""
    code = [getattr(pb_utils.TritonError, act["code"])] if "code" in act else []
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(act.get("text", "as asked"), *code))


def error_with_outputs(request, act):
    """Returns an error together with outputs."""
    return pb_utils.InferenceResponse(outputs(request), error=pb_utils.TritonError("beside outputs"))


def with_parameters(request, act):
    """Returns an answer with parameters."""
    return pb_utils.InferenceResponse(outputs(request), parameters=act["parameters"])


def output(request, act):
    """Returns `OUT` with another name, datatype or shape."""
    array = np.array(act["values"], dtype=act.get("dtype", "float32"))
    array = array.reshape(act["shape"]) if "shape" in act else array
    return pb_utils.InferenceResponse([pb_utils.Tensor(act.get("name", "OUT"), array)])


def views(request, act):
    """Returns `OUT` from an array that is not contiguous or has another byte order."""
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = {
        "every second": base.ravel()[::2],
        "reversed": base.ravel()[::-1],
        "transposed": base.T.ravel(),
        "column": base[:, 1],
        "big endian": base.ravel().astype(">f4"),
        "empty": base.ravel()[:0],
        "input": pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()[1:3],
    }[act["view"]]
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])


def strings(request, act):
    """Returns `SEEN` from an array of texts of one kind."""
    made = {
        "str": np.array(["grün", ""], np.object_),
        "bytes": np.array([b"\x00\xffa", b""], np.object_),
        "S": np.array([b"abc", b"d"]),
        "numbers": np.array([5, 1.5, None], np.object_),
        "two dimensions": np.array([["a", "b"], ["c", "d"]], np.object_),
        "none": np.array([], np.object_),
        "large": np.array(["x" * 100_000] * 3, np.object_),
        "U": np.array(["abc", "d"]),
    }[act["kind"]]
    return pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", made)])


def fail(request, act):
    """Raises an exception."""
    if act.get("type") == "TritonModelException":
        raise pb_utils.TritonModelException(act["text"])
    raise {"ValueError": ValueError, "KeyError": KeyError, "SystemExit": SystemExit}[act["type"]](act["text"])


def sleep(request, act):
    """Returns the ordinary answer after a delay."""
    time.sleep(act["seconds"])
    return answer(request, act)


def die(request, act):
    """Kills the process."""
    os.kill(os.getpid(), signal.SIGKILL)


def attempt(request, act):
    """Evaluates expressions; `SEEN` has the value of each, its type, or the type of the error."""
    names = {"pb_utils": pb_utils, "np": np, "json": json, "request": request}
    found = {}
    for expression in act["expressions"]:
        try:
            value = eval(expression, names)
            simple = isinstance(value, (str, int, float, list, dict, bool, type(None)))
            found[expression] = value if simple else type(value).__name__
        except Exception as error:  # noqa: BLE001 (every exception is part of the answer)
            found[expression] = f"{type(error).__name__} {error}" if act.get("texts") else type(error).__name__
    return pb_utils.InferenceResponse([text([json.dumps(found, sort_keys=True)], [1])])


ACTIONS = {
    "answer": answer,
    "error": error,
    "error with outputs": error_with_outputs,
    "parameters": with_parameters,
    "output": output,
    "view": views,
    "strings": strings,
    "raise": fail,
    "sleep": sleep,
    "die": die,
    "attempt": attempt,
    "no outputs": lambda request, act: pb_utils.InferenceResponse([]),
    "nothing": lambda request, act: None,
    "a text": lambda request, act: "a text",
    "twice": lambda request, act: pb_utils.InferenceResponse(outputs(request) * 2),
}

WHOLE = {
    "return none": lambda responses: None,
    "return too few": lambda responses: responses[:-1],
    "return too many": lambda responses: [*responses, *responses],
    "return a number": lambda responses: 5,
    "return a tuple": tuple,
    "return a generator": lambda responses: (response for response in responses),
}
"""Changes to the answers of the whole batch."""


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        scripts = [script(request) for request in requests]
        responses = []
        for request, act in zip(requests, scripts):
            if act["do"] in WHOLE or act["do"] == "answer":
                responses.append(pb_utils.InferenceResponse(outputs(request, len(requests))))
            else:
                responses.append(ACTIONS[act["do"]](request, act))
        whole = [act["do"] for act in scripts if act["do"] in WHOLE]
        return WHOLE[whole[0]](responses) if whole else responses
