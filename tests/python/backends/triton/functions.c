/* Calls each function of the interface with good and bad arguments, and returns as TEXT what differs
 * from the expected result: one line for each difference; "ok" without one. */
#include "checks.h"

static Backend *own_backend;
static Model *own_model;
static Instance *own_instance;

static void check_errors(void) {
  Error *error = S(ErrorNew)(NOT_FOUND, "text");
  SAME(S(ErrorCode)(error) == NOT_FOUND);
  TEXT_IS(S(ErrorMessage)(error), "text");
  TEXT_IS(S(ErrorCodeString)(error), "Not found");
  S(ErrorDelete)(error);
  S(ErrorDelete)(error);
  S(ErrorDelete)(NULL);
  TEXT_IS(S(ErrorMessage)(error), "");
  error = S(ErrorNew)(99, NULL);
  SAME(S(ErrorCode)(error) == UNKNOWN);
  TEXT_IS(S(ErrorMessage)(error), "");
  S(ErrorDelete)(error);
}

static void check_values(void) {
  uint32_t major, minor;
  GOOD(B(ApiVersion)(&major, &minor));
  SAME(major == 1 && minor == 19);
  GOOD(S(ApiVersion)(&major, &minor));
  SAME(major == 1 && minor == 34);
  BAD(B(ApiVersion)(NULL, &minor));
  BAD(S(ApiVersion)(&major, NULL));
  TEXT_IS(S(DataTypeString)(TYPE_FP32), "FP32");
  TEXT_IS(S(DataTypeString)(99), "<invalid>");
  SAME(S(StringToDataType)("INT64") == TYPE_INT64 && S(StringToDataType)("int64") == TYPE_INVALID);
  SAME(S(StringToDataType)(NULL) == TYPE_INVALID);
  SAME(S(DataTypeByteSize)(TYPE_INT64) == 8 && S(DataTypeByteSize)(TYPE_BYTES) == 0 && S(DataTypeByteSize)(-1) == 0);
  TEXT_IS(S(MemoryTypeString)(MEMORY_CPU_PINNED), "CPU_PINNED");
  TEXT_IS(S(MemoryTypeString)(7), "<invalid>");
  TEXT_IS(S(InstanceGroupKindString)(1), "CPU");
  TEXT_IS(S(InstanceGroupKindString)(-1), "<invalid>");
  TEXT_IS(S(ParameterTypeString)(PARAMETER_BYTES), "BYTES");
  TEXT_IS(S(InferenceTraceLevelString)(1), "MIN");
  TEXT_IS(S(InferenceTraceActivityString)(2), "COMPUTE_START");
  SAME(S(LogIsEnabled)(LOG_INFO) && S(LogIsEnabled)(LOG_ERROR) && !S(LogIsEnabled)(9));
  GOOD(S(LogMessage)(LOG_INFO, __FILE__, __LINE__, "two\nlines"));
  GOOD(S(LogMessage)(LOG_VERBOSE, NULL, 0, NULL));
  BAD(S(LogMessage)(4, "", 0, ""));
}

static void check_messages(void) {
  Message *message;
  const char *text;
  size_t size;
  GOOD(S(MessageNewFromSerializedJson)(&message, "{\"a\":[1]} and more", 9));
  GOOD(S(MessageSerializeToJson)(message, &text, &size));
  SAME(size == 9 && strcmp(text, "{\"a\":[1]}") == 0);
  BAD(S(MessageSerializeToJson)(message, NULL, &size));
  BAD(S(MessageSerializeToJson)((Message *)own_model, &text, &size));
  GOOD(S(MessageDelete)(message));
  BAD(S(MessageDelete)(message));
  BAD(S(MessageSerializeToJson)(message, &text, &size));
  BAD(S(MessageSerializeToJson)(NULL, &text, &size));
  GOOD(S(MessageDelete)(NULL));
  BAD(S(MessageNewFromSerializedJson)(&message, "{", 1));
  BAD(S(MessageNewFromSerializedJson)(&message, "\xff", 1));
  BAD(S(MessageNewFromSerializedJson)(&message, NULL, 3));
  BAD(S(MessageNewFromSerializedJson)(NULL, "{}", 2));
  int64_t number = 3;
  SAME(S(ParameterNew)("p", 9, &number) == NULL);
  SAME(S(ParameterNew)(NULL, PARAMETER_INT, &number) == NULL);
  SAME(S(ParameterNew)("p", PARAMETER_INT, NULL) == NULL);
  Parameter *parameter = S(ParameterBytesNew)("p", "xyz", 3);
  SAME(parameter != NULL);
  S(ParameterDelete)(parameter);
  S(ParameterDelete)(parameter);
}

