//! The smaller tables as text: the whole server, objectives, language models, streams, tenants.

use std::collections::{BTreeMap, BTreeSet};

use pharos::metrics::builtin::Builtin;
use pharos::metrics::catalog::RECORDED_BY_ENGINES;

use crate::exposition::{Key, model_key};
use crate::format::{NONE, bytes, number, percent, rate, seconds};
use crate::history::History;
use crate::models::{Model, quotient};
use crate::scrape::{Distribution, Interval, Mean, Scrape};

/// How a cell is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Level {
    #[default]
    Plain,
    Warning,
    Bad,
}

/// A text and its level.
pub(crate) type Cell = (String, Level);

/// A table: title, heads of the columns, and rows.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) title: &'static str,
    pub(crate) heads: &'static [&'static str],
    pub(crate) rows: Vec<Vec<Cell>>,
}

fn plain(texts: Vec<String>) -> Vec<Cell> {
    texts.into_iter().map(|text| (text, Level::Plain)).collect()
}

/// Returns the tables that have rows.
pub(crate) fn tables(history: &History) -> Vec<Table> {
    let Some(now) = history.latest() else { return Vec::new() };
    let recent = history.recent();
    let all = [
        objectives(now, recent),
        language_models(now, recent),
        streams(now, recent),
        tenants(now, recent),
    ];
    all.into_iter().filter(|table| !table.rows.is_empty()).collect()
}

/// Returns the figures of the whole server: name and value.
pub(crate) fn server(history: &History, models: &[Model]) -> Vec<(&'static str, Cell)> {
    let Some(now) = history.latest() else { return Vec::new() };
    let recent = history.recent();
    let sum = |of: fn(&Model) -> Option<f64>| {
        let mut values = models.iter().filter_map(of).peekable();
        values.peek().is_some().then(|| values.sum::<f64>())
    };
    let requests = sum(|model| model.requests);
    // Failures that no model counts, such as malformed requests, are in this family only.
    let all_failures = recent.and_then(|recent| recent.rate(Builtin::RequestFailures));
    let failures = all_failures.or_else(|| sum(|model| model.failures));
    let all = recent.and_then(|recent| recent.rate(Builtin::Requests)).or(requests);
    let share = quotient(failures, all).unwrap_or_default();
    let failing = if share >= 0.05 {
        Level::Bad
    } else if share >= 0.01 {
        Level::Warning
    } else {
        Level::Plain
    };
    let duration = recent
        .and_then(|recent| recent.distributions(Builtin::RequestHistogram, |_| ()).remove(&()));
    let p99 = duration.and_then(|duration| duration.quantile(0.99));
    let ready = sum(|model| model.ready);
    let instances = sum(|model| model.instances);
    let ill = if ready < instances { Level::Warning } else { Level::Plain };
    let resident = sum(|model| model.memory).map_or(0.0, |workers| workers)
        + now.one(Builtin::ProcessMemory).unwrap_or_default();
    let mut figures = vec![
        ("requests", (rate(requests), Level::Plain)),
        ("failures", (rate(failures), failing)),
        ("p99", (seconds(p99), Level::Plain)),
        ("waiting", (number(sum(|model| model.waiting)), Level::Plain)),
        ("instances ready", (format!("{} of {}", number(ready), number(instances)), ill)),
        ("CPU", (percent(cpu(now)), used(cpu(now)))),
        ("memory", (percent(memory(now)), used(memory(now)))),
        ("of the server", (bytes(Some(resident).filter(|bytes| *bytes > 0.0)), Level::Plain)),
    ];
    let failed: BTreeSet<&str> =
        models.iter().filter(|model| model.load_failed).map(|model| model.name.as_str()).collect();
    if !failed.is_empty() {
        figures.push(("failed loads", (number(Some(failed.len() as f64)), Level::Bad)));
    }
    let restarts = now.sum(Builtin::InstanceRestarts).filter(|count| *count > 0.0);
    figures.extend(restarts.map(|count| ("restarts", (number(Some(count)), Level::Warning))));
    figures.extend(gpus(now));
    figures
}

