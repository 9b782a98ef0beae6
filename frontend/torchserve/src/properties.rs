//! Parses Java properties files as `java.util.Properties` does, and expands `$$NAME$$` from the
//! environment as TorchServe does.

/// Parses keys and values, in order. If a key occurs twice, the last value wins.
///
/// # Errors
/// An invalid escape sequence; the text names the line.
pub fn parse(text: &str) -> Result<Vec<(String, String)>, String> {
    let mut all: Vec<(String, String)> = Vec::new();
    for (number, line) in logical_lines(text) {
        let (key, value) = split(&line);
        let key = unescaped(key).map_err(|error| format!("line {number}: {error}"))?;
        let value = unescaped(value).map_err(|error| format!("line {number}: {error}"))?;
        all.retain(|(known, _)| *known != key);
        all.push((key, value));
    }
    Ok(all)
}

/// Blank characters in Java properties files.
const BLANK: [char; 3] = [' ', '\t', '\x0c'];

/// Splits the text into logical lines: joins lines that end in an odd number of `\`, and skips
/// comments and blank lines. Returns each logical line with the number of its first line.
fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let normalized = text.strip_prefix('\u{feff}').unwrap_or(text).replace("\r\n", "\n");
    let mut lines: Vec<(usize, String)> = Vec::new();
    let mut open = false;
    for (number, line) in (1..).zip(normalized.split(['\n', '\r'])) {
        let line = line.trim_start_matches(BLANK);
        if !open && (line.is_empty() || line.starts_with(['#', '!'])) {
            continue;
        }
        let continues = line.chars().rev().take_while(|c| *c == '\\').count() % 2 == 1;
        let part = if continues { line.get(..line.len() - 1).unwrap_or_default() } else { line };
        match lines.last_mut() {
            Some((_, whole)) if open => whole.push_str(part),
            _ => lines.push((number, part.to_owned())),
        }
        open = continues;
    }
    lines
}

/// Splits a line into key and value. The key ends at the first unescaped blank, `=` or `:`; blanks
/// and one `=` or `:` after it are skipped.
fn split(line: &str) -> (&str, &str) {
    let mut escaped = false;
    let end = line.char_indices().find(|(_, c)| {
        let ends = !escaped && (BLANK.contains(c) || ['=', ':'].contains(c));
        escaped = *c == '\\' && !escaped;
        ends
    });
    let Some((end, _)) = end else { return (line, "") };
    let (key, rest) = line.split_at(end);
    let separated = rest.trim_start_matches(BLANK);
    let value = separated.strip_prefix(['=', ':']).unwrap_or(separated);
    (key, value.trim_start_matches(BLANK))
}

fn unescaped(text: &str) -> Result<String, String> {
    let mut units: Vec<u16> = Vec::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        let c = match c {
            '\\' => match rest.next() {
                Some('u') => {
                    let digits: String = rest.by_ref().take(4).collect();
                    let unit = u16::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 4);
                    units.push(unit.ok_or_else(|| {
                        format!(
                            "'\\u{digits}' is not a character; \\u takes four hexadecimal digits"
                        )
                    })?);
                    continue;
                }
                Some('t') => '\t',
                Some('n') => '\n',
                Some('r') => '\r',
                Some('f') => '\x0c',
                Some(other) => other,
                None => break,
            },
            c => c,
        };
        units.extend_from_slice(c.encode_utf16(&mut [0; 2]));
    }
    Ok(String::from_utf16_lossy(&units))
}

/// Replaces each `$$NAME$$` in `value` by the result of `variable`.
///
/// # Errors
/// A variable is not set. The text is TorchServe's.
pub fn expand(value: &str, variable: impl Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut done = String::new();
    let mut rest = value;
    while let Some((before, after)) = rest.split_once("$$") {
        done.push_str(before);
        match after.split_once("$$") {
            Some((name, after)) if !name.is_empty() && !name.contains('$') => {
                done.push_str(
                    &variable(name)
                        .ok_or_else(|| format!("Invalid Environment Variable {name}"))?,
                );
                rest = after;
            }
            _ => {
                done.push_str("$$");
                rest = after;
            }
        }
    }
    done.push_str(rest);
    Ok(done)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[(&str, &str)]) {
        let expected: Vec<_> =
            expected.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        assert_eq!(parse(text).unwrap(), expected, "{text:?}");
    }

    #[test]
    fn parses_files_as_java_does() {
        check(
            "a=1\nb = 2\nc:3\nd 4\ne\n",
            &[("a", "1"), ("b", "2"), ("c", "3"), ("d", "4"), ("e", "")],
        );
        check("# no=1\n  ! no=2\n\n \t\nk=v # part of it\n", &[("k", "v # part of it")]);
        check(
            "models={\\\n  \"noop\": {\\\n    \"1.0\": {}\\\n  }\\\n}\nk=v",
            &[("models", "{\"noop\": {\"1.0\": {}}}"), ("k", "v")],
        );
        check("k=a\\\\\nl=b\\\\\\\n  c", &[("k", "a\\"), ("l", "b\\c")]);
        check("a\\ b\\=c\\:=x\\ty\\u0041\\ud83d\\ude00\\q", &[("a b=c:", "x\tyA\u{1f600}q")]);
        check("k = v \r\nl=w\rm=x", &[("k", "v "), ("l", "w"), ("m", "x")]);
        check("k=1\nj=2\nk=3", &[("j", "2"), ("k", "3")]);
        check("k=a\\\n# part\n", &[("k", "a# part")]);
        check(
            "inference_address=http://0.0.0.0:8080\n",
            &[("inference_address", "http://0.0.0.0:8080")],
        );
        check("k==v\nl= = v\nk2 : = v", &[("k", "=v"), ("l", "= v"), ("k2", "= v")]);
        check("k=v\\", &[("k", "v")]);
        assert_eq!(
            parse("a=1\n\nk=\\u12x").unwrap_err(),
            "line 3: '\\u12x' is not a character; \\u takes four hexadecimal digits"
        );
    }

    #[test]
    fn expands_variables_between_pairs_of_dollars() {
        let variable = |name: &str| match name {
            "PORT" => Some("80".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        for (value, expected) in [
            ("http://0.0.0.0:$$PORT$$", Ok("http://0.0.0.0:80")),
            ("$$PORT$$$$PORT$$/$$EMPTY$$", Ok("8080/")),
            ("a $ b $$ c", Ok("a $ b $$ c")),
            ("$$NONE$$", Err("Invalid Environment Variable NONE")),
        ] {
            assert_eq!(
                expand(value, variable),
                expected.map(str::to_owned).map_err(str::to_owned),
                "{value}"
            );
        }
    }
}
