//! The tokens of the protobuf text format: names, numbers, strings and symbols, with their byte
//! positions.
//!
//! Source: the text format language specification of Protocol Buffers.

/// One token. Numbers stay text, because their meaning depends on the field.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token<'a> {
    /// A field name, an enum value or a literal such as `true`.
    Name(&'a str),
    /// Digits, optionally with a fraction, an exponent or a radix prefix.
    Number(&'a str),
    /// A quoted string, its escapes resolved.
    Text(Vec<u8>),
    /// One of `{ } < > [ ] : , ; -`.
    Symbol(char),
    /// The end of the source.
    End,
}

impl Token<'_> {
    /// Returns the token as error messages show it.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Name(text) | Self::Number(text) => format!("'{text}'"),
            Self::Text(bytes) => {
                format!("the string \"{}\"", String::from_utf8_lossy(bytes).escape_debug())
            }
            Self::Symbol(symbol) => format!("'{symbol}'"),
            Self::End => "the end of the file".to_owned(),
        }
    }
}

/// An error at a byte position of the source.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TextError {
    /// The byte position, at most the length of the source.
    pub(super) offset: usize,
    /// The cause, and what is allowed.
    pub(super) message: String,
}

impl TextError {
    pub(super) fn new(offset: usize, message: impl Into<String>) -> Self {
        Self { offset, message: message.into() }
    }

    /// Formats the error as `FILE:LINE:COLUMN: message`. Lines and columns count from 1, columns in
    /// characters.
    pub(super) fn locate(&self, source: &str, file_name: &str) -> String {
        let mut line = 1;
        let mut column = 1;
        for (position, character) in source.char_indices() {
            if position >= self.offset {
                break;
            }
            if character == '\n' {
                line += 1;
                column = 1;
            } else {
                column += 1;
            }
        }
        format!("{file_name}:{line}:{column}: {}", self.message)
    }
}

/// Splits a source into tokens.
pub(super) struct Lexer<'a> {
    source: &'a str,
    at: usize,
}

impl<'a> Lexer<'a> {
    pub(super) fn new(source: &'a str) -> Self {
        // Some editors write a byte order mark; skip it.
        let at = if source.starts_with('\u{feff}') { '\u{feff}'.len_utf8() } else { 0 };
        Self { source, at }
    }

    /// Returns the next token and its start.
    pub(super) fn next_token(&mut self) -> Result<(Token<'a>, usize), TextError> {
        self.skip_blanks();
        let start = self.at;
        let rest = self.rest();
        let Some(first) = rest.chars().next() else { return Ok((Token::End, start)) };
        let second_is_digit = rest.as_bytes().get(1).is_some_and(u8::is_ascii_digit);
        let token = match first {
            'a'..='z' | 'A'..='Z' | '_' => {
                Token::Name(self.take_while(|_, byte| byte.is_ascii_alphanumeric() || byte == b'_'))
            }
            '0'..='9' => Token::Number(self.number()),
            '.' if second_is_digit => Token::Number(self.number()),
            '"' | '\'' => Token::Text(self.string(first)?),
            '{' | '}' | '<' | '>' | '[' | ']' | ':' | ',' | ';' | '-' => {
                self.at += 1;
                Token::Symbol(first)
            }
            other => {
                return Err(TextError::new(
                    start,
                    format!("unexpected character '{}'", other.escape_debug()),
                ));
            }
        };
        Ok((token, start))
    }

