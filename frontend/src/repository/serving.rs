//! A version of a model that serves, and how it answers a request: by instances of its own, or as an ensemble of others.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use pharos::classification;
use pharos::error::InferError;
use pharos::id::ModelVersion;
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use pharos::model::{Checked, ModelConfig};
use pharos::repository::{Made, not_at_ready_state};

use super::ensemble::{self, Ensemble};
use super::source::Local;
use super::{Repository, Responses};
use crate::scheduler::{Answer, Driver};
use crate::supervisor::Instances;
use crate::wire::{self, SharedLink};

/// A version of a model that serves.
#[derive(Clone)]
pub(crate) struct Serving {
    pub(crate) model: ModelVersion,
    pub(crate) config: Arc<ModelConfig>,
    pub(crate) series: Arc<ModelSeries>,
    /// Where its files are.
    pub(crate) directory: PathBuf,
    /// The names of the classes of outputs that have a label file, or inherit one.
    pub(crate) labels: BTreeMap<String, Vec<String>>,
    /// Held by every request in flight: what is replaced ends when nobody holds it any more.
    pub(crate) executor: Arc<Executor>,
    /// What it is made of.
    pub(super) made: Made,
    /// Its files, as long as they are needed.
    pub(super) local: Arc<Local>,
}

/// What answers requests.
pub(crate) enum Executor {
    /// Workers.
    Instances { driver: Arc<Driver>, instances: Instances },
    /// Other models.
    Ensemble(Ensemble),
}

impl Executor {
    /// Its driver; an ensemble has none.
    pub(super) fn driver(&self) -> Option<&Arc<Driver>> {
        match self {
            Self::Instances { driver, .. } => Some(driver),
            Self::Ensemble(_) => None,
        }
    }

    /// What it is as an ensemble.
    pub(super) fn ensemble(&self) -> Option<&Ensemble> {
        match self {
            Self::Instances { .. } => None,
            Self::Ensemble(ensemble) => Some(ensemble),
        }
    }

    /// Its instances; an ensemble has none.
    pub(super) fn instances(&self) -> Option<&Instances> {
        match self {
            Self::Instances { instances, .. } => Some(instances),
            Self::Ensemble(_) => None,
        }
    }

    /// Requests that have been accepted and not been answered.
    pub(super) fn unanswered(&self) -> usize {
        match self {
            Self::Instances { driver, .. } => driver.unanswered(),
            Self::Ensemble(ensemble) => ensemble.in_flight(),
        }
    }

    /// Sequences that have begun and not ended.
    pub(super) fn running_sequences(&self) -> usize {
        self.driver().map_or(0, |driver| driver.running_sequences())
    }

    /// Ends the workers and waits until their processes are gone.
    pub(super) async fn stop(&self) {
        if let Self::Instances { instances, .. } = self {
            instances.stop().await;
        }
    }

    /// Kills the workers.
    pub(super) fn kill(&self) {
        if let Self::Instances { instances, .. } = self {
            instances.kill();
        }
    }
}

impl Serving {
    /// Its driver; an ensemble has none.
    pub(crate) fn driver(&self) -> Option<&Arc<Driver>> {
        self.executor.driver()
    }

    /// Its instances; an ensemble has none.
    pub(crate) fn instances(&self) -> Option<&Instances> {
        self.executor.instances()
    }

    /// What it is as an ensemble.
    pub(crate) fn ensemble(&self) -> Option<&Ensemble> {
        self.executor.ensemble()
    }

    /// Whether a request is worth accepting.
    ///
    /// # Errors
    /// None of its instances is worth waiting for. An ensemble says so of its members, when a request is there.
    pub(crate) fn check_ready(&self) -> Result<(), InferError> {
        match self.instances().is_none_or(Instances::can_serve) {
            true => Ok(()),
            false => {
                let mut error = not_at_ready_state(&self.model.name, self.model.version);
                if let Some(trouble) = self.instances().and_then(|instances| instances.troubles().into_iter().next()) {
                    error.message = format!("{}: {trouble}", error.message);
                }
                Err(error)
            }
        }
    }

    /// Counts that a request came, and checks it; gives the outputs too of which the client wants the largest elements, and how
    /// many of them.
    ///
    /// # Errors
    /// It does not fit the model.
    pub(crate) fn admit(&self, request: &mut InferRequest) -> Result<(Checked, Vec<(String, u64)>), InferError> {
        record::inference_requested(&self.series);
        let checked = self.config.check(request)?;
        let outputs = request.outputs.iter().filter(|output| output.classification > 0);
        Ok((checked, outputs.map(|output| (output.name.clone(), output.classification)).collect()))
    }

