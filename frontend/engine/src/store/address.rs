//! The address of a repository: a directory, or a place in an object store in Triton's notation.

use std::fmt::{self, Display};
use std::path::PathBuf;
use std::str::FromStr;

/// A repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A local directory.
    Directory(PathBuf),
    /// Objects whose keys have a common prefix.
    Objects(Address),
}

/// The repositories in one value of the option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Locations(pub Vec<Location>);

/// The protocol of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Amazon S3 and compatible stores.
    S3,
    /// Google Cloud Storage.
    Gcs,
    /// Azure Blob Storage.
    Azure,
}

/// A place in an object store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The address as given by the user.
    text: String,
    /// The protocol of the store.
    pub protocol: Protocol,
    /// The server, if the other fields do not determine it: `http://host:port` or
    /// `https://host:port`.
    pub endpoint: Option<String>,
    /// The storage account (Azure).
    pub account: Option<String>,
    /// The bucket (Azure: container).
    pub bucket: String,
    /// The prefix of all keys: names joined by '/', without '/' at the ends; may be empty.
    pub prefix: String,
}

impl Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => path.display().fmt(f),
            Self::Objects(address) => address.fmt(f),
        }
    }
}

impl FromStr for Locations {
    type Err = String;

    /// Parses the address of a store, or directories separated by ':'.
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((scheme, _)) = text.split_once("://") {
            return match scheme.contains(['/', ':']) {
                true => {
                    Err("give each store in a separate option, not separated by ':'".to_owned())
                }
                false => Ok(Self(vec![Location::Objects(text.parse()?)])),
            };
        }
        let parts = text.split(':').filter(|part| !part.is_empty());
        let directories: Vec<Location> =
            parts.map(|part| Location::Directory(part.into())).collect();
        if directories.is_empty() {
            return Err("a directory or the address of a store is needed".to_owned());
        }
        Ok(Self(directories))
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (protocol, rest) = match text.split_once("://") {
            Some(("s3", rest)) => (Protocol::S3, rest),
            Some(("gs", rest)) => (Protocol::Gcs, rest),
            Some(("as", rest)) => (Protocol::Azure, rest),
            _ => {
                return Err("allowed are directories, s3://BUCKET/PATH, gs://BUCKET/PATH, \
                            as://ACCOUNT/CONTAINER/PATH"
                    .into());
            }
        };
        let (endpoint, rest) = match protocol {
            Protocol::S3 => endpoint(rest)?,
            Protocol::Gcs | Protocol::Azure => (None, rest.to_owned()),
        };
        let mut parts = rest.split('/');
        let account = match protocol {
            Protocol::Azure => Some(named("storage account", parts.next())?),
            Protocol::S3 | Protocol::Gcs => None,
        };
        let bucket =
            named(if protocol == Protocol::Azure { "container" } else { "bucket" }, parts.next())?;
        Ok(Self {
            text: text.to_owned(),
            protocol,
            endpoint,
            account,
            bucket,
            prefix: prefix(parts)?,
        })
    }
}

/// Splits off `https://host:port/...`, `http://host:port/...` or, for HTTP, `host:port/...`; other
/// texts have no endpoint.
fn endpoint(text: &str) -> Result<(Option<String>, String), String> {
    let (scheme, rest) = match text.split_once("://") {
        Some((scheme @ ("http" | "https"), rest)) => (scheme, rest),
        Some((scheme, _)) => {
            return Err(format!(
                "'{scheme}' is not a protocol of S3 endpoints: allowed are http and https"
            ));
        }
        None if text.split('/').next().is_some_and(|first| first.contains(':')) => ("http", text),
        None => return Ok((None, text.to_owned())),
    };
    let (authority, rest) = rest.split_once('/').unwrap_or((rest, ""));
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.parse::<u16>().is_ok_and(|port| port > 0) => host,
        _ => return Err(format!("'{authority}' is not an S3 endpoint: HOST:PORT is needed")),
    };
    if host.is_empty() || !host.chars().all(|c| c.is_ascii_alphanumeric() || "-._[]:".contains(c)) {
        return Err(format!("'{authority}' is not an S3 endpoint: HOST:PORT is needed"));
    }
    Ok((Some(format!("{scheme}://{authority}")), rest.to_owned()))
}

