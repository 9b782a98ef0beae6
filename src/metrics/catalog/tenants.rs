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
}

/// The mapping `tenants`.
pub(super) struct Tenants;

impl<'de> Node<'de> for Tenants {
    type Out = TenantRule;
    fn expected(&self) -> &'static str {
        "a mapping with header, token or certificate, limit and names"
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<TenantRule, A::Error> {
        let mut seen = Vec::new();
        let mut limit = DEFAULT_LIMIT;
        let mut names = Vec::new();
        let mut sources = Vec::new();
        let allowed = &["header", "token", "certificate", "limit", "names"];
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
        Ok(TenantRule { source, limit, names })
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

/// A key with the value `true` that selects a source which the server verifies.
struct Verified(&'static str, TenantSource);

impl Node<'_> for Verified {
    type Out = TenantSource;
    fn expected(&self) -> &'static str {
        "`true`"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<TenantSource, E> {
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

struct Names;

impl<'de> Node<'de> for Names {
    type Out = Vec<String>;
    fn expected(&self) -> &'static str {
        "a list of tenants"
    }
    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
        let mut names = Vec::new();
        while list.next_element_seed(Seed(Name(&mut names)))?.is_some() {}
        Ok(names)
    }
}

/// One name, which is appended to the names before it.
struct Name<'a>(&'a mut Vec<String>);

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
        if [NONE, OTHER].contains(&text) {
            let meaning = "requests without a tenant, or of tenants without separate series";
            return Err(E::custom(format!(
                "`{text}` cannot be a tenant: this label is that of {meaning}"
            )));
        }
        if self.0.iter().any(|other| other == text) {
            return Err(E::custom(format!("tenant `{text}` is given twice")));
        }
        if self.0.len() >= MAX_LIMIT {
            return Err(E::custom(format!("there are more than {MAX_LIMIT} tenants")));
        }
        self.0.push(text.to_owned());
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
    fn a_rule_brings_its_metrics() {
        let catalog = Catalog::parse("tenants: {header: tenant}", "m.yaml").unwrap();
        let names: Vec<&str> = catalog.iter().map(|(_, spec)| spec.name.as_str()).collect();
        assert!(
            names.len() == 6 && names.iter().all(|name| name.starts_with("pharos_tenant_")),
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
                "{key: a}",
                "unknown key `key`; allowed are `header`, `token`, `certificate`, `limit`, `names`",
            ),
        ] {
            let message = parse(rule).unwrap_err();
            assert!(message.contains(expected), "{rule}: {message}");
        }
    }
}
