/*
 * pharos_backend.h: interface for writing a backend as a shared library in C, C++ or any language with a C ABI.
 *
 * A backend executes the models that name it in their configuration. The server looks for the backend NAME in
 * BACKEND_DIRECTORY/NAME/libpharos_NAME.so, loads it into a worker (the process that runs one instance of a model) and
 * calls these functions of it:
 *
 *     pharos_backend_abi_version    must return PHAROS_BACKEND_ABI_VERSION
 *     pharos_backend_create         creates an instance from the model's configuration and directory
 *     pharos_backend_execute        executes a batch of requests; any number of times
 *     pharos_backend_destroy        destroys the instance when it stops
 *     pharos_backend_sequence_ended (optional) reports a sequence that ended without its last step
 *     pharos_backend_engine         (optional) names the engine and its version, for logs
 *     pharos_backend_wants          (optional) states capabilities, and data that the backend needs
 *
 * The library receives a table of functions that read inputs and create outputs: pharos_host. Build it with
 *
 *     cc -std=c11 -O2 -shared -fPIC -I DIRECTORY_OF_THIS_FILE -o libpharos_NAME.so backend.c
 *
 * Threads. The server calls the library from one thread, one call at a time. The library may call functions of
 * pharos_host from any of its threads. Those that take a batch, outputs, or a response of these may be called only
 * while pharos_backend_execute runs; later calls fail without other effects. Responses keep the order of the calls. A
 * child of fork() may call none of the functions.
 *
 * Ownership. The server owns everything that it passes out: the library frees none of it, and each declaration states
 * how long it is valid. Strings that the library passes in are copied before the call returns. They are UTF-8 and end
 * with a NUL; invalid UTF-8 is replaced. Pointers must be valid for the data that they are documented to point to: the
 * server checks null pointers, ranges, sizes and states, but cannot check more. The library must write only within the
 * bounds of memory that it received.
 *
 * Errors. Functions that can fail return a pharos_code; pharos_host.last_error() then returns the reason. A library
 * that crashes, hangs (see --worker-execution-timeout-secs) or violates these rules affects only its instance: the
 * requests being executed fail, and a new process replaces it. C++ exceptions must not leave the library.
 *
 * Versions. PHAROS_BACKEND_ABI_VERSION changes when old libraries can no longer be loaded. Compatible additions are
 * made at the end of a structure, and each structure begins with its size in bytes: a library that also supports older
 * servers must test PHAROS_HAS(host, function) before it uses a field that its oldest server lacks. The library sets
 * the size of structures that it passes in (the functions at the end of this file do).
 *
 * Units: sizes and lengths are in bytes, shapes and ranks count elements; times state their unit.
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

/* The result of a call, and the error of a request: in parentheses the HTTP status and the gRPC status of a request
   that fails with this code. */
typedef int32_t pharos_code;
enum {
    PHAROS_OK = 0,
    PHAROS_UNKNOWN = 1,          /* none of the others (400, UNKNOWN) */
    PHAROS_INTERNAL = 2,         /* an error of the server or the backend (500, INTERNAL) */
    PHAROS_NOT_FOUND = 3,        /* the requested object does not exist (404, NOT_FOUND) */
    PHAROS_INVALID_ARG = 4,      /* invalid; repeating the request does not help (400, INVALID_ARGUMENT) */
    PHAROS_UNAVAILABLE = 5,      /* not available now; a retry may succeed (503, UNAVAILABLE) */
    PHAROS_UNSUPPORTED = 6,      /* not supported (501, UNIMPLEMENTED) */
    PHAROS_ALREADY_EXISTS = 7,   /* exists already (400, ALREADY_EXISTS) */
    PHAROS_CANCELLED = 8,        /* the request is cancelled (400, CANCELLED) */
    PHAROS_DEADLINE_EXCEEDED = 9, /* the deadline has passed (504, DEADLINE_EXCEEDED) */
    PHAROS_RESOURCE_EXHAUSTED = 10 /* a limit of the client is used up (429, RESOURCE_EXHAUSTED) */
};

/* The types of tensor elements. All are little-endian. */
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
    PHAROS_BYTES = 13, /* strings or other bytes: each element is preceded by its length in four bytes */
    PHAROS_BF16 = 14
};

/* Kinds of a parameter's value. */
enum { PHAROS_KIND_BOOL = 1, PHAROS_KIND_INT = 2, PHAROS_KIND_UINT = 3, PHAROS_KIND_DOUBLE = 4, PHAROS_KIND_TEXT = 5 };

