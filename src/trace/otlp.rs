//! Encodes traces as spans for an OpenTelemetry collector, with Triton's names. `InferRequest` is
//! the span of the whole request. It contains a span with the name of the model, which contains
//! `compute`, and for each step of an ensemble a span within the span of the ensemble. Stamps are
//! events of the spans. Spans of models that generate text have the attributes of OpenTelemetry's
//! semantic conventions for generative models as well (`gen_ai.*`).
//!
//! No I/O: traces in, bytes of an `ExportTraceServiceRequest` out.

use bytes::Bytes;
use prost::Message;

use crate::id::SpanId;
use crate::otlp::proto::collector::trace::v1::ExportTraceServiceRequest;
use crate::otlp::proto::common::v1::InstrumentationScope;
use crate::otlp::proto::common::v1::KeyValue;
use crate::otlp::proto::trace::v1::{ResourceSpans, ScopeSpans, Span, Status, span, status};
use crate::otlp::{Random, decimal, number, resource, text, texts};
use crate::request_trace::{
    Activity, Context, Finished, Operation, SamplingLimits, TracedGeneration, TracedPart,
};
use crate::timeline::Instant;

/// The name of the scope of all spans.
const SCOPE: &str = "triton-server";

/// The name of the span of the whole request.
const ROOT: &str = "InferRequest";

/// The events of a request to a model that generates text: the first response with a token, and the
/// last response.
const FIRST_TOKEN: &str = "gen_ai.first_token";
const GENERATION_END: &str = "gen_ai.generation_end";

/// Generates a span's id.
pub fn span_id(random: &mut impl Random) -> SpanId {
    loop {
        if let Some(id) = SpanId::new(random.next()) {
            return id;
        }
    }
}

/// Returns the number of spans of a trace.
pub fn count(trace: &Finished) -> usize {
    let begun = trace.parts.iter().filter(|part| part.model.is_some());
    1 + begun.map(|part| 1 + usize::from(has_computed(part))).sum::<usize>()
}

fn has_computed(part: &TracedPart) -> bool {
    part.stamps.iter().any(|(activity, _)| *activity == Activity::ComputeStart)
}

/// Encodes the message that exports these traces. `offset` is the difference in nanoseconds between
/// the wall clock (since 1970) and the clock of the stamps; `attributes` describe this server.
pub fn request(
    traces: &[Finished],
    attributes: &[(String, String)],
    offset: u64,
    random: &mut impl Random,
) -> Bytes {
    let mut spans = Vec::new();
    for trace in traces {
        if let Some(context) = &trace.context {
            Trace { trace, context, offset, spans: &mut spans }.append(random);
        }
    }
    let scope = InstrumentationScope { name: SCOPE.to_owned(), ..InstrumentationScope::default() };
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }];
    let resource = Some(resource(attributes));
    let resource_spans = vec![ResourceSpans { resource, scope_spans, ..ResourceSpans::default() }];
    ExportTraceServiceRequest { resource_spans }.encode_to_vec().into()
}

struct Trace<'a> {
    trace: &'a Finished,
    context: &'a Context,
    offset: u64,
    spans: &'a mut Vec<Span>,
}

