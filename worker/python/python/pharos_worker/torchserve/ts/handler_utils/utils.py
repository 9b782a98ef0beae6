"""Sending partial responses, and importing classes by name."""

import importlib
import os


def import_class(class_name, module_prefix=None):
    """Imports the class with a name such as `package.module.Class`, relative to `module_prefix` if given."""
    if not class_name:
        raise ImportError("class name is not defined")
    module, _, name = class_name.rpartition(".")
    path = ".".join(part for part in (module_prefix, module) if part)
    if not path:
        raise ImportError(f"module name is not defined. '{class_name}' needs one, such as 'package.module.Class'")
    try:
        return getattr(importlib.import_module(path), name)
    except AttributeError:
        raise ImportError(f"class:{name} not found in module:{path}.") from None


def send_intermediate_predict_response(ret, req_id_map, message, code, context):
    """Sends a part of the response to each request in `req_id_map`, which maps the position in the batch to the id:
    `ret[position]`. The result of the handler is the last part."""
    if os.getenv("LOCAL_RANK", "0") != "0":
        return
    if getattr(context, "cl_socket", None) is None:
        raise RuntimeError("a partial response can only be sent in a server")
    context.cl_socket.send_part(ret, req_id_map, message, code, context)
