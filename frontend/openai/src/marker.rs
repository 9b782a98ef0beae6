//! Finds one fixed text in a text that arrives character by character.

/// A fixed text whose first character does not occur again in it, so that a failed match can only
/// begin again at the character that failed.
#[derive(Debug, Clone)]
pub(crate) struct Marker {
    text: &'static str,
    matched: usize,
}

/// What one more character means for a [`Marker`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The character completes the marker.
    Complete,
    /// The character may belong to the marker. The text that was held back before it, if any, does
    /// not.
    Held {
        /// Text that is now known not to belong to the marker.
        released: &'static str,
    },
    /// The character does not belong to the marker, nor does the text that was held back.
    Rejected {
        /// Text that is now known not to belong to the marker.
        released: &'static str,
    },
}

impl Marker {
    pub(crate) fn new(text: &'static str) -> Self {
        debug_assert!(text.chars().skip(1).all(|other| !text.starts_with(other)));
        Self { text, matched: 0 }
    }

    /// Returns the text that is held back: it may begin the marker.
    pub(crate) fn held(&self) -> &'static str {
        &self.text[..self.matched]
    }

    /// Returns the whole marker.
    pub(crate) fn text(&self) -> &'static str {
        self.text
    }

    /// Forgets the text that is held back and returns it.
    pub(crate) fn release(&mut self) -> &'static str {
        let held = self.held();
        self.matched = 0;
        held
    }

    pub(crate) fn step(&mut self, character: char) -> Step {
        if self.text[self.matched..].starts_with(character) {
            self.matched += character.len_utf8();
            if self.matched == self.text.len() {
                self.matched = 0;
                return Step::Complete;
            }
            return Step::Held { released: "" };
        }
        let released = self.release();
        if self.text.starts_with(character) {
            self.matched = character.len_utf8();
            return Step::Held { released };
        }
        Step::Rejected { released }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(text: &str) -> String {
        let mut marker = Marker::new("<ab>");
        let mut output = String::new();
        for character in text.chars() {
            match marker.step(character) {
                Step::Complete => output.push('#'),
                Step::Held { released } => output.push_str(released),
                Step::Rejected { released } => {
                    output.push_str(released);
                    output.push(character);
                }
            }
        }
        output.push_str(marker.release());
        output
    }

    #[test]
    fn finds_markers_and_loses_nothing() {
        for text in ["", "x", "<", "<a", "<<ab", "a<b>", "<a<<abb>é", "<ab"] {
            assert_eq!(find(text), text);
        }
        assert_eq!(find("<ab>"), "#");
        assert_eq!(find("<<ab><a<ab>x<"), "<#<a#x<");
    }
}
