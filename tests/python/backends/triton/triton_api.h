/* The functions of Triton's interface for backends that the test backends call: own declarations, from
 * the documentation of TRITONBACKEND 1.19 and TRITONSERVER 1.34. */
#ifndef PHAROS_TEST_TRITON_API_H
#define PHAROS_TEST_TRITON_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define B(name) TRITONBACKEND_##name
#define S(name) TRITONSERVER_##name
#define EXPORT __attribute__((visibility("default")))

typedef struct S(Error) Error;
typedef struct S(Message) Message;
typedef struct S(Parameter) Parameter;
typedef struct S(BufferAttributes) BufferAttributes;
typedef struct S(MetricFamily) MetricFamily;
typedef struct S(Metric) Metric;
typedef struct S(MetricArgs) MetricArgs;
typedef struct S(Server) Server;
typedef struct S(InferenceTrace) Trace;
typedef struct B(MemoryManager) MemoryManager;
typedef struct B(Backend) Backend;
typedef struct B(BackendAttribute) BackendAttribute;
typedef struct B(Model) Model;
typedef struct B(ModelInstance) Instance;
typedef struct B(Request) Request;
typedef struct B(Input) Input;
typedef struct B(Response) Response;
typedef struct B(ResponseFactory) Factory;
typedef struct B(Output) Output;
typedef struct B(State) State;
typedef struct B(ModelInstanceResponseStatistics) ResponseStatistics;

enum { UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED };
enum { TYPE_INVALID, TYPE_BOOL, TYPE_INT32 = 8, TYPE_INT64 = 9, TYPE_FP32 = 11, TYPE_BYTES = 13 };
enum { MEMORY_CPU, MEMORY_CPU_PINNED, MEMORY_GPU };
enum { LOG_INFO, LOG_WARN, LOG_ERROR, LOG_VERBOSE };
enum { PARAMETER_STRING, PARAMETER_INT, PARAMETER_BOOL, PARAMETER_DOUBLE, PARAMETER_BYTES };
enum { COUNTER, GAUGE, HISTOGRAM };
enum { RELEASE_ALL = 1, RELEASE_RESCHEDULE = 2, RESPONSE_FINAL = 1 };

Error *S(ErrorNew)(int code, const char *message);
void S(ErrorDelete)(Error *);
int S(ErrorCode)(Error *);
const char *S(ErrorCodeString)(Error *);
const char *S(ErrorMessage)(Error *);

Error *S(ApiVersion)(uint32_t *major, uint32_t *minor);
Error *B(ApiVersion)(uint32_t *major, uint32_t *minor);
const char *S(DataTypeString)(int);
int S(StringToDataType)(const char *);
uint32_t S(DataTypeByteSize)(int);
const char *S(MemoryTypeString)(int);
const char *S(InstanceGroupKindString)(int);
const char *S(ParameterTypeString)(int);
const char *S(InferenceTraceLevelString)(int);
const char *S(InferenceTraceActivityString)(int);
bool S(LogIsEnabled)(int level);
Error *S(LogMessage)(int level, const char *file, int line, const char *message);

Error *S(MessageNewFromSerializedJson)(Message **, const char *base, size_t size);
Error *S(MessageDelete)(Message *);
Error *S(MessageSerializeToJson)(Message *, const char **base, size_t *size);
Parameter *S(ParameterNew)(const char *name, int type, const void *value);
Parameter *S(ParameterBytesNew)(const char *name, const void *base, uint64_t size);
void S(ParameterDelete)(Parameter *);

