//! `POST /sleep`, `POST /wake_up` and `GET /is_sleeping`: models that free the memory of their GPUs
//! while their processes go on, in the form of vLLM 0.32.
//!
//! The state is in the model alone, because a new process of it is awake. Each request is one
//! request to the model.

use axum::response::Response;
use pharos::model::generation::{
    GenerationForm, IS_SLEEPING, SLEEP, SLEEP_MODE, SLEEP_OPTIONS, TEXT_OUTPUT, WAKE_UP,
};
use pharos::model::{InstanceGroup, InstanceKind, ModelConfig};
use pharos_edge::query::pairs;
use serde::Serialize;
use serde_json::json;

use crate::answer::Failure;
use crate::contract::strings;
use crate::edge::{Received, log_unknown};
use crate::error::ApiError;
use crate::json::invalid;
use crate::operation::{Operations, only_model};
use crate::options::{MAX_MODEL_BYTES, RequestOptions};

/// The states of a model, which are the texts of its responses.
const SLEEPING: &str = "sleeping";
const AWAKE: &str = "awake";
/// What happens to running requests. vLLM's `keep` is not possible: the requests would hold their
/// places in the model, and none might be left for the request that wakes it up.
const MODES: [&str; 2] = ["abort", "wait"];
/// The parts of a model that wake up.
const TAGS: [&str; 2] = ["weights", "kv_cache"];

/// The path of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verb {
    Sleep,
    WakeUp,
    IsSleeping,
}

/// What a request wants of its model. The JSON is the parameter of the request to the model.
#[derive(Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum Wanted {
    Sleep {
        level: u8,
        mode: &'static str,
    },
    WakeUp {
        /// The parts; `None` for all.
        tags: Option<Vec<&'static str>>,
    },
    IsSleeping {},
}

/// A checked query.
#[derive(Debug)]
struct SleepRequest {
    /// The model; `None` for the only one.
    model: Option<String>,
    wanted: Wanted,
    unknown: Vec<String>,
}

impl SleepRequest {
    /// Parses a query. Of a member that is repeated, except `tags`, the last one counts.
    fn parse(verb: Verb, query: &str) -> Result<Self, ApiError> {
        let mut model = None;
        let mut level = 1;
        let mut mode = "abort";
        let mut tags = Vec::new();
        let mut unknown = Vec::new();
        for (name, value) in pairs(query) {
            match (verb, name.as_str()) {
                (_, "model") if value.len() <= MAX_MODEL_BYTES => model = Some(value),
                (_, "model") => {
                    let allowed = format_args!("a text of at most {MAX_MODEL_BYTES} bytes");
                    return Err(invalid("model", &value, allowed));
                }
                (Verb::Sleep, "level") => {
                    level = match value.as_str() {
                        "1" => 1,
                        "2" => 2,
                        _ => return Err(invalid("level", &value, "1 or 2")),
                    };
                }
                (Verb::Sleep, "mode") => mode = one_of("mode", &value, MODES)?,
                (Verb::WakeUp, "tags") => {
                    let tag = one_of("tags", &value, TAGS)?;
                    if !tags.contains(&tag) {
                        tags.push(tag);
                    }
                }
                _ => unknown.push(name),
            }
        }
        let wanted = match verb {
            Verb::Sleep => Wanted::Sleep { level, mode },
            Verb::WakeUp => Wanted::WakeUp { tags: (!tags.is_empty()).then_some(tags) },
            Verb::IsSleeping => Wanted::IsSleeping {},
        };
        Ok(Self { model, wanted, unknown })
    }
}

