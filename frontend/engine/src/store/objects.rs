//! A repository in an object store: models are folders of keys. Models are served from local
//! copies; only changed objects are fetched again.
//!
//! An unreachable store affects only loads from it: its last listing is used until it answers
//! again. For a while after a failure no request is sent to it, so that loads and indexes do not
//! wait for it repeatedly.

mod availability;
mod connect;
mod copies;
mod credentials;
mod error_text;
mod fetch;
mod http_client;
mod keys;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path as Key;
use object_store::{Error, ObjectMeta, ObjectStore};
use pharos::metrics::cache::Cache;
use pharos::metrics::record;
use pharos::repository::Stamp;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};

use super::Store;
use super::address::Address;
use super::files::ModelFiles;
use availability::Availability;
use copies::Copies;
use keys::Tree;
use pharos_os::{blocking, clock};

/// The maximum number of concurrent requests to a store.
const AT_ONCE: usize = 8;
/// The maximum number of objects of a model, and of a repository.
const MAX_OBJECTS: usize = 100_000;
const MAX_OF_ALL: usize = 1_000_000;

/// The time limits of the listings of the models, and of all objects. A store may answer with page
/// after page for ever.
const MAX_LISTING: Duration = Duration::from_secs(120);
const MAX_LISTING_OF_ALL: Duration = Duration::from_secs(600);

/// A store whose keys can be listed page by page.
pub(super) trait ModelStore: ObjectStore + PaginatedListStore {}

impl<S: ObjectStore + PaginatedListStore> ModelStore for S {}

/// A repository in an object store.
pub(super) struct ObjectRepository {
    address: Address,
    prefix: Key,
    store: Arc<dyn ModelStore>,
    copies: Arc<Copies>,
    runtime: Handle,
    requests: Semaphore,
    /// Locked in shared mode while a model is fetched.
    fetching: RwLock<()>,
    availability: Availability,
    cache: Arc<Cache>,
    /// True when the server exits, which ends the requests.
    exiting: watch::Receiver<bool>,
}

impl Debug for ObjectRepository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ObjectRepository").field(&self.address).finish()
    }
}

/// The reason why a model's objects cannot be fetched.
enum Refused {
    /// The objects do not form a model's directory.
    Model(String),
    /// The store cannot be read.
    Store(io::Error),
}

/// An object of a model.
struct Object {
    meta: ObjectMeta,
    /// The name of the local copy of its content.
    content: String,
}

impl ObjectRepository {
    /// Creates the repository. Copies are kept in `copies`, or in a temporary directory. Its
    /// requests end when `exiting` becomes true. Needs a Tokio runtime.
    ///
    /// # Errors
    /// The store or the directory of copies cannot be used. Sends no request.
    pub(super) fn new(
        address: Address,
        copies: Option<&Path>,
        cache: Arc<Cache>,
        exiting: watch::Receiver<bool>,
    ) -> Result<Self, String> {
        let store = connect::connect(&address)?;
        let prefix = Key::parse(&address.prefix)
            .map_err(|error| format!("'{address}' cannot be used: {error}"))?;
        let copies = Copies::new(copies, &address.to_string())
            .map_err(|error| format!("'{address}' has no directory for copies: {error}"))?;
        record::store_opened(&cache, &address.to_string());
        Ok(Self {
            cache,
            availability: Availability::new(&address.to_string()),
            address,
            prefix,
            store,
            copies: Arc::new(copies),
            runtime: Handle::current(),
            requests: Semaphore::new(AT_ONCE),
            fetching: RwLock::default(),
            exiting,
        })
    }

    /// Waits for requests to the store; `None` if the server exits, which ends them. Blocks.
    fn wait<T>(&self, requests: impl Future<Output = T>) -> Option<T> {
        self.runtime.block_on(blocking::until_exit(self.exiting.clone(), requests))
    }

    /// Returns the folders whose names are valid model names.
    async fn names(&self) -> io::Result<Vec<String>> {
        let listed = within(MAX_LISTING, list_models(&*self.store, &self.prefix)).await?;
        let names = listed.map_err(|error| self.failed(&self.prefix, &error))?;
        match names {
            Some(names) => Ok(names.into_iter().collect()),
            None => Err(too_many()),
        }
    }

