//! A repository path that is a single model instead of a directory of models: a model's directory
//! (`config.pbtxt`, `1/`), a directory with a model's files, or one file. Storage initializers
//! create such paths (`/mnt/models/model.onnx`).
//!
//! The path is never written to. Files without a version directory are served from a temporary
//! directory of symbolic links.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use pharos::model::text_files::TextFiles;
use pharos::model::{Draft, default_model_file, is_hugging_face, onnx};
use pharos::repository::{Stamp, check_model_name, parse_version_directory};

use super::files::{ModelFiles, TemporaryDirectories};
use super::scan;

/// The name of a model's configuration file.
const CONFIG: &str = "config.pbtxt";

/// A repository path that is itself a model.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Single {
    pub(super) name: String,
    place: PathBuf,
    files: Files,
}

/// The arrangement of the model's files.
#[derive(Debug, PartialEq, Eq)]
enum Files {
    /// In version directories, as in a repository.
    Versions,
    /// Side by side: the links, by name, that make a version of them; may include a configuration.
    Loose(Vec<(OsString, PathBuf)>),
}

impl Single {
    /// Returns the model at a path; `None` for a directory of models. Its name is `name`, or else
    /// the one in its configuration, or else its directory's. Blocks.
    ///
    /// # Errors
    /// The path cannot be read.
    pub(super) fn find(place: &Path, name: Option<&str>) -> io::Result<Option<Self>> {
        let files = if place.is_file() { Some(one_file(place)?) } else { whole_directory(place)? };
        let Some(files) = files else { return Ok(None) };
        let chosen = match name {
            Some(name) => Some(name.to_owned()),
            None if place.is_file() => None,
            None => scan::read_text(&place.join(CONFIG)).ok().and_then(|text| name_in(&text)),
        };
        let name = chosen.unwrap_or_else(|| name_of(place));
        Ok(Some(Self { name, place: place.to_owned(), files }))
    }

    /// Returns the fingerprint of its files.
    pub(super) fn stamp(&self) -> Stamp {
        match &self.files {
            Files::Versions => scan::stamp(&self.place).unwrap_or_default(),
            Files::Loose(links) => {
                let stamps = links.iter().map(|(name, target)| {
                    let inner = if target.is_dir() { scan::stamp(target).ok() } else { None };
                    (
                        name.clone(),
                        inner.unwrap_or_else(|| scan::stamp_of(std::slice::from_ref(target))),
                    )
                });
                Stamp::of(&stamps.collect::<Vec<_>>())
            }
        }
    }

    /// Returns its files in the form of a model's directory, in a directory of `temporary` if files
    /// must be linked.
    ///
    /// # Errors
    /// A temporary directory cannot be created.
    pub(super) fn local(&self, temporary: &TemporaryDirectories) -> io::Result<ModelFiles> {
        let Files::Loose(links) = &self.files else {
            return Ok(ModelFiles::permanent(self.place.clone()));
        };
        let (path, above) = temporary.next()?;
        let local = ModelFiles::temporary(path.clone(), path, above);
        let version = local.path().join("1");
        std::fs::create_dir(&version)?;
        let is_configured = links.iter().any(|(name, _)| name == CONFIG);
        for (name, target) in links {
            if is_configured && is_beside_versions(name, target) {
                symlink(target, local.path().join(name))?;
            }
            if name != CONFIG {
                symlink(target, version.join(name))?;
            }
        }
        Ok(local)
    }
}

/// Returns whether a model has this beside the directories of its versions: the configuration and
/// what it names, which are files of class labels, the data of warm-up requests and initial states.
fn is_beside_versions(name: &OsStr, target: &Path) -> bool {
    match target.is_file() {
        true => version(name).is_none() && name.to_str().and_then(default_model_file).is_none(),
        false => name == "warmup" || name == "initial_state",
    }
}

/// Returns the files of a directory that is a single model.
fn whole_directory(place: &Path) -> io::Result<Option<Files>> {
    let mut entries: Vec<(OsString, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(place)? {
        let entry = entry?;
        if scan::is_hidden(&entry.file_name().to_string_lossy()) {
            continue;
        }
        // The search ends at the first model of a directory of models, which may have thousands.
        if entry.path().is_dir() && is_model(&entry.path()) {
            return Ok(None);
        }
        entries.push((entry.file_name(), entry.path()));
    }
    entries.sort();
    let directories: Vec<_> = entries.iter().filter(|(_, path)| path.is_dir()).collect();
    let has_config = entries.iter().any(|(name, path)| name == CONFIG && path.is_file());
    let mut versions = directories.iter().filter(|(name, _)| version(name).is_some());
    if versions.clone().next().is_some() && has_config
        || versions.any(|(_, path)| is_version(&names(path)))
    {
        return Ok(Some(Files::Versions));
    }
    let files = entries.iter().filter(|(_, path)| path.is_file() || is_onnx_directory(path));
    let file_names: Vec<&str> = files.filter_map(|(name, _)| name.to_str()).collect();
    let usual = usual_name(&file_names).map(|(file, usual)| (file.to_owned(), usual));
    let is_text = || TextFiles::are_in(entries.iter().filter_map(|(name, _)| name.to_str()));
    let is_model =
        usual.is_some() || has_config || is_hugging_face(file_names.iter().copied()) || is_text();
    if !is_model {
        return Ok(None);
    }
    let mut links = absolute(entries)?;
    let second = usual.and_then(|(file, usual)| link_to(&links, &file, usual));
    links.extend(second);
    Ok(Some(Files::Loose(links)))
}

/// Returns whether a directory with these names has the files of a version.
fn is_version(names: &[String]) -> bool {
    names.iter().any(|name| default_model_file(name).is_some())
        || is_hugging_face(names.iter().map(String::as_str))
        || TextFiles::are_in(names.iter().map(String::as_str))
}

/// Returns whether a directory takes the place of an ONNX file: it holds the file with its external
/// data.
fn is_onnx_directory(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "onnx")
        && path.join(onnx::FILE_IN_DIRECTORY).is_file()
}

