//! A serving version of a model. It answers requests with its own instances, or as an ensemble of
//! other models.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use pharos::classification;
use pharos::error::{Cause, ErrorCode, InferError, Reason};
use pharos::id::{ModelVersion, TenantId};
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use pharos::model::generation::counts_tokens;
use pharos::model::{Checked, ModelConfig};
use pharos::repository::{VersionFingerprint, not_at_ready_state};

use crate::calls::BoxFuture;
use crate::ensemble::Ensemble;
use crate::model_memory::MemoryShare;
use crate::scheduler::Driver;
use crate::store::ModelFiles;
use crate::store::scan::LoadedFiles;
use crate::supervisor::Instances;
use pharos_os::{blocking, clock};

/// A serving version of a model.
#[derive(Clone)]
pub(crate) struct Serving {
    pub(crate) model: ModelVersion,
    pub(crate) config: Arc<ModelConfig>,
    pub(crate) series: Arc<ModelSeries>,
    /// The directory of the version.
    pub(crate) directory: PathBuf,
    /// The files that determine its responses, when its load began; `None` without a response
    /// cache.
    pub(crate) loaded_files: Option<Arc<LoadedFiles>>,
    /// The class labels of outputs that have or inherit a label file.
    pub(crate) labels: BTreeMap<String, Vec<String>>,
    /// Every request in flight holds it. A replaced version ends when the last reference is
    /// dropped.
    pub(crate) executor: Arc<Executor>,
    /// The fingerprint of the version's files and configuration.
    pub(crate) fingerprint: VersionFingerprint,
    /// The version's files, held while they are used.
    pub(crate) files: Arc<ModelFiles>,
}

/// The size in bytes from which an output is classified on a blocking thread.
const LONG_CLASSIFICATION: usize = 64 << 10;

/// A request that fits its model.
pub(crate) struct Admitted {
    /// What the check found.
    pub(crate) checked: Checked,
    /// The outputs to classify, each with the number of largest elements to return.
    pub(crate) classified: Vec<(String, u64)>,
}

/// Executes requests.
pub(crate) enum Executor {
    /// Workers, with their share of the memory of models if it is limited.
    Instances { driver: Arc<Driver>, instances: Instances, memory: Option<Arc<MemoryShare>> },
    /// Other models; `members` has the executors of the steps' models at the time of loading, in
    /// the order of the steps.
    Ensemble { ensemble: Ensemble, members: Vec<Weak<Executor>> },
}

impl Executor {
    /// The driver; `None` for an ensemble.
    pub(crate) fn driver(&self) -> Option<&Arc<Driver>> {
        match self {
            Self::Instances { driver, .. } => Some(driver),
            Self::Ensemble { .. } => None,
        }
    }

    /// The ensemble; `None` for a model with instances.
    pub(crate) fn ensemble(&self) -> Option<&Ensemble> {
        match self {
            Self::Instances { .. } => None,
            Self::Ensemble { ensemble, .. } => Some(ensemble),
        }
    }

    /// The instances; `None` for an ensemble.
    pub(crate) fn instances(&self) -> Option<&Instances> {
        match self {
            Self::Instances { instances, .. } => Some(instances),
            Self::Ensemble { .. } => None,
        }
    }

    /// The share of the memory of models; `None` for an ensemble and without a limit.
    pub(crate) fn memory(&self) -> Option<&Arc<MemoryShare>> {
        match self {
            Self::Instances { memory, .. } => memory.as_ref(),
            Self::Ensemble { .. } => None,
        }
    }

    /// Returns the number of accepted requests without an answer.
    pub(crate) fn unanswered(&self) -> usize {
        match self {
            Self::Instances { driver, .. } => driver.unanswered(),
            Self::Ensemble { ensemble, .. } => ensemble.in_flight(),
        }
    }

    /// Returns the number of sequences that have begun and not ended.
    pub(crate) fn open_sequences(&self) -> usize {
        self.driver().map_or(0, |driver| driver.open_sequences())
    }

    /// Returns whether it has neither requests without an answer nor open sequences.
    pub(crate) fn is_idle(&self) -> bool {
        self.unanswered() == 0 && self.open_sequences() == 0
    }

    /// Ends the workers and waits until their processes are gone.
    pub(crate) async fn stop(&self) {
        if let Self::Instances { instances, .. } = self {
            instances.stop().await;
        }
    }

    /// Kills the workers.
    pub(crate) fn kill(&self) {
        if let Self::Instances { instances, .. } = self {
            instances.kill();
        }
    }
}

/// A refused request, which counts when it is certain that it will not be tried again.
pub(crate) struct Refusal {
    error: InferError,
    /// The version that cannot take the request; `None` if it does not exist.
    version: Option<Arc<Serving>>,
}

impl Refusal {
    /// Returns the refusal by a version.
    pub(crate) fn by(version: Arc<Serving>, error: InferError) -> Self {
        Self { error, version: Some(version) }
    }