fn used(share: Option<f64>) -> Level {
    match share.unwrap_or_default() {
        share if share >= 0.97 => Level::Bad,
        share if share >= 0.9 => Level::Warning,
        _ => Level::Plain,
    }
}

fn cpu(now: &Scrape) -> Option<f64> {
    now.one(Builtin::TsCpuUtilization)
        .map(|percent| percent / 100.0)
        .or_else(|| now.one(Builtin::CpuUtilization))
}

fn memory(now: &Scrape) -> Option<f64> {
    let measured = now.one(Builtin::TsMemoryUtilization).map(|percent| percent / 100.0);
    measured.or_else(|| quotient(now.one(Builtin::CpuMemoryUsed), now.one(Builtin::CpuMemoryTotal)))
}

/// Returns the mean load of the GPUs, and the used share of their memory.
fn gpus(now: &Scrape) -> Vec<(&'static str, Cell)> {
    let count = now.list(Builtin::GpuUtilization).len() as f64;
    if count == 0.0 {
        return Vec::new();
    }
    let load = now.sum(Builtin::GpuUtilization).map(|sum| sum / count);
    let share = quotient(now.sum(Builtin::GpuMemoryUsed), now.sum(Builtin::GpuMemoryTotal));
    vec![("GPUs", (percent(load), Level::Plain)), ("GPU memory", (percent(share), used(share)))]
}

/// Objective, indicator, model and version.
type SloKey = (String, String, String, String);

fn slo_key(key: &Key) -> SloKey {
    let (model, version) = model_key(key);
    (key.label("slo").to_owned(), key.label("sli").to_owned(), model, version)
}

fn objectives(now: &Scrape, recent: Option<Interval<'_>>) -> Table {
    let gains = |metric| recent.map_or_else(BTreeMap::new, |recent| recent.gains(metric, slo_key));
    let good = gains(Builtin::SloGoodRequests);
    let all = gains(Builtin::SloRequests);
    let shares = now.sums(Builtin::SloObjective, slo_key);
    let limits = now.sums(Builtin::SloThreshold, slo_key);
    let mut rows: Vec<(f64, Vec<Cell>)> = Vec::new();
    for (key, budget) in now.sums(Builtin::SloBudget, slo_key) {
        let share = shares.get(&key).copied();
        let met = quotient(good.get(&key).copied(), all.get(&key).copied());
        let burn = quotient(met.map(|met| 1.0 - met), share.map(|share| 1.0 - share));
        let level = match (budget <= 0.0, burn.unwrap_or_default() > 1.0) {
            (true, _) => Level::Bad,
            (_, true) => Level::Warning,
            _ => Level::Plain,
        };
        let limit = limits
            .get(&key)
            .map_or_else(String::new, |limit| format!(" in {}", seconds(Some(*limit))));
        let (slo, sli, model, version) = key;
        let texts = [
            format!("{slo} {sli}"),
            format!("{model}/{version}"),
            format!("{}{limit}", percent(share)),
            percent(met),
            number(burn),
            percent(Some(budget)),
        ];
        rows.push((burn.unwrap_or_default(), texts.map(|text| (text, level)).to_vec()));
    }
    rows.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let heads = &["objective", "model", "required", "good", "burn", "budget left"];
    Table { title: "objectives", heads, rows: rows.into_iter().map(|(_, row)| row).collect() }
}

fn tenants(now: &Scrape, recent: Option<Interval<'_>>) -> Table {
    let tenant = |key: &Key| key.label("tenant").to_owned();
    let gains = |metric| recent.map_or_else(BTreeMap::new, |recent| recent.gains(metric, tenant));
    let metrics = [
        Builtin::TenantRequests,
        Builtin::TenantFailures,
        Builtin::TenantCompute,
        Builtin::TenantQueue,
    ];
    let [requests, failures, compute, queue] = metrics.map(gains);
    let seconds_of = recent.map(|recent| recent.seconds());
    let mut all: Vec<(String, f64)> =
        now.sums(Builtin::TenantRequests, tenant).into_iter().collect();
    let cost = |tenant: &str| compute.get(tenant).copied().unwrap_or_default();
    all.sort_by(|(a, _), (b, _)| cost(b).total_cmp(&cost(a)));
    let mut rows = Vec::new();
    for (tenant, total) in all {
        let per_second =
            |of: &BTreeMap<String, f64>| rate(quotient(of.get(&tenant).copied(), seconds_of));
        rows.push(plain(vec![
            tenant.clone(),
            per_second(&requests),
            per_second(&failures),
            seconds(compute.get(&tenant).copied()),
            seconds(queue.get(&tenant).copied()),
            number(Some(total)),
        ]));
    }
    let heads = &["tenant", "requests", "failures", "compute", "queue", "requests in all"];
    Table { title: "tenants", heads, rows }
}

