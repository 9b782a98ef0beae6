// The page: polls /metrics and shows its history. Metrics that metrics.yaml disables are reported as such, not as zero.
"use strict";

const POLL_MS = 2000;
const KEEP_MS = 15 * 60 * 1000;
const $ = (id) => document.getElementById(id);

const history_ = new History(KEEP_MS);
const state = {
  chosen: null, paused: false, sort: "rate", descending: true, filter: "", trouble: false, windowMs: 5 * 60 * 1000,
  scrapeMs: 0, timer: null, busy: false,
};

// ---- the scope: all models or one -------------------------------------------------------------------------------------

const keepChosen = (labels) => state.chosen === null || modelKey(labels) === state.chosen;
const chosenPoints = () => history_.points.get(state.chosen ?? ALL) ?? [];
const modelName = (key) => key.split("\u0000")[0];
const modelVersion = (key) => key.split("\u0000")[1];

// Returns the time span of the charts: the selected one or, if shorter, that of the history, but at least a minute.
function span() {
  const all = history_.points.get(ALL), known = all.length ? history_.latest.at - all[0].at : 0;
  return Math.min(state.windowMs, Math.max(60000, Math.ceil(known / 30000) * 30000));
}

function choose(key, remember = true) {
  state.chosen = key;
  if (remember) {
    const hash = key === null ? "" : `#model=${encodeURIComponent(modelName(key))}&version=${encodeURIComponent(modelVersion(key))}`;
    window.history.replaceState(null, "", hash || location.pathname + location.search);
  }
  show();
}

function chooseFromAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const model = wanted.get("model");
  state.chosen = model === null ? null : modelKey({ model, version: wanted.get("version") ?? "1" });
}

// ---- tiles ------------------------------------------------------------------------------------------------------------

function tile(id, label) {
  const figure = html("div", { class: "figure", id: `tile-${id}` }, NONE), note = html("div", { class: "note", id: `note-${id}` });
  $("tiles").append(html("div", { class: "tile" }, html("div", { class: "label", id: `label-${id}` }, label), figure, note));
  return (text, more = "", level = "") => {
    figure.textContent = text;
    figure.className = `figure ${level ? `${level}-text` : ""}`;
    note.textContent = more;
    note.title = more;
  };
}

const tiles = {};
function makeTiles() {
  for (const [id, label] of [["rate", "Requests"], ["latency", "Latency, 99 %"], ["failures", "Failures, whole server"], ["pending", "Waiting"],
    ["instances", "Instances ready"], ["cpu", "CPU"], ["memory", "Memory"]]) tiles[id] = tile(id, label);
}

// The routes of inference requests.
const INFERENCE = new Set(["infer", "stream_infer", "generate", "generate_stream", "predict", "stream_predict", "explain"]);

function showTiles() {
  const now = history_.latest, recent = history_.recent();
  const whole = recent ? point(recent, () => true) : null;
  const answers = recent?.rate("pharos_requests_total", (labels) => INFERENCE.has(labels.route));
  tiles.rate(rate(whole?.success ?? null), answers === null || answers === undefined ? "" : `${rate(answers)} answered in total`);
  const histograms = history_.latest.has(`${timeHistogram("request")}_bucket`);
  for (const element of [$("label-latency"), $("sort-latency").firstChild]) {
    element.textContent = histograms ? "Latency, 99 %" : "Latency, mean";
  }
  if (histograms) tiles.latency(seconds(whole?.p99), whole?.p50 ? `median ${seconds(whole.p50)}` : "");
  else tiles.latency(seconds(whole?.mean ?? null), "histograms are disabled");
  showFailureTile(recent, whole);
  const oldest = now.max(FAMILY.oldest);
  tiles.pending(number(now.sum(FAMILY.pending)), oldest === null ? "" : `oldest ${seconds(oldest)}`);
  showInstanceTile(now);
  const host = history_.host[history_.host.length - 1];
  const cores = host && host.server !== null ? host.server + (host.workers ?? 0) : null;
  tiles.cpu(percent(host?.cpu ?? null), cores === null ? "" : `${number(cores)} cores used by Pharos`);
  const resident = now.sum(FAMILY.resident), server = now.one("process_resident_memory_bytes");
  const total = server === null ? resident : server + resident;
  tiles.memory(percent(host?.memory ?? null), total === null ? "" : `${bytes(total)} used by Pharos`);
}