Error *S(BufferAttributesNew)(BufferAttributes **);
Error *S(BufferAttributesDelete)(BufferAttributes *);
Error *S(BufferAttributesSetMemoryType)(BufferAttributes *, int);
Error *S(BufferAttributesSetMemoryTypeId)(BufferAttributes *, int64_t);
Error *S(BufferAttributesSetCudaIpcHandle)(BufferAttributes *, void *);
Error *S(BufferAttributesSetByteSize)(BufferAttributes *, size_t);
Error *S(BufferAttributesMemoryType)(BufferAttributes *, int *);
Error *S(BufferAttributesMemoryTypeId)(BufferAttributes *, int64_t *);
Error *S(BufferAttributesCudaIpcHandle)(BufferAttributes *, void **);
Error *S(BufferAttributesByteSize)(BufferAttributes *, size_t *);
Error *B(MemoryManagerAllocate)(MemoryManager *, void **, int memory, int64_t id, uint64_t size);
Error *B(MemoryManagerFree)(MemoryManager *, void *, int memory, int64_t id);

Error *S(MetricFamilyNew)(MetricFamily **, int kind, const char *name, const char *description);
Error *S(MetricFamilyDelete)(MetricFamily *);
Error *S(GetMetricFamilyKind)(MetricFamily *, int *);
Error *S(MetricArgsNew)(MetricArgs **);
Error *S(MetricArgsSetHistogram)(MetricArgs *, const double *buckets, uint64_t count);
Error *S(MetricArgsDelete)(MetricArgs *);
Error *S(MetricNew)(Metric **, MetricFamily *, const Parameter **labels, uint64_t count);
Error *S(MetricNewWithArgs)(Metric **, MetricFamily *, const Parameter **labels, uint64_t count, const MetricArgs *);
Error *S(MetricDelete)(Metric *);
Error *S(GetMetricKind)(Metric *, int *);
Error *S(MetricValue)(Metric *, double *);
Error *S(MetricIncrement)(Metric *, double);
Error *S(MetricSet)(Metric *, double);
Error *S(MetricObserve)(Metric *, double);

Error *B(BackendName)(Backend *, const char **);
Error *B(BackendConfig)(Backend *, Message **);
Error *B(BackendArtifacts)(Backend *, int *type, const char **location);
Error *B(BackendMemoryManager)(Backend *, MemoryManager **);
Error *B(BackendState)(Backend *, void **);
Error *B(BackendSetState)(Backend *, void *);
Error *B(BackendExecutionPolicy)(Backend *, int *);
Error *B(BackendSetExecutionPolicy)(Backend *, int);
Error *B(BackendAttributeAddPreferredInstanceGroup)(BackendAttribute *, int kind, uint64_t count, const uint64_t *devices, uint64_t n);
Error *B(BackendAttributeSetParallelModelInstanceLoading)(BackendAttribute *, bool);

Error *B(ModelName)(Model *, const char **);
Error *B(ModelVersion)(Model *, uint64_t *);
Error *B(ModelRepository)(Model *, int *type, const char **location);
Error *B(ModelConfig)(Model *, uint32_t version, Message **);
Error *B(ModelSetConfig)(Model *, uint32_t version, Message *);
Error *B(ModelAutoCompleteConfig)(Model *, bool *);
Error *B(ModelServer)(Model *, Server **);
Error *B(ModelBackend)(Model *, Backend **);
Error *B(ModelState)(Model *, void **);
Error *B(ModelSetState)(Model *, void *);
Error *B(ModelReportMemoryUsage)(Model *, BufferAttributes **, uint32_t);

