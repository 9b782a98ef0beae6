// The tables of service level objectives and of tenants. Each is hidden while /metrics has no series of it.
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
  showObjectives();
  showTenants();
  $("usage").hidden = $("objectives-panel").hidden && $("tenants-panel").hidden;
}
