//! Request ids, and keys for clients. Keys are random bytes of the kernel. Ids are derived from one
//! random secret and a counter, so creating one takes no system call.

use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;

/// A generator of request ids.
pub(super) struct Ids {
    secret: [u8; 32],
    next: AtomicU64,
}

impl Ids {
    /// Creates a generator whose ids differ from the ids of other servers.
    ///
    /// # Errors
    /// The kernel returned no random bytes.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { secret: random()?, next: AtomicU64::new(0) })
    }

    /// Returns a new id: a UUID of version 4 (RFC 9562).
    pub(super) fn next(&self) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let hash = blake3::keyed_hash(&self.secret, &number.to_le_bytes());
        let bits =
            hash.as_bytes().iter().take(16).fold(0u128, |bits, byte| bits << 8 | u128::from(*byte));
        // Version 4 and the variant, at their places from the right (RFC 9562, 5.4).
        let uuid = bits & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
        let text = format!("{uuid:032x}");
        [0..8, 8..12, 12..16, 16..20, 20..32]
            .map(|range| text.get(range).unwrap_or_default())
            .join("-")
    }
}

/// Returns a random key of eight characters, as in TorchServe.
///
/// # Errors
/// The kernel returned no random bytes.
pub(super) fn key() -> io::Result<String> {
    Ok(URL_SAFE.encode(random::<6>()?))
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ids_are_uuids_and_all_different() {
        let ids = Ids::new().unwrap();
        let all: BTreeSet<String> = (0..1000).map(|_| ids.next()).collect();
        assert_eq!(all.len(), 1000);
        let pattern = regex::Regex::new(
            "^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$",
        )
        .unwrap();
        assert!(all.iter().all(|id| pattern.is_match(id)));
        assert_ne!(Ids::new().unwrap().next(), Ids::new().unwrap().next());
        assert_eq!((key().unwrap().len(), key().unwrap() == key().unwrap()), (8, false));
    }
}
