//! Where the numbers of a built-in metric come from, as data: rows of the table in [`builtin`](super::builtin) name it, and
//! [`readings`](super::readings) is the only code that reads by it.

use super::counts::ModelCount;

/// The cells of a built-in metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Series reached through the cache by label values.
    Family,
    /// The same, never logged: a log that counts its own lines would not come to an end.
    UnloggedFamily,
    /// Answers by protocol, route and status code.
    Answers,
    /// Refused and failed requests by protocol, route and reason.
    RequestFailures,
    /// HTTP answers of a class of status codes.
    HttpClass(HttpClass),
    /// Open streams by protocol.
    OpenStreams,
    /// Cells of every model, and the labels by which they are shown.
    Model(LabelSet, ModelValue),
}

/// The labels of a model's series. This is the only place that decides how a model with a namespace is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LabelSet {
    /// `model` (the bare name), `version`, `namespace` if there is one, and the model's `metric_tags`.
    Tagged,
    /// `model` (the full name, `NAMESPACE/NAME`) and `version`.
    Full,
    /// `model_name`, `model_version` and the host: the name and version that clients use where requests are counted by
    /// alias, else the bare name, the version and `namespace` if there is one.
    Alias,
}

/// What a series shows of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelValue {
    /// A count.
    Count(ModelCount, Scale),
    /// A count of the response cache; models that do not use it have no such series.
    CacheCount(ModelCount, Scale),
    /// Requests that wait now.
    Pending,
    /// Failures by reason.
    Failures,
    /// Batches by the reason for which they were sent.
    Batches,
    /// Instances by state.
    Instances,
    /// A histogram of a part of the requests' time, in microseconds.
    Durations(Stage),
    /// A histogram of the time to the first response, in milliseconds.
    FirstResponse,
    /// A histogram of the sizes of executed batches.
    BatchSizes,
    /// Quantiles of a part of the requests' time, in microseconds.
    Quantiles(Stage),
    /// Quantiles of the response cache's time, in microseconds.
    CacheQuantiles(Lookup),
}

/// How a count is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    /// As it is.
    One,
    /// Nanoseconds as whole microseconds.
    Micros,
    /// Nanoseconds as microseconds with fractions. The log lines of such a counter are pushed request by request.
    FractionalMicros,
    /// Nanoseconds as seconds with fractions.
    Seconds,
}

/// Classes of HTTP status codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpClass {
    /// 200 to 299.
    Success,
    /// 400 to 499.
    ClientError,
    /// All others.
    Other,
}

/// How a look-up in the response cache ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    /// With a response.
    Hit,
    /// Without.
    Miss,
}

/// A part of a request's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// From start to end.
    Request,
    /// In the queue.
    Queue,
    /// Bringing inputs to the model.
    ComputeInput,
    /// Executing the model.
    ComputeInfer,
    /// Taking outputs from the model.
    ComputeOutput,
}

impl Stage {
    pub(super) const ALL: [Stage; 5] =
        [Self::Request, Self::Queue, Self::ComputeInput, Self::ComputeInfer, Self::ComputeOutput];

    /// Those of a request that is answered without being executed.
    pub(super) const OF_HITS: [Stage; 2] = [Self::Request, Self::Queue];

    /// The nanoseconds of all successful requests in this part.
    pub(super) fn sum(self) -> ModelCount {
        match self {
            Self::Request => ModelCount::SuccessNs,
            Self::Queue => ModelCount::QueueNs,
            Self::ComputeInput => ModelCount::ComputeInputNs,
            Self::ComputeInfer => ModelCount::ComputeInferNs,
            Self::ComputeOutput => ModelCount::ComputeOutputNs,
        }
    }
}
