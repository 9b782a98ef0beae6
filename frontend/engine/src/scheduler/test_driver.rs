//! A driver without instances, for tests.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use pharos::id::ModelVersion;
use pharos::metrics::cache::{Cache, Settings};
use pharos::metrics::catalog::Catalog;
use pharos::model::{Completion, Draft};
use pharos::timeline::ComputeStamps;
use pharos::wire::Done;

use super::{Driver, DriverSettings, Timer, settings};

/// Creates the driver of version 1 of a model 'm' with this configuration, and the metrics in which
/// it counts.
pub(crate) fn create(config: &str) -> (Arc<Cache>, Arc<Driver>) {
    let cache = Arc::new(Cache::new(Catalog::shipped(), Settings::new("h")));
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let draft = Draft::from_text(config, "config.pbtxt").unwrap();
    let config =
        Arc::new(draft.complete(&Completion { directory: "m", ..Completion::default() }).unwrap());
    let scheduling = settings::of(&config);
    let settings =
        DriverSettings { config, series, scheduling, limits: None, response_cache: None };
    (cache, Driver::new(settings, Timer::start().unwrap()))
}

/// The reply to a batch that has succeeded without outputs.
pub(crate) fn done(batch: u64) -> Done {
    Done {
        batch,
        stamps: ComputeStamps::default(),
        error: None,
        failed: Vec::new(),
        outputs: Vec::new(),
        parameters: Vec::new(),
        rescheduled: Vec::new(),
        open: Vec::new(),
        held: false,
    }
}
