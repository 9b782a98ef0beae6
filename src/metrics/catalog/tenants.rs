//! The rule by which a `metrics.yaml` assigns requests to tenants.

use pharos_base::id::TenantId;
use serde::de::{self, MapAccess, SeqAccess};

use super::names::shortened;
use super::node::{Key, Node, Seed};

/// The number of tenants with separate series, if the file does not set it, and the largest allowed
/// one.
const DEFAULT_LIMIT: usize = 100;
const MAX_LIMIT: usize = 1000;
/// The label value of requests without a tenant.
pub(crate) const NONE: &str = "none";
/// The label value of requests whose tenant has no series: beyond the limit, or with an invalid
/// name.
pub(crate) const OTHER: &str = "other";
/// The longest name of a header, in bytes.
const MAX_HEADER: usize = 64;
/// The largest number of tokens in a minute.
const MAX_TOKENS: u64 = 1_000_000_000;
/// The text of a budget without a limit.
const UNLIMITED: &str = "unlimited";

/// Where the name of a request's tenant comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantSource {
    /// From the HTTP header or gRPC metadata key of this name, in lower case.
    Header(String),
    /// From the file of bearer tokens, which names the tenants of its tokens.
    Token,
    /// From the certificate with which the client identified itself in the TLS handshake.
    Certificate,
}

/// How requests are assigned to tenants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRule {
    /// Where the name of a request's tenant comes from.
    pub source: TenantSource,
    /// The number of tenants with separate series; the others share one.
    pub limit: usize,
    /// Tenants that have separate series regardless of the order of requests; at most `limit`.
    pub names: Vec<String>,
    /// The tokens of models that generate text that a tenant may use.
    pub budgets: BudgetRule,
}

/// How many tokens tenants may use in a minute. `None` means without a limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BudgetRule {
    /// The tokens of each tenant that is not listed, of requests without a tenant, and of all
    /// tenants without separate series together.
    pub default: Option<u64>,
    /// The tokens of these tenants.
    pub listed: Vec<(String, Option<u64>)>,
}

impl TenantRule {
    /// Returns whether both rules assign requests to the same tenants.
    pub(crate) fn has_tenants_of(&self, other: &Self) -> bool {
        let Self { source, limit, names, budgets: _ } = self;
        (source, limit, names) == (&other.source, &other.limit, &other.names)
    }

    /// Returns the tenants that have separate series in any case.
    pub(crate) fn fixed_names(&self) -> impl Iterator<Item = &str> {
        let listed = self.budgets.listed.iter().map(|(name, _)| name.as_str());
        let listed = listed.filter(|name| {
            ![NONE, OTHER].contains(name) && !self.names.iter().any(|known| known == name)
        });
        self.names.iter().map(String::as_str).chain(listed)
    }
}

/// The mapping `tenants`.
pub(super) struct Tenants;

