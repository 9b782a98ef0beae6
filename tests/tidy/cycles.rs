//! Checks that sibling modules are acyclic, in the graph of each crate's modules that the paths in their code form.
//!
//! A path through a parent's `use` counts as a path to the imported module: an import through the parent is still an import of
//! the sibling. Tests are exempt.

use std::collections::{BTreeMap, BTreeSet};

use crate::checks::{absolute, is_test, module_of, source_of, violation};
use crate::known::{CYCLES, Cycle};
use crate::source::{lines_without_tests, mask, test_modules, uses_and_paths};
use crate::tree::File;

/// A module as segments below its crate.
type Module = Vec<String>;

/// A path in one file to another module.
struct Edge {
    from: Module,
    to: Module,
    path: String,
    line: usize,
    /// The named item, or the module itself.
    name: String,
}

/// The modules of one crate.
#[derive(Default)]
struct Graph {
    modules: BTreeSet<Module>,
    /// The path of each name that a module imports.
    imports: BTreeMap<(Module, String), Module>,
    edges: Vec<Edge>,
}

/// Modules of one parent that all depend on each other.
struct Found<'a> {
    parent: Module,
    modules: Vec<&'a str>,
    edges: Vec<&'a Edge>,
}

/// Returns every unlisted cycle.
pub(crate) fn check(files: &[File]) -> Vec<String> {
    judge(files, CYCLES).0
}

/// Returns every listed cycle that no longer exists.
pub(crate) fn stale(files: &[File]) -> Vec<String> {
    judge(files, CYCLES).1
}

/// Returns the unlisted cycles, and the listed ones that are not cycles.
pub(crate) fn judge(files: &[File], known: &[Cycle]) -> (Vec<String>, Vec<String>) {
    let (mut found, mut confirmed) = (Vec::new(), BTreeSet::new());
    for (source, files) in crates(files) {
        let graph = Graph::read(&files);
        for cycle in graph.cycles() {
            let parent = cycle.parent.join("::");
            let is_same =
                |entry: &Cycle| entry.source == source && entry.parent == parent && entry.modules == cycle.modules;
            match known.iter().position(is_same) {
                Some(entry) => _ = confirmed.insert(entry),
                None => found.push(describe(&cycle)),
            }
        }
    }
    let stale = known.iter().enumerate().filter(|(at, _)| !confirmed.contains(at)).map(|(_, entry)| {
        let rule = format!("`{}` no longer form a cycle in `crate::{}`", entry.modules.join("`, `"), entry.parent);
        violation(entry.source, 1, &rule, "remove the entry from CYCLES in tests/tidy/known.rs")
    });
    (found, stale.collect())
}

/// Groups files with code by the source folder of their crate.
fn crates(files: &[File]) -> BTreeMap<&str, Vec<&File>> {
    let mut crates: BTreeMap<&str, Vec<&File>> = BTreeMap::new();
    for file in files.iter().filter(|file| file.path.ends_with(".rs")) {
        if let Some(source) = source_of(&file.path) {
            crates.entry(source).or_default().push(file);
        }
    }
    crates
}

impl Graph {
    fn read(files: &[&File]) -> Self {
        let mut graph = Self::default();
        let tests: BTreeSet<Module> = files.iter().flat_map(|file| declared_tests(file)).collect();
        let is_code = |file: &&&File| {
            let module = module_of(&file.path);
            !is_test(&file.path) && !(1..=module.len()).any(|length| tests.contains(&module[..length]))
        };
        let files: Vec<_> = files.iter().filter(is_code).collect();
        for file in &files {
            let module = module_of(&file.path);
            graph.modules.extend((1..=module.len()).map(|length| module[..length].to_vec()));
        }
        let named: Vec<_> = files.iter().map(|file| (file, graph.named(file))).collect();
        for (file, paths) in &named {
            for (_, path) in paths.iter().filter(|((_, of_use), _)| *of_use) {
                if let Some(name) = path.last() {
                    graph.imports.insert((module_of(&file.path), name.clone()), path.clone());
                }
            }
        }
        for (file, paths) in named {
            for ((line, _), path) in paths {
                let from = module_of(&file.path);
                let (to, name) = graph.resolve(&from, &path, 0);
                graph.edges.push(Edge { from, to, path: file.path.clone(), line, name });
            }
        }
        graph
    }

    /// Returns the paths of a file within its crate, as segments below the crate, with line and whether a `use` names them.
    fn named(&self, file: &File) -> Vec<((usize, bool), Module)> {
        let own = lines_without_tests(&file.text);
        let module = module_of(&file.path);
        let mut found = Vec::new();
        for (line, of_use, path) in uses_and_paths(&mask(&file.text, false)) {
            let first = path.split("::").next().unwrap_or_default();
            let child: Module = module.iter().cloned().chain([first.to_owned()]).collect();
            let path = if self.modules.contains(&child) { format!("self::{path}") } else { path };
            let path = absolute(&file.path, &path);
            if let Some(inside) = path.strip_prefix("crate::").filter(|_| line <= own) {
                let segments = inside.split("::").filter(|segment| *segment != "self");
                found.push(((line, of_use), segments.map(str::to_owned).collect()));
            }
        }
        found
    }

