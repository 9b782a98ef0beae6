// The data of the page: parses the Prometheus text format, keeps a short history, and computes rates and percentiles.
// Does not access the DOM. /metrics is the only source, so the page shows the same values as Prometheus.
"use strict";

const TIMES = ["request", "queue", "compute_input", "compute_infer", "compute_output"];
const ALL = "";
const STEADY_MS = 10000;
const STEP_MS = 2000; // The usual time between two scrapes.
const FAMILY = {
  success: "nv_inference_request_success",
  failure: "nv_inference_request_failure",
  items: "nv_inference_count",
  executions: "nv_inference_exec_count",
  pending: "nv_inference_pending_request_count",
  oldest: "pharos_oldest_pending_seconds",
  instances: "pharos_instances",
  restarts: "pharos_instance_restarts_total",
  batchSize: "pharos_batch_size",
  batches: "pharos_batches_total",
  resident: "pharos_worker_resident_bytes",
  workerCpu: "pharos_worker_cpu_seconds_total",
};
const timeCounter = (part) => `nv_inference_${part}_duration_us`;
const timeHistogram = (part) => `pharos_${part}_duration_seconds`;

// ---- the text format ------------------------------------------------------------------------------------------------

const ESCAPES = { n: "\n", "\\": "\\", '"': '"' };
const LABEL = /([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"/g;

function parseLabels(text) {
  const labels = {};
  for (const [, key, value] of text.matchAll(LABEL)) {
    labels[key] = value.includes("\\") ? value.replace(/\\(.)/g, (_, c) => ESCAPES[c] ?? c) : value;
  }
  return labels;
}

// With --model-namespacing, Triton's metrics have the repository in a label, those of this server in the name of the model.
function withFullName(series) {
  const { namespace, model } = series.labels;
  if (series.name.startsWith("nv_") && namespace && model) series.labels.model = `${namespace}/${model}`;
  return series;
}

function parseNumber(text) {
  if (text === "+Inf") return Infinity;
  if (text === "-Inf") return -Infinity;
  return Number(text);
}

// Returns the end of a line's labels: the first closing brace outside quotes.
function labelsEnd(line, from) {
  let quoted = false;
  for (let i = from; i < line.length; i++) {
    const c = line[i];
    if (quoted && c === "\\") i++;
    else if (c === '"') quoted = !quoted;
    else if (c === "}" && !quoted) return i;
  }
  return -1;
}

// Returns the series of each sample name: name -> [{key, labels, value}]. `known` caches parsed labels between scrapes:
// they are the expensive part of parsing and rarely change.
function parse(text, known = new Map()) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    if (line === "" || line[0] === "#") continue;
    const open = line.indexOf("{");
    const end = open < 0 ? line.indexOf(" ") : labelsEnd(line, open) + 1;
    if (end <= 0) continue;
    const key = line.slice(0, end);
    let series = known.get(key);
    if (series === undefined) {
      series = open < 0
        ? { name: key, labels: {} }
        : withFullName({ name: line.slice(0, open), labels: parseLabels(line.slice(open + 1, end - 1)) });
      known.set(key, series);
    }
    const value = parseNumber(line.slice(end + 1).trim().split(" ")[0]);
    const list = samples.get(series.name);
    const sample = { key, labels: series.labels, value };
    if (list) list.push(sample);
    else samples.set(series.name, [sample]);
  }
  return samples;
}

// ---- scrapes and intervals between them -------------------------------------------------------------------------------

class Scrape {
  constructor(text, at, known) {
    this.at = at;
    this.bytes = text.length;
    this.samples = parse(text, known);
    this.values = new Map();
    this.count = 0;
    for (const list of this.samples.values()) {
      this.count += list.length;
      for (const sample of list) this.values.set(sample.key, sample.value);
    }
  }
  has(name) { return this.samples.has(name); }
  list(name) { return this.samples.get(name) ?? []; }
  // Returns the sum of a family's series that `keep` selects; null without such series.
  sum(name, keep = () => true) {
    let sum = 0, found = false;
    for (const sample of this.list(name)) {
      if (keep(sample.labels)) { sum += sample.value; found = true; }
    }
    return found ? sum : null;
  }
  max(name, keep = () => true) {
    let max = null;
    for (const sample of this.list(name)) {
      if (keep(sample.labels) && (max === null || sample.value > max)) max = sample.value;
    }
    return max;
  }
  one(name) { return this.list(name)[0]?.value ?? null; }
}

// Returns the increase of a counter. A counter that fell was reset by a restart, so its value is the increase since then.
const rise = (before, now) => (now >= before ? now - before : now);

