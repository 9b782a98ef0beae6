//! Finds stop strings in text that arrives in pieces.
//!
//! Text that may begin a stop string is held back until the next characters decide. Each byte
//! advances one automaton for each stop string (Knuth, Morris, Pratt), so the time is linear in the
//! text whatever the pieces are.

/// What a piece of text leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// Text that can be sent; it may be empty.
    Text(String),
    /// A stop string ended the text. Everything after it is dropped.
    Stopped {
        /// The last text, with the stop string if the scanner includes it.
        text: String,
        /// The index of the stop string.
        which: usize,
    },
}

/// Finds the first end of any stop string.
#[derive(Debug, Clone)]
pub struct StopScanner {
    patterns: Vec<Pattern>,
    include: bool,
    /// Text that may begin a stop string. Always empty if stop strings are included in the text.
    held: String,
    stopped: bool,
}

#[derive(Debug, Clone)]
struct Pattern {
    bytes: Box<[u8]>,
    /// For each prefix, the length of its longest proper suffix that is a prefix too.
    borders: Box<[u32]>,
    matched: usize,
    which: usize,
}

impl Pattern {
    fn new(text: &str, which: usize) -> Self {
        let bytes: Box<[u8]> = text.as_bytes().into();
        let mut borders = vec![0_u32; bytes.len()];
        let mut border = 0_usize;
        for index in 1..bytes.len() {
            while border > 0 && bytes[index] != bytes[border] {
                border = borders[border - 1] as usize;
            }
            border += usize::from(bytes[index] == bytes[border]);
            borders[index] = border as u32;
        }
        Self { bytes, borders: borders.into(), matched: 0, which }
    }

    /// Advances by one byte; returns whether it completes the pattern.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.borders[self.matched - 1] as usize;
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.bytes.len()
    }
}

impl StopScanner {
    /// Creates a scanner for stop strings. Empty ones never match. `include` says whether the text
    /// includes the stop string that ends it.
    pub fn new(stops: &[String], include: bool) -> Self {
        let patterns = stops.iter().enumerate();
        let patterns = patterns.filter(|(_, stop)| !stop.is_empty());
        Self {
            patterns: patterns.map(|(which, stop)| Pattern::new(stop, which)).collect(),
            include,
            held: String::new(),
            stopped: false,
        }
    }

    /// Takes the next text. If several stop strings end with the same character, the longest one
    /// counts. After a stop, all text is dropped.
    pub fn push(&mut self, text: &str) -> Stop {
        if self.stopped {
            return Stop::Text(String::new());
        }
        if self.patterns.is_empty() {
            return Stop::Text(text.to_owned());
        }
        let begin = self.held.len();
        self.held.push_str(text);
        for (offset, byte) in text.bytes().enumerate() {
            let mut longest: Option<&Pattern> = None;
            for pattern in &mut self.patterns {
                let completes = pattern.step(byte);
                if completes && longest.is_none_or(|other| pattern.bytes.len() > other.bytes.len())
                {
                    longest = Some(pattern);
                }
            }
            if let Some(pattern) = longest {
                let end = begin + offset + 1;
                let end = if self.include { end } else { end - pattern.bytes.len() };
                self.held.truncate(end);
                self.stopped = true;
                return Stop::Stopped {
                    text: std::mem::take(&mut self.held),
                    which: pattern.which,
                };
            }
        }
        let longest = self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        let kept = if self.include { 0 } else { longest };
        // A stop string begins with a whole character, so its prefix in the text does too.
        let rest = self.held.split_off(self.held.len() - kept);
        Stop::Text(std::mem::replace(&mut self.held, rest))
    }

    /// Ends the text and returns what was held back.
    pub fn finish(&mut self) -> String {
        self.stopped = true;
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the text and the index of the stop string, for text in pieces of a certain size.
    fn scan(stops: &[&str], include: bool, text: &str, size: usize) -> (String, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut scanner = StopScanner::new(&stops, include);
        let mut output = String::new();
        let characters: Vec<char> = text.chars().collect();
        for piece in characters.chunks(size) {
            match scanner.push(&piece.iter().collect::<String>()) {
                Stop::Text(text) => output.push_str(&text),
                Stop::Stopped { text, which } => {
                    output.push_str(&text);
                    assert_eq!(scanner.push("more"), Stop::Text(String::new()));
                    assert_eq!(scanner.finish(), "");
                    return (output, Some(which));
                }
            }
        }
        output.push_str(&scanner.finish());
        (output, None)
    }

    fn check(stops: &[&str], text: &str, expected: &str, which: Option<usize>) {
        for size in 1..=text.chars().count().max(1) {
            assert_eq!(scan(stops, false, text, size), (expected.to_owned(), which), "{size}");
            let mut included = expected.to_owned();
            included.push_str(which.map_or("", |which| stops[which]));
            assert_eq!(scan(stops, true, text, size), (included, which), "{size}");
        }
    }

    #[test]
    fn stops_at_the_first_end() {
        check(&["x"], "abc", "abc", None);
        check(&["b"], "abc", "a", Some(0));
        check(&["zz", "cd", "b"], "abcd", "a", Some(2));
        check(&["aab"], "aaaab", "aa", Some(0));
        check(&["abab", "aba"], "xaabab", "xa", Some(1));
        check(&["b", "ab"], "xab", "x", Some(1));
        check(&["é!", "ü"], "aéé!b", "aé", Some(0));
        check(&["\n\n"], "a\nb\n\nc", "a\nb", Some(0));
        check(&["abcd"], "abcabc", "abcabc", None);
        check(&["", "b"], "abc", "a", Some(1));
        check(&[], "abc", "abc", None);
    }

    #[test]
    fn holds_back_only_what_may_begin_a_stop_string() {
        let mut scanner = StopScanner::new(&["END".to_owned()], false);
        assert_eq!(scanner.push("a EN"), Stop::Text("a ".to_owned()));
        assert_eq!(scanner.push("E"), Stop::Text("EN".to_owned()));
        assert_eq!(scanner.push("x"), Stop::Text("Ex".to_owned()));
        let mut scanner = StopScanner::new(&["END".to_owned()], true);
        assert_eq!(scanner.push("a EN"), Stop::Text("a EN".to_owned()));
        let stopped = Stop::Stopped { text: "D".to_owned(), which: 0 };
        assert_eq!(scanner.push("D!"), stopped);
    }

    #[test]
    fn agrees_with_a_simple_search() {
        let mut random = 7_u64;
        let mut text = |length: u64| -> String {
            let mut text = String::new();
            for _ in 0..length {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                text.push(if random >> 62 == 0 { 'a' } else { 'b' });
            }
            text
        };
        for round in 0..300 {
            let whole = text(24);
            let stops = [text(round % 6 + 1), text(round % 4 + 2)];
            let ends = stops.iter().map(|stop| whole.find(stop.as_str()).map(|at| at + stop.len()));
            let end = ends.flatten().min();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            for size in [1, 2, 5, 24] {
                let found = scan(&stops, true, &whole, size);
                assert_eq!(found.0.len(), end.unwrap_or(whole.len()), "{whole} {stops:?}");
                assert_eq!(found.1.is_some(), end.is_some());
            }
        }
    }

    #[test]
    fn hard_patterns_take_linear_time() {
        let stops: Vec<String> = (0..16).map(|i| format!("{}{i}", "a".repeat(1000))).collect();
        let mut scanner = StopScanner::new(&stops, false);
        for _ in 0..20_000 {
            scanner.push("a");
        }
        assert_eq!(scanner.finish().len(), 1000);
    }
}
