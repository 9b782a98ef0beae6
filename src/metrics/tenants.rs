//! The tenants of requests, and what each has used of a model.
//!
//! Clients choose the names, so the number of tenants is limited: beyond the limit, and for invalid
//! names, a request belongs to [`OTHER`]. A look-up takes no lock, and allocates only for a new
//! name within the limit.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use pharos_base::id::TenantId;

use super::atomic::Count;
use super::catalog::{BudgetRule, NONE, OTHER, TenantRule};
use super::source::TenantValue;
use super::token_budget::TokenBudgets;

/// The tenant of these requests. Requests without a tenant have the default.
const OTHER_ID: TenantId = TenantId(1);
/// The number of tenants that are not in the table.
const FIXED: usize = 2;

/// The names of the tenants. A name stays until the end of the process.
#[derive(Debug)]
pub(super) struct Tenants {
    rule: TenantRule,
    /// A hash table with open addressing and at least two places for each name.
    names: Vec<OnceLock<Box<str>>>,
    /// The number of names, and of those that are being added.
    used: AtomicUsize,
    /// With random keys, so that clients cannot choose names of the same place.
    hasher: RandomState,
    budgets: Arc<TokenBudgets>,
}

impl Tenants {
    /// Creates the table with the names of the rule.
    pub(super) fn new(rule: TenantRule) -> Self {
        let places = (2 * rule.limit).next_power_of_two();
        let names: Vec<_> = std::iter::repeat_with(OnceLock::new).take(places).collect();
        let budgets = Arc::new(TokenBudgets::new(names.len() + FIXED));
        let tenants =
            Self { rule, names, used: AtomicUsize::new(0), hasher: RandomState::new(), budgets };
        for name in tenants.rule.fixed_names() {
            tenants.place(name);
        }
        tenants.set_budgets(&tenants.rule.budgets);
        tenants
    }

    /// Returns the rule by which requests belong to tenants.
    pub(super) fn rule(&self) -> &TenantRule {
        &self.rule
    }

    /// Checks that a changed definition can be applied: it has the same tenants, apart from budgets.
    ///
    /// # Errors
    /// It has other tenants, or a budget of a tenant for which there is no room.
    pub(super) fn check_reload(&self, rule: &TenantRule) -> Result<(), String> {
        if !self.rule.has_tenants_of(rule) {
            return Err(
                "`tenants` has changed, which needs a restart of the server; only budgets of \
                 tokens can change while it runs"
                    .to_owned(),
            );
        }
        for name in rule.fixed_names() {
            if self.place(name) == OTHER_ID {
                let limit = self.rule.limit;
                return Err(format!(
                    "`token_budgets` has the tenant `{name}`, but the {limit} tenants that `limit` \
                     allows have other names; restart the server"
                ));
            }
        }
        Ok(())
    }

    /// Applies the budgets of a definition, whose tenants have their places.
    pub(super) fn set_budgets(&self, rule: &BudgetRule) {
        let listed: Vec<(usize, Option<u64>)> = rule
            .listed
            .iter()
            .map(|(name, limit)| (usize::from(self.of(name.as_bytes()).0), *limit))
            .collect();
        self.budgets.set_limits(|number| {
            let of_name = listed.iter().find(|(listed, _)| *listed == number);
            of_name.map_or(rule.default, |(_, limit)| *limit)
        });
    }

    /// Returns the budgets of all tenants.
    pub(super) fn budgets(&self) -> &Arc<TokenBudgets> {
        &self.budgets
    }

    /// Returns the tenant of this name; an empty name means no tenant.
    pub(super) fn of(&self, name: &[u8]) -> TenantId {
        match std::str::from_utf8(name) {
            Ok("" | NONE) => TenantId::default(),
            Ok(text) if TenantId::is_name(name) => self.place(text),
            _ => OTHER_ID,
        }
    }

    /// Returns the tenant of a valid name. Adds it if there is room.
    fn place(&self, name: &str) -> TenantId {
        if name == OTHER {
            return OTHER_ID;
        }
        let places = self.names.len();
        let start = self.hasher.hash_one(name) as usize % places;
        for at in (start..places).chain(0..start) {
            let Some(place) = self.names.get(at) else { break };
            if place.get().is_none() && !self.add(place, name) {
                return OTHER_ID;
            }
            if place.get().is_some_and(|known| **known == *name) {
                return TenantId(u16::try_from(at + FIXED).unwrap_or(OTHER_ID.0));
            }
        }
        OTHER_ID
    }

