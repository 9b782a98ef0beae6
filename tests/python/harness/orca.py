"""Load reports (ORCA): reads the response header in each form, and the protobuf messages of `proto/xds`."""

import base64
import json

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

REQUEST = "endpoint-load-metrics-format"
RESPONSE = "endpoint-load-metrics"
TRAILER = "endpoint-load-metrics-bin"
STREAM = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
FIELDS = {"cpu_utilization": 1, "mem_utilization": 2, "rps_fractional": 6, "eps": 7, "application_utilization": 9}
"""The numbers of the fields of type double, from xds/data/orca/v3/orca_load_report.proto of github.com/cncf/xds."""
NAMED = ("utilization", "executing_requests", "waiting_requests", "execution_slots", "queue_duration_seconds")
"""The named metrics of a model."""


def message_class():
    """Returns the class of `xds.data.orca.v3.OrcaLoadReport`."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="orca_load_report.proto", package="xds.data.orca.v3", syntax="proto3")
    report = file.message_type.add(name="OrcaLoadReport")
    for name, number in FIELDS.items():
        report.field.add(name=name, number=number, type=kinds.TYPE_DOUBLE, label=kinds.LABEL_OPTIONAL)
    entry = report.nested_type.add(name="NamedMetricsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=kinds.TYPE_DOUBLE, label=kinds.LABEL_OPTIONAL)
    nested = ".xds.data.orca.v3.OrcaLoadReport.NamedMetricsEntry"
    report.field.add(
        name="named_metrics", number=8, type=kinds.TYPE_MESSAGE, label=kinds.LABEL_REPEATED, type_name=nested
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("xds.data.orca.v3.OrcaLoadReport"))


OrcaLoadReport = message_class()


def from_message(data: bytes) -> dict:
    """Returns the fields of an encoded message; those with the value 0 are not in it."""
    report = OrcaLoadReport.FromString(data)
    return json_format.MessageToDict(report, preserving_proto_field_name=True)


def from_header(value: str) -> dict:
    """Returns the fields of a response header in any form."""
    form, _, text = value.partition(" ")
    if form == "JSON":
        return json.loads(text)
    if form == "BIN":
        return from_message(base64.b64decode(text, validate=True))
    assert form == "TEXT", value
    report = {"named_metrics": {}}
    for pair in text.split(","):
        name, _, number = pair.partition("=")
        outer, _, inner = name.partition(".")
        if inner:
            report[outer][inner] = float(number)
        else:
            report[name] = float(number)
    return report
