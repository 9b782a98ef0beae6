/*
 * A backend for tests: identity, unless the parameter `do` of the first request of a batch selects another behavior.
 * The names of behaviors say what is wrong with them. Each function of pharos_host is called somewhere in this file.
 *
 * The configuration parameter `create` (fail, silent, crash, hang, follow) selects how loading ends. Inputs: IN FP32; outputs:
 * OUT FP32, TEXT BYTES.
 */
#define _POSIX_C_SOURCE 200809L
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "pharos_backend.h"

typedef struct {
    const pharos_host *host;
    pharos_metrics *metrics;
    pharos_series *counter, *gauge, *histogram;
    uint32_t max_batch_size;
    int32_t decoupled;
    const pharos_batch *batch;
    pharos_outputs *outputs;
} instance;

uint32_t pharos_backend_abi_version(void)
{
    return PHAROS_BACKEND_ABI_VERSION;
}

uint32_t pharos_backend_wants(void)
{
    return PHAROS_WANTS_DETAILS | PHAROS_BEARS_CHANGES; /* input bytes are read only once */
}

/* Whether both sides agree on the sizes of the structures that the server fills. */
static int sizes_agree(const pharos_context *context)
{
    const pharos_tensor *input = context->host->config_input(context, 0);
    return context->size == sizeof(pharos_context) && context->host->size == sizeof(pharos_host) &&
           PHAROS_HAS(context->host, release_input) && input && input->size == sizeof(pharos_tensor);
}

static pharos_series *series(instance *self, int32_t kind, const char *name, const char *dimension, const char *value)
{
    pharos_metric_spec spec = pharos_metric_of(kind, name, &dimension, dimension ? 1 : 0);
    pharos_metric *metric, *again;
    pharos_series *series;
    if (self->host->metric_add(self->metrics, &spec, &metric) ||
        self->host->metric_series(metric, &value, dimension ? 1 : 0, &series)) {
        self->host->log(PHAROS_LOG_WARNING, self->host->last_error());
        return NULL;
    }
    if (self->host->metric_get(self->metrics, kind, name, &again))
        self->host->log(PHAROS_LOG_ERROR, self->host->last_error());
    return series;
}

static void hang(void)
{
    for (;;)
        pause();
}

/* Reports the numbers that the file DIRECTORY/INSTANCE has one after the other, until it has the text "end". */
static void follow(const pharos_context *context)
{
    const pharos_host *host = context->host;
    struct timespec wait = {0, 10 * 1000 * 1000};
    char path[1000], text[50], last[50] = "";
    snprintf(path, sizeof path, "%s/%s", context->directory, context->instance);
    for (; strcmp(last, "end") != 0; nanosleep(&wait, NULL)) {
        FILE *file = fopen(path, "r");
        if (file && fgets(text, sizeof text, file) && strcmp(text, last) != 0) {
            strcpy(last, text);
            if (strcmp(text, "end") != 0 && host->report_load_progress(context, strtod(text, NULL)) != PHAROS_OK)
                host->log(PHAROS_LOG_WARNING, host->last_error());
        }
        if (file)
            fclose(file);
    }
}

pharos_code pharos_backend_create(const pharos_context *context, void **created)
{
    const pharos_host *host = context->host;
    const char *create = host->config_parameter(context, "create");
    char text[1000];
    if (!create)
        create = "";
    if (strcmp(create, "fail") == 0)
        return host->fail_load(context, "there is no oil left");
    if (strcmp(create, "silent") == 0)
        return PHAROS_NOT_FOUND;
    if (strcmp(create, "crash") == 0)
        abort();
    if (strcmp(create, "hang") == 0)
        hang();
    if (!sizes_agree(context))
        return host->fail_load(context, "the structures are not of one size");
    if (strcmp(create, "follow") == 0)
        follow(context);
    if (host->config_parameter(context, "missing") || host->config_input(context, 99) ||
        host->config_output(context, 99))
        return host->fail_load(context, "there is more than there should be");
    instance *self = calloc(1, sizeof *self);
    self->host = host;
    self->metrics = context->metrics;
    self->max_batch_size = context->max_batch_size;
    self->decoupled = context->decoupled;
    self->counter = series(self, PHAROS_COUNTER, "Baked", "kind", "bread");
    self->gauge = series(self, PHAROS_GAUGE, "OvenHeat", NULL, NULL);
    self->histogram = series(self, PHAROS_HISTOGRAM, "Weight", NULL, NULL);
    snprintf(text, sizeof text,
             "model %s version %" PRIu64 " instance %s directory %s threads %" PRIu32 " name in config %d",
             context->model, context->version, context->instance, context->directory, context->threads,
             strstr(context->config, "\"backend\":\"testing\"") != NULL);
    host->log(PHAROS_LOG_INFO, text);
    *created = self;
    return PHAROS_OK;
}

