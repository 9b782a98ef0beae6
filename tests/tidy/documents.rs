//! Checks documents: links and anchors resolve, pages are in the table of contents, and merges left
//! no row of a table and no folder of a tree twice.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;

use crate::rules::BOOK;
use crate::{File, violation};

const MERGED: &str = "possibly a faulty merge: read the whole passage";

/// The documents that name source files.
const SOURCES_NAMED_IN: &[&str] = &["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/src/internals/"];

/// A line and its number.
type Line<'a> = (usize, &'a str);

pub(crate) fn check(files: &[File]) -> Vec<String> {
    let documents: Vec<_> = files.iter().filter(|file| file.path.ends_with(".md")).collect();
    let mut found = Vec::new();
    for file in &documents {
        let (text, blocks) = split(&file.text);
        for block in blocks {
            found.extend(tree(file, &block));
        }
        found.extend(tables(file, &text));
        if SOURCES_NAMED_IN.iter().any(|place| file.path.starts_with(place)) {
            found.extend(sources(file, files));
        }
    }
    found.extend(links(files, &documents));
    found
}

/// Returns the lines of a document, and separately the lines of each code block. In the former,
/// each line of a code block is "`".
fn split(text: &str) -> (Vec<Line<'_>>, Vec<Vec<Line<'_>>>) {
    let mut lines = Vec::new();
    let mut blocks = Vec::new();
    let mut block: Option<Vec<Line<'_>>> = None;
    for (number, line) in (1..).zip(text.lines()) {
        let is_fence = line.trim_start().starts_with("```");
        let is_code = is_fence || block.is_some();
        match &mut block {
            None if is_fence => block = Some(Vec::new()),
            Some(_) if is_fence => blocks.extend(block.take()),
            Some(block) => block.push((number, line)),
            None => {}
        }
        lines.push((number, if is_code { "`" } else { line }));
    }
    (lines, blocks)
}

/// Finds names of source files, such as `wire/ring.rs`, that are the end of no path.
fn sources(document: &File, files: &[File]) -> Vec<String> {
    let name = Regex::new(r"`([\w./-]+\.(?:rs|py))`").expect("valid");
    let mut found = Vec::new();
    for (line, text) in (1..).zip(document.text.lines()) {
        for captures in name.captures_iter(text) {
            let named = &captures[1];
            let end = format!("/{named}");
            if !files.iter().any(|file| file.path == named || file.path.ends_with(&end)) {
                let advice = "name the file that has this now";
                found.push(violation(
                    &document.path,
                    line,
                    &format!("`{named}` does not exist"),
                    advice,
                ));
            }
        }
    }
    found
}

/// Finds links to missing files and headings, and pages that SUMMARY.md omits.
fn links(files: &[File], documents: &[&File]) -> Vec<String> {
    let anchors: BTreeMap<_, _> =
        documents.iter().map(|file| (file.path.as_str(), headings(&file.text))).collect();
    let mut paths = BTreeSet::from([String::new()]);
    for file in files {
        paths.insert(file.path.clone());
        paths.extend(file.path.match_indices('/').map(|(at, _)| file.path[..at].to_owned()));
    }
    let summary = format!("{BOOK}SUMMARY.md");
    let mut found = Vec::new();
    let mut listed = BTreeSet::new();
    for file in documents {
        for (line, target) in targets(&file.text) {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let Some(path) = resolve(&file.path, path).filter(|path| paths.contains(path)) else {
                let rule = format!("broken link `{target}`: no such file");
                found.push(violation(
                    &file.path,
                    line,
                    &rule,
                    "write the path relative to this document",
                ));
                continue;
            };
            if !anchor.is_empty()
                && anchors.get(path.as_str()).is_some_and(|anchors| !anchors.contains(anchor))
            {
                let rule = format!("broken link `{target}`: no such heading");
                found.push(violation(
                    &file.path,
                    line,
                    &rule,
                    "use the anchor of a heading of that document",
                ));
            }
            if file.path == summary {
                listed.insert(path);
            }
        }
    }
    for page in documents.iter().filter(|file| file.path.starts_with(BOOK) && file.path != summary)
    {
        if !listed.contains(&page.path) {
            let advice = format!("add the page to {summary}");
            found.push(violation(&page.path, 1, "the table of contents omits this page", &advice));
        }
    }
    found
}

/// Returns the targets of a document's inline links, without addresses.
fn targets(text: &str) -> Vec<Line<'_>> {
    let mut found = Vec::new();
    for (number, line) in split(text).0 {
        // A link's text may contain code, but not its target.
        for prose in line.split('`').step_by(2) {
            let targets = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            found.extend(
                targets.filter(|target| !target.contains(':')).map(|target| (number, target)),
            );
        }
    }
    found
}

/// Resolves a link's path from the root; `None` if it leaves the repository. An empty path is the
/// document itself.
fn resolve(document: &str, path: &str) -> Option<String> {
    if path.is_empty() {
        return Some(document.to_owned());
    }
    let mut segments: Vec<_> = document.split('/').collect();
    segments.pop();
    for segment in path.trim_end_matches('/').split('/') {
        match segment {
            "." => {}
            ".." => _ = segments.pop()?,
            name => segments.push(name),
        }
    }
    Some(segments.join("/"))
}

/// Returns the anchors of a document's headings, as code hosts and mdBook form them; the second of
/// equal ones ends with `-1`.
fn headings(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in split(text).0 {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let kept = title
            .trim()
            .chars()
            .filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
        let anchor = kept.collect::<String>().to_lowercase().replace(' ', "-");
        let mut unique = anchor.clone();
        let mut count = 0;
        while !anchors.insert(unique) {
            count += 1;
            unique = format!("{anchor}-{count}");
        }
    }
    anchors
}

/// Checks that the rows of a table differ in their first cell.
fn tables(file: &File, text: &[Line<'_>]) -> Vec<String> {
    let is_row = |line: &str| line.trim_start().starts_with('|');
    let mut found = Vec::new();
    for table in text
        .chunk_by(|one, next| is_row(one.1) == is_row(next.1))
        .filter(|lines| is_row(lines[0].1))
    {
        let mut keys = BTreeSet::new();
        for (line, row) in table {
            let key = row
                .trim_start()
                .trim_start_matches('|')
                .split(" |")
                .next()
                .unwrap_or_default()
                .trim();
            if !key.is_empty() && !keys.insert(key) {
                found.push(violation(
                    &file.path,
                    *line,
                    &format!("the table has two rows for `{key}`"),
                    MERGED,
                ));
            }
        }
    }
    found
}

/// Checks that a folder tree (its first line has a name that ends in `/`) explains each folder and
/// module once.
fn tree(file: &File, lines: &[Line<'_>]) -> Vec<String> {
    let name_of = |line: &str| line.split_whitespace().next().unwrap_or_default().to_owned();
    let is_tree = lines
        .first()
        .is_some_and(|(_, line)| !line.starts_with(' ') && name_of(line).ends_with('/'));
    let mut found = Vec::new();
    let mut names = BTreeSet::new();
    for (number, line) in lines.iter().filter(|_| is_tree) {
        let name = name_of(line);
        match line.len() - line.trim_start().len() {
            0 => names.clear(),
            2 if !names.insert(name.clone()) => {
                found.push(violation(
                    &file.path,
                    *number,
                    &format!("`{name}` is explained twice"),
                    MERGED,
                ));
            }
            _ => {}
        }
    }
    found
}
