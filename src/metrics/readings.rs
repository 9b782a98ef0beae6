//! The only enumeration of series: the definition of each family, and the labels and value of each
//! of its series. All views use it, so they agree. All values belong to one moment: see
//! [`transaction`](super::transaction).
//!
//! Labels are in no particular order: the metric's come first, then a model's namespace and tags.
//! Families are in the order of `metrics.yaml`, models in the order of name and version.

use std::ops::Deref;
use std::sync::Arc;

use pharos_base::timeline::SendReason;

use super::alias::AliasCounts;
use super::builtin::Builtin;
use super::cache::Cache;
use super::catalog::{Catalog, Kind, MetricSpec, OtherLabel, Views, relabelled};
use super::counts::ModelCounts;
use super::durations::own_or_defined;
pub use super::family::Family;
use super::family::{Registry, Series};
use super::labels::{Failure, InstanceState, Protocol};
use super::native::Native;
use super::reading::{Details, Histogram, Number, Reading};
use super::series::{ModelReading, ModelSeries, RequestReading};
use super::source::{LabelSet, ModelValue, Scale, Source, Stage, TenantValue, TokenValue};
use super::unit::TimeUnit;

/// A callback for the labels of a series and its value.
pub type Visit<'v> = &'v mut dyn FnMut(&[(&str, &str)], Reading);

/// A family under one of its names.
#[derive(Clone, Debug)]
pub struct Named {
    family: Arc<Family>,
    /// The definition with this name, its unit and its labels.
    spec: Arc<MetricSpec>,
    /// The labels that differ from the labels of the family.
    labels: Vec<OtherLabel>,
    /// The power of ten by which values are multiplied for this unit.
    digits: i32,
}

impl Named {
    /// Returns the definition with this name and its unit.
    pub fn spec(&self) -> &MetricSpec {
        &self.spec
    }

    /// Returns the views that show the family.
    pub fn views(&self) -> Views {
        self.family.views
    }
}

/// The series that exist at one moment, and their values.
#[derive(Debug)]
pub struct Readings<C> {
    cache: C,
    registry: Arc<Registry>,
    requests: RequestReading,
    models: Vec<ModelReading>,
    /// `None` unless requests are counted by alias.
    aliases: Option<Vec<AliasReading>>,
    /// The series of each family whose values are in its series, by the position of the family.
    /// Empty for the others.
    families: Vec<Vec<FamilyReading>>,
    details: Details,
}

/// The value of a series of a family.
#[derive(Debug)]
struct FamilyReading {
    series: Arc<Series>,
    value: Reading,
}

/// The counts of the requests by one alias.
#[derive(Debug)]
struct AliasReading {
    alias: Arc<AliasCounts>,
    counts: ModelCounts,
}

impl<C: Deref<Target = Cache>> Readings<C> {
    /// Reads the cache, with these details.
    pub fn new(cache: C, details: Details) -> Self {
        let transactions = cache.transactions();
        // Which series exist is read together with their values, so that an event that creates a
        // series is read as a whole.
        let (registry, requests, models, aliases, families) = transactions.snapshot(|| {
            let registry = cache.registry();
            let models = cache
                .models()
                .into_iter()
                .map(|series| ModelReading::copy(series, Some(details)))
                .collect();
            let aliases =
                cache.aliases().map(|all| all.into_iter().map(AliasReading::copy).collect());
            let families = registry
                .families()
                .iter()
                .map(|family| FamilyReading::copy_all(family, details))
                .collect();
            (registry, cache.requests().copy(), models, aliases, families)
        });
        Self { cache, registry, requests, models, aliases, families, details }
    }