Error *B(ModelInstanceName)(Instance *, const char **);
Error *B(ModelInstanceKind)(Instance *, int *);
Error *B(ModelInstanceDeviceId)(Instance *, int32_t *);
Error *B(ModelInstanceHostPolicy)(Instance *, Message **);
Error *B(ModelInstanceIsPassive)(Instance *, bool *);
Error *B(ModelInstanceProfileCount)(Instance *, uint32_t *);
Error *B(ModelInstanceProfileName)(Instance *, uint32_t, const char **);
Error *B(ModelInstanceSecondaryDeviceCount)(Instance *, uint32_t *);
Error *B(ModelInstanceSecondaryDeviceProperties)(Instance *, uint32_t, const char **kind, int64_t *id);
Error *B(ModelInstanceModel)(Instance *, Model **);
Error *B(ModelInstanceState)(Instance *, void **);
Error *B(ModelInstanceSetState)(Instance *, void *);
Error *B(ModelInstanceReportMemoryUsage)(Instance *, BufferAttributes **, uint32_t);
Error *B(ModelInstanceReportStatistics)(Instance *, Request *, bool success, uint64_t exec_start, uint64_t compute_start, uint64_t compute_end, uint64_t exec_end);
Error *B(ModelInstanceReportBatchStatistics)(Instance *, uint64_t rows, uint64_t exec_start, uint64_t compute_start, uint64_t compute_end, uint64_t exec_end);
Error *B(ModelInstanceResponseStatisticsNew)(ResponseStatistics **);
Error *B(ModelInstanceResponseStatisticsDelete)(ResponseStatistics *);
Error *B(ModelInstanceResponseStatisticsSetModelInstance)(ResponseStatistics *, Instance *);
Error *B(ModelInstanceResponseStatisticsSetResponseFactory)(ResponseStatistics *, Factory *);
Error *B(ModelInstanceResponseStatisticsSetResponseStart)(ResponseStatistics *, uint64_t);
Error *B(ModelInstanceResponseStatisticsSetComputeOutputStart)(ResponseStatistics *, uint64_t);
Error *B(ModelInstanceResponseStatisticsSetResponseEnd)(ResponseStatistics *, uint64_t);
Error *B(ModelInstanceResponseStatisticsSetError)(ResponseStatistics *, Error *);
Error *B(ModelInstanceReportResponseStatistics)(ResponseStatistics *);

Error *B(RequestId)(Request *, const char **);
Error *B(RequestCorrelationId)(Request *, uint64_t *);
Error *B(RequestCorrelationIdString)(Request *, const char **);
Error *B(RequestFlags)(Request *, uint32_t *);
Error *B(InferenceRequestTimeoutMicroseconds)(Request *, uint64_t *);
Error *B(RequestIsCancelled)(Request *, bool *);
Error *B(RequestTrace)(Request *, Trace **);
Error *B(RequestParameterCount)(Request *, uint32_t *);
Error *B(RequestParameter)(Request *, uint32_t, const char **key, int *type, const void **value);
Error *B(RequestInputCount)(Request *, uint32_t *);
Error *B(RequestInputName)(Request *, uint32_t, const char **);
Error *B(RequestInput)(Request *, const char *, Input **);
Error *B(RequestInputByIndex)(Request *, uint32_t, Input **);
Error *B(RequestOutputCount)(Request *, uint32_t *);
Error *B(RequestOutputName)(Request *, uint32_t, const char **);
Error *B(RequestOutputBufferProperties)(Request *, const char *name, size_t *size, int *memory, int64_t *id);
Error *B(RequestRelease)(Request *, uint32_t flags);
Error *B(InputProperties)(Input *, const char **name, int *datatype, const int64_t **shape, uint32_t *rank, uint64_t *size, uint32_t *buffers);
Error *B(InputPropertiesForHostPolicy)(Input *, const char *policy, const char **name, int *datatype, const int64_t **shape, uint32_t *rank, uint64_t *size, uint32_t *buffers);
Error *B(InputBuffer)(Input *, uint32_t, const void **, uint64_t *size, int *memory, int64_t *id);
Error *B(InputBufferForHostPolicy)(Input *, const char *policy, uint32_t, const void **, uint64_t *size, int *memory, int64_t *id);
Error *B(InputBufferAttributes)(Input *, uint32_t, const void **, BufferAttributes **);

