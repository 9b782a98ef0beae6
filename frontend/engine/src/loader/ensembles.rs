//! Loads ensembles after their members, and checks that the members fit together.

use std::collections::BTreeMap;
use std::sync::Arc;

use pharos::ensemble::{self, Dependencies, Plan, Stages, Step};
use pharos::id::ModelVersion;
use pharos::metrics::record;
use pharos::model::ModelConfig;
use pharos::repository::{StateReason, VersionStatus};

use super::Loader;
use super::control::unavailable_version;
use super::prepare::{Prepared, Version};
use super::version::{Unserved, labels, log_warnings, read_cache};
use crate::cache::ModelResponseCache;
use crate::ensemble::{Ensemble, Members};
use crate::serving::{Executor, Serving, Snapshot};
use crate::store::LocalError;
use crate::store::identity::Files;
use crate::store::scan::LoadedFiles;
use pharos_os::{blocking, clock};

impl Loader {
    /// Loads a version of an ensemble; the loads of its members have ended, successfully or not.
    ///
    /// # Errors
    /// A member is missing or not ready, or the members do not fit together.
    pub(super) async fn load_ensemble(
        self: &Arc<Self>,
        prepared: &Prepared,
        version: &Version,
        plan: Plan,
        number: u64,
    ) -> Result<Serving, String> {
        let began = clock::now();
        let directory = &version.directory;
        let given = prepared.configuration.known().ok_or("code cannot complete an ensemble")?;
        let members = match self.members(&plan) {
            Ok(members) => members,
            Err(step) => return Err(self.unavailable(&given.name, step).await),
        };
        let configs: Vec<&ModelConfig> = members.iter().map(|member| &*member.config).collect();
        ensemble::check(given, &plan, &configs)?;
        let decoupled: Vec<bool> = configs.iter().map(|member| member.decoupled).collect();
        if given.response_cache {
            let nested = self.with_nested(&members);
            let nested_configs: Vec<&ModelConfig> =
                nested.iter().map(|member| &*member.config).collect();
            ensemble::check_cache(given, &nested_configs)?;
        }
        let stages = Stages::new(&given.name, &plan, &decoupled)?;
        let config =
            given.with_decoupled(stages.is_decoupled()).map_err(|error| error.to_string())?;
        let labels = inherited(&config, &plan, &members, labels(&config, directory)?);
        let model = ModelVersion::new(self.stores.model_name(&prepared.name), number);
        let loaded_files = self.loaded_files(prepared, version).await;
        let cache = self.ensemble_cache(&model, &config, loaded_files.as_deref(), &members).await;
        let series = Unserved::new(self, &model, &config, None).keep();
        if cache.is_some() {
            self.cache().model_cached(&series);
        }
        record::ensemble_loaded(
            self.cache(),
            &series,
            plan.steps().iter().map(|step| step.model.as_str()),
        );
        let seconds = (clock::now() - began).as_secs_f64();
        record::model_load_duration(&series, seconds);
        log_warnings(&model, &config);
        tracing::info!(%model, steps = plan.steps().len(), "ensemble ready in {seconds:.3} s");
        if config.decoupled {
            self.cache().model_decoupled(&series);
        }
        let ensemble = Ensemble::new(plan, stages, &config, cache);
        let executors = members.iter().map(|member| Arc::downgrade(&member.executor)).collect();
        Ok(Serving {
            model,
            config: Arc::new(config),
            series,
            directory: directory.clone(),
            loaded_files,
            labels,
            executor: Arc::new(Executor::Ensemble { ensemble, members: executors }),
            fingerprint: version.fingerprint,
            files: prepared.model_files.clone(),
        })
    }

