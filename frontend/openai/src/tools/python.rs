//! Calls as Python writes them: `name(key=value, ...)` with literals.
//!
//! Source of the grammar: Python's language reference, "Lexical analysis" and "Expressions". Only
//! keyword arguments with literals are calls.

/// The deepest nesting of lists, tuples and dictionaries.
const MAX_DEPTH: usize = 64;

/// What a character means for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scan {
    More,
    /// The character closes the call.
    End,
    NoCall,
}

/// Finds the end of a call.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CallEnd {
    depth: usize,
    quote: Option<char>,
    escaped: bool,
}

impl CallEnd {
    pub(super) fn step(&mut self, character: char) -> Scan {
        if let Some(quote) = self.quote {
            match character {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                _ if character == quote => self.quote = None,
                _ => {}
            }
            return Scan::More;
        }
        match character {
            '(' => self.depth += 1,
            _ if self.depth == 0 => {
                return if is_name(character) { Scan::More } else { Scan::NoCall };
            }
            '\'' | '"' => self.quote = Some(character),
            '[' | '{' => self.depth += 1,
            ')' | ']' | '}' => {
                self.depth -= 1;
                if self.depth == 0 {
                    return Scan::End;
                }
            }
            _ => {}
        }
        if self.depth > MAX_DEPTH + 1 { Scan::NoCall } else { Scan::More }
    }
}

/// A call in JSON's terms.
pub(super) struct Call {
    pub(super) name: String,
    /// A JSON object.
    pub(super) arguments: String,
}

/// Parses a whole call; `None` if it is not one.
pub(super) fn parse_call(text: &str) -> Option<Call> {
    let mut parser = Parser { rest: text, json: String::new(), depth: 0 };
    let name = parser.name()?;
    parser.expect('(')?;
    parser.json.push('{');
    let mut is_first = true;
    while !parser.accept(')') {
        if !is_first {
            parser.json.push_str(", ");
        }
        is_first = false;
        let key = parser.name()?;
        parser.expect('=')?;
        parser.write_string(key);
        parser.json.push_str(": ");
        parser.value()?;
        if !parser.accept(',') {
            parser.expect(')')?;
            break;
        }
    }
    parser.json.push('}');
    let is_whole = parser.rest.is_empty();
    is_whole.then(|| Call { name: name.to_owned(), arguments: parser.json })
}

fn is_name(character: char) -> bool {
    character.is_alphanumeric() || "_.-".contains(character)
}

