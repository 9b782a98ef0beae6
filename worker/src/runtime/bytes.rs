//! Bytes in shared memory that outlive the execution of a batch: inputs that are kept, and memory for answers.
//!
//! Contract: the frontend leaves the memory of a batch or of an answer alone until this process has returned it, which it
//! does when the last [`Received`] of it is dropped (else with the batch's Done). A block of the arena of the outputs is
//! its [`Memory`]'s alone until it is sent or dropped. Both hold the mapping alive. The bytes of a [`Received`] are lent
//! to readers; a backend that lets others write to them through their address (numpy does) lets nobody read them in Rust
//! meanwhile.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use pharos::arena::Block;
use pharos::wire::{Execute, ToFrontend};

use super::Shared;
use crate::backend::ReceivedPiece;
use crate::device::Kept;
use crate::state::Buffer;

/// The inputs of a batch, or the outputs of an answer, in the arena of the inputs.
pub(crate) struct Loan {
    shared: Arc<Shared>,
    /// The batch's number, or the answer's.
    pub(super) key: u64,
    /// The frontend waits for its return.
    held: AtomicBool,
    /// First bytes of its blocks, in [`Loans`].
    blocks: Vec<usize>,
}

impl Loan {
    /// Of these blocks, by offset and length; those that are not in the arena are left out.
    pub(super) fn new(shared: &Arc<Shared>, key: u64, blocks: impl Iterator<Item = (u64, u64)>) -> Arc<Self> {
        let within = blocks.filter_map(|(offset, len)| {
            let bytes = shared.inputs.bytes(offset, len)?;
            Some((bytes.as_ptr().addr(), bytes.len()))
        });
        let ranges: Vec<(usize, usize)> = within.filter(|(_, len)| *len > 0).collect();
        let blocks = ranges.iter().map(|(start, _)| *start).collect();
        let loan = Arc::new(Self { shared: shared.clone(), key, held: AtomicBool::new(false), blocks });
        shared.loans.add(&ranges, &Arc::downgrade(&loan));
        loan
    }

    /// The frontend waits for the return from now on.
    pub(crate) fn hold(&self) {
        self.held.store(true, Ordering::Release);
    }

    /// Where these bytes are in the arena.
    pub(super) fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        self.shared.inputs.offset_of(bytes)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.shared.loans.remove(&self.blocks);
        if self.held.load(Ordering::Acquire) {
            self.shared.send(&ToFrontend::Returned(vec![self.key]));
        }
    }
}

/// The living loans, by the addresses of their blocks.
#[derive(Default)]
pub(super) struct Loans(Mutex<BTreeMap<usize, (usize, Weak<Loan>)>>);

impl Loans {
    fn add(&self, blocks: &[(usize, usize)], loan: &Weak<Loan>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(blocks.iter().map(|(start, len)| (*start, (*len, loan.clone()))));
    }

    fn remove(&self, blocks: &[usize]) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for start in blocks {
            // The memory may be another loan's already: one that is not held is given back before it is dropped.
            if all.get(start).is_some_and(|(_, loan)| loan.strong_count() == 0) {
                all.remove(start);
            }
        }
    }

    pub(super) fn locate(&self, address: usize, len: usize) -> Option<Received> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (&start, (block, loan)) = all.range(..=address).next_back()?;
        let end = address.checked_add(len).filter(|end| *end <= start + block)?;
        let loan = loan.upgrade()?;
        drop(all);
        let start = loan.shared.inputs.address_of(address, end - address)?;
        Some(Received { owner: Owner::Loan(loan), start, len })
    }
}

/// The loan of a batch that is executed, made when it is first asked for.
pub(crate) struct LoanCell<'a> {
    shared: &'a Arc<Shared>,
    execute: &'a Execute,
    loan: OnceLock<Arc<Loan>>,
}

impl<'a> LoanCell<'a> {
    pub(crate) fn new(shared: &'a Arc<Shared>, execute: &'a Execute) -> Self {
        Self { shared, execute, loan: OnceLock::new() }
    }

    /// A handle on these bytes: on themselves if they are in the arena of the inputs, else on a copy.
    pub(crate) fn received(&self, bytes: &[u8]) -> Received {
        if self.shared.inputs.offset_of(bytes).is_none() {
            return Received::copy_of(bytes);
        }
        let in_arena = self.execute.inputs.iter().filter(|input| input.pieces.is_empty());
        let blocks = in_arena.map(|input| (input.offset, input.len));
        let loan = self.loan.get_or_init(|| Loan::new(self.shared, self.execute.batch, blocks));
        Received { owner: Owner::Loan(loan.clone()), start: bytes.as_ptr(), len: bytes.len() }
    }