    /// Returns the objects of a model, sorted by key, and the directory tree that they form.
    async fn listed(&self, model: &str) -> Result<(Vec<Object>, Tree), Refused> {
        let folder = self.folder(model)?;
        let _permit = self.requests.acquire().await;
        // One more than allowed, to detect the excess.
        let listing =
            self.store.list(Some(&folder)).take(MAX_OBJECTS + 1).try_collect::<Vec<ObjectMeta>>();
        let mut found = match within(MAX_LISTING, listing).await.map_err(Refused::Store)? {
            Ok(found) => found,
            Err(error @ Error::InvalidPath { .. }) => {
                return Err(Refused::Model(error_text::of(&error)));
            }
            Err(error) => return Err(Refused::Store(self.failed(&folder, &error))),
        };
        if found.len() > MAX_OBJECTS {
            return Err(Refused::Model(format!("it has more than {MAX_OBJECTS} objects")));
        }
        found.sort_unstable_by(|one, other| one.location.cmp(&other.location));
        let start = folder.as_ref().len();
        let mut keys = Vec::with_capacity(found.len());
        for meta in &found {
            let below = meta.location.as_ref().get(start..).unwrap_or_default();
            keys.push((below.strip_prefix('/').unwrap_or(below), meta.size));
        }
        let tree = keys::tree(keys).map_err(Refused::Model)?;
        Ok((found.into_iter().map(Object::new).collect(), tree))
    }

    fn folder(&self, model: &str) -> Result<Key, Refused> {
        let text = match self.prefix.as_ref() {
            "" => model.to_owned(),
            prefix => format!("{prefix}/{model}"),
        };
        Key::parse(text).map_err(|error| Refused::Model(error.to_string()))
    }

    /// Returns the fingerprints of all models, from one listing with a thousand objects per
    /// request.
    async fn list_stamps(&self) -> io::Result<Vec<(String, Stamp)>> {
        let start = match self.prefix.as_ref() {
            "" => 0,
            prefix => prefix.len() + 1,
        };
        let mut models: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut listing = self.store.list(Some(&self.prefix)).take(MAX_OF_ALL + 1);
        let mut number = 0;
        loop {
            let meta = match listing.try_next().await {
                Ok(Some(meta)) => meta,
                Ok(None) => break,
                // An invalid key of one model must not affect the others.
                Err(Error::InvalidPath { .. }) => return self.looked_at_each().await,
                Err(error) => return Err(self.failed(&self.prefix, &error)),
            };
            number += 1;
            let below = meta.location.as_ref().get(start..).and_then(|key| key.split_once('/'));
            if let Some((model, _)) = below.filter(|(model, _)| keys::is_model(model)) {
                let model = model.to_owned();
                models.entry(model).or_default().insert(Object::new(meta).content);
            }
        }
        if number > MAX_OF_ALL {
            return Err(too_many());
        }
        Ok(models.into_iter().map(|(name, contents)| self.stamped(name, &contents)).collect())
    }

    /// Returns the same with a listing for each model.
    async fn looked_at_each(&self) -> io::Result<Vec<(String, Stamp)>> {
        let names = self.names().await?;
        let stamping = stream::iter(names).map(|name| async move {
            match self.listed(&name).await {
                Ok((objects, _)) => {
                    Ok(self
                        .stamped(name, &objects.into_iter().map(|object| object.content).collect()))
                }
                // Reported when the model is loaded.
                Err(Refused::Model(text)) => Ok((name, Stamp::of(&text))),
                Err(Refused::Store(error)) => Err(error),
            }
        });
        let mut stamps: Vec<(String, Stamp)> =
            stamping.buffer_unordered(AT_ONCE).try_collect().await?;
        stamps.sort_unstable();
        Ok(stamps)
    }

    /// Returns a fingerprint that also changes after a failed fetch, so that a poll retries the
    /// model.
    fn stamped(&self, name: String, contents: &BTreeSet<String>) -> (String, Stamp) {
        let stamp = Stamp::of(&(contents, self.availability.failures(&name)));
        (name, stamp)
    }

    /// Records whether the store could be read.
    fn record_poll<T>(&self, answer: T) -> T {
        record::store_polled(
            &self.cache,
            &self.address.to_string(),
            self.availability.failure().is_none(),
        );
        answer
    }

    fn failed(&self, key: &Key, error: &Error) -> io::Error {
        let kind = match error {
            Error::NotFound { .. } => ErrorKind::NotFound,
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
                ErrorKind::PermissionDenied
            }
            _ => ErrorKind::Other,
        };
        let bucket = &self.address.bucket;
        io::Error::new(kind, format!("bucket '{bucket}', key '{key}': {}", error_text::of(error)))
    }
}

impl Store for ObjectRepository {
    fn name(&self) -> String {
        self.address.to_string()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let names = self.record_poll(self.availability.names_or(|| self.wait(self.names())));
        // The names may be older than the copies while the server exits.
        if self.availability.failure().is_none()
            && !*self.exiting.borrow()
            && let Ok(_exclusive) = self.fetching.try_write()
        {
            self.copies.keep_models(&names);
        }
        Ok(names)
    }

