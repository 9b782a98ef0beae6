//! The adapters (LoRA) of a model. The file `multi_lora.json` lists adapters that are loaded with
//! the model. Requests load further adapters, of which the engine keeps a limited number.
//!
//! Loading an adapter changes the model of llama.cpp, so that only the thread of the engine does it,
//! between two steps. Another thread has read the file before, so that the engine copies it from
//! memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::{LlamaLoraAdapter, LlamaModel};
use serde_json::{Map, Value};

use crate::host::{Failure, Gauge, GaugeFamily};
use crate::logs::logged_errors;

/// The parameter of a request with an adapter that was loaded by request. The server sets it.
const PARAMETER: &str = "triton_adapter";

/// Identifies an adapter of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AdapterId {
    /// The position in the file `multi_lora.json`.
    Listed(usize),
    /// The number of its load by request.
    Loaded(u64),
}

/// An adapter that was loaded by request, as a request has it.
#[derive(Clone, Debug)]
pub(crate) struct RequestedAdapter {
    pub(crate) name: String,
    path: String,
    pub(crate) load: u64,
    /// The file, or why it cannot be used; `None` before [`RequestedAdapter::find`].
    file: Option<Result<PathBuf, String>>,
}

impl RequestedAdapter {
    /// Takes the adapter out of the parameters of a request.
    pub(crate) fn take(parameters: &mut Map<String, Value>) -> Result<Option<Self>, Failure> {
        let Some(value) = parameters.remove(PARAMETER) else { return Ok(None) };
        let parsed = value.as_str().and_then(|json| serde_json::from_str::<Value>(json).ok());
        let member = |name: &str| parsed.as_ref()?.get(name)?.as_str().map(str::to_owned);
        let load = parsed.as_ref().and_then(|adapter| adapter.get("load")?.as_u64());
        match (member("name"), member("path"), load) {
            (Some(name), Some(path), Some(load)) => Ok(Some(Self { name, path, load, file: None })),
            _ => Err(Failure::invalid(format!(
                "the parameter '{PARAMETER}' must be JSON with name, path and load"
            ))),
        }
    }

    /// Finds the file. Unless the engine has the adapter already, reads the whole file, so that the
    /// engine need not wait for a disk.
    pub(crate) fn find(&mut self, places: &Places, known: &KnownAdapters) {
        let is_known = known.has(self.load);
        let found = places.find(&self.path).and_then(|file| match is_known {
            true => Ok(file),
            false => match read_whole(&file) {
                Ok(()) => Ok(file),
                Err(error) => Err(format!("'{}' cannot be read: {error}", file.display())),
            },
        });
        self.file = Some(found);
    }
}

fn read_whole(file: &Path) -> std::io::Result<()> {
    if !file.is_file() {
        return Err(std::io::Error::other("it is not a file"));
    }
    std::io::copy(&mut File::open(file)?, &mut std::io::sink()).map(drop)
}

/// Where the files of adapters that requests load may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Places {
    /// Where relative paths begin.
    base: PathBuf,
    /// The directories, without symbolic links.
    allowed: Vec<PathBuf>,
}

impl Places {
    /// Returns the places of a model: the directory of the model, whose version is in `version`, and
    /// the one of its parameter `adapter_directory`, in which relative paths then begin.
    pub(crate) fn new(version: &Path, own: Option<&str>) -> Result<Self, String> {
        let mut allowed = vec![real(version.parent().unwrap_or(version))?];
        let base = match own {
            None => real(version)?,
            Some(own) => real(&version.join(own))
                .map_err(|why| format!("the parameter 'adapter_directory' is '{own}': {why}"))?,
        };
        if !base.starts_with(&allowed[0]) {
            allowed.push(base.clone());
        }
        Ok(Self { base, allowed })
    }

