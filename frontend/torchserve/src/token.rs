//! TorchServe's tokens: three keys that the server creates at startup and writes to a file that
//! only its user can read. They authorize inference, management, and the creation of new keys.

use std::io;
use std::path::Path;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pharos::timeline::Instant;
use serde::{Deserialize, Serialize};

use super::ids::key;
use super::settings::Token;
use super::{ErrorResponse, Exception};
use pharos_os::clock;
use pharos_os::directories;

/// The operation that a key authorizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Predictions and health.
    Inference,
    /// Model management.
    Management,
    /// Creating a new key.
    Renewal,
}

/// The message of every refusal.
pub const FAILED: &str =
    "Token Authorization failed. Token either incorrect, expired, or not provided correctly";

/// A key with an expiration time.
#[derive(Clone)]
struct Expiring {
    key: String,
    until: Instant,
    /// The expiration time in wall-clock time, for the file.
    shown: String,
}

#[derive(Clone)]
struct Keys {
    management: Expiring,
    inference: Expiring,
    renewal: String,
}

/// The key file, with its fields in TorchServe's order.
#[derive(Serialize, Deserialize)]
struct KeyFile {
    management: Shown,
    inference: Shown,
    #[serde(rename = "API")]
    renewal: Shown,
}

#[derive(Serialize, Deserialize)]
struct Shown {
    key: String,
    #[serde(rename = "expiration time", skip_serializing_if = "Option::is_none")]
    expiration: Option<String>,
}

/// The keys of a server.
pub struct Tokens {
    settings: Token,
    // Locked to compare or to replace keys, without any wait.
    keys: Mutex<Keys>,
    // Held while keys are renewed and written to the file.
    renewal: Mutex<()>,
}

impl Tokens {
    /// Creates new keys and writes them to the configured file.
    ///
    /// # Errors
    /// The file cannot be written, or the kernel returned no random bytes.
    pub fn new(settings: Token) -> io::Result<Self> {
        let expiration = settings.expiration;
        let keys = Keys {
            management: expiring(expiration)?,
            inference: expiring(expiration)?,
            renewal: key()?,
        };
        let tokens = Self { settings, keys: Mutex::new(keys), renewal: Mutex::default() };
        tokens.write(&tokens.keys())?;
        Ok(tokens)
    }

    /// Checks the key in an `Authorization` header.
    ///
    /// # Errors
    /// The key is missing, wrong or expired; the error is TorchServe's.
    pub fn check(
        &self,
        purpose: Purpose,
        authorization: Option<&[u8]>,
    ) -> Result<(), ErrorResponse> {
        let given = authorization.and_then(bearer).unwrap_or_default();
        let keys = self.keys();
        let (known, until) = match purpose {
            Purpose::Inference => (&keys.inference.key, Some(keys.inference.until)),
            Purpose::Management => (&keys.management.key, Some(keys.management.until)),
            Purpose::Renewal => (&keys.renewal, None),
        };
        // Comparing hashes takes constant time.
        let same = blake3::hash(given) == blake3::hash(known.as_bytes());
        if same && until.is_none_or(|until| clock::now() < until) {
            return Ok(());
        }
        Err(ErrorResponse::new(400, Exception::InvalidKey, FAILED.to_owned()))
    }

    /// Replaces the key of the given name and writes the file, which can take long. Returns `None`
    /// for an unknown name.
    ///
    /// # Errors
    /// As for [`Tokens::new`]; the old key stays valid.
    pub fn renew(&self, name: &str) -> io::Result<Option<()>> {
        let _turn = self.renewal.lock();
        let mut keys = self.keys().clone();
        let place = match name {
            "management" => &mut keys.management,
            "inference" => &mut keys.inference,
            _ => return Ok(None),
        };
        *place = expiring(self.settings.expiration)?;
        self.write(&keys)?;
        *self.keys() = keys;
        Ok(Some(()))
    }

    fn write(&self, keys: &Keys) -> io::Result<()> {
        let expiring =
            |key: &Expiring| Shown { key: key.key.clone(), expiration: Some(key.shown.clone()) };
        let file = KeyFile {
            management: expiring(&keys.management),
            inference: expiring(&keys.inference),
            renewal: Shown { key: keys.renewal.clone(), expiration: None },
        };
        let text = serde_json::to_string_pretty(&file).map_err(io::Error::other)?;
        directories::replace(&self.settings.file, &text, is_key_file)
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock()
    }
}

fn is_key_file(text: &str) -> bool {
    serde_json::from_str::<KeyFile>(text).is_ok()
}

/// Removes the key file of a server that stops. A file of another server is kept.
pub fn remove(file: &Path) {
    if directories::read(file).is_ok_and(|found| found.is_some_and(|(text, _)| is_key_file(&text)))
    {
        let _ = std::fs::remove_file(file);
    }
}

/// Returns the token of a `Bearer` header value.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

fn expiring(expiration: Duration) -> io::Result<Expiring> {
    let wall =
        clock::wall_ms().saturating_add(u64::try_from(expiration.as_millis()).unwrap_or(u64::MAX));
    let shown = jiff::Timestamp::from_millisecond(i64::try_from(wall).unwrap_or(i64::MAX))
        .unwrap_or_default();
    Ok(Expiring { key: key()?, until: clock::now() + expiration, shown: shown.to_string() })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use tempfile::TempDir;

    use super::*;

    fn tokens(minutes: u64) -> (TempDir, Tokens, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key_file.json");
        let settings = Token { expiration: Duration::from_secs(minutes * 60), file: file.clone() };
        (folder, Tokens::new(settings).unwrap(), file)
    }

    fn read(file: &Path) -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
    }

    fn header(value: &serde_json::Value, name: &str) -> Vec<u8> {
        format!("Bearer {}", value[name]["key"].as_str().unwrap()).into_bytes()
    }

    #[test]
    fn each_key_authorizes_only_its_purpose() {
        let (_folder, tokens, file) = tokens(60);
        let keys = read(&file);
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        for (name, purpose) in [
            ("inference", Purpose::Inference),
            ("management", Purpose::Management),
            ("API", Purpose::Renewal),
        ] {
            for (other, wanted) in [
                ("inference", Purpose::Inference),
                ("management", Purpose::Management),
                ("API", Purpose::Renewal),
            ] {
                let given = header(&keys, other);
                assert_eq!(
                    tokens.check(purpose, Some(&given)).is_ok(),
                    purpose == wanted,
                    "{name} with {other}"
                );
            }
            for wrong in [None, Some(&b""[..]), Some(b"Bearer"), Some(b"Bearer "), Some(b"Basic x")]
            {
                let refused = tokens.check(purpose, wrong).unwrap_err();
                assert_eq!(
                    (refused.status, refused.exception, &*refused.message),
                    (400, Exception::InvalidKey, FAILED)
                );
            }
        }
        assert_eq!(tokens.renew("inference").unwrap(), Some(()));
        assert_eq!(tokens.renew("other").unwrap(), None);
        let renewed = read(&file);
        assert!(tokens.check(Purpose::Inference, Some(&header(&keys, "inference"))).is_err());
        assert!(tokens.check(Purpose::Inference, Some(&header(&renewed, "inference"))).is_ok());
        assert_eq!(renewed["management"], keys["management"]);
    }

    #[test]
    fn keys_expire() {
        let (_folder, tokens, file) = tokens(0);
        let keys = read(&file);
        assert!(tokens.check(Purpose::Inference, Some(&header(&keys, "inference"))).is_err());
        assert!(tokens.check(Purpose::Renewal, Some(&header(&keys, "API"))).is_ok());
    }
}