    /// Returns the serving members in the order of the steps, or the first step whose model does
    /// not serve.
    fn members<'a>(&self, plan: &'a Plan) -> Result<Vec<Arc<Serving>>, &'a Step> {
        plan.steps().iter().map(|step| self.models.member(step).map_err(|_| step)).collect()
    }

    /// Returns why the model of a step cannot be used. The table forgets some models that could not
    /// be prepared; their files are read again for the reason.
    async fn unavailable(self: &Arc<Self>, ensemble: &str, step: &Step) -> String {
        let (text, known) =
            unavailable(&self.models.snapshot(), ensemble, &step.model, step.version);
        if known {
            return text;
        }
        let loader = self.clone();
        let member = step.model.clone();
        let prepared = blocking::run(move || {
            let overrides = loader.models.snapshot().overrides.get(&member).cloned();
            loader.prepare(&member, overrides.as_deref()).map(drop)
        });
        match prepared.await {
            Ok(Err(error)) => format!("{text}: {}", error.reason()),
            _ => text,
        }
    }

    /// Checks what is known of an ensemble before anything is loaded.
    ///
    /// # Errors
    /// A member is unknown, or ensembles depend on each other.
    pub(super) async fn check_dependencies(self: &Arc<Self>, ensemble: &str) -> Result<(), String> {
        let mut unknown = Vec::new();
        {
            let table = self.models.snapshot();
            for member in table.dependencies.members(ensemble) {
                if table.states.model(member).is_none() {
                    unknown.push(member.to_owned());
                }
            }
            if unknown.is_empty() {
                return circular(&table.dependencies, ensemble).map_or(Ok(()), Err);
            }
        }
        let stores = self.stores.clone();
        let missing = blocking::run(move || {
            let mut missing = Vec::new();
            for member in unknown {
                missing.push((stores.local(&member).err().map(LocalError::into_text), member));
            }
            missing
        });
        Err(not_available(ensemble, &missing.await.map_err(|error| error.to_string())?))
    }

    /// Returns the response cache of an ensemble, if the server has one and the configuration
    /// enables it. Its keys depend on the files of all members. `None` if files have changed that
    /// their member has not loaded yet.
    async fn ensemble_cache(
        &self,
        model: &ModelVersion,
        config: &ModelConfig,
        loaded: Option<&LoadedFiles>,
        members: &[Arc<Serving>],
    ) -> Option<ModelResponseCache> {
        let shared = self.responses_for(model, config)?;
        let nested = self.with_nested(members);
        let mut all = vec![Files::new(model, config, loaded?)];
        for member in &nested {
            all.push(Files::new(&member.model, &member.config, member.loaded_files.as_deref()?));
        }
        let cache = read_cache(shared, all).await?;
        // The files were read now, and the members have read theirs earlier.
        let Some(changed) = blocking::run(move || changed(&nested)).await.ok()? else {
            return Some(cache);
        };
        tracing::warn!(
            %model,
            "response cache disabled for the model: files of its member '{changed}' have changed since their load; load the \
             member again"
        );
        None
    }

    /// Returns the members, each followed by its own members if it is an ensemble.
    fn with_nested(&self, members: &[Arc<Serving>]) -> Vec<Arc<Serving>> {
        let mut all = Vec::new();
        for member in members {
            all.push(member.clone());
            if let Some(ensemble) = member.ensemble() {
                let steps = ensemble.plan().steps().iter();
                let own: Vec<_> = steps.filter_map(|step| self.models.member(step).ok()).collect();
                all.extend(self.with_nested(&own));
            }
        }
        all
    }
}

/// Returns the first member whose files have changed since it loaded them.
fn changed(members: &[Arc<Serving>]) -> Option<ModelVersion> {
    let mut loaded = members.iter().filter(|member| member.ensemble().is_none());
    let changed =
        loaded.find(|member| member.loaded_files.as_ref().is_none_or(|files| files.have_changed()));
    changed.map(|member| member.model.clone())
}

