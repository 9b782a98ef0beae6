"""Which request is allowed on which listener with which credential, as tables. `test_access_walk.py` sends the requests.

A route row has a method, a path, the route as `enum Route` names it, the part of the protocol as `--http-restricted-api`
names it, and the status of an allowed request (`*`: any answer of the handler). Rows are sent in this order, so that a
region is registered before it is read."""

from dataclasses import dataclass, replace

# The class of each part. Routes that load models have the class `load`, the renewal of TorchServe's keys has `renew`.
# Reflection is in no restricted part, as in Triton.
CLASSES = {
    "health": "health",
    "metadata": "use", "inference": "use", "shared-memory": "use", "model-config": "use", "statistics": "use",
    "load-report": "use",
    "model-repository": "manage", "trace": "manage", "logging": "manage",
    "open": "open", "unknown": "unknown",
}  # fmt: skip

HTTP = """
GET     /                                        Live                          health            200
GET     /v1/models                               Models                        inference         200
GET     /openai/v1/models                        Models                        inference         200
GET     /openai/v1/models/m                      ModelReady                    health            200
GET     /v1/models/m                             ModelReady                    health            200
POST    /v1/models/m                             ModelReady                    health            404
GET     /v1/models/m/versions/1                  ModelReady                    health            200
POST    /v1/models/m/versions/1                  ModelReady                    health            404
POST    /v1/models/m:predict                     Infer                         inference         200
GET     /v1/models/m:predict                     Infer                         inference         404
POST    /v1/models/m%3Apredict                   Infer                         inference         200
GET     /v1/models/m%3Apredict                   Infer                         inference         404
POST    /v1/models/m/versions/1:predict          Infer                         inference         200
GET     /v1/models/m/versions/1:predict          Infer                         inference         *
POST    /v1/chat/completions                     ChatCompletion                inference         400
POST    /v1/completions                          Completion                    inference         400
POST    /openai/v1/chat/completions              ChatCompletion                inference         400
POST    /openai/v1/completions                   Completion                    inference         400
POST    /v1/embeddings                           Embeddings                    inference         400
POST    /openai/v1/embeddings                    Embeddings                    inference         400
POST    /rerank                                  Rerank                        inference         400
POST    /v1/rerank                               Rerank                        inference         400
POST    /openai/v1/rerank                        Rerank                        inference         400
POST    /score                                   Score                         inference         400
POST    /v1/score                                Score                         inference         400
POST    /openai/v1/score                         Score                         inference         400
POST    /tokenize                                Tokenize                      inference         400
POST    /v1/tokenize                             Tokenize                      inference         400
POST    /openai/v1/tokenize                      Tokenize                      inference         400
POST    /classify                                Classify                      inference         400
POST    /v1/classify                             Classify                      inference         400
POST    /openai/v1/classify                      Classify                      inference         400
POST    /embed                                   Embeddings                    inference         422
POST    /embed_all                               Embeddings                    inference         501
POST    /embed_sparse                            Embeddings                    inference         501
POST    /                                        Embeddings                    inference         422
POST    /predict                                 Classify                      inference         422
POST    /similarity                              Score                         inference         422
POST    /decode                                  Detokenize                    inference         422
GET     /info                                    Models                        inference         422
POST    /detokenize                              Detokenize                    inference         400
POST    /v1/detokenize                           Detokenize                    inference         400
POST    /openai/v1/detokenize                    Detokenize                    inference         400
POST    /predictions/m/v1/chat/completions       ChatCompletion                inference         400
POST    /predictions/m/1/v1/chat/completions     ChatCompletion                inference         400
POST    /predictions/m/v1/completions            Completion                    inference         400
POST    /predictions/m/1/v1/completions          Completion                    inference         400
POST    /predictions/m/v1/embeddings             Embeddings                    inference         400
POST    /predictions/m/1/v1/embeddings           Embeddings                    inference         400
GET     /predictions/m/v1/models                 Models                        inference         200
GET     /predictions/m/1/v1/models               Models                        inference         200
GET     /health                                  Ready                         health            200
GET     /health/ready                            Ready                         health            200
POST    /v1/responses                            Response                      inference         400
POST    /openai/v1/responses                     Response                      inference         400
GET     /v1/responses/r                          StoredResponse                inference         404
DELETE  /v1/responses/r                          StoredResponse                inference         404
POST    /v1/responses/r/cancel                   StoredResponse                inference         404
GET     /v1/responses/r/input_items              StoredResponse                inference         404
GET     /openai/v1/responses/r                   StoredResponse                inference         404
DELETE  /openai/v1/responses/r                   StoredResponse                inference         404
POST    /openai/v1/responses/r/cancel            StoredResponse                inference         404
GET     /openai/v1/responses/r/input_items       StoredResponse                inference         404
POST    /v1/moderations                          Infer                         inference         404
POST    /v1/images/generations                   Infer                         inference         404
POST    /v1/images/edits                         Infer                         inference         404
POST    /v1/images/variations                    Infer                         inference         404
POST    /v1/audio/speech                         Infer                         inference         404
POST    /v1/audio/transcriptions                 Infer                         inference         404
POST    /v1/audio/translations                   Infer                         inference         404
GET     /v2                                      ServerMetadata                metadata          200
GET     /v2/health/live                          Live                          health            200
GET     /v2/health/ready                         Ready                         health            200
GET     /v2/models/stats                         ModelStatistics               statistics        200
GET     /v2/models/m                             ModelMetadata                 metadata          200
GET     /v2/models/m/versions/1                  ModelMetadata                 metadata          200
GET     /v2/models/m/ready                       ModelReady                    health            200
GET     /v2/models/m/versions/1/ready            ModelReady                    health            200
GET     /v2/models/m/config                      ModelConfig                   model-config      200
GET     /v2/models/m/versions/1/config           ModelConfig                   model-config      200
GET     /v2/models/m/stats                       ModelStatistics               statistics        200
GET     /v2/models/m/versions/1/stats            ModelStatistics               statistics        200
POST    /v2/models/m/infer                       Infer                         inference         200
POST    /v2/models/m/versions/1/infer            Infer                         inference         200
POST    /v2/models/m/generate                    Generate                      inference         200
POST    /v2/models/m/versions/1/generate         Generate                      inference         200
POST    /v2/models/m/generate_stream             GenerateStream                inference         200
POST    /v2/models/m/versions/1/generate_stream  GenerateStream                inference         200
POST    /v2/repository/index                     RepositoryIndex               model-repository  200
POST    /v2/repository/somewhere/index           RepositoryIndex               model-repository  200
POST    /v2/repository/somewhere/models/other/load  RepositoryLoad             model-repository  501
POST    /v2/repository/models/other/load         RepositoryLoad                model-repository  200
POST    /v2/repository/models/other%2Fload       RepositoryLoad                model-repository  *
POST    /v2/repository/models/other/%6coad       RepositoryLoad                model-repository  *
POST    /v2/repository/models/x/../other/load    RepositoryLoad                model-repository  *
POST    /v2/repository/models/other/unload       RepositoryUnload              model-repository  200
POST    /v1/load_lora_adapter                    RepositoryLoad                model-repository  400
POST    /openai/v1/load_lora_adapter             RepositoryLoad                model-repository  400
POST    /v1/unload_lora_adapter                  RepositoryUnload              model-repository  400
POST    /openai/v1/unload_lora_adapter           RepositoryUnload              model-repository  400
POST    /sleep                                   RepositoryUnload              model-repository  400
POST    /v1/sleep                                RepositoryUnload              model-repository  400
POST    /openai/v1/sleep                         RepositoryUnload              model-repository  400
POST    /wake_up                                 RepositoryLoad                model-repository  400
POST    /v1/wake_up                              RepositoryLoad                model-repository  400
POST    /openai/v1/wake_up                       RepositoryLoad                model-repository  400
GET     /is_sleeping                             RepositoryIndex               model-repository  400
GET     /v1/is_sleeping                          RepositoryIndex               model-repository  400
GET     /openai/v1/is_sleeping                   RepositoryIndex               model-repository  400
GET     /v2/systemsharedmemory/status            SystemSharedMemoryStatus      shared-memory     200
POST    /v2/systemsharedmemory/region/r/register    SystemSharedMemoryRegister    shared-memory  200
GET     /v2/systemsharedmemory/region/r/status   SystemSharedMemoryStatus      shared-memory     200
POST    /v2/systemsharedmemory/region/r/unregister  SystemSharedMemoryUnregister  shared-memory  200
POST    /v2/systemsharedmemory/unregister        SystemSharedMemoryUnregister  shared-memory     200
GET     /v2/cudasharedmemory/status              CudaSharedMemoryStatus        shared-memory     200
POST    /v2/cudasharedmemory/region/r/register   CudaSharedMemoryRegister      shared-memory     400
GET     /v2/cudasharedmemory/region/r/status     CudaSharedMemoryStatus        shared-memory     *
POST    /v2/cudasharedmemory/region/r/unregister CudaSharedMemoryUnregister    shared-memory     200
POST    /v2/cudasharedmemory/unregister          CudaSharedMemoryUnregister    shared-memory     200
GET     /v2/trace/setting                        TraceSetting                  trace             200
POST    /v2/trace/setting                        TraceSetting                  trace             200
GET     /v2/models/m/trace/setting               TraceSetting                  trace             200
POST    /v2/models/m/trace/setting               TraceSetting                  trace             200
GET     /v2/logging                              LogSettings                   logging           200
POST    /v2/logging                              LogSettings                   logging           200
GET     /metrics                                 Unknown                       unknown           404
GET     /dashboard                               Unknown                       unknown           404
GET     /v2/models                               Unknown                       unknown           404
GET     /v3                                      Unknown                       unknown           404
POST    /inference.GRPCInferenceService/RepositoryModelLoad  Unknown           unknown           404
"""

