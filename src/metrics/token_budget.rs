//! The budgets of tenants for tokens of models that generate text: token buckets without locks.
//!
//! The bucket of a tenant holds the tokens of one minute and refills continuously. Its state is one
//! number: the time at which it will be full again (the theoretical arrival time of the generic
//! cell rate algorithm). Tokens are charged when they are counted, after the request was accepted,
//! so that running requests can overdraw a bucket. The debt is paid by waiting.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use pharos_base::id::TenantId;
use pharos_base::timeline::Instant;

/// The time in which an empty bucket refills.
const MINUTE_NS: u64 = 60_000_000_000;
/// The longest time until a bucket without debt. A model that reports wrong numbers of tokens can
/// refuse the requests of a tenant no longer than this.
const MAX_DEBT_NS: u64 = 60 * MINUTE_NS;

/// The state of a tenant's budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBudget {
    /// The tokens of a minute.
    pub limit: u64,
    /// The tokens that are left now.
    pub remaining: u64,
    /// The time until all tokens of a minute are left again.
    pub until_full: Duration,
    /// The time until a request is accepted; zero if it is accepted now.
    pub until_accepted: Duration,
}

/// The budgets of all tenants, by the number of the tenant.
#[derive(Debug)]
pub(super) struct TokenBudgets {
    /// Whether a tenant has a budget.
    on: AtomicBool,
    tenants: Vec<Bucket>,
}

/// The bucket of one tenant.
#[derive(Debug, Default)]
struct Bucket {
    /// Tokens of a minute; 0 for a tenant without a budget.
    limit: AtomicU64,
    /// The time at which the bucket is full.
    full_at: AtomicU64,
}

impl TokenBudgets {
    /// Creates the budgets of this number of tenants, without limits.
    pub(super) fn new(tenants: usize) -> Self {
        let tenants = std::iter::repeat_with(Bucket::default).take(tenants).collect();
        Self { on: AtomicBool::new(false), tenants }
    }

    /// Sets the limits of all tenants, by their numbers. Tokens that were charged stay charged.
    pub(super) fn set_limits(&self, limit: impl Fn(usize) -> Option<u64>) {
        let mut on = false;
        for (number, bucket) in self.tenants.iter().enumerate() {
            let limit = limit(number).unwrap_or(0);
            on |= limit > 0;
            bucket.limit.store(limit, Ordering::Relaxed);
        }
        self.on.store(on, Ordering::Relaxed);
    }

    /// Returns the bucket of a tenant with a budget, and its limit.
    fn of(&self, tenant: TenantId) -> Option<(&Bucket, u64)> {
        if !self.on.load(Ordering::Relaxed) {
            return None;
        }
        let bucket = self.tenants.get(usize::from(tenant.0))?;
        let limit = bucket.limit.load(Ordering::Relaxed);
        (limit > 0).then_some((bucket, limit))
    }

    /// Returns whether a tenant has a budget.
    pub(super) fn has(&self, tenant: TenantId) -> bool {
        self.of(tenant).is_some()
    }

    /// Returns the state of a tenant's budget; `None` if the tenant has none.
    pub(super) fn state(&self, tenant: TenantId, now: Instant) -> Option<TokenBudget> {
        let (bucket, limit) = self.of(tenant)?;
        let used_ns = bucket.full_at.load(Ordering::Relaxed).saturating_sub(now.0);
        let left_ns = MINUTE_NS.saturating_sub(used_ns);
        // The time of one token is rounded up, so that a token is left when it has passed.
        let most_used_ns = MINUTE_NS - MINUTE_NS.div_ceil(limit).min(MINUTE_NS);
        let remaining = u128::from(left_ns) * u128::from(limit) / u128::from(MINUTE_NS);
        Some(TokenBudget {
            limit,
            remaining: u64::try_from(remaining).unwrap_or(limit),
            until_full: Duration::from_nanos(used_ns),
            until_accepted: Duration::from_nanos(used_ns.saturating_sub(most_used_ns)),
        })
    }

