//! Chooses the program of a version's worker, and lets the model's code complete its configuration. Both may take long, so they
//! run while the version is loaded.

use std::sync::Arc;
use std::time::Duration;

use pharos::model::{CodeLocation, ModelConfig};
use pharos::supervisor::{self, Backoff, RestartPolicy};
use pharos_os::{blocking, clock};

use super::Loader;
use super::prepare::{CodeCompletion, Configuration, Prepared, Version};
use crate::launch::{self, Launch, Reading};
use crate::process;

/// The time limit of reading a part of a file. A load that waits holds one of the places for loads.
const READ_LIMIT: Duration = Duration::from_secs(30);

impl Loader {
    /// Returns the program for a version; may unpack an environment.
    ///
    /// # Errors
    /// The program is missing or cannot be used, or the file system of its environment does not answer.
    pub(super) async fn launch(&self, prepared: &Prepared, version: &Version) -> Result<Launch, String> {
        let (program, name) = (self.settings.program.clone(), prepared.name.clone());
        let (prepared, version, reading) = (prepared.clone(), version.clone(), Arc::new(Reading::default()));
        let watched = reading.clone();
        let choose = move || {
            let directories = (prepared.model_files.path(), version.directory.as_path());
            let model = prepared.configuration.launched(&prepared.name, directories, prepared.provenance);
            launch::choose(&program, &model, &watched)
        };
        let mut choosing = blocking::run(choose);
        loop {
            let call = reading.call();
            match clock::timeout(READ_LIMIT, &mut choosing).await {
                Some(chosen) => return chosen.unwrap_or_else(|error| Err(error.to_string())),
                // Its thread ends when the file system answers.
                None if call.is_some() && call == reading.call() => {
                    let seconds = READ_LIMIT.as_secs();
                    return Err(format!(
                        "model '{name}': its environment cannot be read: no answer within {seconds} s"
                    ));
                }
                None => {}
            }
        }
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