static void check_memory(void) {
  BufferAttributes *attributes;
  int memory;
  int64_t id;
  size_t size;
  void *place;
  GOOD(S(BufferAttributesNew)(&attributes));
  BAD(S(BufferAttributesNew)(NULL));
  GOOD(S(BufferAttributesSetMemoryType)(attributes, MEMORY_GPU));
  BAD(S(BufferAttributesSetMemoryType)(attributes, 3));
  GOOD(S(BufferAttributesSetMemoryTypeId)(attributes, 2));
  GOOD(S(BufferAttributesSetByteSize)(attributes, 77));
  GOOD(S(BufferAttributesSetCudaIpcHandle)(attributes, &memory));
  GOOD(S(BufferAttributesMemoryType)(attributes, &memory));
  GOOD(S(BufferAttributesMemoryTypeId)(attributes, &id));
  GOOD(S(BufferAttributesByteSize)(attributes, &size));
  GOOD(S(BufferAttributesCudaIpcHandle)(attributes, &place));
  SAME(memory == MEMORY_GPU && id == 2 && size == 77 && place == &memory);
  BAD(S(BufferAttributesMemoryType)(NULL, &memory));
  GOOD(B(ModelReportMemoryUsage)(own_model, &attributes, 1));
  GOOD(B(ModelInstanceReportMemoryUsage)(own_instance, &attributes, 1));
  BAD(B(ModelReportMemoryUsage)(own_model, NULL, 1));
  GOOD(S(BufferAttributesDelete)(attributes));
  BAD(S(BufferAttributesDelete)(attributes));
  BAD(B(ModelInstanceReportMemoryUsage)(own_instance, &attributes, 1));
  MemoryManager *manager;
  GOOD(B(BackendMemoryManager)(own_backend, &manager));
  GOOD(B(MemoryManagerAllocate)(manager, &place, MEMORY_CPU, 0, 1000));
  memset(place, 1, 1000);
  GOOD(B(MemoryManagerFree)(manager, place, MEMORY_CPU, 0));
  GOOD(B(MemoryManagerAllocate)(manager, &place, MEMORY_CPU, 0, 0));
  GOOD(B(MemoryManagerFree)(manager, place, MEMORY_CPU, 0));
  FAILS(UNAVAILABLE, B(MemoryManagerAllocate)(manager, &place, MEMORY_CPU, 0, UINT64_MAX));
  FAILS(UNSUPPORTED, B(MemoryManagerAllocate)(manager, &place, MEMORY_GPU, 0, 8));
  FAILS(UNSUPPORTED, B(MemoryManagerAllocate)(manager, &place, MEMORY_CPU_PINNED, 0, 8));
  BAD(B(MemoryManagerFree)(manager, place, MEMORY_GPU, 0));
  FAILS(UNSUPPORTED, B(MemoryManagerAllocate)(manager, &place, MEMORY_GPU, 1, 8));
  BAD(B(MemoryManagerAllocate)(manager, &place, 3, 0, 8));
  BAD(B(MemoryManagerAllocate)((MemoryManager *)own_model, &place, MEMORY_CPU, 0, 8));
}