/* The parameter `do` of the first request. */
static const char *task(const instance *self, const pharos_batch *batch)
{
    const pharos_parameter *parameter = self->host->find_parameter(batch, 0, "do");
    return parameter && parameter->kind == PHAROS_KIND_TEXT ? parameter->text : "";
}

static int64_t number(const instance *self, const pharos_batch *batch, const char *name, int64_t otherwise)
{
    const pharos_parameter *parameter = self->host->find_parameter(batch, 0, name);
    return parameter && parameter->kind == PHAROS_KIND_INT ? parameter->integer : otherwise;
}

static pharos_code identity(instance *self, const pharos_batch *batch, pharos_outputs *outputs)
{
    const pharos_input *input = self->host->input(batch, 0);
    pharos_output output = pharos_output_of(0, PHAROS_FP32, input->shape, input->rank);
    void *data;
    if (!self->host->is_wanted(batch, 0))
        return PHAROS_OK;
    pharos_code code = self->host->allocate(outputs, &output, &data);
    if (code == PHAROS_OK)
        memcpy(data, input->data, input->bytes);
    return code;
}

/* Allocations that must be refused: returns the code and leaves the reason in last_error. */
static pharos_code allocate_badly(instance *self, const char *how, const pharos_batch *batch, pharos_outputs *outputs)
{
    const pharos_input *input = self->host->input(batch, 0);
    pharos_output output = pharos_output_of(0, PHAROS_FP32, input->shape, input->rank);
    int64_t shape[1000];
    void *data = &data;
    memcpy(shape, input->shape, input->rank * sizeof *shape);
    output.shape = shape;
    if (strcmp(how, "unknown_datatype") == 0) {
        output.datatype = 99;
    } else if (strcmp(how, "index") == 0) {
        output.index = (size_t)number(self, batch, "index", 7);
    } else if (strcmp(how, "too_large") == 0) {
        shape[input->rank - 1] = (int64_t)1 << 36;
    } else if (strcmp(how, "overflow") == 0) {
        shape[0] = shape[input->rank - 1] = INT64_MAX;
    } else if (strcmp(how, "negative") == 0) {
        shape[0] = -1;
    } else if (strcmp(how, "rank") == 0) {
        output.rank = 1000;
    } else if (strcmp(how, "null_shape") == 0) {
        output.shape = NULL;
    } else if (strcmp(how, "small_structure") == 0) {
        output.size = 8;
    } else if (strcmp(how, "bytes") == 0) {
        output.bytes = input->bytes + 1;
    } else if (strcmp(how, "few_bytes") == 0) {
        output.index = 1;
        output.datatype = PHAROS_BYTES;
        output.bytes = 3;
    } else if (strcmp(how, "null_output") == 0) {
        return self->host->allocate(outputs, NULL, &data);
    } else if (strcmp(how, "null_data") == 0) {
        return self->host->allocate(outputs, &output, NULL);
    } else if (strcmp(how, "twice") == 0) {
        self->host->allocate(outputs, &output, &data);
    } else {
        return PHAROS_OK;
    }
    pharos_code code = self->host->allocate(outputs, &output, &data);
    return code == PHAROS_OK || data ? PHAROS_UNKNOWN : code;
}

