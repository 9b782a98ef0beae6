/*
 * pharos_backend.h: a backend of one's own, as a shared library in C, C++ or anything that speaks C.
 *
 * A backend executes the models whose configuration names it. The server looks for the backend NAME in
 * BACKEND_DIRECTORY/NAME/libpharos_NAME.so, loads it into a worker, a process for one instance of one model, and
 * calls:
 *
 *     pharos_backend_abi_version    must return PHAROS_BACKEND_ABI_VERSION
 *     pharos_backend_create         makes an instance from the model's configuration and directory
 *     pharos_backend_execute        executes a batch of requests; any number of times
 *     pharos_backend_destroy        when the instance stops
 *     pharos_backend_sequence_ended (optional) a sequence is over without its last step
 *     pharos_backend_engine         (optional) what computes, with its version, for logs
 *     pharos_backend_wants          (optional) what it can do, and wants to be told
 *
 * and is given a table of functions to ask for inputs and to make outputs: pharos_host. Build it with
 *
 *     cc -std=c11 -O2 -shared -fPIC -I DIRECTORY_OF_THIS_FILE -o libpharos_NAME.so backend.c
 *
 * Threads. The server calls the library from one thread, one call at a time. The library may call functions of
 * pharos_host from any of its threads; those that take a batch or outputs, and a response of such, only while
 * pharos_backend_execute runs (later calls fail and do no harm). What is answered is in the order of the calls. A
 * child of fork() may call none of them.
 *
 * Ownership. What the server hands out stays the server's: nothing of it is freed by the library, and each
 * declaration says how long it is valid. Texts that the library passes in are copied before the call returns. They
 * are UTF-8 and end with a NUL; bytes that are not UTF-8 are replaced. Pointers must be valid for what they are said
 * to point to: the server checks what can be checked (null, ranges, sizes, states), no more. Memory that it has given
 * is written within its bounds only.
 *
 * Errors. Functions that can fail return a pharos_code; the reason is then pharos_host.last_error(). A library that
 * crashes, hangs (--worker-execution-timeout-secs) or does not keep to this costs its own instance: requests that it
 * was executing fail, and a new process takes its place. C++ exceptions must not leave the library.
 *
 * Versions. PHAROS_BACKEND_ABI_VERSION changes when old libraries can no longer be loaded. What is added between
 * comes at the end of a structure, and each structure begins with its size in bytes: a library that wants to run on
 * older servers too asks PHAROS_HAS(host, function) before it uses something that its oldest server does not have.
 * The library sets the size of structures that it passes in (the functions at the end of this file do).
 *
 * Units: sizes and lengths are bytes, shapes and ranks are elements, times are said where they occur.
 */
#ifndef PHAROS_BACKEND_H
#define PHAROS_BACKEND_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. */
#define PHAROS_BACKEND_ABI_VERSION 1u

/* Whether a structure of the server is new enough to have a field. */
#define PHAROS_HAS(structure, field) \
    ((structure)->size >= (size_t)((const char *)(&(structure)->field + 1) - (const char *)(structure)))

#if defined(__GNUC__)
#define PHAROS_EXPORT __attribute__((visibility("default")))
#else
#define PHAROS_EXPORT
#endif

/* ---- Numbers --------------------------------------------------------------------------------------------------- */

/* How a call went, and what a client is told: in brackets the HTTP status and the gRPC status of a request that
   fails so. */
typedef int32_t pharos_code;
enum {
    PHAROS_OK = 0,
    PHAROS_UNKNOWN = 1,          /* none of the others (400, UNKNOWN) */
    PHAROS_INTERNAL = 2,         /* a fault of the server or the backend (500, INTERNAL) */
    PHAROS_NOT_FOUND = 3,        /* what was asked for does not exist (404, NOT_FOUND) */
    PHAROS_INVALID_ARG = 4,      /* wrong, and wrong again if repeated (400, INVALID_ARGUMENT) */
    PHAROS_UNAVAILABLE = 5,      /* not now; repeating it may help (503, UNAVAILABLE) */
    PHAROS_UNSUPPORTED = 6,      /* never done here (501, UNIMPLEMENTED) */
    PHAROS_ALREADY_EXISTS = 7,   /* made already (400, ALREADY_EXISTS) */
    PHAROS_CANCELLED = 8,        /* nobody waits for it any more (400, CANCELLED) */
    PHAROS_DEADLINE_EXCEEDED = 9 /* its time is over (504, DEADLINE_EXCEEDED) */
};

