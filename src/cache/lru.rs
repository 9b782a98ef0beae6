//! What fits into a number of bytes, the least recently used gone first. Every operation takes constant time, but for one
//! step for each entry that it evicts.

use std::collections::HashMap;

use super::Key;

/// No neighbour.
const NONE: usize = usize::MAX;

#[derive(Debug)]
struct Node<V> {
    key: Key,
    value: V,
    size: u64,
    /// Used just after this one.
    newer: usize,
    /// Used just before this one.
    older: usize,
}

/// Values by key, of at most `capacity` bytes together. What a value takes is said by who inserts it.
#[derive(Debug)]
pub struct Lru<V> {
    capacity: u64,
    used: u64,
    /// Slots without a node are listed in `free`.
    nodes: Vec<Option<Node<V>>>,
    free: Vec<usize>,
    positions: HashMap<Key, usize>,
    newest: usize,
    oldest: usize,
}

impl<V> Lru<V> {
    /// An empty one.
    pub fn new(capacity: u64) -> Self {
        let positions = HashMap::new();
        Self { capacity, used: 0, nodes: Vec::new(), free: Vec::new(), positions, newest: NONE, oldest: NONE }
    }

    /// The most bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes now.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Entries now.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// The value of a key, which is now the most recently used.
    pub fn get(&mut self, key: &Key) -> Option<&V> {
        let at = *self.positions.get(key)?;
        self.unlink(at);
        self.link_newest(at);
        self.nodes.get(at)?.as_ref().map(|node| &node.value)
    }

    /// Adds a value of `size` bytes and gives back what had to go for it. Whatever is given back should be dropped by the
    /// caller where it holds no lock.
    ///
    /// # Errors
    /// The value itself, where it alone is larger than the capacity, or where the key is there already: that one keeps its
    /// value and is now the most recently used.
    pub fn insert(&mut self, key: Key, value: V, size: u64) -> Result<Vec<V>, V> {
        if size > self.capacity || self.get(&key).is_some() {
            return Err(value);
        }
        let mut evicted = Vec::new();
        while self.used > self.capacity - size {
            evicted.extend(self.remove_oldest());
        }
        let node = Some(Node { key, value, size, newer: NONE, older: NONE });
        let at = match self.free.pop() {
            Some(at) => at,
            None => {
                self.nodes.push(None);
                self.nodes.len() - 1
            }
        };
        if let Some(slot) = self.nodes.get_mut(at) {
            *slot = node;
        }
        self.used += size;
        self.positions.insert(key, at);
        self.link_newest(at);
        Ok(evicted)
    }

    fn remove_oldest(&mut self) -> Option<V> {
        let at = self.oldest;
        self.unlink(at);
        let node = self.nodes.get_mut(at)?.take()?;
        self.free.push(at);
        self.positions.remove(&node.key);
        self.used -= node.size;
        Some(node.value)
    }

    fn node(&mut self, at: usize) -> Option<&mut Node<V>> {
        self.nodes.get_mut(at)?.as_mut()
    }

    fn unlink(&mut self, at: usize) {
        let Some((newer, older)) = self.node(at).map(|node| (node.newer, node.older)) else { return };
        match self.node(newer) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        match self.node(older) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
    }

    fn link_newest(&mut self, at: usize) {
        let second = self.newest;
        if let Some(node) = self.node(at) {
            (node.newer, node.older) = (NONE, second);
        }
        match self.node(second) {
            Some(node) => node.newer = at,
            None => self.oldest = at,
        }
        self.newest = at;
    }
}
