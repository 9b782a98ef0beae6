"""The import path used by older handlers. TorchServe's own protocol is not implemented: requests and responses are exchanged
through the server's shared memory."""

from ts.handler_utils.utils import send_intermediate_predict_response

__all__ = ["send_intermediate_predict_response"]
