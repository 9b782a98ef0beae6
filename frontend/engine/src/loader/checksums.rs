//! The repository agent `checksum`: files of a model must have the MD5 sums that its configuration names, before anything of the
//! model is used.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use md5::{Digest, Md5};
use pharos::model::Checksum;

/// How much of a file is read at a time.
const PIECE: usize = 1 << 20;

/// Compares the sums of files in a model's directory. Blocks.
///
/// # Errors
/// A file has another sum, or cannot be read.
pub(super) fn verify(directory: &Path, checksums: &[Checksum]) -> Result<(), String> {
    for Checksum { file, md5 } in checksums {
        let path = directory.join(file);
        let found = sum(&path).map_err(|error| {
            format!("repository agent checksum: the MD5 sum of '{}' cannot be computed: {error}", path.display())
        })?;
        if found != *md5 {
            return Err(format!(
                "repository agent checksum: Mismatched MD5 hash for file {file}, expect: {md5}, got: {found}"
            ));
        }
    }
    Ok(())
}

fn sum(path: &Path) -> io::Result<String> {
    if !path.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let (mut file, mut hash, mut piece) = (File::open(path)?, Md5::new(), vec![0; PIECE]);
    loop {
        match file.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => hash.update(&piece[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