    /// Fills an empty place, possibly with the name of another request. Returns false if no more
    /// names are allowed.
    fn add(&self, place: &OnceLock<Box<str>>, name: &str) -> bool {
        if self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used: usize| {
                (used < self.rule.limit).then_some(used + 1)
            })
            .is_err()
        {
            // Another request may have filled the place in the meantime.
            return place.get().is_some();
        }
        if place.set(name.into()).is_err() {
            self.used.fetch_sub(1, Ordering::Relaxed);
        }
        true
    }

    /// Returns the name of a tenant.
    pub(super) fn name(&self, tenant: usize) -> &str {
        match tenant.checked_sub(FIXED) {
            Some(at) => self.names.get(at).and_then(OnceLock::get).map_or(OTHER, |name| &**name),
            None if tenant == usize::from(OTHER_ID.0) => OTHER,
            None => NONE,
        }
    }

    /// Returns the number of tenants that may exist.
    fn places(&self) -> usize {
        self.names.len() + FIXED
    }
}

/// What one tenant has used of a model.
#[derive(Clone, Debug, Default)]
pub(super) struct Usage {
    succeeded: Count,
    failed: Count,
    queue_ns: Count,
    compute_ns: Count,
    prompt_tokens: Count,
    generated_tokens: Count,
    rate_limited: Count,
}

impl Usage {
    /// Adds the time of one execution of a request.
    pub(super) fn executed(&self, queue_ns: u64, compute_ns: u64) {
        self.queue_ns.add(queue_ns);
        self.compute_ns.add(compute_ns);
    }

    /// Adds the tokens of a response.
    pub(super) fn tokens(&self, prompt: u64, generated: u64) {
        self.prompt_tokens.add(prompt);
        self.generated_tokens.add(generated);
    }

    /// Counts a request that was refused because the budget of tokens was used up.
    pub(super) fn rate_limited(&self) {
        self.rate_limited.add(1);
    }

    /// Counts a successful request.
    pub(super) fn succeeded(&self) {
        self.succeeded.add(1);
    }

    /// Counts a failed request.
    pub(super) fn failed(&self) {
        self.failed.add(1);
    }

    /// Returns a count, or nanoseconds.
    pub(super) fn get(&self, value: TenantValue) -> u64 {
        match value {
            TenantValue::Requests => self.succeeded.get().saturating_add(self.failed.get()),
            TenantValue::Failures => self.failed.get(),
            TenantValue::QueueNs => self.queue_ns.get(),
            TenantValue::ComputeNs => self.compute_ns.get(),
            TenantValue::PromptTokens => self.prompt_tokens.get(),
            TenantValue::GeneratedTokens => self.generated_tokens.get(),
            TenantValue::RateLimited => self.rate_limited.get(),
        }
    }
}

/// What all tenants have used of one model. Empty if the server does not distinguish tenants.
#[derive(Clone, Debug, Default)]
pub(super) struct ByTenant {
    usage: Vec<OnceLock<Box<Usage>>>,
    /// The budgets, which all models share.
    budgets: Option<Arc<TokenBudgets>>,
}

impl ByTenant {
    /// Returns whether tenants are not distinguished.
    pub(super) fn is_off(&self) -> bool {
        self.usage.is_empty()
    }

    /// Makes room for all tenants that may exist.
    pub(super) fn new(tenants: Option<&Tenants>) -> Self {
        let places = tenants.map_or(0, Tenants::places);
        Self {
            usage: std::iter::repeat_with(OnceLock::new).take(places).collect(),
            budgets: tenants.map(|tenants| Arc::clone(tenants.budgets())),
        }
    }

    /// Returns what a tenant has used, created at its first request; `None` if the server does not
    /// distinguish tenants.
    pub(super) fn of(&self, tenant: TenantId) -> Option<&Usage> {
        Some(self.usage.get(usize::from(tenant.0))?.get_or_init(Box::default))
    }

    /// Returns the budgets of the tenants, if the tenant has one.
    pub(super) fn budgets_of(&self, tenant: TenantId) -> Option<&TokenBudgets> {
        self.budgets.as_deref().filter(|budgets| budgets.has(tenant))
    }

