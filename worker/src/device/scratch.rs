//! Memory that the code of a backend allocates for its work: memory of the instance's device, and
//! pinned memory of the process. Freed memory is reused, because the driver needs long to allocate
//! or to pin some.
//!
//! Contract: a pinned block is unregistered before its memory is freed, and both happen once, when
//! the block is dropped. Its memory is only accessed by the code that has allocated it.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos_backend::ScratchKind;

use super::memory::Buffer;
use super::{Cuda, Fault, OWN};

/// Blocks are multiples of this many bytes. A page: the driver pins whole pages.
const GRAIN: usize = 4096;

/// How many bytes of unused blocks stay allocated on the device.
const MAX_UNUSED_ON_DEVICE: usize = 64 << 20;

/// Memory that the code of a backend allocates for its work.
pub(crate) struct Scratch {
    cuda: Arc<Cuda>,
    /// Locked for an allocation or a release, which may call the driver.
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    used: HashMap<u64, Block>,
    /// By kind and length. The work that used them is done.
    unused: BTreeMap<(ScratchKind, usize), Vec<Block>>,
    /// Bytes of all pinned blocks.
    pinned: usize,
    unused_on_device: usize,
}

enum Block {
    Pinned(Pinned),
    Device(Buffer),
}

/// Memory of the process that is registered with the driver.
struct Pinned {
    cuda: Arc<Cuda>,
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: this value owns the memory and accesses none of it.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(cuda: &Arc<Cuda>, len: usize) -> Result<Self, Fault> {
        let refused = || Fault::Refused(format!("cannot allocate {len} bytes of memory"));
        let layout = Layout::from_size_align(len.max(1), GRAIN).map_err(|_| refused())?;
        // SAFETY: at least one byte.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or_else(refused)?;
        // SAFETY: the memory stays allocated until this value is dropped, which unregisters it
        // first.
        let registered =
            cuda.call(|driver| unsafe { driver.register(OWN, start.as_ptr(), layout.size()) });
        if let Err(fault) = registered {
            // SAFETY: allocated above with this layout, and not used.
            unsafe { dealloc(start.as_ptr(), layout) };
            return Err(fault);
        }
        Ok(Self { cuda: cuda.clone(), start, layout })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let unregistered = self.cuda.call(|driver| {
            // SAFETY: registered by `new`; the code that freed the block has no copies in progress.
            unsafe { driver.unregister(OWN, self.start.as_ptr()) };
            Ok(())
        });
        // A lost device may still write there: the process ends soon.
        if unregistered.is_ok() {
            // SAFETY: allocated by `new` with this layout, and freed once.
            unsafe { dealloc(self.start.as_ptr(), self.layout) };
        }
    }
}

impl Block {
    fn new(cuda: &Arc<Cuda>, kind: ScratchKind, len: usize) -> Result<Self, Fault> {
        match kind {
            ScratchKind::Pinned => Pinned::new(cuda, len).map(Self::Pinned),
            ScratchKind::Device => Buffer::new(cuda, len).map(Self::Device),
        }
    }

    fn kind(&self) -> ScratchKind {
        match self {
            Self::Pinned(_) => ScratchKind::Pinned,
            Self::Device(_) => ScratchKind::Device,
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Pinned(pinned) => pinned.layout.size(),
            Self::Device(buffer) => buffer.whole().len(),
        }
    }

    fn address(&self) -> u64 {
        match self {
            Self::Pinned(pinned) => pinned.start.as_ptr().expose_provenance() as u64,
            Self::Device(buffer) => buffer.whole().address(),
        }
    }
}

impl Blocks {
    /// Takes the smallest unused block that has room for `len` bytes and is at most twice as large.
    fn take_unused(&mut self, kind: ScratchKind, len: usize) -> Option<Block> {
        let fitting = (kind, len)..=(kind, len.saturating_mul(2));
        let (_, blocks) = self.unused.range_mut(fitting).find(|(_, blocks)| !blocks.is_empty())?;
        let block = blocks.pop()?;
        if kind == ScratchKind::Device {
            self.unused_on_device -= block.len();
        }
        Some(block)
    }

    /// Frees the unused blocks of a kind.
    fn forget_unused(&mut self, kind: ScratchKind) {
        let bytes = |blocks: &[Block]| blocks.iter().map(Block::len).sum::<usize>();
        for ((_, _), blocks) in self.unused.range_mut((kind, 0)..=(kind, usize::MAX)) {
            match kind {
                ScratchKind::Pinned => self.pinned -= bytes(blocks),
                ScratchKind::Device => self.unused_on_device -= bytes(blocks),
            }
            blocks.clear();
        }
    }

