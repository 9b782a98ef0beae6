//! Shares the limit of open files between instances and connections. Each instance holds
//! descriptors of this process: its socket, its memory, its output. A load that needs more than
//! remain fails with that reason, so that neither connections nor other models run out of
//! descriptors.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Resource, getrlimit, setrlimit};

/// Descriptors of an instance: its process, two sockets, the pipes of its output, its errors and
/// its metrics wake-ups, and one spare. Its memory is mapped, not held open.
pub const PER_INSTANCE: usize = 7;

/// Descriptors for other uses: listeners, logs, files being read, processes that complete
/// configurations, starting workers.
const OTHERS: usize = 96;

/// The maximum number of connections of a listener for which descriptors are reserved.
const CONNECTIONS: usize = 16_384;

/// The descriptors of instances.
#[derive(Debug)]
pub struct Descriptors {
    limit: usize,
    /// The maximum number of instances.
    most: usize,
    used: AtomicUsize,
}

/// The descriptors of one instance, until it is dropped.
#[derive(Debug)]
pub struct Reserved(Arc<Descriptors>);

/// Raises the limit of open files to the hard limit: each connection needs one, and the default is
/// often only 1024. Returns the new limit.
pub fn raise() -> usize {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit of open files, which also limits connections");
    }
    size(getrlimit(Resource::Nofile).current)
}

/// Returns the number of connections of one listener that the limit of open files allows.
pub fn connections() -> usize {
    of_connections(size(getrlimit(Resource::Nofile).current)).max(1)
}

fn size(limit: Option<u64>) -> usize {
    limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

fn of_connections(limit: usize) -> usize {
    CONNECTIONS.min(limit / 3)
}

impl Descriptors {
    /// Divides this limit of open files.
    pub fn new(limit: usize) -> Arc<Self> {
        let most =
            limit.saturating_sub(of_connections(limit)).saturating_sub(OTHERS) / PER_INSTANCE;
        Arc::new(Self { limit, most, used: AtomicUsize::new(0) })
    }

    /// Describes how the limit is divided, for the log.
    pub fn describe(&self) -> String {
        let Self { limit, most, .. } = self;
        format!(
            "open files: limit {limit}, {PER_INSTANCE} per model instance, at most {most} \
             instances"
        )
    }

    /// Returns a warning if this number of instances exceeds the remaining descriptors.
    pub fn warning(&self, models: usize, instances: usize) -> Option<String> {
        let free = self.most.saturating_sub(self.used.load(Ordering::Relaxed));
        (instances > free).then(|| {
            format!(
                "{models} models with {instances} instances need {} file descriptors, enough for \
                 only {free} instances; further ones are not loaded: {}",
                instances.saturating_mul(PER_INSTANCE),
                self.advice()
            )
        })
    }

    /// Reserves the descriptors for this number of instances of a model.
    ///
    /// # Errors
    /// Too few descriptors are left.
    pub fn reserve(
        self: &Arc<Self>,
        model: &str,
        instances: usize,
    ) -> Result<Vec<Reserved>, String> {
        let reserved = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(instances).filter(|used| *used <= self.most)
        });
        match reserved {
            Ok(_) => Ok((0..instances).map(|_| Reserved(self.clone())).collect()),
            Err(used) => Err(format!(
                "too few file descriptors for model '{model}': it needs {PER_INSTANCE} for each \
                 of {instances} instances, and there is room for {} more; {}",
                self.most.saturating_sub(used),
                self.advice()
            )),
        }
    }

    fn advice(&self) -> String {
        let Self { limit, most, .. } = self;
        format!(
            "the limit of open files is {limit}, enough for connections and {most} instances; \
             raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of \
             docker)"
        )
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn refuses_instances_over_the_limit_until_others_are_dropped() {
        let descriptors = Descriptors::new(500);
        assert_eq!(descriptors.most, (500 - 166 - 96) / PER_INSTANCE);
        assert_eq!(Descriptors::new(64).most, 0);
        assert!(Descriptors::new(usize::MAX).most > 1 << 40);
        let all = descriptors.reserve("m", descriptors.most - 1).unwrap();
        let refused = descriptors.reserve("n", 2).unwrap_err();
        assert!(refused.contains("model 'n'") && refused.contains("room for 1 more"), "{refused}");
        assert!(
            descriptors
                .warning(100, 100)
                .unwrap()
                .contains("100 instances need 700 file descriptors")
        );
        assert_eq!(descriptors.warning(1, 1), None);
        drop(all);
        assert_eq!(descriptors.reserve("n", 2).unwrap().len(), 2);
        assert_eq!(descriptors.used.load(Ordering::Relaxed), 0);
    }
}