    /// Puts the `count` largest elements of an output in its place.
    ///
    /// # Errors
    /// Its elements have no order, or are too many.
    pub(crate) fn classify(&self, response: &mut InferResponse, name: &str, count: u64) -> Result<(), InferError> {
        let labels = self.labels.get(name).map_or(&[][..], Vec::as_slice);
        for output in response.outputs.iter_mut().filter(|output| output.name == name) {
            output.tensor = classification::classify(&output.tensor, count, labels, self.config.batches())?;
        }
        Ok(())
    }
}

impl Repository {
    /// Checks a request to a model that is ready, executes it and records it. Dropping the future cancels the request.
    ///
    /// # Errors
    /// The request's, or its backend's, or the queue's.
    pub(crate) async fn infer(self: &Arc<Self>, serving: &Arc<Serving>, mut request: InferRequest) -> Answer {
        let admitted = serving.admit(&mut request)?;
        self.execute(serving, request, admitted).await
    }

    /// Executes a request that [`Serving::admit`] has let in.
    ///
    /// # Errors
    /// As [`Repository::infer`].
    pub(crate) async fn execute(
        self: &Arc<Self>,
        serving: &Arc<Serving>,
        request: InferRequest,
        (checked, classified): (Checked, Vec<(String, u64)>),
    ) -> Answer {
        let mut response = match &*serving.executor {
            Executor::Instances { driver, .. } => driver.infer(request, checked).await?,
            Executor::Ensemble(ensemble) => self.infer_ensemble((serving, ensemble), request, checked).await?,
        };
        for (name, count) in classified {
            serving.classify(&mut response, &name, count)?;
        }
        Ok(response)
    }

    /// Executes a request of a decoupled model that [`Serving::admit`] has let in: it is on its way when this returns.
    pub(crate) fn stream(
        self: &Arc<Self>,
        serving: &Arc<Serving>,
        request: InferRequest,
        (checked, classified): (Checked, Vec<(String, u64)>),
    ) -> Responses {
        match &*serving.executor {
            Executor::Instances { driver, .. } => {
                Responses::of_instances(serving, driver.stream(request, checked), classified)
            }
            Executor::Ensemble(of) => {
                let responses = ensemble::Responses::begin(self, (serving, of), request, checked);
                Responses::of_ensemble(serving, responses, classified)
            }
        }
    }

    /// Whether a version can answer now and its model, or those of an ensemble's members, do not say otherwise.
    pub(crate) async fn says_ready(&self, name: &str, version: &str) -> bool {
        let mut links = Vec::new();
        let ready = self.serving(name, version).is_ok_and(|serving| {
            self.collect_links(&serving, &mut links);
            self.is_ready(&serving)
        });
        ready && wire::all_say_ready(&links).await
    }

    /// Why a version cannot answer now, as far as its instances, or those of an ensemble's members, tell.
    pub(crate) fn why_not_ready(&self, name: &str, version: &str) -> Option<String> {
        let serving = self.serving(name, version).ok()?;
        let mut troubles = Vec::new();
        self.collect_troubles(&serving, &mut troubles);
        (!troubles.is_empty()).then(|| troubles.join("; "))
    }

    fn collect_troubles(&self, serving: &Serving, troubles: &mut Vec<String>) {
        match &*serving.executor {
            Executor::Instances { instances, .. } if instances.ready() > 0 => {}
            Executor::Instances { instances, .. } => {
                for trouble in instances.troubles() {
                    if !troubles.contains(&trouble) {
                        troubles.push(trouble);
                    }
                }
            }
            Executor::Ensemble(ensemble) => {
                let members = ensemble.plan().steps().iter().filter_map(|step| self.member(step).ok());
                members.for_each(|member| self.collect_troubles(&member, troubles));
            }
        }
    }

    fn collect_links(&self, serving: &Serving, links: &mut Vec<SharedLink>) {
        match &*serving.executor {
            Executor::Instances { instances, .. } => links.extend(instances.links()),
            Executor::Ensemble(ensemble) => {
                let members = ensemble.plan().steps().iter().filter_map(|step| self.member(step).ok());
                members.for_each(|member| self.collect_links(&member, links));
            }
        }
    }

    /// Whether a version can answer now: an instance is ready, or all members of an ensemble are.
    pub(crate) fn is_ready(&self, serving: &Serving) -> bool {
        match &*serving.executor {
            Executor::Instances { instances, .. } => instances.ready() > 0,
            Executor::Ensemble(ensemble) => {
                let steps = ensemble.plan().steps().iter();
                let mut members = steps.map(|step| self.member(step));
                members.all(|member| member.is_ok_and(|member| self.is_ready(&member)))
            }
        }
    }
}