static void check_metrics(void) {
  MetricFamily *counters, *gauges, *histograms;
  GOOD(S(MetricFamilyNew)(&counters, COUNTER, "functions_counted", "things that the test counts"));
  GOOD(S(MetricFamilyNew)(&gauges, GAUGE, "functions_level", "a level"));
  GOOD(S(MetricFamilyNew)(&histograms, HISTOGRAM, "functions_spread", "a distribution"));
  BAD(S(MetricFamilyNew)(&counters, 3, "x", "y"));
  BAD(S(MetricFamilyNew)(&counters, COUNTER, NULL, "y"));
  int kind;
  GOOD(S(GetMetricFamilyKind)(histograms, &kind));
  SAME(kind == HISTOGRAM);
  BAD(S(GetMetricFamilyKind)(NULL, &kind));
  Parameter *label = S(ParameterNew)("color", PARAMETER_STRING, "red");
  int64_t number = 3;
  Parameter *wrong = S(ParameterNew)("color", PARAMETER_INT, &number);
  const Parameter *labels[] = {label}, *wrongs[] = {wrong};
  Metric *counter, *gauge, *histogram, *again;
  GOOD(S(MetricNew)(&counter, counters, labels, 1));
  BAD(S(MetricNew)(&gauge, gauges, wrongs, 1));
  BAD(S(MetricNew)(&gauge, NULL, labels, 1));
  BAD(S(MetricNew)(&gauge, gauges, NULL, 1));
  GOOD(S(MetricNew)(&gauge, gauges, labels, 1));
  BAD(S(MetricNew)(&histogram, histograms, labels, 1));
  MetricArgs *args;
  const double buckets[] = {1, 10};
  GOOD(S(MetricArgsNew)(&args));
  BAD(S(MetricArgsSetHistogram)(args, NULL, 2));
  GOOD(S(MetricArgsSetHistogram)(args, buckets, 2));
  GOOD(S(MetricNewWithArgs)(&histogram, histograms, labels, 1, args));
  BAD(S(MetricNewWithArgs)(&again, counters, labels, 1, args));
  GOOD(S(MetricArgsDelete)(args));
  BAD(S(MetricArgsDelete)(args));
  GOOD(S(MetricArgsDelete)(NULL));
  GOOD(S(MetricNewWithArgs)(&again, counters, labels, 1, NULL));
  double value, before;
  GOOD(S(MetricValue)(counter, &before));
  GOOD(S(MetricIncrement)(counter, 2));
  GOOD(S(MetricIncrement)(again, 0.5));
  BAD(S(MetricIncrement)(counter, -1));
  GOOD(S(MetricValue)(counter, &value));
  SAME(value == before + 2.5);
  FAILS(UNSUPPORTED, S(MetricSet)(counter, 1));
  FAILS(UNSUPPORTED, S(MetricObserve)(counter, 1));
  GOOD(S(MetricSet)(gauge, 7));
  GOOD(S(MetricIncrement)(gauge, -3));
  GOOD(S(MetricValue)(gauge, &value));
  SAME(value == 4);
  GOOD(S(MetricObserve)(histogram, 5));
  FAILS(UNSUPPORTED, S(MetricIncrement)(histogram, 1));
  FAILS(UNSUPPORTED, S(MetricSet)(histogram, 1));
  FAILS(UNSUPPORTED, S(MetricValue)(histogram, &value));
  GOOD(S(GetMetricKind)(gauge, &kind));
  SAME(kind == GAUGE);
  GOOD(S(MetricDelete)(again));
  BAD(S(MetricIncrement)(again, 1));
  GOOD(S(MetricFamilyDelete)(gauges));
  BAD(S(MetricFamilyDelete)(gauges));
  FAILS(INTERNAL, S(MetricSet)(gauge, 1));
  GOOD(S(MetricDelete)(gauge));
  S(ParameterDelete)(label);
  S(ParameterDelete)(wrong);
}

