"""Converts requests of the server to the input of a handler, and the handler's results to responses.

TorchServe's endpoints pass metadata of a request in its parameter `torchserve`, a JSON string:
`{"headers": {NAME: VALUE}, "parts": [{"name", "content_type", "length"}, ...], "describe": false, "explain": false}`. A
request of a KServe client lacks the parameter; each of its elements is the body of a separate request to the handler. Metadata
of a response is in the response parameter of the same name: `{"status", "reason", "content_type", "headers"}`.
"""

import io
import json
import logging
import sys
import uuid

import numpy as np
import triton_python_backend_utils as pb_utils
from ts.context import RequestProcessor
from ts.service import Refused

from pharos_worker import _native

logger = logging.getLogger(__name__)

PARAMETER = "torchserve"
_START = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
_END = pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
_CODES = {
    400: pb_utils.TritonError.INVALID_ARG,
    404: pb_utils.TritonError.NOT_FOUND,
    409: pb_utils.TritonError.ALREADY_EXISTS,
    501: pb_utils.TritonError.UNSUPPORTED,
    503: pb_utils.TritonError.UNAVAILABLE,
    507: pb_utils.TritonError.UNAVAILABLE,
}


class Item:
    """A request as the handler sees it."""

    __slots__ = ("request", "id", "data", "processor", "alone", "body", "told", "refused")

    def __init__(self, request, identity, data, headers, alone=False):
        self.request = request
        self.id = identity
        self.data = data
        self.processor = RequestProcessor(headers)
        self.alone = alone
        """Whether to run the request alone: handlers check only the first request of a batch for describe and explain."""
        self.body = None
        self.told = None
        self.refused = None


class Inbox:
    """Converts requests to items."""

    def __init__(self, tensor, context, decode):
        self._tensor = tensor
        self._decode = decode
        self._sequence = (context.header_key_sequence_id, context.header_key_sequence_start, context.header_key_sequence_end)

    def items(self, request):
        """Returns the items of a request: one, or one for each element of a KServe client's request. A malformed request is
        refused alone, so that a client cannot make requests of others fail."""
        try:
            return self._items(request)
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
            item = Item(request, request.request_id(), {}, {})
            item.refused = Refused(400, f"the request's parameter '{PARAMETER}' is malformed: {error!r}")
            return [item]

    def _items(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, self._tensor)
        told = json.loads(request.parameters()).get(PARAMETER)
        if told is None:
            bodies, headers = _native.bodies(tensor), {"body": {"content-type": ""}}
            if not bodies:
                raise ValueError("it is missing, and the request has no element")
            return [self._item(request, {"body": body}, dict(headers)) for body in bodies]
        told = json.loads(told)
        data, headers = self._parts(tensor, told.get("parts") or [])
        headers.update(told.get("headers") or {})
        for flag in ("describe", "explain"):
            if told.get(flag):
                headers[flag] = "True"
        return [self._item(request, data, headers)]

    def continued(self, request, identity, headers):
        """Returns the item of a request that is executed again, without data, which the handler already has."""
        return self._item(request, {}, headers, identity)

    def _item(self, request, data, headers, identity=None):
        identity = identity or request.request_id() or str(uuid.uuid4())
        sequence = request.correlation_id()
        if sequence:
            flags = request.flags()
            names = self._sequence
            headers.setdefault(names[0], str(sequence))
            for flag, name in ((_START, names[1]), (_END, names[2])):
                if flags & flag:
                    headers.setdefault(name, "true")
        alone = headers.get("describe") == "True" or headers.get("explain") == "True"
        return Item(request, identity, data, headers, alone)

    def _parts(self, tensor, parts):
        data, headers = {}, {}
        contents = _native.bodies(tensor, [part["length"] for part in parts])
        for part, content in zip(parts, contents):
            name, kind = part["name"], part.get("content_type") or ""
            data[name] = self._decoded(content, kind)
            headers[name] = {"content-type": kind}
        return data, headers

    def _decoded(self, content, kind):
        try:
            if self._decode and kind == "application/json":
                return json.loads(content.decode())
            if self._decode and kind.startswith("text"):
                return content.decode()
        except (RecursionError, ValueError) as error:
            logger.warning("a part of a request is not valid %s (%s); passing its bytes to the handler", kind, error)
        return content


def encoded(value):
    """Converts a handler's result for a request to the body of a response."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        file = io.BytesIO()
        torch.save(value, file)
        return file.getvalue()
    try:
        return (value if isinstance(value, str) else json.dumps(value, indent=2)).encode()
    except (RecursionError, TypeError, ValueError) as error:
        logger.warning("unsupported result of the handler: %s", error)
        raise Refused(503, "Unsupported model output data type.") from None


def told(processor):
    """Returns the metadata of a response as a JSON string; None if it has only defaults."""
    status, reason = processor.get_response_status_code(), processor.get_response_status_phrase()
    headers = dict(processor.get_response_headers())
    content_type = headers.pop("content-type", None)
    if status in (None, 200) and not reason and not content_type and not headers:
        return None
    return json.dumps({
        "status": 200 if status is None else int(status),
        "reason": reason or "",
        "content_type": content_type or "",
        "headers": {str(name): str(value) for name, value in headers.items()},
    })


def answer(tensor, batched, items):
    """Returns the response to a request, made of its items."""
    refused = next((item.refused for item in items if item.refused), None)
    if refused:
        return pb_utils.InferenceResponse(error=error_of(refused))
    bodies = np.empty((len(items), 1) if batched else (1,), np.object_)
    bodies.flat = [item.body for item in items]
    beside = {PARAMETER: items[0].told} if items[0].told else None
    return pb_utils.InferenceResponse([pb_utils.Tensor(tensor, bodies)], None, beside)


def error_of(refused):
    """Converts a refusal to a server error, whose message carries the HTTP status unless it is 503."""
    code = refused.code
    text = refused.message if code == 503 else f"HTTP {code}: {refused.message}"
    known = _CODES.get(code, pb_utils.TritonError.INVALID_ARG if 400 <= code < 500 else pb_utils.TritonError.INTERNAL)
    return pb_utils.TritonError(str(text), known)