impl Trace<'_> {
    fn append(&mut self, random: &mut impl Random) {
        let parts = &self.trace.parts;
        // The span of each part, as the parent of its steps.
        let mut known: Vec<(u64, SpanId)> = Vec::new();
        for part in parts {
            let own = span_id(random);
            let parent = known
                .iter()
                .find(|(id, _)| *id == part.parent)
                .map_or(self.context.span, |(_, span)| *span);
            known.push((part.id, own));
            if part.model.is_some() {
                self.model(part, own, parent);
                if has_computed(part) {
                    self.compute(part, span_id(random), own);
                }
            }
        }
        if let Some(root) = parts.first() {
            self.root(root);
        }
    }

    fn root(&mut self, root: &TracedPart) {
        let events = self.events(root, |activity| !is_model(activity) && !is_compute(activity));
        let all = self.trace.parts.iter().flat_map(|part| &part.stamps).map(|(_, at)| *at);
        let start = all.clone().min().unwrap_or(self.trace.ended);
        let end = all.max().unwrap_or(start).max(self.trace.ended);
        let mut span = self.span(ROOT, self.context.span, self.context.parent, start, end);
        span.events = events;
        span.status = failure(root);
        self.spans.push(span);
    }

    fn model(&mut self, part: &TracedPart, own: SpanId, parent: SpanId) {
        let Some(model) = &part.model else { return };
        let (start, end) =
            bounds(part, self.trace.ended, Activity::RequestStart, Activity::RequestEnd);
        let mut span = self.span(model.name.bare(), own, Some(parent), start, end);
        span.attributes = vec![
            text("triton.model_name", model.name.bare()),
            number("triton.model_version", model.version),
            number("triton.trace_id", part.id),
            number("triton.trace_parent_id", part.parent),
        ];
        if !part.request_id.is_empty() {
            span.attributes.push(text("triton.request_id", &part.request_id));
        }
        span.events = self.events(part, is_model);
        if !has_computed(part) {
            span.events.extend(self.reports(part));
        }
        if let Some(generation) = &part.generation {
            let operation = part.operation.unwrap_or_default();
            span.attributes.extend(generation_attributes(model.name.bare(), operation, generation));
            span.events.extend(self.generation_events(generation));
        }
        span.status = failure(part);
        self.spans.push(span);
    }

    fn compute(&mut self, part: &TracedPart, own: SpanId, parent: SpanId) {
        let (start, end) =
            bounds(part, self.trace.ended, Activity::ComputeStart, Activity::ComputeEnd);
        let mut span = self.span("compute", own, Some(parent), start, end);
        span.events = self.events(part, is_compute);
        span.events.extend(self.reports(part));
        self.spans.push(span);
    }

    fn span(
        &self,
        name: &str,
        own: SpanId,
        parent: Option<SpanId>,
        start: Instant,
        end: Instant,
    ) -> Span {
        Span {
            trace_id: self.context.trace.to_bytes().to_vec(),
            span_id: own.to_bytes().to_vec(),
            trace_state: self.context.state.clone(),
            parent_span_id: parent.map(|parent| parent.to_bytes().to_vec()).unwrap_or_default(),
            name: name.to_owned(),
            kind: span::SpanKind::Server.into(),
            start_time_unix_nano: self.wall(start),
            end_time_unix_nano: self.wall(end.max(start)),
            ..Span::default()
        }
    }

    /// Returns the events that the backend has reported.
    fn reports<'e>(&'e self, part: &'e TracedPart) -> impl Iterator<Item = span::Event> + 'e {
        part.reports.iter().map(|(name, at)| span::Event {
            time_unix_nano: self.wall(*at),
            name: name.clone(),
            ..span::Event::default()
        })
    }

    fn events(&self, part: &TracedPart, wanted: impl Fn(Activity) -> bool) -> Vec<span::Event> {
        let stamps = part.stamps.iter().filter(|(activity, _)| wanted(*activity));
        stamps
            .map(|(activity, at)| span::Event {
                time_unix_nano: self.wall(*at),
                name: activity.name().to_owned(),
                ..span::Event::default()
            })
            .collect()
    }

    /// Returns the events of the first token and of the last response.
    fn generation_events(&self, generation: &TracedGeneration) -> Vec<span::Event> {
        let Some((first, last)) = generation.responses else { return Vec::new() };
        let event = |name: &str, at: Instant, attributes: Vec<KeyValue>| span::Event {
            time_unix_nano: self.wall(at),
            name: name.to_owned(),
            attributes,
            ..span::Event::default()
        };
        vec![event(FIRST_TOKEN, first, Vec::new()), event(GENERATION_END, last, usage(generation))]
    }

    fn wall(&self, at: Instant) -> u64 {
        at.0.saturating_add(self.offset)
    }
}

/// Returns the attributes of a request to a model that generates text.
fn generation_attributes(
    model: &str,
    operation: Operation,
    generation: &TracedGeneration,
) -> Vec<KeyValue> {
    let mut attributes = vec![
        text("gen_ai.operation.name", operation.as_str()),
        text("gen_ai.request.model", model),
    ];
    let SamplingLimits { max_tokens, temperature } = generation.limits;
    attributes.extend(max_tokens.map(|tokens| number("gen_ai.request.max_tokens", tokens)));
    attributes.extend(temperature.map(|value| decimal("gen_ai.request.temperature", value)));
    attributes.extend(usage(generation));
    if !generation.reasons.is_empty() {
        let reasons = generation.reasons.iter().map(|reason| reason.as_str());
        attributes.push(texts("gen_ai.response.finish_reasons", reasons));
    }
    attributes
}

/// Returns the numbers of tokens, as far as the model counts them.
fn usage(generation: &TracedGeneration) -> Vec<KeyValue> {
    let known = [
        ("gen_ai.usage.input_tokens", generation.input_tokens),
        ("gen_ai.usage.output_tokens", generation.output_tokens),
    ];
    known.iter().filter_map(|(key, tokens)| Some(number(key, (*tokens)?))).collect()
}