    /// Resolves a path to its module, seen from another module, and the named item.
    fn resolve(&self, from: &[String], path: &[String], depth: usize) -> (Module, String) {
        let mut module = Module::new();
        for (at, segment) in path.iter().enumerate() {
            module.push(segment.clone());
            if self.modules.contains(&module) {
                continue;
            }
            module.pop();
            let import = self.imports.get(&(module.clone(), segment.clone()));
            // A name that an ancestor imports refers to the import's target.
            if let Some(target) = import.filter(|_| from.starts_with(&module) && from != module && depth < 8) {
                let onward: Module = target.iter().chain(&path[at + 1..]).cloned().collect();
                return self.resolve(from, &onward, depth + 1);
            }
            return (module, segment.clone());
        }
        let name = module.last().cloned().unwrap_or_default();
        (module, name)
    }

    fn cycles(&self) -> Vec<Found<'_>> {
        let parents: BTreeSet<&[String]> = self.modules.iter().map(|module| &module[..module.len() - 1]).collect();
        parents.into_iter().flat_map(|parent| self.cycles_of(parent)).collect()
    }

    /// Returns the cycles among the children of a module.
    fn cycles_of(&self, parent: &[String]) -> Vec<Found<'_>> {
        let height = parent.len();
        let siblings = |edge: &&Edge| {
            let (from, to) = (&edge.from, &edge.to);
            from.len() > height && to.len() > height && from.starts_with(parent) && to.starts_with(parent)
        };
        let edges: Vec<_> = self.edges.iter().filter(siblings).collect();
        let ends = |edge: &Edge| (edge.from[height].clone(), edge.to[height].clone());
        let mut reaches: BTreeSet<_> = edges.iter().map(|edge| ends(edge)).collect();
        let names: BTreeSet<_> = edges.iter().map(|edge| edge.from[height].as_str()).collect();
        for through in &names {
            let pairs: Vec<_> = reaches.iter().filter(|(_, to)| to == through).map(|(from, _)| from.clone()).collect();
            let onward: Vec<_> = reaches.iter().filter(|(from, _)| from == through).map(|(_, to)| to.clone()).collect();
            reaches.extend(pairs.iter().flat_map(|from| onward.iter().map(|to| (from.clone(), to.clone()))));
        }
        let mutual = |one: &str, other: &str| {
            let pair = |from: &str, to: &str| reaches.contains(&(from.to_owned(), to.to_owned()));
            one == other || pair(one, other) && pair(other, one)
        };
        let mut left: Vec<_> = names.into_iter().collect();
        let mut found = Vec::new();
        while let Some(first) = left.first().copied() {
            let (modules, others): (Vec<_>, _) = left.into_iter().partition(|name| mutual(first, name));
            left = others;
            if modules.len() > 1 {
                let has = |name: &String| modules.contains(&name.as_str());
                let inside = |edge: &&Edge| {
                    edge.from[height] != edge.to[height] && has(&edge.from[height]) && has(&edge.to[height])
                };
                let edges = edges.iter().copied().filter(inside).collect();
                found.push(Found { parent: parent.to_vec(), modules, edges });
            }
        }
        found
    }
}

/// Returns the modules that a file declares for tests only.
fn declared_tests(file: &File) -> Vec<Module> {
    let module = module_of(&file.path);
    let child = |name: String| module.iter().cloned().chain([name]).collect();
    test_modules(&mask(&file.text, false)).into_iter().map(child).collect()
}

/// Describes a cycle: one line per pair of modules, with one place of the dependency and the names that it uses.
fn describe(cycle: &Found<'_>) -> String {
    let height = cycle.parent.len();
    let mut ties: BTreeMap<_, Vec<&Edge>> = BTreeMap::new();
    for edge in &cycle.edges {
        ties.entry((&edge.from[height], &edge.to[height])).or_default().push(edge);
    }
    let tie = |((from, to), edges): ((&String, &String), Vec<&Edge>)| {
        let first = edges[0];
        let names: BTreeSet<_> = edges.iter().map(|edge| edge.name.as_str()).collect();
        let names: Vec<_> = names.into_iter().take(5).collect();
        format!("\n    {from} -> {to}: {}:{} uses {}", first.path, first.line, names.join(", "))
    };
    let rule = format!("the sibling modules `{}` use each other", cycle.modules.join("`, `"));
    let advice = "move what they share below them, or pass it in";
    let ties: String = ties.into_iter().map(tie).collect();
    let first = cycle.edges[0];
    violation(&first.path, first.line, &rule, &format!("{advice}{ties}"))
}
