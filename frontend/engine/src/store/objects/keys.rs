//! Converts the keys of a model's objects to paths in its directory. Keys are untrusted: none may
//! lead out of the directory, and invalid ones are refused by name.

use std::collections::{BTreeMap, BTreeSet};

use pharos::repository::{check_model_name, parse_version_directory};

/// The limits of a path: its depth, its length in bytes, and the length of a name (255 bytes in
/// file systems).
const DEEPEST: usize = 32;
const LONGEST: usize = 2048;
const LONGEST_NAME: usize = 255;

/// The files of a model's directory by path, each with the index of its object, and its
/// directories.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tree {
    pub(super) files: BTreeMap<String, usize>,
    pub(super) directories: BTreeSet<String>,
}

/// Returns whether a folder of this name can be a model.
pub(super) fn is_model(name: &str) -> bool {
    !name.starts_with('.') && check_model_name(name).is_ok()
}

/// Returns the tree of objects, each given by its key relative to the model's and its size.
/// Consoles of stores represent an empty folder by an empty object whose key ends in '/'; it
/// arrives here without that '/'. An empty object is a directory if it is a version or has keys
/// below it.
///
/// # Errors
/// A key is not a valid path, or is both a file and a directory; the text names it.
pub(super) fn tree<'a>(objects: impl IntoIterator<Item = (&'a str, u64)>) -> Result<Tree, String> {
    let mut tree = Tree::default();
    let mut empty = BTreeSet::new();
    let mut full = BTreeSet::new();
    for (index, (key, size)) in objects.into_iter().enumerate() {
        if key.is_empty() && size == 0 {
            continue;
        }
        check(key).map_err(|reason| {
            format!("the key '{}' is not a valid path: {reason}", key.escape_debug())
        })?;
        let mut above = key;
        while let Some((directory, _)) = above.rsplit_once('/') {
            tree.directories.insert(directory.to_owned());
            above = directory;
        }
        match size == 0 && parse_version_directory(key).is_some() {
            true => drop(tree.directories.insert(key.to_owned())),
            // The keys 'a' and 'a/' arrive alike; the object with content wins.
            false if size == 0 => drop(tree.files.entry(key.to_owned()).or_insert(index)),
            false => drop(tree.files.insert(key.to_owned(), index)),
        }
        match size {
            0 => drop(empty.insert(key.to_owned())),
            _ => drop(full.insert(key.to_owned())),
        }
    }
    tree.files.retain(|key, _| {
        !(empty.contains(key) && !full.contains(key) && tree.directories.contains(key))
    });
    match tree.files.keys().find(|key| tree.directories.contains(*key)) {
        Some(key) => Err(format!(
            "the key '{}' is both an object and a folder of objects",
            key.escape_debug()
        )),
        None => Ok(tree),
    }
}

fn check(key: &str) -> Result<(), &'static str> {
    if key.len() > LONGEST {
        return Err("it is longer than 2048 bytes");
    }
    let mut depth = 0;
    for name in key.split('/') {
        depth += 1;
        match name {
            "" => return Err("it has an empty name"),
            "." | ".." => return Err("it contains '.' or '..'"),
            _ if name.len() > LONGEST_NAME => return Err("it has a name of more than 255 bytes"),
            _ if name.contains(char::is_control) => return Err("it has a control character"),
            _ => {}
        }
    }
    if depth > DEEPEST { Err("it is more than 32 directories deep") } else { Ok(()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::{Component, Path};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keys_become_paths() {
        let found = tree([
            ("config.pbtxt", 5),
            ("1/model.onnx", 9),
            ("1", 0),
            ("2", 0),
            ("", 0),
            ("a", 0),
            ("a/b", 0),
        ]);
        let found = found.unwrap();
        let files: Vec<_> = found.files.iter().map(|(key, index)| (key.as_str(), *index)).collect();
        assert_eq!(files, [("1/model.onnx", 1), ("a/b", 6), ("config.pbtxt", 0)]);
        assert_eq!(
            found.directories.iter().map(String::as_str).collect::<Vec<_>>(),
            ["1", "2", "a"]
        );
    }

    #[test]
    fn refuses_invalid_paths_by_key() {
        let long = "x".repeat(256);
        let deep = "a/".repeat(32) + "a";
        for (key, expected) in [
            ("..", "the key '..' is not a valid path: it contains '.' or '..'"),
            ("1/../../x", "contains '.' or '..'"),
            ("./x", "contains '.' or '..'"),
            ("/etc/passwd", "empty name"),
            ("1//x", "empty name"),
            ("1/x\n", "the key '1/x\\n' is not a valid path: it has a control character"),
            ("1/\0", "control character"),
            (&long, "more than 255 bytes"),
            (&deep, "more than 32 directories"),
            (&"ab/".repeat(1000), "longer than 2048 bytes"),
        ] {
            let error = tree([("config.pbtxt", 1), (key, 1)]).unwrap_err();
            assert!(error.contains(expected), "{key}: {error}");
        }
        let error = tree([("1/model", 3), ("1/model/x", 1)]).unwrap_err();
        assert_eq!(error, "the key '1/model' is both an object and a folder of objects");
    }

    #[test]
    fn names_of_models() {
        for (name, expected) in [
            ("m", true),
            ("größe", true),
            (".git", false),
            ("..", false),
            ("a\\b", false),
            ("", false),
        ] {
            assert_eq!(is_model(name), expected, "{name}");
        }
    }

    proptest! {
        #[test]
        fn no_key_leads_out(keys in prop::collection::vec(("([a-c.\\\\\u{0}]{0,3}/?){0,6}", 0u64..2), 0..6)) {
            let Ok(tree) = tree(keys.iter().map(|(key, size)| (key.as_str(), *size))) else { return Ok(()) };
            for path in tree.files.keys().chain(&tree.directories) {
                let normal = |part: Component<'_>| matches!(part, Component::Normal(_));
                prop_assert!(!path.is_empty() && Path::new(path).components().all(normal), "{path:?}");
                prop_assert_eq!(Path::new("/top").join(path).components().count(), path.split('/').count() + 2);
            }
            for path in tree.files.keys() {
                prop_assert!(!tree.directories.contains(path), "{path:?}");
            }
        }
    }
}