    /// Keeps a block for a later allocation, or frees it.
    fn put_back(&mut self, block: Block) {
        let kind = block.kind();
        let len = block.len();
        if kind == ScratchKind::Device {
            if self.unused_on_device + len > MAX_UNUSED_ON_DEVICE {
                return;
            }
            self.unused_on_device += len;
        }
        self.unused.entry((kind, len)).or_default().push(block);
    }
}

impl Scratch {
    pub(crate) fn new(cuda: &Arc<Cuda>) -> Self {
        Self { cuda: cuda.clone(), blocks: Mutex::default() }
    }

    /// Allocates memory of at least `len` bytes with undefined content; returns its address.
    ///
    /// # Errors
    /// `Unsupported`: the instance runs on processors, or has no pinned memory. `Unavailable`: there
    /// is no memory left.
    pub(crate) fn allocate(&self, kind: ScratchKind, len: usize) -> Result<u64, InferError> {
        let Some(device) = self.cuda.device() else {
            return Err(InferError::unsupported(
                "the instance runs on processors: there is neither pinned memory nor memory of a \
                 GPU",
            ));
        };
        let whole = len.max(1).checked_next_multiple_of(GRAIN);
        let size = whole.ok_or_else(|| unavailable(format!("there are no {len} bytes")))?;
        let mut blocks = self.blocks.lock();
        let block = match blocks.take_unused(kind, size) {
            Some(block) => block,
            None => {
                if kind == ScratchKind::Pinned {
                    make_room(&mut blocks, device.pinned, size)?;
                }
                let made = Block::new(&self.cuda, kind, size).or_else(|fault| match fault {
                    Fault::Refused(_) => {
                        blocks.forget_unused(kind);
                        Block::new(&self.cuda, kind, size)
                    }
                    fault => Err(fault),
                });
                let block = made.map_err(|fault| failed(size, &fault))?;
                if kind == ScratchKind::Pinned {
                    blocks.pinned += block.len();
                }
                block
            }
        };
        let address = block.address();
        blocks.used.insert(address, block);
        Ok(address)
    }

    /// Frees memory. All work that uses it must be done.
    ///
    /// # Errors
    /// `InvalidArg`: there is no memory of this kind at the address.
    pub(crate) fn free(&self, kind: ScratchKind, address: u64) -> Result<(), InferError> {
        let mut blocks = self.blocks.lock();
        match blocks.used.remove(&address) {
            Some(block) if block.kind() == kind => {
                blocks.put_back(block);
                Ok(())
            }
            other => {
                if let Some(block) = other {
                    blocks.used.insert(address, block);
                }
                Err(InferError::invalid(format!(
                    "no {kind} is allocated at the address {address:#x}"
                )))
            }
        }
    }
}

/// Frees unused pinned blocks if `size` more bytes need it.
fn make_room(blocks: &mut Blocks, limit: u64, size: usize) -> Result<(), InferError> {
    let fits = |pinned: usize| pinned as u64 + size as u64 <= limit;
    if limit == 0 {
        return Err(InferError::unsupported(
            "there is no pinned memory: --pinned-memory-pool-byte-size has left none for the \
             instance",
        ));
    }
    if !fits(blocks.pinned) {
        blocks.forget_unused(ScratchKind::Pinned);
    }
    if fits(blocks.pinned) {
        return Ok(());
    }
    Err(unavailable(format!(
        "{size} bytes of pinned memory exceed the instance's share of {limit} bytes \
         (--pinned-memory-pool-byte-size), of which {} are in use",
        blocks.pinned
    )))
}

fn failed(size: usize, fault: &Fault) -> InferError {
    let text = format!("cannot allocate {size} bytes: {fault}");
    match fault {
        Fault::Absent(_) => InferError::unsupported(text),
        Fault::Refused(_) | Fault::Permanent(_) => unavailable(text),
    }
}

fn unavailable(text: String) -> InferError {
    InferError::new(ErrorCode::Unavailable, Reason::Backend, text)
}

#[cfg(test)]
mod tests {
    use pharos::wire::Device;

    use super::super::fake::Fake;
    use super::*;

    const LIMIT: u64 = 16 << 12;

    fn scratch(fake: &Fake, pinned: u64) -> Scratch {
        let device = Device { number: 0, uuid: "GPU-0".into(), visible: vec![0], pinned };
        Scratch::new(&Cuda::with(Box::new(fake.clone()), Some(device)))
    }

    fn refused(result: Result<u64, InferError>) -> (ErrorCode, String) {
        let error = result.err().unwrap();
        (error.code, error.message)
    }

