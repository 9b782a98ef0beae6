//! The amount of each resource, and how much is in use.

use std::collections::BTreeMap;

/// An amount of a resource that an instance needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// The resource's name.
    pub name: String,
    /// The device; `None` for a global resource, which all devices share.
    pub device: Option<u32>,
    /// The number of units; 0 for none.
    pub count: u32,
}

/// A configured amount of a resource (`--rate-limit-resource`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The resource's name.
    pub name: String,
    /// The number of units.
    pub count: u32,
    /// The device; `None` for each device. Ignored for global resources, as in Triton.
    pub device: Option<u32>,
}

/// The amount and use of a resource on one device, or of a global one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The resource's name.
    pub name: String,
    /// The device; `None` for a global resource.
    pub device: Option<u32>,
    /// The total number of units.
    pub total: u32,
    /// The number of units held. It exceeds the total after a model was unloaded that needed more
    /// than all others.
    pub used: u64,
}

#[derive(Debug)]
struct Pool {
    usage: Usage,
    /// The number of instances that need it; an unused pool may be reused for another resource.
    members: usize,
}

/// All resources. A pool is identified by its position, which does not change while an instance
/// needs it.
#[derive(Debug, Default)]
pub(super) struct Pools {
    limits: Vec<Limit>,
    pools: Vec<Pool>,
}

impl Pools {
    pub(super) fn new(limits: Vec<Limit>) -> Self {
        Self { limits, pools: Vec::new() }
    }

    /// Adds instances, all or none, and returns the pools and amounts that each needs.
    ///
    /// # Errors
    /// See [`RateLimiter::register`](super::RateLimiter::register).
    pub(super) fn add<'a>(
        &mut self,
        instances: impl Iterator<Item = &'a [Need]>,
    ) -> Result<Vec<Vec<(usize, u32)>>, String> {
        let instances: Vec<&[Need]> = instances.collect();
        let mut most = BTreeMap::<(&str, Option<u32>), u32>::new();
        for need in instances.iter().copied().flatten().filter(|need| need.count > 0) {
            let most = most.entry((&need.name, need.device)).or_default();
            *most = need.count.max(*most);
        }
        for (&(name, device), &count) in &most {
            self.check_limit(name, device, count)?;
            let here = self.in_use().map(|pool| (pool.usage.name.as_str(), pool.usage.device));
            if here
                .chain(most.keys().copied())
                .any(|other| other.0 == name && other.1.is_none() != device.is_none())
            {
                return Err(format!(
                    "Resource \"{name}\" is present as both global and device-specific resource \
                     in the model configuration."
                ));
            }
        }
        Ok(instances.into_iter().map(|needs| self.enter(needs)).collect())
    }

    /// Removes the needs of an instance; [`Pools::resize`] must follow.
    pub(super) fn remove(&mut self, needs: &[(usize, u32)]) {
        for &(pool, _) in needs {
            if let Some(pool) = self.pools.get_mut(pool) {
                pool.members = pool.members.saturating_sub(1);
            }
        }
    }

    /// Sets the amounts for the remaining instances.
    pub(super) fn resize<'a>(&mut self, instances: impl Iterator<Item = &'a [(usize, u32)]>) {
        let mut most = vec![0; self.pools.len()];
        for &(pool, count) in instances.flatten() {
            most[pool] = count.max(most[pool]);
        }
        for (pool, most) in self.pools.iter_mut().zip(most) {
            let limit = limit(&self.limits, &pool.usage.name, pool.usage.device);
            pool.usage.total = limit.unwrap_or(most);
        }
    }

    /// Returns the number of free units.
    pub(super) fn free(&self, pool: usize) -> u64 {
        self.pools
            .get(pool)
            .map_or(0, |pool| u64::from(pool.usage.total).saturating_sub(pool.usage.used))
    }

    pub(super) fn take(&mut self, needs: &[(usize, u32)]) {
        for &(pool, count) in needs {
            self.pools[pool].usage.used += u64::from(count);
        }
    }

    pub(super) fn give_back(&mut self, needs: &[(usize, u32)]) {
        for &(pool, count) in needs {
            let used = &mut self.pools[pool].usage.used;
            *used = used.saturating_sub(u64::from(count));
        }
    }

    pub(super) fn usage(&self) -> Vec<Usage> {
        let mut all: Vec<Usage> = self.in_use().map(|pool| pool.usage.clone()).collect();
        all.sort_by(|one, other| (&one.name, one.device).cmp(&(&other.name, other.device)));
        all
    }

    fn in_use(&self) -> impl Iterator<Item = &Pool> {
        self.pools.iter().filter(|pool| pool.members > 0)
    }

    fn check_limit(&self, name: &str, device: Option<u32>, needed: u32) -> Result<(), String> {
        match limit(&self.limits, name, device) {
            Some(limit) if limit < needed => Err(format!(
                "Resource count for \"{name}\" is limited to {limit} which will prevent \
                 scheduling of one or more model instances, the minimum required count is {needed}"
            )),
            _ => Ok(()),
        }
    }

    /// Adds one instance and returns its pools. If it names a resource twice, it needs the larger
    /// amount.
    fn enter(&mut self, needs: &[Need]) -> Vec<(usize, u32)> {
        let mut entered = BTreeMap::<usize, u32>::new();
        for need in needs.iter().filter(|need| need.count > 0) {
            let pool = self.pool(need);
            let count = entered.entry(pool).or_default();
            if *count == 0 {
                self.pools[pool].members += 1;
            }
            *count = need.count.max(*count);
        }
        entered.into_iter().collect()
    }

    /// Returns the position of a resource, and raises its amount to at least this need.
    fn pool(&mut self, need: &Need) -> usize {
        let Need { name, device, count } = need;
        let limit = limit(&self.limits, name, *device);
        if let Some(found) = self.pools.iter().position(|pool| {
            pool.members > 0 && (&pool.usage.name, pool.usage.device) == (name, *device)
        }) {
            let total = &mut self.pools[found].usage.total;
            *total = limit.unwrap_or((*total).max(*count));
            return found;
        }
        let usage =
            Usage { name: name.clone(), device: *device, total: limit.unwrap_or(*count), used: 0 };
        let new = Pool { usage, members: 0 };
        match self.pools.iter().position(|pool| pool.members == 0) {
            Some(unused) => {
                self.pools[unused] = new;
                unused
            }
            None => {
                self.pools.push(new);
                self.pools.len() - 1
            }
        }
    }
}

/// Returns the configured limit of a resource: the larger of the limits for its device and for each
/// device. A global resource takes the largest of all limits; of several limits for the same device
/// the smallest applies (Triton's rules, tested with 2.51).
fn limit(limits: &[Limit], name: &str, device: Option<u32>) -> Option<u32> {
    let mut by_device = BTreeMap::<Option<u32>, u32>::new();
    for limit in limits.iter().filter(|limit| limit.name == name) {
        let smallest = by_device.entry(limit.device).or_insert(limit.count);
        *smallest = limit.count.min(*smallest);
    }
    by_device
        .into_iter()
        .filter(|(limited, _)| device.is_none() || limited.is_none() || *limited == device)
        .map(|(_, count)| count)
        .max()
}
