//! Helpers of the parsers of text lines ([`worker_lines`](super::worker_lines),
//! [`statsd`](super::statsd)): the error of a line, valid names, and the text of a line for the
//! log.

use std::borrow::Cow;

/// The number of characters of a refused line that are shown at most.
const SHOWN: usize = 120;

/// The reason why a line does not match the grammar. Does not contain the line itself, which the
/// caller logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);

/// Makes a name valid for Prometheus: replaces every character except ASCII letters, digits and `_`
/// by `_`, and prepends `_` to a leading digit. Applies to names of metrics and labels. Borrows the
/// name if nothing changes.
pub fn prometheus_name(name: &str) -> Cow<'_, str> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let leading_digit = name.starts_with(|c: char| c.is_ascii_digit());
    if !leading_digit && name.chars().all(fits) {
        return Cow::Borrowed(name);
    }
    let front = leading_digit.then_some('_');
    Cow::Owned(
        front.into_iter().chain(name.chars().map(|c| if fits(c) { c } else { '_' })).collect(),
    )
}

/// Prepares a line from outside for the log: cuts it after 120 characters and escapes control
/// characters.
pub fn shortened(line: &[u8]) -> String {
    let cut = line.get(..SHOWN * 4).unwrap_or(line);
    let text = String::from_utf8_lossy(cut);
    let mut shown: String = text.chars().take(SHOWN).flat_map(escaped).collect();
    if cut.len() < line.len() || text.chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    shown
}

fn escaped(c: char) -> impl Iterator<Item = char> {
    let escape = c.is_control().then(|| c.escape_default());
    let plain = escape.is_none().then_some(c);
    escape.into_iter().flatten().chain(plain)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn invalid_characters_of_names_are_replaced() {
        for (name, expected) in [
            ("plain_1", "plain_1"),
            ("web.requests", "web_requests"),
            ("bad-name", "bad_name"),
            ("2xx", "_2xx"),
            ("größe", "gr__e"),
            ("a:b", "a_b"),
            ("", ""),
        ] {
            assert_eq!(prometheus_name(name), expected);
        }
    }

    #[test]
    fn a_refused_line_is_shown_short_and_on_one_line() {
        assert_eq!(shortened(b"a:1|x\nb"), "a:1|x\\nb");
        assert_eq!(shortened(&[b'x'; SHOWN]), "x".repeat(SHOWN));
        assert_eq!(shortened(&[b'x'; 4 * SHOWN + 1]), "x".repeat(SHOWN) + "...");
        assert_eq!(shortened("é".repeat(SHOWN + 1).as_bytes()), "é".repeat(SHOWN) + "...");
        assert_eq!(shortened(b"\x1b[31m\xff"), "\\u{1b}[31m\u{fffd}");
    }
}