function showFailureTile(recent, whole) {
  const all = recent?.rate("pharos_request_failures_total") ?? null, refused = all ?? whole?.failed ?? null;
  if (recent) $("label-failures").textContent = all === null ? "Failures, known models" : "Failures, whole server";
  // The first answers with a status are not in the rate of all, because their series begins with them.
  const total = Math.max((recent?.rate("pharos_requests_total") ?? whole?.success) || 0, refused ?? 0);
  const share = refused && total ? (100 * refused) / total : 0;
  tiles.failures(rate(refused), refused === null ? "" : `${percent(share)} of answers`, share >= 5 ? "bad" : share >= 1 ? "warn" : "");
}

function showInstanceTile(now) {
  const ready = now.sum(FAMILY.instances, (labels) => labels.state === "ready"), all = now.sum(FAMILY.instances);
  const restarts = now.sum(FAMILY.restarts);
  tiles.instances(ready === null ? NONE : `${number(ready)} of ${number(all)}`,
    restarts === null ? "" : `${number(restarts)} restarts`, ready !== null && ready < all ? "warn" : "");
}

// ---- the table of models --------------------------------------------------------------------------------------------

const COLUMNS = [
  { id: "name", title: "Model", text: true },
  { id: "version", title: "Version", text: true },
  { id: "state", title: "Instances" },
  { id: "rate", title: "Requests", spark: "blue", point: (p) => p.success, format: rate },
  { id: "latency", title: "Latency, 99 %", spark: "pink", point: (p) => p.p99 ?? p.mean, format: seconds },
  { id: "queue", title: "Queue time", format: percent },
  { id: "pending", title: "Waiting", spark: "violet", point: (p) => p.pending, format: number },
  { id: "batch", title: "Batch", format: number },
  { id: "failed", title: "Failures", format: rate },
  { id: "memory", title: "Memory", format: bytes },
];

function makeTable() {
  const head = html("tr");
  for (const { id, title } of COLUMNS) {
    const button = html("button", { type: "button" }, title);
    button.addEventListener("click", () => {
      state.descending = state.sort === id ? !state.descending : !["name", "version"].includes(id);
      state.sort = id;
      showTable();
    });
    head.append(html("th", { scope: "col", id: `sort-${id}` }, button));
  }
  $("models").tHead.replaceChildren(head);
}

// Returns the figures of each model over the last ten seconds.
function tableRows() {
  const now = history_.latest, recent = history_.recent(), found = models(now), failed = failedLoads(now), loading = loads(now);
  const parts = recent ? split(recent) : new Map();
  const [ready, resident, pending] = [FAMILY.instances, FAMILY.resident, FAMILY.pending].map((family) => byModel(now.list(family)));
  const total = (samples) => samples?.reduce((sum, { value }) => sum + value, 0) ?? null;
  return [...found].map(([key, { model, version }]) => {
    const part = parts.get(key), figures = part ? point(part) : {};
    const instances = ready.get(key) ?? [];
    const count = (state) => instances.reduce((sum, { labels, value }) => sum + (!state || labels.state === state ? value : 0), 0);
    const shared = figures.queue !== null && figures.mean ? Math.min(100, (100 * figures.queue) / figures.mean) : null;
    return {
      key, name: model, version: version ?? "", rate: figures.success ?? null, latency: figures.p99 ?? figures.mean ?? null, queue: shared,
      pending: figures.pending ?? total(pending.get(key)), batch: figures.batch ?? null,
      failed: figures.failed ?? null, ready: count("ready"), all: count() || null, // Ensembles have no instances.
      state: count() ? count("ready") / count() : loading.has(key) || (failed.has(model) && !version) ? 0 : null, loadFailed: failed.has(model),
      load: loading.get(key) ?? null,
      memory: total(resident.get(key)),
    };
  });
}

