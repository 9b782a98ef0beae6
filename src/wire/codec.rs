//! Encoding and decoding of frames.

use super::{
    BatchRequest, Credits, Details, Device, Done, Execute, InputBlock, Load, Loaded, OutputBlock, PREFIX, Piece,
    Placement, Response, Resumed, SequenceStep, ToFrontend, ToWorker, WireError,
};
use crate::error::ErrorCode;
use crate::id::CorrelationId;
use crate::infer::Parameter;
use crate::tensor::DataType;
use crate::timeline::{ComputeStamps, Instant};

/// A frame that cannot be understood: which field, and the value found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bad frame from the other process: {field} is {value}")]
pub struct DecodeError {
    field: &'static str,
    value: u64,
}

impl DecodeError {
    pub(super) fn new(field: &'static str, value: u64) -> Self {
        Self { field, value }
    }
}

pub(super) type Result<T> = std::result::Result<T, DecodeError>;

impl ToWorker {
    /// Appends the frame, length included, to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        framed(out, |out| match self {
            Self::Load(load) => {
                out.push(1);
                load.put(out);
            }
            Self::Execute(execute) => {
                out.push(2);
                execute.put(out);
            }
            Self::Release(offsets) => {
                out.push(3);
                offsets.put(out);
            }
            Self::Shutdown => out.push(4),
            Self::Metrics(text) => {
                out.push(5);
                text.put(out);
            }
            Self::SequenceEnded(keys) => {
                out.push(6);
                keys.put(out);
            }
            Self::Credits(credits) => {
                out.push(7);
                credits.put(out);
            }
            Self::Forget(regions) => {
                out.push(8);
                regions.put(out);
            }
            Self::Answer(answer) => {
                out.push(9);
                answer.put(out);
            }
            Self::GivenUp(batch, request) => {
                out.push(10);
                (*batch, *request).put(out);
            }
            Self::AskReady => out.push(11),
        });
    }
}

impl ToFrontend {
    /// Appends the frame, length included, to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        framed(out, |out| match self {
            Self::Loaded(loaded) => {
                out.push(1);
                loaded.put(out);
            }
            Self::LoadFailed(message) => {
                out.push(2);
                message.put(out);
            }
            Self::Done(done) => {
                out.push(3);
                done.put(out);
            }
            Self::Response(response) => {
                out.push(4);
                response.put(out);
            }
            Self::Call(call) => {
                out.push(5);
                call.put(out);
            }
            Self::Manage(manage) => {
                out.push(6);
                manage.put(out);
            }
            Self::Taken(call, taken) => {
                out.push(7);
                (*call, *taken).put(out);
            }
            Self::Abandoned(call) => {
                out.push(8);
                call.put(out);
            }
            Self::Returned(loans) => {
                out.push(9);
                loans.put(out);
            }
            Self::Ready(ready) => {
                out.push(10);
                ready.put(out);
            }
        });
    }
}

/// Reads one payload that the frontend sent.
///
/// # Errors
/// Anything that is not exactly one well-formed frame.
pub fn decode_to_worker(payload: &[u8]) -> Result<ToWorker> {
    whole(payload, |input| {
        Ok(match u8::get(input)? {
            1 => ToWorker::Load(load(input)?),
            2 => ToWorker::Execute(Wire::get(input)?),
            3 => ToWorker::Release(Wire::get(input)?),
            4 => ToWorker::Shutdown,
            5 => ToWorker::Metrics(Wire::get(input)?),
            6 => ToWorker::SequenceEnded(Wire::get(input)?),
            7 => ToWorker::Credits(Wire::get(input)?),
            8 => ToWorker::Forget(Wire::get(input)?),
            9 => ToWorker::Answer(Wire::get(input)?),
            10 => {
                let (batch, request) = Wire::get(input)?;
                ToWorker::GivenUp(batch, request)
            }
            11 => ToWorker::AskReady,
            kind => return Err(DecodeError::new("frame kind", kind.into())),
        })
    })
}

/// Of a frame of another version nothing but the version can be read, and whoever reads it must be able to say so.
fn load(input: &mut &[u8]) -> Result<Load> {
    let wire_version = u32::get(&mut &**input)?;
    if wire_version == super::VERSION {
        return Wire::get(input);
    }
    *input = &[];
    Ok(Load { wire_version, ..Load::default() })
}

