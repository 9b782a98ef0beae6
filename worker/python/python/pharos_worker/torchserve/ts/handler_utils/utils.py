"""Parts of answers, and classes by their names."""

import importlib
import os


def import_class(class_name, module_prefix=None):
    """The class of a name such as `package.module.Class`, of a package if one is given."""
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
    """Sends a part of the answer to each request of `req_id_map` (place in the batch to id): `ret[place]`. What the handler
    returns is the last part."""
    if os.getenv("LOCAL_RANK", "0") != "0":
        return
    if getattr(context, "cl_socket", None) is None:
        raise RuntimeError("there is no server to send a part of an answer to")
    context.cl_socket.send_part(ret, req_id_map, message, code, context)