// Returns whether the latest load failed, an instance is not ready or more than 1 % of the requests failed.
const troubled = (row) => row.loadFailed || (row.all !== null && row.ready < row.all) || row.failed > 0.01 * (row.rate + row.failed);

function compare(a, b) {
  const x = a[state.sort], y = b[state.sort];
  const missing = (value) => value === null || value === undefined;
  if (missing(x) || missing(y)) return missing(x) - missing(y) || a.name.localeCompare(b.name);
  const order = typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
  return (state.descending ? -order : order) || a.name.localeCompare(b.name);
}

function showTable() {
  if (!history_.latest) return;
  const all = tableRows();
  const wanted = all.filter((row) => row.name.toLowerCase().includes(state.filter) && (!state.trouble || troubled(row))).sort(compare);
  const ill = all.filter(troubled).length;
  $("models-count").textContent = `${wanted.length === all.length ? all.length : `${wanted.length} of ${all.length}`}${ill ? `, ${ill} with problems` : ""}`;
  for (const { id } of COLUMNS) {
    const sorted = state.sort === id ? (state.descending ? "descending" : "ascending") : "none";
    $(`sort-${id}`).setAttribute("aria-sort", sorted);
  }
  const body = $("models").tBodies[0];
  const rows = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const next = wanted.map((figures) => fillRow(rows.get(figures.key) ?? makeRow(figures), figures));
  if (next.length === 0) next.push(emptyRow(COLUMNS.length, all.length ? "No model matches the filter." : "No model is loaded."));
  // Move rows only if their order has changed, so that a focused row keeps the focus.
  if (next.length !== body.rows.length || next.some((row, i) => body.rows[i] !== row)) keepFocus(() => body.replaceChildren(...next));
}

function keepFocus(change) {
  const focused = document.activeElement, scroll = $("models-scroll").scrollTop;
  change();
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
  $("models-scroll").scrollTop = scroll;
}

const emptyRow = (columns, text) => html("tr", {}, html("td", { colSpan: columns, class: "empty left" }, text));

function makeRow(figures) {
  const row = html("tr");
  row.dataset.key = figures.key;
  const toggle = () => choose(state.chosen === figures.key ? null : figures.key);
  for (const column of COLUMNS) {
    const cell = html("td");
    if (column.id === "name") cell.append(html("button", { type: "button", title: figures.name }, figures.name));
    if (column.spark) cell.append(html("span", { class: "with-spark" }, html("span", { class: "holder" }), html("b")));
    row.append(cell);
  }
  row.addEventListener("click", toggle);
  onScreen.observe(row);
  return row;
}

// Small charts are drawn only while their row is on the screen: those of hundreds of models take long.
const onScreen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.isOnScreen = isIntersecting;
    if (isIntersecting) drawSparklines(target);
  }
});

function drawSparklines(row) {
  const to = history_.latest.at, from = to - span(), points = history_.points.get(row.dataset.key) ?? [];
  COLUMNS.forEach(({ spark, point }, i) => {
    if (spark) sparkline(row.cells[i].firstChild.firstChild, points, point, spark, from, to);
  });
}

// The browser computes the layout of the whole table after any change.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Returns the text and the level of the instances of a model.
function instancesText({ version, ready, all, loadFailed, load }) {
  const progress = load && (load.share === null ? "loading" : `${percent(100 * load.share)} loaded`);
  if (all === null && load) return [progress, "warn"];
  if (all === null && loadFailed) return version === "" ? ["load failed", "bad"] : ["reload failed", "warn"];
  if (all === null) return [NONE, null];
  const level = ready < all ? (ready > 0 ? "warn" : "bad") : loadFailed ? "warn" : "good";
  return [`${ready} of ${all} ready${load ? `, ${progress}` : loadFailed ? ", reload failed" : ""}`, level];
}