/// Reads one payload that a worker sent.
///
/// # Errors
/// Anything that is not exactly one well-formed frame.
pub fn decode_to_frontend(payload: &[u8]) -> Result<ToFrontend> {
    whole(payload, |input| {
        Ok(match u8::get(input)? {
            1 => ToFrontend::Loaded(Wire::get(input)?),
            2 => ToFrontend::LoadFailed(Wire::get(input)?),
            3 => ToFrontend::Done(Wire::get(input)?),
            4 => ToFrontend::Response(Wire::get(input)?),
            5 => ToFrontend::Call(Wire::get(input)?),
            6 => ToFrontend::Manage(Wire::get(input)?),
            7 => {
                let (call, taken) = Wire::get(input)?;
                ToFrontend::Taken(call, taken)
            }
            8 => ToFrontend::Abandoned(Wire::get(input)?),
            9 => ToFrontend::Returned(Wire::get(input)?),
            10 => ToFrontend::Ready(Wire::get(input)?),
            kind => return Err(DecodeError::new("frame kind", kind.into())),
        })
    })
}

/// Writes the payload with its length in front.
fn framed(out: &mut Vec<u8>, payload: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; PREFIX]);
    payload(out);
    let length = out.len() - start - PREFIX;
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    out[start..start + PREFIX].copy_from_slice(&length.to_le_bytes());
}

/// Reads a payload that must be used up.
pub(super) fn whole<T>(payload: &[u8], read: impl FnOnce(&mut &[u8]) -> Result<T>) -> Result<T> {
    let mut input = payload;
    let value = read(&mut input)?;
    if !input.is_empty() {
        return Err(DecodeError::new("bytes left over", input.len() as u64));
    }
    Ok(value)
}

/// A value with a place on the wire. `put` and `get` are mirror images.
pub(super) trait Wire: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn get(input: &mut &[u8]) -> Result<Self>;
}

pub(super) fn take<'a>(input: &mut &'a [u8], length: usize) -> Result<&'a [u8]> {
    let (taken, rest) = input.split_at_checked(length).ok_or(DecodeError::new("bytes missing", length as u64))?;
    *input = rest;
    Ok(taken)
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Wire for $number {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn get(input: &mut &[u8]) -> Result<Self> {
                let bytes = take(input, size_of::<Self>())?;
                Ok(Self::from_le_bytes(bytes.try_into().map_err(|_| DecodeError::new("number", 0))?))
            }
        }
    )*};
}
numbers!(u8, u16, u32, u64, i64, f64);

/// Mirror images for a struct, field by field in the order given.
macro_rules! fields {
    ($name:ident { $($field:ident),* }) => {
        impl Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }
            fn get(input: &mut &[u8]) -> Result<Self> {
                $(let $field = Wire::get(input)?;)*
                Ok(Self { $($field),* })
            }
        }
    };
}
pub(super) use fields;

fields!(Load {
    wire_version,
    model,
    version,
    instance,
    directory,
    config,
    initial_states,
    threads,
    metrics,
    auto_detect,
    device
});
fields!(Device { number, uuid, visible, pinned });
fields!(Execute { batch, requests, inputs, outputs, released, flags, placements, elements, resumed });
fields!(Placement { request, output, region, offset, len });
fields!(Resumed { request, sent, taken });
fields!(BatchRequest { id, rows, parameters, sequence, details });
fields!(Details { correlation, start, end, priority, timeout_us, outputs, traced, trace_context, ragged });
fields!(SequenceStep { key, start, end });
fields!(InputBlock { input, datatype, shape, offset, len, pieces });
fields!(Piece { region, request, offset, len, elements });
fields!(Loaded { engine, memory, details, asked, pinned });
fields!(Done { batch, stamps, error, failed, outputs, parameters, rescheduled, open, held });
fields!(Response { batch, request, outputs, parameters, error, last, empty, stamps });
fields!(Credits { batch, request, taken, released });
fields!(WireError { code, message, of_region });
fields!(OutputBlock { output, requests, datatype, shape, offset, len, placed, lent });
fields!(ComputeStamps { start, input_end, output_start, end });