Error *B(ResponseFactoryNew)(Factory **, Request *);
Error *B(ResponseFactoryDelete)(Factory *);
Error *B(ResponseFactorySendFlags)(Factory *, uint32_t);
Error *B(ResponseFactoryIsCancelled)(Factory *, bool *);
Error *B(ResponseNew)(Response **, Request *);
Error *B(ResponseNewFromFactory)(Response **, Factory *);
Error *B(ResponseDelete)(Response *);
Error *B(ResponseSetStringParameter)(Response *, const char *, const char *);
Error *B(ResponseSetIntParameter)(Response *, const char *, int64_t);
Error *B(ResponseSetBoolParameter)(Response *, const char *, bool);
Error *B(ResponseSetDoubleParameter)(Response *, const char *, double);
Error *B(ResponseOutput)(Response *, Output **, const char *name, int datatype, const int64_t *shape, uint32_t rank);
Error *B(ResponseSend)(Response *, uint32_t flags, Error *);
Error *B(OutputBuffer)(Output *, void **, uint64_t size, int *memory, int64_t *id);
Error *B(OutputBufferAttributes)(Output *, BufferAttributes **);

Error *B(StateNew)(State **, Request *, const char *, int, const int64_t *, uint32_t);
Error *B(StateBuffer)(State *, void **, uint64_t size, int *memory, int64_t *id);
Error *B(StateBufferAttributes)(State *, BufferAttributes **);
Error *B(StateUpdate)(State *);

typedef struct S(InferenceRequest) CallRequest;
typedef struct S(InferenceResponse) CallResponse;
typedef struct S(ResponseAllocator) Allocator;
typedef Error *(*Allocate)(Allocator *, const char *name, size_t size, int memory, int64_t id, void *token, void **buffer, void **buffer_token, int *actual, int64_t *actual_id);
typedef Error *(*Release)(Allocator *, void *buffer, void *buffer_token, size_t size, int memory, int64_t id);
typedef Error *(*Start)(Allocator *, void *token);
typedef Error *(*Query)(Allocator *, void *token, const char *name, size_t *size, int *memory, int64_t *id);
typedef Error *(*SetAttributes)(Allocator *, const char *name, BufferAttributes *, void *token, void *buffer_token);
typedef void (*Responded)(CallResponse *, uint32_t flags, void *token);
typedef void (*Released)(CallRequest *, uint32_t flags, void *token);