function fillRow(row, figures) {
  row.className = figures.key === state.chosen ? "chosen" : "";
  COLUMNS.forEach((column, i) => {
    const cell = row.cells[i];
    if (column.id === "name") cell.firstChild.setAttribute("aria-pressed", String(figures.key === state.chosen));
    else if (column.id === "version") setText(cell, figures.version);
    else if (column.id === "state") {
      const [text, level] = instancesText(figures);
      if (cell.textContent !== text) cell.replaceChildren(...(level === null ? [] : [html("i", { class: `dot ${level}` })]), text);
    } else if (column.spark) {
      setText(cell.firstChild.lastChild, column.format(figures[column.id]));
    } else {
      setText(cell, column.format(figures[column.id]));
      if (column.id === "failed") cell.className = figures.failed > 0 ? "bad-text" : "";
    }
  });
  if (row.isOnScreen) drawSparklines(row);
  return row;
}

// ---- charts of the scope ----------------------------------------------------------------------------------------------

const charts = {};
function makeCharts() {
  const titles = { throughput: "Requests per second", latency: "Latency", parts: "Mean request time by phase", queue: "Waiting requests",
    batch: "Items per execution", host: "Cores in use", gpu: "GPU utilisation" };
  const formats = { latency: seconds, parts: seconds, gpu: percent };
  for (const [id, title] of Object.entries(titles)) {
    charts[id] = new TimeChart($(id), { title: `${title} over time`, format: formats[id] ?? number, stacked: id === "parts" });
  }
  charts.heat = new HeatStrip($("heat"), { title: "Latency over time as a heat strip", format: seconds });
}

// Hides the chart of a panel without series and shows the name of the missing metric instead.
function available(id, names) {
  const there = names.some((name) => history_.latest.has(name));
  const panel = $(id).parentElement;
  let note = panel.querySelector(".off");
  if (!there && !note) panel.append(note = html("p", { class: "empty off" }));
  if (note) {
    note.hidden = there;
    note.textContent = `No data: ${names[0].replace(/_bucket$/, "")} has no series. It may be disabled in metrics.yaml.`;
  }
  $(id).hidden = !there;
  return there;
}

const line = (name, color, value, more = {}) => ({ name, color, value, ...more });

function showCharts() {
  const points = chosenPoints(), to = history_.latest.at, from = to - span();
  const draw = (id, names, series, of = points) => { if (available(id, names)) charts[id].draw(of, series, from, to); };
  draw("throughput", [FAMILY.success, FAMILY.failure], [line("answered", "blue", (p) => p.success), line("failed", "bad", (p) => p.failed)]);
  const histograms = history_.latest.has(`${timeHistogram("request")}_bucket`);
  $("latency-title").textContent = histograms ? "Latency" : "Latency, mean";
  draw("latency", [timeCounter("request"), `${timeHistogram("request")}_bucket`], histograms
    ? [line("50 %", "blue", (p) => p.p50), line("95 %", "amber", (p) => p.p95), line("99 %", "pink", (p) => p.p99)]
    : [line("mean", "blue", (p) => p.mean)]);
  if (available("heat", [`${timeHistogram("request")}_bucket`])) charts.heat.draw(points, from, to);
  draw("parts", [timeCounter("queue"), timeCounter("compute_infer")], [line("queue", "violet", (p) => p.queue), line("input", "teal", (p) => p.compute_input),
    line("model", "blue", (p) => p.compute_infer), line("output", "amber", (p) => p.compute_output)]);
  draw("queue", [FAMILY.pending], [line("waiting", "violet", (p) => p.pending)]);
  draw("batch", [FAMILY.executions], [line("items", "teal", (p) => p.batch)]);
  draw("host", ["process_cpu_seconds_total", FAMILY.workerCpu], [line("server", "blue", (p) => p.server), line("workers", "teal", (p) => p.workers)], history_.host);
  showSizes();
  showReasons();
}

function showSizes() {
  if (!available("sizes", [`${FAMILY.batchSize}_bucket`])) return;
  const sizes = history_.recent()?.histogram(FAMILY.batchSize, keepChosen);
  const total = sizes?.counts.reduce((sum, n) => sum + n, 0) ?? 0;
  if (total === 0) return $("sizes").replaceChildren(html("div", { class: "empty" }, "No executions."));
  bars($("sizes"), bucketShares(sizes, total), "teal");
}