METRICS = """
GET     /metrics                                 Metrics                       open              200
GET     /dashboard                               Unknown                       open              200
GET     /dashboard/style.css                     Unknown                       open              200
GET     /dashboard/measure.js                    Unknown                       open              200
GET     /dashboard/charts.js                     Unknown                       open              200
GET     /dashboard/streams.js                    Unknown                       open              200
GET     /dashboard/usage.js                      Unknown                       open              200
GET     /dashboard/events.js                     Unknown                       open              200
GET     /dashboard/demand.js                     Unknown                       open              200
GET     /dashboard/view.js                       Unknown                       open              200
POST    /v2/repository/index                     Unknown                       unknown           404
POST    /v2/repository/models/other/load         Unknown                       unknown           404
GET     /v2/logging                              Unknown                       unknown           404
GET     /v2/health/live                          Unknown                       unknown           404
"""

SAGEMAKER = """
GET     /ping                                    Ready                         health            200
POST    /invocations                             Infer                         inference         200
GET     /models                                  RepositoryIndex               model-repository  200
POST    /models                                  RepositoryLoad                model-repository  *
GET     /models/id                               RepositoryIndex               model-repository  404
DELETE  /models/id                               RepositoryUnload              model-repository  404
POST    /models/id/invoke                        Infer                         inference         404
POST    /v2/repository/models/other/load         Unknown                       unknown           400
GET     /v2/logging                              Unknown                       unknown           400
GET     /metrics                                 Unknown                       unknown           400
"""