fn one_of(name: &str, value: &str, allowed: [&'static str; 2]) -> Result<&'static str, ApiError> {
    let [first, second] = allowed;
    let found = allowed.into_iter().find(|allowed| *allowed == value);
    found.ok_or_else(|| invalid(name, value, format_args!("{first} or {second}")))
}

impl Wanted {
    fn operation(&self) -> &'static str {
        match self {
            Self::Sleep { .. } => SLEEP,
            Self::WakeUp { .. } => WAKE_UP,
            Self::IsSleeping {} => IS_SLEEPING,
        }
    }

    /// Returns the body of the response for the state of the model after the request.
    fn answer(&self, state: &str) -> Vec<u8> {
        let body = match self {
            Self::Sleep { level, .. } => json!({"status": state, "level": level}),
            Self::WakeUp { tags } => json!({"status": state, "tags": tags}),
            Self::IsSleeping {} => json!({"is_sleeping": state == SLEEPING}),
        };
        body.to_string().into_bytes()
    }
}

/// Answers a request of one of the paths.
pub(crate) async fn answer(mut received: Received, verb: Verb) -> Response {
    let answer = run(&mut received, verb).await;
    received.finish(answer)
}

async fn run(received: &mut Received, verb: Verb) -> Result<Vec<u8>, Failure> {
    received.edge.service.check_model_control()?;
    let query = received.uri.query().unwrap_or_default();
    let SleepRequest { model, wanted, unknown } = SleepRequest::parse(verb, query)?;
    check_body(&received.body)?;
    let model = match model {
        Some(model) => model,
        None => {
            let accepts = |config: &ModelConfig| operations_of(config).is_some();
            only_model(&*received.edge.service, "sleep", accepts).await?
        }
    };
    let options = RequestOptions { model: Some(model), ..RequestOptions::default() };
    let model = received.enter_model(&options).await?;
    log_unknown(&model, &unknown);
    let Received { edge, call, .. } = received;
    let config = edge.service.model_config(&model, "")?;
    let operations = operations_of(&config).ok_or_else(|| no_sleep(&model))?;
    check_instances(&model, &config.instance_groups)?;
    let parameter = serde_json::to_string(&wanted).unwrap_or_default();
    let parameter = Some((SLEEP_OPTIONS, parameter));
    let running = operations.run(edge, call, wanted.operation(), "", Vec::new(), parameter);
    let mut texts = Vec::new();
    for output in running.await?.iter().filter(|output| output.name == TEXT_OUTPUT) {
        texts = strings(&output.name, &output.tensor)?;
    }
    match texts.as_slice() {
        [state] if [SLEEPING, AWAKE].contains(&state.as_str()) => Ok(wanted.answer(state)),
        _ => Err(no_sleep(&model).into()),
    }
}

/// Refuses a body with members, which would otherwise have no effect.
fn check_body(body: &[u8]) -> Result<(), ApiError> {
    match body.trim_ascii() {
        b"" | b"{}" => Ok(()),
        _ => Err(ApiError::invalid_request(format!(
            "the body has {} bytes: expected none, because the members of this request are in its \
             query",
            body.len()
        ))),
    }
}

/// Returns the operations of a model that can sleep.
fn operations_of(config: &ModelConfig) -> Option<Operations> {
    let sleeps = config.parameters.get(SLEEP_MODE).is_some_and(|value| value == "true");
    GenerationForm::of(config).filter(|_| sleeps).and_then(|_| Operations::of(config))
}

/// Checks that a model has one instance, because a request reaches only one of several.
fn check_instances(model: &str, groups: &[InstanceGroup]) -> Result<(), ApiError> {
    let count: u64 = groups.iter().map(instances_of).sum();
    if count <= 1 {
        return Ok(());
    }
    let text = format!(
        "the model '{model}' has {count} instances in its instance_group: only a model with one \
         instance can sleep"
    );
    Err(ApiError { code: Some("model_not_supported"), ..ApiError::invalid_field("model", text) })
}

fn instances_of(group: &InstanceGroup) -> u64 {
    let devices = match group.kind {
        InstanceKind::Gpu => group.gpus.len().max(1) as u64,
        _ => 1,
    };
    devices.saturating_mul(group.count.into())
}

fn no_sleep(model: &str) -> ApiError {
    let text = format!(
        "the model '{model}' cannot sleep: its parameter '{SLEEP_MODE}' is not 'true', which the \
         backend vllm sets if model.json has \"enable_sleep_mode\": true, or it has no operation \
         '{SLEEP}'"
    );
    ApiError { code: Some("model_not_supported"), ..ApiError::invalid_field("model", text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(verb: Verb, query: &str, expected: Wanted) {
        let request = SleepRequest::parse(verb, query).unwrap();
        assert_eq!(request.wanted, expected, "{query}");
    }

    fn check_error(verb: Verb, query: &str, param: &str, message: &str) {
        let error = SleepRequest::parse(verb, query).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{query}");
        assert_eq!(error.message, message);
    }

    #[test]
    fn queries_have_the_members_of_vllm() {
        check(Verb::Sleep, "", Wanted::Sleep { level: 1, mode: "abort" });
        check(Verb::Sleep, "level=2&mode=wait", Wanted::Sleep { level: 2, mode: "wait" });
        check(Verb::WakeUp, "", Wanted::WakeUp { tags: None });
        let both = Some(vec!["weights", "kv_cache"]);
        let query = "tags=weights&tags=kv%5Fcache&tags=weights";
        check(Verb::WakeUp, query, Wanted::WakeUp { tags: both });
        check(Verb::IsSleeping, "level=9", Wanted::IsSleeping {});
        let request = SleepRequest::parse(Verb::Sleep, "model=a%20b&tags=x&level=1").unwrap();
        assert_eq!(request.model.as_deref(), Some("a b"));
        assert_eq!(request.unknown, ["tags"]);
    }

    #[test]
    fn wrong_values_are_named_with_what_is_allowed() {
        for level in ["0", "3", "-1", "x", ""] {
            let message = format!("invalid level {level}: expected 1 or 2");
            check_error(Verb::Sleep, &format!("level={level}"), "level", &message);
        }
        let message = "invalid mode keep: expected abort or wait";
        check_error(Verb::Sleep, "mode=keep", "mode", message);
        let message = "invalid tags scheduling: expected weights or kv_cache";
        check_error(Verb::WakeUp, "tags=weights&tags=scheduling", "tags", message);
        let long = format!("model={}", "m".repeat(MAX_MODEL_BYTES + 1));
        let message =
            format!("invalid model {}...: expected a text of at most 1024 bytes", "m".repeat(64));
        check_error(Verb::IsSleeping, &long, "model", &message);
        assert!(check_body(b" {} \n").is_ok() && check_body(b"{\"level\":2}").is_err());
    }

    #[test]
    fn the_model_gets_the_members_as_json() {
        let json = |wanted: &Wanted| serde_json::to_string(wanted).unwrap();
        let sleep = Wanted::Sleep { level: 2, mode: "wait" };
        assert_eq!(json(&sleep), r#"{"level":2,"mode":"wait"}"#);
        assert_eq!(json(&Wanted::WakeUp { tags: None }), r#"{"tags":null}"#);
        assert_eq!(
            json(&Wanted::WakeUp { tags: Some(vec!["weights"]) }),
            r#"{"tags":["weights"]}"#
        );
        assert_eq!(json(&Wanted::IsSleeping {}), "{}");
    }

    #[test]
    fn only_one_instance_can_sleep() {
        let group = |kind, count, gpus: &[u32]| InstanceGroup {
            name: "g".into(),
            kind,
            count,
            gpus: gpus.to_vec(),
            passive: false,
            host_policy: String::new(),
            resources: Vec::new(),
            priority: 0,
        };
        for (groups, allowed) in [
            (vec![group(InstanceKind::Model, 1, &[])], true),
            (vec![group(InstanceKind::Gpu, 1, &[3])], true),
            (vec![group(InstanceKind::Model, 2, &[])], false),
            (vec![group(InstanceKind::Gpu, 1, &[0, 1])], false),
            (vec![group(InstanceKind::Cpu, 1, &[]), group(InstanceKind::Cpu, 1, &[])], false),
        ] {
            let checked = check_instances("m", &groups);
            assert_eq!(checked.is_ok(), allowed, "{groups:?}");
            if let Err(error) = checked {
                assert!(error.message.starts_with("the model 'm' has 2 instances"), "{error}");
            }
        }
    }
}
