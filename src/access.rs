//! Access control for parts of the protocol (`--http-restricted-api`, `--grpc-restricted-protocol`;
//! spec 1.11): a restricted part serves only requests that carry a configured key with its value.
//! Bearer tokens: [`tokens`].

pub mod tokens;

use std::fmt;

named_enum! {
    /// A part of the protocol that can be restricted.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Api {
        /// Liveness and readiness of the server and of models.
        Health => "health",
        /// Metadata of the server and of models.
        Metadata => "metadata",
        /// Inference in all its forms.
        Inference => "inference",
        /// Regions of shared memory.
        SharedMemory => "shared-memory",
        /// Configurations of models.
        ModelConfig => "model-config",
        /// The list of models, loading and unloading.
        ModelRepository => "model-repository",
        /// Statistics.
        Statistics => "statistics",
        /// Trace settings.
        Trace => "trace",
        /// Log settings.
        Logging => "logging",
        /// Streams of load reports. Triton has no such part.
        LoadReport => "load-report",
    }
    /// Returns the name in the options (Triton's, where it has the part).
    pub fn name;
}

impl Api {
    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|api| api.name() == name)
    }
}

/// The keys and values that requests to restricted parts must carry.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Restrictions {
    rules: Vec<Rule>,
}

#[derive(Clone, PartialEq, Eq)]
struct Rule {
    api: Api,
    key: String,
    value: String,
}

/// Leaves out the values, which are secrets.
impl fmt::Debug for Restrictions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.rules.iter().map(|rule| (rule.api.name(), &rule.key))).finish()
    }
}

impl Restrictions {
    /// Adds a group: `api[,api...]:key=value`. `option` is the name of the option, `what` its term
    /// for a part.
    ///
    /// # Errors
    /// The group has another form, a part does not exist, or a part is already restricted; with
    /// Triton's texts where it has one.
    pub fn add(&mut self, group: &str, option: &str, what: &str) -> Result<(), String> {
        let parts =
            group.split_once(':').and_then(|(apis, rule)| Some((apis, rule.split_once('=')?)));
        let Some((apis, (key, value))) = parts.filter(|(_, (key, _))| !key.is_empty()) else {
            return Err(format!(
                "{option} expects <{what}>[,<{what}>...]:<key>=<value>, got '{group}'"
            ));
        };
        if !key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) {
            return Err(format!("{option}: the key '{key}' cannot be the name of a header"));
        }
        for name in apis.split(',') {
            let Some(api) = Api::from_name(name) else {
                let names = Api::ALL.map(Api::name).join(", ");
                return Err(format!("unknown restricted {what} '{name}'; allowed: {names}"));
            };
            if self.rules.iter().any(|rule| rule.api == api) {
                return Err(format!(
                    "{what} '{name}' can not be specified in multiple config groups"
                ));
            }
            self.rules.push(Rule { api, key: key.to_owned(), value: value.to_owned() });
        }
        Ok(())
    }

    /// Returns whether nothing is restricted.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns whether a part is restricted.
    pub fn restricts(&self, api: Api) -> bool {
        self.rules.iter().any(|rule| rule.api == api)
    }

    /// Checks whether a request may use a part. `given` returns the value that the request carries
    /// for a key.
    ///
    /// # Errors
    /// Returns the key whose value is missing or wrong.
    pub fn check<'a>(
        &self,
        api: Api,
        given: impl FnOnce(&str) -> Option<&'a [u8]>,
    ) -> Result<(), &str> {
        let Some(rule) = self.rules.iter().find(|rule| rule.api == api) else { return Ok(()) };
        match given(&rule.key) {
            Some(value) if equal(value, rule.value.as_bytes()) => Ok(()),
            _ => Err(&rule.key),
        }
    }
}

/// Compares in a time that does not depend on where the first difference is.
fn equal(one: &[u8], other: &[u8]) -> bool {
    one.len() == other.len()
        && one.iter().zip(other).fold(0, |all, (one, other)| all | (one ^ other)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTION: &str = "--http-restricted-api";

    #[test]
    fn restricts_the_parts_of_a_group_to_requests_with_its_value() {
        let mut restrictions = Restrictions::default();
        assert!(restrictions.is_empty());
        assert_eq!(
            restrictions.add("health,model-repository:admin-key=a=b", OPTION, "api"),
            Ok(())
        );
        assert_eq!(restrictions.add("inference:user=x", OPTION, "api"), Ok(()));
        let check = |api, value: Option<&'static str>| {
            restrictions.check(api, |key| value.filter(|_| key == "admin-key").map(str::as_bytes))
        };
        assert_eq!(check(Api::Health, Some("a=b")), Ok(()));
        assert_eq!(check(Api::Health, Some("a=c")), Err("admin-key"));
        assert_eq!(check(Api::ModelRepository, None), Err("admin-key"));
        assert_eq!(check(Api::Inference, Some("a=b")), Err("user"));
        assert_eq!(check(Api::Statistics, None), Ok(()));
        assert!(!format!("{restrictions:?}").contains("a=b"), "secrets are not printed");
    }

    #[test]
    fn refuses_an_invalid_group() {
        for (group, expected) in [
            (
                "health",
                "--http-restricted-api expects <api>[,<api>...]:<key>=<value>, got 'health'",
            ),
            (
                "health:key",
                "--http-restricted-api expects <api>[,<api>...]:<key>=<value>, got 'health:key'",
            ),
            (
                "health:=v",
                "--http-restricted-api expects <api>[,<api>...]:<key>=<value>, got 'health:=v'",
            ),
            ("health:a b=v", "--http-restricted-api: the key 'a b' cannot be the name of a header"),
            ("x:k=v", "unknown restricted api 'x'; allowed: health, metadata"),
            ("health,health:k=v", "api 'health' can not be specified in multiple config groups"),
        ] {
            let error = Restrictions::default().add(group, OPTION, "api").err().unwrap_or_default();
            assert!(error.starts_with(expected), "{group}: {error}");
        }
    }
}
