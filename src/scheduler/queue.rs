//! The queue of waiting requests: one lane per priority level, plus a second one for requests whose
//! timeout has passed with [`TimeoutAction::Delay`](super::TimeoutAction).
//!
//! The entries are in one slab and doubly linked, so that removing any entry (cancellation,
//! timeout) is as cheap as taking the first. Only deadlines cost more than constant time (a search
//! tree), and only for requests that have one. Memory is reused but not freed: it is bounded by the
//! maximum length that the queue has reached.

use std::collections::BTreeSet;

use super::{Ticket, TimeoutAction, Waiting};
use crate::id::{RequestId, RequestMap};
use crate::timeline::Instant;

/// One waiting request.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) ticket: Ticket,
    /// When the request was first enqueued.
    pub(super) queued: Instant,
    /// When its timeout expires.
    pub(super) deadline: Option<Instant>,
    /// The action on expiry.
    pub(super) timeout_action: TimeoutAction,
    /// Its priority level; lower levels are served first.
    pub(super) level: u64,
}

impl Entry {
    /// Returns when the request is rejected.
    fn rejected_at(&self) -> Option<Instant> {
        self.deadline.filter(|_| self.timeout_action == TimeoutAction::Reject)
    }

    /// Returns when the request may be moved behind the others of its level.
    pub(super) fn delayed_at(&self) -> Option<Instant> {
        self.deadline.filter(|_| self.timeout_action == TimeoutAction::Delay)
    }
}

/// The position of an entry; valid until the entry is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position(u32);

/// The level, and whether it is the lane of delayed requests. Lanes are served in ascending order.
type LaneKey = (u64, bool);

#[derive(Debug)]
struct Node {
    /// `None` if the node is free.
    entry: Option<Entry>,
    lane: LaneKey,
    previous: Option<Position>,
    next: Option<Position>,
}

#[derive(Debug)]
struct Lane {
    key: LaneKey,
    head: Position,
    tail: Position,
    len: usize,
}

/// The waiting requests of one model, in the order of service.
#[derive(Debug, Default)]
pub(super) struct Queue {
    nodes: Vec<Node>,
    free: Vec<Position>,
    by_request: RequestMap<Position>,
    /// Lanes sorted by key. Empty lanes are removed, so that unused levels cost nothing.
    lanes: Vec<Lane>,
    /// The deadlines of entries that are rejected at their deadlines; equal deadlines in order of
    /// arrival.
    deadlines: BTreeSet<(Instant, RequestId)>,
}

impl Queue {
    /// Returns the number of waiting requests.
    pub(super) fn len(&self) -> usize {
        self.by_request.len()
    }

    /// Returns the number of waiting requests of a level, including delayed ones.
    pub(super) fn level_len(&self, level: u64) -> usize {
        self.lanes.iter().filter(|lane| lane.key.0 == level).map(|lane| lane.len).sum()
    }

    /// Returns the numbers of waiting requests by level.
    pub(super) fn waiting(&self) -> Waiting {
        let mut waiting = Waiting::default();
        for lane in &self.lanes {
            match waiting.levels.last_mut() {
                Some((level, count)) if *level == lane.key.0 => *count += lane.len,
                _ => waiting.levels.push((lane.key.0, lane.len)),
            }
            // A lane is ordered by age, except for delayed requests.
            let head = self.nodes.get(lane.head.0 as usize).and_then(|node| node.entry.as_ref());
            let queued = head.map(|entry| entry.queued);
            waiting.oldest = [waiting.oldest, queued].into_iter().flatten().min();
        }
        waiting
    }

    /// Returns whether the request is waiting.
    pub(super) fn contains(&self, request: RequestId) -> bool {
        self.by_request.contains_key(&request)
    }

    /// Appends an entry to its level. The request must not be waiting already.
    pub(super) fn push(&mut self, entry: Entry) -> Position {
        let lane = (entry.level, false);
        let tail = self.lane(lane).map(|lane| lane.tail);
        self.insert(entry, lane, tail)
    }

    /// Inserts an entry before the younger ones of its level. The request must not be waiting
    /// already.
    pub(super) fn push_by_age(&mut self, entry: Entry) {
        let lane = (entry.level, false);
        let age = (entry.queued, entry.ticket.request);
        let mut previous = None;
        let mut next = self.lane(lane).map(|lane| lane.head);
        while let Some((position, node)) =
            next.and_then(|position| Some((position, self.node(position)?)))
        {
            if node.entry.as_ref().is_some_and(|other| (other.queued, other.ticket.request) > age) {
                break;
            }
            previous = Some(position);
            next = node.next;
        }
        self.insert(entry, lane, previous);
    }

    /// Returns the entry after `position` in the order of service; for `None` the first one.
    pub(super) fn after(&self, position: Option<Position>) -> Option<(Position, &Entry)> {
        let next = match position {
            None => self.lanes.first().map(|lane| lane.head),
            Some(position) => {
                let node = self.node(position)?;
                node.next.or_else(|| {
                    let later = self.lanes.partition_point(|lane| lane.key <= node.lane);
                    self.lanes.get(later).map(|lane| lane.head)
                })
            }
        }?;
        Some((next, self.node(next)?.entry.as_ref()?))
    }

