/* What several test backends do: copy the inputs of a request to the outputs of a response. */
#ifndef PHAROS_TEST_ECHO_H
#define PHAROS_TEST_ECHO_H

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "triton_api.h"

/* Returns from a function with the error of a call, if it has one. */
#define TRY(call)            \
  do {                       \
    Error *failed = (call);  \
    if (failed != NULL)      \
      return failed;         \
  } while (0)

static inline uint64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* Copies INPUTn to OUTPUTn. */
static inline Error *echo_input(Input *input, Response *response) {
  const char *name;
  int datatype, memory = MEMORY_CPU;
  const int64_t *shape;
  uint32_t rank, buffers;
  uint64_t size, part, at = 0;
  int64_t id = 0;
  TRY(B(InputProperties)(input, &name, &datatype, &shape, &rank, &size, &buffers));
  char output_name[256];
  if (strncmp(name, "INPUT", 5) != 0)
    return NULL;
  snprintf(output_name, sizeof output_name, "OUTPUT%s", name + 5);
  Output *output;
  TRY(B(ResponseOutput)(response, &output, output_name, datatype, shape, rank));
  void *place;
  TRY(B(OutputBuffer)(output, &place, size, &memory, &id));
  for (uint32_t buffer = 0; buffer < buffers; ++buffer) {
    const void *from;
    TRY(B(InputBuffer)(input, buffer, &from, &part, &memory, &id));
    memcpy((char *)place + at, from, part);
    at += part;
  }
  return NULL;
}

/* Copies all inputs. */
static inline Error *echo(Request *request, Response *response) {
  uint32_t count;
  TRY(B(RequestInputCount)(request, &count));
  for (uint32_t at = 0; at < count; ++at) {
    Input *input;
    TRY(B(RequestInputByIndex)(request, at, &input));
    TRY(echo_input(input, response));
  }
  return NULL;
}

/* Returns the value of a string parameter of a request; NULL without it. */
static inline const char *parameter(Request *request, const char *wanted) {
  uint32_t count = 0;
  B(RequestParameterCount)(request, &count);
  for (uint32_t at = 0; at < count; ++at) {
    const char *name;
    int type;
    const void *value;
    if (B(RequestParameter)(request, at, &name, &type, &value) == NULL && type == PARAMETER_STRING &&
        strcmp(name, wanted) == 0)
      return value;
  }
  return NULL;
}

#endif
