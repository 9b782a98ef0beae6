//! Bytes in shared memory that outlive the execution of a batch: inputs that a backend keeps, and
//! memory for answers.
//!
//! Contract: the frontend does not touch the memory of a batch or of an answer until this process
//! has returned it, which happens when the last [`Received`] of it is dropped (otherwise with the
//! batch's Done). A block of the output arena belongs to its [`Memory`] alone until it is sent or
//! dropped. Both keep the mapping alive. Rust code only reads a [`Received`]; a backend that passes
//! its address to code that writes there (as numpy does) must not read it in Rust meanwhile.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use pharos::arena::Block;
use pharos::error::InferError;
use pharos::wire::{Execute, ToFrontend};

use crate::aligned::AlignedBuffer;
use crate::device::{Devices, ReceivedOnDevice, RegionRange};
use crate::error::arena_full;
use crate::frames::Sender;
use crate::memory::{Flags, InputArena, OutputArena};

/// The memory that this process shares with the frontend.
pub struct Arenas {
    /// Inputs, written by the frontend.
    pub inputs: InputArena,
    /// Outputs, written by this process.
    pub outputs: OutputArena,
    loans: Loans,
    pub(crate) sender: Sender,
}

impl Arenas {
    /// Combines both arenas; loans of the input arena are returned over this connection.
    pub(crate) fn new(inputs: InputArena, outputs: OutputArena, sender: Sender) -> Arc<Self> {
        Arc::new(Self { inputs, outputs, loans: Loans::default(), sender })
    }

    /// Sends a frame. A broken connection is not reported here: reading frames reports it.
    pub fn send(&self, frame: &ToFrontend) {
        let _ = self.sender.send(frame);
    }

    /// Returns the bytes of a living input that contain `len` bytes at this address.
    pub(crate) fn locate(&self, address: usize, len: usize) -> Option<Received> {
        self.loans.locate(address, len)
    }
}

/// The inputs of a batch, or the outputs of an answer, in the input arena.
pub struct Loan {
    arenas: Arc<Arenas>,
    /// The number of the batch or answer.
    pub(crate) key: u64,
    /// The frontend waits until this is returned.
    held: AtomicBool,
    /// Addresses of the first bytes of its blocks, in [`Loans`].
    blocks: Vec<usize>,
}

impl Loan {
    /// Creates a loan of these blocks (offset and length); ignores blocks outside the arena.
    pub(crate) fn new(
        arenas: &Arc<Arenas>,
        key: u64,
        blocks: impl Iterator<Item = (u64, u64)>,
    ) -> Arc<Self> {
        let within = blocks.filter_map(|(offset, len)| {
            let bytes = arenas.inputs.bytes(offset, len)?;
            Some((bytes.as_ptr().addr(), bytes.len()))
        });
        let ranges: Vec<(usize, usize)> = within.filter(|(_, len)| *len > 0).collect();
        let blocks = ranges.iter().map(|(start, _)| *start).collect();
        let loan =
            Arc::new(Self { arenas: arenas.clone(), key, held: AtomicBool::new(false), blocks });
        arenas.loans.add(&ranges, &Arc::downgrade(&loan));
        loan
    }

    /// Makes the frontend wait for the return of this loan.
    pub fn hold(&self) {
        self.held.store(true, Ordering::Release);
    }

    /// Returns the offset of these bytes in the arena.
    pub(crate) fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        self.arenas.inputs.offset_of(bytes)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.arenas.loans.remove(&self.blocks);
        if self.held.load(Ordering::Acquire) {
            self.arenas.send(&ToFrontend::Returned(vec![self.key]));
        }
    }
}

/// The living loans, by the addresses of their blocks.
#[derive(Default)]
pub(crate) struct Loans(Mutex<BTreeMap<usize, (usize, Weak<Loan>)>>);