/* Outputs that differ from the configuration, and one that must not reach the client. */
static pharos_code answer_badly(instance *self, const char *how, const pharos_batch *batch, pharos_outputs *outputs)
{
    const pharos_input *input = self->host->input(batch, 0);
    int64_t shape[2] = {input->shape[0], 1};
    pharos_output output = pharos_output_of(0, PHAROS_FP32, shape, 2);
    void *data;
    if (strcmp(how, "wrong_datatype") == 0) {
        output.datatype = PHAROS_INT32;
    } else if (strcmp(how, "wrong_rows") == 0) {
        shape[0]++;
    } else { /* wrong_text: the length of an element passes the end */
        output.index = 1;
        output.datatype = PHAROS_BYTES;
        output.bytes = 4 * (size_t)shape[0];
    }
    pharos_code code = self->host->allocate(outputs, &output, &data);
    if (code == PHAROS_OK)
        memset(data, 0xee, output.bytes ? output.bytes : sizeof(float) * (size_t)shape[0]);
    return code;
}

/* Describes each request as a string. */
static pharos_code describe(instance *self, const pharos_batch *batch, pharos_outputs *outputs)
{
    const pharos_host *host = self->host;
    char text[20][2000];
    size_t rows = 0, bytes = 0, requests = host->request_count(batch);
    for (size_t at = 0; at < requests; at++) {
        const pharos_request *request = host->request(batch, at);
        int used = snprintf(text[at], sizeof text[at], "%s|%zu|%" PRIu32 "|%d%d%d", request->id,
                            request->id_length, request->rows, request->in_sequence, request->sequence_start,
                            request->sequence_end);
        for (size_t number = 0; number < request->parameters; number++) {
            const pharos_parameter *p = host->request_parameter(batch, at, number);
            used += snprintf(text[at] + used, sizeof text[at] - (size_t)used, "|%s=%d:%d:%" PRId64 ":%" PRIu64 ":%g:%s",
                             p->name, p->kind, p->boolean, p->integer, p->natural, p->real, p->text ? p->text : "");
        }
        rows += request->rows;
        bytes += request->rows * (4 + strlen(text[at]));
    }
    if (host->request(batch, requests) || host->input(batch, host->input_count(batch)))
        return host->fail_batch(outputs, PHAROS_INTERNAL, "there is more than there should be");
    int64_t shape[2] = {(int64_t)rows, 1};
    pharos_output output = pharos_output_of(1, PHAROS_BYTES, shape, 2);
    output.bytes = bytes;
    void *data;
    if (host->allocate(outputs, &output, &data) != PHAROS_OK)
        return host->fail_batch(outputs, PHAROS_INTERNAL, host->last_error());
    char *next = data;
    for (size_t at = 0; at < requests; at++) {
        uint32_t length = (uint32_t)strlen(text[at]);
        for (uint32_t row = 0; row < host->request(batch, at)->rows; row++) {
            memcpy(next, &length, sizeof length);
            memcpy(next + sizeof length, text[at], length);
            next += sizeof length + length;
        }
        pharos_parameter given[] = {pharos_bool("b", 1), pharos_int("i", -5), pharos_double("d", 0.5),
                                    pharos_text("t", text[at])};
        for (size_t number = 0; number < 4; number++)
            host->set_parameter(outputs, at, &given[number]);
    }
    return PHAROS_OK;
}

/* Logs a line of each level. */
static pharos_code write_log(instance *self, const pharos_batch *batch, pharos_outputs *outputs)
{
    self->host->log(PHAROS_LOG_INFO, "a level: information");
    self->host->log(PHAROS_LOG_WARNING, "a level: warning\na level: second line");
    self->host->log(PHAROS_LOG_ERROR, "a level: error");
    self->host->log(PHAROS_LOG_VERBOSE, "a level: verbose");
    return identity(self, batch, outputs);
}

/* The input's address modulo 64: 0, unless it is client memory. */
static pharos_code tell_alignment(instance *self, const pharos_batch *batch, pharos_outputs *outputs)
{
    pharos_parameter parameter = pharos_int("alignment", (int64_t)((uintptr_t)self->host->input(batch, 0)->data % 64));
    self->host->set_parameter(outputs, 0, &parameter);
    return identity(self, batch, outputs);
}