/// Returns the model file among these, with the name that its backend expects; `None` without one,
/// or if it is ambiguous because of several files with other names or several archives.
fn usual_name<'a>(files: &[&'a str]) -> Option<(&'a str, String)> {
    let known: Vec<(&str, String)> =
        files.iter().filter_map(|file| Some((*file, default_model_file(file)?))).collect();
    let by_name = known.iter().find(|(file, usual)| file == usual && !file.ends_with(".mar"));
    match (by_name, known.as_slice()) {
        (Some(found), _) => Some(found.clone()),
        (None, [only]) => Some(only.clone()),
        (None, _) => None,
    }
}

/// Returns a second link to a file whose name differs from the one that its backend expects.
fn link_to(
    links: &[(OsString, PathBuf)],
    file: &str,
    usual: String,
) -> Option<(OsString, PathBuf)> {
    let (_, target) = links.iter().find(|(name, _)| name == file)?;
    (file != usual).then(|| (OsString::from(usual), target.clone()))
}

/// Returns a model file and the files beside it whose names begin with its stem, such as separate
/// weights.
fn one_file(file: &Path) -> io::Result<Files> {
    let unknown = || {
        io::Error::new(io::ErrorKind::InvalidInput, "the file is not a model file of a known kind")
    };
    let own = file.file_name().and_then(OsStr::to_str).ok_or_else(unknown)?;
    let usual = default_model_file(own).ok_or_else(unknown)?;
    let stem = Path::new(own).file_stem().and_then(OsStr::to_str).unwrap_or(own);
    let file = std::path::absolute(file)?;
    let directory = file.parent().map_or_else(PathBuf::new, Path::to_owned);
    let beside = names(&directory).into_iter().filter(|name| {
        name == own
            || (name.starts_with(stem)
                && default_model_file(name).is_none()
                && directory.join(name).is_file())
    });
    let mut links: Vec<(OsString, PathBuf)> =
        beside.map(|name| (OsString::from(&name), directory.join(&name))).collect();
    if !links.iter().any(|(name, _)| name == own) {
        links.push((OsString::from(own), file.clone()));
    }
    let second = link_to(&links, own, usual);
    links.extend(second);
    Ok(Files::Loose(links))
}

/// Makes paths absolute, since link targets must not depend on the current directory.
fn absolute(entries: Vec<(OsString, PathBuf)>) -> io::Result<Vec<(OsString, PathBuf)>> {
    entries.into_iter().map(|(name, path)| Ok((name, std::path::absolute(path)?))).collect()
}

/// Returns whether a subdirectory is a model, which means that its parent is a directory of models.
pub(super) fn is_model(directory: &Path) -> bool {
    let has = |name: &String| {
        name == CONFIG || (parse_version_directory(name).is_some() && directory.join(name).is_dir())
    };
    names(directory).iter().any(has)
}

fn version(name: &OsStr) -> Option<u64> {
    name.to_str().and_then(parse_version_directory)
}

/// Returns the names in a directory; empty if it cannot be read.
fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// Returns the model name in a configuration.
fn name_in(text: &str) -> Option<String> {
    let name = Draft::from_text(text, CONFIG).ok()?.name().to_owned();
    check_model_name(&name).is_ok().then_some(name)
}

