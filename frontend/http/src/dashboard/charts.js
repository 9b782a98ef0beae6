// Charts in SVG and a heat strip on a canvas. They draw numbers and times and do not depend on metrics.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes = {}, parent = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") element.className = value;
    else if (key in element && typeof value !== "string") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

// ---- number formatting ----------------------------------------------------------------------------------------------

const NONE = "–";

function digits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return trimmed(value.toFixed(1));
  return trimmed(value.toFixed(2));
}
const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);


// Returns a formatter: the unit is that of the first step that the value reaches, or of the last step.
function formatter(steps) {
  return (value) => {
    if (value === null || value === undefined || Number.isNaN(value)) return NONE;
    const [, factor, unit] = steps.find(([from]) => Math.abs(value) >= from) ?? steps[steps.length - 1];
    return digits(value / factor) + unit;
  };
}
const number = formatter([[1e9, 1e9, " G"], [1e6, 1e6, " M"], [1e4, 1e3, " k"], [0, 1, ""]]);
const seconds = formatter([[86400 * 2, 86400, " d"], [7200, 3600, " h"], [120, 60, " min"], [1, 1, " s"], [1e-3, 1e-3, " ms"],
  [1e-6, 1e-6, " µs"], [0, 1, " s"]]);
const bytes = formatter([[2 ** 40, 2 ** 40, " TiB"], [2 ** 30, 2 ** 30, " GiB"], [2 ** 20, 2 ** 20, " MiB"],
  [2 ** 10, 2 ** 10, " KiB"], [0, 1, " B"]]);
const percent = (value) => (value === null || value === undefined ? NONE : `${digits(value)} %`);
const rate = (value) => (value === null || value === undefined ? NONE : `${number(value)}/s`);

// ---- scales -----------------------------------------------------------------------------------------------------------

// Returns a round number at or above `max` and the ticks up to it. Steps are 1, 2, 2.5 or 5 times 10^n.
function ticks(max) {
  if (!(max > 0)) return { top: 1, at: [0, 1] };
  const raw = max / 3, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((size) => size >= raw);
  const count = Math.ceil(max / step - 1e-9);
  return { top: count * step, at: Array.from({ length: count + 1 }, (_, i) => i * step) };
}

// Splits points into runs without gaps: a missing value or a pause between scrapes ends a run.
function runs(points, value, gapMs) {
  const found = [];
  let run = null, last = null;
  for (const point of points) {
    const y = value(point);
    if (y === null || y === undefined || Number.isNaN(y)) { run = null; continue; }
    if (run === null || point.at - last > gapMs) { run = []; found.push(run); }
    run.push([point.at, y]);
    last = point.at;
  }
  return found;
}

const GAP_MS = 10000;

function linePath(points, value, x, y) {
  return runs(points, value, GAP_MS).map((run) => {
    const at = run.map(([time, v]) => `${x(time).toFixed(1)},${y(v).toFixed(1)}`);
    return at.length === 1 ? `M${at[0]}h0.1` : `M${at.join("L")}`;
  }).join("");
}

function areaPath(points, low, high, x, y) {
  return runs(points, high, GAP_MS).map((run) => {
    const times = new Map(points.map((point) => [point.at, point]));
    const top = run.map(([time, v]) => `${x(time).toFixed(1)},${y(v).toFixed(1)}`);
    const floor = run.map(([time]) => `${x(time).toFixed(1)},${y(low(times.get(time))).toFixed(1)}`).reverse();
    return `M${top.join("L")}L${floor.join("L")}Z`;
  }).join("");
}