/* What the elements of a tensor are. All are little-endian. */
typedef int32_t pharos_datatype;
enum {
    PHAROS_BOOL = 1, /* one byte, 0 or 1 */
    PHAROS_UINT8 = 2,
    PHAROS_UINT16 = 3,
    PHAROS_UINT32 = 4,
    PHAROS_UINT64 = 5,
    PHAROS_INT8 = 6,
    PHAROS_INT16 = 7,
    PHAROS_INT32 = 8,
    PHAROS_INT64 = 9,
    PHAROS_FP16 = 10,
    PHAROS_FP32 = 11,
    PHAROS_FP64 = 12,
    PHAROS_BYTES = 13, /* texts or other bytes: for each element its length as four bytes, then itself */
    PHAROS_BF16 = 14
};

/* Kinds of a parameter's value. */
enum { PHAROS_KIND_BOOL = 1, PHAROS_KIND_INT = 2, PHAROS_KIND_UINT = 3, PHAROS_KIND_DOUBLE = 4, PHAROS_KIND_TEXT = 5 };

/* Kinds of metrics. */
enum {
    PHAROS_COUNTER = 1,   /* a sample adds to it; not negative */
    PHAROS_GAUGE = 2,     /* a sample is its new value */
    PHAROS_HISTOGRAM = 3, /* a sample is an observation; buckets as metrics.yaml says */
    PHAROS_SUMMARY = 4    /* the same with quantiles */
};

/* Levels of log lines. */
enum { PHAROS_LOG_INFO = 1, PHAROS_LOG_WARNING = 2, PHAROS_LOG_ERROR = 3, PHAROS_LOG_VERBOSE = 4 };

/* For whom a sample of a metric is, in place of a request's position. */
enum {
    PHAROS_WHOLE_BATCH = -1, /* for all requests of the batch that this thread executes; for none on other threads */
    PHAROS_NO_REQUEST = -2
};

/* ---- What the server hands out --------------------------------------------------------------------------------- */

typedef struct pharos_host pharos_host;
typedef struct pharos_batch pharos_batch;       /* valid until pharos_backend_execute returns */
typedef struct pharos_outputs pharos_outputs;   /* the same */
typedef struct pharos_response pharos_response; /* until it is sent or dropped; see response_begin, responder_begin */
typedef struct pharos_responder pharos_responder; /* until responder_drop */
typedef struct pharos_kept pharos_kept;         /* until release_input */
typedef struct pharos_metrics pharos_metrics;   /* until pharos_backend_destroy returns, as what comes of it */
typedef struct pharos_metric pharos_metric;
typedef struct pharos_series pharos_series;

/* What an instance is created from. Valid until pharos_backend_create returns, but for `host` and `metrics`. */
typedef struct pharos_context {
    size_t size;
    const pharos_host *host;  /* the server's functions; valid as long as the process lives */
    pharos_metrics *metrics;  /* what the model may record; valid until pharos_backend_destroy returns */
    const char *config;       /* the completed configuration as JSON, with the field names of config.pbtxt */
    const char *directory;    /* the version's directory, with the model's files */
    const char *model;        /* the model's name */
    const char *instance;     /* the instance's name, for messages */
    uint64_t version;         /* the model's version */
    uint32_t threads;         /* how many threads one execution may use */
    uint32_t max_batch_size;  /* the most rows of a batch; 0: no batches, shapes begin with no dimension of rows */
    int32_t decoupled;        /* 1: requests are answered by any number of responses */
} pharos_context;

/* An input or output of the configuration. Valid until pharos_backend_create returns. */
typedef struct pharos_tensor {
    size_t size;
    const char *name;
    const int64_t *dims; /* without the rows of a batch; -1 for a dimension that varies */
    size_t rank;         /* how many dims there are */
    pharos_datatype datatype;
    int32_t optional; /* 1: requests may leave this input out */
} pharos_tensor;