# `>` precedes the value of X-Vertex-Ai-Triton-Redirect.
VERTEX_AI = """
GET     /health                                  Ready                         health            200
POST    /predict                                 Infer                         inference         200
POST    /predict>metrics                         Metrics                       statistics        200
POST    /predict>v2                              ServerMetadata                metadata          200
POST    /predict>v2/health/live                  Live                          health            200
POST    /predict>v2/models/stats                 ModelStatistics               statistics        200
POST    /predict>v2/models/m                     ModelMetadata                 metadata          200
POST    /predict>v2/models/m/ready               ModelReady                    health            200
POST    /predict>v2/models/m/config              ModelConfig                   model-config      200
POST    /predict>v2/models/m/infer               Infer                         inference         200
POST    /predict>v2/repository/index             RepositoryIndex               model-repository  200
POST    /predict>v2/repository/models/other/load RepositoryLoad                model-repository  200
POST    /predict>v2/repository/models/other/unload  RepositoryUnload           model-repository  200
POST    /predict>v2/systemsharedmemory/status    SystemSharedMemoryStatus      shared-memory     200
POST    /predict>v2/logging                      Unknown                       unknown           400
POST    /predict>v2/trace/setting                Unknown                       unknown           400
POST    /predict>/v2/repository/index            Unknown                       unknown           400
POST    /predict>v2//repository/index            Unknown                       unknown           400
POST    /predict>v2/./repository/index           Unknown                       unknown           400
POST    /predict>v2/repository/index/            Unknown                       unknown           400
POST    /predict>v2/repository/index?x           Unknown                       unknown           400
POST    /predict>V2/repository/index             Unknown                       unknown           400
POST    /predict>../v2/logging                   Unknown                       unknown           400
POST    /v2/repository/models/other/load         Unknown                       unknown           400
GET     /metrics                                 Unknown                       unknown           400
"""