    /// Returns the file of a path that a request has.
    fn find(&self, path: &str) -> Result<PathBuf, String> {
        let file = real(&self.base.join(path))?;
        if self.allowed.iter().any(|directory| file.starts_with(directory)) {
            return Ok(file);
        }
        let allowed: Vec<String> =
            self.allowed.iter().map(|directory| format!("'{}'", directory.display())).collect();
        Err(format!(
            "'{path}' is not in {}; the parameter 'adapter_directory' of the model permits another \
             directory",
            allowed.join(" or ")
        ))
    }
}

/// Returns a path without symbolic links.
fn real(path: &Path) -> Result<PathBuf, String> {
    path.canonicalize().map_err(|error| format!("'{}' cannot be read: {error}", path.display()))
}

/// The numbers of the adapters that the engine has loaded by request, for other threads.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownAdapters(Arc<Mutex<BTreeSet<u64>>>);

impl KnownAdapters {
    pub(crate) fn has(&self, load: u64) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(&load)
    }

    fn set(&self, load: u64, is_known: bool) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match is_known {
            true => known.insert(load),
            false => known.remove(&load),
        };
    }
}

/// The gauges of the choices of each adapter.
pub(crate) struct AdapterGauges {
    family: Option<GaugeFamily>,
    /// The gauges by name and state, each with the number that was recorded last.
    shown: BTreeMap<(String, &'static str), (Option<Gauge>, usize)>,
}

impl AdapterGauges {
    pub(crate) fn new(family: Option<GaugeFamily>) -> Self {
        Self { family, shown: BTreeMap::new() }
    }

    /// Records the choices of the requests that run and that wait, with the names of their adapters.
    /// Adapters that are in neither become 0.
    pub(crate) fn set(
        &mut self,
        running: impl Iterator<Item = (String, usize)>,
        waiting: impl Iterator<Item = (String, usize)>,
    ) {
        let Some(family) = &self.family else { return };
        let running = running.map(|(name, count)| (name, "running", count));
        let waiting = waiting.map(|(name, count)| (name, "waiting", count));
        let mut counts: BTreeMap<(String, &'static str), usize> = BTreeMap::new();
        for (name, state, count) in running.chain(waiting) {
            *counts.entry((name, state)).or_default() += count;
        }
        for key in counts.keys() {
            self.shown
                .entry(key.clone())
                .or_insert_with(|| (family.with(&[key.0.as_str(), key.1]), 0));
        }
        for (key, (gauge, shown)) in &mut self.shown {
            let count = counts.get(key).copied().unwrap_or_default();
            if let Some(gauge) = gauge
                && count != *shown
            {
                gauge.set(count as f64);
            }
            *shown = count;
        }
        // A name that is used again gets the same series.
        self.shown.retain(|_, (_, shown)| *shown > 0);
    }
}

/// Why an adapter is not available to a request.
pub(crate) enum Unavailable {
    /// All places are in use: the request waits.
    Full,
    Failed(Failure),
}

/// An adapter that was loaded by request.
struct LoadedAdapter {
    adapter: LlamaLoraAdapter,
    /// The number of the last use.
    used_at: u64,
    /// Whether a client has unloaded it.
    is_unloaded: bool,
}

/// The adapters of an engine.
pub(crate) struct Adapters {
    listed: Vec<LlamaLoraAdapter>,
    loaded: BTreeMap<u64, LoadedAdapter>,
    /// The most adapters that are loaded by request.
    most: usize,
    known: KnownAdapters,
    uses: u64,
    /// The adapter that the context has.
    active: Option<AdapterId>,
}

impl Adapters {
    pub(crate) fn new(listed: Vec<LlamaLoraAdapter>, most: usize, known: KnownAdapters) -> Self {
        Self { listed, loaded: BTreeMap::new(), most, known, uses: 0, active: None }
    }

    /// Returns the adapter that the context has.
    pub(crate) fn active(&self) -> Option<AdapterId> {
        self.active
    }

