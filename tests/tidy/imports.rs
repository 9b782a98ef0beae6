//! Checks what packages and modules use: packages and modules of lower floors only, no banned
//! paths, no cycles.

use std::collections::{BTreeMap, BTreeSet};

use crate::code::{Module, Source, ancestors, child};
use crate::rules::{BANS, Floor, LAYERINGS, PACKAGES};
use crate::{File, violation};

/// Checks that packages depend on lower floors of `PACKAGES`, and inherit the workspace's lints, of
/// which `unsafe_code` is one.
pub(crate) fn packages(files: &[File]) -> Vec<String> {
    let mut found = Vec::new();
    for file in files.iter().filter(|file| file.path.ends_with("/Cargo.toml")) {
        let Some(layering) =
            PACKAGES.iter().find(|layering| file.path.starts_with(layering.source))
        else {
            continue;
        };
        // A package outside the workspace, which knows the others only by their interfaces.
        if file.text.contains("\n[workspace]\n") {
            continue;
        }
        if !file.text.contains("[lints]\nworkspace = true") {
            let advice = "add `[lints]` with `workspace = true`";
            found.push(violation(
                &file.path,
                1,
                "a package has the lints of the workspace",
                advice,
            ));
        }
        let name = file
            .text
            .lines()
            .find_map(|line| line.strip_prefix("name = "))
            .unwrap_or_default()
            .trim_matches('"');
        let Some(own) = floor_of(layering.floors, name) else {
            let advice = "add it to PACKAGES in tests/tidy/rules.rs, and to ARCHITECTURE.md";
            found.push(violation(
                &file.path,
                1,
                &format!("the package `{name}` has no floor"),
                advice,
            ));
            continue;
        };
        let mut table = "";
        for (line, text) in (1..).zip(file.text.lines()) {
            if text.starts_with('[') {
                table = text;
            }
            let dependency = text.split(['=', '.', ' ']).next().unwrap_or_default();
            if table != "[dependencies]"
                || !(dependency == "pharos" || dependency.starts_with("pharos-"))
            {
                continue;
            }
            if floor_of(layering.floors, dependency).is_none_or(|floor| floor <= own) {
                let rule = format!("`{name}` may not depend on `{dependency}`");
                found.push(violation(
                    &file.path,
                    line,
                    &rule,
                    "see PACKAGES in tests/tidy/rules.rs",
                ));
            }
        }
    }
    found
}

/// Checks that modules use lower floors of `LAYERINGS` only.
pub(crate) fn floors(sources: &[Source<'_>]) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources {
        let Some(layering) = LAYERINGS.iter().find(|layering| source.folder == layering.source)
        else {
            continue;
        };
        let Some(own) = source.module.first() else { continue };
        let Some(height) = floor_of(layering.floors, own) else {
            let advice = "add it to a floor in tests/tidy/rules.rs, and to ARCHITECTURE.md";
            found.push(violation(
                source.path,
                1,
                &format!("the module `{own}` has no floor"),
                advice,
            ));
            continue;
        };
        for path in &source.paths {
            let [root, other, ..] = &path.segments[..] else { continue };
            let Some(floor) =
                floor_of(layering.floors, other).filter(|_| root == "crate" && other != own)
            else {
                continue;
            };
            if floor < height || (floor == height && !layering.floors[height].among_themselves) {
                let place = if floor == height { "beside" } else { "above" };
                let rule = format!("`{own}` uses `{other}`, which is {place} it");
                let advice =
                    "imports point down only: move what is shared below both, or pass it in";
                found.push(violation(source.path, path.line, &rule, advice));
            }
        }
    }
    found
}

fn floor_of(floors: &[Floor], module: &str) -> Option<usize> {
    floors.iter().position(|floor| floor.modules.contains(&module))
}