impl Loans {
    fn add(&self, blocks: &[(usize, usize)], loan: &Weak<Loan>) {
        let mut all = self.0.lock();
        all.extend(blocks.iter().map(|(start, len)| (*start, (*len, loan.clone()))));
    }

    fn remove(&self, blocks: &[usize]) {
        let mut all = self.0.lock();
        for start in blocks {
            // Another loan may already use the memory: a loan that is not held is returned before
            // it is dropped.
            if all.get(start).is_some_and(|(_, loan)| loan.strong_count() == 0) {
                all.remove(start);
            }
        }
    }

    pub(crate) fn locate(&self, address: usize, len: usize) -> Option<Received> {
        let all = self.0.lock();
        let (&start, (block, loan)) = all.range(..=address).next_back()?;
        let end = address.checked_add(len).filter(|end| *end <= start + block)?;
        let loan = loan.upgrade()?;
        drop(all);
        let start = loan.arenas.inputs.address_of(address, end - address)?;
        Some(Received { owner: Owner::Loan(loan), start, len })
    }
}

/// The loan of the batch being executed, created when an input is kept for the first time.
pub struct BatchLoan<'a> {
    arenas: &'a Arc<Arenas>,
    devices: &'a dyn Devices,
    execute: &'a Execute,
    loan: OnceLock<Arc<Loan>>,
}

impl<'a> BatchLoan<'a> {
    /// Creates the loan of a batch received in a frame.
    pub fn new(arenas: &'a Arc<Arenas>, devices: &'a dyn Devices, execute: &'a Execute) -> Self {
        Self { arenas, devices, execute, loan: OnceLock::new() }
    }

    /// Returns a handle on these bytes: on the bytes themselves if they are in the input arena,
    /// otherwise on a copy.
    pub(crate) fn received(&self, bytes: &[u8]) -> Received {
        if self.arenas.inputs.offset_of(bytes).is_none() {
            return Received::copy_of(bytes);
        }
        let in_arena = self.execute.inputs.iter().filter(|input| input.pieces.is_empty());
        let blocks = in_arena.map(|input| (input.offset, input.len));
        let loan = self.loan.get_or_init(|| Loan::new(self.arenas, self.execute.batch, blocks));
        Received { owner: Owner::Loan(loan.clone()), start: bytes.as_ptr(), len: bytes.len() }
    }

    /// Returns a piece of an input, given by their positions in the batch, that is in a device's
    /// memory and stays open there.
    pub(crate) fn received_on_device(
        &self,
        input: usize,
        piece: usize,
    ) -> Option<ReceivedOnDevice> {
        let piece = self.execute.inputs.get(input)?.pieces.get(piece)?;
        self.devices.keep_on_device(RegionRange {
            region: piece.region,
            offset: piece.offset,
            len: piece.len,
        })
    }

    /// Returns the batch.
    pub(crate) fn execute(&self) -> &'a Execute {
        self.execute
    }

    /// Returns the flags of its cancelled requests.
    pub(crate) fn flags(&self) -> Flags<'a> {
        self.arenas.inputs.flags(self.execute.flags)
    }

    /// Returns the loan if an input is kept.
    pub fn into_loan(self) -> Option<Arc<Loan>> {
        self.loan.into_inner()
    }
}

/// Bytes of an input, kept in place as long as this or a clone of it lives.
#[derive(Clone)]
pub struct Received {
    owner: Owner,
    start: *const u8,
    len: usize,
}

