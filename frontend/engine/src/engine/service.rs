//! Implements `pharos::service::Service` for the engine.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::id::{CorrelationId, TenantId};
use pharos::infer::{InferRequest, InferResponse};
use pharos::load_report::LoadReport;
use pharos::metrics::cache::{Cache, TokenBudget};
use pharos::metrics::catalog::TenantSource;
use pharos::metrics::exposition::{self, Encoding, Names};
use pharos::metrics::labels::Outcome;
use pharos::metrics::record;
use pharos::metrics::statistics::{self, ModelStatistics};
use pharos::model::{ModelConfig, ModelMetadata, envelope};
use pharos::region::Kind;
use pharos::repository::{IndexEntry, Override, parse_version};
use pharos::request_trace::Traced;
use pharos::service::{
    self, Endpoint, GpuUsage, LogSettings, LogUpdate, Management, Naming, OpenStream, Protocol,
    Route, Service, SharedManagement, TraceSettings, WorkerHealth, WorkerStatus,
};
use pharos::shared_memory::Status;
use pharos::timeline::Instant;
use pharos::trace::settings::Update;

use super::responses::Exchange;
use super::{ClientResponses, Engine, OpenStreamCount, Phase, check_text, uploads};
use crate::loader::inner_file;
use crate::serving::Refusal;
use crate::store::scan;
use crate::supervisor::InstanceStatus;
use pharos_os::{blocking, clock};
use pharos_telemetry::log;
use pharos_telemetry::system::process_of;

#[async_trait]
impl Service for Engine {
    fn live(&self) -> bool {
        !self.exiting()
    }

    fn ready(&self) -> bool {
        self.phase() == Phase::Serving
            && (!self.inner.settings.strict_readiness || self.inner.loader.models().all_ready())
    }

    fn exiting(&self) -> bool {
        self.phase() == Phase::Exiting
    }

    fn leaving(&self) -> bool {
        matches!(self.phase(), Phase::Leaving | Phase::Exiting)
    }

    fn server_name(&self) -> &str {
        &self.inner.settings.name
    }

    fn now(&self) -> Instant {
        clock::now()
    }

    async fn model_ready(&self, model: &str, version: &str) -> Result<bool, InferError> {
        self.check_open()?;
        let Ok((model, version)) = self.in_repository(model, version) else { return Ok(false) };
        if !version.is_empty() {
            // Refuse a malformed version even if the model is unknown, as Triton does.
            parse_version(version)?;
        }
        Ok(self.inner.loader.models().check_ready(&model, version).await)
    }

    fn why_not_ready(&self, model: &str, version: &str) -> Option<String> {
        let (model, version) = self.in_repository(model, version).ok()?;
        self.inner.loader.models().why_not_ready(&model, version)
    }

    async fn demand(&self, model: &str, version: &str, timeout_us: u64) -> Result<(), InferError> {
        if self.check_open().is_err() {
            // Nothing is loaded any more. The request itself is refused, unless it continues a
            // sequence.
            return Ok(());
        }
        let (model, version) = self.in_repository(model, version)?;
        let limit = (timeout_us > 0).then(|| Duration::from_micros(timeout_us));
        if self.inner.loader.demand(&model, version, limit).await?.is_some() {
            self.inner.loader.models().snapshot().record_waited(&model);
        }
        Ok(())
    }

    fn model_metadata(&self, model: &str, version: &str) -> Result<ModelMetadata, InferError> {
        let serving = match self.at_any_time(model, version) {
            Ok(serving) => serving,
            Err(error) => {
                let (config, number, all) = self.unloaded_config(model, version).ok_or(error)?;
                return Ok(config.metadata(&if version.is_empty() { all } else { vec![number] }));
            }
        };
        // A request for one version gets only that version, as in Triton.
        let versions = match version {
            "" if self.naming.is_none() => self.inner.loader.models().ready_versions(model),
            _ => vec![serving.model.version],
        };
        let metadata = serving.config.metadata(&versions);
        Ok(match (self.resolve(model, version)?, &self.naming) {
            (Some(resolved), Some(naming)) => {
                let versions = if version.is_empty() {
                    naming.versions(model)
                } else {
                    vec![resolved.version]
                };
                ModelMetadata { name: model.to_owned(), versions, ..metadata }
            }
            _ => metadata,
        })
    }

