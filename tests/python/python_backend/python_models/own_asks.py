"""Asks whether a version of a model is ready; the answer is a parameter of the response."""

import triton_python_backend_utils as pb_utils


def asked(version):
    """Returns the answer, or the text of the error."""
    try:
        return str(pb_utils.is_model_ready(model_name="asks", model_version=version))
    except pb_utils.TritonModelException as error:
        return f"error: {error}"


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        outputs = [pb_utils.Tensor("OUT", request.inputs()[0].as_numpy()) for request in requests]
        answers = {version or "latest": asked(version) for version in ("", "1", "9", "abc", "-1")}
        return [pb_utils.InferenceResponse([output], parameters=answers) for output in outputs]
