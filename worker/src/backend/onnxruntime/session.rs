//! Opens a session with the options of its model.
//!
//! Contract for `unsafe`: no other code uses the builder while the runtime changes its options.

use std::path::Path;

use ort::AsPointer;
use ort::environment::Environment;
use ort::ep::ExecutionProviderDispatch;
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use pharos::model::{GraphLevel, SessionOptions};

/// A session to open.
pub(super) struct Wanted<'a> {
    pub(super) options: &'a SessionOptions,
    /// The number of threads that the server gives to the instance.
    pub(super) threads: usize,
    /// The model's file.
    pub(super) path: &'a Path,
    /// The version's directory.
    pub(super) directory: &'a Path,
}

impl Wanted<'_> {
    /// Opens a session on these providers, or on processors without them. Its threads do not spin
    /// while they wait, so that instances can share cores, unless the model's options say
    /// otherwise.
    pub(super) fn open(
        &self,
        environment: &Environment,
        providers: Vec<ExecutionProviderDispatch>,
    ) -> Result<Session, ort::Error> {
        let options = self.options;
        let inter = if options.parallel { self.threads } else { 1 };
        let mut builder = Session::builder(environment)?
            .with_optimization_level(level(options.level))?
            .with_parallel_execution(options.parallel)?
            .with_intra_threads(options.intra_threads.unwrap_or(self.threads))?
            .with_inter_threads(options.inter_threads.unwrap_or(inter))?
            .with_config_entry("session.intra_op.allow_spinning", "0")?
            .with_config_entry("session.inter_op.allow_spinning", "0")?;
        for (key, value) in &options.entries {
            builder = builder.with_config_entry(key, value)?;
        }
        if let Some(pattern) = options.pattern {
            builder = builder.with_memory_pattern(pattern)?;
        }
        for library in &options.libraries {
            builder = builder.with_operator_library(self.directory.join(library))?;
        }
        if let Some(arena) = options.arena {
            use_arena(&mut builder, arena)?;
        }
        builder.with_execution_providers(providers)?.commit_from_file(self.path)
    }
}

fn level(level: GraphLevel) -> GraphOptimizationLevel {
    match level {
        GraphLevel::Disabled => GraphOptimizationLevel::Disable,
        GraphLevel::Basic => GraphOptimizationLevel::Level1,
        GraphLevel::Extended => GraphOptimizationLevel::Level2,
        GraphLevel::All => GraphOptimizationLevel::All,
    }
}

/// Enables or disables the arena of host memory, for which the library has no safe function.
fn use_arena(builder: &mut SessionBuilder, arena: bool) -> Result<(), ort::Error> {
    let api = ort::api();
    let switch = if arena { api.EnableCpuMemArena } else { api.DisableCpuMemArena };
    // SAFETY: the pointer refers to the builder's options; `&mut` guarantees exclusive access.
    unsafe { ort::Error::result_from_status(switch(builder.ptr().cast_mut())) }
}
