//! The anchors and aliases of a YAML text, to add names to the YAML reader's error about an unknown
//! anchor.

/// The YAML reader's message for an alias without an anchor.
const UNKNOWN: &str = "unknown anchor";

/// The number of anchors that a message lists at most.
const SHOWN: usize = 20;

/// An anchor (`&name`) or an alias (`*name`) and its line, from 1.
struct Mark<'a> {
    alias: bool,
    name: &'a str,
    line: usize,
}

/// Adds to the YAML reader's message about an unknown anchor its name and the anchors defined
/// before it.
pub(super) fn explain(message: &str, text: &str, line: usize) -> String {
    if message != UNKNOWN {
        return message.to_owned();
    }
    let mut defined: Vec<&str> = Vec::new();
    for mark in marks(text) {
        if !mark.alias {
            if !defined.contains(&mark.name) {
                defined.push(mark.name);
            }
        } else if mark.line >= line && !defined.contains(&mark.name) {
            return format!(
                "{UNKNOWN} `{}`; {}",
                super::names::shortened(mark.name),
                listed(&defined)
            );
        }
    }
    message.to_owned()
}

fn listed(defined: &[&str]) -> String {
    if defined.is_empty() {
        return "no anchor is defined before it, such as `&level` in `- &level \"Level\"`"
            .to_owned();
    }
    let names: Vec<String> = defined.iter().take(SHOWN).map(|name| format!("`{name}`")).collect();
    let more = defined.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("anchors defined before it: {}{more}", names.join(", "))
}

/// Finds anchors and aliases outside of comments and quoted texts. Looks at each line by itself.
fn marks(text: &str) -> impl Iterator<Item = Mark<'_>> {
    (1..).zip(text.lines()).flat_map(|(number, line)| marks_of_line(line, number))
}

fn marks_of_line(line: &str, number: usize) -> Vec<Mark<'_>> {
    let mut marks = Vec::new();
    let mut quote = None;
    let mut before = ' ';
    for (at, c) in line.char_indices() {
        let begins = before.is_whitespace() || matches!(before, '[' | '{' | ',');
        match (quote, c) {
            (Some(open), _) => quote = Some(open).filter(|&open| open != c),
            (None, '"' | '\'') if begins => quote = Some(c),
            (None, '#') if before.is_whitespace() => break,
            (None, '&' | '*') if begins => {
                let rest = line.get(at + 1..).unwrap_or_default();
                let name = rest
                    .split(|c: char| c.is_whitespace() || ",[]{}".contains(c))
                    .next()
                    .unwrap_or_default();
                if !name.is_empty() {
                    marks.push(Mark { alias: c == '*', name, line: number });
                }
            }
            _ => {}
        }
        before = c;
    }
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_anchor_is_named() {
        let text = "a: [&x 1, &y \"*no\"] # *nor\nb: '&z *z'\nc: [*x,*nope]\nd: *later\n";
        assert_eq!(
            explain(UNKNOWN, text, 3),
            "unknown anchor `nope`; anchors defined before it: `x`, `y`"
        );
        assert_eq!(explain("other", text, 3), "other");
        assert_eq!(explain(UNKNOWN, "a: b\n", 1), UNKNOWN);
        assert!(
            explain(UNKNOWN, "a: *b\n", 1)
                .starts_with("unknown anchor `b`; no anchor is defined before it")
        );
        let many: String = (0..30).map(|at| format!("- &a{at} x\n")).collect();
        assert!(explain(UNKNOWN, &format!("{many}- *b\n"), 31).ends_with("`a19` and 10 more"));
    }
}
