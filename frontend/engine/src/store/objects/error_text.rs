//! Converts errors of stores into readable texts. Of XML answers, the code and message are shown.

use object_store::Error;

/// The maximum number of bytes of a store's text in an error.
const LONGEST: usize = 600;

/// Returns the text of an error on one line of limited length; the store's code and message if
/// present.
pub(super) fn of(error: &Error) -> String {
    short(&error.to_string())
}

fn short(text: &str) -> String {
    let summary = element(text, "Code").map(|code| match element(text, "Message") {
        Some(message) => format!("{code}: {message}"),
        None => code.to_owned(),
    });
    let text = summary.as_deref().unwrap_or(text);
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|end| line.is_char_boundary(*end)).unwrap_or(0);
        line.truncate(end);
        line.push_str(" ...");
    }
    line
}

/// Returns the text of an XML element, unless it is empty.
fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (content, _) = rest.split_once(&format!("</{name}>"))?;
    Some(content.trim()).filter(|content| !content.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extracts_code_and_message() {
        let text = "Error performing GET http://h/b in 1 ms - 404: <?xml \
                    version=\"1.0\"?>\n<Error><Code>NoSuchBucket</Code>\n<Message>The specified \
                    bucket\n does not exist</Message></Error>";
        assert_eq!(short(text), "NoSuchBucket: The specified bucket does not exist");
        assert_eq!(short("<Code>SlowDown</Code><Message>"), "SlowDown");
        assert_eq!(short("no\nanswer"), "no answer");
        let long = short(&"\u{e4}".repeat(1000));
        assert!(long.len() < LONGEST + 8 && long.ends_with("\u{e4} ..."), "{long}");
    }
}
