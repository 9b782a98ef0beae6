//! Converts properties to [`Settings`].

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use regex::Regex;

use super::address::{self, Ports};
use super::keys::{self, Effect};
use super::models::{self, LoadModels, ModelProperties};
use super::{Address, Age, Cors, Pip, Settings, TlsFiles, Token};

/// A note about a valid configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Whether this is a warning about a possible mistake.
    pub warning: bool,
    /// The message.
    pub text: String,
}

/// Reads properties and collects notes.
struct Reader<'a> {
    properties: &'a [(String, String)],
    notes: Vec<Note>,
}

impl Settings {
    /// Reads properties, in which variables are expanded and the environment and the command line
    /// are merged. `gpus` are the usable GPUs; `work_directory` is an existing private directory.
    ///
    /// # Errors
    /// A value is invalid; the text names the key, the value and what is allowed.
    pub fn new(
        properties: Vec<(String, String)>,
        mut gpus: Vec<u32>,
        work_directory: PathBuf,
    ) -> Result<(Self, Vec<Note>), String> {
        let mut read = Reader { properties: &properties, notes: Vec::new() };
        read.note_unused_keys();
        gpus.truncate(read.number("number_of_gpu", usize::MAX)?);
        let mut settings = read.settings(gpus, work_directory)?;
        let mut notes = read.notes;
        notes.sort_by_key(|noted| !noted.warning);
        settings.properties = properties;
        Ok((settings, notes))
    }
}

