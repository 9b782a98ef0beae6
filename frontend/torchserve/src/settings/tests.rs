//! Parsing of configurations.

use std::time::Duration;

use super::*;

fn read(text: &str) -> Result<(Settings, Vec<Note>), String> {
    let properties = crate::properties::parse(text).unwrap();
    Settings::new(properties, vec![0, 3], PathBuf::from("work_directory"))
}

fn at(socket: &str, tls: bool) -> Address {
    Address { socket: socket.parse().unwrap(), tls }
}

#[test]
fn an_empty_configuration_gives_torchserves_defaults() {
    let (settings, notes) = read("").unwrap();
    assert_eq!(notes, []);
    assert_eq!(settings.inference, at("127.0.0.1:8080", false));
    assert_eq!(settings.management, at("127.0.0.1:8081", false));
    assert_eq!(settings.metrics, Some(at("127.0.0.1:8082", false)));
    assert_eq!(settings.grpc_inference, at("127.0.0.1:7070", false));
    assert_eq!(settings.grpc_management, at("127.0.0.1:7071", false));
    assert_eq!((settings.max_request_size, settings.max_response_size), (6_553_500, 6_553_500));
    assert_eq!((settings.job_queue_size, settings.default_response_timeout), (100, 120));
    assert_eq!(
        settings.token.as_ref().map(|token| token.expiration),
        Some(Duration::from_secs(3600))
    );
    assert!(
        !settings.model_api && settings.decode_input_request && settings.limit_max_image_pixels
    );
    assert_eq!(settings.default_workers(), 2);
    assert_eq!(settings.gpus, [0, 3]);
    assert_eq!((settings.metrics_mode, settings.metric_time_interval), (None, 60));
    assert!(settings.allowed_urls.iter().any(|pattern| pattern.is_match("https://a/b.mar")));
    assert!(!settings.allowed_urls.iter().any(|pattern| pattern.is_match("ftp://a/http://b.mar")));
    assert_eq!(settings.sequence_headers[0], "ts_request_sequence_id");
}

#[test]
fn configured_values_replace_defaults() {
    let (settings, notes) = read(
        "inference_address=https://0.0.0.0:8443\nmanagement_address=http://0.0.0.0:1\nenable_metrics_api=false\n\
         grpc_inference_address=0.0.0.0\ngrpc_inference_port=5\nenable_grpc_ssl=true\ncertificate_file=c.pem\n\
         private_key_file=k.pem\ngrpc_inference_max_connection_age_ms=1500\ndisable_token_authorization=true\n\
         enable_model_api=TRUE\nload_models=a=x.mar, b.mar,https://h/c.mar?x=y\nnumber_of_gpu=1\n\
         default_workers_per_model=3\nmetrics_mode= Prometheus \ncors_allowed_origin=*\nservice_envelope=kserve\n",
    )
    .unwrap();
    assert_eq!(notes, []);
    assert_eq!((settings.inference, settings.metrics), (at("0.0.0.0:8443", true), None));
    assert_eq!(settings.grpc_inference, at("0.0.0.0:5", true));
    assert_eq!(settings.tls.unwrap().key, PathBuf::from("k.pem"));
    assert_eq!(settings.grpc_inference_age.age, Some(Duration::from_millis(1500)));
    assert!(settings.token.is_none() && settings.model_api);
    let listed = [(Some("a"), "x.mar"), (None, "b.mar"), (None, "https://h/c.mar?x=y")];
    let listed = listed.map(|(name, url)| (name.map(str::to_owned), url.to_owned()));
    assert_eq!(settings.load_models, LoadModels::Listed(listed.to_vec()));
    assert_eq!((settings.gpus, settings.configured_workers), (vec![0], 3));
    assert_eq!(settings.metrics_mode.as_deref(), Some("prometheus"));
    assert_eq!(
        (settings.cors.origin.as_deref(), settings.envelope.as_deref()),
        (Some("*"), Some("kserve"))
    );
    assert_eq!(read("load_models=ALL").unwrap().0.load_models, LoadModels::All);
    assert_eq!(read("load_models=none").unwrap().0.load_models, LoadModels::None);
}

