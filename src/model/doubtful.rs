//! What a configuration may say and hardly means. Triton takes it without a word, and repositories of users may have it, so
//! it is no mistake: the log tells it when the model is loaded.

use super::config::{ModelConfig, Scheduling};
use super::proto::model_config::SchedulingChoice;

/// One sentence for each.
pub(super) fn of(config: &ModelConfig) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(SchedulingChoice::SequenceBatching(sequence)) = &config.proto.scheduling_choice {
        let silent = sequence.control_input.iter().filter(|input| input.control.is_empty());
        found.extend(silent.map(|input| {
            format!("the control input '{}' has no 'control': the model is not given this input", input.name)
        }));
    }
    if config.backend == "python" && config.inputs.is_empty() && config.outputs.is_empty() {
        found.push(
            "it has neither inputs nor outputs, so requests with inputs are refused and outputs of the model are dropped: name \
             them in config.pbtxt, or add them in the auto_complete_config of model.py"
                .to_owned(),
        );
    }
    found
}

impl ModelConfig {
    /// What the configuration says of a model that, when its members are known, answers only once.
    pub(super) fn says_decoupled_in_vain(&self, decoupled: bool) -> Option<String> {
        let is_ensemble = matches!(self.scheduling, Scheduling::Ensemble { .. });
        (is_ensemble && self.decoupled && !decoupled).then(|| {
            "'model_transaction_policy' says that it is decoupled, but none of its members is: it answers once"
                .to_owned()
        })
    }
}
