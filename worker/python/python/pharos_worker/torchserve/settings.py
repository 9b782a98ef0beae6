"""What a model's configuration and its archive say about how it is run."""

import dataclasses
import os

from pharos_worker.runners import files
from pharos_worker.torchserve import archive

# Keys of model-config.yaml that say something to the server, with the types that are understood.
KEYS = {
    "minWorkers": int,
    "deviceType": str,
    "deviceIds": list,
    "batchSize": int,
    "maxBatchDelay": int,
    "jobQueueSize": int,
    "clientTimeoutInMills": int,
    "responseTimeout": int,
    "startupTimeout": int,
    "maxRetryTimeoutInSec": int,
    "maxNumSequence": int,
    "maxSequenceJobQueueSize": int,
    "sequenceMaxIdleMSec": int,
    "sequenceBatching": bool,
    "continuousBatching": bool,
    "streaming": bool,
}
NO_EFFECT = ("useJobTicket", "useVenv", "parallelType", "parallelLevel", "torchrun", "sequenceTimeoutMSec")
"""Keys that the server does nothing about where a model lies in an ordinary repository."""
LIMITS = {
    "responseTimeout": "torchserve_response_timeout",
    "startupTimeout": "torchserve_startup_timeout",
    "maxRetryTimeoutInSec": "torchserve_max_retry_timeout",
}
"""The parameters by which the server knows these keys, in seconds."""
STREAMS = b"send_intermediate_predict_response"
DELAY_MS = 100
QUEUE = 100
FOR_EVER_MS = 365 * 24 * 3_600_000


@dataclasses.dataclass
class Settings:
    """Of one model."""

    directory: str
    """Where the files of the archive are."""
    manifest: dict
    """Its manifest; empty if it has none."""
    lock: object = None
    """What keeps an unpacked archive where it is."""
    handler: str = ""
    name: str = ""
    version: str = ""
    envelope: str = ""
    limit_max_image_pixels: bool = True
    decode_input_request: bool = True
    batch_size: int = 0
    """What handlers are given as the batch size; 0: the `max_batch_size` of the configuration."""
    packages: str = ""
    """Where what the archive requires is installed, if not beside its files."""


def of(version, config):
    """The settings of the model in a version's directory; parameters of the configuration before the archive."""
    from ts import model_loader

    directory, lock = archive.unpacked(version)
    manifest = model_loader.read_manifest(directory) or {}
    model = manifest.get("model") or {}
    return Settings(
        directory=directory,
        manifest=manifest,
        lock=lock,
        handler=files.parameter(config, "torchserve_handler") or model.get("handler", ""),
        name=files.parameter(config, "torchserve_model_name") or config.get("name", ""),
        version=files.parameter(config, "torchserve_model_version") or model.get("modelVersion", ""),
        envelope=files.parameter(config, "torchserve_envelope"),
        limit_max_image_pixels=files.switch(config, "torchserve_limit_max_image_pixels", True),
        decode_input_request=files.switch(config, "torchserve_decode_input_request", True),
        batch_size=files.number(config, "torchserve_batch_size") or 0,
        packages=files.parameter(config, "torchserve_packages"),
    )


def frontend_keys(settings):
    """What model-config.yaml says to the server. What is of another type than it should be is told and left out."""
    from ts import service

    given = service.yaml_config(settings.directory, settings.manifest)
    keys = {}
    for name, kind in KEYS.items():
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            keys[name] = value
        else:
            print(f"model-config.yaml: {name} is {value!r}, it must be {kind.__name__}; it is left out")
    for name in NO_EFFECT:
        if given.get(name):
            print(f"model-config.yaml: {name} has no effect in a repository of the server's own form")
    return keys


def streams(directory):
    """Whether code in an archive sends parts of answers."""
    for folder, _, names in os.walk(directory):
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as file:
                    if STREAMS in file.read():
                        return True
    return False