    /// Reads only the counters of these models and of the server.
    pub(super) fn of_counters<'m>(
        cache: C,
        models: impl Iterator<Item = &'m Arc<ModelSeries>>,
    ) -> Self {
        let registry = cache.registry();
        let details = Details::default();
        let transactions = cache.transactions();
        let (requests, models, aliases) = transactions.snapshot(|| {
            let models =
                models.map(|series| ModelReading::copy(Arc::clone(series), None)).collect();
            let aliases =
                cache.aliases().map(|all| all.into_iter().map(AliasReading::copy).collect());
            (cache.requests().copy(), models, aliases)
        });
        Self { cache, registry, requests, models, aliases, families: Vec::new(), details }
    }

    /// Returns the definition of the metrics.
    pub fn catalog(&self) -> &Catalog {
        self.registry.catalog()
    }

    /// Returns every family, in the definition's order.
    pub fn families(&self) -> &[Arc<Family>] {
        self.registry.families()
    }

    /// Returns every family under each of its names, in the definition's order: its own name, then
    /// those in `also_as`.
    pub fn named(&self) -> Vec<Named> {
        let mut all = Vec::with_capacity(self.families().len());
        for family in self.families() {
            all.push(Named {
                family: Arc::clone(family),
                spec: Arc::clone(&family.spec),
                labels: Vec::new(),
                digits: 0,
            });
            all.extend(family.spec.also_as.iter().map(|other| {
                let spec = Arc::new(family.spec.renamed(other));
                let labels = other.labels.clone();
                Named { family: Arc::clone(family), spec, labels, digits: other.digits }
            }));
        }
        all
    }

    /// Visits the series of a family that a scrape shows, with the values under this name.
    pub fn each_named(&self, named: &Named, visit: Visit<'_>) {
        let omit_idle = self.cache.omits_idle() && named.spec.kind != Kind::Gauge;
        self.each(&named.family, &mut |labels, reading| {
            if omit_idle && reading.is_idle() {
                return;
            }
            let reading = if named.digits == 0 { reading } else { reading.shifted(named.digits) };
            if named.labels.is_empty() {
                visit(labels, reading);
            } else {
                visit(&relabelled(&named.labels, labels), reading);
            }
        });
    }

    /// Visits every series of a family.
    pub fn each(&self, family: &Family, visit: Visit<'_>) {
        let spec = family.spec();
        match source_of(spec) {
            Source::Family | Source::UnloggedFamily => {
                let position =
                    self.families().iter().position(|other| std::ptr::eq(&**other, family));
                let all = position
                    .and_then(|position| self.families.get(position))
                    .map_or(&[][..], Vec::as_slice);
                let mut labels = Vec::with_capacity(spec.dimensions.len());
                for FamilyReading { series, value } in all {
                    labels.clear();
                    labels.extend(spec.labelled(series.labels()));
                    visit(&labels, value.clone());
                }
            }
            source => {
                self.of_server(source, visit);
                self.models.iter().for_each(|model| self.of_model(model, spec, source, visit));
            }
        }
    }

    /// Returns the models.
    pub(super) fn models(&self) -> &[ModelReading] {
        &self.models
    }

    /// Visits the series of the server itself.
    pub(super) fn of_server(&self, source: Source, visit: Visit<'_>) {
        let hostname = self.cache.hostname();
        match source {
            Source::Answers => {
                for answers in &self.requests.answers {
                    let code = answers.code();
                    let labels = [
                        ("protocol", answers.protocol.as_str()),
                        ("route", answers.route.as_str()),
                        ("code", &*code),
                    ];
                    visit(&labels, whole(answers.count));
                }
            }
            Source::RequestFailures => {
                for failures in &self.requests.failures {
                    let labels = [
                        ("protocol", failures.protocol.as_str()),
                        ("route", failures.route.as_str()),
                        ("reason", failures.reason.as_str()),
                    ];
                    visit(&labels, whole(failures.count));
                }
            }
            Source::HttpClass(class) => {
                visit(
                    &[("Level", "Host"), ("Hostname", hostname)],
                    whole(self.requests.http_class(class)),
                );
            }
            Source::OpenStreams => {
                for protocol in Protocol::ALL {
                    let open = self.requests.streams(protocol);
                    visit(
                        &[("protocol", protocol.as_str())],
                        Reading::Number(Number::Signed(open)),
                    );
                }
            }
            Source::Model(LabelSet::Alias, ModelValue::Count(count, scale)) => {
                for AliasReading { alias, counts } in self.aliases.iter().flatten() {
                    let [name, version] =
                        [("model_name", &*alias.name), ("model_version", &*alias.version)];
                    visit(
                        &[name, version, ("hostname", hostname)],
                        scaled(counts.get(count), scale),
                    );
                }
            }
            _ => {}
        }
    }

    /// Visits the series of one model in a family with this source. The model may have been
    /// unloaded.
    pub(super) fn of_model(
        &self,
        model: &ModelReading,
        spec: &MetricSpec,
        source: Source,
        visit: Visit<'_>,
    ) {
        let Source::Model(set, value) = source else { return };
        if set == LabelSet::Alias && self.aliases.is_some() {
            return;
        }
        let ModelReading { series, cells, .. } = model;
        let mut labels = series.labels(set, self.cache.hostname());
        let mut by =
            |label: &'static str, values: &mut dyn Iterator<Item = (&'static str, Reading)>| {
                for (value, reading) in values {
                    labels.push((label, value));
                    visit(&labels, reading);
                    labels.pop();
                }
            };
        match value {
            ModelValue::Failures => {
                let counts = Failure::ALL.iter().zip(&cells.failures);
                by(
                    "reason",
                    &mut counts.map(|(failure, count)| (failure.as_str(), whole(count.get()))),
                );
            }
            ModelValue::Batches => {
                let counts = SendReason::ALL.iter().zip(&cells.sent);
                by(
                    "reason",
                    &mut counts.map(|(reason, count)| (reason.as_str(), whole(count.get()))),
                );
            }
            ModelValue::Finished if cells.tokens.is_on() => {
                let counts = cells.tokens.finished();
                by("reason", &mut counts.map(|(reason, count)| (reason, whole(count))));
            }
            ModelValue::Instances => {
                by(
                    "state",
                    &mut InstanceState::ALL.iter().map(|state| {
                        let level = cells.instances[state.index()].get();
                        (state.as_str(), Reading::Number(Number::Signed(level)))
                    }),
                );
            }
            ModelValue::Tenant(TenantValue::PromptTokens)
                if !cells.tokens.has(TokenValue::Prompt) => {}
            ModelValue::Tenant(TenantValue::GeneratedTokens) if !cells.tokens.is_on() => {}
            ModelValue::Tenant(value) => {
                for (tenant, usage) in cells.tenants.all() {
                    // Budgets apply to models that generate text, and to ensembles of them.
                    let is_shown = value != TenantValue::RateLimited
                        || cells.tokens.is_on()
                        || usage.get(value) > 0;
                    if !is_shown {
                        continue;
                    }
                    let tenant = self.cache.tenants().map_or("", |tenants| tenants.name(tenant));
                    let labels: Vec<(&str, &str)> =
                        labels.iter().copied().chain([("tenant", tenant)]).collect();
                    visit(&labels, scaled(usage.get(value), value.scale()));
                }
            }
            ModelValue::Objective(value) => {
                for objective in cells.objectives.current() {
                    let Some(number) = objective.read(value) else { continue };
                    let pairs = [("slo", objective.slo()), ("sli", objective.sli())];
                    let labels: Vec<(&str, &str)> = labels.iter().copied().chain(pairs).collect();
                    visit(&labels, Reading::Number(number));
                }
            }
            _ => {
                if let Some(reading) = self.of_value(model, spec, value) {
                    visit(&labels, reading);
                }
            }
        }
    }

    /// Returns the value of a metric with at most one series for each model.
    fn of_value(
        &self,
        model: &ModelReading,
        spec: &MetricSpec,
        value: ModelValue,
    ) -> Option<Reading> {
        let ModelReading { series, cells, .. } = model;
        let durations = &cells.durations;
        Some(match value {
            ModelValue::Count(count, scale) => scaled(cells.counts.get(count), scale),
            ModelValue::CacheCount(count, scale) if series.cached() => {
                scaled(cells.counts.get(count), scale)
            }
            ModelValue::Pending => Reading::Number(Number::Signed(cells.pending.get())),
            ModelValue::Durations(stage) => {
                Reading::Histogram(durations.histogram(stage)?.read(self.details))
            }
            ModelValue::FirstResponse => {
                Reading::Histogram(durations.first_response()?.read(self.details))
            }
            ModelValue::Stream(value) if cells.responses.is_on() => {
                cells.streams.read(value, self.details)?
            }
            ModelValue::Tokens(TokenValue::Queued) if cells.tokens.has(TokenValue::Queued) => {
                Reading::Number(Number::Float(model.queued()))
            }
            ModelValue::Tokens(value) if cells.tokens.has(value) => {
                cells.tokens.read(value, self.details)?
            }
            ModelValue::BatchSizes => Reading::Histogram(batch_sizes(model, spec, self.details)),
            // Triton does not show these for models whose requests are not all executed.
            ModelValue::Quantiles(Stage::Request) if series.cached() => return None,
            ModelValue::Quantiles(stage) => Reading::Summary(durations.summary(stage)?.read()),
            ModelValue::CacheQuantiles(lookup) => {
                Reading::Summary(durations.cache_summary(lookup)?.read())
            }
            ModelValue::CacheCount(..)
            | ModelValue::Stream(_)
            | ModelValue::Tokens(_)
            | ModelValue::Finished
            | ModelValue::Failures
            | ModelValue::Batches
            | ModelValue::Instances
            | ModelValue::Objective(_)
            | ModelValue::Tenant(_) => return None,
        })
    }
}

