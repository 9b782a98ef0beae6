//! The repository of a simulation: models and ensembles in a directory, which change while they
//! serve.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use pharos::model::{CodeOrigin, LoadLimits, ModelConfig};
use pharos::repository::memory_budget::{Memory, MemoryBytes};
use pharos::service::ModelPolicy;
use pharos::supervisor;
use tempfile::TempDir;

use super::super::world::Random;
use crate::launch::Program;
use crate::loader::{
    AtStart, BackendSettings, Mode, OnDemandSettings, Settings, Threads, WorkerSpin,
};
use crate::store;
use pharos_os::descriptors::Descriptors;
use pharos_telemetry::system::{Devices, HostPolicies, Roots};

/// Models with processes, and ensembles with the models of their two steps.
pub(super) const MODELS: [&str; 6] = ["m0", "m1", "m2", "m3", "m4", "m5"];
pub(super) const ENSEMBLES: [(&str, [&str; 2]); 2] = [("e0", ["m0", "m1"]), ("e1", ["m1", "e0"])];

const TENSORS: &str = "max_batch_size: 4 input { name: 'IN' data_type: TYPE_UINT64 dims: 1 }
    output { name: 'OUT' data_type: TYPE_UINT64 dims: 1 }";

/// Returns the names of all models and ensembles.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    MODELS.into_iter().chain(ENSEMBLES.into_iter().map(|(name, _)| name))
}

/// A directory of models.
pub(super) struct Repository {
    directory: TempDir,
    /// Counts the changes, so that no file looks like before.
    changes: usize,
}

/// Changes nothing.
#[derive(Debug)]
struct NoPolicy;

impl ModelPolicy for NoPolicy {
    fn supervision(&self, _: &ModelConfig, settings: supervisor::Settings) -> supervisor::Settings {
        settings
    }

    fn metric_name<'a>(&self, _: &'a ModelConfig) -> Option<(&'a str, &'a str)> {
        None
    }

    fn origin<'a>(&self, _: &dyn Fn(&str) -> Option<&'a str>) -> CodeOrigin {
        CodeOrigin::Operator
    }
}

impl Repository {
    /// Creates the repository with all models.
    pub(super) fn new() -> Self {
        let mut repository = Self { directory: tempfile::tempdir().unwrap(), changes: 0 };
        repository.restore();
        repository
    }

    /// Writes the usual files of all models.
    pub(super) fn restore(&mut self) {
        for name in MODELS {
            self.write(name, &model(1, 0), 1);
        }
        for (name, steps) in ENSEMBLES {
            self.write(name, &ensemble(steps), 1);
        }
    }

    fn write(&mut self, name: &str, config: &str, versions: u64) {
        let directory = self.directory.path().join(name);
        for version in 1..=2 {
            let version_directory = directory.join(version.to_string());
            if version <= versions {
                fs::create_dir_all(version_directory).unwrap();
            } else {
                let _ = fs::remove_dir(version_directory);
            }
        }
        self.changes += 1;
        let config = format!("{config} # change {}", self.changes);
        fs::write(directory.join("config.pbtxt"), config).unwrap();
    }

    /// Changes a model: its configuration, its instances, its versions, or whether it is there at
    /// all.
    pub(super) fn change(&mut self, name: &str, random: &mut Random) {
        let usual = match ENSEMBLES.iter().find(|(ensemble, _)| *ensemble == name) {
            Some((_, steps)) => ensemble(*steps),
            None => model(1 + random.below(4) / 3, random.below(3)),
        };
        match random.below(8) {
            0 => self.write(name, "backend: 'builtin' max_batch_size: -5", 1),
            1 => {
                let _ = fs::remove_dir_all(self.directory.path().join(name));
            }
            2 => self.write(name, &usual, 2),
            _ => self.write(name, &usual, 1),
        }
    }

    /// Returns the settings of a loader of this repository.
    pub(super) fn settings(&self, mode: Mode, limit: Option<u64>, random: &mut Random) -> Settings {
        let idle = random.chance(2).then_some(Duration::from_millis(400));
        let limits = limit.map(|limit| (Memory::Main, limit));
        Settings {
            stores: store::Settings {
                locations: vec![store::Location::Directory(self.directory.path().to_owned())],
                registered: None,
                namespaces: false,
                model_name: None,
                cache_directory: None,
            },
            program: Program::default(),
            worker_uploads: false,
            auto_complete: false,
            default_max_batch_size: 0,
            backend_settings: BackendSettings::default(),
            at_start: if mode.by_request() { AtStart::Named(Vec::new()) } else { AtStart::All },
            mode,
            on_demand: OnDemandSettings {
                max_waiting: 1_000,
                idle,
                memory_limits: MemoryBytes::from_iter(limits),
                memory_pressure: self.directory.path().join("none"),
            },
            model_policy: Arc::new(NoPolicy),
            config_name: None,
            load_limits: LoadLimits::default(),
            load_threads: 1 + usize::try_from(random.below(4)).unwrap(),
            load_retries: u32::try_from(random.below(2)).unwrap(),
            start_timeout: Duration::from_secs(5),
            python_start_timeout: None,
            max_backoff: Duration::from_millis(500),
            max_wait: Duration::from_secs(5),
            execution_timeout: Some(Duration::from_secs(2)),
            worker_threads: 1,
            worker_spin: WorkerSpin { usual_us: 0, limited_us: 0 },
            rate_limits: None,
            devices: Devices::new(None, None, [], &Roots::new(self.directory.path())),
            pinned_pool: 0,
            policies: HostPolicies::default(),
            descriptors: Descriptors::new(10_000),
            threads: Threads::default(),
            response_cache: None,
        }
    }
}

fn model(instances: u64, delay_us: u64) -> String {
    format!(
        "backend: 'builtin' {TENSORS} dynamic_batching {{ max_queue_delay_microseconds: \
         {delay_us} }}
         instance_group {{ count: {instances} kind: KIND_CPU }}"
    )
}

fn ensemble([first, second]: [&str; 2]) -> String {
    let step = |model: &str, input: &str, output: &str| {
        format!(
            "step {{ model_name: '{model}' model_version: -1 input_map {{ key: 'IN' value: \
             '{input}' }}
             output_map {{ key: 'OUT' value: '{output}' }} }}"
        )
    };
    let steps = step(first, "IN", "BETWEEN") + &step(second, "BETWEEN", "OUT");
    format!("platform: 'ensemble' {TENSORS} ensemble_scheduling {{ {steps} }}")
}
