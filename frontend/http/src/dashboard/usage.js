// The tables of language models, of service level objectives and of tenants. Each is hidden while /metrics has no series of it.
"use strict";

const SLO = {
  good: "pharos_slo_good_requests_total",
  all: "pharos_slo_requests_total",
  share: "pharos_slo_objective_ratio",
  threshold: "pharos_slo_latency_threshold_seconds",
  budget: "pharos_slo_error_budget_remaining_ratio",
};
const SLO_COLUMNS = ["Objective", "Model", "Required", "Good", "Burn rate", "Budget left"];
const sloKey = (labels) => [labels.slo, labels.sli, modelKey(labels)].join("\u0000");
const finePercent = (share) => (share === null ? NONE : `${trimmed((100 * share).toFixed(3))} %`);

// Returns the objectives in scope, the most endangered first.
function sloRows() {
  const now = history_.latest, recent = history_.recent();
  const values = (name) => new Map(now.list(name).map(({ labels, value }) => [sloKey(labels), value]));
  const gains = (name) => recent?.gains(name, sloKey, keepChosen) ?? new Map();
  const [shares, thresholds, good, all] = [values(SLO.share), values(SLO.threshold), gains(SLO.good), gains(SLO.all)];
  const rows = now.list(SLO.budget).filter(({ labels }) => keepChosen(labels)).map(({ labels, value: budget }) => {
    const key = sloKey(labels), share = shares.get(key) ?? null, requests = all.get(key) ?? 0;
    const met = requests > 0 ? (good.get(key) ?? 0) / requests : null;
    const burn = met === null || share === null ? null : (1 - met) / (1 - share);
    return { labels, share, threshold: thresholds.get(key) ?? null, met, burn, budget };
  });
  return rows.sort((a, b) => (b.burn ?? 0) - (a.burn ?? 0) || a.budget - b.budget || sloKey(a.labels).localeCompare(sloKey(b.labels)));
}

function showObjectives() {
  const rows = sloRows();
  $("objectives-panel").hidden = rows.length === 0;
  const cells = rows.slice(0, 200).map(({ labels, share, threshold, met, burn, budget }) => {
    const level = budget <= 0 ? "bad" : (burn ?? 0) > 1 ? "warn" : "good";
    return [
      html("span", {}, html("i", { class: `dot ${level}` }), `${labels.slo} ${labels.sli}`),
      `${labels.model}, version ${labels.version}`,
      threshold === null ? finePercent(share) : `${finePercent(share)} in ${seconds(threshold)}`,
      finePercent(met), burn === null ? NONE : number(burn), percent(100 * budget),
    ];
  });
  fillPlain($("objectives"), SLO_COLUMNS, cells, [], "No objectives.");
}

const LANGUAGE = {
  prompt: "pharos_llm_prompt_tokens_total",
  generated: "pharos_llm_generation_tokens_total",
  first: "pharos_llm_time_to_first_token_seconds",
  interval: "pharos_llm_inter_token_latency_seconds",
  running: "pharos_llm_running_requests",
  waiting: "pharos_llm_waiting_requests",
  cache: "pharos_llm_kv_cache_usage_ratio",
  queued: "nv_inference_pending_request_count",
};
const LANGUAGE_COLUMNS = ["Model", "Prompt tokens", "Generated tokens", "First token 50 %", "First token 99 %", "Between tokens 50 %", "Running", "Waiting", "KV cache"];

function showLanguageModels() {
  const now = history_.latest, recent = history_.recent();
  const models = now.list(LANGUAGE.generated).map(({ labels }) => labels).filter(keepChosen);
  $("language").hidden = models.length === 0;
  const [prompt, generated] = [LANGUAGE.prompt, LANGUAGE.generated].map((name) => recent?.gains(name, modelKey, keepChosen) ?? new Map());
  const cells = models.slice(0, 200).map((model) => {
    const key = modelKey(model), isOfModel = (labels) => modelKey(labels) === key;
    const values = (name) => now.list(name).filter(({ labels }) => isOfModel(labels)).map(({ value }) => value);
    const sum = (all) => (all.length === 0 ? null : all.reduce((total, value) => total + value, 0));
    const perSecond = (gains) => rate(recent ? (gains.get(key) ?? 0) / recent.seconds : null);
    const at = (q, family) => { const times = recent?.histogram(family, isOfModel); return seconds(times ? quantile(q, times) : null); };
    const cache = values(LANGUAGE.cache);
    return [
      `${model.model}, version ${model.version}`, perSecond(prompt), perSecond(generated),
      at(0.5, LANGUAGE.first), at(0.99, LANGUAGE.first), at(0.5, LANGUAGE.interval),
      number(sum(values(LANGUAGE.running))),
      // Requests wait in the queue of the server and in the engines.
      number(sum([...values(LANGUAGE.queued), ...values(LANGUAGE.waiting)])),
      cache.length === 0 ? NONE : percent(100 * sum(cache) / cache.length),
    ];
  });
  fillPlain($("language-models"), LANGUAGE_COLUMNS, cells, [], "No language models.");
}

const TENANT = ["requests", "failures", "compute_seconds", "queue_seconds"].map((name) => `pharos_tenant_${name}_total`);
const TENANT_COLUMNS = ["Tenant", "Requests", "Failures", "Compute time", "Queue time", "Requests since start"];

function showTenants() {
  const now = history_.latest, recent = history_.recent(), totals = new Map();
  for (const { labels, value } of now.list(TENANT[0])) {
    if (keepChosen(labels)) totals.set(labels.tenant, (totals.get(labels.tenant) ?? 0) + value);
  }
  $("tenants-panel").hidden = totals.size === 0;
  const [requests, failures, compute, queue] = TENANT.map((name) => recent?.gains(name, "tenant", keepChosen) ?? new Map());
  const names = [...totals.keys()].sort((a, b) =>
    (compute.get(b) ?? 0) - (compute.get(a) ?? 0) || totals.get(b) - totals.get(a) || a.localeCompare(b));
  const perSecond = (gains, name) => (recent ? (gains.get(name) ?? 0) / recent.seconds : null);
  const cells = names.slice(0, 200).map((name) => [
    name, rate(perSecond(requests, name)), rate(perSecond(failures, name)),
    seconds(compute.get(name) ?? null), seconds(queue.get(name) ?? null), number(totals.get(name)),
  ]);
  fillPlain($("tenants"), TENANT_COLUMNS, cells, [], "No tenants.");
}

function showUsage() {
  showLanguageModels();
  showObjectives();
  showTenants();
  $("usage").hidden = $("objectives-panel").hidden && $("tenants-panel").hidden;
}
