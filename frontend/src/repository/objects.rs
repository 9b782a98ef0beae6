//! A repository in an object store: models are folders of keys. What serves is a copy here; only objects that have changed
//! are fetched again.

mod client;
mod files;
mod keys;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path as Key;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt};
use pharos::repository::Stamp;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::source::{Local, Source};
use crate::cli::{Address, Protocol};
use files::Files;
use keys::Tree;

/// Requests to a store at the same time.
const AT_ONCE: usize = 8;
/// How often a model that changes while it is fetched is begun again.
const ROUNDS: usize = 5;
/// How much of a store's own words an error has, in bytes.
const WORDS: usize = 600;

/// A repository in an object store.
pub(super) struct Objects {
    address: Address,
    prefix: Key,
    store: Arc<dyn ObjectStore>,
    files: Arc<Files>,
    runtime: Handle,
    requests: Semaphore,
    /// Read by who fetches a model.
    fetching: RwLock<()>,
    last: Mutex<Last>,
}

/// What the store held when it could be reached, for while it cannot.
#[derive(Default)]
struct Last {
    names: Option<Vec<String>>,
    look: Option<Vec<(String, Stamp)>>,
    away: bool,
}

impl Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Objects").field(&self.address).finish()
    }
}

/// Why a model's objects cannot be had.
enum Refused {
    /// A key can be no path: that model's fault.
    Key(String),
    /// The store's.
    Store(io::Error),
}

/// An object of a model.
struct Object {
    meta: ObjectMeta,
    /// What its content is called here.
    content: String,
}

impl Objects {
    /// Needs the runtime. Copies are kept in `cache`, or in a directory that goes when nobody uses it.
    ///
    /// # Errors
    /// The store cannot be used as it is configured, or there is no place for copies. It is not asked anything yet.
    pub(super) fn new(address: Address, cache: Option<&Path>) -> Result<Self, String> {
        let store = store::open(&address)?;
        let prefix = Key::parse(&address.prefix).map_err(|error| format!("'{address}' cannot be used: {error}"))?;
        let files = Files::new(cache, &address.to_string());
        let files = files.map_err(|error| format!("'{address}' has no place for copies: {error}"))?;
        Ok(Self {
            address,
            prefix,
            store,
            files: Arc::new(files),
            runtime: Handle::current(),
            requests: Semaphore::new(AT_ONCE),
            fetching: RwLock::default(),
            last: Mutex::default(),
        })
    }

    /// The folders that can be models.
    async fn names(&self) -> io::Result<Vec<String>> {
        let listed = self.store.list_with_delimiter(Some(&self.prefix)).await;
        let folders = listed.map_err(|error| self.failed(&self.prefix, &error))?.common_prefixes;
        let mut names: Vec<String> = folders.iter().filter_map(|folder| folder.filename()).map(str::to_owned).collect();
        names.retain(|name| keys::is_model(name));
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// The objects of a model, by key, and what they make.
    async fn listed(&self, model: &str) -> Result<(Vec<Object>, Tree), Refused> {
        let folder = self.folder(model)?;
        let _permit = self.requests.acquire().await;
        let found = self.store.list(Some(&folder)).try_collect::<Vec<ObjectMeta>>().await;
        let mut found = found.map_err(|error| match &error {
            Error::InvalidPath { .. } => Refused::Key(words(&error)),
            _ => Refused::Store(self.failed(&folder, &error)),
        })?;
        found.sort_unstable_by(|one, other| one.location.cmp(&other.location));
        let start = folder.as_ref().len();
        let below = |meta: &ObjectMeta| meta.location.as_ref().get(start..).unwrap_or_default().to_owned();
        let keys: Vec<(String, u64)> = found.iter().map(|meta| (below(meta), meta.size)).collect();
        let keys = keys.iter().map(|(key, size)| (key.strip_prefix('/').unwrap_or(key), *size));
        let tree = keys::tree(keys).map_err(Refused::Key)?;
        Ok((found.into_iter().map(Object::new).collect(), tree))
    }

    fn folder(&self, model: &str) -> Result<Key, Refused> {
        let text = match self.prefix.as_ref() {
            "" => model.to_owned(),
            prefix => format!("{prefix}/{model}"),
        };
        Key::parse(text).map_err(|error| Refused::Key(error.to_string()))
    }

    /// Brings a model here. `None` if it is not there.
    async fn fetch(&self, model: &str) -> io::Result<Option<Local>> {
        let refused = |refused| match refused {
            Refused::Key(text) => io::Error::new(ErrorKind::InvalidData, format!("model '{model}': {text}")),
            Refused::Store(error) => error,
        };
        for _ in 0..ROUNDS {
            let (objects, tree) = self.listed(model).await.map_err(refused)?;
            if objects.is_empty() {
                return Ok(None);
            }
            let wanted: BTreeMap<&String, &Object> =
                tree.files.iter().filter_map(|(path, index)| Some((path, objects.get(*index)?))).collect();
            let missing: Vec<&Object> = wanted.values().copied().filter(|object| !self.has(model, object)).collect();
            // Listed once more after that, so that what is used was in the store all at one time.
            if !missing.is_empty() {
                self.bring(model, missing).await?;
                continue;
            }
            let files = wanted.iter().map(|(path, object)| (*path, &object.content));
            match self.files.link(model, &tree.directories, files) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                linked => {
                    self.files.keep(model, &wanted.values().map(|object| object.content.as_str()).collect());
                    return linked.map(Some);
                }
            }
        }
        Err(io::Error::other(format!("model '{model}' keeps changing while it is fetched")))
    }