/* Kinds of metrics. */
enum {
    PHAROS_COUNTER = 1,   /* a sample adds to it; not negative */
    PHAROS_GAUGE = 2,     /* a sample replaces its value */
    PHAROS_HISTOGRAM = 3, /* a sample is an observation; metrics.yaml defines the buckets */
    PHAROS_SUMMARY = 4    /* like a histogram, with quantiles */
};

/* Levels of log lines. */
enum { PHAROS_LOG_INFO = 1, PHAROS_LOG_WARNING = 2, PHAROS_LOG_ERROR = 3, PHAROS_LOG_VERBOSE = 4 };

/* The requests that a sample of a metric belongs to, in place of a request's position. */
enum {
    PHAROS_WHOLE_BATCH = -1, /* all requests of the batch that this thread executes; none on other threads */
    PHAROS_NO_REQUEST = -2
};

/* ---- Provided by the server ------------------------------------------------------------------------------------ */

typedef struct pharos_host pharos_host;
typedef struct pharos_batch pharos_batch;       /* valid until pharos_backend_execute returns */
typedef struct pharos_outputs pharos_outputs;   /* the same */
typedef struct pharos_response pharos_response; /* until it is sent or dropped; see response_begin, responder_begin */
typedef struct pharos_responder pharos_responder; /* valid until responder_drop */
typedef struct pharos_kept pharos_kept;         /* until release_input */
typedef struct pharos_metrics pharos_metrics;   /* with its metrics and series until pharos_backend_destroy returns */
typedef struct pharos_metric pharos_metric;
typedef struct pharos_series pharos_series;

/* The data that an instance is created from. Valid until pharos_backend_create returns, except `host` and `metrics`. */
typedef struct pharos_context {
    size_t size;
    const pharos_host *host;  /* the server's functions; valid as long as the process lives */
    pharos_metrics *metrics;  /* for recording metrics; valid until pharos_backend_destroy returns */
    const char *config;       /* the completed configuration as JSON, with the field names of config.pbtxt */
    const char *directory;    /* the version's directory, with the model's files */
    const char *model;        /* the model's name */
    const char *instance;     /* the instance's name, for messages */
    uint64_t version;         /* the model's version */
    uint32_t threads;         /* number of threads that one execution may use */
    uint32_t max_batch_size;  /* maximum rows of a batch; 0: no batching, shapes have no row dimension */
    int32_t decoupled;        /* 1: a request may have any number of responses */
} pharos_context;

/* An input or output of the configuration. Valid until pharos_backend_create returns. */
typedef struct pharos_tensor {
    size_t size;
    const char *name;
    const int64_t *dims; /* without the row dimension of a batch; -1 for a variable dimension */
    size_t rank;         /* number of dims */
    pharos_datatype datatype;
    int32_t optional; /* 1: requests may omit this input */
} pharos_tensor;

/* An input of a batch, with the data of all its requests concatenated. Valid until pharos_backend_execute returns. */
typedef struct pharos_input {
    size_t size;
    const char *name;
    const void *data;     /* row-major, aligned to 64 bytes; read-only */
    size_t bytes;         /* length of the data */
    const int64_t *shape; /* of the whole batch: if the model batches, the first dimension counts the rows of all requests */
    size_t rank;
    size_t index; /* position in the configuration's inputs; inputs that the server adds follow them: batch_input,
                     control inputs of sequences, states */
    pharos_datatype datatype;
} pharos_input;

/* A request of a batch. Valid until pharos_backend_execute returns. */
typedef struct pharos_request {
    size_t size;
    const char *id; /* the client's request id; may be empty */
    size_t id_length;
    size_t parameters;     /* number of parameters: see request_parameter */
    uint64_t sequence_key; /* unique number of its sequence; never reused */
    uint32_t rows;         /* number of its rows in the batch; 1 if the model does not batch */
    int32_t in_sequence;   /* 1: a step of a sequence. 0: padding, or the model has no sequences */
    int32_t sequence_start;
    int32_t sequence_end;
    /* Set if pharos_backend_wants returns PHAROS_WANTS_DETAILS, otherwise 0 and NULL: */
    uint64_t correlation_id;      /* the client's sequence number; 0: none, or a string */
    const char *correlation_text; /* the client's string in place of the number; otherwise NULL */
    uint64_t priority;            /* 0: the model's default */
    uint64_t timeout_us;          /* the client's timeout in microseconds; 0: no timeout */
} pharos_request;

