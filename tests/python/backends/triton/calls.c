/* Calls other models, with good and bad arguments: `echo` once and cancelled, `many` for a stream, a
 * model that does not exist; loads and unloads `spare`. Returns what differs as TEXT. */
#include <pthread.h>
#include <stdlib.h>

#include "checks.h"

static Server *server;

/* A call, and what its callbacks have seen. */
struct call {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int responses, errors, finals, released, allocated, freed, started, described;
  bool null_at_end, refuse;
  int64_t sum;
  char text[256];
};

static Error *allocate(Allocator *allocator, const char *name, size_t size, int memory, int64_t id, void *token, void **buffer,
                       void **buffer_token, int *actual, int64_t *actual_id) {
  struct call *call = token;
  (void)allocator, (void)name, (void)memory, (void)id;
  if (call->refuse)
    return S(ErrorNew)(UNAVAILABLE, "no memory here");
  ++call->allocated;
  *buffer = malloc(size + 1);
  *buffer_token = call;
  *actual = MEMORY_CPU;
  *actual_id = 0;
  return NULL;
}

static Error *release(Allocator *allocator, void *buffer, void *buffer_token, size_t size, int memory, int64_t id) {
  (void)allocator, (void)size, (void)memory, (void)id;
  ++((struct call *)buffer_token)->freed;
  free(buffer);
  return NULL;
}

static Error *start(Allocator *allocator, void *token) {
  (void)allocator;
  ++((struct call *)token)->started;
  return NULL;
}

static Error *query(Allocator *allocator, void *token, const char *name, size_t *size, int *memory, int64_t *id) {
  (void)allocator, (void)token, (void)name, (void)size, (void)memory, (void)id;
  return NULL;
}

static Error *describe(Allocator *allocator, const char *name, BufferAttributes *attributes, void *token, void *buffer_token) {
  (void)allocator, (void)name, (void)attributes, (void)buffer_token;
  ++((struct call *)token)->described;
  return NULL;
}

static void read_response(struct call *call, CallResponse *response) {
  Error *error = S(InferenceResponseError)(response);
  if (error != NULL) {
    ++call->errors;
    snprintf(call->text, sizeof call->text, "%d %s", S(ErrorCode)(error), S(ErrorMessage)(error));
    S(ErrorDelete)(error);
    return;
  }
  const char *name;
  int64_t version, id;
  uint32_t count;
  uint64_t rank;
  int kind, memory;
  const void *value;
  const int64_t *shape;
  size_t size;
  void *token;
  ++call->responses;
  GOOD(S(InferenceResponseModel)(response, &name, &version));
  SAME(version == 1);
  GOOD(S(InferenceResponseId)(response, &name));
  TEXT_IS(name, "of a call");
  GOOD(S(InferenceResponseParameterCount)(response, &count));
  if (count > 0) {
    GOOD(S(InferenceResponseParameter)(response, 0, &name, &kind, &value));
    SAME(strcmp(name, "number") == 0 && kind == PARAMETER_INT);
  }
  BAD(S(InferenceResponseParameter)(response, count, &name, &kind, &value));
  GOOD(S(InferenceResponseOutputCount)(response, &count));
  SAME(count == 1);
  GOOD(S(InferenceResponseOutput)(response, 0, &name, &kind, &shape, &rank, &value, &size, &memory, &id, &token));
  SAME(strcmp(name, "OUTPUT0") == 0 && kind == TYPE_INT32 && rank == 2 && memory == MEMORY_CPU && token == call);
  for (size_t at = 0; at < size / 4; ++at)
    call->sum += ((const int32_t *)value)[at];
  BAD(S(InferenceResponseOutput)(response, 1, &name, &kind, &shape, &rank, &value, &size, &memory, &id, &token));
}

static void responded(CallResponse *response, uint32_t flags, void *token) {
  struct call *call = token;
  pthread_mutex_lock(&call->lock);
  if (response == NULL) {
    call->null_at_end = true;
  } else {
    read_response(call, response);
    GOOD(S(InferenceResponseDelete)(response));
    BAD(S(InferenceResponseDelete)(response));
  }
  call->finals += flags == RESPONSE_FINAL;
  pthread_cond_signal(&call->changed);
  pthread_mutex_unlock(&call->lock);
}

static void released(CallRequest *request, uint32_t flags, void *token) {
  struct call *call = token;
  pthread_mutex_lock(&call->lock);
  SAME(flags == RELEASE_ALL);
  GOOD(S(InferenceRequestDelete)(request));
  BAD(S(InferenceRequestDelete)(request));
  ++call->released;
  pthread_cond_signal(&call->changed);
  pthread_mutex_unlock(&call->lock);
}