fn is_model(activity: Activity) -> bool {
    matches!(activity, Activity::RequestStart | Activity::QueueStart | Activity::RequestEnd)
}

fn is_compute(activity: Activity) -> bool {
    let compute = [
        Activity::ComputeStart,
        Activity::ComputeInputEnd,
        Activity::ComputeOutputStart,
        Activity::ComputeEnd,
    ];
    compute.contains(&activity)
}

/// Returns the start and the end of a part's span: the first and the last stamp of these
/// activities. A part without an end was abandoned and ends with the trace.
fn bounds(part: &TracedPart, ended: Instant, from: Activity, to: Activity) -> (Instant, Instant) {
    let all = |wanted: Activity| {
        part.stamps.iter().filter(move |(activity, _)| *activity == wanted).map(|(_, at)| *at)
    };
    (all(from).next().unwrap_or(ended), all(to).next_back().unwrap_or(ended))
}

fn failure(part: &TracedPart) -> Option<Status> {
    let message = part.failure.clone()?;
    Some(Status { message, code: status::StatusCode::Error.into() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::id::{ModelVersion, Traceparent};
    use crate::otlp::SplitMix;
    use crate::request_trace::{Levels, Sample};

    use super::*;

    #[test]
    fn spans_are_nested_as_in_triton() {
        use Activity::{
            ComputeEnd, ComputeStart, HttpRecvStart, HttpSendEnd, QueueStart, RequestEnd,
            RequestStart,
        };
        let caller =
            Traceparent::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01").unwrap();
        let own = SpanId::new(7).unwrap();
        let context = Context {
            trace: caller.trace,
            span: own,
            parent: Some(caller.span),
            state: "a=b".to_owned(),
        };
        let part = |id, parent, model: &str, all: &[(Activity, u64)]| TracedPart {
            id,
            parent,
            model: Some(ModelVersion::new(model, 1)),
            request_id: "r".to_owned(),
            stamps: all.iter().map(|(activity, at)| (*activity, Instant(*at))).collect(),
            ..TracedPart::default()
        };
        let mut root =
            [(HttpRecvStart, 1), (RequestStart, 2), (QueueStart, 3), (RequestEnd, 20)].to_vec();
        root.push((HttpSendEnd, 30));
        let mut step = part(
            5,
            4,
            "m",
            &[
                (RequestStart, 4),
                (QueueStart, 5),
                (ComputeStart, 6),
                (ComputeEnd, 9),
                (RequestEnd, 10),
            ],
        );
        step.failure = Some("no".to_owned());
        let sample =
            Sample { generation: 1, levels: Levels::default(), log_frequency: 0, limited: false };
        let trace = Finished {
            sample,
            context: Some(context),
            parts: vec![part(4, 0, "pipe", &root), step],
            ended: Instant(31),
        };
        assert_eq!(count(&trace), 4);
        let resource = [("service.name".to_owned(), "s".to_owned())];
        let bytes = request(std::slice::from_ref(&trace), &resource, 1000, &mut SplitMix(1));
        let message = ExportTraceServiceRequest::decode(&bytes[..]).unwrap();
        let spans = &message.resource_spans[0].scope_spans[0].spans;
        let find = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
        let root = find(ROOT);
        let pipe = find("pipe");
        let step = find("m");
        let compute = find("compute");
        assert_eq!(root.span_id, 7u64.to_be_bytes());
        assert_eq!(root.parent_span_id, caller.span.to_bytes());
        assert_eq!((&pipe.parent_span_id, &step.parent_span_id), (&root.span_id, &pipe.span_id));
        assert_eq!(compute.parent_span_id, step.span_id);
        assert!(
            spans
                .iter()
                .all(|span| span.trace_id == caller.trace.to_bytes() && span.trace_state == "a=b")
        );
        assert_eq!((root.start_time_unix_nano, root.end_time_unix_nano), (1001, 1031));
        assert_eq!((step.start_time_unix_nano, step.end_time_unix_nano), (1004, 1010));
        let names =
            |span: &Span| span.events.iter().map(|event| event.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(root), ["HTTP_RECV_START", "HTTP_SEND_END"]);
        assert_eq!(names(pipe), ["REQUEST_START", "QUEUE_START", "REQUEST_END"]);
        assert_eq!(names(compute), ["COMPUTE_START", "COMPUTE_END"]);
        assert_eq!(step.status.as_ref().map(|status| status.message.as_str()), Some("no"));
        assert_eq!(pipe.attributes.len(), 5);
    }
}
