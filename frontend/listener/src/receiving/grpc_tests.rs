//! Messages are yielded complete, and use no more memory than the received bytes.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::convert::Infallible;

use flate2::Compression;
use http::HeaderValue;
use http_body::Body as _;
use http_body_util::BodyExt;
use proptest::prelude::*;
use tonic::Code;

use super::messages::PREFIX;
use super::*;
use crate::receiving::coding::deflate;

/// A body of these frames, which does not end if `open` is set.
struct Frames {
    frames: VecDeque<Bytes>,
    open: bool,
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.frames.pop_front() {
            None if self.open => Poll::Pending,
            next => Poll::Ready(next.map(|data| Ok(Frame::data(data)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty() && !self.open
    }
}

const NO_TIMEOUT: MessageTimeout = MessageTimeout { idle: Duration::ZERO, is_stream: false };
const LIMITS: Limits = Limits { received: 100_000, inflated: 200_000, setting: Some("--x") };

fn gzip(bytes: &[u8]) -> Vec<u8> {
    deflate([Bytes::copy_from_slice(bytes)].iter(), Format::Gzip, Compression::fast()).unwrap()
}

fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
    [&Head { flag, length: message.len() }.bytes()[..], message].concat()
}

fn cut(bytes: &[u8], cuts: &[usize]) -> VecDeque<Bytes> {
    let mut bytes = Bytes::copy_from_slice(bytes);
    let mut frames: VecDeque<Bytes> =
        cuts.iter().map(|&cut| bytes.split_to(cut.min(bytes.len()))).collect();
    frames.push_back(bytes);
    frames
}

fn received(frames: VecDeque<Bytes>, open: bool, budget: &Budget) -> Received<Frames> {
    let mut headers = HeaderMap::new();
    headers.insert("grpc-encoding", HeaderValue::from_static("gzip"));
    Received::new(Frames { frames, open }, &headers, budget, LIMITS, NO_TIMEOUT)
}

/// Returns all data, and the final status.
async fn all(mut body: Received<Frames>) -> (Vec<u8>, Result<(), Status>) {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => bytes.extend_from_slice(&frame.into_data().unwrap()),
            Err(error) => return (bytes, Err(*error.downcast::<Status>().unwrap())),
        }
    }
    assert!(body.is_end_stream());
    (bytes, Ok(()))
}

fn now<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

proptest! {
    #[test]
    fn yields_the_same_messages_for_any_framing(
        messages in proptest::collection::vec((any::<bool>(), prop_oneof![0usize..20, 4000usize..60_000]), 0..6),
        cuts in proptest::collection::vec(prop_oneof![0usize..9, 1000usize..30_000], 0..20),
    ) {
        let mut sent = Vec::new();
        let mut expected = Vec::new();
        for (number, &(compressed, length)) in messages.iter().enumerate() {
            let message = vec![u8::try_from(number).unwrap(); length];
            expected.extend(framed(0, &message));
            sent.extend(if compressed { framed(1, &gzip(&message)) } else { framed(0, &message) });
        }
        let budget = Budget::new(600_000);
        let (got, end) = now(all(received(cut(&sent, &cuts), false, &budget)));
        prop_assert!(end.is_ok(), "{end:?}");
        prop_assert!(got == expected);
        prop_assert!(budget.reserve().grow(600_000).is_ok(), "all memory was released");
    }
}

#[tokio::test]
async fn yields_a_message_only_when_complete() {
    let budget = Budget::new(1000);
    let begun = [framed(0, b"whole"), framed(0, &[7; 900])[..800].to_vec()].concat();
    let mut body = received([Bytes::from(begun)].into(), true, &budget);
    assert_eq!(&body.frame().await.unwrap().unwrap().into_data().unwrap()[..], framed(0, b"whole"));
    let mut cx = Context::from_waker(std::task::Waker::noop());
    assert!(Pin::new(&mut body).poll_frame(&mut cx).is_pending());
    let mut other = budget.reserve();
    assert!(other.grow(1000 - 795 + 1).is_err(), "received bytes count");
    assert!(other.grow(1000 - 795).is_ok(), "only received bytes count");
    drop(body);
    assert!(other.grow(795).is_ok());
}

#[tokio::test]
async fn refuses_messages_over_the_limits() {
    let huge = [&[0, 0x7f, 0xff, 0xff, 0xff][..]].concat();
    let bomb = framed(1, &gzip(&vec![0; 200_001]));
    let cases: [(&[u8], usize, u64, Code, &str); 7] = [
        (
            &huge,
            5,
            u64::MAX,
            Code::ResourceExhausted,
            "larger than max (2147483647 vs. 100000). Use --x to increase",
        ),
        (&huge, 2, u64::MAX, Code::ResourceExhausted, "larger than max"),
        (
            &bomb,
            50,
            u64::MAX,
            Code::ResourceExhausted,
            "exceeds the maximum allowed value of 200000 bytes when it is",
        ),
        (&bomb, 50, 150_000, Code::ResourceExhausted, "exceed the memory limit of 150000 bytes"),
        (&framed(0, &[0; 5000]), 2000, 4000, Code::ResourceExhausted, "exceed the memory limit"),
        (&framed(1, b"no gzip"), 50, u64::MAX, Code::Internal, "Error decompressing: "),
        (
            &framed(0, &[0; 50])[..40],
            10,
            u64::MAX,
            Code::Internal,
            "Unexpected EOF decoding stream.",
        ),
    ];
    for (bytes, first, most, code, text) in cases {
        let (got, end) = all(received(cut(bytes, &[first]), false, &Budget::new(most))).await;
        let status = end.unwrap_err();
        assert!(
            (status.code(), got.is_empty()) == (code, true) && status.message().contains(text),
            "{status}"
        );
    }
}