/* Reports the attributes of a request besides its tensors. */
static pharos_code describe_details(instance *self, const pharos_batch *batch, pharos_outputs *outputs)
{
    const pharos_request *request = self->host->request(batch, 0);
    char text[300];
    snprintf(text, sizeof text, "%" PRIu64 "|%s|%" PRIu64 "|%" PRIu64, request->correlation_id,
             request->correlation_text ? request->correlation_text : "(number)", request->priority,
             request->timeout_us);
    pharos_parameter parameter = pharos_text("details", text);
    self->host->set_parameter(outputs, 0, &parameter);
    return identity(self, batch, outputs);
}

/* Calls all functions with null pointers and zeros. The process must survive. */
static pharos_code call_with_null(const pharos_host *host)
{
    size_t good = 0;
    good += host->config_parameter(NULL, NULL) != NULL;
    good += host->config_input(NULL, 0) != NULL;
    good += host->config_output(NULL, 0) != NULL;
    good += host->fail_load(NULL, NULL) == PHAROS_OK;
    good += host->request_count(NULL) != 0;
    good += host->input_count(NULL) != 0;
    good += host->input(NULL, 0) != NULL;
    good += host->request(NULL, 0) != NULL;
    good += host->request_parameter(NULL, 0, 0) != NULL;
    good += host->find_parameter(NULL, 0, NULL) != NULL;
    good += host->is_wanted(NULL, 0) != 0;
    good += host->is_cancelled(NULL, 0) != 0;
    good += host->allocate(NULL, NULL, NULL) == PHAROS_OK;
    good += host->withdraw(NULL, 0) == PHAROS_OK;
    good += host->fail(NULL, 0, 0, NULL) == PHAROS_OK;
    good += host->fail_batch(NULL, 0, NULL) == PHAROS_OK;
    good += host->set_parameter(NULL, 0, NULL) == PHAROS_OK;
    good += host->reschedule(NULL, 0) == PHAROS_OK;
    host->inputs_ready(NULL);
    host->computed(NULL);
    good += host->response_begin(NULL, 0, NULL) == PHAROS_OK;
    good += host->response_allocate(NULL, NULL, NULL) == PHAROS_OK;
    good += host->response_set_parameter(NULL, NULL) == PHAROS_OK;
    good += host->response_send(NULL, 0) == PHAROS_OK;
    good += host->response_send_error(NULL, 0, NULL) == PHAROS_OK;
    host->response_drop(NULL);
    good += host->finish(NULL, 0) == PHAROS_OK;
    good += host->metric_add(NULL, NULL, NULL) == PHAROS_OK;
    good += host->metric_get(NULL, 0, NULL, NULL) == PHAROS_OK;
    good += host->metric_series(NULL, NULL, 0, NULL) == PHAROS_OK;
    good += host->add_or_update(NULL, 0, 0) == PHAROS_OK;
    good += host->metrics_flush(NULL) == PHAROS_OK;
    good += host->detach(NULL, 0, NULL) == PHAROS_OK;
    good += host->responder_begin(NULL, NULL) == PHAROS_OK;
    good += host->responder_fail(NULL, 0, NULL) == PHAROS_OK;
    good += host->responder_finish(NULL) == PHAROS_OK;
    good += host->responder_is_cancelled(NULL) != 0;
    good += host->responder_ready(NULL) != 0;
    host->responder_hold(NULL, 0);
    good += host->report_load_progress(NULL, 0) == PHAROS_OK;
    good += *host->last_error() == '\0';
    host->responder_drop(NULL);
    good += host->keep_input(NULL, 0, NULL, NULL) == PHAROS_OK;
    host->release_input(NULL);
    host->log(77, NULL);
    return good == 0 ? PHAROS_OK : PHAROS_UNKNOWN;
}

/* Uses handles of a batch that is over. */
static void *use_later(void *given)
{
    instance *self = given;
    pharos_output output = pharos_output_of(0, PHAROS_FP32, NULL, 0);
    void *data;
    struct timespec wait = {0, 200 * 1000 * 1000};
    nanosleep(&wait, NULL);
    char text[300];
    pharos_code code = self->host->allocate(self->outputs, &output, &data);
    size_t requests = self->host->request_count(self->batch);
    snprintf(text, sizeof text, "later: %d %zu %s", code, requests, self->host->last_error());
    self->host->log(PHAROS_LOG_WARNING, text);
    return NULL;
}

