//! The file that `TRITON_CLOUD_CREDENTIAL_PATH` names: credentials by the beginnings of addresses, as Triton's documentation of
//! model repositories describes it. Values are in no message.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;

/// All that the file has, by protocol, then by the beginning of an address.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Credentials {
    s3: BTreeMap<String, S3>,
    gs: BTreeMap<String, String>,
    #[serde(rename = "as")]
    azure: BTreeMap<String, Azure>,
}

/// For S3; what is empty is not given.
#[derive(Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct S3 {
    pub(super) key_id: String,
    pub(super) secret_key: String,
    pub(super) session_token: String,
    pub(super) region: String,
    pub(super) profile: String,
}

/// For Azure.
#[derive(Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Azure {
    pub(super) account_str: String,
    pub(super) account_key: String,
}

impl Credentials {
    /// # Errors
    /// The file cannot be read, or has another form.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let named = |reason: String| format!("the credentials in '{}' cannot be used: {reason}", path.display());
        let text = fs::read_to_string(path).map_err(|error| named(error.to_string()))?;
        // The parser's own message could tell a secret.
        let place =
            |error: serde_json::Error| format!("no such JSON at line {}, column {}", error.line(), error.column());
        serde_json::from_str(&text).map_err(|error| named(place(error)))
    }

    pub(super) fn s3(&self, address: &str) -> Option<S3> {
        longest(&self.s3, address).cloned()
    }

    /// The path of a file as `GOOGLE_APPLICATION_CREDENTIALS` names one.
    pub(super) fn gs(&self, address: &str) -> Option<String> {
        longest(&self.gs, address).cloned()
    }

    pub(super) fn azure(&self, address: &str) -> Option<Azure> {
        longest(&self.azure, address).cloned()
    }
}

/// What belongs to the longest beginning of the address, whole names only.
fn longest<'a, T>(all: &'a BTreeMap<String, T>, address: &str) -> Option<&'a T> {
    let begins = |start: &str| {
        let rest = address.strip_prefix(start.trim_end_matches('/'));
        start.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    all.iter().filter(|(start, _)| begins(start)).max_by_key(|(start, _)| start.len()).map(|(_, secret)| secret)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_beginning_wins() {
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
        assert_eq!((credentials.gs("gs://g/m").as_deref(), credentials.gs("gs://h")), (Some("/file"), None));
        assert_eq!(credentials.azure("as://a/b").unwrap().account_key, "k");
    }

    #[test]
    fn no_message_has_a_secret() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credentials.json");
        fs::write(&path, r#"{"s3": "hush"}"#).unwrap();
        let error = Credentials::read(&path).err().unwrap();
        fs::remove_file(&path).unwrap();
        assert!(error.ends_with("cannot be used: no such JSON at line 1, column 13"), "{error}");
        assert!(Credentials::read(&path).err().unwrap().contains("No such file"));
    }
}
