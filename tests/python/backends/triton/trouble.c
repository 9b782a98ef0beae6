/* Fails in the entry point that the model's parameter `where` names, in the way that `how` names:
 * `error`, `crash`, `exit`, `hang`, or `null` for an error without a message. In `Execute`, only a
 * request with the parameter `now` does. `BACKEND_TROUBLE` has "WHERE HOW" for entry points that have
 * no model. */
#include <stdlib.h>
#include <unistd.h>

#include "echo.h"

static char where[64], how[64];
static volatile uintptr_t nowhere = 8;

static Error *trouble(const char *place) {
  if (strcmp(where, place) != 0)
    return NULL;
  if (strcmp(how, "crash") == 0)
    *(volatile int *)nowhere = 1;
  if (strcmp(how, "exit") == 0)
    exit(3);
  while (strcmp(how, "hang") == 0)
    sleep(1);
  char text[128];
  snprintf(text, sizeof text, "trouble in %s", place);
  return S(ErrorNew)(UNAVAILABLE, strcmp(how, "null") == 0 ? NULL : text);
}

/* Reads "string_value" of a parameter in the JSON of a configuration. */
static void read_parameter(const char *json, const char *name, char *value) {
  char wanted[64];
  snprintf(wanted, sizeof wanted, "\"%s\":{\"string_value\":\"", name);
  const char *found = strstr(json, wanted);
  if (found != NULL)
    sscanf(found + strlen(wanted), "%63[^\"]", value);
}

Error *B(Initialize)(Backend *backend) {
  Message *config;
  const char *json;
  size_t size;
  TRY(B(BackendConfig)(backend, &config));
  TRY(S(MessageSerializeToJson)(config, &json, &size));
  const char *found = strstr(json, "\"trouble\":\"");
  if (found != NULL)
    sscanf(found, "\"trouble\":\"%63[^ ] %63[^\"]", where, how);
  return trouble("Initialize");
}

Error *B(GetBackendAttribute)(Backend *backend, BackendAttribute *attributes) {
  (void)backend, (void)attributes;
  return trouble("GetBackendAttribute");
}

Error *B(ModelInitialize)(Model *model) {
  Message *message;
  const char *json;
  size_t size;
  TRY(B(ModelConfig)(model, 1, &message));
  TRY(S(MessageSerializeToJson)(message, &json, &size));
  read_parameter(json, "where", where);
  read_parameter(json, "how", how);
  TRY(S(MessageDelete)(message));
  return trouble("ModelInitialize");
}

Error *B(ModelInstanceInitialize)(Instance *instance) {
  (void)instance;
  return trouble("ModelInstanceInitialize");
}

Error *B(ModelInstanceExecute)(Instance *instance, Request **requests, uint32_t count) {
  (void)instance;
  for (uint32_t at = 0; at < count; ++at)
    if (parameter(requests[at], "now") != NULL)
      TRY(trouble("ModelInstanceExecute"));
  for (uint32_t at = 0; at < count; ++at) {
    Response *response;
    TRY(B(ResponseNew)(&response, requests[at]));
    TRY(echo(requests[at], response));
    TRY(B(ResponseSend)(response, RESPONSE_FINAL, NULL));
    TRY(B(RequestRelease)(requests[at], RELEASE_ALL));
  }
  return NULL;
}

Error *B(ModelInstanceReady)(Instance *instance) {
  (void)instance;
  return trouble("ModelInstanceReady");
}

Error *B(ModelInstanceFinalize)(Instance *instance) {
  (void)instance;
  return trouble("ModelInstanceFinalize");
}

Error *B(ModelFinalize)(Model *model) {
  (void)model;
  return trouble("ModelFinalize");
}

Error *B(Finalize)(Backend *backend) {
  (void)backend;
  return trouble("Finalize");
}