    /// Gives the context an adapter, or none.
    pub(crate) fn activate(
        &mut self,
        context: &mut LlamaContext<'_>,
        id: Option<AdapterId>,
    ) -> Result<(), String> {
        if id == self.active {
            return Ok(());
        }
        let before = std::mem::replace(&mut self.active, id);
        let outcome = match (id, before) {
            (Some(id), _) => match self.get(id) {
                Some(adapter) => {
                    context.lora_adapter_set(adapter, 1.0).map_err(|error| error.to_string())
                }
                None => Err("it is not loaded".to_owned()),
            },
            (None, Some(before)) => match self.get(before) {
                Some(adapter) => {
                    context.lora_adapter_remove(adapter).map_err(|error| error.to_string())
                }
                None => Ok(()),
            },
            (None, None) => Ok(()),
        };
        outcome.map_err(|why| format!("the adapter cannot be changed: {why}"))
    }

    fn get(&mut self, id: AdapterId) -> Option<&mut LlamaLoraAdapter> {
        match id {
            AdapterId::Listed(position) => self.listed.get_mut(position),
            AdapterId::Loaded(load) => self.loaded.get_mut(&load).map(|own| &mut own.adapter),
        }
    }

    /// Loads an adapter that a request has, unless it is loaded. `in_use` are the adapters of the
    /// requests that run; others make room, the least recently used one first.
    pub(crate) fn load(
        &mut self,
        model: &LlamaModel,
        context: &mut LlamaContext<'_>,
        wanted: &RequestedAdapter,
        in_use: &BTreeSet<AdapterId>,
    ) -> Result<(), Unavailable> {
        self.uses += 1;
        if let Some(own) = self.loaded.get_mut(&wanted.load) {
            own.used_at = self.uses;
            return Ok(());
        }
        let failed = |why: &str| {
            Unavailable::Failed(Failure::invalid(format!(
                "the adapter '{}' cannot be loaded: {why}",
                wanted.name
            )))
        };
        let file = match &wanted.file {
            Some(Ok(file)) => file,
            Some(Err(why)) => return Err(failed(why)),
            None => return Err(failed("its file was not found")),
        };
        while self.loaded.len() >= self.most {
            let unused = self.loaded.iter().filter(|(load, _)| {
                let id = AdapterId::Loaded(**load);
                !in_use.contains(&id)
            });
            let oldest = unused.min_by_key(|(_, own)| own.used_at).map(|(load, _)| *load);
            self.free(context, oldest.ok_or(Unavailable::Full)?);
        }
        let adapter = load_file(model, file).map_err(|why| failed(&why))?;
        let own = LoadedAdapter { adapter, used_at: self.uses, is_unloaded: false };
        self.loaded.insert(wanted.load, own);
        self.known.set(wanted.load, true);
        Ok(())
    }

    /// Frees an adapter as soon as no request uses it.
    pub(crate) fn unload(&mut self, load: u64) {
        if let Some(own) = self.loaded.get_mut(&load) {
            own.is_unloaded = true;
        }
    }

    /// Returns whether adapters wait to be freed.
    pub(crate) fn has_unloaded(&self) -> bool {
        self.loaded.values().any(|own| own.is_unloaded)
    }

    /// Frees the unloaded adapters that are not in use.
    pub(crate) fn free_unloaded(
        &mut self,
        context: &mut LlamaContext<'_>,
        in_use: &BTreeSet<AdapterId>,
    ) {
        let unloaded = self.loaded.iter().filter(|(load, own)| {
            let id = AdapterId::Loaded(**load);
            own.is_unloaded && !in_use.contains(&id)
        });
        let unloaded: Vec<u64> = unloaded.map(|(load, _)| *load).collect();
        for load in unloaded {
            self.free(context, load);
        }
    }

