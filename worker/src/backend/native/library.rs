//! Finds the functions of a backend in a shared library, or explains why the file is not a backend.
//!
//! Contract for `unsafe`: loading a library runs its initialization code, which the user has chosen
//! to trust. It is never unloaded, so its symbols stay valid. Symbols of the names below are
//! functions of the types in [`abi`]: the header specifies this, and the library's version is
//! checked before any other function is called.

use std::ffi::{CStr, CString, OsStr, c_void};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::abi;

/// The functions that a backend's library exports.
pub(super) struct Functions {
    pub(super) create: abi::Create,
    pub(super) execute: abi::Execute,
    pub(super) destroy: abi::Destroy,
    pub(super) sequence_ended: Option<abi::SequenceEnded>,
    /// The flags that `pharos_backend_wants` returns.
    pub(super) wants: u32,
    /// The name of the engine, if the library provides one.
    pub(super) engine: Option<String>,
}

/// Loads a library.
///
/// # Errors
/// Why the file is not a backend, as the end of a sentence that begins with its path.
pub(super) fn open(path: &Path) -> Result<Functions, String> {
    check_file(path)?;
    let library = Library::open(path)?;
    // SAFETY: the header specifies this type.
    let version = unsafe { library.function::<abi::AbiVersion>(c"pharos_backend_abi_version") };
    let version = version.ok_or_else(|| {
        "has no function pharos_backend_abi_version: it is not a backend for this server, see \
         pharos_backend.h"
            .to_owned()
    })?;
    // SAFETY: it takes no arguments.
    let version = unsafe { version() };
    if version != abi::VERSION {
        return Err(format!(
            "was built for version {version} of pharos_backend.h, this server has version {}: \
             rebuild it",
            abi::VERSION
        ));
    }
    // SAFETY: the types match the header of this version.
    let (create, execute, destroy, sequence_ended, wants, engine) = unsafe {
        (
            library.function::<abi::Create>(c"pharos_backend_create"),
            library.function::<abi::Execute>(c"pharos_backend_execute"),
            library.function::<abi::Destroy>(c"pharos_backend_destroy"),
            library.function::<abi::SequenceEnded>(c"pharos_backend_sequence_ended"),
            library.function::<abi::Wants>(c"pharos_backend_wants"),
            library.function::<abi::Engine>(c"pharos_backend_engine"),
        )
    };
    let (Some(create), Some(execute), Some(destroy)) = (create, execute, destroy) else {
        let missing = [
            ("create", create.is_none()),
            ("execute", execute.is_none()),
            ("destroy", destroy.is_none()),
        ];
        let missing = missing
            .iter()
            .filter(|(_, missing)| *missing)
            .map(|(name, _)| format!("pharos_backend_{name}"));
        return Err(format!("has no function {}", missing.collect::<Vec<_>>().join(", ")));
    };
    // SAFETY: the header requires a string that lives as long as the library; null is handled.
    let engine = engine.and_then(|engine| unsafe { super::foreign::text(engine()) });
    // SAFETY: it takes no arguments.
    let wants = wants.map_or(0, |wants| unsafe { wants() });
    Ok(Functions { create, execute, destroy, sequence_ended, wants, engine })
}

/// A library loaded into the process.
struct Library {
    handle: *mut c_void,
}

impl Library {
    fn open(path: &Path) -> Result<Self, String> {
        let text = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| "has a NUL byte in its name".to_owned())?;
        // SAFETY: this module's contract; the name ends with a NUL.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !handle.is_null() {
            return Ok(Self { handle });
        }
        // SAFETY: null, or a string that stays valid until this thread's next call of these
        // functions.
        let reason = unsafe { super::foreign::text(libc::dlerror()) }
            .unwrap_or_else(|| "unknown reason".to_owned());
        // The loader's message begins with a path, usually this one.
        let own = format!("{}: ", path.display());
        Err(format!("cannot be loaded: {}", reason.strip_prefix(&own).unwrap_or(&reason)))
    }

    /// Returns the function of this name.
    ///
    /// # Safety
    /// `F` is a function pointer of the symbol's type.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the library is loaded; the name ends with a NUL.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        // SAFETY: not null, of a function pointer's size, and of this type, as the caller
        // guarantees.
        (!found.is_null()).then(|| unsafe { std::mem::transmute_copy(&found) })
    }
}

/// Checks for problems that the loader reports unclearly: no file, not a library, a library for
/// another machine.
fn check_file(path: &Path) -> Result<(), String> {
    let own = header(Path::new("/proc/self/exe"));
    let header = header(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => "does not exist".to_owned(),
        _ => format!("cannot be read: {error}"),
    })?;
    check_header(&header, own.as_deref().unwrap_or(&header))?;
    check_length(path)
}

