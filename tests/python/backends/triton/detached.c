/* Answers after the execution has returned: a thread takes the requests of each batch. Of a decoupled
 * model, a request gets as many responses as the first element of INPUT0 says; each is the input, with
 * the parameter `number`. `keep` releases the request before its first response, `lose` ends without
 * an answer, `fail` sends its text as an error, `wait` waits until the request is cancelled, `never`
 * never answers. */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "echo.h"

struct work {
  Instance *instance;
  Request *request;
  Factory *factory;
  bool decoupled;
};

static bool decoupled_model;

Error *B(ModelInitialize)(Model *model) {
  Message *message;
  const char *json;
  size_t size;
  TRY(B(ModelConfig)(model, 1, &message));
  TRY(S(MessageSerializeToJson)(message, &json, &size));
  decoupled_model = strstr(json, "\"decoupled\":true") != NULL;
  return S(MessageDelete)(message);
}

static Error *respond(struct work *work, int64_t number, bool last) {
  Response *response;
  TRY(B(ResponseNewFromFactory)(&response, work->factory));
  TRY(B(ResponseSetIntParameter)(response, "number", number));
  TRY(echo(work->request, response));
  return B(ResponseSend)(response, last ? RESPONSE_FINAL : 0, NULL);
}

static Error *answer(struct work *work) {
  Request *request = work->request;
  const char *text = parameter(request, "fail");
  if (text != NULL) {
    Response *response;
    TRY(B(ResponseNewFromFactory)(&response, work->factory));
    Error *error = S(ErrorNew)(UNAVAILABLE, text);
    Error *unsent = B(ResponseSend)(response, RESPONSE_FINAL, error);
    S(ErrorDelete)(error);
    return unsent;
  }
  if (parameter(request, "wait") != NULL) {
    bool cancelled = false;
    while (!cancelled) {
      struct timespec pause = {0, 1000000};
      nanosleep(&pause, NULL);
      TRY(B(ResponseFactoryIsCancelled)(work->factory, &cancelled));
    }
    S(LogMessage)(LOG_WARN, __FILE__, __LINE__, "the request was cancelled");
    return NULL;
  }
  while (parameter(request, "never") != NULL)
    sleep(1);
  if (parameter(request, "lose") != NULL)
    return NULL;
  if (!work->decoupled)
    return respond(work, 0, true);
  Input *input;
  const void *bytes;
  uint64_t size;
  int memory;
  int64_t id;
  TRY(B(RequestInputByIndex)(request, 0, &input));
  TRY(B(InputBuffer)(input, 0, &bytes, &size, &memory, &id));
  int32_t responses;
  memcpy(&responses, bytes, sizeof responses);
  for (int32_t number = 0; number < responses; ++number)
    TRY(respond(work, number, false));
  return B(ResponseFactorySendFlags)(work->factory, RESPONSE_FINAL);
}

static void *later(void *argument) {
  struct work *work = argument;
  struct timespec pause = {0, 2000000};
  nanosleep(&pause, NULL);
  uint64_t start = now();
  Error *failed = answer(work);
  if (failed != NULL) {
    S(LogMessage)(LOG_ERROR, __FILE__, __LINE__, S(ErrorMessage)(failed));
    S(ErrorDelete)(failed);
  }
  B(ModelInstanceReportStatistics)(work->instance, work->request, failed == NULL, start, start, now(), now());
  B(RequestRelease)(work->request, RELEASE_ALL);
  B(ResponseFactoryDelete)(work->factory);
  free(work);
  return NULL;
}

Error *B(ModelInstanceExecute)(Instance *instance, Request **requests, uint32_t count) {
  for (uint32_t at = 0; at < count; ++at) {
    struct work *work = malloc(sizeof *work);
    *work = (struct work){instance, requests[at], NULL, decoupled_model};
    TRY(B(ResponseFactoryNew)(&work->factory, requests[at]));
    pthread_t thread;
    pthread_create(&thread, NULL, later, work);
    pthread_detach(thread);
  }
  return NULL;
}