// Returns a row for each bucket of whole numbers, up to the last one with observations.
function bucketShares({ bounds, counts }, total) {
  const name = (i) => {
    const low = i === 0 ? 0 : bounds[i - 1], high = bounds[i];
    if (high === Infinity) return `over ${number(low)}`;
    return high - low <= 1 ? number(high) : `${number(low + 1)} to ${number(high)}`;
  };
  const rows = counts.map((count, i) => [name(i), count, `${digits((100 * count) / total)} %`]);
  return rows.slice(0, counts.findLastIndex((count) => count > 0) + 1);
}

function showReasons() {
  if (!available("reasons", [FAMILY.batches])) return;
  const recent = history_.recent(), gains = [...(recent?.gains(FAMILY.batches, "reason", keepChosen) ?? [])].filter(([, n]) => n > 0);
  if (gains.length === 0) return $("reasons").replaceChildren(html("div", { class: "empty" }, "No batches."));
  bars($("reasons"), gains.sort((a, b) => b[1] - a[1]).map(([reason, n]) => [reason, n, rate(n / recent.seconds)]), "blue");
}

// ---- instances, failures ------------------------------------------------------------------------------------------------

const INSTANCE_COLUMNS = ["Instance", "State", "CPU", "Memory", "GPU memory", "Tensors", "Metrics queue"];
const instanceKey = (labels) => `${modelKey(labels)}\u0000${labels.instance}`;

function instanceRows() {
  const now = history_.latest, recent = history_.recent(), rows = new Map();
  const row = (labels) => {
    const key = instanceKey(labels);
    if (!rows.has(key)) rows.set(key, { labels, state: null });
    return rows.get(key);
  };
  const put = (name, field, of = () => true) => {
    for (const { labels, value } of now.list(name)) if (keepChosen(labels) && of(labels)) row(labels)[field] = (row(labels)[field] ?? 0) + value;
  };
  for (const { labels, value } of now.list("pharos_instance_state")) if (keepChosen(labels) && value === 1) row(labels).state = labels.state;
  put(FAMILY.resident, "memory");
  put("pharos_worker_gpu_memory_bytes", "gpu");
  put("pharos_arena_used_bytes", "tensors");
  put("pharos_metric_channel_bytes", "channel");
  const cpu = recent?.gains(FAMILY.workerCpu, instanceKey, keepChosen) ?? new Map();
  for (const [key, gain] of cpu) if (rows.has(key)) rows.get(key).cpu = (100 * gain) / recent.seconds;
  return [...rows.values()];
}

const STATE_LEVEL = { ready: "good", starting: "warn", backoff: "bad", lost: "bad", failed: "bad" };

function showInstances() {
  const rows = instanceRows(), ill = (row) => (row.state === null || row.state === "ready" ? 0 : 1);
  rows.sort((a, b) => ill(b) - ill(a) || (b.cpu ?? 0) - (a.cpu ?? 0) || instanceKey(a.labels).localeCompare(instanceKey(b.labels)));
  $("instances-count").textContent = rows.length ? `${rows.length}` : "";
  const cells = rows.slice(0, 200).map((row) => [
    state.chosen === null ? `${row.labels.instance}, version ${row.labels.version}` : row.labels.instance,
    html("span", {}, html("i", { class: `dot ${STATE_LEVEL[row.state] ?? ""}` }), row.state ?? NONE),
    percent(row.cpu), bytes(row.memory), bytes(row.gpu), bytes(row.tensors), bytes(row.channel),
  ]);
  fillPlain($("instances"), INSTANCE_COLUMNS, cells, rows.some((row) => row.gpu !== undefined) ? [] : [4],
    "No data: the instance metrics have no series. They may be disabled in metrics.yaml.");
}

