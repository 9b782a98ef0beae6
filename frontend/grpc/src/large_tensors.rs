//! Transfers the large tensors of `ModelInfer` past the library's message buffers, which would copy
//! every byte once in each direction. The large raw inputs of a request are removed from its body
//! before the message is decoded, and stored in the call's extensions as the pieces in which they
//! were received. The raw outputs of an answer are stored in its extensions and appended
//! to the encoded message when the body is sent. Protobuf allows fields in any order, so clients
//! see no difference.
//!
//! Anything but a plain uncompressed message is left to the library, which reports errors.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use http::{Request, Response};
use http_body::Frame;
use pharos::data::{Collector, Data};
use tonic::body::Body;

use pharos_listener::body_timeout::BoxError;
use pharos_listener::receiving::grpc::bounded::MAX_FIELDS;

/// Smaller messages are not worth the effort.
const LARGE: usize = 32 << 10;
/// The size of a message's head: the compressed flag and the length (gRPC over HTTP/2,
/// "Length-Prefixed-Message").
const PREFIX: usize = 5;
/// `ModelInferRequest.raw_input_contents`, `ModelInferResponse.raw_output_contents`.
const RAW_INPUTS: u64 = 7;
const RAW_OUTPUTS: u64 = 6;
/// The wire type of length-delimited fields.
const LENGTH_DELIMITED: u64 = 2;

/// The raw inputs that were removed from the message, which has an empty entry in place of each.
#[derive(Clone, Debug, Default)]
pub(super) struct Inputs(Vec<(usize, Data)>);

impl Inputs {
    /// Merges these inputs with those in the message.
    pub(super) fn merge(self, raw: Vec<Bytes>) -> Vec<Data> {
        let mut all: Vec<Data> = raw.into_iter().map(Data::from).collect();
        for (place, data) in self.0 {
            if let Some(empty) = all.get_mut(place) {
                *empty = data;
            }
        }
        all
    }
}

/// The raw outputs that are not part of the message.
#[derive(Clone, Debug)]
pub(super) struct Outputs(Vec<Data>);

impl Outputs {
    /// Accepts outputs that are large but fit in a message; returns others as the error.
    pub(super) fn of(raw: Vec<Data>) -> Result<Self, Vec<Data>> {
        let len = raw.iter().map(Data::len).sum::<usize>();
        // Leave room for the rest of the message.
        if (LARGE..super::MAX_MESSAGE / 2).contains(&len) { Ok(Self(raw)) } else { Err(raw) }
    }
}

/// Marks a call whose answer may have [`Outputs`].
#[derive(Clone, Copy)]
pub(super) struct AllowsLargeOutputs;

/// Moves the large inputs of a call to its extensions. Completes when the whole message is received
/// or turns out not to qualify.
pub(super) async fn take<B>(request: Request<B>) -> Request<Rest<B>>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    let (mut parts, body) = request.into_parts();
    parts.extensions.insert(AllowsLargeOutputs);
    let mut rest = Rest { front: VecDeque::new(), then: None, body };
    if let Some(message) = read(&mut rest).await
        && let Some((message, inputs)) = split(message)
    {
        rest.front = [message].into();
        parts.extensions.insert(inputs);
    }
    Request::from_parts(parts, rest)
}

/// Reads a large message; `rest` keeps everything that was received. Returns `None` unless it is a
/// large uncompressed message.
async fn read<B>(rest: &mut Rest<B>) -> Option<Data>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    let mut came = Collector::default();
    let mut whole = None;
    while whole.is_none_or(|whole| came.len() < whole) {
        let frame = std::future::poll_fn(|cx| Pin::new(&mut rest.body).poll_frame(cx)).await;
        match frame.map(|frame| frame.map(Frame::into_data)) {
            Some(Ok(Ok(data))) => {
                rest.front.push_back(data.clone());
                if whole.is_none() {
                    let (prefix, _) = data.split_at_checked(PREFIX)?;
                    let [0, length @ ..] = <[u8; PREFIX]>::try_from(prefix).ok()? else {
                        return None;
                    };
                    let length = u32::from_be_bytes(length) as usize;
                    whole =
                        (LARGE..=super::MAX_MESSAGE).contains(&length).then_some(PREFIX + length);
                    whole?;
                }
                came.push(data);
            }
            other => {
                // Trailers, an error or the end: left to the library.
                let other = other.map(|frame| {
                    frame.map(|data| data.map_or_else(|trailers| trailers, Frame::data))
                });
                rest.then = Some(other.map(|frame| frame.map_err(Into::into)));
                return None;
            }
        }
    }
    let mut message = came.finish();
    let whole = whole.filter(|&whole| message.len() == whole)?;
    let _ = message.split_to(PREFIX);
    (message.len() + PREFIX == whole).then_some(message)
}