fn language_models(now: &Scrape, recent: Option<Interval<'_>>) -> Table {
    let heads = &[
        "language model",
        "prompt",
        "generated",
        "first p50",
        "first p99",
        "between p50",
        "running",
        "waiting",
        "KV cache",
    ];
    let keys = now.sums(Builtin::LlmGenerationTokens, model_key).into_keys();
    let Some(recent) = recent else {
        return Table { title: "language models", heads, rows: Vec::new() };
    };
    let prompt = recent.gains(Builtin::LlmPromptTokens, model_key);
    let generated = recent.gains(Builtin::LlmGenerationTokens, model_key);
    let first = recent.distributions(Builtin::LlmFirstToken, model_key);
    let between = recent.distributions(Builtin::LlmInterval, model_key);
    // Requests wait in the queue of the server and in the engines.
    let queued = now.sums(Builtin::PendingRequests, model_key);
    let [running, waiting, cache, ..] = RECORDED_BY_ENGINES.map(|name| now.means(name, model_key));
    let mut rows = Vec::new();
    for key in keys {
        let tokens =
            |of: &BTreeMap<_, f64>| rate(of.get(&key).map(|count| count / recent.seconds()));
        let at = |q, of: &BTreeMap<_, Distribution>| {
            seconds(of.get(&key).and_then(|found| found.quantile(q)))
        };
        let queued = queued.get(&key).copied();
        let in_engines = waiting.get(&key).map(Mean::sum);
        let all_waiting = queued
            .or(in_engines)
            .map(|_| queued.unwrap_or_default() + in_engines.unwrap_or_default());
        let share = cache.get(&key).map(Mean::mean);
        let mut row = plain(vec![
            format!("{}/{}", key.0, key.1),
            tokens(&prompt),
            tokens(&generated),
            at(0.5, &first),
            at(0.99, &first),
            at(0.5, &between),
            number(running.get(&key).map(Mean::sum)),
            number(all_waiting),
        ]);
        row.push((percent(share), used(share)));
        rows.push(row);
    }
    Table { title: "language models", heads, rows }
}

fn streams(now: &Scrape, recent: Option<Interval<'_>>) -> Table {
    const RESPONSES: Builtin = Builtin::StreamResponses;
    let heads = &[
        "streams of",
        "first p50",
        "first p99",
        "between p50",
        "between p99",
        "responses",
        "bytes",
    ];
    let keys = now.sums(RESPONSES, model_key).into_keys();
    let Some(recent) = recent else { return Table { title: "streams", heads, rows: Vec::new() } };
    let first = recent.distributions(Builtin::StreamFirstResponse, model_key);
    let between = recent.distributions(Builtin::StreamInterval, model_key);
    let responses = recent.gains(RESPONSES, model_key);
    let sizes = recent.gains(Builtin::StreamResponseBytes, model_key);
    let mut rows = Vec::new();
    for key in keys {
        let at = |q, of: &BTreeMap<_, Distribution>| {
            seconds(of.get(&key).and_then(|found| found.quantile(q)))
        };
        let per_second = |of: &BTreeMap<_, f64>| of.get(&key).map(|count| count / recent.seconds());
        let size = per_second(&sizes)
            .map_or_else(|| NONE.to_owned(), |size| format!("{}/s", bytes(Some(size))));
        rows.push(plain(vec![
            format!("{}/{}", key.0, key.1),
            at(0.5, &first),
            at(0.99, &first),
            at(0.5, &between),
            at(0.99, &between),
            rate(per_second(&responses)),
            size,
        ]));
    }
    Table { title: "streams", heads, rows }
}
