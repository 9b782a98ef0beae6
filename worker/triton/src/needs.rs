//! What a backend's library needs from its host, read from its file before it is loaded: an error
//! about a missing function then names the function.

use object::LittleEndian;
use object::elf::{DT_NEEDED, FileHeader64, SHN_UNDEF, SHT_DYNSYM};
use object::read::elf::{Dyn, FileHeader, Sym};

/// The names that a library needs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Its dependencies that stand for Triton: `libtritonserver*.so*`.
    pub(crate) servers: Vec<String>,
    /// The functions of Triton's interface that it calls.
    pub(crate) functions: Vec<String>,
}

/// Reads the file of a library. A file without sections gives no names.
///
/// # Errors
/// The file is not a valid ELF file; the text is the end of a sentence.
pub(crate) fn of_bytes(bytes: &[u8]) -> Result<Needs, String> {
    let wrong = |error: object::read::Error| format!("is not a valid shared library: {error}");
    let header = FileHeader64::<LittleEndian>::parse(bytes).map_err(wrong)?;
    let endian = header.endian().map_err(wrong)?;
    let sections = header.sections(endian, bytes).map_err(wrong)?;
    let mut needs = Needs::default();
    if let Some((entries, strings)) = sections.dynamic(endian, bytes).map_err(wrong)? {
        let strings = sections.strings(endian, bytes, strings).map_err(wrong)?;
        for entry in entries.iter().filter(|entry| entry.tag(endian) == DT_NEEDED) {
            let name = entry.string(endian, strings).map_err(wrong)?;
            let name = String::from_utf8_lossy(name);
            if name.starts_with("libtritonserver") && name.contains(".so") {
                needs.servers.push(name.into_owned());
            }
        }
    }
    let symbols = sections.symbols(endian, bytes, SHT_DYNSYM).map_err(wrong)?;
    for symbol in symbols.iter().filter(|symbol| symbol.st_shndx(endian) == SHN_UNDEF) {
        let name = symbols.symbol_name(endian, symbol).map_err(wrong)?;
        if name.starts_with(b"TRITON") {
            needs.functions.push(String::from_utf8_lossy(name).into_owned());
        }
    }
    Ok(needs)
}