/// The fewest bytes that any element of a list takes; bounds how many a hostile count can make us reserve.
fn bounded_count(input: &mut &[u8]) -> Result<usize> {
    let count = u32::get(input)? as usize;
    if count > input.len() {
        return Err(DecodeError::new("count", count as u64));
    }
    Ok(count)
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        u32::try_from(self.len()).unwrap_or(u32::MAX).put(out);
        for item in self {
            item.put(out);
        }
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        let count = bounded_count(input)?;
        let mut items = Vec::with_capacity(count.min(1024));
        for _ in 0..count {
            items.push(T::get(input)?);
        }
        Ok(items)
    }
}

impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        u8::from(*self).put(out);
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        match u8::get(input)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(DecodeError::new("flag", other.into())),
        }
    }
}

impl Wire for String {
    fn put(&self, out: &mut Vec<u8>) {
        u32::try_from(self.len()).unwrap_or(u32::MAX).put(out);
        out.extend_from_slice(self.as_bytes());
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        let length = bounded_count(input)?;
        let bytes = take(input, length)?;
        let text = str::from_utf8(bytes)
            .map_err(|e| DecodeError::new("text, not UTF-8 after byte", e.valid_up_to() as u64))?;
        Ok(text.to_owned())
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            None => out.push(0),
            Some(value) => {
                out.push(1);
                value.put(out);
            }
        }
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        match u8::get(input)? {
            0 => Ok(None),
            1 => Ok(Some(T::get(input)?)),
            other => Err(DecodeError::new("option", other.into())),
        }
    }
}

impl<T: Wire> Wire for Box<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (**self).put(out);
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        T::get(input).map(Box::new)
    }
}

impl Wire for CorrelationId {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Uint(id) => {
                out.push(0);
                id.put(out);
            }
            Self::String(id) => {
                out.push(1);
                id.put(out);
            }
        }
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        match u8::get(input)? {
            0 => Ok(Self::Uint(u64::get(input)?)),
            1 => Ok(Self::String(String::get(input)?)),
            other => Err(DecodeError::new("kind of correlation id", other.into())),
        }
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        Ok((A::get(input)?, B::get(input)?))
    }
}

impl Wire for Instant {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        Ok(Self(u64::get(input)?))
    }
}

impl Wire for DataType {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(self.number());
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        let number = u8::get(input)?;
        Self::from_number(number).ok_or(DecodeError::new("datatype", number.into()))
    }
}

impl Wire for ErrorCode {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(self.to_wire());
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        let number = u8::get(input)?;
        Self::from_wire(number).ok_or(DecodeError::new("error code", number.into()))
    }
}