/* An input of a batch, of all its requests one behind the other. Valid until pharos_backend_execute returns. */
typedef struct pharos_input {
    size_t size;
    const char *name;
    const void *data;     /* row-major, aligned to 64 bytes; not to be written to */
    size_t bytes;         /* how many there are */
    const int64_t *shape; /* of the whole batch: if the model batches, the first dimension is the rows of all */
    size_t rank;
    size_t index; /* its position in the configuration; behind those come inputs that the server makes: batch_input,
                     control inputs of sequences, states */
    pharos_datatype datatype;
} pharos_input;

/* A request of a batch. Valid until pharos_backend_execute returns. */
typedef struct pharos_request {
    size_t size;
    const char *id; /* the client's, may be empty */
    size_t id_length;
    size_t parameters;     /* how many it has: see request_parameter */
    uint64_t sequence_key; /* a number for its sequence, never used again for another one */
    uint32_t rows;         /* how many rows of the batch are its; 1 if the model does not batch */
    int32_t in_sequence;   /* 1: it is a step of a sequence. 0 for all in a model without; else: it only fills a row */
    int32_t sequence_start;
    int32_t sequence_end;
    /* If pharos_backend_wants says PHAROS_WANTS_DETAILS, else 0 and NULL: */
    uint64_t correlation_id;      /* the client's number of the sequence; 0: none, or a text */
    const char *correlation_text; /* the client's text in its place; else NULL */
    uint64_t priority;            /* 0: the model's default */
    uint64_t timeout_us;          /* microseconds that the client lets it wait; 0: no limit */
} pharos_request;

/* A parameter of a request or response. The server's: valid until pharos_backend_execute returns. */
typedef struct pharos_parameter {
    size_t size;
    const char *name;
    const char *text; /* PHAROS_KIND_TEXT; ends with a NUL that is not counted, and may hold others */
    size_t text_length;
    int64_t integer;   /* PHAROS_KIND_INT */
    uint64_t natural;  /* PHAROS_KIND_UINT: one that is too large for `integer` */
    double real;       /* PHAROS_KIND_DOUBLE */
    int32_t boolean;   /* PHAROS_KIND_BOOL: 0 or 1 */
    int32_t kind;      /* which of them it is */
} pharos_parameter;

/* ---- What the library passes in -------------------------------------------------------------------------------- */

/* An output to be made. */
typedef struct pharos_output {
    size_t size;
    size_t index;         /* its position in the configuration's outputs; states that are no outputs follow those */
    const int64_t *shape; /* as of an input: of the whole batch, or of the one request of a response */
    size_t rank;
    size_t bytes; /* needed for PHAROS_BYTES; for the others what the shape makes, or 0 */
    pharos_datatype datatype; /* as in the configuration; another one is passed on with a warning */
} pharos_output;

/* A metric to be recorded. */
typedef struct pharos_metric_spec {
    size_t size;
    const char *name;
    const char *unit;              /* as in metrics.yaml: "Count", "Milliseconds", "Bytes"; NULL: "Count" */
    const char *const *dimensions; /* names of its labels; "ModelName", "Level", "Hostname" are filled in */
    size_t dimension_count;
    int32_t kind; /* PHAROS_COUNTER and so on */
} pharos_metric_spec;

/* ---- The server's functions ------------------------------------------------------------------------------------ */

struct pharos_host {
    size_t size;

    /* The reason why the last call of this thread failed that did. Valid until another one of this thread fails. */
    const char *(*last_error)(void);

    /* Writes a line into the server's log, or several, under the instance's name. What the library prints is there as
       well: standard output as information, standard error as warnings. */
    void (*log)(int32_t level, const char *message);

    /* -- in pharos_backend_create -------------------------------------------------------------------------------- */

    /* The text of a parameter of the configuration: parameters { key: "NAME" value: { string_value: "..." } };
       NULL if there is none. Valid until pharos_backend_create returns. */
    const char *(*config_parameter)(const pharos_context *context, const char *name);

    /* The configured input at a position, from 0 on; NULL behind the last. */
    const pharos_tensor *(*config_input)(const pharos_context *context, size_t position);

