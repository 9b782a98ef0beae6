//! Reads the configuration from the file, the command line and the `TS_*` environment variables;
//! later sources override earlier ones. As in TorchServe, variables override the command line too:
//! `TS_DISABLE_TOKEN_AUTHORIZATION=false` keeps token authorization enabled even with
//! `--disable-token-auth`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::settings::{KEYS, Note};
use super::{properties, snapshot};
use crate::arguments::Arguments;

/// The merged configuration.
#[derive(Debug, Default)]
pub(super) struct Configuration {
    /// The keys and values.
    pub(super) properties: Vec<(String, String)>,
    /// Notes to log about the configuration.
    pub(super) notes: Vec<Note>,
}

/// A lookup of environment variables.
pub(super) type Variables<'a> = &'a dyn Fn(&str) -> Option<OsString>;

impl Configuration {
    /// # Errors
    /// A named file is missing or invalid, or an environment variable that it refers to is not set.
    pub(super) fn read(arguments: &Arguments, variables: Variables<'_>) -> Result<Self, String> {
        let mut found = Self::default();
        if let Some(file) = found.file(arguments, variables)? {
            let shown = file.display();
            let bytes =
                fs::read(&file).map_err(|error| format!("cannot read '{shown}': {error}"))?;
            // Java reads these files as Latin-1, but in practice most are UTF-8.
            let text = String::from_utf8(bytes)
                .unwrap_or_else(|error| error.as_bytes().iter().map(|b| *b as char).collect());
            found.properties =
                properties::parse(&text).map_err(|error| format!("'{shown}': {error}"))?;
            for (key, value) in &mut found.properties {
                *value = properties::expand(value, |name| {
                    Some(variables(name)?.to_string_lossy().into_owned())
                })
                .map_err(|error| format!("'{shown}', {key}: {error}"))?;
            }
            found.note(false, format!("read configuration from '{shown}'"));
        }
        found.take_arguments(arguments);
        found.take_variables(variables);
        Ok(found)
    }

    /// Returns the configuration file, if there is one.
    fn file(
        &mut self,
        arguments: &Arguments,
        variables: Variables<'_>,
    ) -> Result<Option<PathBuf>, String> {
        let named = variables("TS_CONFIG_FILE").filter(|file| !file.is_empty()).map(PathBuf::from);
        if let Some(file) = named.or_else(|| arguments.ts_config.clone()) {
            return if file.is_file() {
                Ok(Some(file))
            } else {
                Err(format!("--ts-config file not found: {}", file.display()))
            };
        }
        if !arguments.no_config_snapshots
            && let Some(newest) = snapshot::newest(&snapshot::directory(variables))
        {
            self.note(
                true,
                "using the newest snapshot as configuration; --ncs disables snapshots".to_owned(),
            );
            return Ok(Some(newest));
        }
        let usual = Path::new("config.properties");
        Ok(usual.is_file().then(|| usual.to_owned()))
    }

    fn note(&mut self, warning: bool, text: String) {
        self.notes.push(Note { warning, text });
    }

    fn set(&mut self, key: &str, value: String) {
        self.properties.retain(|(known, _)| known != key);
        self.properties.push((key.to_owned(), value));
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.properties.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
    }

    /// Applies environment variables if the file enables them; `TS_OPEN_INFERENCE_PROTOCOL` always
    /// applies.
    fn take_variables(&mut self, variables: Variables<'_>) {
        if self
            .get("enable_envvars_config")
            .is_some_and(|value| value.trim().eq_ignore_ascii_case("true"))
        {
            for key in KEYS.iter().filter(|key| key.variable) {
                let name = variable(key.name);
                let Some(value) =
                    variables(&name).map(|value| value.to_string_lossy().into_owned())
                else {
                    continue;
                };
                if self.get(key.name).is_some_and(|before| before != value) {
                    self.note(
                        false,
                        format!("{name} overrides {} of the command line or the file", key.name),
                    );
                }
                self.set(key.name, value);
            }
        }
        if variables("TS_OPEN_INFERENCE_PROTOCOL").is_some_and(|value| value == "oip") {
            self.set("ts_open_inference_protocol", "true".to_owned());
        }
    }