Error *S(ResponseAllocatorNew)(Allocator **, Allocate, Release, Start);
Error *S(ResponseAllocatorDelete)(Allocator *);
Error *S(ResponseAllocatorSetQueryFunction)(Allocator *, Query);
Error *S(ResponseAllocatorSetBufferAttributesFunction)(Allocator *, SetAttributes);
Error *S(InferenceRequestNew)(CallRequest **, Server *, const char *model, int64_t version);
Error *S(InferenceRequestDelete)(CallRequest *);
Error *S(InferenceRequestId)(CallRequest *, const char **);
Error *S(InferenceRequestSetId)(CallRequest *, const char *);
Error *S(InferenceRequestFlags)(CallRequest *, uint32_t *);
Error *S(InferenceRequestSetFlags)(CallRequest *, uint32_t);
Error *S(InferenceRequestCorrelationId)(CallRequest *, uint64_t *);
Error *S(InferenceRequestCorrelationIdString)(CallRequest *, const char **);
Error *S(InferenceRequestSetCorrelationId)(CallRequest *, uint64_t);
Error *S(InferenceRequestSetCorrelationIdString)(CallRequest *, const char *);
Error *S(InferenceRequestPriority)(CallRequest *, uint32_t *);
Error *S(InferenceRequestPriorityUInt64)(CallRequest *, uint64_t *);
Error *S(InferenceRequestSetPriority)(CallRequest *, uint32_t);
Error *S(InferenceRequestSetPriorityUInt64)(CallRequest *, uint64_t);
Error *S(InferenceRequestTimeoutMicroseconds)(CallRequest *, uint64_t *);
Error *S(InferenceRequestSetTimeoutMicroseconds)(CallRequest *, uint64_t);
Error *S(InferenceRequestSetStringParameter)(CallRequest *, const char *, const char *);
Error *S(InferenceRequestSetIntParameter)(CallRequest *, const char *, int64_t);
Error *S(InferenceRequestSetBoolParameter)(CallRequest *, const char *, bool);
Error *S(InferenceRequestSetDoubleParameter)(CallRequest *, const char *, double);
Error *S(InferenceRequestAddInput)(CallRequest *, const char *, int datatype, const int64_t *shape, uint64_t rank);
Error *S(InferenceRequestRemoveInput)(CallRequest *, const char *);
Error *S(InferenceRequestRemoveAllInputs)(CallRequest *);
Error *S(InferenceRequestAppendInputData)(CallRequest *, const char *, const void *, size_t, int memory, int64_t id);
Error *S(InferenceRequestAppendInputDataWithHostPolicy)(CallRequest *, const char *, const void *, size_t, int memory, int64_t id, const char *policy);
Error *S(InferenceRequestAppendInputDataWithBufferAttributes)(CallRequest *, const char *, const void *, BufferAttributes *);
Error *S(InferenceRequestRemoveAllInputData)(CallRequest *, const char *);
Error *S(InferenceRequestAddRequestedOutput)(CallRequest *, const char *);
Error *S(InferenceRequestRemoveRequestedOutput)(CallRequest *, const char *);
Error *S(InferenceRequestRemoveAllRequestedOutputs)(CallRequest *);
Error *S(InferenceRequestSetReleaseCallback)(CallRequest *, Released, void *);
Error *S(InferenceRequestSetResponseCallback)(CallRequest *, Allocator *, void *, Responded, void *);
Error *S(InferenceRequestCancel)(CallRequest *);
Error *S(InferenceRequestIsCancelled)(CallRequest *, bool *);
Error *S(InferenceResponseDelete)(CallResponse *);
Error *S(InferenceResponseError)(CallResponse *);
Error *S(InferenceResponseModel)(CallResponse *, const char **, int64_t *);
Error *S(InferenceResponseId)(CallResponse *, const char **);
Error *S(InferenceResponseParameterCount)(CallResponse *, uint32_t *);
Error *S(InferenceResponseParameter)(CallResponse *, uint32_t, const char **, int *, const void **);
Error *S(InferenceResponseOutputCount)(CallResponse *, uint32_t *);
Error *S(InferenceResponseOutput)(CallResponse *, uint32_t, const char **, int *, const int64_t **, uint64_t *, const void **, size_t *, int *, int64_t *, void **);
Error *S(ServerInferAsync)(Server *, CallRequest *, Trace *);
Error *S(ServerIsLive)(Server *, bool *);
Error *S(ServerIsReady)(Server *, bool *);
Error *S(ServerModelIsReady)(Server *, const char *, int64_t, bool *);
Error *S(ServerModelTransactionProperties)(Server *, const char *, int64_t, uint32_t *, void **);
Error *S(ServerLoadModel)(Server *, const char *);
Error *S(ServerLoadModelWithParameters)(Server *, const char *, const Parameter **, uint64_t);
Error *S(ServerUnloadModel)(Server *, const char *);
Error *S(ServerUnloadModelAndDependents)(Server *, const char *);
Error *S(InferenceTraceSpawnChildTrace)(Trace *, Trace **);
Error *S(InferenceTraceDelete)(Trace *);
Error *S(InferenceTraceContext)(Trace *, const char **);
Error *S(InferenceTraceSetContext)(Trace *, const char *);
Error *S(InferenceTraceReportActivity)(Trace *, uint64_t, const char *);

/* Refused by this server, with its name. */
Error *S(ServerMetadata)(Server *, Message **);

/* The entry points. */
EXPORT Error *B(Initialize)(Backend *);
EXPORT Error *B(Finalize)(Backend *);
EXPORT Error *B(GetBackendAttribute)(Backend *, BackendAttribute *);
EXPORT Error *B(ModelInitialize)(Model *);
EXPORT Error *B(ModelFinalize)(Model *);
EXPORT Error *B(ModelInstanceInitialize)(Instance *);
EXPORT Error *B(ModelInstanceFinalize)(Instance *);
EXPORT Error *B(ModelInstanceReady)(Instance *);
EXPORT Error *B(ModelInstanceExecute)(Instance *, Request **, uint32_t count);

#endif
