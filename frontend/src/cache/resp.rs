//! Redis' protocol (RESP, version 2): commands out, replies in. Only what GET and SET and the log-in need; anything else
//! that a server may say ends the connection.
//!
//! Source of the format: <https://redis.io/docs/latest/develop/reference/protocol-spec/>.

use bytes::{Buf, Bytes, BytesMut};

/// The longest line.
const LONGEST_LINE: usize = 4096;
/// The longest value: Redis' own limit by default.
pub(super) const LONGEST_VALUE: usize = 512 << 20;
/// The most room that is made for a value at once: what a length promises may never come.
const ROOM: usize = 1 << 20;

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// It is done.
    Done,
    /// It refuses, with these words.
    Refused(String),
    /// There is no value.
    Nothing,
    /// The value.
    Value(Bytes),
}

/// Appends a command: an array of its words.
pub(super) fn command(out: &mut BytesMut, words: &[&[u8]]) {
    out.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
    for word in words {
        out.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
}

/// Takes a whole reply off the front of what came; `None` while it is not whole.
///
/// # Errors
/// It is no reply, with what it is instead.
pub(super) fn reply(input: &mut BytesMut) -> Result<Option<Reply>, String> {
    let Some(end) = input.windows(2).take(LONGEST_LINE).position(|pair| pair == b"\r\n") else {
        // An HTTP server's answer must not be waited for until it is long enough.
        let known = input.first().is_none_or(|first| b"+-:$".contains(first));
        return if known && input.len() <= LONGEST_LINE { Ok(None) } else { Err(rubbish(input)) };
    };
    let line = input.get(1..end).unwrap_or_default();
    let reply = match input.first() {
        Some(b'+' | b':') => Reply::Done,
        Some(b'-') => Reply::Refused(String::from_utf8_lossy(line).into_owned()),
        Some(b'$') if line == b"-1" => Reply::Nothing,
        Some(b'$') => {
            let len = std::str::from_utf8(line).ok().and_then(|text| text.parse().ok());
            let len = len.filter(|len| *len <= LONGEST_VALUE).ok_or_else(|| rubbish(input))?;
            return value(input, end + 2, len);
        }
        _ => return Err(rubbish(input)),
    };
    input.advance(end + 2);
    Ok(Some(reply))
}

/// Takes a value of `len` bytes that begins at `start`.
fn value(input: &mut BytesMut, start: usize, len: usize) -> Result<Option<Reply>, String> {
    let whole = start + len + 2;
    if input.len() < whole {
        input.reserve((whole - input.len()).min(ROOM));
        return Ok(None);
    }
    if input.get(start + len..whole) != Some(b"\r\n") {
        return Err("a value that does not end where it says".to_owned());
    }
    input.advance(start);
    let value = input.split_to(len).freeze();
    input.advance(2);
    Ok(Some(Reply::Value(value)))
}

fn rubbish(input: &[u8]) -> String {
    let shown = input.get(..input.len().min(40)).unwrap_or_default();
    format!("'{}', which is no reply of Redis", shown.escape_ascii())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(mut input: BytesMut) -> Result<Vec<Reply>, String> {
        let mut replies = Vec::new();
        while let Some(reply) = reply(&mut input)? {
            replies.push(reply);
        }
        Ok(replies)
    }

    #[test]
    fn commands_are_arrays_of_words() {
        let mut out = BytesMut::new();
        command(&mut out, &[b"SET", b"k", b"a\r\nb"]);
        assert_eq!(&out[..], b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\na\r\nb\r\n");
    }

    #[test]
    fn replies_are_read_however_they_are_cut() {
        let input = b"+OK\r\n-ERR no\r\n$-1\r\n$4\r\na\r\nb\r\n:7\r\n$0\r\n\r\n";
        let value = |bytes: &'static [u8]| Reply::Value(Bytes::from_static(bytes));
        let refused = Reply::Refused("ERR no".into());
        let expected = vec![Reply::Done, refused, Reply::Nothing, value(b"a\r\nb"), Reply::Done, value(b"")];
        assert_eq!(all(BytesMut::from(&input[..])).unwrap(), expected);
        let (mut arrived, mut replies) = (BytesMut::new(), Vec::new());
        for byte in input {
            arrived.extend_from_slice(&[*byte]);
            replies.extend(reply(&mut arrived).unwrap());
        }
        assert_eq!(replies, expected);
    }

    #[test]
    fn rubbish_is_refused_before_it_is_long() {
        for input in ["HTTP/1.1 400", "*1\r\n", "$x\r\n", "$-2\r\n", "$99999999999\r\n", "$2\r\nabcd"] {
            assert!(all(BytesMut::from(input)).is_err(), "{input}");
        }
        assert!(all(BytesMut::from(&[b'+'; 5000][..])).is_err());
        let mut promised = BytesMut::from("$500000000\r\nx");
        assert_eq!(reply(&mut promised), Ok(None));
        assert!(promised.capacity() <= 2 * ROOM);
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_safely(input in proptest::collection::vec(prop_oneof![
            any::<u8>(), Just(b'\r'), Just(b'\n'), Just(b'$'), Just(b'+'), Just(b'1')], 0..60)) {
            let _ = all(BytesMut::from(&input[..]));
        }
    }
}
