"""Returns the information that a handler gets from its context."""

import os
import sys
import threading


class Facts:
    """Answers with the content of the context."""

    def initialize(self, context):
        """Stores the content of the context at the start."""
        self.dir = context.system_properties.get("model_dir")
        self.first = {
            "model_name": context.model_name,
            "manifest": context.manifest["model"],
            "runtime": context.manifest.get("runtime"),
            "properties": {
                key: str(context.system_properties.get(key))
                for key in sorted(context.system_properties)
                if key != "model_dir"
            },
            "model_dir": os.path.isdir(self.dir),
            "files": sorted(name for name in os.listdir(self.dir) if not name.startswith("__")),
            "yaml": context.model_yaml_config,
            "cwd": os.path.realpath(os.getcwd()) == os.path.realpath(self.dir),
            "path": os.path.realpath(self.dir) in [os.path.realpath(path or ".") for path in sys.path],
            "imported": __name__,
            "main thread": threading.current_thread() is threading.main_thread(),
            "metrics": context.metrics.model_name,
        }

    def handle(self, data, context):
        """Returns the context of a request; for a body "first", the context at the start."""
        return [self.one(place, request, context) for place, request in enumerate(data)]

    def one(self, place, request, context):
        """Returns one answer."""
        if bytes(request.get("body") or b"") == b"first":
            return self.first
        headers = context.get_all_request_header(place)
        return {
            "id": context.get_request_id(place),
            "ids": dict(context.request_ids),
            "X-Test": context.get_request_header(place, "X-Test"),
            "none": context.get_request_header(place, "absent"),
            "body": context.get_request_header(place, "body"),
            "headers": {name: headers[name] for name in sorted(headers) if name.lower() not in ("host", "user-agent")},
            "property": context.request_processor[place].get_request_property("X-Test"),
            "response": context.get_response_headers(place),
            "content_type": context.get_response_content_type(place),
            "status": list(context.get_response_status(place)),
            "names": sorted(request),
        }

    def describe_handle(self):
        """Returns the part of a description that `customized=true` adds."""
        return {"customized": {"of": "facts"}}