static void check_backend(void) {
  const char *text;
  int kind;
  void *state;
  Message *message;
  GOOD(B(BackendName)(own_backend, &text));
  TEXT_IS(text, "functions");
  BAD(B(BackendName)(NULL, &text));
  BAD(B(BackendName)((Backend *)own_model, &text));
  GOOD(B(BackendConfig)(own_backend, &message));
  BAD(S(MessageDelete)(message));
  BAD(B(BackendConfig)(own_backend, NULL));
  GOOD(B(BackendArtifacts)(own_backend, &kind, &text));
  SAME(kind == 0 && strstr(text, "functions") != NULL);
  GOOD(B(BackendState)(own_backend, &state));
  SAME(state == report);
  GOOD(B(BackendSetExecutionPolicy)(own_backend, 1));
  BAD(B(BackendSetExecutionPolicy)(own_backend, 2));
  GOOD(B(BackendExecutionPolicy)(own_backend, &kind));
  SAME(kind == 1);
  uint64_t version;
  Backend *backend;
  Server *server;
  bool completes;
  GOOD(B(ModelName)(own_model, &text));
  GOOD(B(ModelVersion)(own_model, &version));
  SAME(version == 1);
  GOOD(B(ModelRepository)(own_model, &kind, &text));
  SAME(kind == 0 && strcmp(strrchr(text, '/'), "/functions") == 0);
  GOOD(B(ModelConfig)(own_model, 1, &message));
  FAILS(UNSUPPORTED, B(ModelConfig)(own_model, 2, &message));
  GOOD(B(ModelSetConfig)(own_model, 1, message));
  FAILS(UNSUPPORTED, B(ModelSetConfig)(own_model, 3, message));
  GOOD(S(MessageDelete)(message));
  BAD(B(ModelSetConfig)(own_model, 1, message));
  GOOD(B(ModelAutoCompleteConfig)(own_model, &completes));
  SAME(!completes);
  GOOD(B(ModelServer)(own_model, &server));
  FAILS(UNSUPPORTED, S(ServerMetadata)(server, &message));
  GOOD(B(ModelBackend)(own_model, &backend));
  SAME(backend == own_backend);
  GOOD(B(ModelSetState)(own_model, &kind));
  GOOD(B(ModelState)(own_model, &state));
  SAME(state == &kind);
  BAD(B(ModelName)(NULL, &text));
}

static void check_instance(void) {
  const char *text;
  int kind;
  int32_t device;
  bool passive;
  uint32_t count;
  int64_t id;
  size_t size;
  void *state;
  Message *message;
  Model *model;
  GOOD(B(ModelInstanceName)(own_instance, &text));
  TEXT_IS(text, "functions_0_0");
  GOOD(B(ModelInstanceKind)(own_instance, &kind));
  SAME(kind == 1);
  GOOD(B(ModelInstanceDeviceId)(own_instance, &device));
  SAME(device == 0);
  GOOD(B(ModelInstanceHostPolicy)(own_instance, &message));
  BAD(S(MessageDelete)(message));
  GOOD(S(MessageSerializeToJson)(message, &text, &size));
  TEXT_IS(text, "{\"cpu\":{}}");
  GOOD(B(ModelInstanceIsPassive)(own_instance, &passive));
  SAME(!passive);
  GOOD(B(ModelInstanceProfileCount)(own_instance, &count));
  SAME(count == 2);
  GOOD(B(ModelInstanceProfileName)(own_instance, 1, &text));
  TEXT_IS(text, "large");
  BAD(B(ModelInstanceProfileName)(own_instance, 2, &text));
  GOOD(B(ModelInstanceSecondaryDeviceCount)(own_instance, &count));
  SAME(count == 0);
  BAD(B(ModelInstanceSecondaryDeviceProperties)(own_instance, 0, &text, &id));
  GOOD(B(ModelInstanceModel)(own_instance, &model));
  SAME(model == own_model);
  GOOD(B(ModelInstanceSetState)(own_instance, report));
  GOOD(B(ModelInstanceState)(own_instance, &state));
  SAME(state == report);
  BAD(B(ModelInstanceName)((Instance *)own_model, &text));
  BAD(B(ModelInstanceName)(NULL, &text));
}