/// Removes the large inputs from a message. Returns the remaining message with its prefix, and the
/// inputs; `None` if the message has none or is malformed.
pub(super) fn split(mut message: Data) -> Option<(Bytes, Inputs)> {
    let mut head = BytesMut::with_capacity(1024);
    let mut inputs = Vec::new();
    let mut place = 0;
    head.put_bytes(0, PREFIX);
    let mut fields = 0;
    while !message.is_empty() {
        fields += 1;
        // The codec refuses the message.
        (fields <= MAX_FIELDS).then_some(())?;
        let tag = varint(&mut message, &mut head)?;
        let length = match tag & 7 {
            0 => {
                varint(&mut message, &mut head)?;
                continue;
            }
            1 => 8,
            LENGTH_DELIMITED => {
                let before = head.len();
                let length = usize::try_from(varint(&mut message, &mut head)?).ok()?;
                if tag >> 3 == RAW_INPUTS {
                    place += 1;
                    if length >= Collector::SMALL {
                        head.truncate(before);
                        head.put_u8(0);
                        inputs.push((place - 1, message.split_to(length)));
                        inputs.last().filter(|(_, data)| data.len() == length)?;
                        continue;
                    }
                }
                length
            }
            5 => 4,
            _ => return None,
        };
        let value = message.split_to(length);
        value.pieces().iter().for_each(|piece| head.put_slice(piece));
        (value.len() == length).then_some(())?;
    }
    let length = u32::try_from(head.len() - PREFIX).ok()?;
    head.get_mut(1..PREFIX)?.copy_from_slice(&length.to_be_bytes());
    (!inputs.is_empty()).then(|| (head.freeze(), Inputs(inputs)))
}

/// Moves a varint from `from` to `to` unchanged and returns its value.
fn varint(from: &mut Data, to: &mut BytesMut) -> Option<u64> {
    let mut value = 0u64;
    let mut count = 0u32;
    for &byte in from.pieces().iter().flatten() {
        value |= u64::from(byte & 0x7f).checked_shl(7 * count)?;
        count += 1;
        to.put_u8(byte);
        if byte & 0x80 == 0 {
            let _ = from.split_to(count as usize);
            return Some(value);
        }
        if count == 10 {
            return None;
        }
    }
    None
}

/// A body whose beginning was already read, and possibly changed.
pub(super) struct Rest<B> {
    front: VecDeque<Bytes>,
    /// The frame after `front` if it was not data; the inner `None` is the end of the body.
    then: Option<Option<Result<Frame<Bytes>, BoxError>>>,
    body: B,
}

impl<B> http_body::Body for Rest<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(data) = self.front.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        match self.then.take() {
            Some(None) => {
                self.then = Some(None);
                Poll::Ready(None)
            }
            Some(then) => Poll::Ready(then),
            None => Pin::new(&mut self.body).poll_frame(cx).map_err(Into::into),
        }
    }

    fn is_end_stream(&self) -> bool {
        let ended = match &self.then {
            Some(then) => then.is_none(),
            None => self.body.is_end_stream(),
        };
        self.front.is_empty() && ended
    }
}

/// Moves the outputs in an answer's extensions to its body.
pub(super) fn reassemble(mut response: Response<Body>) -> Response<Body> {
    match response.extensions_mut().remove::<Outputs>() {
        Some(Outputs(outputs)) => response
            .map(|body| Body::new(Whole { body, outputs: Some(outputs), more: VecDeque::new() })),
        None => response,
    }
}

/// A body of one message, followed by its outputs.
struct Whole {
    body: Body,
    outputs: Option<Vec<Data>>,
    more: VecDeque<Bytes>,
}

