//! Reads Rust source as text: finds code, the paths that it names, and tests.

/// Replaces comments by spaces and, unless `strings` is set, also the contents of literals. Lines and columns are preserved.
pub(crate) fn mask(text: &str, strings: bool) -> String {
    let bytes = text.as_bytes();
    let mut masked = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let after_word = at > 0 && is_word(bytes[at - 1]);
        let (length, visible) = if rest.starts_with(b"//") {
            (rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len()), false)
        } else if rest.starts_with(b"/*") {
            (block_comment(rest), false)
        } else if let Some(length) = raw_string(rest).filter(|_| !after_word) {
            (length, strings)
        } else if rest[0] == b'"' {
            (string(rest), strings)
        } else if rest[0] == b'\'' {
            character(rest).map_or((1, true), |length| (length, strings))
        } else {
            (1, true)
        };
        let piece = &rest[..length];
        masked.extend(piece.iter().map(|byte| if visible || *byte == b'\n' { *byte } else { b' ' }));
        at += length;
    }
    String::from_utf8_lossy(&masked).into_owned()
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest[at..].starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

fn raw_string(rest: &[u8]) -> Option<usize> {
    let prefix = [&b"r"[..], b"br", b"cr"].into_iter().find(|prefix| rest.starts_with(prefix))?;
    let hashes = rest[prefix.len()..].iter().take_while(|byte| **byte == b'#').count();
    let begin = prefix.len() + hashes;
    if rest.get(begin) != Some(&b'"') {
        return None;
    }
    let end = [&b"\""[..], &vec![b'#'; hashes]].concat();
    let contents = &rest[begin + 1..];
    let length = contents.windows(end.len()).position(|window| window == end);
    Some(length.map_or(rest.len(), |length| begin + 1 + length + end.len()))
}

fn string(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != b'"' {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// Returns the length of a character literal; `None` for a lifetime.
fn character(rest: &[u8]) -> Option<usize> {
    if rest.get(1) == Some(&b'\\') {
        let end = rest.get(3..)?.iter().position(|byte| *byte == b'\'')?;
        return Some(3 + end + 1);
    }
    let width = rest.get(1).map(|first| match first {
        0..0x80 => 1,
        0x80..0xE0 => 2,
        0xE0..0xF0 => 3,
        _ => 4,
    })?;
    (rest.get(1 + width) == Some(&b'\'')).then_some(width + 2)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Returns the line of a position, counted from 1.
pub(crate) fn line_of(text: &str, position: usize) -> usize {
    text.as_bytes()[..position].iter().filter(|byte| **byte == b'\n').count() + 1
}

/// Returns the words of masked code with their positions.
pub(crate) fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let bytes = code.as_bytes();
    let begins = (0..bytes.len()).filter(|at| is_word(bytes[*at]) && (*at == 0 || !is_word(bytes[*at - 1])));
    begins.map(|at| (at, word_at(code, at)))
}

fn word_at(code: &str, at: usize) -> &str {
    let length = code.as_bytes()[at..].iter().take_while(|byte| is_word(**byte)).count();
    &code[at..at + length]
}

/// Returns every path of two or more segments in masked code, and every path of a `use` with groups expanded, with lines.
pub(crate) fn paths(code: &str) -> Vec<(usize, String)> {
    uses_and_paths(code).into_iter().map(|(line, _, path)| (line, path)).collect()
}

/// Returns the same paths, each with whether a `use` names it.
pub(crate) fn uses_and_paths(code: &str) -> Vec<(usize, bool, String)> {
    let mut found = Vec::new();
    let (mut consumed, mut previous) = (0, "");
    for (at, word) in words(code) {
        if at < consumed {
            continue;
        }
        let mut reader = PathReader { code, at, found: Vec::new() };
        reader.path("");
        consumed = reader.at;
        let of_use = previous == "use";
        let named = reader.found.into_iter().filter(|(_, path)| of_use || path.contains("::"));
        found.extend(named.map(|(at, path)| (line_of(code, at), of_use, path)));
        previous = word;
    }
    found
}

/// Reads one path, or the tree of a `use`.
struct PathReader<'a> {
    code: &'a str,
    at: usize,
    found: Vec<(usize, String)>,
}

impl PathReader<'_> {
    /// Reads a path that continues `prefix`, and its groups.
    fn path(&mut self, prefix: &str) {
        let begin = self.at;
        let mut path = prefix.to_owned();
        loop {
            let word = word_at(self.code, self.at);
            if word.is_empty() {
                break;
            }
            self.at += word.len();
            path = if path.is_empty() { word.to_owned() } else { format!("{path}::{word}") };
            let rest = &self.code[self.at..];
            if rest.starts_with("::{") {
                self.at += 3;
                return self.group(&path);
            }
            if rest.starts_with("::*") {
                self.at += 3;
                break;
            }
            if !rest.starts_with("::") || !rest.as_bytes().get(2).is_some_and(|byte| is_word(*byte)) {
                break;
            }
            self.at += 2;
        }
        self.found.push((begin, path));
    }

    fn group(&mut self, prefix: &str) {
        while let Some(byte) = self.code.as_bytes().get(self.at).copied() {
            if byte == b'}' {
                self.at += 1;
                return;
            }
            if is_word(byte) {
                self.path(prefix);
                self.skip_alias();
            } else {
                if byte == b'*' {
                    self.found.push((self.at, prefix.to_owned()));
                }
                self.at += 1;
            }
        }
    }

    fn skip_alias(&mut self) {
        if let Some(alias) = self.code[self.at..].strip_prefix(" as ") {
            self.at = self.code.len() - alias.len() + word_at(alias, 0).len();
        }
    }
}

/// Returns the names of modules in separate files that masked code declares for tests only.
pub(crate) fn test_modules(code: &str) -> Vec<String> {
    let mut for_tests = false;
    let mut found = Vec::new();
    for line in code.lines().map(str::trim) {
        let item = line.strip_prefix("pub(crate) ").or_else(|| line.strip_prefix("pub ")).unwrap_or(line);
        match item.strip_prefix("mod ").and_then(|name| name.strip_suffix(';')) {
            Some(name) if for_tests => found.push(name.to_owned()),
            _ => {}
        }
        for_tests = line == "#[cfg(test)]" || (for_tests && line.starts_with("#["));
    }
    found
}

/// Returns the number of lines before the file's test module.
pub(crate) fn lines_without_tests(text: &str) -> usize {
    let lines: Vec<_> = text.lines().collect();
    let begins_tests = |at: &usize| {
        let item = lines[at + 1..].iter().find(|line| !line.starts_with("#["));
        lines[*at] == "#[cfg(test)]" && item.is_some_and(|item| item.contains("mod ") && item.ends_with('{'))
    };
    (0..lines.len()).find(begins_tests).unwrap_or(lines.len())
}