    fn free(&mut self, context: &mut LlamaContext<'_>, load: u64) {
        if self.active == Some(AdapterId::Loaded(load)) {
            // Removing all adapters has no reason to fail.
            let _ = self.activate(context, None);
        }
        self.known.set(load, false);
        if let Some(own) = self.loaded.remove(&load) {
            free(own.adapter);
        }
    }
}

/// Loads an adapter from a file. Only the thread of the engine may do it while the engine runs.
fn load_file(model: &LlamaModel, file: &Path) -> Result<LlamaLoraAdapter, String> {
    use std::os::unix::ffi::OsStrExt;

    let path = std::ffi::CString::new(file.as_os_str().as_bytes())
        .map_err(|error| format!("'{}': {error}", file.display()))?;
    let _ = logged_errors();
    // SAFETY: `LlamaModel` is a transparent wrapper of the pointer. llama.cpp adds the adapter to
    // the adapters of the model, which only the thread of the engine reads and changes; other threads
    // read the vocabulary.
    let adapter = unsafe {
        let model = std::ptr::from_ref(model).cast::<*mut llama_cpp_sys_2::llama_model>().read();
        llama_cpp_sys_2::llama_adapter_lora_init(model, path.as_ptr())
    };
    match NonNull::new(adapter) {
        // SAFETY: `LlamaLoraAdapter` is a transparent wrapper of the pointer.
        Some(adapter) => Ok(unsafe {
            std::mem::transmute::<NonNull<llama_cpp_sys_2::llama_adapter_lora>, LlamaLoraAdapter>(
                adapter,
            )
        }),
        None => Err(format!("'{}': {}", file.display(), logged_errors())),
    }
}

/// Frees an adapter that no context has.
fn free(adapter: LlamaLoraAdapter) {
    // SAFETY: as above; llama.cpp removes the adapter from its model, and nothing refers to it.
    unsafe {
        let adapter = std::mem::transmute::<
            LlamaLoraAdapter,
            NonNull<llama_cpp_sys_2::llama_adapter_lora>,
        >(adapter);
        llama_cpp_sys_2::llama_adapter_lora_free(adapter.as_ptr());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn paths_lead_to_the_model_or_to_the_permitted_directory() {
        let above = std::env::temp_dir().join(format!("adapters-{}", std::process::id()));
        let version = above.join("model/1");
        let other = above.join("other");
        fs::create_dir_all(&version).unwrap();
        fs::create_dir_all(&other).unwrap();
        for file in [version.join("own"), above.join("model/near"), other.join("far")] {
            fs::write(file, "x").unwrap();
        }
        symlink(other.join("far"), version.join("link")).unwrap();
        let plain = Places::new(&version, None).unwrap();
        assert!(plain.find("own").unwrap().ends_with("1/own"));
        assert!(plain.find("../near").is_ok());
        for wrong in ["../../other/far", "link", other.join("far").to_str().unwrap(), "/etc/passwd"]
        {
            let why = plain.find(wrong).unwrap_err();
            assert!(why.contains(wrong) && why.contains("is not in '"), "{why}");
        }
        assert!(plain.find("missing").unwrap_err().contains("missing"));
        let wider = Places::new(&version, Some("../../other")).unwrap();
        assert!(wider.find("far").is_ok() && wider.find("../model/1/link").is_ok());
        assert!(wider.find("/etc/passwd").is_err());
        assert!(Places::new(&version, Some("nothing")).unwrap_err().contains("adapter_directory"));
        fs::remove_dir_all(&above).unwrap();
    }

    #[test]
    fn a_request_has_an_adapter_in_a_parameter() {
        let take = |value: Value| {
            let mut parameters = Map::from_iter([(PARAMETER.to_owned(), value)]);
            let taken = RequestedAdapter::take(&mut parameters);
            assert!(parameters.is_empty());
            taken
        };
        let found = take(r#"{"name":"a","path":"b","load":3}"#.into()).unwrap().unwrap();
        assert_eq!((found.name.as_str(), found.path.as_str(), found.load), ("a", "b", 3));
        for wrong in [Value::from(5), "{}".into(), r#"{"name":"a","path":"b"}"#.into()] {
            assert!(take(wrong).is_err());
        }
        assert!(RequestedAdapter::take(&mut Map::new()).unwrap().is_none());
    }
}