/* A request that a thread answers after its batch is over, and the data for the answer. */
typedef struct {
    const pharos_host *host;
    pharos_responder *responder;
    pharos_kept *kept;
    const float *values;
    int64_t rows, width, count;
    int batches, fails;
} task_of_thread;

/* Computes the sums of the rows `count` times, adding one each time. */
static void *answer_later(void *given)
{
    task_of_thread *task = given;
    const pharos_host *host = task->host;
    struct timespec wait = {0, 50 * 1000 * 1000};
    nanosleep(&wait, NULL);
    for (int64_t turn = 0; turn < task->count && !task->fails; turn++) {
        int64_t shape[2] = {task->rows, 1};
        pharos_output output = pharos_output_of(0, PHAROS_FP32, shape, task->batches ? 2 : 1);
        pharos_response *response;
        void *data;
        if (host->responder_begin(task->responder, &response) != PHAROS_OK ||
            host->response_allocate(response, &output, &data) != PHAROS_OK ||
            host->response_allocate(response, &output, &data) != PHAROS_ALREADY_EXISTS ||
            host->response_allocate(response, &output, NULL) != PHAROS_INVALID_ARG) {
            host->log(PHAROS_LOG_ERROR, host->last_error());
            break;
        }
        host->response_drop(response);
        if (host->responder_begin(task->responder, &response) || host->response_allocate(response, &output, &data))
            break;
        for (int64_t row = 0; row < task->rows; row++) {
            ((float *)data)[row] = (float)turn;
            for (int64_t at = 0; at < task->width; at++)
                ((float *)data)[row] += task->values[row * task->width + at];
        }
        pharos_parameter parameter = pharos_int("turn", turn);
        host->response_set_parameter(response, &parameter);
        pharos_code code = host->response_send(response, turn + 1 == task->count);
        if (code == PHAROS_CANCELLED || host->responder_is_cancelled(task->responder))
            host->log(PHAROS_LOG_INFO, "the thread sees: cancelled");
        if (code != PHAROS_OK)
            break;
        if (host->response_send(response, 0) == PHAROS_OK)
            host->log(PHAROS_LOG_ERROR, "a response was sent twice");
    }
    if (task->fails)
        host->responder_fail(task->responder, PHAROS_UNAVAILABLE, "not today");
    host->release_input(task->kept);
    host->release_input(task->kept);
    host->responder_drop(task->responder);
    host->responder_drop(task->responder);
    free(task);
    return NULL;
}

/* Lets threads answer the requests; `detach_and_forget` drops their responders. */
static pharos_code detach(instance *self, const char *how, const pharos_batch *batch, pharos_outputs *outputs)
{
    const pharos_host *host = self->host;
    const pharos_input *input = host->input(batch, 0);
    int64_t width = input->rank > 1 ? input->shape[1] : input->shape[0], row = 0;
    for (size_t at = 0; at < host->request_count(batch); at++) {
        task_of_thread *task = calloc(1, sizeof *task);
        pharos_responder *again;
        const void *data;
        pthread_t thread;
        pharos_code code = host->detach(outputs, at, &task->responder);
        if (code != PHAROS_OK)
            return code;
        if (host->detach(outputs, at, &again) == PHAROS_OK)
            return host->fail_batch(outputs, PHAROS_INTERNAL, "a request was detached twice");
        if (strcmp(how, "detach_and_forget") == 0) {
            host->responder_drop(task->responder);
            free(task);
            continue;
        }
        if ((code = host->keep_input(batch, 0, &data, &task->kept)) != PHAROS_OK)
            return code;
        task->host = host;
        task->batches = self->max_batch_size > 0;
        task->rows = task->batches ? host->request(batch, at)->rows : 1;
        task->width = width;
        task->values = (const float *)data + row * width;
        task->count = self->decoupled ? number(self, batch, "count", 3) : 1;
        task->fails = strcmp(how, "detach_and_fail") == 0;
        row += task->rows;
        pthread_create(&thread, NULL, answer_later, task);
        pthread_detach(thread);
    }
    return PHAROS_OK;
}

/* Sends `count` responses to each request in turn, with a parameter and an error at `error_at`. The request ends with
   the last response or with the return. */
