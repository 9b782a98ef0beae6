//! Checks documents: links and anchors resolve, pages are in the table of contents, and merges left no damage (a table
//! row without a head, a row or a folder that occurs twice, a missing empty line).

use std::collections::{BTreeMap, BTreeSet};

use crate::checks::violation;
use crate::rules::BOOK;
use crate::tree::File;

const MERGED: &str = "possibly a faulty merge: read the whole passage";

/// A line and its number.
type Line<'a> = (usize, &'a str);

/// Returns every violation within one document; none for files that are not Markdown.
pub(crate) fn check(file: &File) -> Vec<String> {
    if !file.path.ends_with(".md") {
        return Vec::new();
    }
    let (text, blocks) = split(&file.text);
    let mut found: Vec<_> = blocks.iter().flat_map(|lines| tree(file, lines)).collect();
    found.extend(tables(file, &text));
    found.extend(paragraphs(file, &text));
    found
}

/// Returns the lines of a document, and separately those of its code blocks. In the former, each line of a code block is "`".
fn split(text: &str) -> (Vec<Line<'_>>, Vec<Vec<Line<'_>>>) {
    let (mut lines, mut blocks, mut fence) = (Vec::new(), Vec::new(), None);
    for (number, line) in (1..).zip(text.lines()) {
        let mark = line.trim_start().starts_with("```");
        match &mut fence {
            None if mark => fence = Some(Vec::new()),
            Some(_) if mark => blocks.extend(fence.take()),
            Some(block) => block.push((number, line)),
            None => {}
        }
        lines.push((number, if mark || fence.is_some() { "`" } else { line }));
    }
    (lines, blocks)
}

/// Returns every violation between documents: links to missing files and headings, and pages that SUMMARY.md omits.
pub(crate) fn links(files: &[File]) -> Vec<String> {
    let documents: Vec<_> = files.iter().filter(|file| file.path.ends_with(".md")).collect();
    let anchors: BTreeMap<_, _> = documents.iter().map(|file| (file.path.as_str(), headings(&file.text))).collect();
    let exists = |path: &str| {
        path.is_empty()
            || files
                .iter()
                .any(|file| file.path.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
    };
    let (mut found, mut listed) = (Vec::new(), BTreeSet::new());
    let summary = format!("{BOOK}SUMMARY.md");
    for file in &documents {
        for (line, target) in targets(&file.text) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let Some(path) = resolve(&file.path, path).filter(|path| exists(path)) else {
                let rule = format!("broken link `{target}`: no such file");
                found.push(violation(&file.path, line, &rule, "write the path relative to this document"));
                continue;
            };
            if !anchor.is_empty() && anchors.get(path.as_str()).is_some_and(|anchors| !anchors.contains(anchor)) {
                let rule = format!("broken link `{target}`: no such heading");
                found.push(violation(&file.path, line, &rule, "use the anchor of a heading of that document"));
            }
            if file.path == summary {
                listed.insert(path);
            }
        }
    }
    let pages = documents.iter().filter(|file| file.path.starts_with(BOOK) && file.path != summary);
    let omitted = pages.filter(|page| !listed.contains(&page.path));
    let advice = format!("add the page to {summary}");
    found.extend(omitted.map(|page| violation(&page.path, 1, "the table of contents omits this page", &advice)));
    found
}

/// Returns the targets of a document's inline links, without addresses.
fn targets(text: &str) -> Vec<Line<'_>> {
    let mut found = Vec::new();
    for (number, line) in split(text).0 {
        // A link's text may contain code, but not its target.
        for prose in line.split('`').step_by(2) {
            let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            found.extend(targets.filter(|target| !target.contains(':')).map(|target| (number, target)));
        }
    }
    found
}

/// Resolves a link's path from the root; `None` if it leaves the repository. An empty path is the document itself.
fn resolve(document: &str, path: &str) -> Option<String> {
    if path.is_empty() {
        return Some(document.to_owned());
    }
    let mut segments: Vec<_> = document.split('/').collect();
    segments.pop();
    for segment in path.trim_end_matches('/').split('/') {
        match segment {
            "." => {}
            ".." => {
                segments.pop()?;
            }
            name => segments.push(name),
        }
    }
    Some(segments.join("/"))
}

/// Returns the anchors of a document's headings, as code hosts and mdBook form them; the second of equal ones ends with `-1`.
fn headings(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in split(text).0 {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let kept = title.trim().chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
        let anchor = kept.collect::<String>().to_lowercase().replace(' ', "-");
        let mut count = 0;
        let mut unique = anchor.clone();
        while !anchors.insert(unique) {
            count += 1;
            unique = format!("{anchor}-{count}");
        }
    }
    anchors
}

/// Checks that tables have a head and no two rows with the same first cell.
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

/// Checks that headings, and paragraphs that begin in bold, follow an empty line.
fn paragraphs(file: &File, text: &[(usize, &str)]) -> Vec<String> {
    let begins = |line: &str| line.starts_with("**") || (line.starts_with('#') && line.contains("# "));
    let mut found = Vec::new();
    for pair in text.array_windows::<2>() {
        let [(_, before), (line, here)] = pair;
        if begins(here) && !before.is_empty() && !before.starts_with('#') {
            let rule = "a heading or a paragraph that begins in bold must follow an empty line";
            found.push(violation(&file.path, *line, rule, MERGED));
        }
    }
    found
}

/// Checks that a folder tree (its first line has a name that ends in `/`) explains each folder and module once.
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