    /// Counts the request for the objectives of the model, once, and returns the error.
    pub(crate) fn count(self) -> InferError {
        match self.version {
            Some(version) => version.refuse(self.error),
            None => self.error,
        }
    }
}

impl From<InferError> for Refusal {
    fn from(error: InferError) -> Self {
        Self { error, version: None }
    }
}

impl Serving {
    /// The driver; `None` for an ensemble.
    pub(crate) fn driver(&self) -> Option<&Arc<Driver>> {
        self.executor.driver()
    }

    /// The instances; `None` for an ensemble.
    pub(crate) fn instances(&self) -> Option<&Instances> {
        self.executor.instances()
    }

    /// The ensemble; `None` for a model with instances.
    pub(crate) fn ensemble(&self) -> Option<&Ensemble> {
        self.executor.ensemble()
    }

    /// Accepts a request if the version can execute it soon. A refused request counts for the
    /// objectives of the model.
    ///
    /// # Errors
    /// As [`Serving::check_accepts`].
    pub(crate) fn accept(&self) -> Result<(), InferError> {
        self.check_accepts().map_err(|error| self.refuse(error))
    }

    /// Returns the version if it can execute a request soon. A refused request is not counted yet.
    ///
    /// # Errors
    /// As [`Serving::check_accepts`].
    pub(crate) fn accepting(self: Arc<Self>) -> Result<Arc<Self>, Refusal> {
        match self.check_accepts() {
            Ok(()) => Ok(self),
            Err(error) => Err(Refusal::by(self, error)),
        }
    }

    /// Checks that the version can execute a request soon.
    ///
    /// # Errors
    /// No instance can execute a request soon. An ensemble's members are checked at each step
    /// instead.
    fn check_accepts(&self) -> Result<(), InferError> {
        if self.instances().is_none_or(Instances::can_serve) {
            return Ok(());
        }
        let mut error = not_at_ready_state(&self.model.name, self.model.version);
        if let Some(reason) =
            self.instances().and_then(|instances| instances.failure_reasons().into_iter().next())
        {
            error.message = format!("{}: {reason}", error.message);
        }
        Err(error)
    }

    /// Counts a request that the version cannot take now, and returns the error.
    pub(crate) fn refuse(&self, error: InferError) -> InferError {
        record::inference_refused(&self.series, error.reason);
        error
    }

    /// Counts a request and checks it.
    ///
    /// # Errors
    /// The tenant of the request has used its budget of tokens, or the request does not fit the
    /// model.
    pub(crate) fn admit(&self, request: &mut InferRequest) -> Result<Admitted, InferError> {
        record::inference_requested(&self.series);
        self.check_token_budget(request.tenant)?;
        let checked = self.config.check(request)?;
        let outputs = request.outputs.iter().filter(|output| output.classification > 0);
        let classified =
            outputs.map(|output| (output.name.clone(), output.classification)).collect();
        Ok(Admitted { checked, classified })
    }

    /// Checks the budget of a tenant if the tokens of the model are counted.
    ///
    /// # Errors
    /// The budget is used up.
    fn check_token_budget(&self, tenant: TenantId) -> Result<(), InferError> {
        if !record::has_token_budget(&self.series, tenant) || !counts_tokens(&self.config) {
            return Ok(());
        }
        let Some(budget) = record::used_up_budget(&self.series, tenant, clock::now()) else {
            return Ok(());
        };
        let retry_after_s = budget.until_accepted.as_nanos().div_ceil(1_000_000_000);
        let retry_after_s = u64::try_from(retry_after_s).unwrap_or(u64::MAX);
        let text = format!(
            "the budget of {} tokens per minute of the client is used up; requests are accepted \
             again in {retry_after_s} s",
            budget.limit
        );
        Err(InferError::new(ErrorCode::ResourceExhausted, Reason::RateLimited, text)
            .with_cause(Cause::RateLimited { retry_after_s }))
    }

    /// Replaces outputs by their largest elements, on a blocking thread if one of them is large.
    ///
    /// # Errors
    /// The elements have no order, or are too many.
    pub(crate) fn classified(
        self: Arc<Self>,
        mut response: InferResponse,
        classified: Vec<(String, u64)>,
    ) -> BoxFuture<Result<InferResponse, InferError>> {
        let long = response.outputs.iter().any(|output| {
            output.tensor.data.len() > LONG_CLASSIFICATION
                && classified.iter().any(|(name, _)| *name == output.name)
        });
        let work = move || {
            for (name, count) in &classified {
                let labels = self.labels.get(name).map_or(&[][..], Vec::as_slice);
                for output in response.outputs.iter_mut().filter(|output| output.name == *name) {
                    output.tensor = classification::classify(
                        &output.tensor,
                        *count,
                        labels,
                        self.config.batches(),
                    )?;
                }
            }
            Ok(response)
        };
        Box::pin(async move {
            if !long {
                return work();
            }
            let done = blocking::run(work).await;
            done.unwrap_or_else(|error| {
                Err(InferError::internal(format!("the classification failed: {error}")))
            })
        })
    }
}