# The same port also serves the v2 protocol: the HTTP rows that begin with /v2.
TORCHSERVE_INFERENCE = """
GET     /ping                                    Ping                          health            *
POST    /predictions/m                           Predict                       inference         404
POST    /predictions/m/1.0                       Predict                       inference         404
POST    /explanations/m                          Explain                       inference         404
POST    /invocations                             Predict                       inference         *
POST    /models/m/invoke                         Predict                       inference         404
POST    /m/predict                               Predict                       inference         404
POST    /m/1.0/predict                           Predict                       inference         404
POST    /v1/models/m:predict                     Predict                       inference         404
POST    /v1/models/m:explain                     Explain                       inference         404
POST    /v2/models/m/explain                     Explain                       inference         404
POST    /wfpredict/w                             Unknown                       inference         404
OPTIONS /                                        ApiDescription                open              200
GET     /api-description                         ApiDescription                open              200
GET     /models                                  Unknown                       unknown           404
POST    /models                                  Unknown                       unknown           404
DELETE  /models/m                                Unknown                       unknown           404
GET     /token                                   Unknown                       unknown           404
GET     /metrics                                 Unknown                       unknown           404
"""

TORCHSERVE_MANAGEMENT = """
GET     /models                                  ModelList                     model-repository  200
POST    /models?url=none.mar                     ModelRegister                 model-repository  405
GET     /models/m                                ModelDescribe                 model-repository  404
GET     /models/m/1.0                            ModelDescribe                 model-repository  404
PUT     /models/m                                ModelScale                    model-repository  404
PUT     /models/m/1.0                            ModelScale                    model-repository  404
PUT     /models/m/1.0/set-default                ModelSetDefault               model-repository  404
DELETE  /models/m                                ModelUnregister               model-repository  405
DELETE  /models/m/1.0                            ModelUnregister               model-repository  405
OPTIONS /models/m                                ApiDescription                model-repository  404
GET     /v1/models/m                             ModelReady                    model-repository  404
GET     /token?type=inference                    Token                         model-repository  *
GET     /workflows                               Unknown                       model-repository  200
GET     /workflows/w                             Unknown                       model-repository  404
OPTIONS /                                        ApiDescription                open              200
GET     /api-description                         ApiDescription                open              200
GET     /ping                                    Unknown                       unknown           404
POST    /predictions/m                           Unknown                       unknown           404
GET     /metrics                                 Unknown                       unknown           404
POST    /v2/repository/models/other/load         Unknown                       unknown           404
GET     /v2/logging                              Unknown                       unknown           404
"""

TORCHSERVE_METRICS = """
GET     /metrics                                 Metrics                       open              200
GET     /dashboard                               Metrics                       open              200
GET     /dashboard/style.css                     Metrics                       open              200
OPTIONS /                                        ApiDescription                open              200
GET     /api-description                         ApiDescription                open              200
GET     /models                                  Unknown                       unknown           404
POST    /models?url=none.mar                     Unknown                       unknown           404
POST    /predictions/m                           Unknown                       unknown           404
POST    /v2/repository/models/other/load         Unknown                       unknown           404
GET     /v2/logging                              Unknown                       unknown           404
"""

