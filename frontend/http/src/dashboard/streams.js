// The section about streams of responses: shown while decoupled models are loaded.
"use strict";

const STREAM = {
  first: "pharos_stream_first_response_seconds",
  interval: "pharos_stream_response_interval_seconds",
  length: "pharos_stream_responses_per_request",
  responses: "pharos_stream_responses_total",
  bytes: "pharos_stream_response_bytes_total",
};
// The names of the samples that a model's points are computed from.
const STREAM_SAMPLES = [STREAM.responses, STREAM.bytes, `${STREAM.first}_bucket`, `${STREAM.interval}_bucket`];

// Returns the part of a point that describes streams; times in seconds.
function streamPoint(interval, keep) {
  const result = { responses: interval.rate(STREAM.responses, keep), responseBytes: interval.rate(STREAM.bytes, keep) };
  for (const [name, family] of [["first", STREAM.first], ["between", STREAM.interval]]) {
    const times = interval.histogram(family, keep);
    for (const [percentile, q] of [["50", 0.5], ["95", 0.95], ["99", 0.99]]) {
      result[`${name}${percentile}`] = times ? quantile(q, times) : null;
    }
  }
  return result;
}

function makeStreamCharts() {
  const titles = { "stream-first": "Time to the first response", "stream-between": "Time between responses", "stream-responses": "Responses per second" };
  for (const [id, title] of Object.entries(titles)) {
    charts[id] = new TimeChart($(id), { title: `${title} over time`, format: id === "stream-responses" ? number : seconds });
  }
}

function showStreams() {
  const now = history_.latest, there = now.list(STREAM.responses).some(({ labels }) => keepChosen(labels));
  $("streams").hidden = !there;
  if (!there) return;
  const points = chosenPoints(), to = now.at, from = to - span();
  const draw = (id, name, series) => { if (available(id, [name])) charts[id].draw(points, series, from, to); };
  const percentiles = (name) => [line("50 %", "blue", (p) => p[`${name}50`]), line("95 %", "amber", (p) => p[`${name}95`]), line("99 %", "pink", (p) => p[`${name}99`])];
  draw("stream-first", `${STREAM.first}_bucket`, percentiles("first"));
  draw("stream-between", `${STREAM.interval}_bucket`, percentiles("between"));
  draw("stream-responses", STREAM.responses, [line("responses", "teal", (p) => p.responses)]);
  $("stream-bytes").textContent = now.has(STREAM.bytes) ? bytesPerSecond(points[points.length - 1]?.responseBytes) : "";
  showLengths();
}

const bytesPerSecond = (value) => (value === null || value === undefined ? NONE : `${bytes(value)}/s`);

function showLengths() {
  if (!available("stream-lengths", [`${STREAM.length}_bucket`])) return;
  const lengths = history_.recent()?.histogram(STREAM.length, keepChosen);
  const total = lengths?.counts.reduce((sum, n) => sum + n, 0) ?? 0;
  if (total === 0) return $("stream-lengths").replaceChildren(html("div", { class: "empty" }, "No requests ended."));
  bars($("stream-lengths"), bucketShares(lengths, total), "teal");
}
