//! Executes the calls of models in workers: inference and repository requests. See `crate::calls`.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::InferRequest;
use pharos::repository::{Override, parse_version};
use pharos::wire::Verb;

use super::Loader;
use super::on_demand::wait_limit;
use crate::calls::{Answers, BoxFuture, Caller, Models, decoupled, not_ready, refused};
use crate::scheduler::{Answer, Streamed};
use crate::serving::{Refusal, Responses, Serving};

impl Models for Loader {
    fn infer(self: Arc<Self>, mut request: InferRequest, may_be_many: bool) -> Result<Box<dyn Answers>, InferError> {
        let name = request.model_name.clone();
        let serving = match self.models.serving_for(&request).map_err(Refusal::from).and_then(Serving::accepting) {
            Ok(serving) => serving,
            Err(_) if self.may_be_demanded(&request) => {
                let limit = wait_limit(&request);
                let model = (request.model_name.clone(), request.model_version.clone());
                let loaded = async move {
                    let loaded = self.demand((&model.0, &model.1), limit).await;
                    let load = loaded.map_err(|error| refused(&model.0, error))?;
                    if load.is_some() {
                        self.models.snapshot().record_waited(&model.0);
                    }
                    self.infer(request, may_be_many)
                };
                return Ok(Box::new(Loading::Waits(Box::pin(loaded))));
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
        Ok(Box::new(Single(Some(Box::pin(
            async move { self.models.execute(&serving, Box::new(request), admitted).await },
        )))))
    }

    fn manage(self: Arc<Self>, caller: Arc<Caller>, model: String, verb: Verb) -> BoxFuture<Result<bool, InferError>> {
        Box::pin(async move {
            match verb {
                Verb::IsReady(version) => {
                    // As in Triton, a malformed version is an error, also of an unknown model.
                    if !version.is_empty() {
                        parse_version(&version)?;
                    }
                    Ok(self.models.check_ready(&model, &version).await)
                }
                Verb::Unload(dependents) => self.unload_for(&caller, &model, dependents).await.map(|()| true),
                Verb::Load(files) => {
                    let overrides = Override::new(files.into_iter().map(|(name, bytes)| (name, Bytes::from(bytes))));
                    let overrides = overrides.map_err(|reason| {
                        let text = format!("failed to load '{model}', failed to poll from model repository: {reason}");
                        InferError::new(ErrorCode::Internal, Reason::Malformed, text)
                    })?;
                    self.load_for(caller, &model, overrides).await.map(|()| true)
                }
            }
        })
    }
}

impl Answers for Responses {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        Responses::poll_next(self, cx)
    }
}

/// The responses of a model that is being loaded on demand.
enum Loading {
    Waits(BoxFuture<Result<Box<dyn Answers>, InferError>>),
    Runs(Box<dyn Answers>),
    Ended,
}

impl Answers for Loading {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        if let Self::Waits(loaded) = self {
            match std::task::ready!(loaded.as_mut().poll(cx)) {
                Ok(answers) => *self = Self::Runs(answers),
                Err(error) => {
                    *self = Self::Ended;
                    return Poll::Ready(Some(Streamed { answer: Err(error), last: true, empty: false }));
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
struct Single(Option<Pin<Box<dyn Future<Output = Answer> + Send>>>);

impl Answers for Single {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        let Some(answer) = &mut self.0 else { return Poll::Ready(None) };
        let answer = std::task::ready!(answer.as_mut().poll(cx));
        self.0 = None;
        Poll::Ready(Some(Streamed { answer, last: true, empty: false }))
    }
}