// The interval between two scrapes, with its rates and distributions.
class Interval {
  constructor(before, now) {
    this.before = before;
    this.now = now;
    this.seconds = Math.max((now.at - before.at) / 1000, 0.001);
  }
  // Returns a counter's increase, summed over the series that `keep` selects. A new series counts from its first scrape on.
  gain(name, keep = () => true) {
    let sum = 0, found = false;
    for (const sample of this.now.list(name)) {
      if (!keep(sample.labels)) continue;
      found = true;
      const before = this.before.values.get(sample.key);
      if (before !== undefined) sum += rise(before, sample.value);
    }
    return found ? sum : null;
  }
  rate(name, keep) {
    const gain = this.gain(name, keep);
    return gain === null ? null : gain / this.seconds;
  }
  // Returns a counter's increase for each value of the label `by`.
  gains(name, by, keep = () => true) {
    const gains = new Map();
    for (const sample of this.now.list(name)) {
      if (!keep(sample.labels)) continue;
      const before = this.before.values.get(sample.key);
      const label = typeof by === "function" ? by(sample.labels) : sample.labels[by];
      gains.set(label, (gains.get(label) ?? 0) + (before === undefined ? 0 : rise(before, sample.value)));
    }
    return gains;
  }
  // Returns the non-cumulative buckets of a histogram: {bounds, counts}; the last bound is +Inf.
  histogram(name, keep = () => true) {
    const cumulative = this.gains(`${name}_bucket`, "le", keep);
    if (cumulative.size === 0) return null;
    const bounds = [...cumulative.keys()].map(parseNumber);
    const order = bounds.map((_, i) => i).sort((a, b) => bounds[a] - bounds[b]);
    const totals = [...cumulative.values()];
    let below = 0;
    const counts = order.map((i) => {
      const inside = Math.max(totals[i] - below, 0);
      below = Math.max(totals[i], below);
      return inside;
    });
    return { bounds: order.map((i) => bounds[i]), counts };
  }
  // Returns the quotient of the increases of two counters, in the numerator's unit.
  mean(sum, count, keep) {
    const total = this.gain(sum, keep), n = this.gain(count, keep);
    return total !== null && n ? total / n : null;
  }
}

// Computes a quantile like histogram_quantile of Prometheus: linear within a bucket, at most the last finite bound.
function quantile(q, { bounds, counts }) {
  const total = counts.reduce((sum, n) => sum + n, 0);
  if (total === 0) return null;
  const rank = q * total;
  let below = 0;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] > 0 && below + counts[i] >= rank) {
      const low = i === 0 ? 0 : bounds[i - 1];
      if (bounds[i] === Infinity) return low;
      return low + (bounds[i] - low) * Math.max(rank - below, 0) / counts[i];
    }
    below += counts[i];
  }
  return bounds[bounds.length - 2] ?? null;
}

// ---- points of the charts ---------------------------------------------------------------------------------------------

// Returns the point of a scope (all models, or one) for an interval; times in seconds.
function point(interval, keep) {
  const now = interval.now, us = 1e-6;
  const request = interval.histogram(timeHistogram("request"), keep);
  const success = interval.rate(FAMILY.success, keep), failed = interval.rate(FAMILY.failure, keep);
  const result = {
    at: now.at,
    success,
    failed,
    items: interval.rate(FAMILY.items, keep),
    pending: now.sum(FAMILY.pending, keep),
    oldest: now.max(FAMILY.oldest, keep),
    batch: interval.mean(FAMILY.items, FAMILY.executions, keep),
    mean: scaled(interval.mean(timeCounter("request"), FAMILY.success, keep), us),
    heat: request && request.counts.some((n) => n > 0) ? { ...request, from: interval.before.at } : null,
    p50: null, p95: null, p99: null,
    ...streamPoint(interval, keep),
  };
  if (request) {
    for (const [name, q] of [["p50", 0.5], ["p95", 0.95], ["p99", 0.99]]) result[name] = quantile(q, request);
  }
  for (const part of TIMES.slice(1)) {
    result[part] = scaled(interval.mean(timeCounter(part), FAMILY.success, keep), us);
  }
  return result;
}

const scaled = (value, factor) => (value === null ? null : value * factor);

const modelKey = (labels) => `${labels.model}\u0000${labels.version}`;

// Returns the names of the models whose latest load failed.
function failedLoads(scrape) {
  return new Set(scrape.list("pharos_model_last_load_successful").filter(({ value }) => value === 0).map(({ labels }) => labels.model));
}

// Returns the versions that load now: key -> {model, version, share}. The share of the version that is loaded is null if it is unknown.
function loads(scrape) {
  const found = new Map();
  const add = ({ model, version }, share) => found.set(modelKey({ model, version }), { model, version, share });
  for (const { labels, value } of scrape.list("pharos_model_state")) if (labels.state === "LOADING" && value === 1) add(labels, null);
  for (const { labels, value } of scrape.list("pharos_model_load_progress_ratio")) add(labels, value);
  return found;
}