impl Reader<'_> {
    fn settings(&mut self, gpus: Vec<u32>, work_directory: PathBuf) -> Result<Settings, String> {
        let inference = self.address(
            "inference_address",
            "http://127.0.0.1:8080",
            Ports { plain: 8080, secure: 8443 },
        )?;
        let management = self.address(
            "management_address",
            "http://127.0.0.1:8081",
            Ports { plain: 8081, secure: 8444 },
        )?;
        let metrics = self.metrics_address()?;
        let (grpc_inference, grpc_inference_age) = self.grpc("inference", 7070)?;
        let (grpc_management, grpc_management_age) = self.grpc("management", 7071)?;
        let all = [
            Some(inference),
            Some(management),
            metrics,
            Some(grpc_inference),
            Some(grpc_management),
        ];
        // Without effect here, but their values are checked.
        self.number::<u32>("unregister_model_timeout", 120)?;
        self.flag("ts_open_inference_protocol", false);
        Ok(Settings {
            tls: self.tls_of(&all)?,
            cors: self.cors(),
            max_request_size: self.number("max_request_size", 6_553_500)?,
            max_response_size: self.number("max_response_size", 6_553_500)?,
            token: self.token()?,
            model_api: self.flag("enable_model_api", false),
            sequence_headers: ["id", "start", "end"].map(|part| self.sequence_header(part)),
            model_store: self.text("model_store").map(PathBuf::from),
            load_models: LoadModels::parse(self.text("load_models").unwrap_or_default()),
            snapshot: self
                .text("model_snapshot")
                .is_some()
                .then(|| self.models("model_snapshot"))
                .transpose()?,
            models: self.models("models")?,
            allowed_urls: self.allowed_urls()?,
            install_requirements: self.flag("install_py_dep_per_model", false),
            configured_workers: self.number("default_workers_per_model", 0)?,
            gpus,
            job_queue_size: self.queue_size()?,
            default_response_timeout: self.number("default_response_timeout", 120)?,
            default_startup_timeout: self.number("default_startup_timeout", 120)?,
            default_handler: self.text("default_service_handler").map(str::to_owned),
            envelope: self.text("service_envelope").map(str::to_owned),
            decode_input_request: self.flag("decode_input_request", true),
            limit_max_image_pixels: self.flag("limit_max_image_pixels", true),
            initial_worker_port: self.number("initial_worker_port", 9000)?,
            blacklist_env_vars: self.text("blacklist_env_vars").map(str::to_owned),
            metrics_mode: self.metrics_mode(),
            metrics_config: self.text("metrics_config").map(PathBuf::from),
            metrics_auto_detect: self.flag("model_metrics_auto_detect", false),
            disable_system_metrics: self.flag("disable_system_metrics", false),
            metric_time_interval: self.number::<u32>("metric_time_interval", 60)?.max(1),
            pip: Pip::default(),
            snapshots: true,
            properties: Vec::new(),
            work_directory,
            inference,
            management,
            metrics,
            grpc_inference,
            grpc_inference_age,
            grpc_management,
            grpc_management_age,
        })
    }

    fn queue_size(&mut self) -> Result<u32, String> {
        match self.number("job_queue_size", 100)? {
            0 => Err(format!("job_queue_size=0: allowed are whole numbers from 1 to {}", u32::MAX)),
            size => Ok(size),
        }
    }

    /// Returns the address of metrics; `None` if `enable_metrics_api` disables it.
    fn metrics_address(&mut self) -> Result<Option<Address>, String> {
        let metrics = self.address(
            "metrics_address",
            "http://127.0.0.1:8082",
            Ports { plain: 8082, secure: 8445 },
        )?;
        Ok(Some(metrics).filter(|_| self.flag("enable_metrics_api", true)))
    }

    /// Returns the TLS files if one of the addresses uses TLS.
    fn tls_of(&self, all: &[Option<Address>]) -> Result<Option<TlsFiles>, String> {
        let secure = all.iter().flatten().any(|address| address.tls);
        secure.then(|| self.tls()).transpose()
    }

    /// Notes keys that are unknown or have no effect.
    fn note_unused_keys(&mut self) {
        for (name, value) in self.properties {
            if keys::SILENT.contains(&name.as_str()) {
                continue;
            }
            match keys::known(name).map(|key| key.effect) {
                Some(Effect::Same) => {}
                Some(Effect::None(why)) => {
                    self.notes.push(Note {
                        warning: false,
                        text: format!("{name}={value} has no effect: {why}"),
                    });
                }
                None => {
                    let remedy =
                        keys::nearest(name).map(|meant| format!("; did you mean '{meant}'?"));
                    let remedy = remedy.as_deref().unwrap_or_default();
                    self.warn(format!(
                        "unknown key '{name}' in config.properties is ignored{remedy}"
                    ));
                }
            }
        }
    }

    fn warn(&mut self, text: String) {
        self.notes.push(Note { warning: true, text });
    }

    /// Returns a non-empty value.
    fn text(&self, key: &str) -> Option<&str> {
        let found = self.properties.iter().find(|(name, _)| name == key);
        found.map(|(_, value)| value.trim()).filter(|value| !value.is_empty())
    }

    /// Reads a flag. As in Java, any value other than `true` means false; warns if it is not
    /// `false`.
    fn flag(&mut self, key: &str, default: bool) -> bool {
        let Some(value) = self.text(key).map(str::to_owned) else { return default };
        if value.eq_ignore_ascii_case("true") {
            return true;
        }
        if !value.eq_ignore_ascii_case("false") {
            self.warn(format!("{key}={value}: allowed are true and false; using false"));
        }
        false
    }

    fn number<T: FromStr>(&self, key: &str, default: T) -> Result<T, String> {
        let Some(value) = self.text(key) else { return Ok(default) };
        value.parse().map_err(|_| {
            let most = match size_of::<T>() {
                2 => u64::from(u16::MAX),
                4 => u64::from(u32::MAX),
                _ => u64::MAX,
            };
            format!("{key}={value}: allowed are whole numbers from 0 to {most}")
        })
    }

    fn address(&self, key: &str, default: &str, ports: Ports) -> Result<Address, String> {
        address::parse(key, self.text(key).unwrap_or(default), ports)
    }

    fn grpc(&mut self, which: &str, default_port: u16) -> Result<(Address, Age), String> {
        let address = format!("grpc_{which}_address");
        let port = self.number(&format!("grpc_{which}_port"), default_port)?;
        let tls = self.flag("enable_grpc_ssl", false);
        let host = self.text(&address).unwrap_or("127.0.0.1");
        let milliseconds = |part: &str| {
            let key = format!("grpc_{which}_max_connection_age_{part}ms");
            match self.text(&key) {
                Some(_) => self
                    .number(&key, 0)
                    .map(|milliseconds| Some(Duration::from_millis(milliseconds))),
                None => Ok(None),
            }
        };
        let age = Age { age: milliseconds("")?, grace: milliseconds("grace_")? };
        Ok((address::grpc(&address, host, port, tls)?, age))
    }

    fn tls(&self) -> Result<TlsFiles, String> {
        if let Some(keystore) = self.text("keystore") {
            return Err(format!(
                "keystore={keystore}: Java key stores are not supported; set certificate_file and \
                 private_key_file to PEM files ('openssl pkcs12 -in KEYSTORE -nodes' converts a \
                 key store)"
            ));
        }
        match (self.text("certificate_file"), self.text("private_key_file")) {
            (Some(certificate), Some(key)) => {
                Ok(TlsFiles { certificate: certificate.into(), key: key.into(), authorities: None })
            }
            _ => Err("TLS needs certificate_file and private_key_file; the server generates no \
                      certificate"
                .to_owned()),
        }
    }

    fn cors(&self) -> Cors {
        let text = |part: &str| self.text(&format!("cors_allowed_{part}")).map(str::to_owned);
        Cors { origin: text("origin"), methods: text("methods"), headers: text("headers") }
    }

    fn token(&mut self) -> Result<Option<Token>, String> {
        let minutes: f64 = self.number("token_expiration_min", 60.0)?;
        if !(minutes > 0.0 && minutes <= 525_600_000.0) {
            return Err(format!(
                "token_expiration_min={minutes}: allowed are minutes greater than 0"
            ));
        }
        let expiration = Duration::from_secs_f64(minutes * 60.0);
        let disabled = self.flag("disable_token_authorization", false);
        Ok((!disabled).then(|| Token { expiration, file: PathBuf::from("key_file.json") }))
    }

    fn sequence_header(&self, part: &str) -> String {
        let key = format!("ts_header_key_sequence_{part}");
        self.text(&key).map_or_else(|| format!("ts_request_sequence_{part}"), str::to_owned)
    }

    fn models(&mut self, key: &str) -> Result<Vec<ModelProperties>, String> {
        let Some(text) = self.text(key).map(str::to_owned) else { return Ok(Vec::new()) };
        models::parse(key, &text, &mut |what| self.warn(what))
    }

    fn allowed_urls(&self) -> Result<Vec<Regex>, String> {
        let list = self.text("allowed_urls").unwrap_or("file://.*|http(s)?://.*");
        let mut compiled = Vec::new();
        for pattern in list.split(',').map(str::trim).filter(|pattern| !pattern.is_empty()) {
            // The pattern must match the whole URL.
            let whole = Regex::new(&format!("^(?:{pattern})$")).map_err(|error| {
                format!("allowed_urls={pattern}: invalid regular expression: {error}")
            })?;
            compiled.push(whole);
        }
        Ok(compiled)
    }

    /// Reads the metrics mode. As in TorchServe, an unknown mode means `log`.
    fn metrics_mode(&mut self) -> Option<String> {
        let mode = self.text("metrics_mode")?.to_ascii_lowercase();
        if ["log", "prometheus", "legacy", "both", "tslog"].contains(&mode.as_str()) {
            return Some(mode);
        }
        self.warn(format!(
            "metrics_mode={mode}: allowed are log, prometheus, legacy and both; using log"
        ));
        Some("log".to_owned())
    }
}