    /// Returns whether the lane of `one` is served before the lane of `other`.
    pub(super) fn in_earlier_lane(&self, one: Position, other: Position) -> bool {
        match (self.node(one), self.node(other)) {
            (Some(one), Some(other)) => one.lane < other.lane,
            _ => false,
        }
    }

    /// Removes and returns the first entry.
    pub(super) fn pop(&mut self) -> Option<Entry> {
        let head = self.lanes.first()?.head;
        self.take(head)
    }

    /// Removes and returns the entry of a request.
    pub(super) fn remove(&mut self, request: RequestId) -> Option<Entry> {
        let position = *self.by_request.get(&request)?;
        self.take(position)
    }

    /// Returns the earliest deadline at which an entry is rejected.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }

    /// Removes and returns the entry with the earliest such deadline, if it has passed.
    pub(super) fn pop_expired(&mut self, now: Instant) -> Option<Entry> {
        let &(deadline, request) = self.deadlines.first()?;
        if deadline > now {
            return None;
        }
        self.remove(request)
    }

    /// Moves the entry behind all others of its level, without a deadline.
    pub(super) fn delay(&mut self, position: Position) {
        let Some(mut entry) = self.take(position) else { return };
        entry.deadline = None;
        let lane = (entry.level, true);
        let tail = self.lane(lane).map(|lane| lane.tail);
        self.insert(entry, lane, tail);
    }

    fn insert(&mut self, entry: Entry, key: LaneKey, previous: Option<Position>) -> Position {
        let request = entry.ticket.request;
        let deadline = entry.rejected_at();
        let next = match previous {
            Some(position) => self.node(position).and_then(|node| node.next),
            None => self.lane(key).map(|lane| lane.head),
        };
        let position = self.allocate(Node { entry: Some(entry), lane: key, previous, next });
        self.link(previous, next, position);
        self.grow_lane(key, previous, next, position);
        self.by_request.insert(request, position);
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, request));
        }
        position
    }

    fn allocate(&mut self, node: Node) -> Position {
        if let Some(position) = self.free.pop() {
            if let Some(free) = self.node_mut(position) {
                *free = node;
            }
            return position;
        }
        let index =
            u32::try_from(self.nodes.len()).expect("fewer than 2^32 requests fit into memory");
        self.nodes.push(node);
        Position(index)
    }

    /// Links a node with its neighbours.
    fn link(&mut self, previous: Option<Position>, next: Option<Position>, position: Position) {
        if let Some(node) = previous.and_then(|at| self.node_mut(at)) {
            node.next = Some(position);
        }
        if let Some(node) = next.and_then(|at| self.node_mut(at)) {
            node.previous = Some(position);
        }
    }

    fn grow_lane(
        &mut self,
        key: LaneKey,
        previous: Option<Position>,
        next: Option<Position>,
        position: Position,
    ) {
        match self.lanes.binary_search_by_key(&key, |lane| lane.key) {
            Ok(found) => {
                let lane = &mut self.lanes[found];
                lane.len += 1;
                if previous.is_none() {
                    lane.head = position;
                }
                if next.is_none() {
                    lane.tail = position;
                }
            }
            Err(place) => {
                self.lanes.insert(place, Lane { key, head: position, tail: position, len: 1 })
            }
        }
    }

    fn take(&mut self, position: Position) -> Option<Entry> {
        let node = self.node_mut(position)?;
        let entry = node.entry.take()?;
        let key = node.lane;
        let previous = node.previous;
        let next = node.next;
        if let Some(before) = previous.and_then(|at| self.node_mut(at)) {
            before.next = next;
        }
        if let Some(behind) = next.and_then(|at| self.node_mut(at)) {
            behind.previous = previous;
        }
        self.shrink_lane(key, previous, next);
        self.by_request.remove(&entry.ticket.request);
        if let Some(deadline) = entry.rejected_at() {
            self.deadlines.remove(&(deadline, entry.ticket.request));
        }
        self.free.push(position);
        Some(entry)
    }

    fn shrink_lane(&mut self, key: LaneKey, previous: Option<Position>, next: Option<Position>) {
        let Ok(found) = self.lanes.binary_search_by_key(&key, |lane| lane.key) else { return };
        let lane = &mut self.lanes[found];
        lane.len -= 1;
        match (previous, next) {
            (None, None) => drop(self.lanes.remove(found)),
            (None, Some(next)) => lane.head = next,
            (Some(previous), None) => lane.tail = previous,
            (Some(_), Some(_)) => {}
        }
    }

    fn lane(&self, key: LaneKey) -> Option<&Lane> {
        let found = self.lanes.binary_search_by_key(&key, |lane| lane.key).ok()?;
        self.lanes.get(found)
    }

    fn node(&self, position: Position) -> Option<&Node> {
        self.nodes.get(position.0 as usize)
    }

    fn node_mut(&mut self, position: Position) -> Option<&mut Node> {
        self.nodes.get_mut(position.0 as usize)
    }
}