impl<'de> Node<'de> for Tenants {
    type Out = TenantRule;
    fn expected(&self) -> &'static str {
        "a mapping with header, token or certificate, limit, names and budgets of tokens"
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<TenantRule, A::Error> {
        let mut seen = Vec::new();
        let mut limit = DEFAULT_LIMIT;
        let mut names = Vec::new();
        let mut sources = Vec::new();
        let mut budgets = BudgetRule::default();
        let mut header_is_trusted = false;
        let allowed = &[
            "header",
            "header_is_trusted",
            "token",
            "certificate",
            "limit",
            "names",
            "tokens_per_minute",
            "token_budgets",
        ];
        while let Some(key) = map.next_key_seed(Seed(Key { allowed, seen: &mut seen }))? {
            match key {
                "header" => sources.push(TenantSource::Header(map.next_value_seed(Seed(Header))?)),
                "token" => {
                    sources.push(map.next_value_seed(Seed(Verified("token", TenantSource::Token)))?)
                }
                "certificate" => {
                    sources.push(map.next_value_seed(Seed(Verified(
                        "certificate",
                        TenantSource::Certificate,
                    )))?);
                }
                "header_is_trusted" => {
                    header_is_trusted = true;
                    map.next_value_seed(Seed(Verified("header_is_trusted", ())))?;
                }
                "tokens_per_minute" => budgets.default = map.next_value_seed(Seed(Budget))?,
                "token_budgets" => budgets.listed = map.next_value_seed(Seed(Budgets))?,
                "limit" => limit = map.next_value_seed(Seed(Limit))?,
                _ => names = map.next_value_seed(Seed(Names))?,
            }
        }
        let (Some(source), None) = (sources.pop(), sources.pop()) else {
            return Err(de::Error::custom(
                "`tenants` needs one of the keys `header`, `token` and `certificate`",
            ));
        };
        if names.len() > limit {
            let given = names.len();
            return Err(de::Error::custom(format!(
                "`names` has {given} tenants, but `limit` allows {limit}"
            )));
        }
        let is_header = matches!(source, TenantSource::Header(_));
        if header_is_trusted && !is_header {
            return Err(de::Error::custom("`header_is_trusted` needs the key `header`"));
        }
        let has_budgets = budgets != BudgetRule::default();
        if has_budgets && is_header && !header_is_trusted {
            return Err(de::Error::custom(
                "budgets of tokens need `token` or `certificate`, because clients choose the value \
                 of a header; if a proxy writes the header of every request, set \
                 `header_is_trusted: true`",
            ));
        }
        let rule = TenantRule { source, limit, names, budgets };
        let given = rule.fixed_names().count();
        if given > limit {
            return Err(de::Error::custom(format!(
                "`names` and `token_budgets` have {given} tenants, but `limit` allows {limit}"
            )));
        }
        Ok(rule)
    }
}

struct Header;

impl Node<'_> for Header {
    type Out = String;
    fn expected(&self) -> &'static str {
        "the name of a header"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        let name = text.to_ascii_lowercase();
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let valid = (1..=MAX_HEADER).contains(&name.len()) && name.chars().all(allowed);
        // Values of `-bin` are encoded, and credentials must not become labels.
        if valid
            && !name.ends_with("-bin")
            && !["authorization", "proxy-authorization", "cookie"].contains(&&*name)
        {
            return Ok(name);
        }
        let allowed = "allowed are letters, digits, `-`, `_` and `.`, but no credentials and no \
                       key that ends with `-bin`";
        Err(E::custom(format!("`{}` is not a valid header of tenants; {allowed}", shortened(text))))
    }
}

/// A key with the value `true`, and what it selects.
struct Verified<T>(&'static str, T);

impl<T> Node<'_> for Verified<T> {
    type Out = T;
    fn expected(&self) -> &'static str {
        "`true`"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<T, E> {
        match text {
            "true" => Ok(self.1),
            _ => {
                Err(E::custom(format!("`{}` is `{}`; allowed is `true`", self.0, shortened(text))))
            }
        }
    }
}

struct Limit;

impl Node<'_> for Limit {
    type Out = usize;
    fn expected(&self) -> &'static str {
        "a number of tenants"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<usize, E> {
        let limit = text.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
        limit.ok_or_else(|| {
            E::custom(format!(
                "`{}` is not a valid limit of tenants; allowed are 1 to {MAX_LIMIT}",
                shortened(text)
            ))
        })
    }
}

/// The tokens of a minute.
struct Budget;

impl Node<'_> for Budget {
    type Out = Option<u64>;
    fn expected(&self) -> &'static str {
        "a number of tokens"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<Option<u64>, E> {
        if text == UNLIMITED {
            return Ok(None);
        }
        let tokens = text.parse().ok().filter(|tokens| (1..=MAX_TOKENS).contains(tokens));
        tokens.map(Some).ok_or_else(|| {
            E::custom(format!(
                "`{}` is not a valid budget of tokens; allowed are 1 to {MAX_TOKENS}, and \
                 `{UNLIMITED}`",
                shortened(text)
            ))
        })
    }
}

