/* Compares the results of calls with the expected ones. What differs is in `report`, a line each. */
#ifndef PHAROS_TEST_CHECKS_H
#define PHAROS_TEST_CHECKS_H

#include "echo.h"

static char report[1 << 16];
static size_t written;

static inline void differs(int line, const char *wanted, const char *got) {
  int length = snprintf(report + written, sizeof report - written, "line %d: expected %s, got %s\n", line, wanted, got);
  if (length > 0 && written + (size_t)length < sizeof report)
    written += (size_t)length;
}

static inline void expect(int line, int wanted, Error *got) {
  char expected[32], found[256];
  int code = got == NULL ? -1 : S(ErrorCode)(got);
  if (code != wanted) {
    snprintf(expected, sizeof expected, "%d", wanted);
    snprintf(found, sizeof found, "%d (%s)", code, got == NULL ? "" : S(ErrorMessage)(got));
    differs(line, expected, found);
  }
  S(ErrorDelete)(got);
}

static inline void same(int line, bool is_same, const char *what) {
  if (!is_same)
    differs(line, what, "another value");
}

#define GOOD(call) expect(__LINE__, -1, (call))
#define BAD(call) expect(__LINE__, INVALID_ARG, (call))
#define FAILS(code, call) expect(__LINE__, (code), (call))
#define SAME(condition) same(__LINE__, (condition), #condition)
#define TEXT_IS(text, wanted) SAME(strcmp((text), (wanted)) == 0)

/* Answers a request with the report as TEXT; "ok" if nothing differs. */
static inline Error *answer_with_report(Request *request) {
  Response *response;
  Output *output;
  char *place;
  int memory;
  int64_t id, shape[] = {1, 1};
  if (written == 0)
    written = (size_t)sprintf(report, "ok");
  TRY(B(ResponseNew)(&response, request));
  TRY(B(ResponseOutput)(response, &output, "TEXT", TYPE_BYTES, shape, 2));
  TRY(B(OutputBuffer)(output, (void **)&place, written + 4, &memory, &id));
  uint32_t length = (uint32_t)written;
  memcpy(place, &length, 4);
  memcpy(place + 4, report, written);
  written = 0;
  return B(ResponseSend)(response, RESPONSE_FINAL, NULL);
}

#endif