    fn poll(&self) -> io::Result<Vec<(String, Stamp)>> {
        let polled = self
            .availability
            .poll_or(|| self.wait(async { within(MAX_LISTING_OF_ALL, self.list_stamps()).await? }));
        Ok(self.record_poll(polled))
    }

    fn has(&self, model: &str) -> bool {
        self.availability.has(model)
    }

    fn close(&self) {
        self.copies.close();
    }

    fn failure(&self) -> Option<String> {
        self.availability.failure()
    }

    fn local(&self, model: &str) -> io::Result<Option<ModelFiles>> {
        if !keys::is_model(model) {
            return Ok(None);
        }
        self.availability.check_pause()?;
        let _fetching = self.fetching.read();
        let fetched = self.wait(self.fetch(model));
        self.record_poll(fetched.unwrap_or_else(|| Err(io::Error::other("the server is exiting"))))
    }
}

/// Waits for a listing.
///
/// # Errors
/// The listing does not end in time.
async fn within<T>(limit: Duration, listing: impl Future<Output = T>) -> io::Result<T> {
    clock::timeout(limit, listing).await.ok_or_else(|| {
        let seconds = limit.as_secs();
        io::Error::new(
            ErrorKind::TimedOut,
            format!("the listing of its objects has not ended within {seconds} s"),
        )
    })
}

impl Object {
    fn new(meta: ObjectMeta) -> Self {
        let about = format!(
            "{}\n{}\n{}\n{:?}\n{:?}",
            meta.location, meta.size, meta.last_modified, meta.e_tag, meta.version
        );
        Self { content: blake3::hash(about.as_bytes()).to_hex().to_string(), meta }
    }
}

/// Returns the folders below a prefix whose names are valid model names; `None` if there are more
/// than [`MAX_OF_ALL`] folders and objects. Reads one page after the other: a store may name new
/// folders without an end.
async fn list_models(
    store: &(impl PaginatedListStore + ?Sized),
    prefix: &Key,
) -> object_store::Result<Option<BTreeSet<String>>> {
    let prefix = match prefix.as_ref() {
        "" => None,
        prefix => Some(format!("{prefix}/")),
    };
    let mut names = BTreeSet::new();
    let mut number = 0;
    let mut page_token = None;
    loop {
        let delimiter = Some("/".into());
        let options =
            PaginatedListOptions { delimiter, page_token, ..PaginatedListOptions::default() };
        let page = store.list_paginated(prefix.as_deref(), options).await?;
        let folders = page.result.common_prefixes;
        number += folders.len() + page.result.objects.len();
        if number > MAX_OF_ALL {
            return Ok(None);
        }
        let folders = folders.iter().filter_map(|folder| folder.filename());
        names.extend(folders.filter(|name| keys::is_model(name)).map(str::to_owned));
        page_token = page.page_token;
        if page_token.is_none() {
            return Ok(Some(names));
        }
    }
}

fn too_many() -> io::Error {
    io::Error::other(format!("there are more than {MAX_OF_ALL} objects"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use object_store::list::PaginatedListResult;
    use object_store::{Extensions, ListResult};

    use super::*;

    /// Names new folders on each page; the last page is the one with this number.
    #[derive(Debug)]
    struct Folders {
        last: Option<usize>,
    }

    #[async_trait::async_trait]
    impl PaginatedListStore for Folders {
        async fn list_paginated(
            &self,
            prefix: Option<&str>,
            options: PaginatedListOptions,
        ) -> object_store::Result<PaginatedListResult> {
            assert_eq!((prefix, options.delimiter.as_deref()), (Some("a/b/"), Some("/")));
            let page: usize = options.page_token.map_or(0, |token| token.parse().unwrap());
            let folder = |number| Key::from(format!("a/b/page-{page}-folder-{number}"));
            let common_prefixes = (0..1000).map(folder).collect();
            let result = ListResult {
                common_prefixes,
                objects: Vec::new(),
                extensions: Extensions::default(),
            };
            let page_token = (self.last != Some(page)).then(|| (page + 1).to_string());
            Ok(PaginatedListResult { result, page_token })
        }
    }

    #[tokio::test]
    async fn folders_are_listed_page_by_page_up_to_a_limit() {
        let prefix = Key::from("a/b");
        let names = list_models(&Folders { last: Some(2) }, &prefix).await.unwrap().unwrap();
        assert_eq!(names.len(), 3000);
        assert!(names.contains("page-2-folder-999"));
        assert_eq!(list_models(&Folders { last: None }, &prefix).await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_listing_that_never_ends_is_an_error() {
        let error =
            within(Duration::from_millis(1), std::future::pending::<()>()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(
            error.to_string().starts_with("the listing of its objects has not ended within"),
            "{error}"
        );
        assert_eq!(within(MAX_LISTING, async { 1 }).await.unwrap(), 1);
    }
}