// Returns the models of a scrape: those with loaded or loading versions, and, without a version, those whose load failed.
function models(scrape) {
  const found = new Map([...loads(scrape)].map(([key, { model, version }]) => [key, { model, version }]));
  for (const family of [FAMILY.success, FAMILY.instances, FAMILY.pending, FAMILY.items, `${timeHistogram("request")}_count`]) {
    for (const { labels } of scrape.list(family)) {
      if (labels.model !== undefined) found.set(modelKey(labels), { model: labels.model, version: labels.version });
    }
  }
  const loaded = new Set([...found.values()].map(({ model }) => model));
  for (const model of failedLoads(scrape)) if (!loaded.has(model)) found.set(modelKey({ model, version: "" }), { model, version: "" });
  return found;
}

// Groups samples by model and version, once per scrape: filtering for each of many models would take quadratic time.
function byModel(list) {
  const groups = new Map();
  for (const sample of list) {
    const key = modelKey(sample.labels), group = groups.get(key);
    if (group) group.push(sample);
    else groups.set(key, [sample]);
  }
  return groups;
}

// Splits an interval into one interval per model, for `point`.
function split(interval) {
  const wanted = [
    ...Object.values(FAMILY), ...TIMES.map(timeCounter), `${timeHistogram("request")}_bucket`, `${FAMILY.batchSize}_bucket`,
    ...STREAM_SAMPLES,
  ];
  const parts = new Map();
  for (const name of wanted) {
    for (const [key, list] of byModel(interval.now.list(name))) {
      let part = parts.get(key);
      if (part === undefined) {
        const now = Object.create(interval.now, { samples: { value: new Map() } });
        part = Object.create(interval, { now: { value: now } });
        parts.set(key, part);
      }
      part.now.samples.set(name, list);
    }
  }
  return parts;
}

// Returns the utilisation of the machine, in percent, and the number of cores that the server and its workers use.
function hostPoint(interval) {
  const now = interval.now;
  const cpu = now.one("CPUUtilization") ?? scaled(now.one("nv_cpu_utilization"), 100);
  const total = now.one("nv_cpu_memory_total_bytes"), used = now.one("nv_cpu_memory_used_bytes");
  const memory = now.one("MemoryUtilization") ?? (total ? (100 * used) / total : null);
  const point = { at: now.at, cpu, memory, server: interval.rate("process_cpu_seconds_total"), workers: interval.rate(FAMILY.workerCpu) };
  for (const { labels, value } of now.list("nv_gpu_utilization")) point[`gpu ${labels.gpu_uuid}`] = 100 * value;
  return point;
}

// The history of the page: the scrapes of the last seconds for smoothed figures, and points for the charts of all models
// together (`ALL`), of each model and of the machine.
class History {
  constructor(keepMs) {
    this.keepMs = keepMs;
    this.scrapes = [];
    this.known = new Map();
    this.points = new Map([[ALL, []]]);
    this.host = [];
    this.bounds = [];
    this.events = new Events(keepMs);
  }
  add(text, at) {
    if (this.latest && at <= this.latest.at) this.shift(this.latest.at + STEP_MS - at);
    this.scrapes.push(new Scrape(text, at, this.known));
    while (this.scrapes.length > 2 && this.scrapes[1].at < at - STEADY_MS) this.scrapes.shift();
    if (this.known.size > 4 * this.latest.count + 1000) this.known.clear();
    const step = this.step();
    if (step === null) return;
    this.events.add(step);
    this.keep(this.points.get(ALL), point(step));
    this.keep(this.host, hostPoint(step));
    const parts = split(step);
    for (const [key, part] of parts) {
      if (!this.points.has(key)) this.points.set(key, []);
      this.keep(this.points.get(key), point(part));
    }
    for (const [key, points] of this.points) {
      if (points.length && points[0].at < at - this.keepMs) points.shift();
      if (points.length === 0 && key !== ALL) this.points.delete(key);
    }
  }
  // Moves the history into the past. The clock was set back: points of the future would be kept, and the interval to them negative.
  shift(byMs) {
    for (const one of [...this.scrapes, ...this.host, ...[...this.points.values()].flat()]) {
      one.at -= byMs;
      if (one.heat) one.heat.from -= byMs;
    }
    for (const event of this.events.all) {
      event.from -= byMs;
      event.to -= byMs;
    }
  }
  keep(points, point) {
    // All points share the bounds of the buckets, which are much of the memory of a point.
    const bounds = point.heat?.bounds ?? this.bounds;
    if (bounds.length !== this.bounds.length || bounds.some((bound, i) => bound !== this.bounds[i])) this.bounds = bounds;
    if (point.heat) point.heat.bounds = this.bounds;
    points.push(point);
    while (points.length && points[0].at < point.at - this.keepMs) points.shift();
  }
  get latest() { return this.scrapes[this.scrapes.length - 1]; }
  // Returns the interval between the newest two scrapes.
  step() {
    const n = this.scrapes.length;
    return n < 2 ? null : new Interval(this.scrapes[n - 2], this.scrapes[n - 1]);
  }
  // Returns an interval of about the last ten seconds, for smoothed figures.
  recent() {
    return this.scrapes.length < 2 ? null : new Interval(this.scrapes[0], this.latest);
  }
}