/// Returns that members are not available, in Triton's words, and why.
fn not_available(ensemble: &str, missing: &[(Option<String>, String)]) -> String {
    let members: Vec<&str> = missing.iter().map(|(_, member)| member.as_str()).collect();
    let names = members.join(", ");
    let text =
        format!("ensemble {ensemble} contains models that are not available or ambiguous: {names}");
    let reasons: Vec<String> = match missing {
        [(reason, _)] => reason.iter().cloned().collect(),
        _ => missing
            .iter()
            .filter_map(|(why, member)| Some(format!("{member}: {}", why.as_ref()?)))
            .collect(),
    };
    if reasons.is_empty() { text } else { format!("{text}: {}", reasons.join("; ")) }
}

/// Returns the circular dependency of an ensemble, if it has one.
fn circular(dependencies: &Dependencies, ensemble: &str) -> Option<String> {
    let cycle = dependencies.cycle(ensemble)?;
    let [.., last, first] = cycle.as_slice() else { return None };
    let whole = if cycle.len() > 3 { format!(": {}", cycle.join(" -> ")) } else { String::new() };
    Some(format!(
        "circular dependency between ensembles: {first} -> ... -> {last} -> {first}{whole}"
    ))
}

/// Returns that a member cannot be used, and whether the text contains the reason. Triton has
/// different texts for ensembles and for loaded models; other reasons follow its text.
fn unavailable(
    table: &Snapshot,
    ensemble: &str,
    member: &str,
    version: Option<u64>,
) -> (String, bool) {
    let depends = format!("ensemble '{ensemble}' depends on '{member}'");
    let status = match table.states.model(member) {
        None => return (not_available(ensemble, &[(None, member.to_owned())]), false),
        Some(status) => match &status.failure {
            ambiguous @ (StateReason::Duplicate | StateReason::Ambiguous(_)) => {
                return (
                    not_available(ensemble, &[(Some(ambiguous.to_string()), member.to_owned())]),
                    true,
                );
            }
            _ => status,
        },
    };
    let shown = version.or_else(|| status.versions.keys().next_back().copied());
    let of_version = shown.and_then(|version| Some((version, status.versions.get(&version)?)));
    let is_ensemble = table.dependencies.members(member).next().is_some();
    let failure = match of_version {
        Some((_, version)) if is_ensemble && !status.failure.is_some() => &version.reason,
        _ => &status.failure,
    };
    if failure.is_some() {
        return (
            format!("{depends} which is not valid. Model '{member}' failed with error: {failure}"),
            true,
        );
    }
    let what = match version {
        Some(version) => format!("whose required version {version} is not loaded"),
        None => "which has no loaded version".to_owned(),
    };
    match of_version {
        Some((version, VersionStatus { reason, .. })) if reason.is_some() => {
            let error =
                format!("loading failed with error: {}{reason}", unavailable_version(version));
            (format!("{depends} {what}. Model '{member}' {error}"), true)
        }
        Some((version, VersionStatus { state, .. })) => {
            (format!("{depends} {what}: version {version} is at {} state", state.as_str()), true)
        }
        None if status.versions.is_empty() => (format!("{depends} {what}"), false),
        None => {
            let known: Vec<String> = status.versions.keys().map(u64::to_string).collect();
            (format!("{depends} {what}: known versions: {}", known.join(", ")), true)
        }
    }
}

/// Returns the class labels by output: the ensemble's own, or the labels of the member that
/// produces the output.
fn inherited(
    config: &ModelConfig,
    plan: &Plan,
    members: &[Arc<Serving>],
    mut labels: BTreeMap<String, Vec<String>>,
) -> BTreeMap<String, Vec<String>> {
    for (position, output) in config.outputs.iter().enumerate() {
        let Some((step, made)) = plan.origin(position) else { continue };
        let theirs = members.get(step).and_then(|member| member.labels.get(made));
        if let Some(theirs) = theirs {
            labels.entry(output.name.clone()).or_insert_with(|| theirs.clone());
        }
    }
    labels
}
