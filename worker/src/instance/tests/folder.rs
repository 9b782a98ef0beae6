//! Temporary model directories.

use std::path::PathBuf;

/// A directory that is removed when this value is dropped.
pub(super) struct Folder(pub(super) PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Creates a model directory with these files.
pub(super) fn folder(files: &[(&str, &[u8])]) -> Folder {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("pharos-states-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let folder = Folder(std::env::temp_dir().join(name));
    for (name, content) in files {
        let path = folder.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    folder
}
