//! Executes the calls of models in workers: inference and repository requests. See `crate::calls`.
//! A worker may load and unload at most what its model may do itself:
//!
//! | call | permitted |
//! |---|---|
//! | load a model of the repositories as it is | as for a client |
//! | load with a configuration or files | as for a client without a token (`--allow-model-upload`), and only in place of models that the same model has loaded; the loaded model has no more rights than the caller |
//! | unload | models that the same model has loaded; all, if the caller has the rights of the server's operator |

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::InferRequest;
use pharos::repository::{LoadScope, Override, parse_version};
use pharos::wire::Verb;

use super::on_demand::wait_limit;
use super::{Loaded, Loader, Mode};
use crate::calls::{BoxFuture, CallResponses, Caller, Models, decoupled, not_ready, refused};
use crate::scheduler::{InferResult, Streamed};
use crate::serving::{Refusal, ServedResponses, Serving};

impl Models for Loader {
    fn infer(
        self: Arc<Self>,
        mut request: InferRequest,
        may_be_many: bool,
    ) -> Result<Box<dyn CallResponses>, InferError> {
        let name = request.model_name.clone();
        let serving = match self
            .models
            .serving_for(&request)
            .map_err(Refusal::from)
            .and_then(Serving::accepting)
        {
            Ok(serving) => serving,
            Err(_) if self.may_be_demanded(&request) => {
                let limit = wait_limit(&request);
                return Ok(Box::new(Loading::Waits(Box::pin(async move {
                    let demanded = self.demand(&name, &request.model_version, limit).await;
                    if demanded.map_err(|error| refused(&name, error))?.is_some() {
                        self.models.snapshot().record_waited(&name);
                    }
                    self.infer(request, may_be_many)
                }))));
            }
            Err(refusal) => {
                return Err(refused(&name, refusal.count().with_message(not_ready(&name))));
            }
        };
        if serving.config.decoupled && !may_be_many {
            return Err(refused(&name, InferError::unsupported(decoupled(&name))));
        }
        let admitted = serving.admit(&mut request).map_err(|error| refused(&name, error))?;
        if serving.config.decoupled {
            return Ok(Box::new(self.models.stream(&serving, request, admitted)));
        }
        Ok(Box::new(Single(Some(Box::pin(async move {
            self.models.execute(&serving, Box::new(request), admitted).await
        })))))
    }

    fn manage(
        self: Arc<Self>,
        caller: Arc<Caller>,
        model: String,
        verb: Verb,
    ) -> BoxFuture<Result<bool, InferError>> {
        Box::pin(async move {
            match verb {
                Verb::IsReady(version) => {
                    // As in Triton, a malformed version is an error, also of an unknown model.
                    if !version.is_empty() {
                        parse_version(&version)?;
                    }
                    Ok(self.models.check_ready(&model, &version).await)
                }
                Verb::IsDecoupled(version) => {
                    if !version.is_empty() {
                        parse_version(&version)?;
                    }
                    Ok(self.models.serving(&model, &version)?.config.decoupled)
                }
                Verb::Unload(dependents) => {
                    self.unload_for(&caller, &model, dependents).await.map(|()| true)
                }
                Verb::Load(files) => {
                    let parameters =
                        files.into_iter().map(|(name, bytes)| (name, Bytes::from(bytes)));
                    let overrides = Override::new(parameters).map_err(|reason| {
                        let text = format!(
                            "failed to load '{model}', failed to poll from model repository: \
                             {reason}"
                        );
                        InferError::new(ErrorCode::Internal, Reason::Malformed, text)
                    })?;
                    self.load_for(caller, &model, overrides).await.map(|()| true)
                }
            }
        })
    }
}

impl CallResponses for ServedResponses {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        ServedResponses::poll_next(self, cx)
    }
}

/// The responses of a model that is being loaded on demand.
enum Loading {
    Waits(BoxFuture<Result<Box<dyn CallResponses>, InferError>>),
    Runs(Box<dyn CallResponses>),
    Ended,
}

impl CallResponses for Loading {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        if let Self::Waits(loaded) = self {
            match ready!(loaded.as_mut().poll(cx)) {
                Ok(answers) => *self = Self::Runs(answers),
                Err(error) => {
                    *self = Self::Ended;
                    return Poll::Ready(Some(Streamed {
                        answer: Err(error),
                        last: true,
                        empty: false,
                    }));
                }
            }
        }
        match self {
            Self::Runs(answers) => answers.poll_next(cx),
            Self::Waits(_) | Self::Ended => Poll::Ready(None),
        }
    }
}

/// The only answer of an ordinary model.
struct Single(Option<Pin<Box<dyn Future<Output = InferResult> + Send>>>);

impl CallResponses for Single {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        let Some(answer) = &mut self.0 else { return Poll::Ready(None) };
        let answer = ready!(answer.as_mut().poll(cx));
        self.0 = None;
        Poll::Ready(Some(Streamed { answer, last: true, empty: false }))
    }
}

impl Loader {
    /// Loads a model for a worker; see [`Loader::load_model`].
    ///
    /// # Errors
    /// As for a client, or the worker may not load it so.
    async fn load_for(
        self: &Arc<Self>,
        caller: Arc<Caller>,
        name: &str,
        sent: Option<Override>,
    ) -> Loaded {
        let scope =
            if self.settings.worker_uploads { LoadScope::Code } else { LoadScope::Settings };
        let has_files = sent.as_ref().is_some_and(|sent| !sent.files.is_empty());
        if has_files && scope == LoadScope::Settings {
            let what = format!(
                "load '{name}' with files, which can contain code: a model needs \
                 '--allow-model-upload=true' for that, as a client without a token does"
            );
            return Err(forbidden(&caller, &what));
        }
        self.load(name, sent, scope, Some(caller)).await
    }

    /// Unloads a model for a worker; see [`Loader::unload_model`].
    ///
    /// # Errors
    /// As for a client, or the worker may not unload it.
    async fn unload_for(self: &Arc<Self>, caller: &Caller, name: &str, dependents: bool) -> Loaded {
        let is_of_another = |name: &String| {
            let table = self.models.snapshot();
            let is_loaded = table.wanted.contains(name)
                || table.serving.contains_key(name)
                || self.locks.is_held(name);
            is_loaded && table.owners.get(name) != Some(&caller.model)
        };
        if caller.is_restricted() && self.to_unload(name).iter().any(is_of_another) {
            return Err(forbidden(
                caller,
                &format!("unload the model '{name}', which it has not loaded"),
            ));
        }
        self.unload_model(name, dependents).await
    }

    /// Makes a worker's model the owner of a model that is not loaded, also if the load then fails,
    /// until the model is unloaded or a client loads it. A load with a configuration or files
    /// replaces only models of the same owner.
    ///
    /// # Errors
    /// The load would replace another model.
    pub(super) async fn claim(&self, caller: &Caller, name: &str, replaces: bool) -> Loaded {
        // Clients may ask for models of the repositories by name.
        let keeps_names = caller.is_restricted() || self.settings.mode == Mode::OnDemand;
        let in_repository = replaces
            && keeps_names
            && self.list_blocking().await.is_ok_and(|all| all.contains_key(name));
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
            return Err(forbidden(
                caller,
                &format!("replace the model '{name}', which it has not loaded"),
            ));
        }
        Ok(())
    }
}

fn forbidden(caller: &Caller, what: &str) -> InferError {
    let text = format!("the model '{}' may not {what}", caller.model);
    InferError::new(ErrorCode::Unsupported, Reason::Restricted, text)
}
