//! The documents: what a merge leaves behind when two branches have written at the same place. A table's row that stands
//! alone, a row or a folder that is explained twice, a paragraph that has grown onto the one before.

use std::collections::BTreeSet;

use crate::checks::violation;
use crate::tree::File;

const MERGED: &str = "two branches may have written here: read the place as a whole";

/// Every violation in a document; nothing in a file that is none.
pub(crate) fn check(file: &File) -> Vec<String> {
    if !file.path.ends_with(".md") {
        return Vec::new();
    }
    let (mut found, mut text, mut fence) = (Vec::new(), Vec::new(), None);
    for (number, line) in (1..).zip(file.text.lines()) {
        let mark = line.trim_start().starts_with("```");
        match &mut fence {
            None if mark => fence = Some(Vec::new()),
            Some(lines) if mark => {
                found.extend(tree(file, lines));
                fence = None;
            }
            Some(lines) => lines.push((number, line)),
            None => {}
        }
        // A block of code counts as a line that is neither a row nor empty.
        text.push((number, if mark || fence.is_some() { "`" } else { line }));
    }
    found.extend(tables(file, &text));
    found.extend(paragraphs(file, &text));
    found
}

/// A table has a head, and no two rows with the same beginning.
fn tables(file: &File, text: &[(usize, &str)]) -> Vec<String> {
    let is_row = |line: &str| line.trim_start().starts_with('|');
    let mut found = Vec::new();
    for table in text.chunk_by(|one, next| is_row(one.1) == is_row(next.1)) {
        let [(first, head), rest @ ..] = table else { continue };
        if !is_row(head) {
            continue;
        }
        let is_rule = |line: &str| line.contains('-') && line.chars().all(|letter| "|-: ".contains(letter));
        let Some((_, rows)) = rest.split_first().filter(|(rule, _)| is_rule(rule.1)) else {
            found.push(violation(&file.path, *first, "a table's row without a head", MERGED));
            continue;
        };
        let mut keys = BTreeSet::new();
        for (line, row) in rows {
            let key = row.trim_start().trim_start_matches('|').split(" |").next().unwrap_or_default().trim();
            if !key.is_empty() && !keys.insert(key) {
                let rule = format!("the table has two rows for `{key}`");
                found.push(violation(&file.path, *line, &rule, MERGED));
            }
        }
    }
    found
}

/// What begins with bold words or is a heading stands after an empty line.
fn paragraphs(file: &File, text: &[(usize, &str)]) -> Vec<String> {
    let begins = |line: &str| line.starts_with("**") || (line.starts_with('#') && line.contains("# "));
    let mut found = Vec::new();
    for pair in text.array_windows::<2>() {
        let [(_, before), (line, here)] = pair;
        if begins(here) && !before.is_empty() && !before.starts_with('#') {
            let rule = "a heading, or a paragraph with a bold beginning, follows an empty line";
            found.push(violation(&file.path, *line, rule, MERGED));
        }
    }
    found
}

/// In a tree of folders (its first line ends its name with `/`) each folder and module is explained once.
fn tree(file: &File, lines: &[(usize, &str)]) -> Vec<String> {
    let is_tree = lines.first().is_some_and(|(_, line)| line.split(' ').next().is_some_and(|name| name.ends_with('/')));
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    for (number, line) in lines.iter().filter(|_| is_tree) {
        let indent = line.len() - line.trim_start().len();
        let name = line.trim_start().split(' ').next().unwrap_or_default();
        match indent {
            0 => seen.clear(),
            2 if !seen.insert(name) => {
                let rule = format!("`{name}` is explained twice");
                found.push(violation(&file.path, *number, &rule, MERGED));
            }
            _ => {}
        }
    }
    found
}