function showFailures() {
  const recent = history_.recent(), now = history_.latest;
  const [family, columns] = state.chosen === null
    ? ["pharos_request_failures_total", ["Reason", "Protocol", "Route"]] : [FAMILY.failure, ["Reason"]];
  $("failures-scope").textContent = state.chosen === null ? "of the whole server, including refused requests" : `of ${modelName(state.chosen)}`;
  const keep = state.chosen === null ? () => true : keepChosen, label = (labels) => columns.map((name) => labels[name.toLowerCase()] ?? "").join("\u0000");
  const gains = recent?.gains(family, label, keep) ?? new Map(), totals = new Map();
  for (const { labels, value } of now.list(family)) if (keep(labels)) totals.set(label(labels), (totals.get(label(labels)) ?? 0) + value);
  const rows = [...totals].filter(([, total]) => total > 0).sort((a, b) => (gains.get(b[0]) ?? 0) - (gains.get(a[0]) ?? 0) || b[1] - a[1]);
  const cells = rows.map(([key, total]) => [...key.split("\u0000"), rate(recent ? (gains.get(key) ?? 0) / recent.seconds : null), number(total)]);
  fillPlain($("failures"), [...columns, "Last 10 s", "Since start"], cells, [], now.has(family) ? "No failed requests." : `No data: ${family} has no series. It may be disabled in metrics.yaml.`);
}

// Fills a table without controls; `leftOut` are the indexes of columns without data.
function fillPlain(table, columns, rows, leftOut, empty) {
  const kept = columns.map((_, i) => i).filter((i) => !leftOut.includes(i));
  table.tHead.replaceChildren(html("tr", { hidden: rows.length === 0 }, ...kept.map((i) => html("th", { scope: "col" }, columns[i]))));
  const body = rows.map((cells) => html("tr", {}, ...kept.map((i) => html("td", {}, cells[i]))));
  table.tBodies[0].replaceChildren(...(body.length ? body : [emptyRow(columns.length, empty)]));
}

// ---- machine, GPUs, metrics -----------------------------------------------------------------------------------------------

const GIB = 2 ** 30, MIB = 2 ** 20;

function showMachine() {
  const now = history_.latest, rows = [];
  const used = now.one("MemoryUsed"), free = now.one("MemoryAvailable");
  const cpu = history_.host[history_.host.length - 1]?.cpu ?? null;
  if (cpu !== null) rows.push(meter("CPU", cpu, percent(cpu)));
  if (now.has("MemoryUtilization") || now.has("nv_cpu_memory_used_bytes")) {
    const inUse = used === null ? now.one("nv_cpu_memory_used_bytes") : used * MIB;
    const total = now.one("nv_cpu_memory_total_bytes") ?? (used !== null && free !== null ? (used + free) * MIB : null);
    rows.push(meter("Memory", now.one("MemoryUtilization") ?? (100 * inUse) / total, `${bytes(inUse)} of ${bytes(total)}`));
  }
  if (now.has("DiskUtilization")) rows.push(meter("Disk", now.one("DiskUtilization"), `${bytes(scaled(now.one("DiskAvailable"), GIB))} free`));
  const pinned = now.one("nv_pinned_memory_pool_total_bytes");
  if (pinned) rows.push(meter("Pinned memory", (100 * now.one("nv_pinned_memory_pool_used_bytes")) / pinned, bytes(pinned)));
  rows.push(...[modelMemory(now)].filter((row) => row !== null));
  const streams = now.sum("pharos_open_streams");
  const more = [["Open streams", number(streams)], ["Open files", number(now.one("process_open_fds"))]].filter(([, text]) => text !== NONE);
  rows.push(...more.map(([name, text]) => html("div", { class: "bar" }, html("span", { class: "name" }, name), html("span"), html("span", { class: "value" }, text))));
  $("host-levels").replaceChildren(...(rows.length ? rows : [html("div", { class: "empty" }, "System metrics are disabled.")]));
}

