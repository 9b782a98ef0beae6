//! `TRITONSERVER_MetricFamily`, `TRITONSERVER_Metric` and `TRITONSERVER_MetricArgs`: metrics that a
//! backend records. They are part of the server's metrics, as the metrics of Python models are.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use pharos::infer::Parameter;
use pharos::metrics::catalog::Kind;
use pharos_backend::{Described, Series};

use crate::error::interface;
use crate::fault::Fault;
use crate::foreign::{list, put, text};
use crate::message::OwnParameter;
use crate::object::{self, Object, kinds};
use crate::process;

/// The kinds of metrics. `TRITONSERVER_MetricKind`.
const COUNTER: c_int = 0;
const GAUGE: c_int = 1;
const HISTOGRAM: c_int = 2;

/// `TRITONSERVER_MetricFamily`.
pub(crate) struct Family {
    name: String,
    description: String,
    kind: Kind,
    deleted: Arc<AtomicBool>,
}

/// `TRITONSERVER_Metric`: a series.
pub(crate) struct Metric {
    /// `None` in a process that only completes a configuration.
    series: Option<Series>,
    kind: Kind,
    /// The value that this process has recorded, as the bits of a double. Shared by all objects of
    /// the series.
    value: Arc<AtomicU64>,
    family_deleted: Arc<AtomicBool>,
}

/// `TRITONSERVER_MetricArgs`. Locked to read or write it only.
#[derive(Default)]
pub(crate) struct MetricArgs(Mutex<Option<Vec<f64>>>);

kinds! {
    Family = 17, "a metric family";
    Metric = 18, "a metric";
    MetricArgs = 19, "the arguments of a metric";
}

/// The values of series by the name of the metric and the values of its labels.
type Values = BTreeMap<(String, Vec<String>), Arc<AtomicU64>>;

/// The values of all series of this process: several objects may be of one series. Locked to find
/// or add a value only.
static VALUES: Mutex<Values> = Mutex::new(BTreeMap::new());

fn number_of(kind: Kind) -> c_int {
    match kind {
        Kind::Counter => COUNTER,
        Kind::Gauge => GAUGE,
        _ => HISTOGRAM,
    }
}

impl Metric {
    fn new(
        family: &Family,
        labels: &[*const Object<OwnParameter>],
        buckets: Option<Vec<f64>>,
    ) -> Result<Self, Fault> {
        if family.deleted.load(Ordering::Acquire) {
            return Err(Fault::invalid("a metric family is used after its deletion"));
        }
        let is_histogram = family.kind == Kind::Histogram;
        if is_histogram != buckets.is_some() {
            return Err(Fault::invalid(match is_histogram {
                true => "a histogram needs arguments with its buckets",
                false => "only histograms have arguments",
            }));
        }
        let mut dimensions = Vec::new();
        let mut values = Vec::new();
        for label in labels {
            // SAFETY: the contract of this package.
            let label = unsafe { object::get(*label) }?;
            let Some(Parameter::String(value)) = &label.value else {
                return Err(Fault::invalid(format!(
                    "the label '{}' is not a string; labels of metrics are strings",
                    label.name
                )));
            };
            dimensions.push(label.name.clone());
            values.push(value.clone());
        }
        let described = Described {
            name: family.name.clone(),
            kind: family.kind,
            description: family.description.clone(),
            buckets: buckets.unwrap_or_default(),
            dimensions,
        };
        let texts: Vec<&str> = values.iter().map(String::as_str).collect();
        let series =
            process::runtime().map(|runtime| runtime.metrics().own_series(&described, &texts));
        let series = series.transpose().map_err(|error| Fault::invalid(error.to_string()))?;
        let value = VALUES.lock().entry((described.name, values)).or_default().clone();
        let family_deleted = family.deleted.clone();
        Ok(Self { series, kind: family.kind, value, family_deleted })
    }

    fn check(&self) -> Result<(), Fault> {
        if self.family_deleted.load(Ordering::Acquire) {
            return Err(Fault::internal(
                "Invalid metric operation as the corresponding 'MetricFamily' has been deleted",
            ));
        }
        Ok(())
    }

    fn record(&self, value: f64) {
        if let Some(series) = &self.series {
            series.add_or_update(value);
        }
    }

    fn wrong(&self, verb: &str) -> Fault {
        Fault::unsupported(format!("a {} does not support {verb}", self.kind.as_str()))
    }
}