#[tokio::test]
async fn passes_invalid_heads_to_tonic() {
    for flag in [2, 255] {
        let bytes = [framed(0, b"good"), framed(flag, &[1; 50])].concat();
        for cuts in [&[][..], &[3], &[11], &[4 + PREFIX, 20]] {
            let (got, end) = all(received(cut(&bytes, cuts), false, &Budget::default())).await;
            assert!(end.is_ok() && got == bytes, "{cuts:?}");
        }
    }
    let frames = cut(&framed(1, &gzip(b"x")), &[3]);
    let plain = Received::new(
        Frames { frames, open: false },
        &HeaderMap::new(),
        &Budget::default(),
        LIMITS,
        NO_TIMEOUT,
    );
    let (got, end) = all(plain).await;
    assert!(end.is_ok() && got == framed(1, &gzip(b"x")), "compressed without grpc-encoding");
}

#[tokio::test]
async fn a_message_must_not_stall() {
    let budget = Budget::new(1000);
    let idle = Duration::from_millis(5);
    let whole = framed(0, b"whole");
    let begun = framed(0, &[7; 900])[..800].to_vec();
    for (sent, is_stream, stalls) in [
        (&[][..], true, false),
        (&[][..], false, true),
        (&begun[..1], true, true),
        (&begun[..3], false, true),
        (&begun[..], true, true),
        (&begun[..], false, true),
        (&whole[..], true, false),
        (&[&whole[..], &begun].concat()[..], true, true),
    ] {
        let frames = sent.chunks(300).map(Bytes::copy_from_slice).collect();
        let timeout = MessageTimeout { idle, is_stream };
        let body = Received::new(
            Frames { frames, open: true },
            &HeaderMap::new(),
            &budget,
            LIMITS,
            timeout,
        );
        let mut body = std::pin::pin!(body);
        let next = async {
            loop {
                match std::future::poll_fn(|cx| body.as_mut().poll_frame(cx)).await.unwrap() {
                    Ok(_) => {}
                    Err(error) => return *error.downcast::<Status>().unwrap(),
                }
            }
        };
        let failed = tokio::time::timeout(Duration::from_millis(100), next).await.ok();
        assert_eq!(failed.is_some(), stalls, "{} bytes, stream: {is_stream}", sent.len());
        if let Some(status) = failed {
            assert!(
                status.code() == Code::InvalidArgument
                    && status.message().contains("stalled for 0.005 s"),
                "{status}"
            );
            assert!(budget.reserve().grow(1000).is_ok(), "the memory of the message was released");
        }
    }
}

#[tokio::test]
async fn each_message_of_a_stream_has_its_own_time() {
    let message = framed(0, &[7; 2400]);
    // Before: a message in two pieces that took long, or in one piece, which is no reason for the
    // next one to take longer. A body has 10 s for each 2,400 bytes of it.
    for (cuts, is_stream, waited_s, fails) in [
        (&[600][..], true, 90, false),
        (&[600], false, 90, true),
        (&[2405, 0], true, 65, true),
        (&[2405, 0], false, 65, false),
    ] {
        let timeout = MessageTimeout { idle: Duration::from_secs(60), is_stream };
        let frames = cut(&[&message[..], &message[..800]].concat(), cuts);
        let mut body = Received::new(
            Frames { frames, open: true },
            &HeaderMap::new(),
            &Budget::default(),
            LIMITS,
            timeout,
        );
        let mut cx = Context::from_waker(std::task::Waker::noop());
        if cuts == [600] {
            body.rest = body.body.frames.pop_front().unwrap();
            body.advance().unwrap();
            body.pace.set_waiting_for(Duration::from_secs(waited_s));
        }
        let mut first = 0;
        while first < message.len() {
            first += body.frame().await.unwrap().unwrap().into_data().unwrap().len();
        }
        if cuts != [600] {
            assert!(
                Pin::new(&mut body).poll_frame(&mut cx).is_pending(),
                "the second message has begun"
            );
            body.pace.set_waiting_for(Duration::from_secs(waited_s));
        }
        assert_eq!(
            Pin::new(&mut body).poll_frame(&mut cx).is_ready(),
            fails,
            "{cuts:?}, stream: {is_stream}"
        );
    }
}
