"""Serves models packed for TorchServe: a handler with its model, as a `.mar`, a `.tar.gz` or a directory.

The model has one string input, the body of a request, and one string output, the body of the response;
`torchserve/exchange.py` defines how metadata is passed. A handler gets all requests of a batch at once. If it sends its
responses in parts, the model must be decoupled. If it sets `context.stopping_criteria`, a request is executed repeatedly until
its criterion returns true.
"""

import copy
import logging
import os
import sys
import uuid

import triton_python_backend_utils as pb_utils

from pharos_worker import _native, torchserve
from pharos_worker.driver import Loop
from pharos_worker.runners import files

ENGINE = None
"""The handler for logs and the served configuration; set when a handler is loaded."""
MOST_RUNNING = 10_000
"""The most running requests that a worker remembers for continuous batching."""
DISTRIBUTIONS = {"PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""The distributions of packages whose modules have other names."""
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


class TritonPythonModel:
    """One instance: a handler."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        torchserve.activate()
        from pharos_worker.torchserve import settings

        found = settings.of(pb_utils.get_model_dir(), auto_complete_model_config.as_dict())
        return settings.complete(auto_complete_model_config, found)

    def initialize(self, args):
        torchserve.activate()
        from ts.service import refusal

        from pharos_worker.torchserve import exchange, settings

        global ENGINE
        config = files.configuration(args)
        self.settings = settings.of(pb_utils.get_model_dir(), config)
        self.output = _only(config, "output")
        self.batch = config.get("max_batch_size", 0)
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.iterative = _iterative(config.get("sequence_batching"))
        _enter(self.settings.directory, self.settings.packages)
        self.service = self._load(int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None)
        self.exchange, self.refusal, self.context = exchange, refusal, self.service.context
        self.inbox = exchange.Inbox(_only(config, "input"), self.context, self.settings.decode_input_request)
        self.loop = Loop() if self.service.is_async else None
        # The id and the headers of each request that is executed again, by the key of its sequence, and the ids in use.
        self.running, self.ids = {}, set()
        ENGINE = f"handler '{self.settings.handler}' of TorchServe"

    def _load(self, gpu):
        from ts.model_loader import TsModelLoader

        from pharos_worker.torchserve.server_metrics import ServerMetrics

        given = self.settings
        metrics = ServerMetrics(given.name)
        size = given.batch_size or max(self.batch, 1)
        places = (given.name, given.directory, given.handler, gpu, size, given.envelope or None)
        try:
            service = TsModelLoader().load(*places, given.limit_max_image_pixels, metrics)
        except ModuleNotFoundError as error:
            name = (error.name or "").partition(".")[0]
            command = f"{sys.executable} -m pip install {DISTRIBUTIONS.get(name, name)}"
            raise ModuleNotFoundError(f"{error}, which the handler imports: run '{command}'", name=name) from error
        except MemoryError:
            raise pb_utils.TritonModelException("System out of memory") from None
        except RuntimeError as error:
            if "CUDA" in str(error):
                raise pb_utils.TritonModelException(f"System out of memory: {error}") from error
            raise
        # The configuration has these if the archive does not, or if the model was registered under another name.
        model = service.context.manifest.setdefault("model", {})
        model.setdefault("modelName", given.name)
        model.setdefault("modelVersion", given.version)
        return service

    def execute(self, requests):
        if self.loop is not None:
            for request in requests:
                self.loop.start(self._answer_later(request))
            return None if self.decoupled else [None] * len(requests)
        items = [self._items(request) for request in requests]
        everything = [item for some in items for item in some if not item.refused]
        together = [item for item in everything if not item.alone]
        try:
            for group in [together] + [[item] for item in everything if item.alone]:
                self._run(group)
        except SystemExit as error:
            _leave(error)
        if not self.decoupled:
            return [self.exchange.answer(self.output, self.batch > 0, some) for some in items]
        for some in items:
            self._send_last(some)
        return None

    def _items(self, request):
        known = self.running.get(_native.sequence_key(request))
        if known is not None:
            return [self.inbox.continued(request, *known)]
        items = self.inbox.items(request)
        if self.iterative and len(items) > 1:
            for item in items:
                item.refused = self.exchange.Refused(400, "a request to a model with continuousBatching must have one element")
        for item in items:
            if self.decoupled and not item.refused:
                self._distinguish(item)
        return items

    def _distinguish(self, item):
        """Gives a request another id if its client's is that of a running one: handlers find the state of a request by its id."""
        if item.id in self.ids:
            item.id = str(uuid.uuid4())
        self.ids.add(item.id)

    def _forget(self, item):
        """Forgets a request that is not executed again."""
        self.running.pop(_native.sequence_key(item.request), None)
        self.ids.discard(item.id)

    def _run(self, items):
        """Runs the handler on the items of a batch until each item has its last part."""
        while items:
            processors, ids = [item.processor for item in items], dict(enumerate(item.id for item in items))
            self.context.cl_socket = Parts(self, items)
            try:
                results = self.service.run(processors, [item.data for item in items], ids)
                bodies = [self.exchange.encoded(result) for result in results]
                goes_on = self._goes_on(items, results)
            except Exception as error:
                # For example of a criterion. All requests of the batch fail, and none is executed again.
                refused = self.refusal(error)
                for item in items:
                    item.refused = refused
                    self._forget(item)
                return
            for item, body in zip(items, bodies):
                item.body = body
            items = self._continued(items, goes_on)

    def _goes_on(self, items, results):
        """Returns for each item whether the handler needs another execution of it."""
        criteria = self.context.stopping_criteria
        if not criteria:
            return [False] * len(items)
        stops = [criteria[at](result) for at, result in enumerate(results)]
        if not self.decoupled and not all(stop is None or stop for stop in stops):
            logging.error("a handler with stopping_criteria sends its responses in parts: %s", Parts.NEEDED)
            raise self.exchange.Refused(503, "Prediction failed")
        return [stop is not None and not stop and not item.request.is_cancelled() for item, stop in zip(items, stops)]

    def _continued(self, items, goes_on):
        """Sends a part for each item that continues. Returns the items for the next run of the handler, except those that the
        server executes again."""
        left = []
        for item, again in zip(items, goes_on):
            stream = item.processor.get_response_headers().get("ts_stream_next")
            if not again:
                self._forget(item)
                if stream == "true":
                    item.processor.add_response_property("ts_stream_next", "false")
                item.told = self.exchange.told(item.processor)
                continue
            self._send_part(item, item.body)
            if self.iterative:
                self.running[_native.sequence_key(item.request)] = item.id, item.processor.get_request_properties()
                if len(self.running) > MOST_RUNNING:
                    # The request of a disconnected client, which is never continued.
                    identity, _ = self.running.pop(next(iter(self.running)))
                    self.ids.discard(identity)
                item.request.set_release_flags(AGAIN)
                item.body = None
            else:
                item.data = {}
                left.append(item)
        return left

    def _send_part(self, item, body):
        item.processor.add_response_property("ts_stream_next", "true")
        item.body, item.told = body, self.exchange.told(item.processor)
        response = self.exchange.answer(self.output, self.batch > 0, [item])
        item.request.get_response_sender().send(response)

    def _send_last(self, items):
        if items[0].body is None and items[0].refused is None:
            # The server executes the request again.
            return
        response = self.exchange.answer(self.output, self.batch > 0, items)
        items[0].request.get_response_sender().send(response, FINAL)

    async def _answer_later(self, request):
        """Responds to a request with an `async def` handler, using a separate context for each request."""
        sender = request.get_response_sender()
        try:
            items = self.inbox.items(request)
            for item in items:
                if not item.refused:
                    await self._run_later(item)
            response = self.exchange.answer(self.output, self.batch > 0, items)
        except SystemExit as error:
            _leave(error)
        except Exception:
            logging.exception("failed to send the handler's response")
            refused = self.exchange.Refused(503, "Prediction failed")
            response = pb_utils.InferenceResponse(error=self.exchange.error_of(refused))
        sender.send(response, FINAL)

    async def _run_later(self, item):
        context = copy.copy(self.context)
        context.metrics = copy.copy(self.context.metrics)
        context.cl_socket = Parts(self, [item])
        self.service.begin(context, [item.processor], {0: item.id})
        try:
            results = await self.service.run_async(context, [item.data])
            item.body = self.exchange.encoded(results[0])
        except self.exchange.Refused as refused:
            item.refused = refused
            return
        if item.processor.get_response_headers().get("ts_stream_next") == "true":
            item.processor.add_response_property("ts_stream_next", "false")
        item.told = self.exchange.told(item.processor)


class Parts:
    """Sends the parts of responses for `send_intermediate_predict_response`; the context's `cl_socket`."""

    NEEDED = (
        "the model must be decoupled: 'streaming: true' in model-config.yaml, or 'model_transaction_policy { decoupled: "
        "true }' in config.pbtxt"
    )

    def __init__(self, model, items):
        self._model, self._items = model, items

    def send_part(self, results, places, message, code, context):
        """Sends a part to the requests at these positions of the batch."""
        model = self._model
        if not model.decoupled:
            raise RuntimeError(f"cannot send a response in parts: {self.NEEDED}")
        if results is None or code != 200:
            raise model.exchange.Refused(code if code != 200 else 503, message)
        for place in places:
            item = self._items[place]
            item.processor = context.request_processor[place]
            model._send_part(item, model.exchange.encoded(results[place]))


def _only(config, side):
    names = files.names(config, side)
    if len(names) != 1:
        raise pb_utils.TritonModelException(
            f"a model of the backend torchserve must have one {side}; the configuration has {len(names)}: {', '.join(names)}"
        )
    return names[0]


def _iterative(sequences):
    """Returns whether the configured `sequence_batching` executes requests repeatedly."""
    if sequences is not None and "oldest" not in sequences:
        raise pb_utils.TritonModelException(
            "sequence_batching of a model of the backend torchserve must have the strategy 'oldest': other strategies put "
            "empty requests into batches, which handlers cannot distinguish from others"
        )
    return bool(sequences and sequences.get("iterative_sequence"))


def _enter(directory, packages):
    """Prepares the process as TorchServe does: the working directory is the model's, and the module path begins with it and
    with the installed requirements of the archive. Log messages of the handler are printed."""
    os.chdir(directory)
    first = [directory, *([packages] if packages else [])]
    sys.path[:0] = first
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, torchserve.HOME, *([before] if before else [])])
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)


def _leave(error):
    """Exits the process after `sys.exit` in a handler, as TorchServe does."""
    print(f"the handler exited the process: {error!r}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.code if isinstance(error.code, int) else 1)
