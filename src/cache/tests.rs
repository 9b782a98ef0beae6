//! The properties of the cache, over random requests and entries.

use std::collections::HashSet;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::data::Data;
use crate::id::ModelVersion;
use crate::infer::{
    InferInput, InferOutput, InferRequest, InferResponse, Parameter, RequestedOutput,
};
use crate::model::{Completion, Draft, ModelConfig};
use crate::tensor::{DataType, Tensor};
use crate::timeline::{Instant, Timeline};

fn config(more: &str) -> ModelConfig {
    let text = format!(
        "backend: 'builtin' max_batch_size: 4 {more}
         input {{ name: 'A' data_type: TYPE_INT32 dims: [-1] }} input {{ name: 'B' data_type: \
         TYPE_INT32 dims: [-1] }}
         output {{ name: 'X' data_type: TYPE_INT32 dims: [-1] }} output {{ name: 'Y' data_type: \
         TYPE_STRING dims: [-1] }}"
    );
    let completion = Completion { directory: "m", backends: &["builtin"], ..Completion::default() };
    Draft::from_text(&text, "config.pbtxt").unwrap().complete(&completion).unwrap()
}

fn identity(name: &str, version: u64, more: &str, files: &[(&str, &str)]) -> Identity {
    let mut identifier = Identifier::new(&ModelVersion::new(name, version), &config(more));
    for (name, contents) in files {
        identifier.file(name.as_bytes(), contents.len() as u64);
        identifier.bytes(contents.as_bytes());
    }
    identifier.finish()
}

fn input(name: &str, datatype: DataType, shape: &[i64], data: &[u8]) -> InferInput {
    InferInput {
        name: name.into(),
        tensor: Tensor { datatype, shape: shape.into(), data: data.to_vec().into() },
    }
}

fn request() -> InferRequest {
    let inputs = vec![
        input("A", DataType::Int32, &[1, 2], &[1, 0, 0, 0, 2, 0, 0, 0]),
        input("B", DataType::Int32, &[1, 2], &[3, 0, 0, 0, 4, 0, 0, 0]),
    ];
    let parameters =
        vec![("p".into(), Parameter::Int(1)), ("q".into(), Parameter::String("x".into()))];
    InferRequest { model_name: "m".into(), inputs, parameters, ..InferRequest::default() }
}

fn requested(names: &[&str]) -> Vec<RequestedOutput> {
    names
        .iter()
        .map(|name| RequestedOutput { name: (*name).into(), ..RequestedOutput::default() })
        .collect()
}

#[test]
fn everything_that_affects_the_response_changes_the_key() {
    let change = |change: &dyn Fn(&mut InferRequest)| {
        let mut request = request();
        change(&mut request);
        identity("m", 1, "", &[]).key(&request)
    };
    let tensor = |at: usize, datatype: DataType, shape: Vec<i64>, data: Vec<u8>| {
        change(&move |r| {
            r.inputs[at].tensor =
                Tensor { datatype, shape: shape.clone(), data: data.clone().into() }
        })
    };
    let numbers = vec![1, 0, 0, 0, 2, 0, 0, 0];
    let parameter = |value: Parameter| change(&move |r| r.parameters[0].1 = value.clone());
    let keys = [
        change(&|_| {}),
        tensor(0, DataType::Int32, vec![2, 1], numbers.clone()),
        tensor(0, DataType::Fp32, vec![1, 2], numbers.clone()),
        tensor(0, DataType::Int32, vec![1, 2], vec![9, 0, 0, 0, 2, 0, 0, 0]),
        tensor(0, DataType::Int32, vec![1, 2, 1], numbers),
        change(&|r| r.inputs.swap(0, 1)),
        change(&|r| r.inputs.truncate(1)),
        change(&|r| r.inputs[1].name = "C".into()),
        // The same bytes, split differently between the inputs.
        change(&|r| {
            r.inputs = vec![
                input("A", DataType::Int32, &[1, 3], &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]),
                input("B", DataType::Int32, &[1, 1], &[4, 0, 0, 0]),
            ];
        }),
        change(&|r| r.outputs = requested(&["X"])),
        change(&|r| r.outputs = requested(&["Y"])),
        change(&|r| r.outputs = requested(&["X", "Y"])),
        change(&|r| r.parameters.clear()),
        parameter(Parameter::Int(2)),
        parameter(Parameter::Uint(1)),
        parameter(Parameter::Bool(true)),
        parameter(Parameter::Double(1.0)),
        parameter(Parameter::String("1".into())),
        change(&|r| r.parameters[0].0 = "pp".into()),
        identity("n", 1, "", &[]).key(&request()),
        identity("m", 2, "", &[]).key(&request()),
        identity("m", 1, "parameters { key: 'k' value { string_value: 'v' } }", &[])
            .key(&request()),
        identity("m", 1, "", &[("model.onnx", "weights")]).key(&request()),
        identity("m", 1, "", &[("model.onnx", "Weights")]).key(&request()),
        identity("m", 1, "", &[("model.onn", "xweights")]).key(&request()),
        identity("m", 1, "", &[("model.onnx", "weights"), ("b", "")]).key(&request()),
    ];
    let different: HashSet<Key> = keys.iter().copied().collect();
    assert_eq!(different.len(), keys.len());
}

