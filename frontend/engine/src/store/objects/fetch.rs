//! Fetches a model's objects. A model is served only in a state that the store had at one moment.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::time::{Duration, SystemTime};

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::{Error, ObjectMeta, ObjectStoreExt};
use pharos::metrics::record;

use super::super::files::ModelFiles;
use super::{AT_ONCE, Object, ObjectRepository, Refused};
use crate::store::address::Protocol;
use pharos_os::clock;

/// The maximum number of attempts to fetch a model that changes meanwhile.
const ROUNDS: usize = 5;

impl ObjectRepository {
    /// Fetches a model; returns `None` if the store does not contain it.
    pub(super) async fn fetch(&self, model: &str) -> io::Result<Option<ModelFiles>> {
        for _ in 0..ROUNDS {
            let listed = self.listed(model).await;
            let (objects, tree) = match listed {
                Ok(listed) => listed,
                Err(Refused::Model(text)) => {
                    return Err(io::Error::new(
                        ErrorKind::InvalidData,
                        format!("model '{model}': {text}"),
                    ));
                }
                Err(Refused::Store(error)) => {
                    self.may_pass(model, &error);
                    self.availability.record_result(Some(&error));
                    return Err(error);
                }
            };
            self.availability.record_result(None);
            if objects.is_empty() {
                return Ok(None);
            }
            let wanted: BTreeMap<&String, &Object> = tree
                .files
                .iter()
                .filter_map(|(path, index)| Some((path, objects.get(*index)?)))
                .collect();
            let missing: Vec<&Object> =
                wanted.values().copied().filter(|object| !self.is_here(model, object)).collect();
            // The model is listed again afterwards, which ensures that all objects were in the
            // store at one moment.
            if !missing.is_empty() {
                self.bring(model, missing)
                    .await
                    .inspect_err(|error| self.may_pass(model, error))?;
                continue;
            }
            let files = wanted.iter().map(|(path, object)| (*path, &object.content));
            match self.copies.link(model, &tree.directories, files) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                linked => {
                    self.copies.keep(
                        model,
                        &wanted.values().map(|object| object.content.as_str()).collect(),
                    );
                    return linked.map(Some);
                }
            }
        }
        self.availability.failed(model);
        Err(io::Error::other(format!("model '{model}' changed during every attempt to fetch it")))
    }

    /// Counts a failure that the next poll retries; denied access is not retried.
    fn may_pass(&self, model: &str, error: &io::Error) {
        if error.kind() != ErrorKind::PermissionDenied {
            self.availability.failed(model);
        }
    }

    fn is_here(&self, model: &str, object: &Object) -> bool {
        let found = self.copies.content(model, &object.content).metadata();
        found.is_ok_and(|file| file.is_file() && file.len() == object.meta.size)
    }

    /// Fetches contents concurrently. Skips objects that have changed since the listing.
    async fn bring(&self, model: &str, missing: Vec<&Object>) -> io::Result<()> {
        let fetched = stream::iter(missing)
            .map(|object| self.download(model, object))
            .buffer_unordered(AT_ONCE);
        fetched.try_collect().await
    }

    /// Fetches one object, and records it unless it has changed since the listing.
    async fn download(&self, model: &str, object: &Object) -> io::Result<()> {
        let began = clock::now();
        let copied = self.copy(model, object).await;
        let cache = &self.cache;
        let repository = self.address.to_string();
        match &copied {
            Ok(Some(bytes)) => {
                let nanoseconds = clock::now().0.saturating_sub(began.0);
                record::object_fetched(cache, &repository, *bytes, nanoseconds as f64 / 1e9);
            }
            Ok(None) => {}
            Err(_) => record::object_fetch_failed(cache, &repository),
        }
        copied.map(drop)
    }

    /// Copies an object and returns its size; `None` if it has changed since the listing.
    async fn copy(&self, model: &str, object: &Object) -> io::Result<Option<u64>> {
        let _permit = self.requests.acquire().await;
        let key = &object.meta.location;
        let found = match self.store.get(key).await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.failed(key, &error)),
        };
        if !self.is_same(&found.meta, &object.meta) {
            return Ok(None);
        }
        let failed = |error: io::Error| {
            io::Error::new(error.kind(), format!("key '{key}' cannot be stored: {error}"))
        };
        let mut part = self.copies.part(model, &object.content).map_err(failed)?;
        let mut pieces = found.into_stream();
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|error| self.failed(key, &error))?;
            part.write(&piece).map_err(failed)?;
            if part.written() > object.meta.size {
                break;
            }
        }
        if part.written() != object.meta.size {
            let size = object.meta.size;
            let got = part.written();
            return Err(io::Error::other(format!(
                "key '{key}' has {size} bytes, but {got} were received"
            )));
        }
        let bytes = part.written();
        part.finish(object.changed()).map_err(failed)?;
        Ok(Some(bytes))
    }

    /// Returns whether an answer belongs to the listed object. Listings quote entity tags
    /// inconsistently, and Google's tags in listings may differ from the tags of answers.
    fn is_same(&self, answer: &ObjectMeta, listed: &ObjectMeta) -> bool {
        let tag =
            |meta: &ObjectMeta| meta.e_tag.as_deref().map(|tag| tag.trim_matches('"').to_owned());
        let same_tag = self.address.protocol == Protocol::Gcs
            || listed.e_tag.is_none()
            || tag(answer) == tag(listed);
        answer.size == listed.size && same_tag
    }
}

impl Object {
    /// Returns its modification time. Stores give seconds; nanoseconds from the hash tell contents
    /// of one second apart.
    fn changed(&self) -> SystemTime {
        let seconds = u64::try_from(self.meta.last_modified.timestamp()).unwrap_or(0);
        let digits = self.content.get(..7).and_then(|digits| u32::from_str_radix(digits, 16).ok());
        SystemTime::UNIX_EPOCH + Duration::new(seconds, digits.unwrap_or(0))
    }
}
