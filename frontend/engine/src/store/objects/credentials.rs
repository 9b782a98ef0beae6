//! The file that `TRITON_CLOUD_CREDENTIAL_PATH` names: credentials by address prefix, as in
//! Triton's documentation of model repositories. Messages never contain the values.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;

/// The contents of the file, by protocol, then by address prefix.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Credentials {
    s3: BTreeMap<String, S3>,
    gs: BTreeMap<String, String>,
    #[serde(rename = "as")]
    azure: BTreeMap<String, Azure>,
}

/// Credentials of S3; empty fields are not set.
#[derive(Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct S3 {
    pub(super) key_id: String,
    pub(super) secret_key: String,
    pub(super) session_token: String,
    pub(super) region: String,
    pub(super) profile: String,
}

/// Credentials of Azure.
#[derive(Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Azure {
    pub(super) account_str: String,
    pub(super) account_key: String,
}

impl Credentials {
    /// # Errors
    /// The file cannot be read or has another format.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let named = |reason: String| {
            format!("the credentials in '{}' cannot be used: {reason}", path.display())
        };
        let text = fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
        serde_json::from_str(&text).map_err(|error| {
            // The parser's message could contain a secret.
            named(format!("invalid JSON at line {}, column {}", error.line(), error.column()))
        })
    }

    pub(super) fn s3(&self, address: &str) -> Option<S3> {
        longest(&self.s3, address).cloned()
    }

    /// Returns the path of a file such as `GOOGLE_APPLICATION_CREDENTIALS` names.
    pub(super) fn gs(&self, address: &str) -> Option<String> {
        longest(&self.gs, address).cloned()
    }

    pub(super) fn azure(&self, address: &str) -> Option<Azure> {
        longest(&self.azure, address).cloned()
    }
}

/// Returns the value of the longest prefix of the address that ends at a name boundary.
fn longest<'a, T>(all: &'a BTreeMap<String, T>, address: &str) -> Option<&'a T> {
    let matching = all.iter().filter(|(start, _)| {
        let rest = address.strip_prefix(start.trim_end_matches('/'));
        start.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    });
    matching.max_by_key(|(start, _)| start.len()).map(|(_, secret)| secret)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prefix_wins() {
        let text = r#"{"s3": {"": {"key_id": "a"}, "s3://b": {"key_id": "b"}, "s3://b/c/": {"key_id": "c", "region": "r"}},
                       "gs": {"gs://g": "/file"}, "as": {"": {"account_str": "n", "account_key": "k"}}}"#;
        let credentials: Credentials = serde_json::from_str(text).unwrap();
        for (address, expected) in [
            ("s3://other/x", "a"),
            ("s3://b", "b"),
            ("s3://b/x", "b"),
            ("s3://bb/x", "a"),
            ("s3://b/c", "c"),
            ("s3://b/c/d", "c"),
            ("s3://b/cd", "b"),
        ] {
            assert_eq!(credentials.s3(address).unwrap().key_id, expected, "{address}");
        }
        assert_eq!(
            (credentials.gs("gs://g/m").as_deref(), credentials.gs("gs://h")),
            (Some("/file"), None)
        );
        assert_eq!(credentials.azure("as://a/b").unwrap().account_key, "k");
    }

    #[test]
    fn messages_contain_no_secrets() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credentials.json");
        fs::write(&path, r#"{"s3": "hush"}"#).unwrap();
        let error = Credentials::read(&path).err().unwrap();
        fs::remove_file(&path).unwrap();
        assert!(error.ends_with("cannot be used: invalid JSON at line 1, column 13"), "{error}");
        assert!(Credentials::read(&path).err().unwrap().contains("No such file"));
    }
}
