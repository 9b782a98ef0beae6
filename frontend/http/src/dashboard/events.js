// The time line of events: what changed between two scrapes. Like the charts it comes from /metrics alone, so it begins with the
// page.
"use strict";

const MOST_EVENTS = 200;
const LOAD_SECONDS = "nv_model_load_duration_secs";
// Failures by which the server, not the model or the client, turns requests away.
const REFUSALS = ["QUEUE_FULL", "RATE_LIMITED", "TIMEOUT", "NOT_READY", "TOO_LARGE", "RESTRICTED", "UNAUTHENTICATED", "INSTANCE_LOST"];
// The lanes of the time line with their colours, from top to bottom.
const LANES = [["server", "grey"], ["models", "blue"], ["instances", "amber"], ["refusals", "bad"]];

const eventModel = (key) => `${key.split("\u0000")[0]}, version ${key.split("\u0000")[1]}`;
const times = (count, one, many = `${one}s`) => (count === 1 ? `1 ${one}` : `${number(count)} ${many}`);

// Returns the models that a scrape shows as ready, with the duration of their load, which changes with each load.
function readyModels(scrape) {
  const states = scrape.list("pharos_model_state").filter(({ labels, value }) => labels.state === "READY" && value === 1);
  const loads = new Map(scrape.list(LOAD_SECONDS).map(({ labels, value }) => [modelKey(labels), value]));
  const keys = scrape.has("pharos_model_state") ? states.map(({ labels }) => modelKey(labels)) : [...models(scrape).keys()];
  return new Map(keys.map((key) => [key, loads.get(key) ?? null]));
}

// Returns the events of an interval: {lane, text, model, count}. `model` is the key of a model, or null.
function eventsOf(interval) {
  const { before, now } = interval, found = [];
  const put = (lane, text, model = null, count = 1) => found.push({ lane, text, model, count });
  const started = [before, now].map((scrape) => scrape.one("process_start_time_seconds"));
  if (started[0] !== null && started[1] !== null && started[0] !== started[1]) {
    put("server", "the server was restarted");
    return found;
  }
  const [old, ready] = [readyModels(before), readyModels(now)];
  for (const [key, load] of ready) {
    const took = load === null ? "" : ` in ${seconds(load)}`;
    if (!old.has(key)) put("models", `${eventModel(key)} was loaded${took}`, key);
    else if (load !== old.get(key) && load !== null) put("models", `${eventModel(key)} was loaded again${took}`, key);
  }
  for (const key of old.keys()) if (!ready.has(key)) put("models", `${eventModel(key)} is not ready any more`, key);
  // A counter that appears together with its first event counts from 0, unless a new metrics.yaml made it appear.
  const redefined = now.sum("pharos_metrics_reloads_total") !== before.sum("pharos_metrics_reloads_total");
  const gains = (name, by, keep = () => true) => {
    const gained = new Map();
    for (const { key, labels, value } of now.list(name)) {
      const rose = rise(before.values.get(key) ?? (redefined ? value : 0), value);
      if (keep(labels) && rose > 0) gained.set(by(labels), (gained.get(by(labels)) ?? 0) + rose);
    }
    return gained;
  };
  const failed = (labels) => labels.result === "failure";
  for (const [change, count] of gains("pharos_model_changes_total", (labels) => labels.change, failed)) {
    put("models", `${times(count, change === "unload" ? "unload" : change, `changes (${change})`)} failed`);
  }
  for (const [key, count] of gains(FAMILY.restarts, modelKey)) {
    put("instances", `${times(count, "instance")} of ${eventModel(key)} restarted`, key, count);
  }
  for (const [result] of gains("pharos_metrics_reloads_total", (labels) => labels.result)) {
    put("server", result === "success" ? "metrics.yaml was read again" : "a changed metrics.yaml was rejected");
  }
  for (const [key] of gains("pharos_credential_reloads_total", (labels) => `${labels.file}\u0000${labels.result}`)) {
    const [file, result] = key.split("\u0000");
    put("server", `the credentials ${file} ${result === "success" ? "were read again" : "were rejected"}`);
  }
  const refused = (labels) => REFUSALS.includes(labels.reason);
  for (const [reason, count] of gains("pharos_request_failures_total", (labels) => labels.reason, refused)) {
    put("refusals", `requests failed with ${reason}`, null, count);
  }
  for (const [reason, count] of gains("pharos_connections_refused_total", (labels) => labels.reason)) {
    put("refusals", `connections were refused: ${reason}`, null, count);
  }
  return found;
}

// The latest events, oldest first. Refusals that continue are one event from their first to their last scrape.
class Events {
  constructor(keepMs) {
    this.keepMs = keepMs;
    this.all = [];
  }
  add(interval) {
    const at = interval.now.at;
    for (const event of eventsOf(interval)) {
      const last = event.lane === "refusals" && this.all.findLast(({ text, to }) => text === event.text && to >= interval.before.at);
      if (last) {
        last.count += event.count;
        last.to = at;
      } else this.all.push({ ...event, from: at, to: at });
    }
    this.all = this.all.filter(({ to }) => to >= at - this.keepMs).slice(-MOST_EVENTS);
  }
  // Returns the events of a model and of the whole server; of everything if the key is null.
  of(key) {
    return this.all.filter(({ model }) => key === null || model === null || model === key);
  }
}

const eventText = ({ lane, text, count }) => (lane === "refusals" ? `${number(count)} ${text}` : text);

// Lanes of marks over time; `draw` gets the events and the time span.
class Lanes {
  constructor(holder) {
    this.frame = html("div", { class: "plot" });
    this.svg = svg("svg", { role: "img", "aria-label": "Events over time", height: LANES.length * 22 + BOTTOM }, this.frame);
    holder.append(this.frame);
  }
  draw(events, from, to) {
    const width = this.frame.clientWidth || 400, left = LEFT + 16, bottom = LANES.length * 22;
    const x = (time) => left + ((time - from) / (to - from)) * (width - left - RIGHT);
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${bottom + BOTTOM}`);
    LANES.forEach(([lane, color], i) => {
      const y = i * 22 + 11;
      svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y, y2: y }, this.svg);
      svg("text", { class: "tick end", x: left - 6, y: y + 4 }, this.svg).textContent = lane;
      for (const event of events.filter((one) => one.lane === lane && one.to >= from)) {
        const start = Math.max(x(event.from), left), length = Math.max(x(event.to) - start, 0);
        const mark = svg("rect", { class: `mark ${color}`, x: start - 3, y: y - 5, width: length + 6, height: 10, rx: 3 }, this.svg);
        svg("title", {}, mark).textContent = `${clock(event.from)} ${eventText(event)}`;
      }
    });
    timeAxis(this.svg, x, bottom + BOTTOM - 5, from, to);
  }
}

const lanes = {};
function makeLanes() {
  lanes.events = new Lanes($("events-lanes"));
}

function showEvents() {
  const events = history_.events.of(state.chosen), to = history_.latest.at;
  lanes.events.draw(events, to - span(), to);
  const cells = events.slice(-50).reverse().map((event) => [clock(event.from),
    html("span", {}, html("i", { class: `swatch ${LANES.find(([lane]) => lane === event.lane)[1]}` }), eventText(event))]);
  fillPlain($("events"), ["Time", "Event"], cells, [], "No events since this page was opened.");
}