    #[test]
    fn freed_memory_is_reused_and_freed_once() {
        let fake = Fake::new(1);
        let scratch = scratch(&fake, LIMIT);
        for (kind, call) in [(ScratchKind::Device, "allocate"), (ScratchKind::Pinned, "register")] {
            let first = scratch.allocate(kind, 5000).unwrap();
            let second = scratch.allocate(kind, 1).unwrap();
            assert_ne!(first, second);
            assert_eq!(fake.count(call), 2);
            scratch.free(kind, first).unwrap();
            // 6,000 bytes fit into the two pages; a page would leave most of them unused.
            assert_eq!(scratch.allocate(kind, 6000).unwrap(), first);
            assert_eq!(fake.count(call), 2);
            scratch.free(kind, first).unwrap();
            let twice = scratch.free(kind, first).unwrap_err();
            assert_eq!(twice.message, format!("no {kind} is allocated at the address {first:#x}"));
            let other = match kind {
                ScratchKind::Device => ScratchKind::Pinned,
                ScratchKind::Pinned => ScratchKind::Device,
            };
            assert_eq!(scratch.free(other, second).unwrap_err().code, ErrorCode::InvalidArg);
            scratch.free(kind, second).unwrap();
        }
        assert_eq!((fake.buffers(), fake.registered().len()), (2, 2));
        drop(scratch);
        assert_eq!((fake.buffers(), fake.registered().len()), (0, 0));
    }

    #[test]
    fn unused_memory_is_given_up_before_an_allocation_fails() {
        let fake = Fake::new(1);
        let scratch = scratch(&fake, LIMIT);
        let kept = scratch.allocate(ScratchKind::Device, 1).unwrap();
        scratch.free(ScratchKind::Device, kept).unwrap();
        fake.fail("allocate", 0, Fault::Refused("out of memory".into()));
        scratch.allocate(ScratchKind::Device, 1 << 20).unwrap();
        assert_eq!(fake.buffers(), 1);
        for nth in 0..2 {
            fake.fail("allocate", nth, Fault::Refused("out of memory".into()));
        }
        assert_eq!(
            refused(scratch.allocate(ScratchKind::Device, 1 << 20)),
            (ErrorCode::Unavailable, "cannot allocate 1048576 bytes: out of memory".into())
        );
    }

    #[test]
    fn pinned_memory_is_limited() {
        let fake = Fake::new(1);
        let scratch = scratch(&fake, LIMIT);
        let half = scratch.allocate(ScratchKind::Pinned, 8 << 12).unwrap();
        let small = scratch.allocate(ScratchKind::Pinned, 1).unwrap();
        scratch.free(ScratchKind::Pinned, small).unwrap();
        // Needs the page that is not used.
        let rest = scratch.allocate(ScratchKind::Pinned, 8 << 12).unwrap();
        assert_eq!(fake.registered().len(), 2);
        let (code, text) = refused(scratch.allocate(ScratchKind::Pinned, 1));
        assert_eq!(code, ErrorCode::Unavailable);
        assert!(text.contains("exceed the instance's share of 65536 bytes"), "{text}");
        for address in [half, rest] {
            scratch.free(ScratchKind::Pinned, address).unwrap();
        }
        scratch.allocate(ScratchKind::Pinned, 16 << 12).unwrap();
    }

    #[test]
    fn instances_without_a_device_or_a_share_have_no_such_memory() {
        let fake = Fake::new(1);
        let none = Scratch::new(&Cuda::with(Box::new(fake.clone()), None));
        for kind in [ScratchKind::Device, ScratchKind::Pinned] {
            assert_eq!(refused(none.allocate(kind, 1)).0, ErrorCode::Unsupported);
        }
        let scratch = scratch(&fake, 0);
        assert_eq!(refused(scratch.allocate(ScratchKind::Pinned, 1)).0, ErrorCode::Unsupported);
        assert_eq!(
            refused(scratch.allocate(ScratchKind::Device, usize::MAX)),
            (ErrorCode::Unavailable, format!("there are no {} bytes", usize::MAX))
        );
        assert_eq!((fake.count("allocate"), fake.count("register")), (0, 0));
    }

    #[test]
    fn a_machine_without_a_driver_says_so() {
        let scratch = scratch(&Fake::absent(), LIMIT);
        let (code, text) = refused(scratch.allocate(ScratchKind::Device, 1));
        assert_eq!(
            (code, text.as_str()),
            (ErrorCode::Unsupported, "cannot allocate 4096 bytes: no driver")
        );
    }
}