    /// Charges tokens to a tenant, if it has a budget.
    pub(super) fn charge(&self, tenant: TenantId, tokens: u64, now: Instant) {
        let Some((bucket, limit)) = self.of(tenant).filter(|_| tokens > 0) else { return };
        let cost_ns = u128::from(tokens) * u128::from(MINUTE_NS) / u128::from(limit);
        let cost_ns = u64::try_from(cost_ns).unwrap_or(u64::MAX);
        let most = now.0.saturating_add(MINUTE_NS + MAX_DEBT_NS);
        let update = |full_at: u64| {
            let charged = full_at.max(now.0).saturating_add(cost_ns).min(most);
            Some(charged.max(full_at))
        };
        // The function never refuses an update.
        let _ = bucket.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TENANT: TenantId = TenantId(1);
    const S: u64 = 1_000_000_000;

    fn budgets(limit: u64) -> TokenBudgets {
        let budgets = TokenBudgets::new(2);
        budgets.set_limits(|number| (number == 1).then_some(limit));
        budgets
    }

    fn state(budgets: &TokenBudgets, at_s: u64) -> (u64, u64, u64) {
        let TokenBudget { remaining, until_full, until_accepted, .. } =
            budgets.state(TENANT, Instant(at_s * S)).unwrap();
        (remaining, until_full.as_secs(), until_accepted.as_secs())
    }

    #[test]
    fn a_budget_refills_continuously() {
        let budgets = budgets(600);
        assert_eq!(state(&budgets, 1000), (600, 0, 0));
        budgets.charge(TENANT, 150, Instant(1000 * S));
        assert_eq!(state(&budgets, 1000), (450, 15, 0));
        assert_eq!(state(&budgets, 1005), (500, 10, 0));
        assert_eq!(state(&budgets, 1015), (600, 0, 0));
        // What was not used before does not add up.
        assert_eq!(state(&budgets, 9000), (600, 0, 0));
    }

    #[test]
    fn running_requests_overdraw_a_budget_and_waiting_pays() {
        let budgets = budgets(60);
        budgets.charge(TENANT, 59, Instant(1000 * S));
        assert_eq!(state(&budgets, 1000), (1, 59, 0));
        budgets.charge(TENANT, 31, Instant(1000 * S));
        // 30 tokens of debt, and one to begin with.
        assert_eq!(state(&budgets, 1000), (0, 90, 31));
        assert_eq!(state(&budgets, 1030), (0, 60, 1));
        assert_eq!(state(&budgets, 1031), (1, 59, 0));
    }

    #[test]
    fn every_limit_accepts_a_first_request_and_wrong_counts_do_not_block_forever() {
        for limit in [1, 7, 100_000, 1_000_000_000, u64::MAX] {
            let budgets = budgets(limit);
            assert_eq!(state(&budgets, 5), (limit, 0, 0), "{limit}");
            budgets.charge(TENANT, limit, Instant(5 * S));
            assert_eq!(state(&budgets, 5).0, 0, "{limit}");
            budgets.charge(TENANT, u64::MAX, Instant(5 * S));
            assert!(state(&budgets, 5).2 <= 61 * 60, "{limit}");
            // A limit of one token needs the whole minute.
            assert_eq!(state(&budgets, 5 + 61 * 60).2, 0, "{limit}");
        }
    }

    #[test]
    fn only_tenants_with_a_budget_are_charged() {
        let budgets = budgets(10);
        assert!(!budgets.has(TenantId(0)) && !budgets.has(TenantId(9)) && budgets.has(TENANT));
        budgets.charge(TenantId(0), 5, Instant(1));
        assert_eq!(budgets.state(TenantId(0), Instant(1)), None);
        budgets.charge(TENANT, 5, Instant(S));
        budgets.set_limits(|_| Some(100));
        // The charged half of a minute stays.
        assert_eq!(state(&budgets, 1), (50, 30, 0));
        budgets.set_limits(|_| None);
        assert!(!budgets.has(TENANT));
    }

    #[test]
    fn concurrent_charges_are_all_counted() {
        let budgets = budgets(1_000_000);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| budgets.charge(TENANT, 1, Instant(S))));
            }
        });
        assert_eq!(state(&budgets, 1).0, 996_000);
    }
}
