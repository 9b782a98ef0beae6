//! Changes the command line of this process, as `ps` and `/proc/PID/cmdline` show it. A process
//! that was forked and did not start a program has the command line of its parent.
//!
//! Contract: called while this process has one thread. The kernel shows the memory in which it has
//! passed the arguments, from `arg_start` to `arg_end` in `/proc/PID/stat` (`proc_pid_stat(5)`).
//! This memory exists as long as the process, may be written, and other code only reads C strings
//! there: the last byte stays zero, so that every string in it still ends.

use std::fs;
use std::io;

/// The fields of `/proc/PID/stat` after the name of the program, counted from 0: `arg_start` and
/// `arg_end`.
const START: usize = 45;
const END: usize = 46;

/// Replaces the command line from the argument `from` on by `arguments`, which contains zero bytes
/// between arguments. Text for which there is no room is cut off. Does nothing if there is no such
/// argument.
///
/// # Errors
/// The kernel does not show the command line, or where it is.
pub fn replace(from: &str, arguments: &str) -> io::Result<()> {
    let shown = fs::read("/proc/self/cmdline")?;
    let Some(at) = shown
        .split_inclusive(|byte| *byte == 0)
        .scan(0, |end, argument| {
            let start = *end;
            *end += argument.len();
            Some((start, argument))
        })
        .find_map(|(start, argument)| {
            (argument.strip_suffix(&[0]) == Some(from.as_bytes())).then_some(start)
        })
    else {
        return Ok(());
    };
    let (start, end) = bounds()?;
    let room = shown.len() - at;
    if end - start != shown.len() {
        return Ok(());
    }
    let mut written = arguments.as_bytes().to_vec();
    written.truncate(room - 1);
    written.resize(room, 0);
    // SAFETY: `start + at .. end` is the end of the memory of the arguments, `room` bytes long, as
    // this module's contract says.
    unsafe {
        let target = std::ptr::with_exposed_provenance_mut::<u8>(start + at);
        std::ptr::copy_nonoverlapping(written.as_ptr(), target, room);
    }
    Ok(())
}

/// Returns the addresses of the first byte of the arguments and of the byte after the last.
fn bounds() -> io::Result<(usize, usize)> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> =
        stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace().collect();
    let number = |at: usize| {
        fields.get(at).and_then(|field| field.parse().ok()).filter(|address| *address > 0)
    };
    number(START)
        .zip(number(END))
        .ok_or_else(|| io::Error::other("/proc/self/stat has no addresses of the arguments"))
}
