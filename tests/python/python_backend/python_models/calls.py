"""What the models that call other models share: a call told in JSON, and its answer as JSON. It lies beside their
`model.py`, from where it is imported by its plain name."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


def calls(request):
    """The calls that a request asks for."""
    return json.loads(pb_utils.get_input_tensor_by_name(request, "DO").as_numpy().flat[0])


def tensor(name, of):
    """A tensor: datatype of numpy, shape, values."""
    dtype, shape, values = of
    array = np.array(values, np.object_ if dtype == "object" else dtype).reshape(shape)
    return pb_utils.Tensor(name, array)


def made(call, parent):
    """The request of a call. `passed` inputs are those of the request that asks."""
    inputs = [tensor(name, of) for name, of in call.get("inputs", {}).items()]
    for name in call.get("passed", []):
        inputs.append(pb_utils.Tensor(name, pb_utils.get_input_tensor_by_name(parent, name).as_numpy()))
    names = ("request_id", "correlation_id", "model_version", "flags", "timeout", "parameters")
    more = {name: call[name] for name in names if name in call}
    return pb_utils.InferenceRequest(
        model_name=call["model"], requested_output_names=call["outputs"], inputs=inputs, **more
    )


def described(array):
    """An array for JSON: its type, shape and values."""
    values = [v.decode() if isinstance(v, bytes) else v for v in array.flatten().tolist()]
    return [str(array.dtype), list(array.shape), values]


def told(response):
    """A response as JSON."""
    if response.has_error():
        error = response.error()
        return {"error": error.message(), "code": int(error.code())}
    outputs = {t.name(): described(t.as_numpy()) for t in response.output_tensors()}
    return {"outputs": outputs}


def several(responses):
    """The responses of a decoupled call; one without outputs is an empty list."""
    return [told(response) for response in responses]


def failure(error):
    """An exception as JSON."""
    return {"raised": type(error).__name__, "text": str(error)}


def answer(found):
    """`SEEN`: what came of the calls."""
    text = np.array([json.dumps(found, sort_keys=True).encode()], np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text)])