const clock = (at) => new Date(at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

// ---- time charts --------------------------------------------------------------------------------------------------------

const LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 20, HEIGHT = 168;

// Lines or stacked areas over time, with axes, a legend with the newest values, and a tooltip at the pointer.
// `series`: [{name, color, value(point)}]; `format` formats a value.
class TimeChart {
  constructor(holder, { format, stacked = false, title }) {
    this.format = format;
    this.stacked = stacked;
    this.legend = html("div", { class: "legend" });
    this.frame = html("div", { class: "plot" });
    this.svg = svg("svg", { role: "img", "aria-label": title, height: HEIGHT }, this.frame);
    this.tip = html("div", { class: "tip", hidden: true });
    this.frame.append(this.tip);
    holder.append(this.legend, this.frame);
    this.frame.addEventListener("pointermove", (event) => { this.pointer = event.clientX; this.point(); });
    this.frame.addEventListener("pointerleave", () => { this.pointer = null; this.point(); });
  }
  draw(points, series, from, to) {
    this.series = series;
    this.visible = points.filter((point) => point.at >= from - GAP_MS && point.at <= to);
    this.width = this.frame.clientWidth || 400;
    const values = this.visible.flatMap((point) => this.heights(point));
    const { top, at } = ticks(Math.max(0, ...values.filter(Number.isFinite)));
    this.x = (time) => LEFT + ((time - from) / (to - from)) * (this.width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - TOP);
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.axes(at, from, to);
    if (this.stacked) this.areas(); else this.lines();
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }, this.svg);
    this.label();
    this.point();
  }
  heights(point) {
    const values = this.series.map((one) => one.value(point));
    return this.stacked ? [values.reduce((sum, value) => sum + (value ?? 0), 0)] : values.filter((value) => value !== null && value !== undefined);
  }
  axes(at, from, to) {
    for (const value of at) {
      svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: this.y(value), y2: this.y(value) }, this.svg);
      svg("text", { class: "tick end", x: LEFT - 6, y: this.y(value) + 4 }, this.svg).textContent = this.format(value);
    }
    timeAxis(this.svg, this.x, HEIGHT - 5, from, to);
  }
  lines() {
    for (const { color, value, dashed } of this.series) {
      const attributes = { class: `line ${color}`, d: linePath(this.visible, value, this.x, this.y) };
      svg("path", dashed ? { ...attributes, "stroke-dasharray": "4 3" } : attributes, this.svg);
    }
  }
  areas() {
    const total = (upTo) => (point) => {
      const values = this.series.slice(0, upTo).map((one) => one.value(point));
      return values.every((value) => value === null || value === undefined) && upTo > 0 ? null : values.reduce((sum, value) => sum + (value ?? 0), 0);
    };
    this.series.forEach(({ color }, i) => {
      svg("path", { class: `area ${color}`, d: areaPath(this.visible, (p) => total(i)(p) ?? 0, total(i + 1), this.x, this.y) }, this.svg);
    });
  }
  label() {
    const last = this.visible[this.visible.length - 1];
    this.legend.replaceChildren(...this.series.map(({ name, color, value }) => html("span", { class: "key" },
      html("i", { class: `swatch ${color}` }), `${name} `, html("b", {}, last ? this.format(value(last)) : NONE))));
  }
  point() {
    if (!this.cursor) return;
    const box = this.frame.getBoundingClientRect();
    const at = this.pointer === null || this.pointer === undefined ? null : this.pointer - box.left;
    const near = at === null ? null : this.visible.reduce((best, point) => (best === null
      || Math.abs(this.x(point.at) - at) < Math.abs(this.x(best.at) - at) ? point : best), null);
    this.tip.hidden = near === null;
    this.cursor.setAttribute("visibility", near ? "visible" : "hidden");
    if (near) showTip(this.tip, this.cursor, this.x(near.at), this.width, [clock(near.at),
      ...this.series.map(({ name, value }) => `${name} ${this.format(value(near))}`)]);
  }
}

function showTip(tip, cursor, x, width, lines) {
  cursor.setAttribute("x1", x);
  cursor.setAttribute("x2", x);
  tip.replaceChildren(...lines.map((line) => html("div", {}, line)));
  const right = x > width / 2;
  tip.style.left = right ? "" : `${x + 10}px`;
  tip.style.right = right ? `${width - x + 10}px` : "";
}

