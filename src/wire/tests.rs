//! Frames round-trip, and no bytes make the decoder panic.

use proptest::prelude::*;

use super::codec::*;
use super::*;
use crate::error::ErrorCode;
use crate::id::CorrelationId;
use crate::infer::Parameter;
use crate::tensor::DataType;
use crate::timeline::{ComputeStamps, Instant};

fn execute() -> ToWorker {
    ToWorker::Execute(Execute {
        batch: 7,
        requests: vec![
            BatchRequest {
                id: "a".into(),
                rows: 2,
                parameters: vec![("p".into(), Parameter::Double(0.5))],
                sequence: Some(SequenceStep { key: 7, start: true, end: false }),
                details: Some(Box::new(Details {
                    correlation: CorrelationId::String("s".into()),
                    start: true,
                    end: false,
                    priority: 2,
                    timeout_us: 3,
                    outputs: vec![1],
                    input_order: vec![2, 0],
                    traced: true,
                    trace_context: Some("{}".into()),
                    ragged: vec![(0, vec![1, 3])],
                })),
            },
            BatchRequest::default(),
        ],
        inputs: vec![InputBlock {
            input: 1,
            datatype: DataType::Bf16,
            shape: vec![2, -1],
            offset: 64,
            len: 4,
            pieces: vec![Piece { region: 9, request: 1, offset: 0, len: 4, elements: 2 }],
        }],
        outputs: vec![0, 3],
        released: vec![128],
        flags: 1,
        placements: vec![Placement { request: 1, output: 3, region: 9, offset: 1 << 40, len: 5 }],
        elements: vec![(3, vec![2, 0])],
        resumed: vec![Resumed { request: 1, sent: 40, taken: 33 }],
    })
}

fn done() -> ToFrontend {
    let stamps = ComputeStamps {
        start: Instant(1),
        input_end: Instant(2),
        output_start: Instant(3),
        end: Instant(4),
    };
    let error = WireError { code: ErrorCode::InvalidArg, message: "no".into(), of_region: true };
    let output = OutputBlock {
        output: 0,
        requests: vec![0, 2],
        datatype: DataType::Bytes,
        shape: vec![1, 2],
        offset: 0,
        len: 9,
        in_client_memory: true,
        loan: Some(7),
    };
    ToFrontend::Done(Done {
        batch: 7,
        stamps,
        error: Some(error.clone()),
        failed: vec![(1, error)],
        outputs: vec![output],
        parameters: vec![(0, vec![("p".into(), Parameter::Bool(true))])],
        rescheduled: vec![2],
        open: vec![3],
        held: true,
    })
}

fn response() -> ToFrontend {
    ToFrontend::Response(Response {
        batch: 9,
        request: 3,
        outputs: vec![OutputBlock {
            output: 1,
            requests: Vec::new(),
            datatype: DataType::Int32,
            shape: vec![1],
            offset: 64,
            len: 4,
            in_client_memory: false,
            loan: None,
        }],
        parameters: vec![("p".into(), Parameter::String("x".into()))],
        error: Some(WireError {
            code: ErrorCode::Cancelled,
            message: String::new(),
            of_region: false,
        }),
        last: true,
        empty: false,
        stamps: ComputeStamps { end: Instant(5), ..ComputeStamps::default() },
    })
}

fn call() -> ToFrontend {
    let request = CallRequest {
        model: "m".into(),
        version: "1".into(),
        id: "i".into(),
        correlation: CorrelationId::Uint(9),
        start: false,
        end: true,
        priority: 1,
        timeout_us: 2,
        outputs: vec!["Y".into()],
        parameters: vec![("p".into(), Parameter::Int(-1))],
        decoupled: true,
        parent: Some((7, 1)),
    };
    let input = CallInput {
        name: "X".to_owned(),
        datatype: DataType::Fp16,
        shape: vec![1],
        offset: 64,
        len: 2,
        loan: Some(3),
    };
    ToFrontend::Call(Call { call: 5, request, inputs: vec![input] })
}

fn answer() -> ToWorker {
    ToWorker::Answer(Answer {
        call: 5,
        version: "1".into(),
        outputs: vec![AnswerOutput {
            name: "Y".to_owned(),
            datatype: DataType::Uint8,
            shape: vec![2],
            offset: 128,
            len: 2,
        }],
        loan: FIRST_CALL_LOAN,
        parameters: vec![("p".into(), Parameter::Uint(1))],
        error: Some(WireError {
            code: ErrorCode::NotFound,
            message: "no".into(),
            of_region: false,
        }),
        empty: true,
        last: true,
        holds: true,
    })
}

