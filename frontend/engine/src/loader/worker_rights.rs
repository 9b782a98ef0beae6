//! What the calls of a worker may load and unload: at most what its model may do itself.
//!
//! | call | permitted |
//! |---|---|
//! | load a model of the repositories as it is | as for a client |
//! | load with a configuration or files | as for a client without a token (`--allow-model-upload`), and only in place of models that the same model has loaded; the loaded model has no more rights than the caller |
//! | unload | models that the same model has loaded; all, if the caller has the rights of the server's operator |

use std::sync::Arc;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::repository::{LoadScope, Override};

use super::control::Loaded;
use super::{Loader, Mode};
use crate::calls::Caller;

impl Loader {
    /// Loads a model for a worker; see [`Loader::load_model`].
    ///
    /// # Errors
    /// As for a client, or the worker may not load it so.
    pub(super) async fn load_for(self: &Arc<Self>, caller: Arc<Caller>, name: &str, sent: Option<Override>) -> Loaded {
        let scope = if self.settings.worker_uploads { LoadScope::Code } else { LoadScope::Settings };
        let has_files = sent.as_ref().is_some_and(|sent| !sent.files.is_empty());
        if has_files && scope == LoadScope::Settings {
            let what = format!(
                "load '{name}' with files, which can contain code: a model needs '--allow-model-upload=true' for that, as a \
                 client without a token does"
            );
            return Err(refused(&caller, &what));
        }
        self.load(name, sent, scope, Some(caller)).await
    }

    /// Unloads a model for a worker; see [`Loader::unload_model`].
    ///
    /// # Errors
    /// As for a client, or the worker may not unload it.
    pub(super) async fn unload_for(self: &Arc<Self>, caller: &Caller, name: &str, dependents: bool) -> Loaded {
        let is_another = |name: &String| {
            let table = self.models.snapshot();
            let is_loaded = table.wanted.contains(name) || table.serving.contains_key(name) || self.locks.is_held(name);
            is_loaded && table.owners.get(name) != Some(&caller.model)
        };
        if caller.is_restricted() && self.to_unload(name).iter().any(is_another) {
            return Err(refused(caller, &format!("unload the model '{name}', which it has not loaded")));
        }
        self.unload_model(name, dependents).await
    }

    /// Makes a worker's model the owner of a model that is not loaded, also if the load then fails, until the model is unloaded or a client
    /// loads it. A load with a configuration or files replaces only models of
    /// the same owner.
    ///
    /// # Errors
    /// It would replace another model.
    pub(super) async fn claim(&self, caller: &Caller, name: &str, replaces: bool) -> Loaded {
        // Clients may ask for models of the repositories by name.
        let keeps_names = caller.is_restricted() || self.settings.mode == Mode::OnDemand;
        let in_repository =
            replaces && keeps_names && self.list_blocking().await.is_ok_and(|all| all.contains_key(name));
        let mut is_taken = false;
        self.models.change(|table| {
            if table.owners.get(name).is_some_and(|owner| *owner == caller.model) {
                return;
            }
            is_taken = table.wanted.contains(name)
                || table.serving.contains_key(name)
                || table.owners.contains_key(name)
                || self.locks.is_held(name);
            if !is_taken && !in_repository {
                table.owners.insert(name.to_owned(), caller.model.clone());
            }
        });
        if replaces && (is_taken || in_repository) {
            return Err(refused(caller, &format!("replace the model '{name}', which it has not loaded")));
        }
        Ok(())
    }
}

fn refused(caller: &Caller, what: &str) -> InferError {
    let text = format!("the model '{}' may not {what}", caller.model);
    InferError::new(ErrorCode::Unsupported, Reason::Restricted, text)
}