function showGpus() {
  const now = history_.latest, gpus = now.list("nv_gpu_memory_total_bytes").length ? now.list("nv_gpu_memory_total_bytes") : now.list("nv_gpu_utilization");
  $("gpu-section").hidden = gpus.length === 0;
  if (gpus.length === 0) return;
  $("gpus").replaceChildren(...gpus.map(({ labels }) => {
    const of = (name) => now.sum(name, (other) => other.gpu_uuid === labels.gpu_uuid);
    const rows = [], load = of("nv_gpu_utilization"), used = of("nv_gpu_memory_used_bytes"), total = of("nv_gpu_memory_total_bytes");
    const power = of("nv_gpu_power_usage"), limit = of("nv_gpu_power_limit"), heat = of("pharos_gpu_temperature_celsius");
    if (load !== null) rows.push(meter("Load", 100 * load, percent(100 * load), 101, 101));
    if (used !== null) rows.push(meter("Memory", total ? (100 * used) / total : 0, `${bytes(used)} of ${bytes(total)}`, 90, 97));
    rows.push(...[modelGpuMemory(now, labels.gpu_uuid)].filter((row) => row !== null));
    if (power !== null) rows.push(meter("Power", limit ? (100 * power) / limit : 0, `${number(power)} of ${number(limit)} W`, 95, 101));
    if (heat !== null) rows.push(meter("Temperature", heat, `${number(heat)} °C`, 80, 90));
    return html("div", { class: "gpu" }, html("h4", { title: labels.gpu_uuid }, labels.gpu_uuid), ...rows);
  }));
  if (!available("gpu", ["nv_gpu_utilization"])) return;
  const colors = ["blue", "teal", "amber", "pink", "violet", "grey"];
  const series = gpus.map(({ labels }, i) => line(labels.gpu_uuid.slice(0, 12), colors[i % colors.length], (p) => p[`gpu ${labels.gpu_uuid}`] ?? null));
  charts.gpu.draw(history_.host, series, history_.latest.at - span(), history_.latest.at);
}

function showHealth() {
  const now = history_.latest, recent = history_.recent(), rows = [];
  rows.push(["Scrape", `${number(now.count)} series, ${bytes(now.bytes)}, ${seconds(state.scrapeMs / 1000)}`, ""]);
  for (const [source, gain] of recent?.gains("pharos_metric_samples_total", "source") ?? []) rows.push([`Samples from ${source}`, rate(gain / recent.seconds), ""]);
  const trouble = [["Samples lost or refused", "pharos_metric_samples_dropped_total"], ["Malformed lines", "pharos_metric_lines_malformed_total"],
    ["Series beyond the limit", "pharos_metric_series_overflowed_total"], ["Metric log lines skipped", "pharos_tslog_lines_skipped_total"],
    ["Metric log write errors", "pharos_tslog_write_errors_total"], ["Log lines lost", "pharos_log_lines_lost_total"]];
  for (const [title, family] of trouble) {
    const total = now.sum(family), gain = recent?.gain(family);
    if (total !== null) rows.push([title, number(total), gain > 0 ? "bad" : total > 0 ? "warn" : ""]);
  }
  for (const [file, gain] of recent?.gains("pharos_tslog_lines_total", "file") ?? []) rows.push([`Lines to ${file}`, rate(gain / recent.seconds), ""]);
  const failed = now.sum("pharos_metrics_reloads_total", (labels) => labels.result === "failure");
  if (failed !== null) rows.push(["Rejected reloads", number(failed), failed > 0 ? "warn" : ""]);
  $("health").replaceChildren(...rows.flatMap(([title, text, level]) => [html("dt", {}, title), html("dd", { class: level ? `${level}-text` : "" }, text)]));
}

// ---- the page -----------------------------------------------------------------------------------------------------------

// Returns the status of the server in a few words, and its level.
function statusOf(now) {
  const ready = now.sum(FAMILY.instances, (labels) => labels.state === "ready"), all = now.sum(FAMILY.instances);
  const failed = failedLoads(now).size;
  if (ready === 0) return ["no instance ready", "bad"];
  if (ready < all) return [`${all - ready} of ${all} instances not ready`, "warn"];
  if (failed) return [`the last load of ${times(failed, "model")} failed`, "warn"];
  return [ready === null ? "serving" : "all instances ready", "good"];
}