impl Wire for Parameter {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Bool(value) => {
                out.push(0);
                u8::from(*value).put(out);
            }
            Self::Int(value) => {
                out.push(1);
                value.put(out);
            }
            Self::Uint(value) => {
                out.push(2);
                value.put(out);
            }
            Self::Double(value) => {
                out.push(3);
                value.put(out);
            }
            Self::String(value) => {
                out.push(4);
                value.put(out);
            }
        }
    }
    fn get(input: &mut &[u8]) -> Result<Self> {
        Ok(match u8::get(input)? {
            0 => Self::Bool(u8::get(input)? != 0),
            1 => Self::Int(i64::get(input)?),
            2 => Self::Uint(u64::get(input)?),
            3 => Self::Double(f64::get(input)?),
            4 => Self::String(String::get(input)?),
            kind => return Err(DecodeError::new("parameter kind", kind.into())),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{Answer, AnswerOutput, Call, CallInput, CallRequest, FIRST_LOAN, Manage, Verb};
    use super::*;
    use proptest::prelude::*;

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
        let stamps =
            ComputeStamps { start: Instant(1), input_end: Instant(2), output_start: Instant(3), end: Instant(4) };
        let error = WireError { code: ErrorCode::InvalidArg, message: "no".into(), of_region: true };
        let (datatype, requests) = (DataType::Bytes, vec![0, 2]);
        let (shape, lent) = (vec![1, 2], Some(7));
        let output = OutputBlock { output: 0, requests, datatype, shape, offset: 0, len: 9, placed: true, lent };
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
                placed: false,
                lent: None,
            }],
            parameters: vec![("p".into(), Parameter::String("x".into()))],
            error: Some(WireError { code: ErrorCode::Cancelled, message: String::new(), of_region: false }),
            last: true,
            empty: false,
            stamps: ComputeStamps { end: Instant(5), ..ComputeStamps::default() },
        })
    }

    fn call() -> ToFrontend {
        let (name, shape) = ("X".to_owned(), vec![1]);
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
        let input = CallInput { name, datatype: DataType::Fp16, shape, offset: 64, len: 2, lent: Some(3) };
        ToFrontend::Call(Call { call: 5, request, inputs: vec![input] })
    }

    fn answer() -> ToWorker {
        let (name, shape) = ("Y".to_owned(), vec![2]);
        ToWorker::Answer(Answer {
            call: 5,
            version: "1".into(),
            outputs: vec![AnswerOutput { name, datatype: DataType::Uint8, shape, offset: 128, len: 2 }],
            loan: FIRST_LOAN,
            parameters: vec![("p".into(), Parameter::Uint(1))],
            error: Some(WireError { code: ErrorCode::NotFound, message: "no".into(), of_region: false }),
            empty: true,
            last: true,
            ready: true,
        })
    }

    fn payload(frame: &[u8]) -> &[u8] {
        let length = super::super::payload_length(frame[..PREFIX].try_into().unwrap()).unwrap();
        assert_eq!(frame.len(), PREFIX + length);
        &frame[PREFIX..]
    }

    #[test]
    fn frames_round_trip() {
        let load = ToWorker::Load(Load {
            wire_version: super::super::VERSION,
            model: "m".into(),
            version: 3,
            instance: "m_0".into(),
            directory: "/r/m/3".into(),
            config: vec![1, 2],
            initial_states: "/r/m/initial_state".into(),
            threads: 2,
            metrics: "mode: prometheus".into(),
            auto_detect: true,
            device: Some(Device { number: 3, uuid: "GPU-3".into(), visible: vec![3, 0], pinned: 1 << 20 }),
        });
        let metrics = ToWorker::Metrics("mode: both".into());
        let ended = ToWorker::SequenceEnded(vec![3, u64::MAX]);
        let credits = ToWorker::Credits(Credits { batch: 1, request: 2, taken: 16, released: vec![64] });
        let (release, forget) = (ToWorker::Release(vec![1, 2]), ToWorker::Forget(vec![9]));
        let given_up = ToWorker::GivenUp(7, 1);
        let frames =
            [load, execute(), release, ToWorker::Shutdown, metrics, ended, credits, forget, answer(), given_up];
        for frame in frames.into_iter().chain([ToWorker::AskReady]) {
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            assert_eq!(decode_to_worker(payload(&bytes)), Ok(frame));
        }
        let loaded =
            ToFrontend::Loaded(Loaded { engine: "tract".into(), memory: 5, details: true, asked: true, pinned: 6 });
        let manage = |verb| ToFrontend::Manage(Manage { call: 8, model: "m".into(), verb });
        let verbs =
            [Verb::Load(vec![("config".into(), vec![b'{', b'}'])]), Verb::Unload(true), Verb::IsReady("3".into())];
        let more = [ToFrontend::Taken(5, 2), ToFrontend::Abandoned(5), ToFrontend::Returned(vec![FIRST_LOAN])];
        let frames =
            [loaded, ToFrontend::LoadFailed("why".into()), done(), response(), call(), ToFrontend::Ready(true)];
        for frame in frames.into_iter().chain(more).chain(verbs.map(manage)) {
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            assert_eq!(decode_to_frontend(payload(&bytes)), Ok(frame));
        }
    }

    #[test]
    fn of_another_version_only_the_version_is_read() {
        let mut bytes = vec![1];
        (super::super::VERSION + 1).put(&mut bytes);
        bytes.extend_from_slice(b"what that version says");
        let expected = Load { wire_version: super::super::VERSION + 1, ..Load::default() };
        assert_eq!(decode_to_worker(&bytes), Ok(ToWorker::Load(expected)));
        assert!(decode_to_worker(&bytes[..4]).is_err());
    }

    #[test]
    fn every_shortened_frame_is_refused() {
        let mut bytes = Vec::new();
        execute().encode(&mut bytes);
        for length in 0..payload(&bytes).len() {
            assert!(decode_to_worker(&payload(&bytes)[..length]).is_err(), "{length} bytes");
        }
        bytes.push(0);
        assert_eq!(decode_to_worker(&bytes[PREFIX..]), Err(DecodeError::new("bytes left over", 1)));
    }

    #[test]
    fn a_huge_count_reserves_nothing() {
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
}