/* Creates a request with INPUT0 and the callbacks. */
static CallRequest *request_of(struct call *call, Allocator *allocator, const char *model, const int32_t *values, size_t count) {
  *call = (struct call){0};
  pthread_mutex_init(&call->lock, NULL);
  pthread_cond_init(&call->changed, NULL);
  CallRequest *request = NULL;
  int64_t shape[] = {1, (int64_t)count};
  GOOD(S(InferenceRequestNew)(&request, server, model, -1));
  GOOD(S(InferenceRequestSetId)(request, "of a call"));
  GOOD(S(InferenceRequestAddInput)(request, "INPUT0", TYPE_INT32, shape, 2));
  GOOD(S(InferenceRequestAppendInputData)(request, "INPUT0", values, count * 4, MEMORY_CPU, 0));
  GOOD(S(InferenceRequestAddRequestedOutput)(request, "OUTPUT0"));
  GOOD(S(InferenceRequestSetReleaseCallback)(request, released, call));
  GOOD(S(InferenceRequestSetResponseCallback)(request, allocator, call, responded, call));
  return request;
}

static void wait_for(struct call *call) {
  pthread_mutex_lock(&call->lock);
  while (call->released == 0)
    pthread_cond_wait(&call->changed, &call->lock);
  pthread_mutex_unlock(&call->lock);
  SAME(call->finals == 1 && call->allocated == call->freed);
}

static void check_attributes(CallRequest *request) {
  const char *text;
  uint64_t number;
  uint32_t small;
  bool cancelled;
  int64_t shape[] = {1};
  BufferAttributes *attributes;
  GOOD(S(InferenceRequestId)(request, &text));
  TEXT_IS(text, "of a call");
  BAD(S(InferenceRequestSetId)(request, NULL));
  BAD(S(InferenceRequestId)((CallRequest *)server, &text));
  GOOD(S(InferenceRequestSetFlags)(request, 3));
  GOOD(S(InferenceRequestFlags)(request, &small));
  SAME(small == 3);
  GOOD(S(InferenceRequestSetFlags)(request, 0));
  BAD(S(InferenceRequestSetFlags)(request, 4));
  GOOD(S(InferenceRequestSetCorrelationIdString)(request, "sequence"));
  GOOD(S(InferenceRequestCorrelationIdString)(request, &text));
  TEXT_IS(text, "sequence");
  BAD(S(InferenceRequestCorrelationId)(request, &number));
  GOOD(S(InferenceRequestSetCorrelationId)(request, 0));
  GOOD(S(InferenceRequestCorrelationId)(request, &number));
  BAD(S(InferenceRequestCorrelationIdString)(request, &text));
  GOOD(S(InferenceRequestSetPriority)(request, 2));
  GOOD(S(InferenceRequestPriority)(request, &small));
  GOOD(S(InferenceRequestPriorityUInt64)(request, &number));
  SAME(small == 2 && number == 2);
  GOOD(S(InferenceRequestSetPriorityUInt64)(request, 0));
  GOOD(S(InferenceRequestSetTimeoutMicroseconds)(request, 9000000));
  GOOD(S(InferenceRequestTimeoutMicroseconds)(request, &number));
  SAME(number == 9000000);
  GOOD(S(InferenceRequestSetStringParameter)(request, "s", "x"));
  GOOD(S(InferenceRequestSetIntParameter)(request, "i", 1));
  GOOD(S(InferenceRequestSetBoolParameter)(request, "b", true));
  GOOD(S(InferenceRequestSetDoubleParameter)(request, "d", 0.5));
  BAD(S(InferenceRequestSetStringParameter)(request, "s", NULL));
  BAD(S(InferenceRequestSetIntParameter)(NULL, "i", 1));
  BAD(S(InferenceRequestSetBoolParameter)(request, NULL, true));
  BAD(S(InferenceRequestSetDoubleParameter)(request, NULL, 1));
  BAD(S(InferenceRequestAddInput)(request, "INPUT0", TYPE_INT32, shape, 1));
  BAD(S(InferenceRequestAddInput)(request, "MORE", 99, shape, 1));
  GOOD(S(InferenceRequestAddInput)(request, "MORE", TYPE_INT32, shape, 1));
  GOOD(S(InferenceRequestAppendInputDataWithHostPolicy)(request, "MORE", "abcd", 4, MEMORY_CPU, 0, "cpu"));
  BAD(S(InferenceRequestAppendInputData)(request, "MORE", "abcd", 4, MEMORY_GPU, -1));
  BAD(S(InferenceRequestAppendInputData)(request, "NONE", "abcd", 4, MEMORY_CPU, 0));
  BAD(S(InferenceRequestAppendInputData)(request, "MORE", NULL, 4, MEMORY_CPU, 0));
  GOOD(S(BufferAttributesNew)(&attributes));
  GOOD(S(BufferAttributesSetByteSize)(attributes, 4));
  GOOD(S(InferenceRequestAppendInputDataWithBufferAttributes)(request, "MORE", "abcd", attributes));
  GOOD(S(BufferAttributesDelete)(attributes));
  GOOD(S(InferenceRequestRemoveAllInputData)(request, "MORE"));
  BAD(S(InferenceRequestRemoveAllInputData)(request, "NONE"));
  GOOD(S(InferenceRequestRemoveInput)(request, "MORE"));
  BAD(S(InferenceRequestRemoveInput)(request, "MORE"));
  GOOD(S(InferenceRequestAddRequestedOutput)(request, "OUTPUT1"));
  GOOD(S(InferenceRequestRemoveRequestedOutput)(request, "OUTPUT1"));
  BAD(S(InferenceRequestAddRequestedOutput)(request, NULL));
  GOOD(S(InferenceRequestIsCancelled)(request, &cancelled));
  SAME(!cancelled);
}