impl Whole {
    /// Returns the message with a length that includes the outputs, and the header of the first
    /// output; `more` gets the rest.
    fn join(&mut self, message: &Bytes, outputs: &[Data]) -> Option<Bytes> {
        let mut next = BytesMut::with_capacity(message.len() + 16);
        next.put_slice(message);
        let mut length = message.len().checked_sub(PREFIX)?;
        for output in outputs {
            let before = next.len();
            put_varint(&mut next, RAW_OUTPUTS << 3 | LENGTH_DELIMITED);
            put_varint(&mut next, output.len() as u64);
            length += next.len() - before + output.len();
            self.more.push_back(next.split().freeze());
            self.more.extend(output.pieces().iter().cloned());
        }
        let first = self.more.pop_front()?;
        let mut first = first.try_into_mut().unwrap_or_else(|first| BytesMut::from(&*first));
        first.get_mut(1..PREFIX)?.copy_from_slice(&u32::try_from(length).ok()?.to_be_bytes());
        Some(first.freeze())
    }
}

fn put_varint(to: &mut BytesMut, mut value: u64) {
    while value >= 0x80 {
        to.put_u8(u8::try_from(value & 0x7f).unwrap_or_default() | 0x80);
        value >>= 7;
    }
    to.put_u8(u8::try_from(value).unwrap_or_default());
}