function timeAxis(parent, x, y, from, to) {
  const span = (to - from) / 1000;
  const step = span <= 90 ? 30 : span <= 420 ? 60 : 300;
  const name = (back) => (back === 0 ? "now" : back < 60 ? `-${back} s` : `-${trimmed((back / 60).toFixed(1))} min`);
  for (let back = 0; back <= span; back += step) {
    const at = x(to - back * 1000), anchor = back === 0 ? "end" : back === span ? "start" : "middle";
    svg("text", { class: `tick ${anchor}`, x: at, y }, parent).textContent = name(back);
  }
}

// ---- a heat strip -------------------------------------------------------------------------------------------------------

// The x axis is time, the y axis the buckets; the colour of a cell is the share of the requests that fell into the bucket.
class HeatStrip {
  constructor(holder, { format, title }) {
    this.format = format;
    this.frame = html("div", { class: "plot" });
    this.canvas = html("canvas", { role: "img", "aria-label": title });
    this.svg = svg("svg", { "aria-hidden": "true", class: "over" });
    this.tip = html("div", { class: "tip", hidden: true });
    this.frame.append(this.canvas, this.svg, this.tip);
    const scale = html("div", { class: "legend" }, html("span", { class: "key" }, "none", html("i", { class: "heat-scale" }), "all"));
    holder.append(scale, this.frame);
    this.frame.addEventListener("pointermove", (event) => { this.pointer = event; this.point(); });
    this.frame.addEventListener("pointerleave", () => { this.pointer = null; this.point(); });
  }
  draw(points, from, to) {
    this.visible = points.filter((point) => point.heat && point.at >= from && point.at <= to);
    const rows = occupied(this.visible);
    this.width = this.frame.clientWidth || 400;
    this.rows = rows;
    this.x = (time) => LEFT + ((time - from) / (to - from)) * (this.width - LEFT - RIGHT);
    this.row = (HEIGHT - BOTTOM - TOP) / Math.max(rows.length, 1);
    this.cells();
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.bounds();
    timeAxis(this.svg, this.x, HEIGHT - 5, from, to);
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }, this.svg);
    this.point();
  }
  cells() {
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = this.width * scale;
    this.canvas.height = HEIGHT * scale;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${HEIGHT}px`;
    const paint = this.canvas.getContext("2d");
    paint.scale(scale, scale);
    const style = getComputedStyle(this.frame), cold = rgb(style.getPropertyValue("--heat-0"));
    const warm = rgb(style.getPropertyValue("--heat-1")), hot = rgb(style.getPropertyValue("--heat-2"));
    this.visible.forEach((point) => {
      const total = point.heat.counts.reduce((sum, n) => sum + n, 0);
      const left = this.x(heatFrom(point));
      const right = this.x(point.at);
      if (total === 0 || right <= LEFT) return;
      this.rows.forEach((bucket, r) => {
        const count = point.heat.counts[bucket];
        if (count === 0) return;
        const share = Math.max(0.12, Math.sqrt(count / total));
        paint.fillStyle = share < 0.5 ? mix(cold, warm, share * 2) : mix(warm, hot, share * 2 - 1);
        const x = Math.max(left, LEFT);
        paint.fillRect(x, HEIGHT - BOTTOM - (r + 1) * this.row, Math.max(right - x, 1) + 0.4, this.row - 1);
      });
    });
  }
  bounds() {
    const every = Math.ceil(14 / this.row);
    this.rows.forEach((bucket, r) => {
      if (r % every !== 0) return;
      const y = HEIGHT - BOTTOM - (r + 1) * this.row + 4;
      svg("text", { class: "tick end", x: LEFT - 6, y }, this.svg).textContent = this.bound(bucket);
    });
  }
  bound(bucket) {
    const bounds = this.visible[0].heat.bounds;
    return bounds[bucket] === Infinity ? "more" : this.format(bounds[bucket]);
  }
  point() {
    if (!this.cursor) return;
    const box = this.frame.getBoundingClientRect();
    const at = this.pointer ? this.pointer.clientX - box.left : null;
    const near = at === null ? null : this.visible.find((point) => this.x(point.at) >= at && this.x(heatFrom(point)) <= at) ?? null;
    const r = near && this.rows.length ? Math.floor((HEIGHT - BOTTOM - (this.pointer.clientY - box.top)) / this.row) : -1;
    const show = r >= 0 && r < this.rows.length;
    this.tip.hidden = !show;
    this.cursor.setAttribute("visibility", show ? "visible" : "hidden");
    if (!show) return;
    const bucket = this.rows[r], total = near.heat.counts.reduce((sum, n) => sum + n, 0);
    const low = bucket === 0 ? this.format(0) : this.format(near.heat.bounds[bucket - 1]);
    showTip(this.tip, this.cursor, this.x(near.at), this.width, [clock(near.at), `${low} to ${this.bound(bucket)}`,
      `${number(near.heat.counts[bucket])} of ${number(total)} requests`]);
  }
}

// Returns the beginning of the time that a point covers in the strip: a point after a pause does not fill the pause.
const heatFrom = ({ at, heat }) => (at - heat.from > GAP_MS ? at - 2000 : heat.from);

// Returns the range from the lowest to the highest non-empty bucket.
function occupied(points) {
  if (points.length === 0) return [];
  const used = points[0].heat.counts.map((_, bucket) => points.some((point) => point.heat.counts[bucket] > 0));
  const low = used.indexOf(true), high = used.lastIndexOf(true);
  return low < 0 ? [] : Array.from({ length: high - low + 1 }, (_, i) => low + i);
}

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.trim().slice(i, i + 2), 16));
const mix = (a, b, share) => `rgb(${a.map((c, i) => Math.round(c + (b[i] - c) * Math.min(share, 1))).join(",")})`;

// ---- small charts ---------------------------------------------------------------------------------------------------------

// Draws a line without axes. `top` is the upper end of the scale; by default it is the highest value.
function sparkline(holder, points, value, color, from, to, top = 0) {
  const width = 110, height = 24;
  let picture = holder.firstElementChild;
  if (!picture) {
    picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", "aria-hidden": "true" }, holder);
    svg("path", {}, picture);
  }
  const visible = points.filter((point) => point.at >= from);
  const max = Math.max(top, ...visible.map((point) => value(point) ?? 0)) || 1;
  const path = linePath(visible, value, (time) => ((time - from) / (to - from)) * width, (v) => height - 2 - (v / max) * (height - 4));
  picture.firstElementChild.setAttribute("class", `line ${color}`);
  picture.firstElementChild.setAttribute("d", path);
}

// Draws horizontal bars: rows of [name, value, text], longest first unless `sorted` is false.
function bars(holder, rows, color) {
  const max = Math.max(...rows.map(([, value]) => value), 0) || 1;
  holder.replaceChildren(...rows.map(([name, value, text]) => {
    const fill = html("div", { class: `fill ${color}` });
    fill.style.width = `${(100 * value) / max}%`;
    return html("div", { class: "bar" }, html("span", { class: "name", title: name }, name),
      html("div", { class: "track" }, fill), html("span", { class: "value" }, text));
  }));
}

// Draws a level from 0 to 100 with a text; its colour changes above `warn` and above `alarm`.
function meter(name, value, text, warn = 80, alarm = 95) {
  const level = value >= alarm ? "bad" : value >= warn ? "warn" : "good";
  const fill = html("div", { class: `fill ${level}` });
  fill.style.width = `${Math.min(Math.max(value ?? 0, 0), 100)}%`;
  return html("div", { class: "bar" }, html("span", { class: "name", title: name }, name),
    html("div", { class: "track" }, fill), html("span", { class: "value" }, text));
}