    fn model_config(&self, model: &str, version: &str) -> Result<Arc<ModelConfig>, InferError> {
        Ok(self.at_any_time(model, version)?.config.clone())
    }

    async fn model_file(
        &self,
        model: &str,
        version: &str,
        name: &str,
    ) -> Result<Option<Vec<u8>>, InferError> {
        let serving = self.at_any_time(model, version)?;
        let directory = serving.directory.clone();
        let mut places = vec![inner_file(&directory, name).map_err(InferError::invalid)?];
        // The directory of the model, which all versions share.
        if let Some(model) = directory.parent() {
            places.extend(inner_file(model, name));
        }
        let read = blocking::run(move || {
            for place in &places {
                match scan::read_model_file(place) {
                    Ok(bytes) => return Ok(Some(bytes)),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err((place.clone(), error)),
                }
            }
            Ok(None)
        });
        // The files stay while they are read.
        let result = read.await.map_err(|error| InferError::internal(error.to_string()))?;
        drop(serving);
        result.map_err(|(place, error)| {
            let file = place.display();
            InferError::internal(format!("cannot read the file '{file}' of '{model}': {error}"))
        })
    }

    fn model_config_json(&self, model: &str, version: &str) -> Result<String, InferError> {
        Ok(self.config(model, version)?.to_json())
    }

    fn model_config_proto(&self, model: &str, version: &str) -> Result<Vec<u8>, InferError> {
        Ok(self.config(model, version)?.encode())
    }

    async fn infer(
        &self,
        mut request: Box<InferRequest>,
        endpoint: Endpoint,
    ) -> Result<InferResponse, InferError> {
        let mut exchange = Exchange::begin(self, &mut request)?;
        let serving = match self.resolve_accepting_model(&request) {
            Ok(serving) => serving,
            Err(refusal) => Box::pin(self.load_for(&request, refusal)).await?,
        };
        exchange.found(self, &serving, &mut request)?;
        self.inner.shared_memory.attach(&mut request)?;
        // An envelope model may stream its response, but does not have to.
        if serving.config.decoupled && serving.config.backend != envelope::BACKEND {
            return Err(endpoint.refuse_decoupled());
        }
        check_text(&request)?;
        let admitted = serving.admit(&mut request)?;
        let models = self.inner.loader.models();
        let answer = match serving.config.decoupled {
            true => {
                let responses = ClientResponses::many(models.stream(&serving, *request, admitted));
                Box::pin(responses.only())
                    .await
                    .and_then(|only| only.ok_or_else(|| endpoint.refuse_decoupled()))
            }
            false => models.execute(&serving, request, admitted).await,
        };
        if exchange.is_plain() { answer } else { exchange.end(answer) }
    }

    fn stream(&self, mut request: InferRequest) -> Result<Box<dyn service::Responses>, InferError> {
        let mut exchange = Exchange::begin(self, &mut request)?;
        let serving = self.resolve_accepting_model(&request).map_err(Refusal::count)?;
        exchange.found(self, &serving, &mut request)?;
        self.inner.shared_memory.attach(&mut request)?;
        check_text(&request)?;
        let admitted = serving.admit(&mut request)?;
        let models = self.inner.loader.models().clone();
        let responses = match serving.config.decoupled {
            true => ClientResponses::many(models.stream(&serving, request, admitted)),
            false => ClientResponses::one(async move {
                models.execute(&serving, Box::new(request), admitted).await
            }),
        };
        Ok(Box::new(if exchange.is_plain() { responses } else { responses.seen_as(exchange) }))
    }

    fn stream_open(&self, protocol: Protocol) -> OpenStream {
        record::stream_open(&self.inner.cache, protocol, 1);
        Box::new(OpenStreamCount { engine: self.clone(), protocol })
    }

    fn record_answered(&self, protocol: Protocol, route: Route, code: u16, reason: Option<Reason>) {
        record::request_answered(&self.inner.cache, protocol, route, Outcome { code, reason });
    }

    fn load_report(&self, model: &str, version: &str) -> Arc<LoadReport> {
        let resolved = self.in_repository(model, version);
        self.latest_report(resolved.as_ref().map_or("", |(model, _)| model))
    }