    /* The configured output at a position, states that are no outputs behind them; NULL behind the last. */
    const pharos_tensor *(*config_output)(const pharos_context *context, size_t position);

    /* Says why the model cannot be loaded, for the user who wrote it; gives PHAROS_UNAVAILABLE, to be returned. */
    pharos_code (*fail_load)(const pharos_context *context, const char *message);

    /* -- inputs, in pharos_backend_execute ----------------------------------------------------------------------- */

    /* How many requests the batch has: at least one. */
    size_t (*request_count)(const pharos_batch *batch);

    /* How many inputs are given: those that all requests leave out are missing. */
    size_t (*input_count)(const pharos_batch *batch);

    /* The input at a position among those that are given, in the order of the configuration; NULL behind the last. */
    const pharos_input *(*input)(const pharos_batch *batch, size_t position);

    /* The request at a position; NULL behind the last. */
    const pharos_request *(*request)(const pharos_batch *batch, size_t position);

    /* A parameter of a request by its position, and by its name; NULL if there is none. */
    const pharos_parameter *(*request_parameter)(const pharos_batch *batch, size_t request, size_t position);
    const pharos_parameter *(*find_parameter)(const pharos_batch *batch, size_t request, const char *name);

    /* 1 if any request asks for the output, or it is a state; else it need not be made. */
    int32_t (*is_wanted)(const pharos_batch *batch, size_t output);

    /* 1 if nobody waits for the request any more; may become so at any moment. What is answered is thrown away:
       the backend may fail it with PHAROS_CANCELLED and turn to the others. */
    int32_t (*is_cancelled)(const pharos_batch *batch, size_t request);

    /* -- outputs of a batch, in pharos_backend_execute ----------------------------------------------------------- */

    /* Memory for an output over the whole batch, once for each output. It is aligned to 64 bytes unless it is a
       client's own, holds anything, must be filled whole, and is valid until pharos_backend_execute returns.
       PHAROS_INVALID_ARG: no such output, a shape with a negative dimension, bytes that do not fit the shape, or
       (with the parameter strict_output_types) another datatype than configured. PHAROS_ALREADY_EXISTS: it was allocated before. PHAROS_INTERNAL: there is
       no room. */
    pharos_code (*allocate)(pharos_outputs *outputs, const pharos_output *output, void **data);

    /* Takes an output back, which may then be allocated anew. Its memory must not be used any more. */
    pharos_code (*withdraw)(pharos_outputs *outputs, size_t output);

    /* Fails one request; the others are answered as usual, and its rows of the outputs are not looked at. In a
       decoupled model this is the request's last response. PHAROS_INVALID_ARG: no such request, or a code that is
       none. */
    pharos_code (*fail)(pharos_outputs *outputs, size_t request, pharos_code code, const char *message);

    /* Fails all requests of the batch. Gives `code`, to be returned by pharos_backend_execute. */
    pharos_code (*fail_batch)(pharos_outputs *outputs, pharos_code code, const char *message);

    /* Adds a parameter to the response of a request. */
    pharos_code (*set_parameter)(pharos_outputs *outputs, size_t request, const pharos_parameter *parameter);

    /* Has a request of a model with sequence_batching { iterative_sequence: true } executed once more, in a later
       batch. What this batch gives as its answer is thrown away. PHAROS_INTERNAL: the model has no iterative
       sequences. */
    pharos_code (*reschedule)(pharos_outputs *outputs, size_t request);

    /* For the statistics: inputs are where the computation wants them; the computation is done. Without them all of
       pharos_backend_execute counts as computation. */
    void (*inputs_ready)(pharos_outputs *outputs);
    void (*computed)(pharos_outputs *outputs);

    /* -- responses of a decoupled model, in pharos_backend_execute ----------------------------------------------- */

    /* Begins a response to a request. Waits until its client has read enough of the earlier ones. One at a time may
       be open; until it is sent or dropped no other function of these outputs but those for it succeeds.
       PHAROS_CANCELLED: nobody waits for the request any more. PHAROS_INVALID_ARG: no such request, or another
       response is open.
       PHAROS_INTERNAL: the model is not decoupled, or the request has had its last response. */
    pharos_code (*response_begin)(pharos_outputs *outputs, size_t request, pharos_response **response);

