"""The context of a handler: its model, the requests of the batch, and the metadata of their responses."""

import os


class Context:
    """The context of a loaded model. The state of a batch is replaced for each batch."""

    def __init__(
        self,
        model_name,
        model_dir,
        manifest,
        batch_size,
        gpu,
        mms_version,
        limit_max_image_pixels=True,
        metrics=None,
        model_yaml_config=None,
    ):
        self.model_name = model_name
        self.manifest = manifest
        self._system_properties = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        self.request_ids = None
        self.request_processor = None
        self.metrics = metrics
        self.model_yaml_config = model_yaml_config
        self.stopping_criteria = None
        self.cl_socket = None
        self.header_key_sequence_id = os.getenv("TS_REQUEST_SEQUENCE_ID", "ts_request_sequence_id")
        self.header_key_sequence_start = os.getenv("TS_REQUEST_SEQUENCE_START", "ts_request_sequence_start")
        self.header_key_sequence_end = os.getenv("TS_REQUEST_SEQUENCE_END", "ts_request_sequence_end")

    @property
    def system_properties(self):
        """The location of the model and its settings."""
        return self._system_properties

    def get_request_id(self, idx=0):
        """Returns the id of a request of the batch; None if there is no such request."""
        return None if self.request_ids is None else self.request_ids.get(idx)

    def get_request_header(self, idx, key):
        """Returns a header of a request; None if it is missing."""
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx):
        """Returns the headers of a request as a dictionary."""
        return self.request_processor[idx].get_request_properties()

    def set_response_content_type(self, idx, value):
        """Sets the content type of a response."""
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx):
        """Returns the content type of a response."""
        return self.get_response_headers(idx).get("content-type")

    def get_response_status(self, idx):
        """Returns the status and the reason phrase of a response."""
        processor = self.request_processor[idx]
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    def set_response_status(self, code=200, phrase="", idx=0):
        """Sets the status of a response."""
        if self.request_processor is not None and self.request_processor[idx] is not None:
            self.request_processor[idx].report_status(code, reason_phrase=phrase)

    def set_all_response_status(self, code=200, phrase=""):
        """Sets the status of all responses of the batch."""
        for processor in self.request_processor:
            processor.report_status(code, reason_phrase=phrase)

    def get_response_headers(self, idx):
        """Returns the headers set for a response as a dictionary."""
        return self.request_processor[idx].get_response_headers()

    def set_response_header(self, idx, key, value):
        """Sets a header of a response."""
        self.request_processor[idx].add_response_property(key, value)

    def get_sequence_id(self, idx):
        """Returns the id of the sequence of a request."""
        return self.request_processor[idx].get_request_property(self.header_key_sequence_id)

    def __eq__(self, other):
        return isinstance(other, Context) and self.__dict__ == other.__dict__

    __hash__ = None


class RequestProcessor:
    """The headers of a request, and the metadata of its response."""

    def __init__(self, request_header):
        self._request_header = request_header
        self._response_header = {}
        self._status_code = 200
        self._reason_phrase = None

    def get_request_property(self, key):
        """Returns a header of the request; the name is not case-sensitive."""
        value = self._request_header.get(key)
        if value is None and key:
            wanted = key.lower()
            return next((value for name, value in self._request_header.items() if name.lower() == wanted), None)
        return value

    def get_request_properties(self):
        """Returns all headers of the request."""
        return self._request_header

    def report_status(self, code, reason_phrase=None):
        """Sets the status of the response."""
        self._status_code = code
        self._reason_phrase = reason_phrase

    def get_response_status_code(self):
        """Returns the status of the response."""
        return self._status_code

    def get_response_status_phrase(self):
        """Returns the reason phrase of the response."""
        return self._reason_phrase

    def add_response_property(self, key, value):
        """Sets a header of the response."""
        self._response_header[key] = value

    def get_response_headers(self):
        """Returns all headers of the response."""
        return self._response_header

    def get_response_header(self, key):
        """Returns a header of the response."""
        return self._response_header.get(key)
