//! Chooses the program of a version's worker, and lets the model's code complete its configuration. Both may take long, so they
//! run while the version is loaded.

use std::time::Duration;

use pharos::model::{CodeLocation, ModelConfig};
use pharos::supervisor::{self, Backoff, RestartPolicy};
use pharos_os::blocking;

use super::Loader;
use super::prepare::{CodeCompletion, Configuration, Prepared, Version};
use crate::launch::{self, Launch};
use crate::process;

impl Loader {
    /// Returns the program for a version; may unpack an environment.
    ///
    /// # Errors
    /// The program is missing or cannot be used.
    pub(super) async fn launch(&self, prepared: &Prepared, version: &Version) -> Result<Launch, String> {
        let (program, prepared, version) = (self.settings.program.clone(), prepared.clone(), version.clone());
        let choose = move || {
            let directories = (prepared.model_files.path(), version.directory.as_path());
            launch::choose(&program, &prepared.configuration.launched(&prepared.name, directories))
        };
        blocking::run(choose).await.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// Returns the configuration of a version.
    ///
    /// # Errors
    /// The model's code does not complete it to a valid configuration.
    pub(super) async fn configure(
        &self,
        prepared: &Prepared,
        (number, version): (u64, &Version),
        launch: &Launch,
    ) -> Result<ModelConfig, String> {
        match &prepared.configuration {
            Configuration::Known(config) => Ok((**config).clone()),
            Configuration::CompletedByCode(code) => {
                self.complete_by_code(prepared, (number, version), launch, code).await
            }
        }
    }

    async fn complete_by_code(
        &self,
        prepared: &Prepared,
        (number, version): (u64, &Version),
        launch: &Launch,
        completion: &CodeCompletion,
    ) -> Result<ModelConfig, String> {
        let (reader, code) = (completion.clone(), version.directory.clone());
        if !blocking::run(move || reader.may_answer(&code)).await.unwrap_or(true) {
            return completion.unanswered().map_err(|error| error.to_string());
        }
        let canonical = |path: &std::path::Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let (directory, above) = (canonical(&version.directory), canonical(prepared.model_files.path()));
        let (directory, model_directory) = (&directory.to_string_lossy(), &above.to_string_lossy());
        let location = CodeLocation { version: number, directory, model_directory };
        let question = process::Question {
            model: &prepared.name,
            text: completion.draft.query(&location, completion.gpus()),
            // Those of a model with one instance.
            threads: self.threads(&[], launch),
            limit: self.start_timeout(launch),
        };
        let answer = process::complete((launch, &self.fork_servers), question).await?;
        completion.merge_answer(&answer).map_err(|error| error.to_string())
    }

    /// Returns the time limits and restart policy of a model's workers.
    pub(super) fn supervision(&self, config: &ModelConfig, launch: &Launch) -> supervisor::Settings {
        let default = supervisor::Settings::default();
        let backoff = Backoff::Exponential { first: Duration::from_millis(100), max: self.settings.max_backoff };
        let settings = supervisor::Settings {
            start_timeout: self.start_timeout(launch),
            execution_timeout: self.settings.execution_timeout.unwrap_or(Duration::ZERO),
            restart: RestartPolicy { backoff, ..default.restart },
        };
        self.settings.model_policy.supervision(config, settings)
    }

    /// Returns the time limit of a worker for loading its model, and of the model's code for completing the configuration.
    pub(super) fn start_timeout(&self, launch: &Launch) -> Duration {
        let python = self.settings.python_start_timeout.filter(|_| launch.interpreter.is_some());
        python.unwrap_or(self.settings.start_timeout)
    }
}