#[test]
fn other_fields_do_not_change_the_key() {
    let same = |change: &dyn Fn(&mut InferRequest)| {
        let mut changed = request();
        change(&mut changed);
        let identity = identity("m", 1, "", &[]);
        assert_eq!(identity.key(&changed), identity.key(&request()));
    };
    same(&|r| r.id = "another".into());
    same(&|r| (r.priority, r.timeout_us) = (2, 1000));
    same(&|r| r.timeline.received = Instant(7));
    same(&|r| r.parameters.reverse());
    same(&|r| {
        let data = r.inputs[0].tensor.data.as_slice().to_vec();
        let pieces: Vec<Bytes> = data.chunks(3).map(Bytes::copy_from_slice).collect();
        r.inputs[0].tensor.data = Data::from(pieces);
    });
    let group = "instance_group { kind: KIND_CPU count: 3 }";
    assert_eq!(identity("m", 1, group, &[]), identity("m", 1, "", &[]));
    let key = |outputs| identity("m", 1, "", &[]).key(&InferRequest { outputs, ..request() });
    assert_eq!(key(requested(&["X", "Y"])), key(requested(&["Y", "X", "Y"])));
}

fn response() -> InferResponse {
    let text = b"\x02\0\0\0hi\0\0\0\0";
    let tensor =
        |datatype, data: &[u8]| Tensor { datatype, shape: vec![1, 2], data: data.to_vec().into() };
    let outputs = vec![
        InferOutput {
            name: "X".into(),
            tensor: tensor(DataType::Int32, &[1, 2, 3, 4, 5, 6, 7, 8]),
        },
        InferOutput { name: "Y".into(), tensor: tensor(DataType::Bytes, text) },
    ];
    let parameters = vec![
        ("b".into(), Parameter::Bool(true)),
        ("i".into(), Parameter::Int(-1)),
        ("u".into(), Parameter::Uint(u64::MAX)),
        ("d".into(), Parameter::Double(0.5)),
        ("s".into(), Parameter::String("text".into())),
    ];
    InferResponse { id: "first".into(), outputs, parameters, ..InferResponse::default() }
}

#[test]
fn a_response_from_the_cache_has_the_id_of_its_request() {
    let entry = Entry::copy_of(&response());
    let timeline = Timeline { received: Instant(3), ..Timeline::default() };
    let answer = entry.to_response(
        &config(""),
        7,
        &InferRequest { id: "second".into(), timeline, ..request() },
    );
    assert_eq!(
        (answer.id.as_str(), answer.model_name.as_str(), answer.model_version.as_str()),
        ("second", "m", "7")
    );
    assert_eq!((answer.timeline, &answer.outputs), (timeline, &response().outputs));
    assert_eq!(answer.parameters, response().parameters);
    let original = response();
    assert_eq!((Entry::size_of(&original), entry.size() > 18), (entry.size(), true));
    let elsewhere = Entry::copy_of(&original).outputs()[0].tensor.data.pieces()[0].as_ptr();
    assert_ne!(elsewhere, original.outputs[0].tensor.data.pieces()[0].as_ptr(), "shares memory");
}

