//! Dependencies between ensembles and their members, for the order of loads and the effects of
//! unloads.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Ensembles with their members.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dependencies {
    members: BTreeMap<String, BTreeSet<String>>,
}

impl Dependencies {
    /// Sets the members of an ensemble, replacing previous ones.
    pub fn insert<'a>(&mut self, ensemble: &str, members: impl IntoIterator<Item = &'a str>) {
        let members = members.into_iter().map(str::to_owned).collect();
        self.members.insert(ensemble.to_owned(), members);
    }

    /// Removes a model that is not an ensemble or no longer exists.
    pub fn remove(&mut self, model: &str) {
        self.members.remove(model);
    }

    /// Removes the ensembles that are not `kept`.
    pub fn retain(&mut self, kept: impl Fn(&str) -> bool) {
        self.members.retain(|ensemble, _| kept(ensemble));
    }

    /// Returns the depth of an ensemble: the number of ensembles on the longest path over its
    /// members, including itself; 0 for a model that is not an ensemble. At most the number of
    /// ensembles, which is reached only with a cycle.
    pub fn depth(&self, model: &str) -> usize {
        let mut level = BTreeSet::from([model]);
        for depth in 0..self.members.len() {
            level.retain(|name| self.members.contains_key(*name));
            if level.is_empty() {
                return depth;
            }
            level = level.into_iter().flat_map(|name| self.members(name)).collect();
        }
        self.members.len()
    }

    /// Returns the members of an ensemble, by name; none for a model that is not an ensemble.
    pub fn members(&self, ensemble: &str) -> impl Iterator<Item = &str> {
        self.members.get(ensemble).into_iter().flatten().map(String::as_str)
    }

    /// Returns the ensembles that have a member for which `is` returns true, by name.
    pub fn with_member(&self, is: impl Fn(&str) -> bool) -> impl Iterator<Item = &str> {
        let has = move |members: &BTreeSet<String>| members.iter().any(|member| is(member));
        self.members
            .iter()
            .filter(move |(_, members)| has(members))
            .map(|(ensemble, _)| ensemble.as_str())
    }

    /// Returns the shortest cycle from an ensemble over its members back to itself, including both
    /// ends.
    pub fn cycle(&self, ensemble: &str) -> Option<Vec<&str>> {
        let (start, _) = self.members.get_key_value(ensemble)?;
        let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
        let mut queue = VecDeque::from([start.as_str()]);
        while let Some(model) = queue.pop_front() {
            for member in self.members(model) {
                if member == start {
                    let mut path = vec![start.as_str()];
                    let mut at = Some(model);
                    while let Some(model) = at {
                        path.push(model);
                        at = came_from.get(model).copied();
                    }
                    if path.last() != Some(&start.as_str()) {
                        path.push(start);
                    }
                    path.reverse();
                    return Some(path);
                }
                if !came_from.contains_key(member) {
                    came_from.insert(member, model);
                    queue.push_back(member);
                }
            }
        }
        None
    }

    /// Returns the direct and indirect members of an ensemble that are no longer needed without it,
    /// by name: no other `loaded` ensemble needs them, and they were not loaded by name (`kept`).
    pub fn released(
        &self,
        ensemble: &str,
        kept: impl Fn(&str) -> bool,
        loaded: impl Fn(&str) -> bool,
    ) -> BTreeSet<&str> {
        let mut gone: BTreeSet<&str> = BTreeSet::new();
        let is_gone =
            |gone: &BTreeSet<&str>, model: &str| model == ensemble || gone.contains(model);
        loop {
            let of_gone = self
                .members
                .iter()
                .filter(|(name, _)| is_gone(&gone, name))
                .flat_map(|(_, members)| members);
            let needed = |member: &str| {
                let mut others = self
                    .members
                    .iter()
                    .filter(|(name, members)| members.contains(member) && loaded(name));
                others.any(|(name, _)| !is_gone(&gone, name))
            };
            let next = of_gone
                .map(String::as_str)
                .find(|member| !is_gone(&gone, member) && !kept(member) && !needed(member));
            match next {
                Some(member) => gone.insert(member),
                None => return gone,
            };
        }
    }

    /// Returns every ensemble that needs a model, directly or indirectly, nearest first: these
    /// become unavailable with it.
    pub fn dependents(&self, model: &str) -> Vec<&str> {
        let mut found: Vec<&str> = Vec::new();
        let mut next = 0;
        let mut of = model;
        loop {
            for (ensemble, members) in &self.members {
                if members.contains(of) && ensemble != model && !found.contains(&ensemble.as_str())
                {
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
