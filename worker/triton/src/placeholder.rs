//! The shared library that stands for Triton's `libtritonserver.so`: a backend's library names it as
//! a dependency, in wheels with a hash in its name. This module writes such a library into an
//! anonymous file and loads it, so nothing has to be installed, and Triton's own library is not
//! loaded beside it.
//!
//! Each function of the library is a jump through a table, which the caller fills with addresses of
//! functions of this program. The format is ELF-64 (System V ABI, chapters 4 and 5): one segment of
//! code with the symbols, one segment of data with the dynamic section and the table, and no
//! sections, which the loader does not read.

use std::ffi::{CString, c_void};
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::loader::{loader_error, open_library};

/// The symbol of the table.
const TABLE: &str = "pharos_triton_functions";

/// The alignment of segments: the largest page of the supported machines.
const PAGE: usize = 0x1_0000;
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const PROGRAM_HEADERS: usize = 4;
const SYMBOL: usize = 24;
/// The size of each function.
const JUMP: usize = 16;
const POINTER: usize = 8;

/// The machine of this program, as ELF numbers it.
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

/// Returns a jump through a pointer that lies `distance` bytes after the start of the jump.
/// `at` is the address of the jump relative to the library.
#[cfg(target_arch = "x86_64")]
fn jump(_at: usize, distance: usize) -> [u8; JUMP] {
    // endbr64; jmp *distance(%rip), where rip is the end of both instructions; padding of int3.
    let mut code = [0xcc; JUMP];
    let relative = u32::try_from(distance - 10).unwrap_or_default().to_le_bytes();
    code[..6].copy_from_slice(&[0xf3, 0x0f, 0x1e, 0xfa, 0xff, 0x25]);
    code[6..10].copy_from_slice(&relative);
    code
}

#[cfg(target_arch = "aarch64")]
use jump_on_aarch64 as jump;

/// Returns a jump of aarch64; see `jump`.
#[cfg(any(target_arch = "aarch64", test))]
fn jump_on_aarch64(at: usize, distance: usize) -> [u8; JUMP] {
    // bti c; adrp x16, page; ldr x16, [x16, #offset]; br x16. The base of the library is aligned to
    // its pages, so differences of pages do not depend on it.
    let target = at + distance;
    let pages = u32::try_from((target >> 12) - ((at + 4) >> 12)).unwrap_or_default();
    let offset = u32::try_from((target & 0xfff) / POINTER).unwrap_or_default();
    let adrp = 0x9000_0010 | ((pages & 3) << 29) | (((pages >> 2) & 0x7_ffff) << 5);
    let ldr = 0xf940_0210 | (offset << 10);
    let words: [u32; 4] = [0xd503_245f, adrp, ldr, 0xd61f_0200];
    let mut code = [0; JUMP];
    for (place, word) in code.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    code
}

/// Writes numbers in the byte order of the file.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Adds an address or a size, which a file of this program cannot exceed.
    fn u64(&mut self, value: usize) -> &mut Self {
        self.0.extend((value as u64).to_le_bytes());
        self
    }

    fn pad_to(&mut self, len: usize) {
        self.0.resize(len.max(self.0.len()), 0);
    }
}

/// The dynamic symbols of a library, and their names.
struct Symbols {
    names: Vec<u8>,
    /// Where each name begins.
    starts: Vec<u32>,
    soname: u32,
}

impl Symbols {
    fn new(soname: &str, symbols: &[&str]) -> Self {
        let mut names = vec![0];
        let mut add = |name: &str| {
            let start = u32::try_from(names.len()).unwrap_or_default();
            names.extend(name.bytes());
            names.push(0);
            start
        };
        let starts = symbols.iter().map(|name| add(name)).collect();
        let soname = add(soname);
        Self { names, starts, soname }
    }
}

