//! How many instances the limit of open files allows. Each instance holds descriptors of this process while it exists:
//! its socket, its memory, its output. A load that would take more than are left fails with that reason, so that neither
//! connections nor other models find the process without descriptors.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Resource, getrlimit, setrlimit};

/// Descriptors that an instance takes: its process, two sockets, the pipes of its output, of its errors and of its metrics' bell;
/// and one to spare. Its memory is mapped, not held open.
pub const PER_INSTANCE: usize = 7;

/// Descriptors that neither instances nor connections take: listeners, logs, files that are being read, processes that complete
/// configurations, the ends of workers that are being started.
const OTHERS: usize = 96;

/// The most connections of a listener that are planned for.
const CONNECTIONS: usize = 16_384;

/// The descriptors of instances.
#[derive(Debug)]
pub struct Descriptors {
    limit: usize,
    /// Instances that there may be.
    most: usize,
    used: AtomicUsize,
}

/// The descriptors of one instance, until it is dropped.
#[derive(Debug)]
pub struct Reserved(Arc<Descriptors>);

/// Raises the limit of open files as far as this user may: each connection is one, and many systems start processes with room for
/// 1024. Gives the limit then.
pub fn raise() -> usize {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files, and so of connections, cannot be raised");
    }
    size(getrlimit(Resource::Nofile).current)
}

/// Connections of one listener that the limit of open files leaves room for.
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
    /// Shares out this limit of open files.
    pub fn new(limit: usize) -> Arc<Self> {
        let most = limit.saturating_sub(of_connections(limit)).saturating_sub(OTHERS) / PER_INSTANCE;
        Arc::new(Self { limit, most, used: AtomicUsize::new(0) })
    }

    /// How the limit is shared out, for the log.
    pub fn describe(&self) -> String {
        let Self { limit, most, .. } = self;
        format!("open files: {limit} allowed, {PER_INSTANCE} for each instance of a model: at most {most} instances")
    }

    /// What is said when so many instances of so many models are more than there is room for.
    pub fn warning(&self, models: usize, instances: usize) -> Option<String> {
        let free = self.most.saturating_sub(self.used.load(Ordering::Relaxed));
        (instances > free).then(|| {
            format!(
                "{models} models with {instances} instances need {} file descriptors, and there is room for {free} instances; \
                 those beyond it are not loaded: {}",
                instances.saturating_mul(PER_INSTANCE),
                self.advice()
            )
        })
    }

    /// Takes the descriptors of so many instances of a model.
    ///
    /// # Errors
    /// Fewer are left.
    pub fn reserve(self: &Arc<Self>, model: &str, instances: usize) -> Result<Vec<Reserved>, String> {
        let more = |used: usize| used.checked_add(instances).filter(|used| *used <= self.most);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok((0..instances).map(|_| Reserved(self.clone())).collect()),
            Err(used) => Err(format!(
                "too few file descriptors for model '{model}': it has {instances} instances of {PER_INSTANCE} descriptors each, \
                 and there is room for {} more; {}",
                self.most.saturating_sub(used),
                self.advice()
            )),
        }
    }

    fn advice(&self) -> String {
        let Self { limit, most, .. } = self;
        format!(
            "the limit of open files is {limit}, which leaves room for {most} instances beside connections; raise the hard \
             limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)"
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
    fn instances_beyond_the_limit_are_refused_until_others_go() {
        let descriptors = Descriptors::new(500);
        assert_eq!(descriptors.most, (500 - 166 - 96) / PER_INSTANCE);
        assert_eq!(Descriptors::new(64).most, 0);
        assert!(Descriptors::new(usize::MAX).most > 1 << 40);
        let all = descriptors.reserve("m", descriptors.most - 1).unwrap();
        let refused = descriptors.reserve("n", 2).unwrap_err();
        assert!(refused.contains("model 'n'") && refused.contains("room for 1 more"), "{refused}");
        assert!(descriptors.warning(100, 100).unwrap().contains("100 instances need 700 file descriptors"));
        assert_eq!(descriptors.warning(1, 1), None);
        drop(all);
        assert_eq!(descriptors.reserve("n", 2).unwrap().len(), 2);
        assert_eq!(descriptors.used.load(Ordering::Relaxed), 0);
    }
}
