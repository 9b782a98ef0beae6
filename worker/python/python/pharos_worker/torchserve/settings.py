"""The settings of a model from its configuration and its archive."""

import dataclasses
import os

from pharos_worker.runners import files
from pharos_worker.torchserve import archive

# The keys of model-config.yaml that configure the server, and their types.
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
"""Keys that have no effect for a model in an ordinary repository."""
LIMITS = {
    "responseTimeout": "torchserve_response_timeout",
    "startupTimeout": "torchserve_startup_timeout",
    "maxRetryTimeoutInSec": "torchserve_max_retry_timeout",
}
"""The server's parameters for these keys, in seconds."""
STREAMS = b"send_intermediate_predict_response"
DELAY_MS = 100
QUEUE = 100
FOR_EVER_MS = 365 * 24 * 3_600_000


@dataclasses.dataclass
class Settings:
    """The settings of a model."""

    directory: str
    """The directory of the archive's files."""
    manifest: dict
    """The manifest; empty if the archive has none."""
    lock: object = None
    """The lock that keeps an unpacked archive from being removed."""
    handler: str = ""
    name: str = ""
    version: str = ""
    envelope: str = ""
    limit_max_image_pixels: bool = True
    decode_input_request: bool = True
    batch_size: int = 0
    """The batch size reported to handlers; 0 for the configured `max_batch_size`."""
    packages: str = ""
    """The directory of the archive's installed requirements, if they are not beside its files."""


def of(version, config):
    """Returns the settings of the model in a version's directory; the configuration overrides the archive."""
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
    """Returns the keys of model-config.yaml that configure the server. Reports and skips values of the wrong type."""
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
            print(f"model-config.yaml: {name} is {value!r}, but must be {kind.__name__}; ignored")
    for name in NO_EFFECT:
        if given.get(name):
            print(f"model-config.yaml: {name} has no effect in the server's model repository")
    return keys


def streams(directory):
    """Returns whether code in an archive streams responses."""
    for folder, _, names in os.walk(directory):
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as file:
                    if STREAMS in file.read():
                        return True
    return False


def complete(config, settings):
    """Completes a `ModelConfig` from an archive."""
    keys, given = frontend_keys(settings), config.as_dict()
    parameters = {LIMITS[name]: str(keys[name]) for name in LIMITS if keys.get(name)}
    if not given["input"] and not given["output"] and not given["max_batch_size"]:
        size = max(keys.get("batchSize", 1), 1)
        if overlaps(keys):
            # As in TorchServe, a running stream leaves room for the next request of its sequence.
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
    """Sets the number and the devices of workers as TorchServe does: on the CPUs, or on the named GPUs if all of them exist.
    The server applies this if its configuration has no instance groups."""
    group["count"] = max(keys.get("minWorkers", 1), 1)
    device, ids, here = keys.get("deviceType"), keys.get("deviceIds"), group.get("gpus") or []
    if device not in (None, "cpu", "gpu"):
        print(f"model-config.yaml: deviceType is {device!r}, but must be cpu or gpu; ignored")
    if device == "cpu":
        group["kind"], group["gpus"] = "KIND_CPU", []
    elif ids and here:
        if all(gpu in here for gpu in ids):
            group["gpus"] = list(dict.fromkeys(ids))
        else:
            print(f"model-config.yaml: deviceIds is {ids!r}, but the available GPUs are {here}; ignored")


def overlaps(keys):
    """Returns whether a request of a sequence may enter the batch while the previous one is still streaming."""
    return bool(keys.get("sequenceBatching") and keys.get("continuousBatching"))


def scheduling(keys, batch):
    """Returns the scheduler: the dynamic batcher or the sequence batcher."""
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
    # A batch of one request does not wait for others.
    delay = delay if batch > 1 else 0
    return {"dynamic_batching": {"max_queue_delay_microseconds": delay, "default_queue_policy": policy}}


def sequences(keys):
    """Returns the parameters for TorchServe's sequences: START is optional, and without a free slot they are refused."""
    more = {"overlapping_sequences": "true"} if overlaps(keys) else {}
    return more | {
        "implicit_sequence_start": "true",
        "max_queued_sequences": "none",
        "max_queue_size_per_sequence": str(keys.get("maxSequenceJobQueueSize", 1)),
    }