static void check_calls(Allocator *allocator) {
  struct call call;
  const int32_t values[] = {1, 2, 3}, five[] = {5};
  CallRequest *request = request_of(&call, allocator, "echo", values, 3);
  check_attributes(request);
  GOOD(S(ServerInferAsync)(server, request, NULL));
  wait_for(&call);
  SAME(call.responses == 1 && call.sum == 6 && call.started == 1 && call.described == 1 && !call.null_at_end);
  // A stream of five responses, and an end without one.
  request = request_of(&call, allocator, "many", five, 1);
  GOOD(S(ServerInferAsync)(server, request, NULL));
  wait_for(&call);
  SAME(call.responses == 5 && call.sum == 25 && call.null_at_end);
  // The called model fails; the memory is refused; the call is cancelled.
  request = request_of(&call, allocator, "echo", values, 3);
  GOOD(S(InferenceRequestSetStringParameter)(request, "fail", "on purpose"));
  GOOD(S(ServerInferAsync)(server, request, NULL));
  wait_for(&call);
  SAME(call.errors == 1 && strcmp(call.text, "3 on purpose") == 0);
  request = request_of(&call, allocator, "echo", values, 3);
  call.refuse = true;
  GOOD(S(ServerInferAsync)(server, request, NULL));
  wait_for(&call);
  SAME(call.errors == 1 && strstr(call.text, "no memory here") != NULL);
  request = request_of(&call, allocator, "many", five, 1);
  GOOD(S(InferenceRequestSetStringParameter)(request, "wait", "yes"));
  GOOD(S(ServerInferAsync)(server, request, NULL));
  GOOD(S(InferenceRequestCancel)(request));
  wait_for(&call);
  SAME(call.errors == 1 && call.text[0] == '7');
  // Requests that cannot be sent stay with the caller.
  request = request_of(&call, allocator, "echo", values, 3);
  GOOD(S(InferenceRequestSetReleaseCallback)(request, NULL, NULL));
  BAD(S(ServerInferAsync)(server, request, NULL));
  GOOD(S(InferenceRequestRemoveAllInputs)(request));
  GOOD(S(InferenceRequestRemoveAllRequestedOutputs)(request));
  GOOD(S(InferenceRequestDelete)(request));
  BAD(S(ServerInferAsync)(server, request, NULL));
  FAILS(NOT_FOUND, S(InferenceRequestNew)(&request, server, "missing", -1));
  BAD(S(InferenceRequestNew)(&request, server, "echo", 0));
  BAD(S(InferenceRequestNew)(&request, NULL, "echo", -1));
}

