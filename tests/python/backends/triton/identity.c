/* Returns INPUTn as OUTPUTn, at once. Reports statistics as Triton's backends do. A request with the
 * parameter `fail` gets its text as an error; with `lose`, it is released without a response. */
#include "echo.h"

Error *B(ModelInstanceExecute)(Instance *instance, Request **requests, uint32_t count) {
  uint64_t start = now();
  for (uint32_t at = 0; at < count; ++at) {
    Request *request = requests[at];
    Error *failed = NULL;
    const char *text = parameter(request, "fail");
    if (parameter(request, "lose") == NULL) {
      Response *response;
      TRY(B(ResponseNew)(&response, request));
      failed = text != NULL ? S(ErrorNew)(INVALID_ARG, text) : echo(request, response);
      Error *unsent = B(ResponseSend)(response, RESPONSE_FINAL, failed);
      if (unsent != NULL)
        S(ErrorDelete)(unsent);
    }
    uint64_t end = now();
    TRY(B(ModelInstanceReportStatistics)(instance, request, failed == NULL, start, start, end, end));
    if (failed != NULL)
      S(ErrorDelete)(failed);
    TRY(B(RequestRelease)(request, RELEASE_ALL));
  }
  uint64_t end = now();
  return B(ModelInstanceReportBatchStatistics)(instance, count, start, start, end, end);
}
