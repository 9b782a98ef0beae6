/* Completes a configuration without inputs and outputs: adds INPUT0 and OUTPUT0 of INT32, and the
 * maximum batch size of the command line. Refuses a model with the parameter `refuse`. */
#include "echo.h"

static char batch_size[16] = "0";

Error *B(Initialize)(Backend *backend) {
  Message *config;
  const char *json;
  size_t size;
  TRY(B(BackendConfig)(backend, &config));
  TRY(S(MessageSerializeToJson)(config, &json, &size));
  const char *found = strstr(json, "\"default-max-batch-size\":\"");
  if (found != NULL)
    sscanf(found, "\"default-max-batch-size\":\"%15[0-9]", batch_size);
  return NULL;
}

Error *B(ModelInitialize)(Model *model) {
  bool completes;
  TRY(B(ModelAutoCompleteConfig)(model, &completes));
  if (!completes)
    return NULL;
  Message *message;
  const char *json, *name;
  size_t size;
  TRY(B(ModelName)(model, &name));
  TRY(B(ModelConfig)(model, 1, &message));
  TRY(S(MessageSerializeToJson)(message, &json, &size));
  if (json[size] != 0)
    return S(ErrorNew)(INTERNAL, "the configuration does not end with a NUL");
  bool refuse = strstr(json, "\"refuse\"") != NULL;
  TRY(S(MessageDelete)(message));
  if (refuse)
    return S(ErrorNew)(INVALID_ARG, "this model is refused");
  char completed[1024];
  int length = snprintf(completed, sizeof completed,
                        "{\"name\":\"%s\",\"backend\":\"complete\",\"max_batch_size\":%s,"
                        "\"input\":[{\"name\":\"INPUT0\",\"data_type\":\"TYPE_INT32\",\"dims\":[4]}],"
                        "\"output\":[{\"name\":\"OUTPUT0\",\"data_type\":\"TYPE_INT32\",\"dims\":[4]}]}",
                        name, batch_size);
  TRY(S(MessageNewFromSerializedJson)(&message, completed, (size_t)length));
  TRY(B(ModelSetConfig)(model, 1, message));
  return S(MessageDelete)(message);
}

Error *B(ModelInstanceExecute)(Instance *instance, Request **requests, uint32_t count) {
  (void)instance;
  for (uint32_t at = 0; at < count; ++at) {
    Response *response;
    TRY(B(ResponseNew)(&response, requests[at]));
    TRY(echo(requests[at], response));
    TRY(B(ResponseSend)(response, RESPONSE_FINAL, NULL));
    TRY(B(RequestRelease)(requests[at], RELEASE_ALL));
  }
  return NULL;
}