static void check_request(Request *request) {
  const char *text;
  uint64_t number, size;
  uint32_t count, flags;
  bool cancelled;
  Trace *trace;
  int type, memory;
  const void *value;
  int64_t id;
  GOOD(B(RequestId)(request, &text));
  TEXT_IS(text, "the id");
  BAD(B(RequestId)((Request *)own_model, &text));
  BAD(B(RequestId)(NULL, &text));
  GOOD(B(RequestCorrelationId)(request, &number));
  SAME(number == 0);
  BAD(B(RequestCorrelationIdString)(request, &text));
  GOOD(B(RequestFlags)(request, &flags));
  SAME(flags == 0);
  GOOD(B(InferenceRequestTimeoutMicroseconds)(request, &number));
  SAME(number == 5000000);
  GOOD(B(RequestIsCancelled)(request, &cancelled));
  SAME(!cancelled);
  GOOD(B(RequestTrace)(request, &trace));
  SAME(trace == NULL);
  GOOD(B(RequestParameterCount)(request, &count));
  for (uint32_t at = 0; at < count; ++at) {
    GOOD(B(RequestParameter)(request, at, &text, &type, &value));
    if (strcmp(text, "number") == 0)
      SAME(type == PARAMETER_INT && *(const int64_t *)value == 12);
    if (strcmp(text, "half") == 0)
      SAME(type == PARAMETER_DOUBLE && *(const double *)value == 0.5);
    if (strcmp(text, "yes") == 0)
      SAME(type == PARAMETER_BOOL && *(const bool *)value);
  }
  SAME(count == 3);
  BAD(B(RequestParameter)(request, count, &text, &type, &value));
  GOOD(B(RequestInputCount)(request, &count));
  SAME(count == 1);
  GOOD(B(RequestInputName)(request, 0, &text));
  TEXT_IS(text, "INPUT0");
  BAD(B(RequestInputName)(request, 1, &text));
  Input *input, *by_index;
  GOOD(B(RequestInput)(request, "INPUT0", &input));
  GOOD(B(RequestInputByIndex)(request, 0, &by_index));
  SAME(input == by_index);
  BAD(B(RequestInputByIndex)(request, 7, &by_index));
  BAD(B(RequestInput)(request, "INPUT9", &by_index));
  BAD(B(RequestInput)(request, NULL, &by_index));
  const int64_t *shape;
  uint32_t rank, buffers;
  GOOD(B(InputProperties)(input, &text, &type, &shape, &rank, &size, &buffers));
  SAME(type == TYPE_INT32 && rank == 2 && shape[0] == 1 && shape[1] == 3 && size == 12 && buffers == 1);
  GOOD(B(InputPropertiesForHostPolicy)(input, "cpu", NULL, NULL, NULL, NULL, &size, NULL));
  BAD(B(InputProperties)(NULL, NULL, NULL, NULL, NULL, NULL, NULL));
  GOOD(B(InputBuffer)(input, 0, &value, &size, &memory, &id));
  SAME(size == 12 && memory == MEMORY_CPU && ((const int32_t *)value)[2] == 3);
  BAD(B(InputBuffer)(input, 1, &value, &size, &memory, &id));
  GOOD(B(InputBufferForHostPolicy)(input, NULL, 0, &value, &size, &memory, &id));
  BAD(B(InputBufferForHostPolicy)(input, "gpu_0", 4, &value, &size, &memory, &id));
  BufferAttributes *attributes;
  size_t bytes;
  GOOD(B(InputBufferAttributes)(input, 0, &value, &attributes));
  GOOD(S(BufferAttributesByteSize)(attributes, &bytes));
  SAME(bytes == 12);
  BAD(B(InputBufferAttributes)(input, 1, &value, &attributes));
  GOOD(B(RequestOutputCount)(request, &count));
  SAME(count == 1);
  GOOD(B(RequestOutputName)(request, 0, &text));
  TEXT_IS(text, "TEXT");
  BAD(B(RequestOutputName)(request, 1, &text));
  memory = MEMORY_GPU;
  GOOD(B(RequestOutputBufferProperties)(request, "TEXT", NULL, &memory, &id));
  SAME(memory == MEMORY_CPU);
  State *state;
  int64_t one = 1;
  BAD(B(StateNew)(&state, request, "s", TYPE_INT32, &one, 1));
  BAD(B(StateUpdate)(NULL));
  BAD(B(RequestRelease)(request, 0));
  BAD(B(RequestRelease)(request, RELEASE_RESCHEDULE));
  BAD(B(RequestRelease)(NULL, RELEASE_ALL));
}

