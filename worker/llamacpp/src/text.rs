//! The text of a choice: whole characters, up to a stop string.

/// Turns the bytes of tokens into text for the client.
#[derive(Clone, Debug, Default)]
pub(crate) struct TextWriter {
    stops: Vec<String>,
    include_stop: bool,
    /// Bytes that do not make a whole character yet.
    partial: Vec<u8>,
    /// Text that may begin a stop string.
    held: String,
}

/// What some bytes add.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Written {
    Text(String),
    /// The text before the stop string (with it, if the client wants it), and its position in the
    /// list of stop strings.
    Stopped(String, usize),
}

impl TextWriter {
    pub(crate) fn new(stops: &[String], include_stop: bool) -> Self {
        Self { stops: stops.to_vec(), include_stop, ..Self::default() }
    }

    /// Takes the bytes of a token.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Written {
        self.partial.extend_from_slice(bytes);
        let whole = whole_characters(&self.partial);
        let text = String::from_utf8_lossy(&self.partial[..whole]).into_owned();
        self.partial.drain(..whole);
        self.held.push_str(&text);
        self.scan()
    }

    /// Returns the text that was held back, at the end of a choice.
    pub(crate) fn finish(&mut self) -> String {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(&String::from_utf8_lossy(&std::mem::take(&mut self.partial)));
        text
    }

    fn scan(&mut self) -> Written {
        let first = (0..self.stops.len())
            .filter_map(|stop| Some((self.held.find(&self.stops[stop])?, stop)))
            .min();
        if let Some((start, stop)) = first {
            let end = if self.include_stop { start + self.stops[stop].len() } else { start };
            let mut text = std::mem::take(&mut self.held);
            text.truncate(end);
            self.partial.clear();
            return Written::Stopped(text, stop);
        }
        let longest = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - longest);
        Written::Text(std::mem::replace(&mut self.held, rest))
    }
}

/// Returns how many bytes at the end of a text begin a stop string.
fn overlap(text: &str, stop: &str) -> usize {
    let most = text.len().min(stop.len() - 1);
    (1..=most)
        .rev()
        .find(|length| {
            text.is_char_boundary(text.len() - length)
                && stop.as_bytes().starts_with(&text.as_bytes()[text.len() - length..])
        })
        .unwrap_or(0)
}

/// Returns the length without an incomplete character at the end. Bytes that are not UTF-8 count as
/// whole characters.
fn whole_characters(bytes: &[u8]) -> usize {
    let mut checked = 0;
    loop {
        match std::str::from_utf8(&bytes[checked..]) {
            Ok(_) => return bytes.len(),
            Err(error) => match error.error_len() {
                Some(wrong) => checked += error.valid_up_to() + wrong,
                None => return checked + error.valid_up_to(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Written {
        Written::Text(text.to_owned())
    }

    #[test]
    fn characters_are_whole() {
        let mut writer = TextWriter::new(&[], false);
        assert_eq!(writer.push(b"a\xe2\x82"), text("a"));
        assert_eq!(writer.push(b"\xacb\xff"), text("\u{20ac}b\u{fffd}"));
        assert_eq!(writer.push(b"\xf0\x9f"), text(""));
        assert_eq!(writer.finish(), "\u{fffd}");
    }

    #[test]
    fn the_earliest_stop_string_ends_the_text() {
        let stops = ["END".to_owned(), "N".to_owned()];
        let mut writer = TextWriter::new(&stops, false);
        assert_eq!(writer.push(b"a E"), text("a "));
        assert_eq!(writer.push(b"ND b"), Written::Stopped(String::new(), 0));
        let mut writer = TextWriter::new(&stops, true);
        assert_eq!(writer.push(b"END"), Written::Stopped("END".to_owned(), 0));
        let mut writer = TextWriter::new(&stops, false);
        assert_eq!(writer.push(b"EN D"), Written::Stopped("E".to_owned(), 1));
    }

    #[test]
    fn held_text_comes_later() {
        let mut writer = TextWriter::new(&["aab".to_owned()], false);
        assert_eq!(writer.push(b"aaa"), text("a"));
        assert_eq!(writer.push(b"c"), text("aac"));
        assert_eq!(writer.push(b"a"), text(""));
        assert_eq!(writer.finish(), "a");
    }
}