# An rpc, its part, and the code of an allowed call.
KSERVE_RPCS = """
ServerLive                    health            OK
ServerReady                   health            OK
ModelReady                    health            *
ServerMetadata                metadata          OK
ModelMetadata                 metadata          *
ModelInfer                    inference         *
ModelStreamInfer              inference         OK
ModelConfig                   model-config      *
ModelStatistics               statistics        OK
RepositoryIndex               model-repository  OK
RepositoryModelLoad           model-repository  *
RepositoryModelUnload         model-repository  *
SystemSharedMemoryStatus      shared-memory     OK
SystemSharedMemoryRegister    shared-memory     *
SystemSharedMemoryUnregister  shared-memory     OK
CudaSharedMemoryStatus        shared-memory     OK
CudaSharedMemoryRegister      shared-memory     *
CudaSharedMemoryUnregister    shared-memory     OK
TraceSetting                  trace             OK
LogSettings                   logging           OK
None                          unknown           UNIMPLEMENTED
"""
HEALTH_RPCS = """
Check                         health            OK
Watch                         health            UNIMPLEMENTED
List                          unknown           UNIMPLEMENTED
"""
LOAD_REPORT_RPCS = """
StreamCoreMetrics             load-report       OK
None                          unknown           UNIMPLEMENTED
"""
REFLECTION_RPCS = """
ServerReflectionInfo          metadata          *
"""
INFERENCE_RPCS = """
Ping                          health            OK
Predictions                   inference         *
StreamPredictions             inference         *
StreamPredictions2            inference         *
None                          unknown           UNIMPLEMENTED
"""
MANAGEMENT_RPCS = """
DescribeModel                 model-repository  *
ListModels                    model-repository  OK
RegisterModel                 model-repository  *
ScaleWorker                   model-repository  *
SetDefault                    model-repository  *
UnregisterModel               model-repository  *
None                          unknown           UNIMPLEMENTED
"""

KSERVE = "/inference.GRPCInferenceService/"
ALIAS = "/org.pytorch.serve.grpc.openinference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/"
LOAD_REPORT = "/xds.service.orca.v3.OpenRcaService/"
REFLECTION = ("/grpc.reflection.v1.ServerReflection/", "/grpc.reflection.v1alpha.ServerReflection/")
INFERENCE = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/"
MANAGEMENT = "/org.pytorch.serve.grpc.management.ManagementAPIsService/"


@dataclass(frozen=True)
class Row:
    """One request; `kind` is the class that the access tables name."""

    method: str
    path: str
    route: str
    part: str
    answer: str
    kind: str


def rows(table: str, unknown="unknown", answer=None) -> list:
    """Returns HTTP rows; `unknown` is the class of unknown paths, `answer` replaces the table's status of allowed requests."""
    made = []
    for method, path, route, part, status in map(str.split, table.strip().splitlines()):
        kind = {"RepositoryLoad": "load", "RepositoryUnload": "load", "Token": "renew"}.get(route, CLASSES[part])
        made.append(
            Row(method, path, route, part, status, unknown)
            if kind == "unknown"
            else Row(method, path, route, part, answer or status, kind)
        )
    return made


def calls(service: str, table: str, unknown="unknown", answer=None, kinds=()) -> list:
    """Returns the rows of a gRPC service; `answer` replaces the code of allowed calls, `kinds` names other classes."""
    made = []
    for name, part, code in map(str.split, table.strip().splitlines()):
        kind = {"RepositoryModelLoad": "load", "RepositoryModelUnload": "load", "ServerReflectionInfo": "reflection"}.get(name)
        kind = kind or (unknown if part == "unknown" else CLASSES[part])
        made.append(Row("POST", service + name, name, part, answer or code, dict(kinds).get(kind, kind)))
    return made


def foreign(service: str, table: str) -> list:
    """Returns the rows of a gRPC service that a port does not serve."""
    return [replace(row, part="unknown", answer="UNIMPLEMENTED", kind="unknown") for row in calls(service, table)]


def reflection(kinds=()) -> list:
    """Returns the rows of both versions of reflection."""
    return [row for service in REFLECTION for row in calls(service, REFLECTION_RPCS, kinds=kinds)]