    fn rest(&self) -> &'a str {
        self.source.get(self.at..).unwrap_or_default()
    }

    fn skip_blanks(&mut self) {
        loop {
            let rest = self.rest();
            let text = rest.trim_start_matches([' ', '\t', '\r', '\n', '\x0b', '\x0c']);
            self.at += rest.len() - text.len();
            if !text.starts_with('#') {
                return;
            }
            self.at += text.find('\n').unwrap_or(text.len());
        }
    }

    /// Takes ASCII bytes for which `keep(byte before, byte)` holds.
    fn take_while(&mut self, keep: impl Fn(u8, u8) -> bool) -> &'a str {
        let rest = self.rest();
        let mut before = 0;
        let length = rest.bytes().take_while(|&byte| {
            byte.is_ascii() && keep(std::mem::replace(&mut before, byte), byte)
        });
        let length = length.count();
        self.at += length;
        rest.get(..length).unwrap_or_default()
    }

    fn number(&mut self) -> &'a str {
        let rest = self.rest();
        let hexadecimal = rest.starts_with("0x") || rest.starts_with("0X");
        self.take_while(|before, byte| {
            let exponent_sign =
                matches!(byte, b'+' | b'-') && matches!(before, b'e' | b'E') && !hexadecimal;
            byte.is_ascii_alphanumeric() || byte == b'.' || exponent_sign
        })
    }

    fn string(&mut self, quote: char) -> Result<Vec<u8>, TextError> {
        let opened_at = self.at;
        self.at += 1;
        let mut bytes = Vec::new();
        loop {
            let at = self.at;
            match self.rest().chars().next() {
                None | Some('\n') => {
                    return Err(TextError::new(
                        opened_at,
                        format!("this string is not closed with {quote} on its line"),
                    ));
                }
                Some('\\') => self.escape(&mut bytes)?,
                Some(character) => {
                    self.at += character.len_utf8();
                    if character == quote {
                        return Ok(bytes);
                    }
                    bytes.extend_from_slice(
                        self.source.get(at..self.at).unwrap_or_default().as_bytes(),
                    );
                }
            }
        }
    }

    fn escape(&mut self, bytes: &mut Vec<u8>) -> Result<(), TextError> {
        let start = self.at;
        self.at += 1;
        let Some(kind) = self.rest().chars().next() else {
            return Err(TextError::new(start, "the file ends within an escape"));
        };
        if let '0'..='7' = kind {
            let value = self.digits(start, 8, 1..=3)?;
            let byte = u8::try_from(value)
                .map_err(|_| TextError::new(start, "an octal escape goes up to \\377"))?;
            bytes.push(byte);
            return Ok(());
        }
        self.at += kind.len_utf8();
        let simple = match kind {
            'n' => b'\n',
            'r' => b'\r',
            't' => b'\t',
            'a' => 0x07,
            'b' => 0x08,
            'f' => 0x0c,
            'v' => 0x0b,
            '\\' | '\'' | '"' | '?' => kind as u8,
            'x' | 'X' => self.digits(start, 16, 1..=2)? as u8,
            'u' | 'U' => {
                let count = if kind == 'u' { 4 } else { 8 };
                let value = self.digits(start, 16, count..=count)?;
                let character = char::from_u32(value).ok_or_else(|| {
                    TextError::new(start, format!("{value:#x} is not a Unicode character"))
                })?;
                bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                return Ok(());
            }
            other => {
                let text = format!(
                    "unknown escape '\\{}'; allowed: a b f n r t v x u U ? ' \" \\ and octal \
                     digits",
                    other.escape_debug()
                );
                return Err(TextError::new(start, text));
            }
        };
        bytes.push(simple);
        Ok(())
    }

    fn digits(
        &mut self,
        start: usize,
        radix: u32,
        count: std::ops::RangeInclusive<usize>,
    ) -> Result<u32, TextError> {
        let found = self
            .rest()
            .chars()
            .take(*count.end())
            .take_while(|digit| digit.is_digit(radix))
            .count();
        let text = self.rest().get(..found).unwrap_or_default();
        self.at += found;
        match u32::from_str_radix(text, radix) {
            Ok(value) if count.contains(&found) => Ok(value),
            _ => Err(TextError::new(
                start,
                format!("this escape takes {} to {} digits", count.start(), count.end()),
            )),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    fn check(source: &str, expected: &[Token<'_>]) {
        let mut lexer = Lexer::new(source);
        for token in expected {
            assert_eq!(&lexer.next_token().unwrap().0, token, "in {source:?}");
        }
        assert_eq!(lexer.next_token().unwrap().0, Token::End, "after {source:?}");
    }

    #[test]
    fn splits_into_tokens() {
        check("\u{feff}# only a comment", &[]);
        check(
            "a_1:-0x1F",
            &[Token::Name("a_1"), Token::Symbol(':'), Token::Symbol('-'), Token::Number("0x1F")],
        );
        check(
            "1e-3 .5f # rest\n7",
            &[Token::Number("1e-3"), Token::Number(".5f"), Token::Number("7")],
        );
        check("'a\"b' \"c'\\\"\"", &[Token::Text(b"a\"b".to_vec()), Token::Text(b"c'\"".to_vec())]);
        check(r#"'\x41\101\n\u00e9\\'"#, &[Token::Text("AA\n\u{e9}\\".as_bytes().to_vec())]);
        check("'日本'", &[Token::Text("日本".as_bytes().to_vec())]);
    }

    #[test]
    fn errors_have_positions() {
        for (source, expected) in [
            ("a: 'x\n'", "f:1:4: this string is not closed with ' on its line"),
            ("\n\n  §", "f:3:3: unexpected character '§'"),
            (
                "'é\\q'",
                "f:1:3: unknown escape '\\q'; allowed: a b f n r t v x u U ? ' \" \\ and octal \
                 digits",
            ),
            ("'\\400'", "f:1:2: an octal escape goes up to \\377"),
            ("'\\ud800'", "f:1:2: 0xd800 is not a Unicode character"),
            ("'\\xg'", "f:1:2: this escape takes 1 to 2 digits"),
        ] {
            let mut lexer = Lexer::new(source);
            let error = loop {
                match lexer.next_token() {
                    Ok((Token::End, _)) => panic!("no error in {source:?}"),
                    Ok(_) => {}
                    Err(error) => break error,
                }
            };
            assert_eq!(error.locate(source, "f"), expected);
        }
    }
}