/// Checks the minimum length of an ELF file of 64 bits and this byte order against its program
/// header; the loader would end the process if the file is shorter. ELF-64 Object File Format,
/// version 1.5: figures 2 and 6.
fn check_length(path: &Path) -> Result<(), String> {
    let unreadable = |error: std::io::Error| format!("cannot be read: {error}");
    let file = File::open(path).map_err(unreadable)?;
    let length = file.metadata().map_err(unreadable)?.len();
    let read = |at: u64, bytes: usize| {
        let mut value = [0; 8];
        let found = value.get_mut(..bytes).map(|value| file.read_exact_at(value, at));
        matches!(found, Some(Ok(()))).then(|| u64::from_le_bytes(value))
    };
    if read(4, 2) != Some(0x0102) {
        return Ok(());
    }
    let needed = || {
        let start = read(32, 8)?;
        let size = read(54, 2)?;
        let count = read(56, 2)?;
        let end = |entry: u64| {
            let entry = start.checked_add(entry * size)?;
            read(entry.checked_add(8)?, 8)?.checked_add(read(entry.checked_add(32)?, 8)?)
        };
        (0..count).try_fold(64, |longest, entry| end(entry).map(|end| longest.max(end)))
    };
    match needed() {
        Some(needed) if needed <= length => Ok(()),
        Some(needed) => {
            Err(format!("is truncated: it has {length} bytes, expected at least {needed}"))
        }
        None => Err(format!("is truncated: it has {length} bytes, less than a whole header")),
    }
}

/// Returns the first bytes of a file, up to the fields that identify its machine.
fn header(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(20).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Compares the header of an ELF file (its class, byte order and machine) with the header of this
/// program's file.
fn check_header(header: &[u8], own: &[u8]) -> Result<(), String> {
    let Some((b"\x7fELF", [class, order, ..])) =
        header.split_first_chunk::<4>().filter(|_| header.len() == 20)
    else {
        return Err("is not a shared library (not an ELF file)".to_owned());
    };
    let kind =
        |header: &[u8]| Some((*header.get(4)?, *header.get(5)?, header.get(18..20)?.to_vec()));
    if kind(header) == kind(own) {
        return Ok(());
    }
    let class = *class;
    let order = *order;
    let name = |header: &[u8]| match header.get(18..20).map(|machine| (machine[0], machine[1])) {
        Some((62, 0)) => "x86-64".to_owned(),
        Some((183, 0)) => "aarch64".to_owned(),
        Some((3, 0)) => "32-bit x86".to_owned(),
        Some((40, 0)) => "32-bit ARM".to_owned(),
        Some((243, 0)) => "RISC-V".to_owned(),
        machine => format!("another machine (class {class}, order {order}, machine {machine:?})"),
    };
    Err(format!("was built for {}, this server runs on {}", name(header), name(own)))
}

/// Returns the file's name, for a library that does not name its engine.
pub(super) fn name(path: &Path) -> String {
    path.file_name().map(OsStr::to_string_lossy).unwrap_or_default().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_for_other_machines_are_recognized_by_their_header() {
        let own = [b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0".as_slice(), &[62, 0]].concat();
        let other = |machine: u8| [&own[..18], &[machine, 0]].concat();
        let refused = |header: &[u8]| check_header(header, &own).expect_err("another machine");
        assert_eq!(check_header(&own, &own), Ok(()));
        assert_eq!(refused(&other(183)), "was built for aarch64, this server runs on x86-64");
        assert_eq!(refused(&other(3)), "was built for 32-bit x86, this server runs on x86-64");
        assert!(refused(&other(7)).starts_with("was built for another machine"));
        assert_eq!(
            refused(b"#!/bin/sh\nexit 0\n#####"),
            "is not a shared library (not an ELF file)"
        );
        assert_eq!(refused(&own[..19]), "is not a shared library (not an ELF file)");
        assert_eq!(refused(b""), "is not a shared library (not an ELF file)");
    }

    #[test]
    fn files_that_are_not_backends_are_refused_with_a_reason() {
        let refused = |path: &Path| open(path).err().unwrap_or_default();
        assert_eq!(refused(Path::new("/nowhere/libx.so")), "does not exist");
        assert!(refused(Path::new("/")).starts_with("cannot be read: "));
        // A library that is already loaded in every program here, and is not a backend.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let library =
            maps.split_whitespace().find(|word| word.contains("/libc.so")).expect("the C library");
        assert!(
            refused(Path::new(library)).starts_with("has no function pharos_backend_abi_version")
        );
    }
}