static pharos_code respond(instance *self, const pharos_batch *batch, pharos_outputs *outputs)
{
    const pharos_host *host = self->host;
    int64_t count = number(self, batch, "count", 3), error_at = number(self, batch, "error_at", -1);
    int64_t shape[2] = {1, 1};
    for (int64_t turn = 0; turn < count; turn++) {
        for (size_t request = 0; request < host->request_count(batch); request++) {
            pharos_response *response, *other;
            pharos_code code = host->response_begin(outputs, request, &response);
            if (code == PHAROS_CANCELLED)
                return host->log(PHAROS_LOG_INFO, "the client has gone"), PHAROS_OK;
            if (code != PHAROS_OK)
                return code;
            pharos_output output = pharos_output_of(0, PHAROS_FP32, shape, self->max_batch_size ? 2 : 1);
            void *data;
            if (host->response_begin(outputs, request, &other) == PHAROS_OK ||
                identity(self, batch, outputs) == PHAROS_OK)
                return host->fail_batch(outputs, PHAROS_INTERNAL, "two responses are open");
            if (turn == error_at) {
                host->response_send_error(response, PHAROS_UNAVAILABLE, "not this one");
                continue;
            }
            if (host->response_allocate(response, &output, &data) != PHAROS_OK)
                return host->fail_batch(outputs, PHAROS_INTERNAL, host->last_error());
            *(float *)data = (float)turn;
            if (host->response_allocate(response, &output, &data) != PHAROS_ALREADY_EXISTS)
                return host->fail_batch(outputs, PHAROS_INTERNAL, "an output was allocated twice");
            pharos_parameter parameter = pharos_int("turn", turn);
            host->response_set_parameter(response, &parameter);
            host->response_send(response, turn + 1 == count && number(self, batch, "last", 1));
            if (host->response_send(response, 0) == PHAROS_OK)
                return host->fail_batch(outputs, PHAROS_INTERNAL, "a response was sent twice");
        }
    }
    if (count == 0) {
        pharos_response *response;
        if (host->response_begin(outputs, 0, &response) == PHAROS_OK)
            host->response_drop(response);
        return host->finish(outputs, 0);
    }
    return PHAROS_OK;
}

/* Behaviors that end the process, or hang it. */
static void misbehave(const char *how)
{
    if (strcmp(how, "crash") == 0)
        abort();
    volatile int *volatile nowhere = NULL;
    if (strcmp(how, "segfault") == 0)
        *nowhere = 1;
    if (strcmp(how, "exit") == 0)
        exit(0);
    if (strcmp(how, "hang") == 0)
        hang();
}

/* Behaviors that return errors and codes; returns 1 if `how` is one of them. */
static int fail(instance *self, const char *how, const pharos_batch *batch, pharos_outputs *outputs, pharos_code *code)
{
    const pharos_host *host = self->host;
    if (strcmp(how, "code") == 0)
        *code = (pharos_code)number(self, batch, "code", 2);
    else if (strcmp(how, "fail_batch") == 0)
        *code = host->fail_batch(outputs, (pharos_code)number(self, batch, "code", 2), "the batch \xff failed");
    else if (strcmp(how, "fail_and_go_on") == 0)
        *code = (host->fail_batch(outputs, PHAROS_UNSUPPORTED, "never"), PHAROS_OK);
    else if (strcmp(how, "fail_far") == 0)
        *code = host->fail(outputs, 1000, PHAROS_INTERNAL, "far");
    else if (strcmp(how, "fail_oddly") == 0)
        *code = host->fail(outputs, 0, 77, "odd");
    else if (strcmp(how, "reschedule") == 0)
        *code = host->reschedule(outputs, 0);
    else if (strcmp(how, "null") == 0)
        *code = call_with_null(host);
    else
        return 0;
    return 1;
}

