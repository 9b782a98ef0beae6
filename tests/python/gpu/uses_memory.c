/*
 * A backend whose instances use memory of simulated GPUs: they append lines to the devices of the fake NVML library
 * (tests/fake_nvml/nvml.c). The output is the input.
 *
 * Parameters, each a list of "DEVICE BYTES" separated by commas:
 *     uses     what an instance uses after its start
 *     grows    what it uses in addition with each request
 * and `devices`, the path of the file.
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pharos_backend.h"

typedef struct {
    const pharos_host *host;
    char devices[4096], grows[256];
} instance;

uint32_t pharos_backend_abi_version(void)
{
    return PHAROS_BACKEND_ABI_VERSION;
}

const char *pharos_backend_engine(void)
{
    return "uses_memory";
}

/* Appends a line for each entry of the list, all with one write. */
static int use(const char *devices, const char *list)
{
    char lines[1024] = "", text[256];
    snprintf(text, sizeof text, "%s", list);
    for (char *rest = text, *entry; (entry = strtok_r(rest, ",", &rest));) {
        unsigned device;
        unsigned long long bytes;
        if (sscanf(entry, "%u %llu", &device, &bytes) != 2)
            return 0;
        size_t length = strlen(lines);
        snprintf(lines + length, sizeof lines - length, "%u process %d %llu\n", device, (int)getpid(), bytes);
    }
    FILE *file = fopen(devices, "a");
    return file && fputs(lines, file) >= 0 && fclose(file) == 0;
}

pharos_code pharos_backend_create(const pharos_context *context, void **created)
{
    const pharos_host *host = context->host;
    const char *devices = host->config_parameter(context, "devices");
    const char *uses = host->config_parameter(context, "uses"), *grows = host->config_parameter(context, "grows");
    instance *self = calloc(1, sizeof *self);
    if (!self || !devices || !use(devices, uses ? uses : ""))
        return host->fail_load(context, "the devices cannot be changed");
    self->host = host;
    snprintf(self->devices, sizeof self->devices, "%s", devices);
    snprintf(self->grows, sizeof self->grows, "%s", grows ? grows : "");
    *created = self;
    return PHAROS_OK;
}

pharos_code pharos_backend_execute(void *created, const pharos_batch *batch, pharos_outputs *outputs)
{
    instance *self = created;
    const pharos_input *input = self->host->input(batch, 0);
    pharos_output wanted = pharos_output_of(0, PHAROS_FP32, input->shape, input->rank);
    void *data;
    pharos_code code = self->host->allocate(outputs, &wanted, &data);
    if (code != PHAROS_OK)
        return code;
    memcpy(data, input->data, input->bytes);
    return use(self->devices, self->grows) ? PHAROS_OK : PHAROS_INTERNAL;
}

void pharos_backend_destroy(void *created)
{
    free(created);
}