# The rows of each listener. TorchServe's ports require its keys for unknown paths too, as TorchServe does.
LISTENERS = {
    "http": rows(HTTP),
    "metrics": rows(METRICS),
    "sagemaker": rows(SAGEMAKER),
    "vertex_ai": rows(VERTEX_AI),
    # This port does not serve TorchServe's services.
    "grpc": calls(KSERVE, KSERVE_RPCS) + calls(HEALTH, HEALTH_RPCS) + calls(LOAD_REPORT, LOAD_REPORT_RPCS) + reflection()
    + foreign(ALIAS, KSERVE_RPCS) + foreign(INFERENCE, INFERENCE_RPCS) + foreign(MANAGEMENT, MANAGEMENT_RPCS),
    "torchserve_inference": rows(TORCHSERVE_INFERENCE, "unknown_inference")
    + [row for row in rows(HTTP, "unknown_inference", "*") if row.path.startswith("/v2")],
    "torchserve_management": rows(TORCHSERVE_MANAGEMENT, "unknown_management"),
    "torchserve_metrics": rows(TORCHSERVE_METRICS),
    "torchserve_grpc": calls(INFERENCE, INFERENCE_RPCS, "unknown_inference")
    + calls(KSERVE, KSERVE_RPCS, "unknown_inference") + calls(ALIAS, KSERVE_RPCS, "unknown_inference")
    + calls(HEALTH, HEALTH_RPCS, "unknown_inference") + calls(LOAD_REPORT, LOAD_REPORT_RPCS, "unknown_inference") + reflection()
    + [row for row in calls(MANAGEMENT, MANAGEMENT_RPCS, "unknown_inference", "UNIMPLEMENTED")],
    "torchserve_grpc_management": calls(MANAGEMENT, MANAGEMENT_RPCS, "unknown_management")
    + reflection({"reflection": "reflection_management"})
    + [row for row in calls(KSERVE, KSERVE_RPCS, answer="UNIMPLEMENTED") if row.kind in ("manage", "load")],
}  # fmt: skip
# All three listeners on one address. Unknown paths have the outcome of the inference listener.
LISTENERS["torchserve_one_address"] = [
    row
    for name in ("inference", "management", "metrics")
    for row in LISTENERS[f"torchserve_{name}"]
    if not row.kind.startswith("unknown") or row.path.startswith("/v2/models")
]
# The v2 port beside them, with no model loaded; loading does not need `enable_model_api` there.
LISTENERS["torchserve_http"] = [
    replace(row, kind="manage") if row.kind == "load" else row for row in rows(HTTP, answer="*") if row.path != "/"
]

# The outcome of a request, by class (rows) and credential (columns):
#   ok: the handler's answer · unknown: not found · token: 401 · scope: 403, a management token is required
#   key: TorchServe's refusal · model_api: loading by request is disabled · restricted: 403, a header is required
# `a+b` sends both credentials. `own`: the header of the row's restricted part; `other`: that of another part.
V2 = {
    "no credentials are configured": """
           none    wrong   inference management
health     ok      ok      ok        ok
use        ok      ok      ok        ok
reflection ok      ok      ok        ok
manage     ok      ok      ok        ok
load       ok      ok      ok        ok
open       ok      ok      ok        ok
unknown    unknown unknown unknown   unknown
""",
    "tokens": """
           none    wrong   inference management
health     ok      ok      ok        ok
use        token   token   ok        ok
reflection token   token   ok        ok
manage     token   token   scope     ok
load       token   token   scope     ok
open       ok      ok      ok        ok
unknown    unknown unknown unknown   unknown
""",
    "inference tokens": """
           none    wrong   inference management
health     ok      ok      ok        ok
use        token   token   ok        token
reflection token   token   ok        token
manage     token   token   ok        token
load       token   token   ok        token
open       ok      ok      ok        ok
unknown    unknown unknown unknown   unknown
""",
    "management tokens": """
           none    wrong   inference management
health     ok      ok      ok        ok
use        ok      ok      ok        ok
reflection ok      ok      ok        ok
manage     token   token   token     ok
load       token   token   token     ok
open       ok      ok      ok        ok
unknown    unknown unknown unknown   unknown
""",
    "restricted": """
           none       own_wrong  other      own
health     restricted restricted restricted ok
use        restricted restricted restricted ok
reflection ok         ok         ok         ok
manage     restricted restricted restricted ok
load       restricted restricted restricted ok
open       ok         ok         ok         ok
unknown    unknown    unknown    unknown    unknown
""",
    "restricted tokens": """
           none       own     inference  management own+inference own+management
health     restricted ok      restricted restricted ok            ok
use        token      token   restricted restricted ok            ok
reflection token      token   ok         ok         ok            ok
manage     token      token   scope      restricted scope         ok
load       token      token   scope      restricted scope         ok
open       ok         ok      ok         ok         ok            ok
unknown    unknown    unknown unknown    unknown    unknown       unknown
""",
}