#[test]
fn only_bytes_of_an_entry_are_decoded() {
    let key = identity("m", 1, "", &[]).key(&request());
    let bytes = Bytes::from(Entry::encode(&response(), &key));
    let entry = Entry::decode(&bytes, &key).unwrap();
    assert_eq!(entry, Entry::copy_of(&response()));
    assert_eq!(entry.check(&config(""), &request(), 1), Ok(()));
    let other = identity("m", 2, "", &[]).key(&request());
    assert_eq!(Entry::decode(&bytes, &other), Err(Invalid::Key));
    assert_eq!(Entry::decode(&Bytes::from_static(b"rubbish"), &key), Err(Invalid::Format));
    for len in 0..bytes.len() {
        assert!(Entry::decode(&bytes.slice(..len), &key).is_err(), "cut at {len}");
    }
    assert_eq!(Entry::decode(&[&bytes[..], b"x"].concat().into(), &key), Err(Invalid::Contents));
}

#[test]
fn an_entry_must_match_the_model_and_the_request() {
    let fits = |change: &dyn Fn(&mut InferResponse), outputs: &[&str], rows| {
        let mut response = response();
        change(&mut response);
        let request = InferRequest { outputs: requested(outputs), ..request() };
        Entry::copy_of(&response).check(&config(""), &request, rows).is_ok()
    };
    assert!(fits(&|_| {}, &[], 1) && fits(&|_| {}, &["Y", "X"], 1));
    assert!(fits(&|r| r.outputs.truncate(1), &["X"], 1));
    assert!(!fits(&|_| {}, &["X"], 1), "an output was not requested");
    assert!(!fits(&|_| {}, &[], 2), "another batch size");
    assert!(fits(&|r| r.outputs.reverse(), &[], 1), "a model determines the order of its outputs");
    assert!(!fits(&|r| r.outputs[1] = r.outputs[0].clone(), &[], 1), "an output occurs twice");
    assert!(!fits(&|r| r.outputs[0].name = "Z".into(), &[], 1), "the model has no such output");
    assert!(
        !fits(&|r| r.outputs[0].tensor.datatype = DataType::Fp32, &[], 1),
        "the model has another datatype"
    );
}

proptest! {
    /// Decoding changed bytes always ends, and the result is consistent.
    #[test]
    fn changed_bytes_are_decoded_safely(changes in proptest::collection::vec((0usize..400, any::<u8>()), 1..6)) {
        let key = identity("m", 1, "", &[]).key(&request());
        let mut bytes = Entry::encode(&response(), &key);
        let len = bytes.len();
        changes.iter().for_each(|(at, value)| bytes[37 + at % (len - 37)] = *value);
        if let Ok(entry) = Entry::decode(&bytes.into(), &key) {
            for output in entry.outputs() {
                let tensor = &output.tensor;
                let size = crate::tensor::byte_size(tensor.datatype, &tensor.shape);
                prop_assert!(size.is_none_or(|size| size == tensor.data.len() as u64));
            }
        }
    }

    /// Compares with a list in order of use.
    #[test]
    fn the_least_recently_used_are_evicted(
        capacity in 0u64..40,
        steps in proptest::collection::vec((any::<bool>(), 0u64..12, 0u64..20), 0..200),
    ) {
        let mut lru = Lru::new(capacity);
        let mut list: Vec<(u64, u64, usize)> = Vec::new();
        for (step, (insert, name, size)) in steps.into_iter().enumerate() {
            let key = identity("m", name, "", &[]).key(&InferRequest::default());
            if insert && size > capacity {
                prop_assert_eq!(lru.insert(key, step, size), Err(step));
                continue;
            }
            let found = list.iter().position(|(other, ..)| *other == name).map(|at| list.remove(at));
            list.extend(found);
            if !insert {
                prop_assert_eq!(lru.get(&key).copied(), found.map(|(.., value)| value));
                continue;
            }
            let result = lru.insert(key, step, size);
            if found.is_some() {
                prop_assert_eq!(result, Err(step));
                continue;
            }
            let mut evicted = vec![];
            list.push((name, size, step));
            while list.iter().map(|(_, size, _)| size).sum::<u64>() > capacity {
                evicted.push(list.remove(0).2);
            }
            prop_assert_eq!(result, Ok(evicted));
            prop_assert_eq!(lru.used(), list.iter().map(|(_, size, _)| size).sum::<u64>());
            prop_assert_eq!((lru.len(), lru.is_empty()), (list.len(), list.is_empty()));
            prop_assert!(lru.used() <= lru.capacity());
        }
    }
}