impl AliasReading {
    fn copy(alias: Arc<AliasCounts>) -> Self {
        Self { counts: alias.counts.clone(), alias }
    }
}

impl FamilyReading {
    /// Copies the series of a family that have a value.
    fn copy_all(family: &Family, details: Details) -> Vec<Self> {
        if !matches!(source_of(family.spec()), Source::Family | Source::UnloggedFamily) {
            return Vec::new();
        }
        let all = family.all().into_iter().filter(|series| !series.cell.is_empty());
        all.map(|series| Self { value: series.cell.read(details), series }).collect()
    }
}

/// Returns where the values of a metric are.
fn source_of(spec: &MetricSpec) -> Source {
    spec.builtin.map_or(Source::Family, Builtin::source)
}

fn whole(count: u64) -> Reading {
    Reading::Number(Number::Whole(count))
}

fn scaled(count: u64, scale: Scale) -> Reading {
    Reading::Number(match scale {
        Scale::One => Number::Whole(count),
        Scale::Micros => Number::Whole(count / 1000),
        Scale::FractionalMicros => Number::Float(TimeUnit::Microseconds.of_ns(count)),
        Scale::Seconds => Number::Float(TimeUnit::Seconds.of_ns(count)),
    })
}

/// Converts the statistics by batch size into a histogram.
fn batch_sizes(model: &ModelReading, spec: &MetricSpec, details: Details) -> Histogram {
    let bounds = own_or_defined(&model.series.own_buckets, spec);
    let native = spec.native.filter(|_| details.native).map(Native::new);
    let mut buckets: Vec<(f64, u64)> =
        bounds.iter().copied().chain([f64::INFINITY]).map(|bound| (bound, 0)).collect();
    let mut sum = 0.0;
    for (size, cell) in model.cells.batches().iter() {
        let size = *size as f64;
        sum += size * cell.count as f64;
        let at = bounds.partition_point(|&bound| bound < size);
        if let Some((_, count)) = buckets.get_mut(at) {
            *count += cell.count;
        }
        if let Some(native) = &native {
            native.observe(size, cell.count);
        }
    }
    Histogram { sum, buckets, native: native.map(|native| native.read()), ..Histogram::default() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos_base::error::Reason;
    use pharos_base::id::{ModelName, ModelVersion};

    use super::*;
    use crate::alias::Naming;
    use crate::cache::Settings;
    use crate::catalog::{Overrides, SHIPPED, Setting};
    use crate::record;

    /// A cache with one model that has a namespace, a tag, and all series that a model may have.
    fn cache() -> Cache {
        let latencies = Overrides {
            settings: vec![Setting::parse("summary_latencies", "true").unwrap()],
            ..Overrides::default()
        };
        let slos = "slos: [{name: fast, latency: {threshold: 1ms, share: 99%}}]\ntenants: \
                    {header: tenant}";
        let catalog = Catalog::parse(&format!("{SHIPPED}\n{slos}"), "m.yaml").unwrap();
        let cache = Cache::new(latencies.apply(catalog), Settings::new("h"));
        let tags = [("team".to_owned(), "t".to_owned())];
        let model = ModelVersion::new(ModelName::in_namespace("/srv/models", "m"), 1);
        let series = cache.model_loaded(&model, &tags);
        cache.model_cached(&series);
        cache.model_decoupled(&series);
        cache.model_generates(&series);
        record::inference_requested(&series);
        record::tenant_failed(&series, cache.tenant(b"t"), Reason::Backend);
        cache
    }

    /// The label sets of every family with a built-in source.
    fn label_sets(cache: &Cache) -> Vec<(Builtin, Vec<(String, String)>)> {
        let readings = Readings::new(cache, Details::default());
        let mut found = Vec::new();
        for family in readings.families() {
            let Some(builtin) = family.spec().builtin.filter(|builtin| !builtin.is_family()) else {
                continue;
            };
            readings.each(family, &mut |labels, _| {
                found.push((
                    builtin,
                    labels
                        .iter()
                        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                        .collect(),
                ));
            });
        }
        found
    }

    #[test]
    fn every_source_yields_series_with_the_labels_of_its_metric() {
        let found = label_sets(&cache());
        for builtin in Builtin::ALL.iter().copied().filter(|builtin| !builtin.is_family()) {
            let all: Vec<_> =
                found.iter().filter(|(of, _)| *of == builtin).map(|(_, labels)| labels).collect();
            // Triton does not show quantiles of requests that are not all executed.
            assert_eq!(all.is_empty(), builtin == Builtin::RequestSummary, "{}", builtin.name());
            for labels in all {
                let names: Vec<&str> = labels
                    .iter()
                    .map(|(name, _)| name.as_str())
                    .filter(|name| !["namespace", "_team"].contains(name))
                    .collect();
                let mut defined = builtin.dimensions().to_vec();
                defined.sort_unstable();
                let mut given = names.clone();
                given.sort_unstable();
                assert_eq!(given, defined, "{}", builtin.name());
            }
        }
    }

    /// One rule by the first part of the name: dashboards and rules combine metrics of the server
    /// by these labels.
    #[test]
    fn metrics_of_other_servers_have_the_namespace_in_a_label_and_those_of_this_server_in_the_name()
    {
        for (builtin, labels) in label_sets(&cache()) {
            let value = |name: &str| {
                labels.iter().find(|(label, _)| label == name).map(|(_, value)| value.as_str())
            };
            let shown = (value("model").or(value("model_name")), value("namespace"));
            let expected = match builtin.name().split('_').next() {
                Some("nv" | "ts") => (Some("m"), Some("/srv/models")),
                _ => (Some("/srv/models/m"), None),
            };
            assert!(shown == (None, None) || shown == expected, "{}: {labels:?}", builtin.name());
        }
    }

    #[test]
    fn label_sets_define_how_a_namespace_is_shown() {
        let pairs = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect::<Vec<_>>()
        };
        let triton =
            [("model", "m"), ("version", "1"), ("namespace", "/srv/models"), ("_team", "t")];
        let tagged = [("model", "/srv/models/m"), ("version", "1"), ("_team", "t")];
        let full = [("model", "/srv/models/m"), ("version", "1")];
        let alias = [
            ("model_name", "m"),
            ("model_version", "1"),
            ("hostname", "h"),
            ("namespace", "/srv/models"),
        ];
        let cache = cache();
        let found = label_sets(&cache);
        for (builtin, expected) in [
            (Builtin::RequestSuccess, &triton[..]),
            (Builtin::CacheHitSummary, &triton),
            (Builtin::RequestHistogram, &tagged),
            (Builtin::BatchSize, &tagged),
            (Builtin::StreamInterval, &tagged),
            (Builtin::InstanceRestarts, &full),
            (Builtin::TsLatency, &alias),
        ] {
            let labels: Vec<_> = found
                .iter()
                .filter(|(of, _)| *of == builtin)
                .map(|(_, labels)| labels.clone())
                .collect();
            assert_eq!(labels, [pairs(expected)], "{}", builtin.name());
        }
        cache.count_by_alias(Naming {
            default_version: "none",
            worker: Box::new(|_, _, _| String::new()),
        });
        record::alias_requested(&cache, &cache.alias("x", "").unwrap());
        let found = label_sets(&cache);
        let labels = found
            .iter()
            .find(|(of, _)| *of == Builtin::TsRequests)
            .map(|(_, labels)| labels.clone());
        assert_eq!(
            labels,
            Some(pairs(&[("model_name", "x"), ("model_version", "none"), ("hostname", "h")]))
        );
    }
}
