//! The definition of the metrics as it is read: at the start, at SIGHUP, and by `pharos metrics`.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use pharos::metrics::catalog::{self, Catalog, Mode, Overrides};

/// The metrics' definition: its text, which workers read too, and what it means.
pub struct Definition {
    /// The file's text.
    pub text: String,
    /// Its metrics.
    pub catalog: Catalog,
    /// The user has named the mode.
    pub names_mode: bool,
}

/// Where the definition comes from and what the command line says over it.
#[derive(Clone, Debug, Default)]
pub struct Source {
    /// The file; `None` for the shipped definition.
    pub file: Option<PathBuf>,
    /// What is said over the file.
    pub overrides: Overrides,
    /// The mode where neither the command line nor a file of the user names one; `None` for that of the definition.
    pub usual_mode: Option<Mode>,
}

impl Source {
    /// Reads the definition as it is now. What it hardly means is said in the log.
    ///
    /// # Errors
    /// The file cannot be read, or is wrong: with file, line, column, the offending name and what is allowed.
    pub fn read(&self) -> Result<Definition, String> {
        let (text, catalog) = read(self.file.as_deref())?;
        for warning in catalog.warnings() {
            tracing::warn!("metrics from {self}: {warning}");
        }
        // The mode in the shipped definition is a default, not a choice of the user.
        let named = self.overrides.mode.is_some() || (self.file.is_some() && catalog.names_mode());
        let catalog = match self.usual_mode.filter(|_| !named) {
            Some(mode) => catalog.with_mode(mode),
            None => catalog,
        };
        Ok(Definition { text, catalog: self.overrides.apply(catalog), names_mode: named })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => write!(f, "'{}'", file.display()),
            None => f.write_str("the metrics.yaml built in"),
        }
    }
}

/// The text of a file, or of the shipped definition, and what it defines.
///
/// # Errors
/// As [`Source::read`].
pub fn read(file: Option<&Path>) -> Result<(String, Catalog), String> {
    let Some(path) = file else {
        return Ok((catalog::SHIPPED.to_owned(), Catalog::shipped()));
    };
    let mut bytes = Vec::new();
    // One byte more than is allowed, so that the parser sees what is too long; a device file would have no end.
    let most = catalog::MAX_BYTES as u64 + 1;
    let result = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    result.map_err(|error| format!("--metrics-config '{}' cannot be read: {error}", path.display()))?;
    let text =
        String::from_utf8(bytes).map_err(|error| not_utf8(path, error.as_bytes(), error.utf8_error().valid_up_to()))?;
    let catalog = Catalog::parse(&text, &path.to_string_lossy()).map_err(|error| error.to_string())?;
    Ok((text, catalog))
}

/// The position of the first byte that is no text.
fn not_utf8(path: &Path, bytes: &[u8], at: usize) -> String {
    let before = String::from_utf8_lossy(&bytes[..at]);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    let byte = bytes.get(at).copied().unwrap_or_default();
    format!("{}:{line}:{column}: the byte 0x{byte:02x} is not UTF-8; a metrics.yaml is UTF-8 text", path.display())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_text_has_a_position() {
        let message = not_utf8(Path::new("m.yaml"), b"mode: both\n# \xc3\xa4 \xff", 16);
        assert!(message.starts_with("m.yaml:2:5: the byte 0xff is not UTF-8"), "{message}");
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let source = Source { file: Some("no/such.yaml".into()), ..Source::default() };
        let message = source.read().err().unwrap();
        assert!(message.starts_with("--metrics-config 'no/such.yaml' cannot be read: No such file"), "{message}");
        assert_eq!(Source::default().read().unwrap().text, catalog::SHIPPED);
    }
}
