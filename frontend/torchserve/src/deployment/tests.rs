//! Precedence of settings, and the configuration that is written for the engine.

use std::fs;
use std::path::PathBuf;

use pharos::model::Draft;
use tempfile::TempDir;

use super::*;
use crate::{Exception, open};

struct Fixture {
    folder: TempDir,
}

impl Fixture {
    fn new(yaml: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("store/m")).unwrap();
        fs::write(folder.path().join("store/m/model-config.yaml"), yaml).unwrap();
        Self { folder }
    }

    fn deployment(
        &self,
        properties: &str,
        gpus: u32,
        asked: &RegistrationParameters,
    ) -> Result<Deployment, ErrorResponse> {
        let mut properties = crate::properties::parse(properties).unwrap();
        properties.push((
            "model_store".to_owned(),
            self.folder.path().join("store").to_string_lossy().into_owned(),
        ));
        let (settings, _) =
            Settings::new(properties, (0..gpus).collect(), self.folder.path().to_owned()).unwrap();
        let archive = open(&settings, "m", asked, &tokio::sync::watch::channel(false).1);
        Deployment::new(&settings, Arc::new(archive.unwrap()), asked, "m".to_owned())
    }

    /// Returns the written configuration as the engine reads it, and the path of the version.
    fn written(&self, deployment: &Deployment) -> (String, PathBuf) {
        let repository = self.folder.path().join("repository");
        deployment.write(&repository).unwrap();
        let text = fs::read_to_string(repository.join("m/config.pbtxt")).unwrap();
        Draft::from_text(&text, "config.pbtxt").unwrap();
        (text, repository.join("m/1"))
    }
}

fn handled() -> RegistrationParameters {
    RegistrationParameters {
        handler: Some("service:handle".to_owned()),
        ..RegistrationParameters::default()
    }
}

#[test]
fn registration_overrides_the_archive_which_overrides_the_configuration() {
    let fixture = Fixture::new("batchSize: 4\nminWorkers: 3\nresponseTimeout: 7\n");
    let properties = "models={\"m\": {\"1.0\": {\"batchSize\": 8, \"maxBatchDelay\": 5, \"maxWorkers\": \
         9}}}\ndefault_workers_per_model=2\ndefault_startup_timeout=33\njob_queue_size=11\n";
    let plain = fixture.deployment(properties, 0, &handled()).unwrap();
    assert_eq!((plain.batch_size, plain.max_batch_delay), (4, 5));
    assert_eq!((plain.min_workers, plain.max_workers), (3, 9));
    assert_eq!((plain.response_timeout, plain.startup_timeout, plain.queue), (7, 33, 11));
    let model = ModelParameters {
        batch_size: Some(2),
        min_workers: Some(1),
        response_timeout: Some(9),
        ..ModelParameters::default()
    };
    let asked = RegistrationParameters { model, ..handled() };
    let asked = fixture.deployment(properties, 0, &asked).unwrap();
    assert_eq!(
        (asked.batch_size, asked.response_timeout, asked.min_workers, asked.max_workers),
        (2, 9, 1, 1)
    );
    assert!(
        fixture
            .deployment("", 0, &RegistrationParameters::default())
            .unwrap_err()
            .message
            .contains("names no handler")
    );
    let default = fixture
        .deployment(
            "default_service_handler=image_classifier",
            0,
            &RegistrationParameters::default(),
        )
        .unwrap();
    assert_eq!(default.handler, "image_classifier");
}

#[test]
fn starts_one_worker_per_gpu_at_server_start_and_none_by_request() {
    let fixture = Fixture::new("");
    let start = RegistrationParameters { at_start: true, ..handled() };
    assert_eq!(fixture.deployment("", 2, &start).unwrap().min_workers, 2);
    assert_eq!(
        fixture.deployment("default_workers_per_model=5", 2, &start).unwrap().min_workers,
        5
    );
    assert_eq!(fixture.deployment("", 2, &handled()).unwrap().min_workers, 0);
    assert_eq!(
        fixture.deployment("default_workers_per_model=5", 2, &handled()).unwrap().min_workers,
        5
    );
}

#[test]
fn uses_the_gpus_of_the_archive_only_if_all_of_them_exist() {
    for (yaml, properties, expected) in [
        ("", "", Device::Gpu(vec![0, 1, 2])),
        ("", "number_of_gpu=2", Device::Gpu(vec![0, 1])),
        ("", "number_of_gpu=0", Device::Cpu),
        ("deviceType: cpu\ndeviceIds: [1]\n", "", Device::Cpu),
        ("deviceType: gpu\ndeviceIds: [2, 0]\n", "", Device::Gpu(vec![2, 0])),
        ("deviceIds: [2, 3]\n", "", Device::Gpu(vec![0, 1, 2])),
        ("deviceIds: [2]\n", "number_of_gpu=2", Device::Gpu(vec![0, 1])),
    ] {
        let fixture = Fixture::new(yaml);
        let deployment = fixture.deployment(properties, 3, &handled()).unwrap();
        assert_eq!(deployment.device, expected, "{yaml} {properties}");
        assert_eq!(fixture.deployment(properties, 0, &handled()).unwrap().device, Device::Cpu);
    }
}