    /* As allocate and set_parameter, for the response alone: its shapes begin with the request's rows. */
    pharos_code (*response_allocate)(pharos_response *response, const pharos_output *output, void **data);
    pharos_code (*response_set_parameter)(pharos_response *response, const pharos_parameter *parameter);

    /* Sends it; with `last` other than 0 as the request's last. It is gone then, whatever is returned. */
    pharos_code (*response_send)(pharos_response *response, int32_t last);

    /* Sends an error in its place; more may follow. An error that is the last response is `fail`. */
    pharos_code (*response_send_error)(pharos_response *response, pharos_code code, const char *message);

    /* Gives it up unsent. */
    void (*response_drop)(pharos_response *response);

    /* Ends the responses to a request without another one. Requests that are neither ended nor detached when
       pharos_backend_execute returns are ended then. */
    pharos_code (*finish)(pharos_outputs *outputs, size_t request);

    /* -- metrics, at any time ------------------------------------------------------------------------------------ */

    /* A metric to record; the same may be added any number of times. What metrics.yaml says of it holds.
       PHAROS_UNAVAILABLE: metrics.yaml does not define it (last_error says what to write there) and the server was
       started without --model-metrics-auto-detect, or it defines another kind or other labels. */
    pharos_code (*metric_add)(pharos_metrics *metrics, const pharos_metric_spec *spec, pharos_metric **metric);

    /* A metric that was added, or that metrics.yaml defines. PHAROS_UNAVAILABLE: there is none of this name and
       kind. */
    pharos_code (*metric_get)(pharos_metrics *metrics, int32_t kind, const char *name, pharos_metric **metric);

    /* The series of a metric for these values of its labels, in the order of the dimensions. To be kept: recording
       through it costs least. */
    pharos_code (*metric_series)(pharos_metric *metric, const char *const *values, size_t count,
                                 pharos_series **series);

    /* Records a sample, which is the server's when the call returns, whatever happens to this process afterwards.
       `request` is the position of the request that it is for, or PHAROS_WHOLE_BATCH or PHAROS_NO_REQUEST. A value
       that the kind does not allow is dropped, counted and logged. */
    pharos_code (*add_or_update)(pharos_series *series, double value, int64_t request);

    /* Sends what is gathered. The server does so itself after the load and after each batch. */
    pharos_code (*metrics_flush)(pharos_metrics *metrics);

    /* -- requests that the library answers by itself, also after pharos_backend_execute, from any thread --------- */

    /* Takes the answers to a request into the library's own hands; outputs over the batch are not for it. The
       instance takes its next batch meanwhile. If the batch fails as a whole, so does the request.
       PHAROS_INVALID_ARG: no such request, or a response is open. PHAROS_INTERNAL: it was detached before, or the
       model has states. */
    pharos_code (*detach)(pharos_outputs *outputs, size_t request, pharos_responder **responder);

    /* Begins a response: the only one, or, in a decoupled model, one of any number. Several may be open. It is
       filled as one of response_begin; response_send waits for a client that has read too little of the earlier
       ones, and gives PHAROS_CANCELLED when nobody waits for it any more. */
    pharos_code (*responder_begin)(pharos_responder *responder, pharos_response **response);

    /* Ends the responses with an error. One that has ended already has no place for it. */
    pharos_code (*responder_fail)(pharos_responder *responder, pharos_code code, const char *message);

    /* Ends the responses of a decoupled model without another one. PHAROS_INTERNAL: it has had its last. */
    pharos_code (*responder_finish)(pharos_responder *responder);

    /* 1 if nobody waits for the request any more. */
    int32_t (*responder_is_cancelled)(pharos_responder *responder);

    /* Gives it back, always and once. A request that has not had its last response fails. */
    void (*responder_drop)(pharos_responder *responder);

    /* Keeps the input at a position of the batch, of all its requests, until release_input: `*data` is where it is
       then (elsewhere than pharos_input.data if it is in memory of a client). Kept inputs take room that later
       batches need. */
    pharos_code (*keep_input)(const pharos_batch *batch, size_t position, const void **data, pharos_kept **kept);
    void (*release_input)(pharos_kept *kept);
};

