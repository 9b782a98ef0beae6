"""TorchServe's gRPC messages, derived from the bytes of its clients: field numbers and types, without generated code."""

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, empty_pb2, message_factory

TYPES = {"text": 9, "bytes": 12, "int": 5, "bool": 8}
PACKAGES = {"inference": "org.pytorch.serve.grpc.inference", "management": "org.pytorch.serve.grpc.management"}

MESSAGES = {
    "inference": {
        "PredictionsRequest": [
            ("model_name", 1, "text"),
            ("model_version", 2, "text"),
            ("input", 3, "map"),
            ("sequence_id", 4, "text"),
        ],
        "PredictionResponse": [("prediction", 1, "bytes"), ("sequence_id", 2, "text")],
        "TorchServeHealthResponse": [("health", 1, "text")],
    },
    "management": {
        "ManagementResponse": [("msg", 1, "text")],
        "DescribeModelRequest": [("model_name", 1, "text"), ("model_version", 2, "text"), ("customized", 3, "bool")],
        "ListModelsRequest": [("limit", 1, "int"), ("next_page_token", 2, "int")],
        "RegisterModelRequest": [
            ("batch_size", 1, "int"),
            ("handler", 2, "text"),
            ("initial_workers", 3, "int"),
            ("max_batch_delay", 4, "int"),
            ("model_name", 5, "text"),
            ("response_timeout", 6, "int"),
            ("runtime", 7, "text"),
            ("synchronous", 8, "bool"),
            ("url", 9, "text"),
            ("s3_sse_kms", 10, "bool"),
            ("startup_timeout", 11, "int"),
        ],
        "ScaleWorkerRequest": [
            ("model_name", 1, "text"),
            ("model_version", 2, "text"),
            ("max_worker", 3, "int"),
            ("min_worker", 4, "int"),
            ("number_gpu", 5, "int"),
            ("synchronous", 6, "bool"),
            ("timeout", 7, "int"),
        ],
        "SetDefaultRequest": [("model_name", 1, "text"), ("model_version", 2, "text")],
        "UnregisterModelRequest": [("model_name", 1, "text"), ("model_version", 2, "text")],
    },
}

CALLS = {
    "Ping": ("inference", None, "TorchServeHealthResponse"),
    "Predictions": ("inference", "PredictionsRequest", "PredictionResponse"),
    "StreamPredictions": ("inference", "PredictionsRequest", "PredictionResponse"),
    "DescribeModel": ("management", "DescribeModelRequest", "ManagementResponse"),
    "ListModels": ("management", "ListModelsRequest", "ManagementResponse"),
    "RegisterModel": ("management", "RegisterModelRequest", "ManagementResponse"),
    "ScaleWorker": ("management", "ScaleWorkerRequest", "ManagementResponse"),
    "SetDefault": ("management", "SetDefaultRequest", "ManagementResponse"),
    "UnregisterModel": ("management", "UnregisterModelRequest", "ManagementResponse"),
}
SERVICES = {"inference": "InferenceAPIsService", "management": "ManagementAPIsService"}
TIMEOUT_S = 60


def pool():
    """Returns a separate descriptor pool with all messages."""
    made = descriptor_pool.DescriptorPool()
    for name, messages in MESSAGES.items():
        file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package=PACKAGES[name], syntax="proto3")
        for message, fields in messages.items():
            describe(file.message_type.add(name=message), fields, f".{PACKAGES[name]}.{message}")
        made.Add(file)
    return made


def describe(message, fields: list, full_name: str):
    """Adds a message's fields; a map is a list of entries."""
    for name, number, kind in fields:
        if kind != "map":
            message.field.add(name=name, number=number, type=TYPES[kind], label=1)
            continue
        entry = message.nested_type.add(name="InputEntry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=TYPES["text"], label=1)
        entry.field.add(name="value", number=2, type=TYPES["bytes"], label=1)
        message.field.add(name=name, number=number, type=11, label=3, type_name=f"{full_name}.InputEntry")


POOL = pool()


def message_class(listener: str, name: str | None):
    """Returns the class of a message."""
    if name is None:
        return empty_pb2.Empty
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGES[listener]}.{name}"))


def call(address_of, asked) -> dict:
    """Makes a call; returns its status with the answers, or with the details of the error."""
    listener, request, response = CALLS[asked.call]
    path = f"/{PACKAGES[listener]}.{SERVICES[listener]}/{asked.call}"
    answers = []
    with grpc.insecure_channel(address_of(f"grpc_{listener}")) as channel:
        encoders = (message_class(listener, request).SerializeToString, message_class(listener, response).FromString)
        made = message_class(listener, request)(**asked.request)
        metadata = list(asked.metadata)
        try:
            if asked.call == "StreamPredictions":
                for answer in channel.unary_stream(path, *encoders)(made, timeout=TIMEOUT_S, metadata=metadata):
                    answers.append(plain(answer))
            else:
                answers.append(plain(channel.unary_unary(path, *encoders)(made, timeout=TIMEOUT_S, metadata=metadata)))
        except grpc.RpcError as error:
            return {"status": error.code().name, "error": error.details(), "answers": answers}
    return {"status": "OK", "answers": answers}


def plain(answer) -> dict:
    """Returns the fields that a message has set."""
    text = lambda value: value.decode(errors="backslashreplace") if isinstance(value, bytes) else value  # noqa: E731
    return {field.name: text(value) for field, value in answer.ListFields()}
