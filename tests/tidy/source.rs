//! Reads Rust source as text: finds code, the paths that it names, functions and tests.

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

/// A function with a body.
pub(crate) struct Function {
    pub(crate) name: String,
    /// The line of its `fn`.
    pub(crate) line: usize,
    /// The number of lines from there to its closing brace.
    pub(crate) lines: usize,
    /// The number of arguments without `self`; each element of a tuple counts as one. Zero if a signature for Python names them.
    pub(crate) arguments: usize,
}

/// Returns the functions of masked code.
pub(crate) fn functions(code: &str) -> Vec<Function> {
    words(code).filter(|(_, word)| *word == "fn").filter_map(|(at, _)| function(code, at)).collect()
}

fn function(code: &str, at: usize) -> Option<Function> {
    // `fn(..)` without a name is a type, and the next braces belong to another item.
    if code.as_bytes().get(at + 2) != Some(&b' ') {
        return None;
    }
    let name = word_at(code, at + 3).to_owned();
    let mut depth = 0;
    for (offset, byte) in code.bytes().enumerate().skip(at) {
        match byte {
            // A semicolon inside brackets belongs to an array type.
            b';' if depth == 0 && !in_brackets(&code[at..offset]) => return None,
            b'{' => depth += 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    let line = line_of(code, at);
                    // `fn(..)` without a name is a type, and the braces belong to another item.
                    return (!name.is_empty()).then(|| Function {
                        name,
                        line,
                        lines: line_of(code, offset) - line + 1,
                        arguments: if is_for_python(code, at) { 0 } else { arguments(&code[at..offset]) },
                    });
                }
                if depth < 0 {
                    return None;
                }
            }
            _ => {}
        }
    }
    None
}

/// Whether an attribute gives the function at `at` a signature for Python, whose callers name the arguments.
fn is_for_python(code: &str, at: usize) -> bool {
    let begin = code[..at].rfind(['{', '}', ';']).unwrap_or(0);
    code[begin..at].contains("#[pyo3(signature")
}

fn in_brackets(signature: &str) -> bool {
    signature.matches('[').count() > signature.matches(']').count()
}

/// Returns the number of arguments of a function whose text begins with `fn`.
fn arguments(function: &str) -> usize {
    let Some(open) = top_level(function, &['(', '{']).into_iter().next() else { return 0 };
    let of_self =
        |argument: &&str| words(argument).take(3).any(|(_, word)| word == "self") && !argument.contains(": (");
    let elements = |argument: &str| match top_level(argument, &[':']).first() {
        Some(colon) => elements(&argument[colon + 1..]),
        None => 1,
    };
    list(&function[open..]).into_iter().filter(|argument| !of_self(argument)).map(elements).sum()
}

/// Returns the number of values of a type: those of a tuple, or one.
fn elements(kind: &str) -> usize {
    let mut kind = kind.trim_start().trim_start_matches('&').trim_start();
    if kind.starts_with('\'') {
        kind = kind.split_once(' ').map_or("", |(_, rest)| rest);
    }
    let kind = kind.strip_prefix("mut ").unwrap_or(kind);
    if kind.starts_with('(') { list(kind).into_iter().map(elements).sum::<usize>().max(1) } else { 1 }
}

/// Returns the comma-separated parts inside the parentheses that a text begins with.
fn list(text: &str) -> Vec<&str> {
    let inside = text.get(1..).unwrap_or_default();
    let end = top_level(inside, &[')']).first().copied().unwrap_or(inside.len());
    let inside = &inside[..end];
    let mut begin = 0;
    let mut found = Vec::new();
    for comma in top_level(inside, &[',']).into_iter().chain([inside.len()]) {
        found.push(&inside[begin.min(comma)..comma]);
        begin = comma + 1;
    }
    found.retain(|piece| !piece.trim().is_empty());
    found
}

/// Returns the positions of these letters outside all brackets. `::` in a path is not a colon; an arrow closes no bracket.
fn top_level(text: &str, letters: &[char]) -> Vec<usize> {
    let bytes = text.as_bytes();
    let (mut depth, mut found) = (0_i32, Vec::new());
    for (at, byte) in bytes.iter().copied().enumerate() {
        let beside = |other: usize| bytes.get(other) == Some(&b':');
        let is_path = byte == b':' && (beside(at + 1) || (at > 0 && beside(at - 1)));
        if depth == 0 && letters.contains(&char::from(byte)) && !is_path {
            found.push(at);
        }
        match byte {
            b'(' | b'[' | b'{' | b'<' => depth += 1,
            b'>' if at > 0 && matches!(bytes[at - 1], b'-' | b'=') => {}
            b')' | b']' | b'}' | b'>' => depth -= 1,
            _ => {}
        }
    }
    found
}