#[test]
fn reads_properties_of_model_versions() {
    let (settings, notes) = read(
        "models={\\\n \"slow\": {\"1.0\": {\"defaultVersion\": true, \"marName\": \"slow.mar\", \
         \"minWorkers\": 2, \\\n\"batchSize\": \"4\", \"responseTimeout\": -1, \"colour\": 1, \
         \"jobQueueSize\": 5}}, \"odd\": 3}\nmodel_snapshot={\"name\": \"s\", \"modelCount\": 1, \
         \"models\": {\"m\": {\"2.0\": {\"marName\": \"m.mar\", \"useJobTicket\": true}}}}\n",
    )
    .unwrap();
    let slow = settings.model_properties("slow", "1.0").unwrap();
    let model = &slow.model;
    assert_eq!(
        (model.min_workers, model.batch_size, model.response_timeout),
        (Some(2), Some(4), None)
    );
    assert!(slow.default_version && settings.model_properties("slow", "2.0").is_none());
    assert_eq!(
        settings.snapshot.as_ref().and_then(|all| all.first()?.mar_name.as_deref()),
        Some("m.mar")
    );
    let texts: Vec<&str> = notes.iter().map(|noted| noted.text.as_str()).collect();
    let parts = [
        "'slow' 1.0: responseTimeout is -1; allowed are whole numbers from 0 to 4294967295; \
         ignored",
        "'slow' 1.0: unknown key colour; allowed are defaultVersion, ",
        "'slow' 1.0: jobQueueSize has no effect here; set it in the archive's model-config.yaml",
        "'odd', which is not an object",
    ];
    for part in parts {
        assert!(texts.iter().any(|text| text.contains(part)), "{part}: {texts:?}");
    }
    assert!(!texts.iter().any(|text| text.contains("useJobTicket")), "{texts:?}");
    for (text, part) in [
        ("models={", "models is not valid JSON"),
        ("models=[]", "models is not a JSON object"),
        ("model_snapshot={}", "no object 'models'"),
        ("job_queue_size=0", "allowed are whole numbers from 1 to 4294967295"),
    ] {
        let error = read(text).map(drop).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn notes_keys_without_effect_and_unknown_keys() {
    let (_, notes) = read(
        "number_of_netty_threads=4\nvmargs=-Xmx1g\nmetrics_mod=log\nsomething=1\n\
         metrics_mode=both of them\nenable_model_api=yes\n",
    )
    .unwrap();
    let shown: Vec<(bool, &str)> =
        notes.iter().map(|noted| (noted.warning, noted.text.as_str())).collect();
    let expected = [
        (
            true,
            "unknown key 'metrics_mod' in config.properties is ignored; did you mean \
             'metrics_mode'?",
        ),
        (true, "unknown key 'something' in config.properties is ignored"),
        (true, "enable_model_api=yes: allowed are true and false; using false"),
        (
            true,
            "metrics_mode=both of them: allowed are log, prometheus, legacy and both; using log",
        ),
    ];
    assert_eq!(shown.get(..4), Some(&expected[..]));
    assert!(
        matches!(shown.get(4..), Some([(false, text)]) if text.starts_with("number_of_netty_threads=4 has no effect: "))
    );
}

#[test]
fn errors_name_the_key_of_an_invalid_value() {
    for (text, parts) in [
        ("job_queue_size=many", &["job_queue_size=many", "whole numbers from 0 to 4294967295"][..]),
        ("grpc_inference_port=70000", &["grpc_inference_port=70000", "65535"]),
        ("inference_address=8080", &["inference_address=8080", "http://HOST[:PORT]"]),
        ("inference_address=https://0.0.0.0", &["certificate_file", "private_key_file"]),
        ("keystore=k.p12\ninference_address=https://0.0.0.0", &["keystore=k.p12", "openssl"]),
        ("allowed_urls=https://(", &["allowed_urls=https://(", "regular expression"]),
        ("token_expiration_min=0", &["token_expiration_min=0", "greater than 0"]),
    ] {
        let error = read(text).map(drop).unwrap_err();
        assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
    }
}
