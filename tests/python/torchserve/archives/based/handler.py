"""A handler on `BaseHandler` that does not need torch: doubles numbers."""

from ts.torch_handler.base_handler import BaseHandler


class Doubling(BaseHandler):
    """Overrides each step of `BaseHandler.handle`."""

    def initialize(self, context):
        """Loads nothing."""
        self.initialized = True
        self.context = context

    def preprocess(self, data):
        """Returns the numbers in the body."""
        return [request.get("body", request.get("data")) for request in data]

    def inference(self, data, *args, **kwargs):
        """Doubles them."""
        return [[2 * number for number in numbers] for numbers in data]

    def postprocess(self, data):
        """Returns the numbers unchanged."""
        return data

    def explain_handle(self, data_preprocess, raw_data):
        """Returns the explanation of an answer."""
        return [{"explained": numbers} for numbers in data_preprocess]