/// Checks the paths of `BANS`.
pub(crate) fn bans(sources: &[Source<'_>]) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources {
        let is_in = |places: &[&str]| places.iter().any(|place| source.path.starts_with(place));
        for ban in BANS.iter().filter(|ban| is_in(ban.within) && !is_in(ban.except)) {
            for path in &source.paths {
                let name = path.segments.join("::");
                let is_banned = |banned: &&str| {
                    name.strip_prefix(banned)
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
                };
                if ban.paths.iter().any(is_banned) {
                    let rule = format!("`{name}` is not allowed here");
                    found.push(violation(source.path, path.line, &rule, ban.advice));
                }
            }
        }
    }
    found
}

/// Checks that the modules of each parent do not form cycles. A name that a parent imports counts
/// as the module that defines it.
pub(crate) fn cycles(sources: &[Source<'_>]) -> Vec<String> {
    let folders: BTreeSet<_> = sources.iter().map(|source| source.folder).collect();
    let mut found = Vec::new();
    for folder in folders {
        let graph = Graph::new(sources.iter().filter(|source| source.folder == folder).collect());
        let ties = graph.ties();
        for (from, targets) in &ties {
            for (to, place) in targets.iter().filter(|(to, _)| reaches(&ties, to, from)) {
                let rule = format!("`{}` and `{}` use each other", from.join("::"), to.join("::"));
                let advice = "move what they share below both, or pass it in";
                found.push(violation(place.path, place.line, &rule, advice));
            }
        }
    }
    found
}

/// The modules of one crate.
struct Graph<'a> {
    sources: Vec<&'a Source<'a>>,
    modules: BTreeSet<Module>,
    /// The path of each name that a module imports.
    imports: BTreeMap<(&'a [String], &'a str), &'a [String]>,
}

#[derive(Clone, Copy)]
struct Place<'a> {
    path: &'a str,
    line: usize,
}

/// For each module, the modules of the same parent that it uses, with one place of the use.
type Ties<'a> = BTreeMap<Module, BTreeMap<Module, Place<'a>>>;

impl<'a> Graph<'a> {
    fn new(sources: Vec<&'a Source<'a>>) -> Self {
        let modules = sources.iter().flat_map(|source| ancestors(&source.module)).collect();
        let mut imports = BTreeMap::new();
        for source in &sources {
            for path in source.paths.iter().filter(|path| path.is_import) {
                if let [root, inside @ .., name] = &path.segments[..]
                    && root == "crate"
                    && !inside.is_empty()
                {
                    imports.insert((&source.module[..], name.as_str()), &path.segments[1..]);
                }
            }
        }
        Self { sources, modules, imports }
    }

    fn ties(&self) -> Ties<'a> {
        let mut ties = Ties::new();
        for source in &self.sources {
            for path in source.paths.iter().filter(|path| path.segments[0] == "crate") {
                let from = &source.module;
                let to = self.resolve(from, &path.segments[1..], 0);
                let height = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
                if height < from.len() && height < to.len() {
                    let place = Place { path: source.path, line: path.line };
                    let targets = ties.entry(from[..=height].to_vec()).or_default();
                    targets.entry(to[..=height].to_vec()).or_insert(place);
                }
            }
        }
        ties
    }

    /// Returns the module that a path leads to, seen from another module.
    fn resolve(&self, from: &[String], path: &[String], depth: usize) -> Module {
        let mut module = Module::new();
        for (at, segment) in path.iter().enumerate() {
            let next = child(&module, segment);
            if self.modules.contains(&next) {
                module = next;
                continue;
            }
            // Only names that an ancestor imports: other modules re-export what belongs to them.
            let is_ancestor = from.starts_with(&module) && from != module;
            match self.imports.get(&(&module[..], segment.as_str())) {
                Some(target) if is_ancestor && depth < 8 => {
                    let onward = [target, &path[at + 1..]].concat();
                    return self.resolve(from, &onward, depth + 1);
                }
                _ => return module,
            }
        }
        module
    }
}

fn reaches(ties: &Ties<'_>, from: &Module, to: &Module) -> bool {
    let mut pending = vec![from];
    let mut visited = BTreeSet::new();
    while let Some(module) = pending.pop() {
        if module == to {
            return true;
        }
        if visited.insert(module) {
            pending.extend(ties.get(module).into_iter().flatten().map(|(next, _)| next));
        }
    }
    false
}