    fn has(&self, model: &str, object: &Object) -> bool {
        let found = self.files.content(model, &object.content).metadata();
        found.is_ok_and(|file| file.is_file() && file.len() == object.meta.size)
    }

    /// Fetches contents, some at a time. Those that are no longer what was listed are left out.
    async fn bring(&self, model: &str, missing: Vec<&Object>) -> io::Result<()> {
        let fetched = stream::iter(missing).map(|object| self.download(model, object)).buffer_unordered(AT_ONCE);
        fetched.try_collect().await
    }

    async fn download(&self, model: &str, object: &Object) -> io::Result<()> {
        let _permit = self.requests.acquire().await;
        let key = &object.meta.location;
        let found = match self.store.get(key).await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(()),
            Err(error) => return Err(self.failed(key, &error)),
        };
        if !self.same(&found.meta, &object.meta) {
            return Ok(());
        }
        let here = |error: io::Error| io::Error::new(error.kind(), format!("key '{key}' cannot be kept: {error}"));
        let mut part = self.files.part(model, &object.content).map_err(here)?;
        let mut pieces = found.into_stream();
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|error| self.failed(key, &error))?;
            part.write(&piece).map_err(here)?;
            if part.written() > object.meta.size {
                break;
            }
        }
        if part.written() != object.meta.size {
            let (size, got) = (object.meta.size, part.written());
            return Err(io::Error::other(format!("key '{key}' has {size} bytes, and {got} were received")));
        }
        part.finish().map_err(here)
    }

    /// Whether an answer is of the object that was listed. Listings write entity tags with or without quotes; Google's need
    /// not be those of its answers at all.
    fn same(&self, answer: &ObjectMeta, listed: &ObjectMeta) -> bool {
        let tag = |meta: &ObjectMeta| meta.e_tag.as_deref().map(|tag| tag.trim_matches('"').to_owned());
        let told = self.address.protocol == Protocol::Gcs || listed.e_tag.is_none() || tag(answer) == tag(listed);
        answer.size == listed.size && told
    }

    /// What every model is made of, without fetching anything.
    async fn looked(&self) -> io::Result<Vec<(String, Stamp)>> {
        let names = self.names().await?;
        let seen = stream::iter(names).map(|name| async move {
            match self.listed(&name).await {
                Ok((objects, _)) => Ok((name, stamp(&objects))),
                // Told when it is loaded.
                Err(Refused::Key(text)) => Ok((name, Stamp::of(&text))),
                Err(Refused::Store(error)) => Err(error),
            }
        });
        let mut seen: Vec<(String, Stamp)> = seen.buffer_unordered(AT_ONCE).try_collect().await?;
        seen.sort_unstable();
        Ok(seen)
    }

    fn failed(&self, key: &Key, error: &Error) -> io::Error {
        let kind = match error {
            Error::NotFound { .. } => ErrorKind::NotFound,
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => ErrorKind::PermissionDenied,
            _ => ErrorKind::Other,
        };
        let bucket = &self.address.bucket;
        io::Error::new(kind, format!("bucket '{bucket}', key '{key}': {}", words(error)))
    }

    /// The answer, or, while there is none, what was answered the last time. The first that is missing is an error.
    fn or_last<T: Clone>(&self, answer: io::Result<T>, last: fn(&mut Last) -> &mut Option<T>) -> io::Result<T> {
        let mut state = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match answer {
            Ok(answer) => {
                if std::mem::take(&mut state.away) {
                    tracing::info!("'{}' can be read again", self.address);
                }
                *last(&mut state) = Some(answer.clone());
                Ok(answer)
            }
            Err(error) => {
                let known = last(&mut state).clone().ok_or_else(|| io::Error::new(error.kind(), error.to_string()))?;
                if !std::mem::replace(&mut state.away, true) {
                    tracing::error!("'{}' cannot be read, its models stay as they are: {error}", self.address);
                }
                Ok(known)
            }
        }
    }
}

impl Source for Objects {
    fn name(&self) -> String {
        self.address.to_string()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let names = self.runtime.block_on(self.names());
        if let Ok(names) = &names {
            if let Ok(_nobody_fetches) = self.fetching.try_write() {
                self.files.keep_models(names);
            }
            if names.is_empty() && self.last.lock().unwrap_or_else(PoisonError::into_inner).names.is_none() {
                tracing::warn!("'{}' has no models", self.address);
            }
        }
        self.or_last(names, |last| &mut last.names)
    }

    fn look(&self) -> io::Result<Vec<(String, Stamp)>> {
        self.or_last(self.runtime.block_on(self.looked()), |last| &mut last.look)
    }

    fn local(&self, model: &str) -> io::Result<Option<Local>> {
        if !keys::is_model(model) {
            return Ok(None);
        }
        let _fetching = self.fetching.read();
        self.runtime.block_on(self.fetch(model))
    }
}

impl Object {
    fn new(meta: ObjectMeta) -> Self {
        let about =
            format!("{}\n{}\n{}\n{:?}\n{:?}", meta.location, meta.size, meta.last_modified, meta.e_tag, meta.version);
        Self { content: blake3::hash(about.as_bytes()).to_hex().to_string(), meta }
    }
}

fn stamp(objects: &[Object]) -> Stamp {
    Stamp::of(&objects.iter().map(|object| &object.content).collect::<BTreeSet<_>>())
}

/// What a store says, on one line and not too long: some answer with pages of XML.
fn words(error: &Error) -> String {
    let mut text = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    if text.len() > WORDS {
        let end = (0..=WORDS).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text.push_str(" ...");
    }
    text
}
