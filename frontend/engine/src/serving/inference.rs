//! The inference verb: checks a request, executes it on the instances of its model or as an
//! ensemble, and classifies outputs.

use std::sync::Arc;

use pharos::ensemble::Step;
use pharos::error::InferError;
use pharos::id::{CorrelationId, ModelVersion};
use pharos::infer::InferRequest;
use pharos::metrics::cache::Cache;
use pharos::metrics::series::ModelSeries;
use pharos::model::ModelConfig;

use super::version::{Admitted, Executor, Serving};
use super::{ModelTable, ServedResponses};
use crate::ensemble::{self, Ensemble, Member, Members, Target};
use crate::scheduler::InferResult;

impl ModelTable {
    /// Executes and records a request to a ready model that [`Serving::admit`] has checked.
    /// Dropping the future cancels the request.
    ///
    /// # Errors
    /// The queue refuses the request, or the backend fails.
    pub(crate) async fn execute(
        self: &Arc<Self>,
        serving: &Arc<Serving>,
        request: Box<InferRequest>,
        admitted: Admitted,
    ) -> InferResult {
        let Admitted { checked, classified } = admitted;
        let response = match &*serving.executor {
            Executor::Instances { driver, .. } => driver.infer(request, checked).await?,
            Executor::Ensemble { ensemble, .. } => {
                let target = Target { members: self, version: serving, ensemble };
                ensemble::infer(target, *request, checked).await?
            }
        };
        match classified.is_empty() {
            true => Ok(response),
            false => serving.clone().classified(response, classified).await,
        }
    }

    /// Starts a request of a decoupled model that [`Serving::admit`] has checked. The request is
    /// queued on return.
    pub(crate) fn stream(
        self: &Arc<Self>,
        serving: &Arc<Serving>,
        request: InferRequest,
        admitted: Admitted,
    ) -> ServedResponses {
        let Admitted { checked, classified } = admitted;
        match &*serving.executor {
            Executor::Instances { driver, .. } => {
                ServedResponses::of_instances(serving, driver.stream(request, checked), classified)
            }
            Executor::Ensemble { ensemble, .. } => {
                let target = Target { members: self, version: serving, ensemble };
                let responses = ensemble::EnsembleResponses::begin(&target, request, checked);
                ServedResponses::of_ensemble(serving, responses, classified)
            }
        }
    }
}

impl Member for Serving {
    fn model(&self) -> &ModelVersion {
        &self.model
    }

    fn config(&self) -> &Arc<ModelConfig> {
        &self.config
    }

    fn series(&self) -> &Arc<ModelSeries> {
        &self.series
    }

    fn ensemble(&self) -> Option<&Ensemble> {
        self.executor.ensemble()
    }

    fn accept(&self) -> Result<(), InferError> {
        Self::accept(self)
    }
}

impl Members for ModelTable {
    type Member = Serving;
    type Responses = ServedResponses;

    fn metrics(&self) -> &Cache {
        &self.shared.metrics
    }

    fn member(&self, step: &Step) -> Result<Arc<Serving>, InferError> {
        self.serving(&step.model, &requested_version(step))
    }

    fn with_sequence(&self, step: &Step, id: &CorrelationId) -> Option<Arc<Serving>> {
        self.snapshot().with_sequence(&step.model, &requested_version(step), id)
    }

    fn begin_sequence(&self, step: &Step, id: &CorrelationId) {
        self.snapshot().begin_sequence(&step.model, &requested_version(step), id);
    }

    fn has_replaced_members(&self, version: &Serving) -> bool {
        if version.driver().is_some_and(|driver| !driver.may_cache()) {
            return true;
        }
        let steps = version.ensemble().map_or(&[][..], |ensemble| ensemble.plan().steps());
        self.has_other_members(version)
            || steps.iter().any(|step| {
                self.member(step).is_ok_and(|member| self.has_replaced_members(&member))
            })
    }

    async fn infer(
        self: &Arc<Self>,
        member: &Arc<Serving>,
        mut request: Box<InferRequest>,
    ) -> InferResult {
        let admitted = member.admit(&mut request)?;
        self.execute(member, request, admitted).await
    }

    fn stream(
        self: &Arc<Self>,
        member: &Arc<Serving>,
        mut request: InferRequest,
    ) -> Result<ServedResponses, InferError> {
        let admitted = member.admit(&mut request)?;
        Ok(Self::stream(self, member, request, admitted))
    }
}

/// The version that a step requests; empty for the latest.
fn requested_version(step: &Step) -> String {
    step.version.map(|version| version.to_string()).unwrap_or_default()
}
