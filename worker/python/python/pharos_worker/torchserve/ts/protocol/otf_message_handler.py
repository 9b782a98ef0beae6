"""The place from which older handlers import this. There is no protocol of TorchServe's own here: requests come, and answers
go, over the server's shared memory."""

from ts.handler_utils.utils import send_intermediate_predict_response

__all__ = ["send_intermediate_predict_response"]