    fn take_arguments(&mut self, arguments: &Arguments) {
        if let Some(store) = &arguments.model_store {
            self.set("model_store", store.to_string_lossy().into_owned());
        }
        if !arguments.models.is_empty() {
            if self.get("model_snapshot").is_some() {
                self.note(
                    true,
                    "--models has no effect: model_snapshot determines the registered models"
                        .to_owned(),
                );
            }
            self.set("load_models", arguments.models.join(","));
        }
        if arguments.disable_token_auth {
            self.set("disable_token_authorization", "true".to_owned());
        }
        if arguments.enable_model_api {
            self.set("enable_model_api", "true".to_owned());
        }
        for (given, flag, why) in [
            (arguments.workflow_store.is_some(), "--workflow-store", "workflows are not supported"),
            (
                arguments.log_config.is_some(),
                "--log-config",
                "log4j layouts are not read; use --log-format and --tslog-format after '--'",
            ),
            (
                arguments.cpp_log_config.is_some(),
                "--cpp-log-config",
                "C++ handlers are not supported",
            ),
            (arguments.plugins_path.is_some(), "--plugins-path", "Java plugins are not supported"),
        ] {
            if given {
                self.note(false, format!("{flag} has no effect: {why}"));
            }
        }
    }
}

/// Returns the environment variable of a key.
fn variable(key: &str) -> String {
    let upper = key.to_ascii_uppercase();
    if upper.starts_with("TS_") { upper } else { format!("TS_{upper}") }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn variables_override_the_command_line_which_overrides_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.properties");
        fs::write(
            &file,
            "enable_envvars_config=true\njob_queue_size=1\nmodel_store=$$HERE$$/store\n\
             metric_time_interval=7\n",
        )
        .unwrap();
        let variables = |name: &str| match name {
            "HERE" => Some(OsString::from("/there")),
            "TS_JOB_QUEUE_SIZE" => Some("2".into()),
            "TS_METRIC_TIME_INTERVAL" => Some("8".into()),
            "TS_OPEN_INFERENCE_PROTOCOL" => Some("oip".into()),
            _ => None,
        };
        let mut arguments = Arguments { ts_config: Some(file.clone()), ..Arguments::default() };
        let read = Configuration::read(&arguments, &variables).unwrap();
        assert_eq!(read.get("job_queue_size"), Some("2"));
        assert_eq!(read.get("model_store"), Some("/there/store"));
        assert_eq!(read.get("metric_time_interval"), Some("7"), "the key has no variable");
        assert_eq!(read.get("ts_open_inference_protocol"), Some("true"));
        arguments.model_store = Some("/mine".into());
        arguments.models = vec!["a=a.mar".to_owned(), "b.mar".to_owned()];
        let read = Configuration::read(&arguments, &variables).unwrap();
        assert_eq!(
            (read.get("model_store"), read.get("load_models")),
            (Some("/mine"), Some("a=a.mar,b.mar"))
        );
        arguments.disable_token_auth = true;
        arguments.enable_model_api = true;
        let strict = |name: &str| match name {
            "TS_DISABLE_TOKEN_AUTHORIZATION" | "TS_ENABLE_MODEL_API" => {
                Some(OsString::from("false"))
            }
            "TS_MODEL_STORE" => Some("/variable".into()),
            "HERE" => Some("/there".into()),
            _ => None,
        };
        let read = Configuration::read(&arguments, &strict).unwrap();
        let keys = ["disable_token_authorization", "enable_model_api", "model_store"];
        assert_eq!(
            keys.map(|key| read.get(key)),
            [Some("false"), Some("false"), Some("/variable")]
        );
        fs::write(&file, "job_queue_size=1\n").unwrap();
        assert_eq!(
            Configuration::read(&arguments, &variables).unwrap().get("job_queue_size"),
            Some("1")
        );
        fs::write(&file, "inference_address=http://$$NOWHERE$$\n").unwrap();
        let error = Configuration::read(&arguments, &variables).unwrap_err();
        assert!(
            error.ends_with("inference_address: Invalid Environment Variable NOWHERE"),
            "{error}"
        );
        folder.close().unwrap();
        let error = Configuration::read(&arguments, &variables).unwrap_err();
        assert_eq!(error, format!("--ts-config file not found: {}", file.display()));
    }

    #[test]
    fn without_a_file_the_newest_snapshot_is_the_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("config");
        fs::create_dir_all(&config).unwrap();
        for (name, size) in [
            ("20260102030405006-startup.cfg", 1),
            ("20260102030405007-shutdown.cfg", 2),
            ("x.cfg", 3),
        ] {
            fs::write(config.join(name), format!("job_queue_size={size}\n")).unwrap();
        }
        let variables =
            |name: &str| (name == "LOG_LOCATION").then(|| folder.path().as_os_str().to_owned());
        let mut arguments = Arguments::default();
        let read = Configuration::read(&arguments, &variables).unwrap();
        assert_eq!(read.get("job_queue_size"), Some("2"));
        arguments.no_config_snapshots = true;
        assert_eq!(
            Configuration::read(&arguments, &variables).unwrap().get("job_queue_size"),
            None
        );
    }
}
