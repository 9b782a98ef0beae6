/* Returns INPUTn as OUTPUTn where its client wants it, as backends of GPUs do: inputs are read where they are, and outputs are written
 * to the GPU if that is where they go. The memory of the GPU is the process's memory in the test that uses this backend. What the
 * functions say about memory is in parameters of the response. With the parameter `scratch`, memory of the memory manager is used. */
#include "checks.h"

static MemoryManager *manager;

Error *B(Initialize)(Backend *backend) { return B(BackendMemoryManager)(backend, &manager); }

/* Copies through memory of a kind that the manager allocates. */
static Error *through_scratch(int kind, void *to, const void *from, uint64_t size) {
  void *scratch, *other;
  TRY(B(MemoryManagerAllocate)(manager, &scratch, kind, 0, size));
  memcpy(scratch, from, size);
  memcpy(to, scratch, size);
  FAILS(INVALID_ARG, B(MemoryManagerFree)(manager, scratch, kind == MEMORY_GPU ? MEMORY_CPU_PINNED : MEMORY_GPU, 0));
  GOOD(B(MemoryManagerFree)(manager, scratch, kind, 0));
  FAILS(INVALID_ARG, B(MemoryManagerFree)(manager, scratch, kind, 0));
  FAILS(INVALID_ARG, B(MemoryManagerFree)(manager, &scratch, kind, 0));
  GOOD(B(MemoryManagerAllocate)(manager, &other, kind, 0, size));
  SAME(other == scratch);
  FAILS(UNAVAILABLE, B(MemoryManagerAllocate)(manager, &scratch, kind, 0, UINT64_MAX));
  return B(MemoryManagerFree)(manager, other, kind, 0);
}

static Error *echo_here(Request *request, Input *input, Response *response) {
  const char *name, *kind = parameter(request, "scratch");
  const int64_t *shape;
  int datatype, from_memory = MEMORY_GPU, wanted = MEMORY_CPU, to_memory, memory;
  int64_t from_id = 0, to_id = 0, id;
  uint32_t rank, buffers;
  uint64_t size, part;
  BufferAttributes *attributes;
  const void *from, *attributed;
  Output *output;
  void *to, *handle;
  size_t bytes;
  char text[128];
  TRY(B(InputProperties)(input, &name, &datatype, &shape, &rank, &size, &buffers));
  snprintf(text, sizeof text, "OUTPUT%s", name + 5);
  bytes = size;
  TRY(B(InputBuffer)(input, 0, &from, &part, &from_memory, &from_id));
  SAME(part == size && buffers == 1 && from_id == 0);
  TRY(B(RequestOutputBufferProperties)(request, text, &bytes, &wanted, &to_id));
  to_memory = wanted;
  TRY(B(ResponseOutput)(response, &output, text, datatype, shape, rank));
  TRY(B(OutputBuffer)(output, &to, size, &to_memory, &to_id));
  SAME(to_id == 0);
  if (kind == NULL)
    memcpy(to, from, size);
  else
    TRY(through_scratch(strcmp(kind, "gpu") == 0 ? MEMORY_GPU : MEMORY_CPU_PINNED, to, from, size));
  TRY(B(InputBufferAttributes)(input, 0, &attributed, &attributes));
  GOOD(S(BufferAttributesMemoryType)(attributes, &memory));
  GOOD(S(BufferAttributesMemoryTypeId)(attributes, &id));
  GOOD(S(BufferAttributesByteSize)(attributes, &bytes));
  GOOD(S(BufferAttributesCudaIpcHandle)(attributes, &handle));
  SAME(attributed == from && memory == from_memory && id == 0 && bytes == size);
  SAME((handle != NULL) == (memory == MEMORY_GPU));
  TRY(B(ResponseSetIntParameter)(response, "handle", handle == NULL ? 0 : *(int64_t *)handle));
  TRY(B(OutputBufferAttributes)(output, &attributes));
  GOOD(S(BufferAttributesMemoryType)(attributes, &memory));
  SAME(memory == to_memory);
  snprintf(text, sizeof text, "input %d, properties %d, output %d", from_memory, wanted, to_memory);
  return B(ResponseSetStringParameter)(response, name, text);
}

Error *B(ModelInstanceExecute)(Instance *instance, Request **requests, uint32_t count) {
  (void)instance;
  for (uint32_t at = 0; at < count; ++at) {
    Request *request = requests[at];
    Response *response;
    Error *wrong = NULL;
    uint32_t inputs;
    TRY(B(ResponseNew)(&response, request));
    TRY(B(RequestInputCount)(request, &inputs));
    for (uint32_t index = 0; index < inputs && wrong == NULL; ++index) {
      Input *input;
      TRY(B(RequestInputByIndex)(request, index, &input));
      wrong = echo_here(request, input, response);
    }
    TRY(B(ResponseSetStringParameter)(response, "report", written == 0 ? "ok" : report));
    written = 0;
    TRY(B(ResponseSend)(response, RESPONSE_FINAL, wrong));
    if (wrong != NULL)
      S(ErrorDelete)(wrong);
    TRY(B(RequestRelease)(request, RELEASE_ALL));
  }
  return NULL;
}
