//! The format of trace files: a JSON array of records, the same as Triton's (spec 2.7), so that
//! existing tools can read them.
//!
//! A record describes a part of a trace, or contains one stamp of it, or a tensor. After each added
//! trace the file is a complete array: [`OPEN`], the traces separated by [`BETWEEN`], and
//! [`CLOSE`], which the next trace overwrites. The writer should write a trace and the new end
//! together; [`super::read`] also reads truncated files.

use std::fmt::Write;

use crate::request_trace::{Finished, TracedPart, text};

/// The start of a file.
pub const OPEN: &str = "[";
/// The separator between two records.
pub const BETWEEN: &str = ",\n";
/// The end of a file.
pub const CLOSE: &str = "]\n";

/// Appends the records of a trace: first of the request, then of each step. Returns `false` if the
/// trace has none.
pub fn append(trace: &Finished, out: &mut String) -> bool {
    let start = out.len();
    for part in &trace.parts {
        append_part(part, out);
    }
    // Each record is followed by a separator; the last one is removed.
    if out.len() == start {
        return false;
    }
    out.truncate(out.len() - BETWEEN.len());
    true
}

fn append_part(part: &TracedPart, out: &mut String) {
    let id = part.id;
    if let Some(model) = &part.model {
        let _ = write!(
            out,
            "{{\"id\":{id},\"model_name\":{},\"model_version\":{}",
            quoted(model.name.bare()),
            model.version
        );
        if !part.request_id.is_empty() {
            let _ = write!(out, ",\"request_id\":{}", quoted(&part.request_id));
        }
        if part.parent != 0 {
            let _ = write!(out, ",\"parent_id\":{}", part.parent);
        }
        if let Some(instance) = part.instance {
            let _ = write!(out, ",\"instance\":{}", instance.0);
        }
        if let Some(failure) = &part.failure {
            let _ = write!(out, ",\"error\":{}", quoted(failure));
        }
        let _ = write!(out, "}}{BETWEEN}");
    }
    let stamps = part.stamps.iter().map(|(activity, at)| (activity.name(), at));
    let reports = part.reports.iter().map(|(name, at)| (name.as_str(), at));
    for (name, at) in stamps.chain(reports) {
        let name = quoted(name);
        let ns = at.0;
        let _ = write!(
            out,
            "{{\"id\":{id},\"timestamps\":[{{\"name\":{name},\"ns\":{ns}}}]}}{BETWEEN}"
        );
    }
    for seen in &part.tensors {
        let activity = seen.activity.name();
        let name = quoted(&seen.name);
        let dtype = seen.tensor.datatype.name();
        let data = quoted(&text::elements(&seen.tensor));
        let shape = text::shape(&seen.tensor);
        let _ = write!(
            out,
            "{{\"id\":{id},\"activity\":\"{activity}\",\"tensor\":{{\"name\":{name},\"data\":\
             {data},\"shape\":\"{shape}\",\"dtype\":\"{dtype}\"}}}}{BETWEEN}"
        );
    }
}

fn quoted(text: &str) -> String {
    // Serializing a string as JSON cannot fail.
    serde_json::to_string(text).unwrap_or_else(|_| "\"\"".to_owned())
}

#[cfg(test)]
mod tests {
    use crate::id::{InstanceId, ModelVersion};
    use crate::request_trace::{Activity, Levels, Sample, TensorActivity, TracedTensor};
    use crate::tensor::{DataType, Tensor};
    use crate::timeline::Instant;

    use super::*;

    #[test]
    fn records_have_tritons_form() {
        let tensor = Tensor {
            datatype: DataType::Bytes,
            shape: vec![1, 1],
            data: b"\x01\0\0\0a".to_vec().into(),
        };
        let seen = TracedTensor { activity: TensorActivity::QueueInput, name: "IN".into(), tensor };
        let root = TracedPart {
            id: 3,
            model: Some(ModelVersion::new("m", 2)),
            request_id: "r\"\\".into(),
            stamps: vec![(Activity::HttpRecvStart, Instant(7)), (Activity::RequestEnd, Instant(9))],
            tensors: vec![seen],
            ..TracedPart::default()
        };
        let step = TracedPart {
            id: 4,
            parent: 3,
            model: Some(ModelVersion::new("s", 1)),
            instance: Some(InstanceId(5)),
            failure: Some("no".into()),
            reports: vec![("\"DECODE\"".into(), Instant(8))],
            ..TracedPart::default()
        };
        let sample =
            Sample { generation: 1, levels: Levels::default(), log_frequency: 0, limited: false };
        let trace = Finished { sample, context: None, parts: vec![root, step], ended: Instant(9) };
        let mut text = OPEN.to_owned();
        assert!(append(&trace, &mut text));
        text.push_str(CLOSE);
        let expected = r#"[{"id":3,"model_name":"m","model_version":2,"request_id":"r\"\\"},
{"id":3,"timestamps":[{"name":"HTTP_RECV_START","ns":7}]},
{"id":3,"timestamps":[{"name":"REQUEST_END","ns":9}]},
{"id":3,"activity":"TENSOR_QUEUE_INPUT","tensor":{"name":"IN","data":"\"a\"","shape":"1,1","dtype":"BYTES"}},
{"id":4,"model_name":"s","model_version":1,"parent_id":3,"instance":5,"error":"no"},
{"id":4,"timestamps":[{"name":"\"DECODE\"","ns":8}]}]
"#;
        assert_eq!(text, expected);
        let nothing = Finished { parts: vec![TracedPart::default()], ..trace };
        assert!(!append(&nothing, &mut text));
        assert_eq!(text, expected);
    }
}
