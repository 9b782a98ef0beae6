//! A file of whole lines, also after interruptions by a full disk.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(super) struct LineFile {
    file: File,
    /// Whether the file ends within a line.
    cut: bool,
}

impl LineFile {
    /// Opens or creates the file.
    ///
    /// # Errors
    /// The file cannot be opened for writing.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { file, cut: ends_within_line(path) })
    }

    pub(super) fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Appends whole lines. A line break separates them from a line that was cut off before.
    ///
    /// # Errors
    /// Returns the lines that are not completely in the file.
    pub(super) fn append<'l>(&mut self, lines: &'l str) -> Result<(), (io::Error, &'l str)> {
        if self.cut {
            self.file.write_all(b"\n").map_err(|error| (error, lines))?;
            self.cut = false;
        }
        let mut rest = lines.as_bytes();
        while !rest.is_empty() {
            let error = match self.file.write(rest) {
                Ok(written) if written > 0 => {
                    rest = rest.get(written..).unwrap_or_default();
                    continue;
                }
                Ok(_) => ErrorKind::WriteZero.into(),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => error,
            };
            let written = lines.len() - rest.len();
            let text = lines.as_bytes().get(..written).unwrap_or_default();
            let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            self.cut = whole < written;
            return Err((error, lines.get(whole..).unwrap_or(lines)));
        }
        Ok(())
    }
}

/// Returns whether a file ends within a line, because a full disk or the end of the writing process
/// has cut the line off.
pub(crate) fn ends_within_line(path: &Path) -> bool {
    last_byte(path).is_some_and(|byte| byte != b'\n')
}

fn last_byte(path: &Path) -> Option<u8> {
    // Opening a pipe or a device for reading would have effects.
    let size = std::fs::metadata(path).ok().filter(Metadata::is_file)?.len();
    let mut byte = [0];
    File::open(path).ok()?.read_exact_at(&mut byte, size.checked_sub(1)?).ok()?;
    Some(byte[0])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Read;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    /// A pipe that is full accepts a part of the lines, as a full disk does.
    #[test]
    fn a_line_that_was_cut_off_is_not_continued() {
        let (reader, writer) = pipe_with(PipeFlags::NONBLOCK).unwrap();
        let mut reader = File::from(reader);
        let mut file = LineFile { file: File::from(writer), cut: false };
        // Its length does not divide the size of a pipe.
        let line = format!("{}\n", "é".repeat(501));
        let lines = line.repeat(1000);
        let (error, rest) = file.append(&lines).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
        let mut read = vec![0; lines.len()];
        let mut filled = reader.read(&mut read).unwrap();
        assert_eq!((rest.len() % line.len(), rest.len() > lines.len() - filled), (0, true));
        file.append("next\n").unwrap();
        file.append("last\n").unwrap();
        filled += reader.read(&mut read[filled..]).unwrap();
        let text = &read[..filled];
        assert!(text.ends_with(b"\nnext\nlast\n") && !text.ends_with(b"\n\nnext\nlast\n"));
        assert_eq!(
            text.iter().filter(|byte| **byte == b'\n').count(),
            (lines.len() - rest.len()) / line.len() + 3
        );
    }

    #[test]
    fn a_line_that_another_process_left_incomplete_is_not_continued() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        for (left, expected) in
            [("", "new\n"), ("old\n", "old\nnew\n"), ("old\ncut", "old\ncut\nnew\n")]
        {
            std::fs::write(&path, left).unwrap();
            assert_eq!(ends_within_line(&path), left.ends_with("cut"));
            LineFile::open(&path).unwrap().append("new\n").unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
        }
        assert!(!ends_within_line(folder.path()) && !ends_within_line(Path::new("/dev/full")));
    }
}