#[derive(Clone)]
enum Owner {
    Loan(Arc<Loan>),
    /// Of a batch that has arrived and is not executed yet.
    Sent(#[allow(dead_code)] Arc<Arenas>),
    /// Held until it is dropped.
    Copy(#[allow(dead_code)] Arc<AlignedBuffer>),
}

// SAFETY: it is a range of shared memory, or of a buffer, that its owner keeps alive; nothing in it
// is bound to a thread.
unsafe impl Send for Received {}
// SAFETY: as above; it is only read through this type.
unsafe impl Sync for Received {}

impl Received {
    /// Returns bytes of a loan by their position in the arena; `None` if they are not within it.
    pub(crate) fn of_loan(loan: &Arc<Loan>, offset: u64, len: u64) -> Option<Self> {
        let bytes = loan.arenas.inputs.bytes(offset, len)?;
        Some(Self { start: bytes.as_ptr(), len: bytes.len(), owner: Owner::Loan(loan.clone()) })
    }

    /// Returns the bytes of an input of the next batch, which the frontend does not touch until
    /// that batch is done; afterwards they remain accessible, but may hold other data. `None` if
    /// they are not within the arena.
    pub(crate) fn of_sent(arenas: &Arc<Arenas>, offset: u64, len: u64) -> Option<Self> {
        let bytes = arenas.inputs.bytes(offset, len)?;
        Some(Self { start: bytes.as_ptr(), len: bytes.len(), owner: Owner::Sent(arenas.clone()) })
    }

    /// Returns an empty range.
    pub(crate) fn empty() -> Self {
        Self::copy_of(&[])
    }

    fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = AlignedBuffer::zeroed(bytes.len());
        buffer.as_mut_slice().copy_from_slice(bytes);
        Self::of_buffer(buffer)
    }

    /// Returns this many zeros.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self::of_buffer(AlignedBuffer::zeroed(len))
    }

    /// Takes ownership of a buffer.
    pub fn of_buffer(buffer: AlignedBuffer) -> Self {
        let start = buffer.as_slice().as_ptr();
        let len = buffer.as_slice().len();
        Self { start, len, owner: Owner::Copy(Arc::new(buffer)) }
    }

    /// Returns a part of the bytes.
    ///
    /// # Panics
    /// The range exceeds the bytes.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let part = &self[range];
        Self { start: part.as_ptr(), len: part.len(), owner: self.owner.clone() }
    }

    /// Returns the loan that the bytes belong to; `None` for a copy.
    pub fn loan(&self) -> Option<&Arc<Loan>> {
        match &self.owner {
            Owner::Loan(loan) => Some(loan),
            Owner::Sent(_) | Owner::Copy(_) => None,
        }
    }
}

impl Deref for Received {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range was a slice of memory that the owner keeps alive and in place (contract
        // above).
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

/// A block of the memory for answers. Released if it is dropped before it is sent.
pub struct Memory {
    arenas: Arc<Arenas>,
    block: Block,
    start: *mut u8,
    len: usize,
    sent: bool,
}

// SAFETY: this value is the only user of the block, and its mapping lives as long as `arenas`.
unsafe impl Send for Memory {}
// SAFETY: as above; it is only read through a shared reference.
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocates a new block; its content is undefined.
    ///
    /// # Errors
    /// The arena is full.
    pub fn allocate(arenas: &Arc<Arenas>, len: usize) -> Result<Self, InferError> {
        let (block, memory) = arenas
            .outputs
            .allocate(len as u64)
            .ok_or_else(|| arena_full(len, arenas.outputs.capacity()))?;
        let start = memory.as_mut_ptr();
        Ok(Self { arenas: arenas.clone(), block, start, len, sent: false })
    }

    /// Copies bytes into a new block.
    ///
    /// # Errors
    /// The arena is full.
    pub fn copy_of(arenas: &Arc<Arenas>, bytes: &[u8]) -> Result<Self, InferError> {
        let mut memory = Self::allocate(arenas, bytes.len())?;
        memory.copy_from_slice(bytes);
        Ok(memory)
    }

    /// Returns its offset and length in the arena.
    pub(crate) fn place(&self) -> (u64, u64) {
        (self.block.offset, self.block.len)
    }

    /// Marks the block as sent: the frontend releases it after reading.
    pub(crate) fn sent(mut self) {
        self.sent = true;
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the block is within the mapping, which `arenas` holds, and no other code writes
        // to it (contract above).
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.sent {
            self.arenas.outputs.release(&[self.block.offset]);
        }
    }
}