/* A traced request has a trace, and passes a child of it to a call. */
static void check_traces(Request *request, Allocator *allocator) {
  Trace *trace, *child;
  const char *context;
  struct call call;
  const int32_t values[] = {4};
  BAD(S(InferenceTraceSpawnChildTrace)(NULL, &child));
  BAD(S(InferenceTraceContext)(NULL, &context));
  BAD(S(InferenceTraceSetContext)(NULL, "{}"));
  BAD(S(InferenceTraceReportActivity)(NULL, 1, "x"));
  GOOD(S(InferenceTraceDelete)(NULL));
  GOOD(B(RequestTrace)(request, &trace));
  if (trace == NULL)
    return;
  GOOD(S(InferenceTraceContext)(trace, &context));
  FAILS(UNSUPPORTED, S(InferenceTraceSetContext)(trace, "{}"));
  GOOD(S(InferenceTraceReportActivity)(trace, now(), "DECODE_START"));
  GOOD(S(InferenceTraceReportActivity)(trace, 1, "before the request"));
  char long_name[258];
  memset(long_name, 'x', 257);
  long_name[257] = 0;
  BAD(S(InferenceTraceReportActivity)(trace, now(), long_name));
  BAD(S(InferenceTraceReportActivity)(trace, now(), NULL));
  GOOD(S(InferenceTraceSpawnChildTrace)(trace, &child));
  GOOD(S(InferenceTraceDelete)(child));
  BAD(S(InferenceTraceDelete)(child));
  GOOD(S(InferenceTraceSpawnChildTrace)(trace, &child));
  CallRequest *called = request_of(&call, allocator, "echo", values, 1);
  GOOD(S(ServerInferAsync)(server, called, child));
  wait_for(&call);
  SAME(call.sum == 4);
}

static void check_server(void) {
  bool is_ready;
  uint32_t flags;
  GOOD(S(ServerIsLive)(server, &is_ready));
  SAME(is_ready);
  GOOD(S(ServerIsReady)(server, &is_ready));
  SAME(is_ready);
  BAD(S(ServerIsReady)(NULL, &is_ready));
  GOOD(S(ServerModelIsReady)(server, "echo", 1, &is_ready));
  SAME(is_ready);
  GOOD(S(ServerModelIsReady)(server, "missing", -1, &is_ready));
  SAME(!is_ready);
  BAD(S(ServerModelIsReady)(server, NULL, -1, &is_ready));
  GOOD(S(ServerModelTransactionProperties)(server, "echo", -1, &flags, NULL));
  SAME(flags == 1);
  GOOD(S(ServerModelTransactionProperties)(server, "many", 1, &flags, NULL));
  SAME(flags == 2);
  same(__LINE__, S(ServerModelTransactionProperties)(server, "missing", -1, &flags, NULL) != NULL, "an error for a missing model");
  same(__LINE__, S(ServerLoadModel)(server, "missing") != NULL, "an error for a load of a missing model");
  GOOD(S(ServerLoadModel)(server, "spare"));
  GOOD(S(ServerModelIsReady)(server, "spare", -1, &is_ready));
  SAME(is_ready);
  int64_t number = 1;
  Parameter *wrong = S(ParameterNew)("config", PARAMETER_INT, &number);
  const Parameter *parameters[] = {wrong};
  BAD(S(ServerLoadModelWithParameters)(server, "spare", parameters, 1));
  BAD(S(ServerLoadModelWithParameters)(server, "spare", NULL, 1));
  S(ParameterDelete)(wrong);
  GOOD(S(ServerUnloadModel)(server, "spare"));
  GOOD(S(ServerLoadModelWithParameters)(server, "spare", NULL, 0));
  GOOD(S(ServerUnloadModelAndDependents)(server, "spare"));
  BAD(S(ServerUnloadModel)(server, NULL));
}

Error *B(ModelInitialize)(Model *model) {
  return B(ModelServer)(model, &server);
}

Error *B(ModelInstanceExecute)(Instance *instance, Request **requests, uint32_t count) {
  (void)instance;
  Allocator *allocator;
  for (uint32_t at = 0; at < count; ++at) {
    BAD(S(ResponseAllocatorNew)(&allocator, NULL, release, start));
    GOOD(S(ResponseAllocatorNew)(&allocator, allocate, release, start));
    GOOD(S(ResponseAllocatorSetQueryFunction)(allocator, query));
    GOOD(S(ResponseAllocatorSetBufferAttributesFunction)(allocator, describe));
    BAD(S(ResponseAllocatorSetQueryFunction)(NULL, query));
    BAD(S(ResponseAllocatorSetBufferAttributesFunction)(NULL, describe));
    check_server();
    check_calls(allocator);
    check_traces(requests[at], allocator);
    GOOD(S(ResponseAllocatorDelete)(allocator));
    BAD(S(ResponseAllocatorDelete)(allocator));
    TRY(answer_with_report(requests[at]));
    TRY(B(RequestRelease)(requests[at], RELEASE_ALL));
  }
  return NULL;
}