/// The budgets of tenants by name.
struct Budgets;

impl<'de> Node<'de> for Budgets {
    type Out = Vec<(String, Option<u64>)>;
    fn expected(&self) -> &'static str {
        "a mapping of tenants to numbers of tokens"
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Out, A::Error> {
        let mut budgets = Vec::new();
        let mut names = Vec::new();
        while map.next_key_seed(Seed(Name { names: &mut names, has_fixed: true }))?.is_some() {
            budgets.push(map.next_value_seed(Seed(Budget))?);
        }
        Ok(names.into_iter().zip(budgets).collect())
    }
}

struct Names;

impl<'de> Node<'de> for Names {
    type Out = Vec<String>;
    fn expected(&self) -> &'static str {
        "a list of tenants"
    }
    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
        let mut names = Vec::new();
        while list.next_element_seed(Seed(Name { names: &mut names, has_fixed: false }))?.is_some()
        {
        }
        Ok(names)
    }
}

/// One name, which is appended to the names before it.
struct Name<'a> {
    names: &'a mut Vec<String>,
    /// Whether [`NONE`] and [`OTHER`] are allowed.
    has_fixed: bool,
}

impl Node<'_> for Name<'_> {
    type Out = ();
    fn expected(&self) -> &'static str {
        "a tenant's name"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<(), E> {
        if !TenantId::is_name(text.as_bytes()) {
            let allowed = TenantId::ALLOWED;
            let text = shortened(text);
            return Err(E::custom(format!(
                "`{text}` is not a valid name of a tenant; allowed are {allowed}"
            )));
        }
        if !self.has_fixed && [NONE, OTHER].contains(&text) {
            let meaning = "requests without a tenant, or of tenants without separate series";
            return Err(E::custom(format!(
                "`{text}` cannot be a tenant: this label is that of {meaning}"
            )));
        }
        if self.names.iter().any(|other| other == text) {
            return Err(E::custom(format!("tenant `{text}` is given twice")));
        }
        if self.names.len() >= MAX_LIMIT {
            return Err(E::custom(format!("there are more than {MAX_LIMIT} tenants")));
        }
        self.names.push(text.to_owned());
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Catalog;
    use super::*;

    fn parse(rule: &str) -> Result<TenantRule, String> {
        let catalog = Catalog::parse(&format!("tenants: {rule}"), "m.yaml");
        catalog.map(|catalog| catalog.tenants().unwrap().clone()).map_err(|error| error.to_string())
    }

    #[test]
    fn parses_rules() {
        let rule = parse("{header: X-Tenant, limit: 7, names: [a, 'b@c']}").unwrap();
        assert_eq!(rule.source, TenantSource::Header("x-tenant".to_owned()));
        assert_eq!((rule.limit, rule.names), (7, vec!["a".to_owned(), "b@c".to_owned()]));
        let rule = parse("{token: true}").unwrap();
        assert_eq!((rule.source, rule.limit), (TenantSource::Token, 100));
        assert_eq!(parse("{certificate: true}").unwrap().source, TenantSource::Certificate);
        assert!(Catalog::shipped().tenants().is_none());
    }

    #[test]
    fn parses_budgets() {
        let budgets = parse("{token: true, tokens_per_minute: 100}").unwrap().budgets;
        assert_eq!(budgets, BudgetRule { default: Some(100), listed: Vec::new() });
        let rule = parse(
            "{header: t, header_is_trusted: true, names: [a], limit: 2, token_budgets: {b: 5, a: \
             unlimited, none: 7, other: 1}}",
        )
        .unwrap();
        assert_eq!(rule.budgets.default, None);
        let listed: Vec<_> = rule.budgets.listed.iter().map(|(n, b)| (n.as_str(), *b)).collect();
        assert_eq!(listed, [("b", Some(5)), ("a", None), ("none", Some(7)), ("other", Some(1))]);
        assert_eq!(rule.fixed_names().collect::<Vec<_>>(), ["a", "b"]);
        let other = parse("{header: t, names: [a], limit: 2}").unwrap();
        assert!(rule.has_tenants_of(&other) && rule != other);
    }

    #[test]
    fn a_rule_brings_its_metrics() {
        let catalog = Catalog::parse("tenants: {header: tenant}", "m.yaml").unwrap();
        let names: Vec<&str> = catalog.iter().map(|(_, spec)| spec.name.as_str()).collect();
        assert!(
            names.len() == 7 && names.iter().all(|name| name.starts_with("pharos_tenant_")),
            "{names:?}"
        );
    }

    #[test]
    fn errors_name_the_value_and_what_is_allowed() {
        for (rule, expected) in [
            (
                "x-tenant",
                "found `x-tenant` where a mapping with header, token or certificate, limit",
            ),
            ("{limit: 3}", "`tenants` needs one of the keys `header`, `token` and `certificate`"),
            (
                "{header: a, token: true}",
                "needs one of the keys `header`, `token` and `certificate`",
            ),
            ("{certificate: true, token: true, header: a}", "needs one of the keys"),
            ("{token: yes}", "`token` is `yes`; allowed is `true`"),
            ("{certificate: false}", "`certificate` is `false`; allowed is `true`"),
            (
                "{header: Authorization}",
                "`Authorization` is not a valid header of tenants; allowed are letters",
            ),
            ("{header: tenant-bin}", "`tenant-bin` is not a valid header"),
            ("{header: 'a b'}", "`a b` is not a valid header"),
            ("{header: t, limit: 0}", "`0` is not a valid limit of tenants; allowed are 1 to 1000"),
            ("{header: t, limit: 1001}", "`1001` is not a valid limit"),
            (
                "{header: t, names: ['a b']}",
                "`a b` is not a valid name of a tenant; allowed are up to 64 letters",
            ),
            ("{header: t, names: [a, a]}", "tenant `a` is given twice"),
            ("{header: t, names: [none]}", "`none` cannot be a tenant"),
            ("{header: t, names: [other]}", "`other` cannot be a tenant"),
            ("{header: t, limit: 1, names: [a, b]}", "`names` has 2 tenants, but `limit` allows 1"),
            (
                "{header: t, tokens_per_minute: 5}",
                "budgets of tokens need `token` or `certificate`, because clients choose",
            ),
            ("{header: t, token_budgets: {a: 5}}", "set `header_is_trusted: true`"),
            (
                "{token: true, header_is_trusted: true}",
                "`header_is_trusted` needs the key `header`",
            ),
            (
                "{header: t, header_is_trusted: false}",
                "`header_is_trusted` is `false`; allowed is `true`",
            ),
            (
                "{token: true, tokens_per_minute: 0}",
                "`0` is not a valid budget of tokens; allowed are 1 to 1000000000, and `unlimited`",
            ),
            ("{token: true, token_budgets: {a: -1}}", "`-1` is not a valid budget"),
            ("{token: true, token_budgets: {'a b': 1}}", "`a b` is not a valid name of a tenant"),
            ("{token: true, token_budgets: {a: 1, a: 2}}", "tenant `a` is given twice"),
            (
                "{token: true, limit: 1, names: [a], token_budgets: {b: 1}}",
                "`names` and `token_budgets` have 2 tenants, but `limit` allows 1",
            ),
            (
                "{key: a}",
                "unknown key `key`; allowed are `header`, `header_is_trusted`, `token`, \
                 `certificate`, `limit`, `names`, `tokens_per_minute`, `token_budgets`",
            ),
        ] {
            let message = parse(rule).unwrap_err();
            assert!(message.contains(expected), "{rule}: {message}");
        }
    }
}