static void check_responses(Request *request) {
  Response *response;
  Factory *factory;
  Output *output;
  bool cancelled;
  int64_t shape[] = {1, 1};
  GOOD(B(ResponseFactoryNew)(&factory, request));
  BAD(B(ResponseFactoryNew)(&factory, NULL));
  GOOD(B(ResponseFactoryIsCancelled)(factory, &cancelled));
  BAD(B(ResponseFactorySendFlags)(factory, 2));
  GOOD(B(ResponseFactorySendFlags)(factory, 0));
  GOOD(B(ResponseNewFromFactory)(&response, factory));
  BAD(B(ResponseNewFromFactory)(&response, NULL));
  GOOD(B(ResponseSetStringParameter)(response, "s", "x"));
  GOOD(B(ResponseSetIntParameter)(response, "i", 1));
  GOOD(B(ResponseSetBoolParameter)(response, "b", true));
  GOOD(B(ResponseSetDoubleParameter)(response, "d", 0.5));
  BAD(B(ResponseSetStringParameter)(response, NULL, "x"));
  BAD(B(ResponseSetStringParameter)(response, "s", NULL));
  BAD(B(ResponseSetIntParameter)(NULL, "i", 1));
  BAD(B(ResponseSetBoolParameter)(NULL, "b", true));
  BAD(B(ResponseSetDoubleParameter)(response, NULL, 1));
  BAD(B(ResponseOutput)(response, &output, "OTHER", TYPE_BYTES, shape, 2));
  BAD(B(ResponseOutput)(response, &output, "TEXT", 77, shape, 2));
  BAD(B(ResponseOutput)(response, &output, "TEXT", TYPE_BYTES, NULL, 2));
  BAD(B(ResponseOutput)(response, &output, "TEXT", TYPE_BYTES, shape, 1u << 20));
  BAD(B(ResponseOutput)(response, &output, NULL, TYPE_BYTES, shape, 2));
  GOOD(B(ResponseOutput)(response, &output, "TEXT", TYPE_BYTES, shape, 2));
  FAILS(ALREADY_EXISTS, B(ResponseOutput)(response, &output, "TEXT", TYPE_BYTES, shape, 2));
  void *place;
  int memory = MEMORY_GPU;
  int64_t id = 3;
  BufferAttributes *attributes;
  size_t bytes;
  BAD(B(OutputBufferAttributes)(output, &attributes));
  GOOD(B(OutputBuffer)(output, &place, 6, &memory, &id));
  SAME(memory == MEMORY_CPU && id == 0);
  FAILS(ALREADY_EXISTS, B(OutputBuffer)(output, &place, 6, &memory, &id));
  GOOD(B(OutputBufferAttributes)(output, &attributes));
  GOOD(S(BufferAttributesByteSize)(attributes, &bytes));
  SAME(bytes == 6);
  BAD(B(ResponseSend)(response, 9, NULL));
  GOOD(B(ResponseDelete)(response));
  BAD(B(ResponseDelete)(response));
  BAD(B(OutputBuffer)(output, &place, 6, &memory, &id));
  BAD(B(ResponseSend)(response, RESPONSE_FINAL, NULL));
  GOOD(B(ResponseFactoryDelete)(factory));
  BAD(B(ResponseFactoryDelete)(factory));
}

