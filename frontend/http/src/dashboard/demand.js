// The table of models that are loaded on demand, and the memory that models use. Each is hidden while /metrics has no series of it.
"use strict";

const DEMAND = {
  hits: "pharos_on_demand_hits_total",
  loads: "pharos_on_demand_loads_total",
  unloads: "pharos_on_demand_unloads_total",
  wait: "pharos_on_demand_wait_seconds",
  waiting: "pharos_on_demand_waiting_requests",
  size: "pharos_model_memory_bytes",
  used: "pharos_model_memory_used_bytes",
  limit: "pharos_model_memory_limit_bytes",
  gpuSize: "pharos_model_gpu_memory_bytes",
  gpuUsed: "pharos_model_gpu_memory_used_bytes",
  gpuLimit: "pharos_model_gpu_memory_limit_bytes",
};
const DEMAND_COLUMNS = ["Model", "Loads", "Last 10 s", "Failed", "No memory", "Unloads, idle", "Unloads, memory", "Hits", "Waited", "Mean wait", "Memory", "GPU memory"];

// Returns the sum of the samples of each model. One pass for all models: one for each would take quadratic time.
function sumsByModel(list) {
  const sums = new Map();
  for (const { labels, value } of list) sums.set(labels.model, (sums.get(labels.model) ?? 0) + value);
  return sums;
}

// Returns the models that a request has loaded or tried to load, those with the most loads in the last 10 s first.
function demandRows() {
  const now = history_.latest, recent = history_.recent(), rows = new Map();
  const inScope = ({ model }) => state.chosen === null || modelName(state.chosen) === model;
  const row = (model) => rows.get(model) ?? rows.set(model, { model, success: 0, failure: 0, no_memory: 0, idle: 0, memory: 0 }).get(model);
  for (const [name, label] of [[DEMAND.loads, "result"], [DEMAND.unloads, "reason"]]) {
    for (const { labels, value } of now.list(name)) if (inScope(labels)) row(labels.model)[labels[label]] = value;
  }
  const gains = recent?.gains(DEMAND.loads, "model", ({ result }) => result === "success") ?? new Map();
  const names = [DEMAND.hits, `${DEMAND.wait}_count`, `${DEMAND.wait}_sum`, DEMAND.size, DEMAND.gpuSize];
  const [hits, waits, waitedFor, sizes, gpuSizes] = names.map((name) => sumsByModel(now.list(name)));
  for (const found of rows.values()) {
    const of = (sums) => sums.get(found.model) ?? null, waited = of(waits) ?? 0;
    Object.assign(found, { recent: gains.get(found.model) ?? 0, hits: of(hits) ?? 0, waited, size: of(sizes), gpuSize: of(gpuSizes) });
    found.mean = waited > 0 ? of(waitedFor) / waited : null;
  }
  return [...rows.values()].sort((a, b) => b.recent - a.recent || b.success - a.success || a.model.localeCompare(b.model));
}

function showDemand() {
  const rows = demandRows(), now = history_.latest;
  $("demand").hidden = rows.length === 0;
  $("demand-waiting").textContent = now.has(DEMAND.waiting) ? `${number(now.one(DEMAND.waiting))} requests wait` : "";
  const cells = rows.slice(0, 200).map(({ model, success, recent, failure, no_memory, idle, memory, hits, waited, mean, size, gpuSize }) =>
    [model, ...[success, recent, failure, no_memory, idle, memory, hits, waited].map(number), seconds(mean), ...[size, gpuSize].map((value) => (value === null ? NONE : bytes(value)))]);
  fillPlain($("demand-models"), DEMAND_COLUMNS, cells, [], "No models.");
}

// Returns the meter of the memory of all models; null without a limit.
function modelMemory(now) {
  const used = now.one(DEMAND.used), limit = now.one(DEMAND.limit);
  return used === null || !limit ? null : meter("Models", (100 * used) / limit, `${bytes(used)} of ${bytes(limit)}`);
}

// Returns the meter of the memory of all models on a GPU; null without a limit.
function modelGpuMemory(now, uuid) {
  const of = (name) => now.sum(name, ({ gpu_uuid }) => gpu_uuid === uuid), used = of(DEMAND.gpuUsed), limit = of(DEMAND.gpuLimit);
  return used === null || !limit ? null : meter("Models", (100 * used) / limit, `${bytes(used)} of ${bytes(limit)}`);
}
