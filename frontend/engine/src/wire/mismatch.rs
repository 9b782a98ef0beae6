//! Outputs that differ from their model's configuration. Like Triton, the server passes them on, but with a warning and a metric,
//! unless the configuration has `strict_output_types`.

use std::fmt;

use pharos::model::{ModelConfig, TensorSpec};
use pharos::tensor::DataType;

/// A difference between an output and the model's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// The output's name.
    pub(crate) output: String,
    what: MismatchKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum MismatchKind {
    Datatype { configured: DataType, given: DataType },
    Rows { shape: Vec<i64>, rows: u64 },
}

impl Mismatch {
    /// Creates the mismatch of an output with another datatype.
    pub(super) fn datatype(spec: &TensorSpec, given: DataType) -> Self {
        Self { output: spec.name.clone(), what: MismatchKind::Datatype { configured: spec.datatype, given } }
    }

    /// Checks that the first dimension of an output is the number of rows of its requests; `None` if it is, or the model does not
    /// batch.
    pub(super) fn rows(config: &ModelConfig, spec: &TensorSpec, (shape, rows): (&[i64], u64)) -> Option<Self> {
        let fits = shape.first().and_then(|first| u64::try_from(*first).ok()) == Some(rows);
        let mismatch = config.batches() && !fits;
        mismatch.then(|| Self { output: spec.name.clone(), what: MismatchKind::Rows { shape: shape.to_vec(), rows } })
    }

    /// Returns the change that makes model and configuration agree.
    pub(crate) fn fix(&self) -> String {
        match &self.what {
            MismatchKind::Datatype { configured, given } => {
                format!(
                    "return {configured} from the model, or set data_type: TYPE_{} in config.pbtxt",
                    config_name(*given)
                )
            }
            MismatchKind::Rows { rows, .. } => {
                format!("return {rows} as the first dimension, or set max_batch_size: 0 in config.pbtxt")
            }
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            MismatchKind::Datatype { configured, given } => {
                write!(f, "is {given}, but its configured datatype is {configured}")
            }
            MismatchKind::Rows { shape, rows } => write!(f, "has shape {shape:?} for a batch of {rows}"),
        }
    }
}

/// Returns the name of a datatype in a configuration, without `TYPE_`.
fn config_name(datatype: DataType) -> String {
    match datatype {
        DataType::Bytes => "STRING".to_owned(),
        other => other.to_string(),
    }
}