/* A parameter of a request or response. Owned by the server; valid until pharos_backend_execute returns. */
typedef struct pharos_parameter {
    size_t size;
    const char *name;
    const char *text; /* PHAROS_KIND_TEXT; ends with a NUL that is not counted; may contain NULs */
    size_t text_length;
    int64_t integer;   /* PHAROS_KIND_INT */
    uint64_t natural;  /* PHAROS_KIND_UINT: too large for `integer` */
    double real;       /* PHAROS_KIND_DOUBLE */
    int32_t boolean;   /* PHAROS_KIND_BOOL: 0 or 1 */
    int32_t kind;      /* which of these fields is set */
} pharos_parameter;

/* ---- Passed in by the library --------------------------------------------------------------------------------- */

/* An output to be allocated. */
typedef struct pharos_output {
    size_t size;
    size_t index;         /* position in the configuration's outputs; states that are not outputs follow them */
    const int64_t *shape; /* as for an input: of the whole batch, or of the request of a response */
    size_t rank;
    size_t bytes; /* required for PHAROS_BYTES; otherwise 0 or the size computed from the shape */
    pharos_datatype datatype; /* should match the configuration; another one is sent with a warning */
} pharos_output;

/* A metric to record. */
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

    /* Returns the reason of this thread's most recent failed call. Valid until another call of this thread fails. */
    const char *(*last_error)(void);

    /* Writes one or more lines to the server's log, with the instance's name. Output of the library is logged as well:
       standard output as information, standard error as warnings. */
    void (*log)(int32_t level, const char *message);

    /* -- in pharos_backend_create -------------------------------------------------------------------------------- */

    /* Returns the string value of a parameter of the configuration: parameters { key: "NAME" value: { string_value:
       "..." } }; NULL if there is no such parameter. Valid until pharos_backend_create returns. */
    const char *(*config_parameter)(const pharos_context *context, const char *name);

    /* Returns the configured input at a position, counted from 0; NULL after the last. */
    const pharos_tensor *(*config_input)(const pharos_context *context, size_t position);

    /* Returns the configured output at a position; states that are not outputs follow them. NULL after the last. */
    const pharos_tensor *(*config_output)(const pharos_context *context, size_t position);

    /* Sets the reason why the model cannot be loaded, for the author of the model. Returns PHAROS_UNAVAILABLE, for
       pharos_backend_create to return. */
    pharos_code (*fail_load)(const pharos_context *context, const char *message);

    /* -- inputs, in pharos_backend_execute ----------------------------------------------------------------------- */

    /* Returns the number of requests in the batch: at least one. */
    size_t (*request_count)(const pharos_batch *batch);

    /* Returns the number of inputs present: inputs that all requests omit are absent. */
    size_t (*input_count)(const pharos_batch *batch);

    /* Returns the input at a position among those present, in the order of the configuration; NULL after the last. */
    const pharos_input *(*input)(const pharos_batch *batch, size_t position);

    /* Returns the request at a position; NULL after the last. */
    const pharos_request *(*request)(const pharos_batch *batch, size_t position);

    /* Returns a parameter of a request by its position or by its name; NULL if there is no such parameter. */
    const pharos_parameter *(*request_parameter)(const pharos_batch *batch, size_t request, size_t position);
    const pharos_parameter *(*find_parameter)(const pharos_batch *batch, size_t request, const char *name);

    /* Returns 1 if any request asks for the output, or if it is a state; otherwise the output is not needed. */
    int32_t (*is_wanted)(const pharos_batch *batch, size_t output);

    /* Returns 1 if the request is cancelled; it may become so at any moment. Its response will be discarded: the
       backend may fail it with PHAROS_CANCELLED and continue with the others. */
    int32_t (*is_cancelled)(const pharos_batch *batch, size_t request);

    /* -- outputs of a batch, in pharos_backend_execute ----------------------------------------------------------- */

    /* Allocates memory for an output over the whole batch, once for each output. The memory is aligned to 64 bytes
       unless it is client memory. Its content is undefined and must be written completely. It is valid until
       pharos_backend_execute returns. PHAROS_INVALID_ARG: no such output, a shape with a negative dimension, a size
       that does not match the shape, or (with the parameter strict_output_types) a datatype other than the configured
       one. PHAROS_ALREADY_EXISTS: the output is already allocated. PHAROS_INTERNAL: there is no room. */
    pharos_code (*allocate)(pharos_outputs *outputs, const pharos_output *output, void **data);

    /* Withdraws an output, so that it can be allocated again. Its memory must not be used any more. */
    pharos_code (*withdraw)(pharos_outputs *outputs, size_t output);

    /* Fails one request; the others are answered as usual, and its rows of the outputs are ignored. In a decoupled
       model, the error is the request's last response. PHAROS_INVALID_ARG: no such request, or an invalid code. */
    pharos_code (*fail)(pharos_outputs *outputs, size_t request, pharos_code code, const char *message);

    /* Fails all requests of the batch. Returns `code`, for pharos_backend_execute to return. */
    pharos_code (*fail_batch)(pharos_outputs *outputs, pharos_code code, const char *message);

    /* Adds a parameter to the response of a request. */
    pharos_code (*set_parameter)(pharos_outputs *outputs, size_t request, const pharos_parameter *parameter);

    /* Reschedules a request of a model with sequence_batching { iterative_sequence: true }: it is executed again in a
       later batch. Its outputs in this batch are discarded. PHAROS_INTERNAL: the model has no iterative sequences. */
    pharos_code (*reschedule)(pharos_outputs *outputs, size_t request);

    /* Stamps for the statistics: the inputs are ready for the computation; the computation is done. Without them, the
       whole time of pharos_backend_execute counts as computation. */
    void (*inputs_ready)(pharos_outputs *outputs);
    void (*computed)(pharos_outputs *outputs);

    /* -- responses of a decoupled model, in pharos_backend_execute ----------------------------------------------- */

    /* Begins a response to a request, after waiting until its client has read enough of the earlier ones. Only one can
       be open at a time; until it is sent or dropped, all other functions of these outputs fail, except those for the
       response. PHAROS_CANCELLED: the request is cancelled. PHAROS_INVALID_ARG: no such request, or another response is
       open. PHAROS_INTERNAL: the model is not decoupled, or the request has had its last response. */
    pharos_code (*response_begin)(pharos_outputs *outputs, size_t request, pharos_response **response);

    /* Like allocate and set_parameter, for this response only: its shapes begin with the request's rows. */
    pharos_code (*response_allocate)(pharos_response *response, const pharos_output *output, void **data);
    pharos_code (*response_set_parameter)(pharos_response *response, const pharos_parameter *parameter);

    /* Sends the response; as the request's last if `last` is not 0. The handle is invalid afterwards, even after an
       error. */
    pharos_code (*response_send)(pharos_response *response, int32_t last);

    /* Sends an error instead of the response; more may follow. Use `fail` for an error that ends the request. */
    pharos_code (*response_send_error)(pharos_response *response, pharos_code code, const char *message);

    /* Discards the response. */
    void (*response_drop)(pharos_response *response);

    /* Ends the responses to a request without sending another one. Requests that are neither ended nor detached when
       pharos_backend_execute returns are ended automatically. */
    pharos_code (*finish)(pharos_outputs *outputs, size_t request);

    /* -- metrics, at any time ------------------------------------------------------------------------------------ */

    /* Adds a metric to record; the same metric may be added any number of times. A definition in metrics.yaml takes
       precedence. PHAROS_UNAVAILABLE: metrics.yaml does not define it (last_error contains the line to add) and the
       server was started without --model-metrics-auto-detect, or it defines another kind or other labels. */
    pharos_code (*metric_add)(pharos_metrics *metrics, const pharos_metric_spec *spec, pharos_metric **metric);

    /* Returns a metric that was added, or that metrics.yaml defines. PHAROS_UNAVAILABLE: there is no metric of this
       name and kind. */
    pharos_code (*metric_get)(pharos_metrics *metrics, int32_t kind, const char *name, pharos_metric **metric);

    /* Returns the series of a metric for these label values, in the order of the dimensions. Keep it: recording through
       it is cheapest. */
    pharos_code (*metric_series)(pharos_metric *metric, const char *const *values, size_t count,
                                 pharos_series **series);

    /* Records a sample. When the call returns, the sample is committed and reaches the server even if this process
       dies. `request` is the position of the request that the sample belongs to, or PHAROS_WHOLE_BATCH or
       PHAROS_NO_REQUEST. A value that the kind does not allow is dropped, counted and logged. */
    pharos_code (*add_or_update)(pharos_series *series, double value, int64_t request);

    /* Sends accumulated values. The server does so itself after the load and after each batch. */
    pharos_code (*metrics_flush)(pharos_metrics *metrics);

    /* -- requests that the library answers by itself, also after pharos_backend_execute, from any thread --------- */

    /* Detaches a request from its batch: the library answers it individually, and outputs over the batch do not apply
       to it. Meanwhile the instance takes its next batch. If the batch fails as a whole, the request fails as well.
       PHAROS_INVALID_ARG: no such request, or a response is open. PHAROS_INTERNAL: the request is already detached, or
       the model has states. */
    pharos_code (*detach)(pharos_outputs *outputs, size_t request, pharos_responder **responder);

    /* Begins a response: the only one, or, in a decoupled model, one of any number. Several may be open. Fill it like a
       response of response_begin. response_send waits while the client has too many unread responses, and returns
       PHAROS_CANCELLED when the request is cancelled. */
    pharos_code (*responder_begin)(pharos_responder *responder, pharos_response **response);

    /* Ends the responses with an error. Ignored if they have already ended. */
    pharos_code (*responder_fail)(pharos_responder *responder, pharos_code code, const char *message);

    /* Ends the responses of a decoupled model without sending another one. PHAROS_INTERNAL: it has had its last
       response. */
    pharos_code (*responder_finish)(pharos_responder *responder);

    /* Returns 1 if the request is cancelled. */
    int32_t (*responder_is_cancelled)(pharos_responder *responder);

    /* Frees the responder; must be called exactly once. A request that has not had its last response fails. */
    void (*responder_drop)(pharos_responder *responder);

    /* Keeps the input at a position of the batch, for all its requests, until release_input. `*data` is the address of
       the kept bytes (which differs from pharos_input.data for client memory). Kept inputs occupy arena space that
       later batches need. */
    pharos_code (*keep_input)(const pharos_batch *batch, size_t position, const void **data, pharos_kept **kept);
    void (*release_input)(pharos_kept *kept);

    /* Returns 1 if response_send would send a response to this request without waiting for its client, 0 otherwise. A
       thread that answers many requests asks first, and collects the text of a client that reads slowly. Servers before
       0.4 do not have this function: test PHAROS_HAS(host, responder_ready). */
    int32_t (*responder_ready)(pharos_responder *responder);

    /* With `hold` 1, the responses of this process, to all of its requests, stay in its memory; with `hold` 0, they are
       sent together. A thread that answers many requests at once saves the server a wake-up for each of them. The
       responder is any that has not been freed. Hold responses for microseconds only. Servers before 0.4 do not have
       this function: test PHAROS_HAS(host, responder_hold). */
    void (*responder_hold)(pharos_responder *responder, int32_t hold);

    /* -- in pharos_backend_create, from any thread --------------------------------------------------------------- */

    /* Reports how much of the model is loaded, from 0 to 1: the server shows it in the repository index, the log and
       the metrics. Call it as often as is convenient: only a percentage above all earlier ones is sent.
       PHAROS_INVALID_ARG: the fraction is not a number from 0 to 1. Servers before 0.4 do not have this function: test
       PHAROS_HAS(host, report_load_progress). */
    pharos_code (*report_load_progress)(const pharos_context *context, double fraction);
};

