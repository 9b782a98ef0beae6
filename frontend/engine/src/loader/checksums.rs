//! The repository agent `checksum`: compares the MD5 sums of model files with those in the configuration before the model is
//! used.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use md5::{Digest, Md5};
use pharos::model::Checksum;

/// The number of bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// Compares the MD5 sums of files in a model's directory. Blocks.
///
/// # Errors
/// A sum differs, or a file cannot be read.
pub(super) fn verify(directory: &Path, checksums: &[Checksum]) -> Result<(), String> {
    for Checksum { file, md5 } in checksums {
        let path = directory.join(file);
        let found = sum(&path).map_err(|error| {
            format!("repository agent checksum: cannot compute the MD5 sum of '{}': {error}", path.display())
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
        return Err(io::Error::other("not a regular file"));
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