    /// A handle on a piece of an input, by their positions in the batch: on memory of a device itself, which is open.
    pub(crate) fn received_on_device(&self, input: usize, piece: usize) -> Option<ReceivedPiece> {
        let piece = self.execute.inputs.get(input)?.pieces.get(piece)?;
        let kept = self.shared.regions().kept_on_device(piece.region, piece.offset, piece.len);
        kept.map(ReceivedPiece::Device)
    }

    /// The loan, if there is one.
    pub(crate) fn into_loan(self) -> Option<Arc<Loan>> {
        self.loan.into_inner()
    }
}

/// Bytes of an input, kept where they are as long as this or a clone of it lives.
#[derive(Clone)]
pub struct Received {
    owner: Owner,
    start: *const u8,
    len: usize,
}

#[derive(Clone)]
enum Owner {
    Loan(Arc<Loan>),
    /// Of a batch that has been sent and is not executed yet.
    Sent(#[allow(dead_code)] Arc<Shared>),
    /// Only held.
    Copy(#[allow(dead_code)] Arc<Buffer>),
}

// SAFETY: it is a range of shared memory, or of a buffer, that its owner keeps alive; nothing in it belongs to a thread.
unsafe impl Send for Received {}
// SAFETY: as above; it is only read through this type.
unsafe impl Sync for Received {}

impl Received {
    /// Those of a loan, by their place in the arena; `None` if they are not within it.
    pub(super) fn of_loan(loan: &Arc<Loan>, offset: u64, len: u64) -> Option<Self> {
        let bytes = loan.shared.inputs.bytes(offset, len)?;
        Some(Self { start: bytes.as_ptr(), len: bytes.len(), owner: Owner::Loan(loan.clone()) })
    }

    /// Those of an input of the next batch, which the frontend leaves alone until that batch is done; afterwards they are
    /// still there, but others. `None` if they are not within the arena.
    pub(super) fn of_sent(shared: &Arc<Shared>, offset: u64, len: u64) -> Option<Self> {
        let bytes = shared.inputs.bytes(offset, len)?;
        Some(Self { start: bytes.as_ptr(), len: bytes.len(), owner: Owner::Sent(shared.clone()) })
    }

    /// No bytes.
    pub(super) fn empty() -> Self {
        Self::copy_of(&[])
    }

    fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.as_mut_slice().copy_from_slice(bytes);
        Self::of_buffer(buffer)
    }

    /// So many zeros.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self::of_buffer(Buffer::zeroed(len))
    }

    /// Those of a buffer.
    pub(super) fn of_buffer(buffer: Buffer) -> Self {
        let (start, len) = (buffer.as_slice().as_ptr(), buffer.as_slice().len());
        Self { start, len, owner: Owner::Copy(Arc::new(buffer)) }
    }

    /// A part of it.
    ///
    /// # Panics
    /// The range passes the end.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let part = &self[range];
        Self { start: part.as_ptr(), len: part.len(), owner: self.owner.clone() }
    }

    /// What it is lent from; `None` for a copy.
    pub(crate) fn loan(&self) -> Option<&Arc<Loan>> {
        match &self.owner {
            Owner::Loan(loan) => Some(loan),
            Owner::Sent(_) | Owner::Copy(_) => None,
        }
    }
}

impl Kept for Received {
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl Deref for Received {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range was a slice of what the owner keeps alive and in its place (contract above).
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

/// A block of the memory in which answers travel. Dropped before it is sent, it is given back.
pub struct Memory {
    shared: Arc<Shared>,
    block: Block,
    start: *mut u8,
    len: usize,
    sent: bool,
}

// SAFETY: the block is this value's alone, and its mapping lives as long as `shared`.
unsafe impl Send for Memory {}
// SAFETY: as above; it is only read through a shared reference.
unsafe impl Sync for Memory {}

impl Memory {
    pub(super) fn allocate(shared: &Arc<Shared>, len: usize) -> Option<Self> {
        let (block, memory) = shared.outputs.allocate(len as u64)?;
        let start = memory.as_mut_ptr();
        Some(Self { shared: shared.clone(), block, start, len, sent: false })
    }

    /// Copies bytes into a new block.
    pub(super) fn copy_of(shared: &Arc<Shared>, bytes: &[u8]) -> Option<Self> {
        let mut memory = Self::allocate(shared, bytes.len())?;
        memory.copy_from_slice(bytes);
        Some(memory)
    }

    /// Where it is in the arena: the offset and the length.
    pub(super) fn place(&self) -> (u64, u64) {
        (self.block.offset, self.block.len)
    }

    /// The frontend has been told of it, and gives it back when it has read it.
    pub(super) fn sent(mut self) {
        self.sent = true;
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block is within the mapping, which `shared` holds, and nobody else writes to it (contract above).
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.sent {
            self.shared.outputs.release(&[self.block.offset]);
        }
    }
}
