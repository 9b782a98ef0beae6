//! Reads the definition of the metrics: at start-up, on SIGHUP, and for `pharos metrics`.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use pharos::metrics::catalog::{self, Catalog, Mode, Overrides};

/// The definition of the metrics.
pub struct Definition {
    /// The metrics, with the overrides of the command line.
    pub catalog: Catalog,
    /// Whether the user has set the mode.
    pub names_mode: bool,
}

/// The source of the definition, with the overrides of the command line.
#[derive(Clone, Debug, Default)]
pub struct Source {
    /// The file; `None` for the shipped definition.
    pub file: Option<PathBuf>,
    /// Settings that override the file.
    pub overrides: Overrides,
    /// The mode if neither the command line nor a file of the user sets one; `None` for the mode
    /// of the definition.
    pub usual_mode: Option<Mode>,
}

impl Source {
    /// Reads the current definition. Logs a warning about valid but probably unintended settings.
    ///
    /// # Errors
    /// The file cannot be read or is invalid; the text has file, line, column, the offending name
    /// and what is allowed.
    pub fn read(&self) -> Result<Definition, String> {
        let catalog = read(self.file.as_deref())?;
        for warning in catalog.warnings() {
            tracing::warn!("metrics from {self}: {warning}");
        }
        // The mode in the shipped definition is a default, not a choice of the user.
        let names_mode =
            self.overrides.mode.is_some() || (self.file.is_some() && catalog.names_mode());
        let catalog = match self.usual_mode {
            Some(mode) if !names_mode => catalog.with_mode(mode),
            _ => catalog,
        };
        Ok(Definition { catalog: self.overrides.apply(catalog), names_mode })
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some(file) => write!(f, "'{}'", file.display()),
            None => f.write_str("the built-in metrics.yaml"),
        }
    }
}

/// Reads and parses a file, or the shipped definition.
///
/// # Errors
/// The same as for [`Source::read`].
pub fn read(file: Option<&Path>) -> Result<Catalog, String> {
    let Some(path) = file else { return Ok(Catalog::shipped()) };
    let mut bytes = Vec::new();
    // Reads one byte more than allowed, so that the parser detects an oversized file; a device file
    // would have no end.
    let most = catalog::MAX_BYTES as u64 + 1;
    let result = File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes));
    result
        .map_err(|error| format!("cannot read --metrics-config '{}': {error}", path.display()))?;
    let text = String::from_utf8(bytes)
        .map_err(|error| not_utf8(path, error.as_bytes(), error.utf8_error().valid_up_to()))?;
    Catalog::parse(&text, &path.to_string_lossy()).map_err(|error| error.to_string())
}

/// Returns an error with the position of the first byte that is not UTF-8.
fn not_utf8(path: &Path, bytes: &[u8], at: usize) -> String {
    let before = String::from_utf8_lossy(&bytes[..at]);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    let byte = bytes.get(at).copied().unwrap_or_default();
    format!(
        "{}:{line}:{column}: the byte 0x{byte:02x} is not UTF-8; metrics.yaml must be UTF-8 text",
        path.display()
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn reports_the_position_of_a_byte_that_is_not_utf8() {
        let message = not_utf8(Path::new("m.yaml"), b"mode: both\n# \xc3\xa4 \xff", 16);
        assert!(message.starts_with("m.yaml:2:5: the byte 0xff is not UTF-8"), "{message}");
    }

    #[test]
    fn names_a_missing_file() {
        let source = Source { file: Some("no/such.yaml".into()), ..Source::default() };
        let message = source.read().err().unwrap();
        assert!(
            message.starts_with("cannot read --metrics-config 'no/such.yaml': No such file"),
            "{message}"
        );
        assert_eq!(Source::default().read().unwrap().catalog.len(), Catalog::shipped().len());
    }
}
