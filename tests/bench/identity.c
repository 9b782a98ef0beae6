/* Returns INPUT0 as OUTPUT0: the backend that `make bench` compares with `tests/python/backends/triton/identity.c`. */
#include <stdlib.h>

#include "pharos_backend.h"

struct instance {
  const pharos_host *host;
};

PHAROS_EXPORT uint32_t pharos_backend_abi_version(void) { return PHAROS_BACKEND_ABI_VERSION; }

PHAROS_EXPORT pharos_code pharos_backend_create(const pharos_context *context, void **instance) {
  struct instance *made = malloc(sizeof *made);
  if (made == NULL)
    return PHAROS_INTERNAL;
  made->host = context->host;
  *instance = made;
  return PHAROS_OK;
}

PHAROS_EXPORT void pharos_backend_destroy(void *instance) { free(instance); }

PHAROS_EXPORT pharos_code pharos_backend_execute(void *instance, const pharos_batch *batch, pharos_outputs *outputs) {
  const pharos_host *host = ((struct instance *)instance)->host;
  const pharos_input *input = host->input(batch, 0);
  pharos_output output = pharos_output_of(0, input->datatype, input->shape, input->rank);
  void *data;
  pharos_code code = host->allocate(outputs, &output, &data);
  if (code == PHAROS_OK)
    memcpy(data, input->data, input->bytes);
  return code;
}