static void check_statistics(Request *request) {
  ResponseStatistics *statistics;
  Factory *factory;
  GOOD(B(ModelInstanceReportStatistics)(own_instance, request, true, 1, 2, 3, 4));
  GOOD(B(ModelInstanceReportStatistics)(own_instance, request, false, 0, 0, 0, 0));
  BAD(B(ModelInstanceReportStatistics)(NULL, request, true, 1, 2, 3, 4));
  BAD(B(ModelInstanceReportStatistics)(own_instance, NULL, true, 1, 2, 3, 4));
  BAD(B(ModelInstanceReportBatchStatistics)(NULL, 1, 1, 2, 3, 4));
  GOOD(B(ResponseFactoryNew)(&factory, request));
  GOOD(B(ModelInstanceResponseStatisticsNew)(&statistics));
  BAD(B(ModelInstanceReportResponseStatistics)(statistics));
  GOOD(B(ModelInstanceResponseStatisticsSetModelInstance)(statistics, own_instance));
  GOOD(B(ModelInstanceResponseStatisticsSetResponseFactory)(statistics, factory));
  GOOD(B(ModelInstanceResponseStatisticsSetResponseStart)(statistics, 1));
  GOOD(B(ModelInstanceResponseStatisticsSetComputeOutputStart)(statistics, 0));
  GOOD(B(ModelInstanceResponseStatisticsSetResponseEnd)(statistics, 2));
  GOOD(B(ModelInstanceResponseStatisticsSetError)(statistics, NULL));
  GOOD(B(ModelInstanceReportResponseStatistics)(statistics));
  GOOD(B(ModelInstanceResponseStatisticsDelete)(statistics));
  BAD(B(ModelInstanceResponseStatisticsDelete)(statistics));
  BAD(B(ModelInstanceResponseStatisticsSetModelInstance)(statistics, own_instance));
  GOOD(B(ResponseFactoryDelete)(factory));
}

Error *B(Initialize)(Backend *backend) {
  own_backend = backend;
  return B(BackendSetState)(backend, report);
}

Error *B(GetBackendAttribute)(Backend *backend, BackendAttribute *attributes) {
  (void)backend;
  const uint64_t device = 0;
  GOOD(B(BackendAttributeAddPreferredInstanceGroup)(attributes, 1, 1, NULL, 0));
  GOOD(B(BackendAttributeAddPreferredInstanceGroup)(attributes, 2, 0, &device, 1));
  BAD(B(BackendAttributeAddPreferredInstanceGroup)(attributes, 9, 1, NULL, 0));
  BAD(B(BackendAttributeAddPreferredInstanceGroup)(NULL, 1, 1, NULL, 0));
  GOOD(B(BackendAttributeSetParallelModelInstanceLoading)(attributes, true));
  BAD(B(BackendAttributeSetParallelModelInstanceLoading)(NULL, true));
  return NULL;
}

Error *B(ModelInitialize)(Model *model) {
  own_model = model;
  return NULL;
}

Error *B(ModelInstanceInitialize)(Instance *instance) {
  own_instance = instance;
  return NULL;
}

Error *B(ModelInstanceExecute)(Instance *instance, Request **requests, uint32_t count) {
  for (uint32_t at = 0; at < count; ++at) {
    check_errors();
    check_values();
    check_messages();
    check_memory();
    check_metrics();
    check_backend();
    check_instance();
    check_request(requests[at]);
    check_responses(requests[at]);
    check_statistics(requests[at]);
    TRY(answer_with_report(requests[at]));
    TRY(B(RequestRelease)(requests[at], RELEASE_ALL));
    BAD(B(RequestRelease)(requests[at], RELEASE_ALL));
    uint64_t start = now();
    TRY(B(ModelInstanceReportBatchStatistics)(instance, 1, start, start, start, start));
  }
  return NULL;
}
