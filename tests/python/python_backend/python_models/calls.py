"""Shared code of the models that call other models: reads a call in JSON, and writes its answer as JSON. The file is copied
beside their `model.py`, so that they can import it by its name."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


def calls(request):
    """Returns the calls that a request contains."""
    return json.loads(pb_utils.get_input_tensor_by_name(request, "DO").as_numpy().flat[0])


def tensor(name, of):
    """Returns the tensor for a numpy datatype, a shape and values."""
    dtype, shape, values = of
    array = np.array(values, np.object_ if dtype == "object" else dtype).reshape(shape)
    return pb_utils.Tensor(name, array)


def made(call, parent):
    """Returns the request of a call. `passed` names inputs that are copied from the parent request."""
    inputs = [tensor(name, of) for name, of in call.get("inputs", {}).items()]
    for name in call.get("passed", []):
        inputs.append(pb_utils.Tensor(name, pb_utils.get_input_tensor_by_name(parent, name).as_numpy()))
    names = ("request_id", "correlation_id", "model_version", "flags", "timeout", "parameters")
    more = {name: call[name] for name in names if name in call}
    return pb_utils.InferenceRequest(
        model_name=call["model"], requested_output_names=call["outputs"], inputs=inputs, **more
    )


def described(array):
    """Returns the type, shape and values of an array for JSON."""
    values = [v.decode() if isinstance(v, bytes) else v for v in array.flatten().tolist()]
    return [str(array.dtype), list(array.shape), values]


def told(response):
    """Returns a response for JSON."""
    if response.has_error():
        error = response.error()
        return {"error": error.message(), "code": int(error.code())}
    outputs = {t.name(): described(t.as_numpy()) for t in response.output_tensors()}
    return {"outputs": outputs}


def several(responses):
    """Returns the responses of a decoupled call for JSON."""
    return [told(response) for response in responses]


def failure(error):
    """Returns an exception for JSON."""
    return {"raised": type(error).__name__, "text": str(error)}


def answer(found):
    """Returns the response whose output `SEEN` has the outcomes of the calls."""
    text = np.array([json.dumps(found, sort_keys=True).encode()], np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text)])