    fn statistics(&self, model: &str, version: &str) -> Result<Vec<ModelStatistics>, InferError> {
        self.check_open()?;
        let unavailable = |text| InferError::new(ErrorCode::InvalidArg, Reason::UnknownModel, text);
        let all = self.inner.loader.models().all();
        if model.is_empty() {
            return Ok(statistics::of_all(
                &self.inner.cache,
                all.iter().map(|serving| &*serving.series),
            ));
        }
        let resolved = self.resolve(model, "")?;
        let version = if resolved.is_some() { "" } else { version };
        let model = resolved.as_ref().map_or(model, |resolved| &resolved.model);
        let called = self.inner.loader.models().full_name(model)?;
        let of_name: Vec<_> = all.iter().filter(|serving| *serving.model.name == *called).collect();
        if of_name.is_empty() {
            return Err(unavailable(format!("requested model '{model}' is not available")));
        }
        let wanted = match version {
            "" => None,
            _ => Some(parse_version(version)?),
        };
        let of_version = of_name
            .iter()
            .filter(|serving| wanted.is_none_or(|wanted| serving.model.version == wanted));
        let chosen =
            statistics::of_all(&self.inner.cache, of_version.map(|serving| &*serving.series));
        if chosen.is_empty() {
            return Err(unavailable(format!(
                "requested model version is not available for model '{model}'"
            )));
        }
        Ok(chosen)
    }

    fn scrape(&self, encoding: Encoding, names: &Names) -> Vec<u8> {
        self.observe();
        exposition::encode(&self.inner.cache, encoding, names)
    }

    async fn repository_index(&self, ready_only: bool) -> Result<Vec<IndexEntry>, InferError> {
        let engine = self.clone();
        let index = blocking::run(move || engine.inner.loader.index(ready_only)).await;
        index.map_err(|error| {
            InferError::internal(format!("cannot read the model repositories: {error}"))
        })
    }

    async fn load_model(
        &self,
        model: &str,
        parameters: Vec<(String, Bytes)>,
    ) -> Result<(), InferError> {
        self.check_open()?;
        let overrides = Override::new(parameters).map_err(|reason| {
            InferError::internal(format!(
                "failed to load '{model}', failed to poll from model repository: {reason}"
            ))
        })?;
        if !self.uploads.code {
            overrides.as_ref().map_or(Ok(()), |sent| uploads::check(model, sent))?;
        }
        self.inner.loader.load_model(model, overrides, self.uploads.scope()).await
    }

    async fn unload_model(&self, model: &str, dependents: bool) -> Result<(), InferError> {
        self.check_open()?;
        self.inner.loader.unload_model(model, dependents).await
    }

    fn check_model_control(&self) -> Result<(), InferError> {
        self.check_open()?;
        self.inner.loader.check_by_request()
    }

    fn registers_directories(&self) -> bool {
        self.inner.settings.loader.stores.registered.is_some()
    }

    fn check_registration(&self, model: &str, from: &str) -> Result<(), InferError> {
        self.uploads.check_registration(model, from)
    }

    fn register_directories(&self, models: &BTreeMap<String, PathBuf>) -> Result<(), String> {
        self.inner
            .settings
            .loader
            .stores
            .registered
            .as_ref()
            .map_or(Ok(()), |registered| registered.add(models))
    }

    fn unregister_directories(&self, models: &[String]) {
        if let Some(registered) = &self.inner.settings.loader.stores.registered {
            registered.remove(models);
        }
    }

    fn register_system_memory(
        &self,
        region: &str,
        key: &str,
        offset: u64,
        byte_size: u64,
    ) -> Result<(), InferError> {
        self.inner.shared_memory.register_system(region, key, offset, byte_size)
    }

    async fn register_cuda_memory(
        &self,
        region: &str,
        handle: &[u8],
        device: i64,
        byte_size: u64,
    ) -> Result<(), InferError> {
        self.inner.shared_memory.register_cuda(region, handle, device, byte_size).await
    }

    fn unregister_memory(&self, kind: Kind, region: Option<&str>) -> Result<(), InferError> {
        self.inner.shared_memory.unregister(kind, region)
    }

