/* Adds INPUT0 to the sequence's state, the sum, and returns the sum as OUTPUT0. A request with the
 * parameter `later` is answered by a thread, `keep` does not update the state, `fail` fails. */
#include <pthread.h>
#include <stdlib.h>

#include "echo.h"

static Error *value_of(Request *request, const char *name, int32_t *value, int64_t *shape) {
  Input *input;
  const void *bytes;
  const int64_t *dims;
  uint64_t size;
  uint32_t rank;
  int memory;
  int64_t id;
  TRY(B(RequestInput)(request, name, &input));
  TRY(B(InputProperties)(input, NULL, NULL, &dims, &rank, NULL, NULL));
  memcpy(shape, dims, rank * sizeof *dims);
  TRY(B(InputBuffer)(input, 0, &bytes, &size, &memory, &id));
  if (size != sizeof *value || rank != 2)
    return S(ErrorNew)(INTERNAL, "an input has another size");
  memcpy(value, bytes, size);
  return NULL;
}

static Error *answer(Request *request) {
  int32_t sum, more;
  int64_t shape[2], id;
  int memory;
  void *place;
  Output *output;
  Response *response;
  State *state, *wrong;
  BufferAttributes *attributes;
  TRY(value_of(request, "SUM_IN", &sum, shape));
  TRY(value_of(request, "INPUT0", &more, shape));
  sum += more;
  if (B(StateNew)(&wrong, request, "OTHER", TYPE_INT32, shape, 2) == NULL)
    return S(ErrorNew)(INTERNAL, "a state with another name is valid");
  TRY(B(StateNew)(&state, request, "SUM_OUT", TYPE_INT32, shape, 2));
  if (B(StateUpdate)(state) == NULL || B(StateBufferAttributes)(state, &attributes) == NULL)
    return S(ErrorNew)(INTERNAL, "a state without a buffer is valid");
  TRY(B(StateBuffer)(state, &place, sizeof sum, &memory, &id));
  TRY(B(StateBufferAttributes)(state, &attributes));
  memcpy(place, &sum, sizeof sum);
  if (parameter(request, "keep") == NULL)
    TRY(B(StateUpdate)(state));
  TRY(B(ResponseNew)(&response, request));
  if (parameter(request, "fail") != NULL) {
    Error *error = S(ErrorNew)(INVALID_ARG, "failed");
    Error *unsent = B(ResponseSend)(response, RESPONSE_FINAL, error);
    S(ErrorDelete)(error);
    return unsent;
  }
  TRY(B(ResponseOutput)(response, &output, "OUTPUT0", TYPE_INT32, shape, 2));
  TRY(B(OutputBuffer)(output, &place, sizeof sum, &memory, &id));
  memcpy(place, &sum, sizeof sum);
  return B(ResponseSend)(response, RESPONSE_FINAL, NULL);
}

static void answer_and_release(Request *request) {
  Error *failed = answer(request);
  if (failed != NULL) {
    S(LogMessage)(LOG_ERROR, __FILE__, __LINE__, S(ErrorMessage)(failed));
    S(ErrorDelete)(failed);
  }
  B(RequestRelease)(request, RELEASE_ALL);
}

static void *later(void *request) {
  struct timespec pause = {0, 3000000};
  nanosleep(&pause, NULL);
  answer_and_release(request);
  return NULL;
}

Error *B(ModelInstanceExecute)(Instance *instance, Request **requests, uint32_t count) {
  (void)instance;
  for (uint32_t at = 0; at < count; ++at) {
    pthread_t thread;
    if (parameter(requests[at], "later") == NULL) {
      answer_and_release(requests[at]);
    } else {
      pthread_create(&thread, NULL, later, requests[at]);
      pthread_detach(thread);
    }
  }
  return NULL;
}
