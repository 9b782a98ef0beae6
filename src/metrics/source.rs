//! The sources of built-in metrics, as data. Rows of the table in [`builtin`](super::builtin) refer
//! to them, and only [`readings`](super::readings) reads values by them.

use super::counts::ModelCount;
use super::unit::TimeUnit;

/// The source of a built-in metric's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Series that code writes through the cache by label values.
    Family,
    /// The same, but never logged: a log that counted its own lines would never end.
    UnloggedFamily,
    /// Answered requests by protocol, route and status code.
    Answers,
    /// Refused and failed requests by protocol, route and reason.
    RequestFailures,
    /// HTTP answers by class of status code.
    HttpClass(HttpClass),
    /// Open streams by protocol.
    OpenStreams,
    /// Cells of every model, and the labels of their series.
    Model(LabelSet, ModelValue),
}

/// The labels of a model's series. The only place that defines how a model's namespace appears in
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LabelSet {
    /// As in Triton: `model` (the bare name), `version`, `namespace` if there is one, and the
    /// model's `metric_tags`.
    Triton,
    /// `model` (the full name, `NAMESPACE/NAME`), `version`, and the model's `metric_tags`.
    Tagged,
    /// `model` (the full name) and `version`.
    Full,
    /// `model_name`, `model_version` and the host. Name and version are the alias's if requests are
    /// counted by alias; otherwise the bare name and the version, plus `namespace` if there is one.
    Alias,
}

/// The value of a model that a series shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ModelValue {
    /// A count.
    Count(ModelCount, Scale),
    /// A count of the response cache. Models that do not use the cache have no such series.
    CacheCount(ModelCount, Scale),
    /// The number of waiting requests.
    Pending,
    /// Failures by reason.
    Failures,
    /// Batches by the reason why they were sent.
    Batches,
    /// Instances by state.
    Instances,
    /// A histogram of a stage's duration.
    Durations(Stage),
    /// A histogram of the time to the first response.
    FirstResponse,
    /// A histogram of the sizes of executed batches.
    BatchSizes,
    /// A number of the streams of responses. Models that are not decoupled have no such series.
    Stream(StreamValue),
    /// A number of the tokens of a model that generates text. Other models have no such series.
    Tokens(TokenValue),
    /// Choices of a model that generates text that have ended, by the reason.
    Finished,
    /// Quantiles of a stage's duration.
    Quantiles(Stage),
    /// Quantiles of the response cache's durations.
    CacheQuantiles(Lookup),
    /// A number of each service level objective that covers the model.
    Objective(ObjectiveValue),
    /// What each tenant has used of the model.
    Tenant(TenantValue),
}

/// A number of an objective that a metric shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectiveValue {
    /// Good requests.
    Good,
    /// All requests that count.
    All,
    /// The required share of good requests.
    Share,
    /// The time in seconds in which a request must succeed; latency only.
    Threshold,
    /// The part of the error budget that the requests since the model's load have left. Negative if
    /// it is overspent.
    Budget,
}

/// What a tenant has used of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TenantValue {
    /// Successful and failed requests.
    Requests,
    /// Failed requests.
    Failures,
    /// Nanoseconds in the queue.
    QueueNs,
    /// Nanoseconds of inputs, execution and outputs.
    ComputeNs,
    /// Tokens of prompts. Only of models that generate text.
    PromptTokens,
    /// Generated tokens. Only of models that generate text.
    GeneratedTokens,
    /// Requests that were refused because the tenant's budget of tokens was used up. Only of models
    /// that generate text.
    RateLimited,
}

impl TenantValue {
    /// Returns the unit in which it is shown.
    pub(super) fn scale(self) -> Scale {
        match self {
            Self::Requests
            | Self::Failures
            | Self::PromptTokens
            | Self::GeneratedTokens
            | Self::RateLimited => Scale::One,
            Self::QueueNs | Self::ComputeNs => Scale::Seconds,
        }
    }
}

/// A number of the streams of a decoupled model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamValue {
    /// A histogram of the time to the first response.
    FirstResponse,
    /// A histogram of the time between two consecutive responses to a request.
    Interval,
    /// A histogram of the number of responses to a request.
    Length,
    /// The number of responses.
    Responses,
    /// The bytes of their tensors.
    Bytes,
}

/// A number of the tokens of a model that generates text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenValue {
    /// Tokens of prompts.
    Prompt,
    /// Tokens of prompts that were in a cache.
    Cached,
    /// Generated tokens.
    Generated,
    /// Requests that wait in the queue of the server and in the engines of the model.
    Queued,
    /// A histogram.
    Distribution(TokenDistribution),
}

/// A histogram of the tokens of a model that generates text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenDistribution {
    /// The time to the first token.
    First,
    /// The time between two consecutive tokens of a request.
    Interval,
    /// The mean of these times of each finished request.
    PerToken,
    /// The time from the arrival of a finished request to its execution.
    Queue,
    /// The time from the arrival of a finished request to its end.
    Request,
    /// The tokens of the prompt of a finished request.
    PromptLength,
    /// The tokens that a finished request has generated.
    GenerationLength,
}

impl TokenDistribution {
    pub(super) const ALL: [Self; 7] = [
        Self::First,
        Self::Interval,
        Self::PerToken,
        Self::Queue,
        Self::Request,
        Self::PromptLength,
        Self::GenerationLength,
    ];
}

/// The unit in which a count is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    /// Unchanged.
    One,
    /// Nanoseconds shown as whole microseconds.
    Micros,
    /// Nanoseconds shown as microseconds with fractions. The log lines of such a counter are pushed
    /// for each request.
    FractionalMicros,
    /// Nanoseconds shown as seconds with fractions.
    Seconds,
}

impl Scale {
    /// Returns the unit of the shown values if they are times.
    pub(super) fn unit(self) -> Option<TimeUnit> {
        match self {
            Self::One => None,
            Self::Micros | Self::FractionalMicros => Some(TimeUnit::Microseconds),
            Self::Seconds => Some(TimeUnit::Seconds),
        }
    }
}

/// Classes of HTTP status codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpClass {
    /// 200 to 299.
    Success,
    /// 400 to 499.
    ClientError,
    /// All other codes.
    Other,
}

/// The result of a look-up in the response cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    /// A response was found.
    Hit,
    /// No response was found.
    Miss,
}

/// A stage of a request.
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

    /// The stages of one execution. A request of an iterative sequence may have several executions.
    pub(super) const OF_EXECUTIONS: [Stage; 4] =
        [Self::Queue, Self::ComputeInput, Self::ComputeInfer, Self::ComputeOutput];

    /// The stages of a request that the response cache answers.
    pub(super) const OF_HITS: [Stage; 2] = [Self::Request, Self::Queue];
}