impl http_body::Body for Whole {
    type Data = Bytes;
    type Error = tonic::Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(data) = self.more.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        let Some(outputs) = self.outputs.take() else { return Poll::Ready(frame) };
        // The library sends a message as one frame. Without a frame the call has failed and nothing
        // is appended.
        let joined = match frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
            Some(message) => self.join(message, &outputs).map(Frame::data),
            None => return Poll::Ready(frame),
        };
        Poll::Ready(Some(
            joined.ok_or_else(|| tonic::Status::internal("the answer has no valid length")),
        ))
    }

    fn is_end_stream(&self) -> bool {
        self.more.is_empty() && self.outputs.is_none() && self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::super::proto::{ModelInferRequest, ModelInferResponse};
    use super::*;

    /// A body of these frames, followed by an error if there is one.
    struct Frames(VecDeque<Bytes>, Option<BoxError>);

    impl http_body::Body for Frames {
        type Data = Bytes;
        type Error = BoxError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
            let data = self.0.pop_front().map(|data| Ok(Frame::data(data)));
            Poll::Ready(data.or_else(|| self.1.take().map(Err)))
        }
    }

    fn now<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    async fn all<B: http_body::Body<Data = Bytes> + Unpin>(mut body: B) -> (Vec<u8>, bool) {
        let mut bytes = Vec::new();
        loop {
            match std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                Some(Ok(frame)) => bytes.extend_from_slice(&frame.into_data().unwrap_or_default()),
                end => return (bytes, end.is_some()),
            }
        }
    }

    fn framed(message: &impl Message, flag: u8) -> Vec<u8> {
        let mut bytes = vec![flag];
        bytes.extend_from_slice(&u32::try_from(message.encoded_len()).unwrap().to_be_bytes());
        message.encode(&mut bytes).unwrap();
        bytes
    }

    fn cut(bytes: &[u8], cuts: &[usize]) -> VecDeque<Bytes> {
        let mut bytes = Bytes::copy_from_slice(bytes);
        let mut frames: VecDeque<Bytes> =
            cuts.iter().map(|&cut| bytes.split_to(cut.min(bytes.len()))).collect();
        frames.push_back(bytes);
        frames
    }

    fn request(lengths: &[usize]) -> ModelInferRequest {
        let raw = lengths
            .iter()
            .enumerate()
            .map(|(at, &length)| vec![u8::try_from(at).unwrap() + 1; length].into());
        ModelInferRequest {
            model_name: "m".repeat(300),
            id: "1".into(),
            raw_input_contents: raw.collect(),
            ..ModelInferRequest::default()
        }
    }

    fn taken(frames: VecDeque<Bytes>, fault: Option<BoxError>) -> (Vec<u8>, Inputs, bool) {
        now(async {
            let (parts, body) = take(Request::new(Frames(frames, fault))).await.into_parts();
            let inputs = parts.extensions.get::<Inputs>().cloned().unwrap_or_default();
            let (bytes, failed) = all(body).await;
            (bytes, inputs, failed)
        })
    }

    proptest! {
        #[test]
        fn the_frame_boundaries_of_a_request_do_not_matter(
            lengths in proptest::collection::vec(prop_oneof![0usize..6000, 30_000usize..80_000], 0..5),
            mut cuts in proptest::collection::vec(prop_oneof![1usize..400, 400usize..40_000], 0..20),
            first in 0usize..400,
        ) {
            let message = request(&lengths);
            cuts.insert(0, first);
            let (bytes, inputs, failed) = taken(cut(&framed(&message, 0), &cuts), None);
            prop_assert!(!failed);
            let mut head = ModelInferRequest::decode(&bytes[PREFIX..]).unwrap();
            prop_assert_eq!(&framed(&head, 0), &bytes);
            let large = lengths.iter().filter(|&&length| length >= Collector::SMALL).count();
            let apart = message.encoded_len() >= LARGE && first >= PREFIX;
            prop_assert_eq!(inputs.0.len(), if apart { large } else { 0 });
            let raw = inputs.merge(std::mem::take(&mut head.raw_input_contents));
            prop_assert_eq!(raw.into_iter().map(Data::join).collect::<Vec<_>>(), message.raw_input_contents);
            prop_assert_eq!((head.model_name, head.id), (message.model_name, message.id));
        }

        #[test]
        fn bytes_that_are_not_a_message_pass_unchanged(
            mut bytes in proptest::collection::vec(any::<u8>(), 32_768..50_000),
            cuts in proptest::collection::vec(1usize..20_000, 0..6),
        ) {
            let length = u32::try_from(bytes.len() - PREFIX).unwrap().to_be_bytes();
            bytes[..PREFIX].copy_from_slice(&[0, length[0], length[1], length[2], length[3]]);
            let (came, inputs, _) = taken(cut(&bytes, &cuts), None);
            prop_assert!(!inputs.0.is_empty() || came == bytes);
        }
    }

    #[test]
    fn compressed_short_and_truncated_messages_pass_unchanged() {
        let large = request(&[100_000, 5]);
        let whole = framed(&large, 0);
        let mut more = whole.clone();
        more.push(0);
        for bytes in
            [framed(&large, 1), framed(&request(&[20_000]), 0), whole[..90_000].to_vec(), more]
        {
            let (came, inputs, failed) = taken(cut(&bytes, &[1000, 50_000]), None);
            assert!(came == bytes && inputs.0.is_empty() && !failed);
        }
        let (came, inputs, failed) = taken(cut(&whole[..90_000], &[50_000]), Some("gone".into()));
        assert!(came == whole[..90_000] && inputs.0.is_empty() && failed);
    }

    #[test]
    fn outputs_are_appended_to_the_answer() {
        let head = ModelInferResponse {
            model_name: "m".into(),
            id: "7".into(),
            ..ModelInferResponse::default()
        };
        let raw: [Data; 3] = [
            vec![1; 70_000].into(),
            Data::new(),
            vec![Bytes::from(vec![2; 9]), Bytes::from(vec![3; 9000])].into(),
        ];
        let outputs = Outputs::of(raw.to_vec()).unwrap();
        let mut response = Response::new(Body::new(Frames(cut(&framed(&head, 0), &[]), None)));
        response.extensions_mut().insert(outputs);
        let (bytes, failed) = now(all(reassemble(response).into_body()));
        assert!(!failed);
        let whole = ModelInferResponse::decode(&bytes[PREFIX..]).unwrap();
        assert_eq!(bytes, framed(&whole, 0));
        let expected =
            ModelInferResponse { raw_output_contents: raw.map(Data::join).to_vec(), ..head };
        assert_eq!(whole, expected);
        assert!(Outputs::of(vec![vec![0; 100].into()]).is_err());
    }

    #[test]
    fn nothing_is_appended_to_a_failed_answer() {
        let mut response = Response::new(Body::empty());
        response.extensions_mut().insert(Outputs(vec![vec![1; 70_000].into()]));
        assert_eq!(now(all(reassemble(response).into_body())), (Vec::new(), false));
    }
}