/// Returns the name of a directory, or of a file unless it is called `model.*`.
fn name_of(place: &Path) -> String {
    let place = std::path::absolute(place).unwrap_or_else(|_| place.to_owned());
    let stem = place.file_stem().filter(|stem| place.is_file() && *stem != "model");
    let directory = if place.is_file() { place.parent() } else { Some(place.as_path()) };
    let name = stem.or_else(|| directory.and_then(Path::file_name)).and_then(OsStr::to_str);
    name.filter(|name| check_model_name(name).is_ok()).unwrap_or("model").to_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    /// Creates a directory of this name with these files, in a temporary directory.
    fn directory(name: &str, files: &[&str]) -> (TempDir, PathBuf) {
        let above = tempfile::tempdir().unwrap();
        let directory = above.path().canonicalize().unwrap().join(name);
        fs::create_dir(&directory).unwrap();
        for file in files {
            let path = directory.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, if file.ends_with(CONFIG) { "name: \"own\"" } else { "x" }).unwrap();
        }
        (above, directory)
    }

    /// Returns the name and the files, with their directories, with which these files are served.
    fn served(name: &str, files: &[&str], place: &str) -> Option<(String, Vec<String>)> {
        let (_above, folder) = directory(name, files);
        let single = Single::find(&folder.join(place), None).unwrap()?;
        let before = names(&folder);
        let temporary = TemporaryDirectories::default();
        let local = single.local(&temporary).unwrap();
        let mut all = names(local.path());
        all.extend(names(&local.path().join("1")).into_iter().map(|name| format!("1/{name}")));
        all.sort();
        assert_eq!(names(&folder), before, "the path was changed");
        let temporary = local.path().to_owned();
        drop(local);
        assert!(temporary == folder || !temporary.exists());
        Some((single.name.clone(), all))
    }

    fn check(name: &str, files: &[&str], place: &str, expected: Option<(&str, &[&str])>) {
        let expected = expected.map(|(name, files)| {
            (name.to_owned(), files.iter().map(|file| (*file).to_owned()).collect::<Vec<_>>())
        });
        assert_eq!(served(name, files, place), expected, "{name}");
    }

    #[test]
    fn directories_of_models_are_not_single_models() {
        check("repository", &["a/1/model.onnx", "b/config.pbtxt", "model.onnx"], "", None);
        check("numbers", &["1/1/model.onnx"], "", None);
        check("empty", &[".hidden/model.onnx"], "", None);
        check("other", &["README.md", "a/notes.txt"], "", None);
        check("two", &["a.onnx", "b.onnx"], "", None);
        check("archives", &["a.mar", "b.mar"], "", None);
    }

    #[test]
    fn files_and_directories_are_models() {
        check(
            "versions",
            &["config.pbtxt", "1/weights"],
            "",
            Some(("own", &["1", "1/weights", "config.pbtxt"])),
        );
        check("bare", &["1/model.onnx"], "", Some(("bare", &["1", "1/model.onnx"])));
        check(
            "loose",
            &["model.joblib", "x/y"],
            "",
            Some(("loose", &["1", "1/model.joblib", "1/x"])),
        );
        check(
            "named",
            &["config.pbtxt", "model.py"],
            "",
            Some(("own", &["1", "1/model.py", "config.pbtxt"])),
        );
        check(
            "usual",
            &["net.onnx", "net.data"],
            "",
            Some(("usual", &["1", "1/model.onnx", "1/net.data", "1/net.onnx"])),
        );
        check(
            "labelled",
            &["config.pbtxt", "model.onnx", "names.txt", "warmup/x", "other/y", "8"],
            "",
            Some((
                "own",
                &[
                    "1",
                    "1/8",
                    "1/model.onnx",
                    "1/names.txt",
                    "1/other",
                    "1/warmup",
                    "config.pbtxt",
                    "names.txt",
                    "warmup",
                ],
            )),
        );
        let files = ["config.json", "model-1.safetensors", "model.json", "tokenizer.json"];
        let linked = files.map(|file| format!("1/{file}"));
        let mut linked: Vec<&str> = linked.iter().map(String::as_str).collect();
        linked.insert(0, "1");
        check("qwen", &files, "", Some(("qwen", &linked)));
        check(
            "qwen",
            &["1/config.json", "1/w.safetensors"],
            "",
            Some(("qwen", &["1", "1/config.json", "1/w.safetensors"])),
        );
        check("weights", &["w.safetensors"], "", None);
        check("archive", &["squeeze.mar"], "", Some(("archive", &["1", "1/squeeze.mar"])));
        check(
            "external",
            &["net.onnx/model.onnx", "net.onnx/w"],
            "",
            Some(("external", &["1", "1/model.onnx", "1/net.onnx"])),
        );
        check("empty", &["net.onnx/weights", "w"], "", None);
        check(
            "file",
            &["net.onnx", "net.onnx.data", "other.onnx", "z"],
            "net.onnx",
            Some(("net", &["1", "1/model.onnx", "1/net.onnx", "1/net.onnx.data"])),
        );
        check(
            "plain",
            &["model.pt", "config.pbtxt"],
            "model.pt",
            Some(("plain", &["1", "1/model.pt"])),
        );
    }

    #[test]
    fn an_explicit_name_is_used() {
        let (_above, folder) = directory("plain", &["model.onnx"]);
        assert_eq!(Single::find(&folder, Some("mine")).unwrap().unwrap().name, "mine");
        let single = Single::find(&folder, None).unwrap().unwrap();
        let before = single.stamp();
        fs::write(folder.join("model.onnx"), "longer").unwrap();
        assert_ne!(Single::find(&folder, None).unwrap().unwrap().stamp(), before);
        assert!(Single::find(&folder.join("nothing"), None).is_err());
    }
}
