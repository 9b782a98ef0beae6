"""Calls other models, one after the other, and loads and unloads them; `SEEN` has the outcomes."""

import calls
import triton_python_backend_utils as pb_utils


def control(call):
    """Loads or unloads a model, or returns whether it is ready."""
    verb, model = call["verb"], call["model"]
    if verb == "load":
        more = {"config": call["config"]} if "config" in call else {}
        if "files" in call:
            more["files"] = {name: content.encode() for name, content in call["files"].items()}
        return pb_utils.load_model(model_name=model, **more)
    if verb == "unload":
        more = {"unload_dependents": call["dependents"]} if "dependents" in call else {}
        return pb_utils.unload_model(model_name=model, **more)
    return pb_utils.is_model_ready(
        model_name=model, **({"model_version": call["version"]} if "version" in call else {})
    )


def one(call, parent):
    """One call."""
    try:
        if "verb" in call:
            return {"control": control(call)}
        request = calls.made(call, parent)
        if call.get("decoupled"):
            return {"responses": calls.several(request.exec(decoupled=True))}
        return calls.told(request.exec())
    except Exception as error:  # noqa: BLE001 (every exception is part of the answer)
        return calls.failure(error)


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        return [calls.answer([one(call, request) for call in calls.calls(request)]) for request in requests]