interface! {
    /// `TRITONSERVER_MetricFamilyNew`.
    fn family_new(
        family: *mut *mut Object<Family>,
        kind: c_int,
        name: *const c_char,
        description: *const c_char,
    ) {
        let kind = match kind {
            COUNTER => Kind::Counter,
            GAUGE => Kind::Gauge,
            HISTOGRAM => Kind::Histogram,
            kind => {
                return Err(Fault::invalid(format!(
                    "the kind of a metric is {kind}; 0 (counter), 1 (gauge) and 2 (histogram) are \
                     allowed"
                )));
            }
        };
        let name = text(name, "the name of a metric family")?.to_owned();
        let description = text(description, "the description of a metric family")?.to_owned();
        object::give(family, Family { name, description, kind, deleted: Arc::default() })
    }

    /// `TRITONSERVER_MetricFamilyDelete`: invalidates the metrics of the family.
    fn family_delete(family: *mut Object<Family>) {
        object::take(family)?.deleted.store(true, Ordering::Release);
        Ok(())
    }

    /// `TRITONSERVER_GetMetricFamilyKind`.
    fn family_kind(family: *const Object<Family>, kind: *mut c_int) {
        put(kind, number_of(object::get(family)?.kind))
    }

    /// `TRITONSERVER_MetricNew`.
    fn new(
        metric: *mut *mut Object<Metric>,
        family: *const Object<Family>,
        labels: *const *const Object<OwnParameter>,
        count: u64,
    ) {
        let labels = list(labels, count, "the list of labels")?;
        object::give(metric, Metric::new(object::get(family)?, labels, None)?)
    }

    /// `TRITONSERVER_MetricNewWithArgs`.
    fn new_with_args(
        metric: *mut *mut Object<Metric>,
        family: *const Object<Family>,
        labels: *const *const Object<OwnParameter>,
        count: u64,
        args: *const Object<MetricArgs>,
    ) {
        let labels = list(labels, count, "the list of labels")?;
        let buckets = if args.is_null() { None } else { object::get(args)?.0.lock().clone() };
        object::give(metric, Metric::new(object::get(family)?, labels, buckets)?)
    }

    /// `TRITONSERVER_MetricDelete`.
    fn delete(metric: *mut Object<Metric>) {
        object::delete(metric)
    }

    /// `TRITONSERVER_MetricArgsNew`.
    fn args_new(args: *mut *mut Object<MetricArgs>) {
        object::give(args, MetricArgs::default())
    }

    /// `TRITONSERVER_MetricArgsDelete`.
    fn args_delete(args: *mut Object<MetricArgs>) {
        object::delete(args)
    }

    /// `TRITONSERVER_MetricArgsSetHistogram`.
    fn args_set_histogram(args: *const Object<MetricArgs>, buckets: *const f64, count: u64) {
        let buckets = list(buckets, count, "the list of buckets")?.to_vec();
        *object::get(args)?.0.lock() = Some(buckets);
        Ok(())
    }

    /// `TRITONSERVER_GetMetricKind`.
    fn kind(metric: *const Object<Metric>, kind: *mut c_int) {
        put(kind, number_of(object::get(metric)?.kind))
    }

    /// `TRITONSERVER_MetricValue`: the value that this process has recorded.
    fn value(metric: *const Object<Metric>, value: *mut f64) {
        let metric = object::get(metric)?;
        metric.check()?;
        if metric.kind == Kind::Histogram {
            return Err(metric.wrong("reading a value"));
        }
        put(value, f64::from_bits(metric.value.load(Ordering::Relaxed)))
    }

    /// `TRITONSERVER_MetricIncrement`.
    fn increment(metric: *const Object<Metric>, by: f64) {
        let metric = object::get(metric)?;
        metric.check()?;
        match metric.kind {
            Kind::Counter if by < 0.0 => {
                return Err(Fault::invalid(format!(
                    "a counter is incremented by {by}; numbers from 0 are allowed"
                )));
            }
            Kind::Counter | Kind::Gauge => {}
            _ => return Err(metric.wrong("increments")),
        }
        let add = |bits: u64| Some((f64::from_bits(bits) + by).to_bits());
        let before = metric.value.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        let now = f64::from_bits(before.unwrap_or_default()) + by;
        metric.record(if metric.kind == Kind::Counter { by } else { now });
        Ok(())
    }

    /// `TRITONSERVER_MetricSet`.
    fn set(metric: *const Object<Metric>, value: f64) {
        let metric = object::get(metric)?;
        metric.check()?;
        if metric.kind != Kind::Gauge {
            return Err(metric.wrong("setting a value"));
        }
        metric.value.store(value.to_bits(), Ordering::Relaxed);
        metric.record(value);
        Ok(())
    }

    /// `TRITONSERVER_MetricObserve`.
    fn observe(metric: *const Object<Metric>, value: f64) {
        let metric = object::get(metric)?;
        metric.check()?;
        if metric.kind != Kind::Histogram {
            return Err(metric.wrong("observations"));
        }
        metric.record(value);
        Ok(())
    }
}
