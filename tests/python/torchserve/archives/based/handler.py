"""A handler on `BaseHandler` that needs no torch: numbers are doubled."""

from ts.torch_handler.base_handler import BaseHandler


class Doubling(BaseHandler):
    """The steps of `BaseHandler.handle`, each its own."""

    def initialize(self, context):
        """Nothing to load."""
        self.initialized = True
        self.context = context

    def preprocess(self, data):
        """The body's numbers."""
        return [request.get("body", request.get("data")) for request in data]

    def inference(self, data, *args, **kwargs):
        """Doubles them."""
        return [[2 * number for number in numbers] for numbers in data]

    def postprocess(self, data):
        """As they are."""
        return data

    def explain_handle(self, data_preprocess, raw_data):
        """What explains an answer."""
        return [{"explained": numbers} for numbers in data_preprocess]
