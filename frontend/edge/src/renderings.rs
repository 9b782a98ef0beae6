//! Documents that are rendered from the state of the server when a client requests them: scrapes.
//! Requests for the same document that wait share one rendering, which begins after all of them
//! have arrived. Never unbounded: few renderings run at the same time, and the bytes that clients
//! have not read yet are limited.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use pharos_os::blocking;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// The longest time without progress in sending a scrape: scrapers give up earlier, and an unread
/// scrape takes memory.
pub const MAX_SCRAPE_WRITE: Duration = Duration::from_secs(30);

/// How many renderings run at the same time: a long one must not delay others, and each takes many
/// times the memory of its result.
const CONCURRENT: usize = 2;

/// The limit of the bytes that clients have not read, in units of [`UNIT`]. A larger document is
/// rendered when no other is unread.
const MAX_UNREAD: u32 = 64 << 10;
const UNIT: usize = 1 << 10;

/// A rendered document.
#[derive(Clone, Debug)]
pub struct Rendered {
    /// The content coding, if it is compressed.
    pub coding: Option<&'static str>,
    /// The bytes.
    pub body: Bytes,
}

/// The rendering has failed, and the log has the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed;

/// The renderings of a listener. Clones share them.
#[derive(Clone)]
pub struct Renderings(Arc<State>);

struct State {
    // Locked for look-ups only. Renderings that have not begun, by document.
    waiting: Mutex<HashMap<String, watch::Receiver<Option<Rendered>>>>,
    running: Arc<Semaphore>,
    unread: Arc<Semaphore>,
}

/// Bytes that count as unread until they are dropped.
struct Unread {
    bytes: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Unread {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Default for Renderings {
    fn default() -> Self {
        Self(Arc::new(State {
            waiting: Mutex::default(),
            running: Arc::new(Semaphore::new(CONCURRENT)),
            unread: Arc::new(Semaphore::new(MAX_UNREAD as usize)),
        }))
    }
}

impl fmt::Debug for Renderings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renderings").finish_non_exhaustive()
    }
}

impl State {
    fn waiting(&self) -> MutexGuard<'_, HashMap<String, watch::Receiver<Option<Rendered>>>> {
        self.waiting.lock()
    }
}

impl Renderings {
    /// Returns a document as it is after this call. Equal names mean equal documents. `render` runs
    /// on a blocking thread, and not at all if another request for the document waits already.
    ///
    /// # Errors
    /// The rendering has panicked, or no thread can be started.
    pub async fn get(
        &self,
        document: String,
        render: impl FnOnce() -> Rendered + Send + 'static,
    ) -> Result<Rendered, Failed> {
        let mut result = self.join(document, render);
        let rendered = result.wait_for(Option::is_some).await.map_err(|_| Failed)?;
        rendered.clone().ok_or(Failed)
    }

    fn join(
        &self,
        document: String,
        render: impl FnOnce() -> Rendered + Send + 'static,
    ) -> watch::Receiver<Option<Rendered>> {
        let mut waiting = self.0.waiting();
        if let Some(result) = waiting.get(&document) {
            return result.clone();
        }
        let (sender, result) = watch::channel(None);
        waiting.insert(document.clone(), result.clone());
        drop(waiting);
        let state = self.0.clone();
        // A task, because the client of the first request may disconnect while others wait.
        tokio::spawn(async move {
            let running = state.running.clone().acquire_owned().await;
            // Requests that arrive from now on need a rendering that begins later.
            state.waiting().remove(&document);
            if sender.is_closed() {
                return;
            }
            let rendered = match blocking::run(render).await {
                Ok(rendered) => rendered,
                Err(error) => return tracing::error!("cannot render {document}: {error}"),
            };
            let units = u32::try_from(rendered.body.len().div_ceil(UNIT))
                .unwrap_or(MAX_UNREAD)
                .min(MAX_UNREAD);
            // Both semaphores are never closed.
            let Ok(permit) = state.unread.clone().acquire_many_owned(units).await else { return };
            drop(running);
            let body = Bytes::from_owner(Unread { bytes: rendered.body, _permit: permit });
            let _ = sender.send(Some(Rendered { coding: rendered.coding, body }));
        });
        result
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    fn document(body: impl Into<Bytes>) -> Rendered {
        Rendered { coding: None, body: body.into() }
    }

    #[tokio::test]
    async fn requests_that_wait_share_one_rendering() {
        let renderings = Renderings::default();
        let count = Arc::new(AtomicUsize::new(0));
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let request = |name: &str| {
            let count = count.clone();
            let released = released.clone();
            let render = move || {
                released.lock().recv_timeout(Duration::from_secs(60)).unwrap();
                document(count.fetch_add(1, Ordering::Relaxed).to_string())
            };
            renderings.join(name.to_owned(), render)
        };
        // Two run: later requests wait.
        let first = [request("a"), request("b")];
        while renderings.0.running.available_permits() > 0 || !renderings.0.waiting().is_empty() {
            tokio::task::yield_now().await;
        }
        let later: Vec<_> = (0..100).map(|_| request("a")).collect();
        (0..3).for_each(|_| release.send(()).unwrap());
        for mut one in first {
            assert!(one.wait_for(Option::is_some).await.is_ok());
        }
        for mut one in later {
            let rendered = one.wait_for(Option::is_some).await.unwrap().clone().unwrap();
            assert_eq!(rendered.body, "2", "rendered once, after the first two began");
        }
        assert_eq!(count.load(Ordering::Relaxed), 3);
    }

    #[tokio::test]
    async fn unread_bytes_are_limited() {
        let renderings = Renderings::default();
        let large = || document(vec![0; MAX_UNREAD as usize * UNIT * 2 / 3]);
        let unread = renderings.get("a".to_owned(), large).await.unwrap();
        let mut next = Box::pin(renderings.get("b".to_owned(), large));
        assert!(
            tokio::time::timeout(Duration::from_millis(50), &mut next).await.is_err(),
            "the first is unread"
        );
        drop(unread);
        assert_eq!(next.await.unwrap().body.len(), MAX_UNREAD as usize * UNIT * 2 / 3);
        let whole = || document(vec![0; MAX_UNREAD as usize * UNIT * 2]);
        assert!(renderings.get("c".to_owned(), whole).await.is_ok(), "larger than the limit");
    }

    #[tokio::test]
    async fn a_rendering_that_panics_fails() {
        let renderings = Renderings::default();
        let failed = renderings.get("a".to_owned(), || panic!("as the test wants")).await;
        assert_eq!(failed.map(|rendered| rendered.body), Err(Failed));
        assert!(renderings.get("a".to_owned(), || document("x")).await.is_ok());
    }
}