/* ---- The library's functions ----------------------------------------------------------------------------------- */

/* Returns PHAROS_BACKEND_ABI_VERSION. Called before all other functions of the library. */
PHAROS_EXPORT uint32_t pharos_backend_abi_version(void);

/* Creates the instance, stores it in `*instance` (which may stay NULL) and returns PHAROS_OK. With any other code the
   model is not loaded: the reason is the message of fail_load, and pharos_backend_destroy is not called. */
PHAROS_EXPORT pharos_code pharos_backend_create(const pharos_context *context, void **instance);

/* Executes a batch. Any code but PHAROS_OK fails all its requests, with the message of fail_batch or, without one, of
   last_error. */
PHAROS_EXPORT pharos_code pharos_backend_execute(void *instance, const pharos_batch *batch, pharos_outputs *outputs);

/* Frees the instance. After it returns, no thread of the library may call functions of pharos_host. Detached requests
   that are not answered fail. */
PHAROS_EXPORT void pharos_backend_destroy(void *instance);

/* Optional. Reports a sequence that ended without a step with sequence_end: its client disconnected, or it was idle for
   too long. */
PHAROS_EXPORT void pharos_backend_sequence_ended(void *instance, uint64_t sequence_key);

/* Optional. Returns the sum of the flags that apply:
   PHAROS_WANTS_DETAILS: requests carry their correlation ids, priorities and timeouts.
   PHAROS_BEARS_CHANGES: inputs and output memory may be the client's shared memory, without a copy. The client may
   change it at any moment, and it has no particular alignment. The library must not make two decisions from separate
   reads of the same bytes. */
enum { PHAROS_WANTS_DETAILS = 1, PHAROS_BEARS_CHANGES = 2 };
PHAROS_EXPORT uint32_t pharos_backend_wants(void);

/* Optional. Returns the name and version of the engine: "normalize 1.0". The string must stay valid as long as the
   library. */
PHAROS_EXPORT const char *pharos_backend_engine(void);

/* ---- Short forms ----------------------------------------------------------------------------------------------- */

/* Returns an output of a fixed-size datatype. */
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

/* Returns a metric with the given dimensions. */
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

/* Functions that create parameters. */
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