/// Returns a library of this name with these functions and the table.
fn library(soname: &str, functions: &[&str]) -> Vec<u8> {
    let all: Vec<&str> = functions.iter().copied().chain([TABLE]).collect();
    let symbols = Symbols::new(soname, &all);
    // The layout. Addresses are equal to offsets in the file.
    let symbols_at = HEADER + PROGRAM_HEADERS * PROGRAM_HEADER;
    let hash_at = symbols_at + (all.len() + 1) * SYMBOL;
    let hash_size = (2 + 1 + all.len() + 1) * 4;
    let names_at = hash_at + hash_size;
    let code_at = (names_at + symbols.names.len()).next_multiple_of(JUMP);
    let code_end = code_at + functions.len() * JUMP;
    let dynamic_at = code_end.next_multiple_of(PAGE);
    let dynamic_size = 7 * 16;
    let table_at = dynamic_at + dynamic_size;
    let table_size = functions.len() * POINTER;
    let end = table_at + table_size;

    let mut out = Bytes::default();
    // The header: 64 bits, little-endian, a shared object.
    out.0.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    out.u16(3).u16(MACHINE).u32(1).u64(0).u64(HEADER).u64(0).u32(0);
    out.u16(64).u16(56).u16(PROGRAM_HEADERS as u16).u16(64).u16(0).u16(0);
    // The program headers: type, flags, offset, two addresses, two sizes, alignment.
    let mut segment = |kind: u32, flags: u32, at: usize, size: usize, align: usize| {
        out.u32(kind).u32(flags).u64(at).u64(at).u64(at).u64(size).u64(size).u64(align);
    };
    segment(1, 5, 0, code_end, PAGE);
    segment(1, 6, dynamic_at, end - dynamic_at, PAGE);
    segment(2, 6, dynamic_at, dynamic_size, 8);
    // Without this segment, the loader would make stacks executable.
    segment(0x6474_e551, 6, 0, 0, 16);
    // The symbols; the first one is empty. Type and binding: a global function or object; section:
    // any number except 0, which means undefined.
    out.pad_to(symbols_at + SYMBOL);
    for (at, start) in symbols.starts.iter().enumerate() {
        let is_table = at == functions.len();
        let (kind, address, size) = match is_table {
            true => (0x11, table_at, table_size),
            false => (0x12, code_at + at * JUMP, JUMP),
        };
        out.u32(*start);
        out.0.extend([kind, 0]);
        out.u16(1).u64(address).u64(size);
    }
    // The hash table: one bucket, with a chain of all symbols.
    let count = u32::try_from(all.len()).unwrap_or_default();
    out.u32(1).u32(count + 1).u32(1).u32(0);
    for next in 2..=count {
        out.u32(next);
    }
    out.u32(0);
    out.0.extend(&symbols.names);
    out.pad_to(code_at);
    for at in 0..functions.len() {
        let address = code_at + at * JUMP;
        out.0.extend(jump(address, table_at + at * POINTER - address));
    }
    out.pad_to(dynamic_at);
    let dynamic = [
        (14, symbols.soname as usize),
        (4, hash_at),
        (5, names_at),
        (10, symbols.names.len()),
        (6, symbols_at),
        (11, SYMBOL),
        (0, 0),
    ];
    for (tag, value) in dynamic {
        out.u64(tag).u64(value);
    }
    out.pad_to(end);
    out.0
}

/// Loads a library of this name, which provides the functions to all libraries that are loaded
/// later.
///
/// # Errors
/// The reason, as the end of a sentence.
pub(crate) fn load(
    soname: &str,
    functions: &[(&'static str, *const c_void)],
) -> Result<(), String> {
    let names: Vec<&str> = functions.iter().map(|(name, _)| *name).collect();
    let file = anonymous_file(soname, &library(soname, &names))
        .map_err(|error| format!("needs {soname}, which cannot be created in memory: {error}"))?;
    let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
    let handle = open_library(&path, libc::RTLD_NOW | libc::RTLD_GLOBAL)
        .map_err(|why| format!("needs {soname}, which cannot be loaded from memory: {why}"))?;
    let symbol = CString::new(TABLE).unwrap_or_default();
    // SAFETY: the library is loaded; the name ends with a NUL.
    let table = unsafe { libc::dlsym(handle, symbol.as_ptr()) }.cast::<*const c_void>();
    if table.is_null() {
        return Err(format!("needs {soname}, whose table is missing: {}", loader_error()));
    }
    for (at, (_, function)) in functions.iter().enumerate() {
        // SAFETY: the table has a pointer for each function, in writable memory, and no code that
        // uses it runs before the backend's library is loaded.
        unsafe { table.add(at).write(*function) };
    }
    Ok(())
}

fn anonymous_file(name: &str, content: &[u8]) -> std::io::Result<OwnedFd> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(file);
    file.write_all(content)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn seven() -> i32 {
        7
    }

    extern "C" fn sum(left: i32, right: i32) -> i32 {
        left + right
    }

    #[test]
    fn functions_of_the_library_lead_to_this_program() {
        let functions: [(&str, *const c_void); 2] = [
            ("placeholder_seven", seven as *const c_void),
            ("placeholder_sum", sum as *const c_void),
        ];
        load("libplaceholder-1a2b.so", &functions).expect("a loaded library");
        // SAFETY: the names end with a NUL; the found functions have these types.
        let (seven, sum) = unsafe {
            let found = |name: &std::ffi::CStr| libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
            assert!(!found(c"placeholder_seven").is_null());
            (
                std::mem::transmute::<*mut c_void, extern "C" fn() -> i32>(found(
                    c"placeholder_seven",
                )),
                std::mem::transmute::<*mut c_void, extern "C" fn(i32, i32) -> i32>(found(
                    c"placeholder_sum",
                )),
            )
        };
        assert_eq!((seven(), sum(20, 3)), (7, 23));
    }

    #[test]
    fn jumps_of_aarch64_have_its_encoding() {
        // From 0x1000 through the pointer at 0x11008: bti c; adrp x16, #0x10000; ldr x16, [x16, #8];
        // br x16.
        let words: Vec<u32> = jump_on_aarch64(0x1000, 0x1_0008)
            .chunks_exact(4)
            .map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")))
            .collect();
        assert_eq!(words, [0xd503_245f, 0x9000_0090, 0xf940_0610, 0xd61f_0200]);
    }

    #[test]
    fn the_library_is_a_valid_elf_file() {
        let bytes = library("libtritonserver.so", &["TRITONSERVER_ErrorNew"]);
        let needs = crate::needs::of_bytes(&bytes).expect("no sections");
        assert_eq!(needs, crate::needs::Needs::default());
    }
}
