/*
 * The backend `normalize`: scales each row of an FP32 tensor to mean 0 and standard deviation 1. It shows what most
 * backends need: a configuration parameter, a metric, and errors of single requests. Build it with:
 *
 *     make example-backends
 *
 * Parameter: `least_deviation`, by default 1e-6. A request with a row of a smaller deviation fails.
 * Metric: the counter `RowsNormalized`, if metrics.yaml defines it.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "pharos_backend.h"

typedef struct {
    const pharos_host *host;
    pharos_series *normalized; /* NULL if the metric is not defined */
    double least_deviation;
} instance;

uint32_t pharos_backend_abi_version(void)
{
    return PHAROS_BACKEND_ABI_VERSION;
}

const char *pharos_backend_engine(void)
{
    return "normalize 1.0";
}

/* Whether the model has one input and one output, both FP32. */
static int fits(const pharos_context *context)
{
    const pharos_host *host = context->host;
    const pharos_tensor *input = host->config_input(context, 0), *output = host->config_output(context, 0);
    return input && output && input->datatype == PHAROS_FP32 && output->datatype == PHAROS_FP32 &&
           !host->config_input(context, 1) && !host->config_output(context, 1);
}

pharos_code pharos_backend_create(const pharos_context *context, void **created)
{
    const pharos_host *host = context->host;
    const char *text = host->config_parameter(context, "least_deviation");
    char *end = NULL;
    double least_deviation = text ? strtod(text, &end) : 1e-6;
    if (text && (end == text || *end != '\0' || !(least_deviation > 0))) {
        char message[200];
        snprintf(message, sizeof message, "parameter 'least_deviation' is '%.40s'; expected a number greater than 0", text);
        return host->fail_load(context, message);
    }
    if (!fits(context))
        return host->fail_load(context, "normalize needs one input and one output, both of TYPE_FP32");

    instance *self = calloc(1, sizeof *self);
    if (!self)
        return host->fail_load(context, "out of memory");
    self->host = host;
    self->least_deviation = least_deviation;
    pharos_metric_spec spec = pharos_metric_of(PHAROS_COUNTER, "RowsNormalized", NULL, 0);
    pharos_metric *metric;
    if (host->metric_add(context->metrics, &spec, &metric) != PHAROS_OK ||
        host->metric_series(metric, NULL, 0, &self->normalized) != PHAROS_OK)
        host->log(PHAROS_LOG_INFO, host->last_error());
    *created = self;
    return PHAROS_OK;
}

/* Normalizes a row and returns its deviation. Writes nothing if that is less than least_deviation. */
static double normalize(const float *row, size_t length, double least_deviation, float *result)
{
    double sum = 0, squares = 0;
    for (size_t at = 0; at < length; at++)
        sum += row[at];
    double mean = length ? sum / length : 0;
    for (size_t at = 0; at < length; at++)
        squares += (row[at] - mean) * (row[at] - mean);
    double deviation = length ? sqrt(squares / length) : 0;
    for (size_t at = 0; at < length && deviation >= least_deviation; at++)
        result[at] = (float)((row[at] - mean) / deviation);
    return deviation;
}

pharos_code pharos_backend_execute(void *created, const pharos_batch *batch, pharos_outputs *outputs)
{
    instance *self = created;
    const pharos_host *host = self->host;
    const pharos_input *input = host->input(batch, 0);
    pharos_output wanted = pharos_output_of(0, PHAROS_FP32, input->shape, input->rank);
    void *data;
    pharos_code code = host->allocate(outputs, &wanted, &data);
    if (code != PHAROS_OK)
        return code; /* the batch fails with the message of last_error */

    size_t rows = 0, requests = host->request_count(batch);
    for (size_t at = 0; at < requests; at++)
        rows += host->request(batch, at)->rows;
    size_t length = input->bytes / sizeof(float) / rows;
    const float *row = input->data;
    float *result = data;
    for (size_t at = 0; at < requests; at++) {
        size_t own = host->request(batch, at)->rows, good = 0;
        for (size_t number = 0; number < own; number++, row += length, result += length) {
            double deviation = normalize(row, length, self->least_deviation, result);
            if (deviation >= self->least_deviation) {
                good++;
            } else if (good == number) { /* report the first failed row only */
                char message[200];
                snprintf(message, sizeof message, "row %zu has a standard deviation of %g; the minimum is %g",
                         number, deviation, self->least_deviation);
                host->fail(outputs, at, PHAROS_INVALID_ARG, message);
            }
        }
        if (self->normalized)
            host->add_or_update(self->normalized, (double)good, (int64_t)at);
    }
    return PHAROS_OK;
}

void pharos_backend_destroy(void *created)
{
    free(created);
}