def complete(config, settings):
    """Fills in a `ModelConfig` by what an archive says."""
    keys, given = frontend_keys(settings), config.as_dict()
    parameters = {LIMITS[name]: str(keys[name]) for name in LIMITS if keys.get(name)}
    if not given["input"] and not given["output"] and not given["max_batch_size"]:
        size = max(keys.get("batchSize", 1), 1)
        if overlaps(keys):
            # As in TorchServe: a running stream leaves room for the next request of its sequence.
            parameters["torchserve_batch_size"], size = str(size), size * 2
        config.set_max_batch_size(size)
    if not given["input"]:
        config.add_input({"name": "data", "data_type": "TYPE_STRING", "dims": [1]})
    if not given["output"]:
        config.add_output({"name": "prediction", "data_type": "TYPE_STRING", "dims": [1]})
    if not any(name in given for name in ("dynamic_batching", "sequence_batching", "ensemble_scheduling")):
        given.update(scheduling(keys, given["max_batch_size"]))
        if keys.get("sequenceBatching"):
            parameters.update(sequences(keys))
    for name, value in parameters.items():
        given.setdefault("parameters", {}).setdefault(name, {"string_value": value})
    continuous = keys.get("continuousBatching", False)
    streaming = keys.get("streaming", continuous or streams(settings.directory))
    if streaming and not given.get("model_transaction_policy"):
        config.set_model_transaction_policy({"decoupled": True})
    if given.get("instance_group"):
        place(keys, given["instance_group"][0])
    return config


def place(keys, group):
    """How many workers there are and where: as TorchServe does, on the processors or on the GPUs that are named if all of them
    are there. The server takes that over where its configuration has no groups."""
    group["count"] = max(keys.get("minWorkers", 1), 1)
    device, ids, here = keys.get("deviceType"), keys.get("deviceIds"), group.get("gpus") or []
    if device not in (None, "cpu", "gpu"):
        print(f"model-config.yaml: deviceType is {device!r}, it must be cpu or gpu; it is left out")
    if device == "cpu":
        group["kind"], group["gpus"] = "KIND_CPU", []
    elif ids and here:
        if all(gpu in here for gpu in ids):
            group["gpus"] = list(dict.fromkeys(ids))
        else:
            print(f"model-config.yaml: deviceIds is {ids!r}, the GPUs that it may have are {here}; it is left out")


def overlaps(keys):
    """Whether a request of a sequence may enter the batch while the one before it is still streamed."""
    return bool(keys.get("sequenceBatching") and keys.get("continuousBatching"))


def scheduling(keys, batch):
    """How requests wait: as batches, or by the sequences that they belong to."""
    if keys.get("continuousBatching") and not overlaps(keys):
        return {"sequence_batching": {"iterative_sequence": True, "oldest": {"max_candidate_sequences": max(batch, 1)}}}
    delay = keys.get("maxBatchDelay", DELAY_MS) * 1000
    if keys.get("sequenceBatching"):
        idle = keys.get("sequenceMaxIdleMSec", 0) or FOR_EVER_MS
        most = max(keys.get("maxNumSequence", 1), keys.get("batchSize", 1) if overlaps(keys) else batch, 1)
        oldest = {"max_candidate_sequences": most, "max_queue_delay_microseconds": 0 if overlaps(keys) else delay}
        batching = {"max_sequence_idle_microseconds": idle * 1000, "oldest": oldest}
        if overlaps(keys):
            batching["iterative_sequence"] = True
        return {"sequence_batching": batching}
    policy = {"max_queue_size": keys.get("jobQueueSize", QUEUE)}
    if keys.get("clientTimeoutInMills"):
        limit = keys["clientTimeoutInMills"] * 1000
        policy |= {"timeout_action": "REJECT", "default_timeout_microseconds": limit, "allow_timeout_override": True}
    # A batch of one waits for nobody.
    delay = delay if batch > 1 else 0
    return {"dynamic_batching": {"max_queue_delay_microseconds": delay, "default_queue_policy": policy}}


def sequences(keys):
    """Parameters by which sequences are as in TorchServe: no START is asked for, and one without a place is refused."""
    more = {"overlapping_sequences": "true"} if overlaps(keys) else {}
    return more | {
        "implicit_sequence_start": "true",
        "max_queued_sequences": "none",
        "max_queue_size_per_sequence": str(keys.get("maxSequenceJobQueueSize", 1)),
    }