TORCHSERVE = {
    "keys": """
                      none    wrong   inference_key management_key renewal_key inference management
health                key     key     ok            key            key         key       key
use                   key     key     ok            key            key         key       key
reflection            key     key     ok            key            key         key       key
manage                key     key     key           ok             key         key       key
load                  key     key     key           model_api      key         key       key
renew                 key     key     key           key            ok          key       key
reflection_management key     key     key           ok             key         key       key
open                  ok      ok      ok            ok             ok          ok        ok
unknown_inference     key     key     unknown       key            key         key       key
unknown_management    key     key     key           unknown        key         key       key
unknown               unknown unknown unknown       unknown        unknown     unknown   unknown
""",
    "keys tokens": """
                      none    wrong   inference_key management_key renewal_key inference management
health                key     key     ok            key            key         ok        ok
use                   key     key     ok            key            key         ok        ok
reflection            key     key     ok            key            key         ok        ok
manage                key     key     key           ok             key         key       ok
load                  key     key     key           model_api      key         key       model_api
renew                 key     key     key           key            ok          key       key
reflection_management key     key     key           ok             key         key       ok
open                  ok      ok      ok            ok             ok          ok        ok
unknown_inference     key     key     unknown       key            key         unknown   unknown
unknown_management    key     key     key           unknown        key         key       unknown
unknown               unknown unknown unknown       unknown        unknown     unknown   unknown
""",
    "tokens": """
                      none    wrong   inference management
health                ok      ok      ok        ok
use                   token   token   ok        ok
reflection            token   token   ok        ok
manage                token   token   scope     ok
load                  token   token   scope     model_api
renew                 token   token   scope     ok
reflection_management token   token   ok        ok
open                  ok      ok      ok        ok
unknown_inference     unknown unknown unknown   unknown
unknown_management    unknown unknown unknown   unknown
unknown               unknown unknown unknown   unknown
""",
    "management tokens": """
                      none    wrong   inference management
health                ok      ok      ok        ok
use                   ok      ok      ok        ok
reflection            ok      ok      ok        ok
manage                token   token   token     ok
load                  token   token   token     model_api
renew                 token   token   token     ok
reflection_management ok      ok      ok        ok
open                  ok      ok      ok        ok
unknown_inference     unknown unknown unknown   unknown
unknown_management    unknown unknown unknown   unknown
unknown               unknown unknown unknown   unknown
""",
    "restricted": """
                      none       own_wrong  other      own
health                restricted restricted restricted ok
use                   restricted restricted restricted ok
reflection            ok         ok         ok         ok
manage                restricted restricted restricted ok
load                  restricted restricted restricted model_api
renew                 restricted restricted restricted ok
reflection_management ok         ok         ok         ok
open                  ok         ok         ok         ok
unknown_inference     unknown    unknown    unknown    unknown
unknown_management    unknown    unknown    unknown    unknown
unknown               unknown    unknown    unknown    unknown
""",
}

TORCHSERVE["one address: keys tokens"] = TORCHSERVE["keys tokens"]


def outcomes(table: str) -> dict:
    """Parses an outcome table: class and credential -> the outcome of the request."""
    head, *lines = [line.split() for line in table.strip("\n").splitlines()]
    return {(line[0], credential): outcome for line in lines for credential, outcome in zip(head, line[1:], strict=True)}


def first_segment(path: str) -> tuple:
    """Returns the first segment of a path with its slash, and the rest."""
    end = path.find("/", 1)
    return (path, "") if end < 0 else (path[:end], path[end:])


# Other spellings of a path and their result: `same`, or `unknown` to the v2 protocol and `closed` elsewhere: the request may
# lead to any route there, but must be refused where the path itself is refused.
SPELLINGS = {
    "query": (lambda path: path + ("&" if "?" in path else "?") + "x=/v2/health/live", "same"),
    "absolute form": (lambda path: "http://127.0.0.1" + path, "same"),
    "leading //": (lambda path: "/" + path, "unknown"),
    "trailing /": (lambda path: path + "/", "unknown"),
    "inner //": (lambda path: "/".join(first_segment(path)), "unknown"),
    "/./": (lambda path: "/.".join(first_segment(path)), "unknown"),
    "/../": (lambda path: "/x/..".join(first_segment(path)), "unknown"),
    "/%2e/": (lambda path: "/%2e".join(first_segment(path)), "unknown"),
    "/%2e%2e/": (lambda path: "/x/%2e%2e".join(first_segment(path)), "unknown"),
    "%2F": (lambda path: path[0] + path[1:].replace("/", "%2F", 1), "unknown"),
    "encoded letter": (lambda path: f"/%{ord((path + '/')[1]):x}{path[2:]}", "unknown"),
    "upper case": (lambda path: path.upper(), "unknown"),
}
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH")