/// Checks the name of a bucket, a container or an account.
fn named(what: &str, name: Option<&str>) -> Result<String, String> {
    let name = name.unwrap_or_default();
    let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
    if name.is_empty() || name.len() > 255 || !is_plain || name.starts_with('.') {
        let rule = "letters, digits, '-', '_' and '.' are allowed";
        return Err(format!("the address names no {what} ('{}'): {rule}", name.escape_debug()));
    }
    Ok(name.to_owned())
}

/// Returns the prefix of keys, without empty names at the ends.
fn prefix<'a>(parts: impl Iterator<Item = &'a str>) -> Result<String, String> {
    let joined = parts.collect::<Vec<_>>().join("/");
    let path = joined.trim_matches('/');
    let invalid = path.split('/').find(|part| {
        part.is_empty() || matches!(*part, "." | "..") || part.chars().any(char::is_control)
    });
    match invalid {
        Some(part) if !path.is_empty() => Err(format!(
            "'{}' is not a valid name in a store path: expected a name without control \
             characters, not '', '.' or '..'",
            part.escape_debug()
        )),
        _ => Ok(path.to_owned()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> (Protocol, Option<String>, Option<String>, String, String) {
        let address: Address = text.parse().unwrap();
        assert_eq!(address.to_string(), text);
        (address.protocol, address.endpoint, address.account, address.bucket, address.prefix)
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn addresses() {
        let s3 = |endpoint: Option<&str>, prefix: &str| {
            (
                Protocol::S3,
                endpoint.map(str::to_owned),
                None,
                "bucket".to_owned(),
                prefix.to_owned(),
            )
        };
        for (text, expected) in [
            ("s3://bucket", s3(None, "")),
            ("s3://bucket/", s3(None, "")),
            ("s3://bucket/a/b/", s3(None, "a/b")),
            ("s3://https://host:9000/bucket/a", s3(Some("https://host:9000"), "a")),
            ("s3://http://10.0.0.1:9000/bucket", s3(Some("http://10.0.0.1:9000"), "")),
            ("s3://host:9000/bucket/a", s3(Some("http://host:9000"), "a")),
            ("s3://http://[::1]:9000/bucket", s3(Some("http://[::1]:9000"), "")),
            ("gs://bucket/a", (Protocol::Gcs, None, None, "bucket".to_owned(), "a".to_owned())),
            (
                "as://account/bucket/a",
                (Protocol::Azure, None, some("account"), "bucket".to_owned(), "a".to_owned()),
            ),
        ] {
            assert_eq!(parsed(text), expected, "{text}");
        }
    }

    #[test]
    fn explains_invalid_addresses() {
        for (text, expected) in [
            ("s3://", "names no bucket"),
            ("s3:///x", "names no bucket"),
            ("s3://bu cket/x", "names no bucket"),
            ("s3://../x", "names no bucket"),
            ("as://account", "names no container"),
            ("as://", "names no storage account"),
            ("ftp://bucket/x", "allowed are directories, s3://"),
            ("s3://ftp://host:1/bucket", "allowed are http and https"),
            ("s3://https://host/bucket", "HOST:PORT is needed"),
            ("s3://https://host:0/bucket", "HOST:PORT is needed"),
            ("s3://http://user@host:1/bucket", "HOST:PORT is needed"),
            ("s3://bucket/a/../b", "'..' is not a valid name"),
            ("s3://bucket/a//b", "'' is not a valid name"),
            ("models:s3://bucket", "in a separate option"),
            ("", "is needed"),
        ] {
            let error = text.parse::<Locations>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn directories_are_separated_by_colons() {
        let directories = |names: &[&str]| {
            Locations(names.iter().map(|name| Location::Directory((*name).into())).collect())
        };
        assert_eq!("models".parse(), Ok(directories(&["models"])));
        assert_eq!("/a:b/c:".parse(), Ok(directories(&["/a", "b/c"])));
    }

    proptest! {
        #[test]
        fn prefixes_stay_below_the_bucket(text in "(s3|gs|as)://[a-z./:%\\\\]{0,24}") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert!(!address.bucket.is_empty() && !address.bucket.contains('/'));
                let good = |part: &str| !part.is_empty() && part != "." && part != "..";
                prop_assert!(address.prefix.is_empty() || address.prefix.split('/').all(good), "{}", address.prefix);
            }
        }
    }
}