static pharos_code record(instance *self, const pharos_batch *batch, pharos_outputs *outputs)
{
    const pharos_host *host = self->host;
    int64_t times = number(self, batch, "times", 1);
    for (int64_t turn = 0; turn < times; turn++)
        if (host->add_or_update(self->counter, 2, 0) != PHAROS_OK)
            return host->fail_batch(outputs, PHAROS_INTERNAL, host->last_error());
    host->add_or_update(self->gauge, 180.5, PHAROS_WHOLE_BATCH);
    host->add_or_update(self->histogram, 3, PHAROS_NO_REQUEST);
    if (host->add_or_update(self->counter, 1, -3) != PHAROS_INVALID_ARG)
        return host->fail_batch(outputs, PHAROS_INTERNAL, "-3 is a request");
    host->metrics_flush(self->metrics);
    return identity(self, batch, outputs);
}

/* Fails each request whose first element is negative. */
static pharos_code fail_negative(instance *self, const pharos_batch *batch, pharos_outputs *outputs)
{
    const pharos_input *input = self->host->input(batch, 0);
    const float *values = input->data;
    size_t width = input->bytes / sizeof(float) / (size_t)input->shape[0], row = 0;
    for (size_t at = 0; at < self->host->request_count(batch); at++) {
        if (values[row * width] < 0)
            self->host->fail(outputs, at, PHAROS_NOT_FOUND, "a negative value");
        row += self->host->request(batch, at)->rows;
    }
    return identity(self, batch, outputs);
}

/* Waits until the first request is cancelled. */
static pharos_code wait_for_cancellation(instance *self, const pharos_batch *batch, pharos_outputs *outputs)
{
    struct timespec wait = {0, 5 * 1000 * 1000};
    for (int turn = 0; turn < 2000; turn++) {
        if (self->host->is_cancelled(batch, 0)) {
            self->host->log(PHAROS_LOG_INFO, "seen: cancelled");
            return self->host->fail_batch(outputs, PHAROS_CANCELLED, "");
        }
        nanosleep(&wait, NULL);
    }
    return identity(self, batch, outputs);
}

pharos_code pharos_backend_execute(void *created, const pharos_batch *batch, pharos_outputs *outputs)
{
    instance *self = created;
    const char *how = task(self, batch);
    pharos_code code;
    if (strncmp(how, "detach", 6) == 0)
        return detach(self, how, batch, outputs);
    if (self->decoupled)
        return respond(self, batch, outputs);
    misbehave(how);
    if (fail(self, how, batch, outputs, &code) || (code = allocate_badly(self, how, batch, outputs)) != PHAROS_OK)
        return code;
    if (strncmp(how, "wrong_", 6) == 0)
        return answer_badly(self, how, batch, outputs);
    if (strcmp(how, "describe") == 0)
        return describe(self, batch, outputs);
    if (strcmp(how, "log") == 0)
        return write_log(self, batch, outputs);
    if (strcmp(how, "alignment") == 0)
        return tell_alignment(self, batch, outputs);
    if (strcmp(how, "details") == 0)
        return describe_details(self, batch, outputs);
    if (strcmp(how, "record") == 0)
        return record(self, batch, outputs);
    if (strcmp(how, "negative_fails") == 0)
        return fail_negative(self, batch, outputs);
    if (strcmp(how, "cancelled") == 0)
        return wait_for_cancellation(self, batch, outputs);
    if (strcmp(how, "nothing") == 0)
        return PHAROS_OK;
    if (strcmp(how, "respond") == 0)
        return respond(self, batch, outputs);
    if (strcmp(how, "later") == 0) {
        pthread_t thread;
        self->batch = batch;
        self->outputs = outputs;
        pthread_create(&thread, NULL, use_later, self);
        pthread_detach(thread);
    }
    self->host->inputs_ready(outputs);
    code = identity(self, batch, outputs);
    if (strcmp(how, "again") == 0 && self->host->withdraw(outputs, 0) == PHAROS_OK &&
        self->host->withdraw(outputs, 0) != PHAROS_OK)
        code = identity(self, batch, outputs);
    self->host->computed(outputs);
    return code;
}

void pharos_backend_sequence_ended(void *created, uint64_t key)
{
    instance *self = created;
    char text[100];
    snprintf(text, sizeof text, "sequence ended: %d", key != 0);
    self->host->log(PHAROS_LOG_INFO, text);
}

void pharos_backend_destroy(void *created)
{
    instance *self = created;
    self->host->log(PHAROS_LOG_INFO, "destroyed");
    free(self);
}