/// Translates literals to JSON. Each character is looked at a bounded number of times.
struct Parser<'a> {
    rest: &'a str,
    json: String,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn skip_whitespace(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn accept(&mut self, character: char) -> bool {
        self.skip_whitespace();
        match self.rest.strip_prefix(character) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, character: char) -> Option<()> {
        self.accept(character).then_some(())
    }

    /// Reads the longest prefix of certain characters, which must not be empty.
    fn word(&mut self, belongs: impl Fn(char) -> bool) -> Option<&'a str> {
        self.skip_whitespace();
        let end = self.rest.find(|character| !belongs(character)).unwrap_or(self.rest.len());
        let word = &self.rest[..end];
        self.rest = &self.rest[end..];
        (!word.is_empty()).then_some(word)
    }

    fn name(&mut self) -> Option<&'a str> {
        let name = self.word(is_name)?;
        name.starts_with(|first: char| first.is_alphabetic() || first == '_').then_some(name)
    }

    fn value(&mut self) -> Option<()> {
        self.skip_whitespace();
        match self.rest.chars().next()? {
            '\'' | '"' => {
                let text = self.string()?;
                self.write_string(&text);
                Some(())
            }
            '[' => self.list(']'),
            '(' => self.list(')'),
            '{' => self.dictionary(),
            _ => self.scalar(),
        }
    }

    fn list(&mut self, close: char) -> Option<()> {
        self.descend()?;
        self.json.push('[');
        let mut is_first = true;
        while !self.accept(close) {
            if !is_first {
                self.json.push_str(", ");
            }
            is_first = false;
            self.value()?;
            if !self.accept(',') {
                self.expect(close)?;
                break;
            }
        }
        self.json.push(']');
        self.depth -= 1;
        Some(())
    }

    fn dictionary(&mut self) -> Option<()> {
        self.descend()?;
        self.json.push('{');
        let mut is_first = true;
        while !self.accept('}') {
            if !is_first {
                self.json.push_str(", ");
            }
            is_first = false;
            self.skip_whitespace();
            let key = self.string()?;
            self.write_string(&key);
            self.expect(':')?;
            self.json.push_str(": ");
            self.value()?;
            if !self.accept(',') {
                self.expect('}')?;
                break;
            }
        }
        self.json.push('}');
        self.depth -= 1;
        Some(())
    }

    /// Skips the opening bracket.
    fn descend(&mut self) -> Option<()> {
        self.rest = &self.rest[1..];
        self.depth += 1;
        (self.depth <= MAX_DEPTH).then_some(())
    }

    fn scalar(&mut self) -> Option<()> {
        let word =
            self.word(|character| character.is_ascii_alphanumeric() || "+-._".contains(character))?;
        match word {
            "True" | "true" => self.json.push_str("true"),
            "False" | "false" => self.json.push_str("false"),
            "None" | "null" => self.json.push_str("null"),
            number => self.number(number)?,
        }
        Some(())
    }

    /// Writes a number. JSON's form is kept as it is, whatever its precision.
    fn number(&mut self, text: &str) -> Option<()> {
        let digits = text.replace('_', "");
        if serde_json::from_str::<serde_json::Number>(&digits).is_ok() {
            self.json.push_str(&digits);
            return Some(());
        }
        // Forms that only Python has: `.5`, `5.`, `+5`. Names of infinities are no numbers here.
        let is_plain =
            digits.chars().all(|digit| digit.is_ascii_digit() || "+-.eE".contains(digit));
        let number = digits.parse::<f64>().ok().filter(|number| is_plain && number.is_finite())?;
        self.json.push_str(&serde_json::Number::from_f64(number)?.to_string());
        Some(())
    }

    /// Reads a string literal with Python's escapes.
    fn string(&mut self) -> Option<String> {
        let mut characters = self.rest.chars();
        let quote = characters.next().filter(|quote| "'\"".contains(*quote))?;
        let mut text = String::new();
        loop {
            match characters.next()? {
                character if character == quote => break,
                '\\' => match characters.next()? {
                    '\n' => {}
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'b' => text.push('\u{8}'),
                    'f' => text.push('\u{c}'),
                    'v' => text.push('\u{b}'),
                    'a' => text.push('\u{7}'),
                    'x' => text.push(code_point(&mut characters, 2)?),
                    'u' => text.push(code_point(&mut characters, 4)?),
                    'U' => text.push(code_point(&mut characters, 8)?),
                    octal @ '0'..='7' => text.push(octal_escape(octal, &mut characters)),
                    other @ ('\\' | '\'' | '"') => text.push(other),
                    other => {
                        text.push('\\');
                        text.push(other);
                    }
                },
                character => text.push(character),
            }
        }
        self.rest = characters.as_str();
        Some(text)
    }

    fn write_string(&mut self, text: &str) {
        // Serialisation of a text cannot fail.
        self.json.push_str(&serde_json::to_string(text).unwrap_or_default());
    }
}

fn code_point(characters: &mut std::str::Chars<'_>, digits: usize) -> Option<char> {
    let mut code = 0;
    for _ in 0..digits {
        code = code << 4 | characters.next()?.to_digit(16)?;
    }
    char::from_u32(code)
}

/// Reads up to two more digits of an octal escape.
fn octal_escape(first: char, characters: &mut std::str::Chars<'_>) -> char {
    let mut code = first.to_digit(8).unwrap_or_default();
    for _ in 0..2 {
        let mut ahead = characters.clone();
        let Some(digit) = ahead.next().and_then(|next| next.to_digit(8)) else { break };
        code = code << 3 | digit;
        *characters = ahead;
    }
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}