    fn memory_status(&self, kind: Kind, region: Option<&str>) -> Result<Vec<Status>, InferError> {
        self.inner.shared_memory.status(kind, region)
    }

    fn trace(&self, model: &str, header: &dyn Fn(&str) -> Option<String>) -> Option<Traced> {
        self.inner.traces.sample(model, header)
    }

    fn tenant<'r>(&self, given: &dyn Fn(&TenantSource) -> Option<&'r [u8]>) -> TenantId {
        let Some(source) = self.inner.cache.tenant_source() else { return TenantId::default() };
        let given = given(source).unwrap_or_default();
        match source {
            TenantSource::Header(_) | TenantSource::Certificate => self.inner.cache.tenant(given),
            TenantSource::Token => self.tenant_of_token(given),
        }
    }

    fn token_budget(&self, tenant: TenantId) -> Option<TokenBudget> {
        self.inner.cache.token_budget(tenant, clock::now())
    }

    fn trace_settings(&self, model: &str) -> Result<TraceSettings, InferError> {
        self.check_traceable(model)?;
        Ok(self.inner.traces.settings(model))
    }

    fn update_trace_settings(
        &self,
        model: &str,
        update: &Update,
    ) -> Result<TraceSettings, InferError> {
        self.check_traceable(model)?;
        self.inner.traces.update(model, update)
    }

    fn log_settings(&self) -> LogSettings {
        log::settings()
    }

    fn update_log_settings(&self, update: LogUpdate) -> LogSettings {
        log::update(update)
    }
}

impl Management for Engine {
    fn with_naming(&self, naming: Arc<dyn Naming>) -> SharedManagement {
        Arc::new(Self { naming: Some(naming), ..self.clone() })
    }

    fn workers(&self, model: &str) -> Vec<WorkerStatus> {
        let Ok(serving) = self.inner.loader.models().serving(model, "") else { return Vec::new() };
        let Some(instances) = serving.instances() else { return Vec::new() };
        let workers =
            instances.states().into_iter().map(|InstanceStatus { id, state, pid, gpu, .. }| {
                let process = pid.and_then(|pid| process_of(Path::new("/proc"), pid));
                let (resident_bytes, started) = process.unwrap_or_default();
                WorkerStatus { number: id.0, state, pid, resident_bytes, started, gpu }
            });
        workers.collect()
    }

    fn worker_health(&self, model: &str) -> Vec<WorkerHealth> {
        let Ok(serving) = self.inner.loader.models().serving(model, "") else { return Vec::new() };
        serving.instances().map(|instances| instances.health()).unwrap_or_default()
    }

    fn gpu_usage(&self, number: u32) -> Option<GpuUsage> {
        let reading = self
            .inner
            .latest
            .gpus
            .of(self.inner.loader.devices().bus_number(number)?, clock::now())?;
        Some(GpuUsage {
            utilization: reading.utilization,
            bandwidth: reading.bandwidth,
            memory_used: reading.memory.map(|memory| memory.used),
        })
    }

    fn waiting(&self, model: &str) -> u64 {
        let serving = self.inner.loader.models().serving(model, "");
        serving.map_or(0, |serving| u64::try_from(serving.series.waiting()).unwrap_or(0))
    }

    fn killed_since(&self, model: &str, since: Instant) -> bool {
        let serving = self.inner.loader.models().serving(model, "");
        serving
            .is_ok_and(|serving| serving.driver().is_some_and(|driver| driver.killed_since(since)))
    }

    fn end_sequence(&self, model: &str, id: &CorrelationId) {
        let Ok(serving) = self.inner.loader.models().serving(model, "") else { return };
        if let Some(driver) = serving.driver() {
            driver.end_sequence(id);
        }
    }

    fn record_refused(&self, model: &str, version: &str, serving: &str) {
        if let Ok(serving) = self.inner.loader.models().serving(serving, "") {
            record::inference_refused(&serving.series, Reason::QueueFull);
        }
        if let Some(named) = self.inner.cache.alias(model, version) {
            record::alias_requested(&self.inner.cache, &named);
        }
    }

    fn current_metrics(&self) -> Arc<Cache> {
        self.observe();
        self.inner.cache.clone()
    }
}