#[test]
fn writes_the_archives_settings_for_the_engine() {
    let fixture = Fixture::new(
        "maxBatchDelay: 20\nbatchSize: 3\nclientTimeoutInMills: 250\nword: \"a\\\"\\n\u{e9}\"\n",
    );
    let mut deployment = fixture.deployment("job_queue_size=7", 0, &handled()).unwrap();
    deployment.min_workers = 4;
    let (text, version) = fixture.written(&deployment);
    for part in [
        "backend: \"torchserve\"",
        "max_batch_size: 3",
        "max_queue_delay_microseconds: 20000",
        "max_queue_size: 7",
        "default_timeout_microseconds: 250000",
        "instance_group { count: 4 kind: KIND_CPU }",
        "key: \"torchserve_handler\" value { string_value: \"service:handle\" }",
        "key: \"torchserve_response_timeout\" value { string_value: \"120\" }",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("decoupled"));
    assert!(version.join("model-config.yaml").is_file());
    // Writing again gives the same text. Without its own packages directory the version is a link
    // to the archive.
    assert_eq!(fixture.written(&deployment).0, text);
    deployment.device = Device::Gpu(vec![0, 2]);
    deployment.min_workers = 3;
    let (text, _) = fixture.written(&deployment);
    assert!(text.contains("instance_group { count: 2 kind: KIND_GPU gpus: 0 }"), "{text}");
    assert!(text.contains("instance_group { count: 1 kind: KIND_GPU gpus: 2 }"), "{text}");
}

#[test]
fn configures_sequences_and_streaming_from_the_yaml_and_the_handler() {
    let fixture = Fixture::new(
        "sequenceBatching: true\nmaxNumSequence: 5\nsequenceMaxIdleMSec: 1000\nbatchSize: \
         2\nmaxBatchDelay: 1\n",
    );
    let (text, _) = fixture.written(&fixture.deployment("", 0, &handled()).unwrap());
    assert!(
        text.contains(
            "sequence_batching { max_sequence_idle_microseconds: 1000000 oldest { \
             max_candidate_sequences: 5"
        ),
        "{text}"
    );
    fs::write(
        fixture.folder.path().join("store/m/service.py"),
        "send_intermediate_predict_response([], {}, '', 200, ctx)",
    )
    .unwrap();
    assert!(
        fixture
            .written(&fixture.deployment("", 0, &handled()).unwrap())
            .0
            .contains("decoupled: true")
    );
    fs::write(fixture.folder.path().join("store/m/model-config.yaml"), "streaming: false\n")
        .unwrap();
    assert!(
        !fixture.written(&fixture.deployment("", 0, &handled()).unwrap()).0.contains("decoupled")
    );
    fs::write(
        fixture.folder.path().join("store/m/model-config.yaml"),
        "continuousBatching: true\nbatchSize: 4\n",
    )
    .unwrap();
    let (text, _) = fixture.written(&fixture.deployment("", 0, &handled()).unwrap());
    assert!(
        text.contains("iterative_sequence: true") && text.contains("decoupled: true"),
        "{text}"
    );
    assert!(
        text.contains("max_batch_size: 4") && !text.contains("overlapping_sequences"),
        "{text}"
    );
    let both =
        "sequenceBatching: true\ncontinuousBatching: true\nbatchSize: 4\nmaxNumSequence: 6\n";
    fs::write(fixture.folder.path().join("store/m/model-config.yaml"), both).unwrap();
    let (text, _) = fixture.written(&fixture.deployment("", 0, &handled()).unwrap());
    for part in [
        "max_batch_size: 8\n",
        "iterative_sequence: true max_sequence_idle_microseconds",
        "oldest { max_candidate_sequences: 6 max_queue_delay_microseconds: 0 }",
        "parameters { key: \"overlapping_sequences\" value { string_value: \"true\" } }",
        "parameters { key: \"torchserve_batch_size\" value { string_value: \"4\" } }",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn refuses_more_workers_than_the_engine_allows() {
    let fixture = Fixture::new("minWorkers: 4097\n");
    let refused = fixture.deployment("", 0, &handled()).unwrap_err();
    assert_eq!((refused.status, refused.exception), (400, Exception::BadRequest));
    assert!(refused.message.starts_with("The number of workers is 4097 ("), "{refused}");
    assert!(refused.message.ends_with("allowed are 0 to 4096"), "{refused}");
    let model = ModelParameters { min_workers: Some(4096), ..ModelParameters::default() };
    let most = RegistrationParameters { model, ..handled() };
    assert_eq!(fixture.deployment("", 0, &most).unwrap().min_workers, 4096);
}
