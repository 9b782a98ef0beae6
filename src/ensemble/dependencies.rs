//! Which models an ensemble needs, and who needs a model: the order of loads, and what goes with an unload.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Ensembles with their members.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dependencies {
    members: BTreeMap<String, BTreeSet<String>>,
}

impl Dependencies {
    /// An ensemble has these members, and no others that it had before.
    pub fn insert<'a>(&mut self, ensemble: &str, members: impl IntoIterator<Item = &'a str>) {
        let members = members.into_iter().map(str::to_owned).collect();
        self.members.insert(ensemble.to_owned(), members);
    }

    /// The model is no ensemble, or no longer there.
    pub fn remove(&mut self, model: &str) {
        self.members.remove(model);
    }

    /// The members of an ensemble, by name; none of a model that is no ensemble.
    pub fn members(&self, ensemble: &str) -> impl Iterator<Item = &str> {
        self.members.get(ensemble).into_iter().flatten().map(String::as_str)
    }

    /// The way from an ensemble over its members back to itself, both ends included; the shortest one.
    pub fn circle(&self, ensemble: &str) -> Option<Vec<&str>> {
        let (start, _) = self.members.get_key_value(ensemble)?;
        let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
        let mut queue = VecDeque::from([start.as_str()]);
        while let Some(model) = queue.pop_front() {
            for member in self.members(model) {
                if member == start {
                    let mut way = vec![start.as_str()];
                    let mut at = Some(model);
                    while let Some(model) = at {
                        way.push(model);
                        at = came_from.get(model).copied();
                    }
                    if way.last() != Some(&start.as_str()) {
                        way.push(start);
                    }
                    way.reverse();
                    return Some(way);
                }
                if !came_from.contains_key(member) {
                    came_from.insert(member, model);
                    queue.push_back(member);
                }
            }
        }
        None
    }

    /// Every ensemble that needs a model, directly or through others, nearest first: what becomes unavailable with it.
    pub fn dependents(&self, model: &str) -> Vec<&str> {
        let mut found: Vec<&str> = Vec::new();
        let mut next = 0;
        let mut of = model;
        loop {
            for (ensemble, members) in &self.members {
                if members.contains(of) && ensemble != model && !found.contains(&ensemble.as_str()) {
                    found.push(ensemble);
                }
            }
            match found.get(next) {
                Some(ensemble) => of = ensemble,
                None => return found,
            }
            next += 1;
        }
    }
}
