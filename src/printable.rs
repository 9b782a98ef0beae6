//! Text of others for a terminal or a log: control characters and characters that change how the
//! rest is shown become escapes.

use std::borrow::Cow;

/// Returns the text with its control characters, line breaks included, and its invisible and
/// direction-changing characters (Unicode's categories Cc, Cf, Zl and Zp) as escapes of Rust, such
/// as `\u{202e}`.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

/// The same for a text of several lines: keeps line breaks and tabs.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

fn escaped(text: &str, keeps: impl Fn(char) -> bool) -> Cow<'_, str> {
    // Quotation marks and combining characters have escapes too.
    let is_plain = |c: char| {
        keeps(c)
            || matches!(c, '"' | '\'' | '\\')
            || (c.is_alphanumeric() || is_mark(c))
            || c.escape_debug().len() == 1
    };
    if text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match is_plain(c) {
            true => shown.push(c),
            false => shown.extend(c.escape_debug()),
        }
    }
    Cow::Owned(shown)
}

/// Returns whether this is a combining mark of the common blocks, which `escape_debug` escapes
/// because it may start a text.
fn is_mark(c: char) -> bool {
    matches!(c, '\u{300}'..='\u{36f}' | '\u{1ab0}'..='\u{1aff}' | '\u{1dc0}'..='\u{1dff}' | '\u{20d0}'..='\u{20ff}' | '\u{fe20}'..='\u{fe2f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_characters_that_a_terminal_obeys_are_escaped() {
        for text in ["", "plain \"text\" C:\\x 'y'", "größe 模型 e\u{301} 🙂 ▲", "\u{ac00}"]
        {
            assert_eq!(printable(text), text);
        }
        for (text, expected) in [
            ("a\u{1b}[31mb", "a\\u{1b}[31mb"),
            ("\u{202e}x\u{2066}\u{200b}", "\\u{202e}x\\u{2066}\\u{200b}"),
            ("\u{feff}\u{ad}\u{2028}\u{85}\u{7f}", "\\u{feff}\\u{ad}\\u{2028}\\u{85}\\u{7f}"),
            ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ] {
            assert_eq!(printable(text), expected);
        }
        assert_eq!(printable_lines("a\nb\tc\r\u{1b}"), "a\nb\tc\\r\\u{1b}");
    }
}