function showHeader() {
  const now = history_.latest, version = now.list("pharos_build_info")[0]?.labels.version, started = now.one("process_start_time_seconds");
  const host = now.list("ts_inference_requests_total")[0]?.labels.hostname ?? now.list("CPUUtilization")[0]?.labels.Hostname;
  const parts = [host, version && `version ${version}`, started && `up ${seconds(Date.now() / 1000 - started)}`];
  $("about").textContent = parts.filter(Boolean).join(" · ");
  const [text, level] = statusOf(now);
  status(state.paused ? "paused" : text, state.paused ? "" : level);
  document.title = host ? `Pharos · ${host}` : "Pharos";
}

// Updates the text only if it has changed, because a screen reader announces every change.
function status(text, level) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = `pill ${level}`;
}

function show() {
  if (!history_.latest?.count) return;
  const one = state.chosen !== null, known = !one || models(history_.latest).has(state.chosen);
  $("scope-title").textContent = one ? `${modelName(state.chosen)}, version ${modelVersion(state.chosen)}${known ? "" : " (not loaded now)"}` : "All models";
  $("scope-all").hidden = !one;
  for (const part of [showHeader, showTiles, showTable, showCharts, showStreams, showEvents, showInstances, showFailures, showDemand, showUsage, showMachine, showGpus, showHealth]) part();
}

function notice(text) {
  $("notice").hidden = text === "";
  if ($("notice").textContent !== text) $("notice").textContent = text;
}

// Returns the notice for a scrape without series; the server gives the reason in a comment.
function nothing(text) {
  const said = text.match(/^# (?!HELP |TYPE )(.+)$/m)?.[1] ?? "/metrics has no series";
  return `No metrics to show. The server reports: ${said}.`;
}

async function poll() {
  if (state.busy) return;
  state.busy = true;
  clearTimeout(state.timer);
  try {
    const asked = performance.now();
    const response = await fetch("metrics", { cache: "no-store", headers: { accept: "text/plain" }, signal: AbortSignal.timeout(10000) });
    if (!response.ok) throw new Error(`/metrics returned status ${response.status}`);
    const text = await response.text();
    state.scrapeMs = performance.now() - asked;
    history_.add(text, Date.now());
    const drawn = history_.latest.count > 0;
    document.querySelector("main").hidden = !drawn;
    notice(drawn ? "" : nothing(text));
    if (drawn) show();
    else status("no metrics", "warn");
  } catch (failure) {
    status("unreachable", "bad");
    notice(`Cannot read the server's metrics (${failure.message}). Retrying every ${POLL_MS / 1000} s.`);
  } finally {
    state.busy = false;
    plan(history_.scrapes.length === 1 ? POLL_MS / 2 : POLL_MS);
  }
}

// Schedules the next poll, unless the page is paused or hidden.
function plan(delay) {
  clearTimeout(state.timer);
  if (!state.paused && !document.hidden) state.timer = setTimeout(poll, delay);
}

const THEMES = ["system", "light", "dark"];
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  $("theme").dataset.now = theme;
  try { localStorage.setItem("pharos-theme", theme); } catch { /* storage may be disabled */ }
  show();
}

function remembered() {
  try { return localStorage.getItem("pharos-theme"); } catch { return null; }
}

function start() {
  makeTiles();
  makeTable();
  makeCharts();
  makeStreamCharts();
  makeLanes();
  chooseFromAddress();
  setTheme(THEMES.includes(remembered()) ? remembered() : "system");
  $("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf($("theme").dataset.now) + 1) % THEMES.length]));
  $("window").addEventListener("change", (event) => { state.windowMs = event.target.value * 60000; show(); });
  $("filter").addEventListener("input", (event) => { state.filter = event.target.value.trim().toLowerCase(); showTable(); });
  $("trouble").addEventListener("change", (event) => { state.trouble = event.target.checked; showTable(); });
  $("scope-all").addEventListener("click", () => choose(null));
  $("pause").addEventListener("click", () => {
    state.paused = !state.paused;
    $("pause").setAttribute("aria-pressed", String(state.paused));
    $("pause").textContent = state.paused ? "Continue" : "Pause";
    if (state.paused) { clearTimeout(state.timer); show(); } else poll();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !state.paused) poll(); });
  window.addEventListener("hashchange", () => { chooseFromAddress(); show(); });
  window.addEventListener("resize", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  poll();
}

start();