fn payload(frame: &[u8]) -> &[u8] {
    let length = payload_length(frame[..PREFIX].try_into().unwrap()).unwrap();
    assert_eq!(frame.len(), PREFIX + length);
    &frame[PREFIX..]
}

#[test]
fn frames_round_trip() {
    let load = ToWorker::Load(Load {
        wire_version: VERSION,
        model: "m".into(),
        version: 3,
        instance: "m_0".into(),
        directory: "/r/m/3".into(),
        model_directory: "/r/m".into(),
        backend_settings: vec![("plugins".into(), "/x.so".into())],
        verbose: true,
        config: vec![1, 2],
        initial_states: "/r/m/initial_state".into(),
        threads: 2,
        spin_us: 200,
        metrics: "[]".into(),
        auto_detect: true,
        device: Some(Device {
            number: 3,
            uuid: "GPU-3".into(),
            visible: vec![3, 0],
            pinned: 1 << 20,
        }),
    });
    let metrics = ToWorker::Metrics("mode: both".into());
    let ended = ToWorker::SequenceEnded(vec![3, u64::MAX]);
    let credits =
        ToWorker::Credits(Credits { batch: 1, request: 2, taken: 16, released: vec![64] });
    let release = ToWorker::Release(vec![1, 2]);
    let unmap = ToWorker::Unmap(vec![9]);
    let cancel = ToWorker::CancelRequest(7, 1);
    let frames = [
        load,
        execute(),
        release,
        ToWorker::Shutdown,
        metrics,
        ended,
        credits,
        unmap,
        answer(),
        cancel,
    ];
    for frame in frames.into_iter().chain([ToWorker::CheckReadiness]) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        assert_eq!(decode_to_worker(payload(&bytes)), Ok(frame));
    }
    let loaded = ToFrontend::Loaded(Loaded {
        engine: "tract".into(),
        memory: 5,
        details: true,
        has_readiness_check: true,
        pinned: 6,
    });
    let verbs = [
        Verb::Load(vec![("config".into(), vec![b'{', b'}'])]),
        Verb::Unload(true),
        Verb::IsReady("3".into()),
        Verb::IsDecoupled("3".into()),
    ];
    let more = [
        ToFrontend::Taken(5, 2),
        ToFrontend::CancelCall(5),
        ToFrontend::Returned(vec![FIRST_CALL_LOAN]),
    ];
    let more = more.into_iter().chain([ToFrontend::RegionsLost(vec![9, 3])]);
    let frames = [
        loaded,
        ToFrontend::LoadFailed("why".into()),
        done(),
        response(),
        call(),
        ToFrontend::Ready(true),
        ToFrontend::LoadProgress(43),
        ToFrontend::Activity(BackendActivity {
            batch: 7,
            request: 1,
            name: "DECODE_START".into(),
            at: Instant(5),
        }),
    ];
    for frame in frames
        .into_iter()
        .chain(more)
        .chain(verbs.map(|verb| ToFrontend::Manage(Manage { call: 8, model: "m".into(), verb })))
    {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        assert_eq!(decode_to_frontend(payload(&bytes)), Ok(frame));
    }
}

#[test]
fn decodes_only_the_version_of_another_version() {
    let mut bytes = vec![1];
    (VERSION + 1).put(&mut bytes);
    bytes.extend_from_slice(b"fields of that version");
    let expected = Load { wire_version: VERSION + 1, ..Load::default() };
    assert_eq!(decode_to_worker(&bytes), Ok(ToWorker::Load(expected)));
    assert!(decode_to_worker(&bytes[..4]).is_err());
}

#[test]
fn refuses_truncated_frames() {
    let mut bytes = Vec::new();
    execute().encode(&mut bytes);
    for length in 0..payload(&bytes).len() {
        assert!(decode_to_worker(&payload(&bytes)[..length]).is_err(), "{length} bytes");
    }
    bytes.push(0);
    assert_eq!(decode_to_worker(&bytes[PREFIX..]), Err(DecodeError::new("bytes left over", 1)));
}

#[test]
fn refuses_a_count_beyond_the_remaining_bytes() {
    let mut payload = vec![3];
    payload.extend_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(decode_to_worker(&payload), Err(DecodeError::new("count", u64::from(u32::MAX))));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(payload in prop::collection::vec(any::<u8>(), 0..200), position in any::<prop::sample::Index>(), value in any::<u8>()) {
        let _ = decode_to_worker(&payload);
        let _ = decode_to_frontend(&payload);
        for frame in [done(), response(), call()] {
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            let index = PREFIX + position.index(bytes.len() - PREFIX);
            bytes[index] = value;
            let _ = decode_to_frontend(&bytes[PREFIX..]);
        }
    }
}