    /// Returns every tenant that has used the model, by its number.
    pub(super) fn all(&self) -> impl Iterator<Item = (usize, &Usage)> {
        self.usage.iter().enumerate().filter_map(|(tenant, usage)| Some((tenant, &**usage.get()?)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use pharos_base::timeline::Instant;

    use super::super::catalog::Catalog;
    use super::*;

    fn tenants(rule: &str) -> Tenants {
        let catalog =
            Catalog::parse(&format!("tenants: {{header: x-tenant, {rule}}}"), "m.yaml").unwrap();
        Tenants::new(catalog.tenants().unwrap().clone())
    }

    fn name(tenants: &Tenants, given: &[u8]) -> String {
        tenants.name(usize::from(tenants.of(given).0)).to_owned()
    }

    #[test]
    fn names_keep_their_tenant_and_the_rest_is_other() {
        let tenants = tenants("limit: 3, names: [known]");
        for (given, expected) in [
            ("", "none"),
            ("none", "none"),
            ("other", "other"),
            ("a", "a"),
            ("b", "b"),
            ("c", "other"),
            ("a", "a"),
            // It has had its place from the start.
            ("known", "known"),
            ("a b", "other"),
            ("ä", "other"),
            ("a\"", "other"),
            (&"a".repeat(65), "other"),
        ] {
            assert_eq!(name(&tenants, given.as_bytes()), expected, "{given}");
        }
        assert_eq!(name(&tenants, b"\xff"), "other");
    }

    #[test]
    fn budgets_change_without_a_restart_and_tenants_do_not() {
        let rule = |text: &str| {
            let rule = format!("tenants: {{token: true, limit: 2, {text}}}");
            Catalog::parse(&rule, "m.yaml").unwrap().tenants().unwrap().clone()
        };
        let tenants = Tenants::new(rule("tokens_per_minute: 10, token_budgets: {a: 20}"));
        let limit = |name: &str| {
            let state = tenants.budgets().state(tenants.of(name.as_bytes()), Instant(1));
            state.map(|state| state.limit)
        };
        assert_eq!([limit("a"), limit("b")], [Some(20), Some(10)]);
        // Tenants beyond the limit share one budget, and requests without a tenant have one.
        assert_eq!([limit("x"), limit("y"), limit("")], [Some(10), Some(10), Some(10)]);
        assert_eq!(tenants.of(b"x"), tenants.of(b"y"));
        let changed = rule("token_budgets: {b: 30, none: 1}");
        tenants.check_reload(&changed).unwrap();
        tenants.set_budgets(&changed.budgets);
        assert_eq!(
            [limit("a"), limit("b"), limit("x"), limit("")],
            [None, Some(30), None, Some(1)]
        );
        let error = tenants.check_reload(&rule("token_budgets: {c: 5}")).unwrap_err();
        assert!(
            error.starts_with("`token_budgets` has the tenant `c`, but the 2 tenants"),
            "{error}"
        );
        let error = tenants.check_reload(&rule("names: [a]")).unwrap_err();
        assert!(error.contains("needs a restart"), "{error}");
    }

    #[test]
    fn attackers_get_no_more_than_the_limit() {
        let tenants = tenants("limit: 100");
        let usage = ByTenant::new(Some(&tenants));
        for at in 0..10_000 {
            usage.of(tenants.of(format!("tenant-{at}").as_bytes())).unwrap().succeeded();
        }
        let all: Vec<_> = usage
            .all()
            .map(|(tenant, usage)| (tenants.name(tenant), usage.get(TenantValue::Requests)))
            .collect();
        let names: BTreeSet<&str> = all.iter().map(|(name, _)| *name).collect();
        assert_eq!((all.len(), names.len()), (101, 101));
        assert_eq!(all.iter().map(|(_, requests)| requests).sum::<u64>(), 10_000);
        assert_eq!(all.iter().find(|(name, _)| *name == "other").unwrap().1, 9_900);
        assert!((0..100).all(|at| names.contains(format!("tenant-{at}").as_str())));
    }

    #[test]
    fn concurrent_requests_of_one_name_share_a_tenant() {
        for _ in 0..50 {
            let tenants = tenants("limit: 4");
            let ids: Vec<BTreeSet<u16>> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|_| {
                        scope.spawn(|| {
                            ["a", "b", "c", "d"].map(|name| tenants.of(name.as_bytes()).0).into()
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let seen: BTreeSet<u16> = ids.into_iter().flatten().collect();
            // A name may be `other` while the last places are being filled, but never has two
            // places.
            assert!(seen.iter().filter(|id| **id != OTHER_ID.0).count() <= 4, "{seen:?}");
            assert!(tenants.used.load(Ordering::Relaxed) <= 4);
        }
    }

    #[test]
    fn costs_nothing_without_a_rule() {
        let usage = ByTenant::new(None);
        assert!(usage.of(TenantId::default()).is_none() && usage.all().next().is_none());
    }
}