/* ---- The library's functions ----------------------------------------------------------------------------------- */

/* Returns PHAROS_BACKEND_ABI_VERSION. Called first, before anything else of the library. */
PHAROS_EXPORT uint32_t pharos_backend_abi_version(void);

/* Makes the instance, puts it into `*instance` (which may stay NULL) and returns PHAROS_OK. Anything else: the
   model is not loaded; the reason is what fail_load was told, and pharos_backend_destroy is not called. */
PHAROS_EXPORT pharos_code pharos_backend_create(const pharos_context *context, void **instance);

/* Executes a batch. Anything but PHAROS_OK fails all its requests, with the text of fail_batch, else of the last
   error. */
PHAROS_EXPORT pharos_code pharos_backend_execute(void *instance, const pharos_batch *batch, pharos_outputs *outputs);

/* Frees the instance. When it returns, no thread of the library may call functions of pharos_host any more; requests
   that were detached and not answered fail. */
PHAROS_EXPORT void pharos_backend_destroy(void *instance);

/* Optional. A sequence is over without a step with sequence_end: its client has gone, or was silent for too long. */
PHAROS_EXPORT void pharos_backend_sequence_ended(void *instance, uint64_t sequence_key);

/* Optional. The sum of what holds of
   PHAROS_WANTS_DETAILS: requests shall say their correlation ids, priorities and time limits.
   PHAROS_BEARS_CHANGES: inputs, and memory for outputs, may be a client's own shared memory, without a copy, which
   the client may change at any moment and which is aligned to nothing in particular. Nothing may be decided twice
   from the same bytes of it. */
enum { PHAROS_WANTS_DETAILS = 1, PHAROS_BEARS_CHANGES = 2 };
PHAROS_EXPORT uint32_t pharos_backend_wants(void);

/* Optional. What computes, with its version: "normalize 1.0". The text lives as long as the library. */
PHAROS_EXPORT const char *pharos_backend_engine(void);

/* ---- Short forms ----------------------------------------------------------------------------------------------- */

/* An output of a datatype of fixed size. */
static inline pharos_output pharos_output_of(size_t index, pharos_datatype datatype, const int64_t *shape, size_t rank)
{
    pharos_output output;
    memset(&output, 0, sizeof output);
    output.size = sizeof output;
    output.index = index;
    output.datatype = datatype;
    output.shape = shape;
    output.rank = rank;
    return output;
}

/* A metric with dimensions of its own. */
static inline pharos_metric_spec pharos_metric_of(int32_t kind, const char *name, const char *const *dimensions,
                                                  size_t count)
{
    pharos_metric_spec spec;
    memset(&spec, 0, sizeof spec);
    spec.size = sizeof spec;
    spec.kind = kind;
    spec.name = name;
    spec.dimensions = dimensions;
    spec.dimension_count = count;
    return spec;
}

/* Parameters. */
static inline pharos_parameter pharos_parameter_of(const char *name, int32_t kind)
{
    pharos_parameter parameter;
    memset(&parameter, 0, sizeof parameter);
    parameter.size = sizeof parameter;
    parameter.name = name;
    parameter.kind = kind;
    return parameter;
}

static inline pharos_parameter pharos_bool(const char *name, int32_t value)
{
    pharos_parameter parameter = pharos_parameter_of(name, PHAROS_KIND_BOOL);
    parameter.boolean = value;
    return parameter;
}

static inline pharos_parameter pharos_int(const char *name, int64_t value)
{
    pharos_parameter parameter = pharos_parameter_of(name, PHAROS_KIND_INT);
    parameter.integer = value;
    return parameter;
}

static inline pharos_parameter pharos_double(const char *name, double value)
{
    pharos_parameter parameter = pharos_parameter_of(name, PHAROS_KIND_DOUBLE);
    parameter.real = value;
    return parameter;
}

static inline pharos_parameter pharos_text(const char *name, const char *value)
{
    pharos_parameter parameter = pharos_parameter_of(name, PHAROS_KIND_TEXT);
    parameter.text = value;
    parameter.text_length = strlen(value);
    return parameter;
}

#ifdef __cplusplus
}
#endif

#endif
