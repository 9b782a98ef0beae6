//! Regions of real objects that clients modify, and CUDA regions over the fake driver.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use pharos::region::CUDA_HANDLE;
use pharos::wire::Device;
use pharos::wire::regions::encode;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};

use super::*;
use crate::device::fake::Fake;

const PAGE: u64 = 4096;

fn range(region: u64, offset: u64, len: u64) -> RegionRange {
    RegionRange { region, offset, len }
}

/// The regions of a worker, and the frontend's end of their socket.
struct World {
    regions: RegionTable,
    frontend: OwnedFd,
}

fn world() -> World {
    world_on(&Fake::absent(), None)
}

fn world_on(fake: &Fake, device: Option<Device>) -> World {
    let (frontend, worker) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None)
            .unwrap();
    World {
        regions: RegionTable::new(worker, Cuda::with(Box::new(fake.clone()), device)),
        frontend,
    }
}

impl World {
    fn send(&self, regions: &[RegionDescription], files: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(files)));
        }
        let packet = encode(regions);
        sendmsg(&self.frontend, &[IoSlice::new(&packet)], &mut control, SendFlags::empty())
            .unwrap();
    }

    /// Announces an object as region `id` of `len` bytes that begins at `offset` in it.
    fn system(&self, id: u64, offset: u64, len: u64) -> OwnedFd {
        let file = memfd_create("object", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, offset + len).unwrap();
        let region = RegionDescription {
            id,
            name: format!("r{id}"),
            byte_size: len,
            location: RegionLocation::System { offset },
        };
        self.send(&[region], &[file.as_fd()]);
        file
    }
}

fn write(file: &OwnedFd, offset: u64, bytes: &[u8]) {
    assert_eq!(rustix::io::pwrite(file, bytes, offset).unwrap(), bytes.len());
}

fn text<T>(result: Result<T, InferError>) -> String {
    let error = result.err().unwrap();
    assert_eq!(error.reason, Reason::SharedMemory);
    error.message
}

#[test]
fn reads_and_writes_are_shared_with_the_client() {
    let mut world = world();
    // Not at the beginning of a page.
    let file = world.system(1, 100, 3 * PAGE);
    write(&file, 100, b"begin");
    write(&file, 100 + 3 * PAGE - 3, b"end");
    world.regions.open(1).unwrap();
    let regions = &world.regions;
    assert_eq!(regions.in_place(range(1, 0, 5)), Some(&b"begin"[..]));
    let mut end = [0; 3];
    regions.read(1, 3 * PAGE - 3, &mut end).unwrap();
    assert_eq!(&end, b"end");
    regions.in_place_mut(range(1, 5, 2)).unwrap().copy_from_slice(b"ab");
    regions.write(1, 7, b"cd").unwrap();
    let mut seen = [0; 9];
    assert_eq!(rustix::io::pread(&file, &mut seen, 100).unwrap(), 9);
    assert_eq!(&seen, b"beginabcd");
    regions.check(1).unwrap();
    // Ranges past the end and unknown regions are refused.
    assert!(
        regions.in_place(range(1, 3 * PAGE - 3, 4)).is_none()
            && regions.in_place(range(1, u64::MAX, 2)).is_none()
    );
    assert!(regions.in_place(range(2, 0, 1)).is_none());
    assert!(text(regions.read(1, 3 * PAGE, &mut [0])).contains("not in shared memory region 1"));
    assert!(text(regions.write(1, u64::MAX, &[0])).contains("not in shared memory region 1"));
    assert!(text(world.regions.open(2)).contains("there is no shared memory region 2"));
}

#[test]
fn a_truncated_region_is_refused_until_it_has_grown_again() {
    let mut world = world();
    let file = world.system(1, PAGE, PAGE);
    ftruncate(&file, PAGE + 10).unwrap();
    let expected = "shared memory region 'r1' was registered with 4096 bytes, of which 10 are left";
    assert_eq!(text(world.regions.open(1)), expected);
    ftruncate(&file, 0).unwrap();
    assert!(text(world.regions.open(1)).ends_with("of which 0 are left"));
    ftruncate(&file, 2 * PAGE).unwrap();
    world.regions.open(1).unwrap();
    assert_eq!(world.regions.in_place(range(1, PAGE - 1, 1)), Some(&[0][..]));
}

#[test]
fn a_region_truncated_in_use_reads_as_zeros_and_is_reported() {
    let mut world = world();
    let file = world.system(1, 0, 64 * PAGE);
    let other = world.system(2, 0, PAGE);
    write(&file, 0, &[7; 8]);
    write(&file, 40 * PAGE, &[7; 8]);
    write(&other, 0, &[8; 8]);
    world.regions.open(1).unwrap();
    world.regions.open(2).unwrap();
    let regions = &world.regions;
    let start = regions.in_place(range(1, 0, 8)).unwrap();
    let late = regions.in_place(range(1, 40 * PAGE, 8)).unwrap();
    assert_eq!((start, late), (&[7; 8][..], &[7; 8][..]));
    ftruncate(&file, PAGE).unwrap();
    // Read and write truncated memory from several threads at once.
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let mapping =
                regions.in_place_mut(range(1, (1 + thread) * 8 * PAGE, 4 * PAGE)).unwrap();
            scope.spawn(move || {
                assert!(mapping.iter().all(|byte| *byte == 0));
                mapping.fill(1);
            });
        }
    });
    assert_eq!(start, [7; 8]);
    let mut copy = [9; 8];
    regions.read(1, 63 * PAGE, &mut copy).unwrap();
    assert_eq!(copy, [0; 8]);
    assert!(
        text(regions.check(1))
            .starts_with("shared memory region 'r1' was registered with 262144 bytes")
    );
    // The other region is unaffected, and the first works again once it has its size back.
    regions.check(2).unwrap();
    assert_eq!(regions.in_place(range(2, 0, 8)), Some(&[8; 8][..]));
    assert!(world.regions.open(1).is_err());
    ftruncate(&file, 64 * PAGE).unwrap();
    // It has its size back, but not during its use: the truncation must still be reported.
    world.regions.check(1).unwrap_err();
    world.regions.open(1).unwrap();
    world.regions.check(1).unwrap();
    write(&file, 40 * PAGE, &[6; 8]);
    assert_eq!(world.regions.in_place(range(1, 40 * PAGE, 8)), Some(&[6; 8][..]));
}

#[test]
fn a_fault_elsewhere_still_ends_the_process() {
    const CHILD: &str = "PHAROS_TEST_FOREIGN_FAULT";
    if std::env::var_os(CHILD).is_some() {
        let mut world = world();
        let file = world.system(1, 0, PAGE);
        world.regions.open(1).unwrap();
        let foreign = memfd_create("foreign", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&foreign, PAGE).unwrap();
        let mapping = Mapping::new(&foreign, 0, PAGE).unwrap();
        mapping.forget_watch();
        ftruncate(&foreign, 0).unwrap();
        drop(file);
        let _ = std::hint::black_box(
            mapping.bytes(0, 8).map(|bytes| bytes.iter().map(|b| u64::from(*b)).sum::<u64>()),
        );
        std::process::exit(0);
    }
    let this = std::env::current_exe().unwrap();
    let test = "regions::tests::a_fault_elsewhere_still_ends_the_process";
    let output =
        std::process::Command::new(this).args([test, "--exact"]).env(CHILD, "1").output().unwrap();
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{output:?}");
}

/// The variable that is set in the process without descriptors.
const SHORTAGE: &str = "PHAROS_TEST_SHORTAGE_OF_DESCRIPTORS";

/// Returns an object of one page that begins with this byte.
fn object(first: u8) -> OwnedFd {
    let file = memfd_create("object", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, PAGE).unwrap();
    write(&file, 0, &[first]);
    file
}

fn described(id: &usize) -> RegionDescription {
    let name = format!("r{id}");
    let location = RegionLocation::System { offset: 0 };
    RegionDescription { id: *id as u64, name, byte_size: PAGE, location }
}

/// Runs in a separate process, whose descriptors it exhausts.
#[test]
fn regions_without_descriptors_are_requested_again() {
    if std::env::var_os(SHORTAGE).is_none() {
        let this = std::env::current_exe().unwrap();
        let test = "regions::tests::regions_without_descriptors_are_requested_again";
        let output = std::process::Command::new(this)
            .args([test, "--exact"])
            .env(SHORTAGE, "1")
            .output()
            .unwrap();
        // Without a test of this name, the program succeeds too.
        let ran = String::from_utf8_lossy(&output.stdout).contains("1 passed");
        assert!(output.status.success() && ran, "{output:?}");
        return;
    }
    let mut world = world();
    let files: Vec<OwnedFd> = (b'0'..b'5').map(object).collect();
    let announce = |world: &World, ids: &[usize]| {
        let files: Vec<BorrowedFd<'_>> = ids.iter().map(|id| files[*id].as_fd()).collect();
        world.send(&ids.iter().map(described).collect::<Vec<_>>(), &files);
    };
    let first =
        |world: &World, id: u64| world.regions.in_place(range(id, 0, 1)).map(|bytes| bytes[0]);
    announce(&world, &[1]);
    world.regions.open(1).unwrap();
    announce(&world, &[2, 3]);
    announce(&world, &[4]);
    // Only one descriptor is free.
    let before = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let next = rustix::io::dup(&files[0]).unwrap().as_raw_fd();
    let shortage =
        rustix::process::Rlimit { current: Some(u64::try_from(next).unwrap() + 1), ..before };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, shortage).unwrap();
    world.regions.open(2).unwrap();
    assert_eq!(
        (first(&world, 2), world.regions.take_lost()),
        (Some(b'2'), Some(ToFrontend::RegionsLost(vec![3])))
    );
    let refused = world.regions.open(3).unwrap_err();
    assert_eq!((refused.code, refused.reason), (ErrorCode::Unavailable, Reason::SharedMemory));
    assert!(
        refused
            .message
            .contains("'r3' cannot be used: the worker could not receive its file descriptor")
    );
    assert_eq!(world.regions.take_lost(), Some(ToFrontend::RegionsLost(vec![4])));
    // Announced again, but the shortage continues. Each loss is reported once.
    announce(&world, &[3]);
    assert_eq!(world.regions.open(3).unwrap_err().code, ErrorCode::Unavailable);
    assert_eq!(world.regions.take_lost(), Some(ToFrontend::RegionsLost(vec![3])));
    world.regions.open(3).unwrap_err();
    assert_eq!(world.regions.take_lost(), None);
    rustix::process::setrlimit(rustix::process::Resource::Nofile, before).unwrap();
    // Descriptors are free again. A region in use is not replaced.
    let place = world.regions.in_place(range(1, 0, 1)).map(<[u8]>::as_ptr);
    announce(&world, &[1, 3, 4]);
    for id in [3, 4] {
        world.regions.open(id).unwrap();
    }
    assert_eq!([1, 2, 3, 4].map(|id| first(&world, id)), [b'1', b'2', b'3', b'4'].map(Some));
    assert_eq!(world.regions.in_place(range(1, 0, 1)).map(<[u8]>::as_ptr), place);
    assert_eq!(world.regions.take_lost(), None);
    world.regions.unmap(&[1, 2, 3, 4]);
    assert!(world.regions.known.is_empty());
}

#[test]
fn many_regions_are_added_and_removed() {
    let mut world = world();
    for round in 0..50u64 {
        let ids: Vec<u64> = (round * 10 + 1..=round * 10 + 10).collect();
        let files: Vec<OwnedFd> = ids.iter().map(|id| world.system(*id, 0, PAGE)).collect();
        for (id, file) in ids.iter().zip(&files) {
            write(file, 0, &id.to_le_bytes());
        }
        // The last one is removed without ever being used.
        for id in &ids[..9] {
            world.regions.open(*id).unwrap();
            assert_eq!(world.regions.in_place(range(*id, 0, 8)), Some(&id.to_le_bytes()[..]));
        }
        world.regions.unmap(&ids);
        assert!(world.regions.known.is_empty());
    }
}

#[test]
fn invalid_packets_are_refused() {
    let mut world = world();
    let packet = [IoSlice::new(&[9; 7])];
    let mut nothing = SendAncillaryBuffer::default();
    sendmsg(&world.frontend, &packet, &mut nothing, SendFlags::empty()).unwrap();
    assert!(text(world.regions.open(1)).starts_with("cannot receive shared memory regions"));
    let region = RegionDescription {
        id: 1,
        name: "r".into(),
        byte_size: 8,
        location: RegionLocation::System { offset: 0 },
    };
    world.send(&[region], &[]);
    assert!(text(world.regions.open(1)).contains("a packet of 1 regions has 0 descriptors"));
    world.system(2, 0, 8);
    world.regions.open(2).unwrap();
    // Larger than any address space.
    let file = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 1 << 62).unwrap();
    let region = RegionDescription {
        id: 3,
        name: "huge".into(),
        byte_size: 1 << 62,
        location: RegionLocation::System { offset: 0 },
    };
    world.send(&[region], &[file.as_fd()]);
    assert!(
        text(world.regions.open(3))
            .starts_with("shared memory region 'huge' cannot be used: it cannot be mapped")
    );
}

fn on_device(id: u64, byte_size: u64, device: u32, handle: [u8; CUDA_HANDLE]) -> RegionDescription {
    RegionDescription {
        id,
        name: format!("c{id}"),
        byte_size,
        location: RegionLocation::Cuda { device, handle: Box::new(handle) },
    }
}

#[test]
fn cuda_memory_is_opened_copied_and_closed() {
    let mut without = world();
    without.send(&[on_device(1, 8, 0, [1; CUDA_HANDLE])], &[]);
    assert_eq!(
        text(without.regions.open(1)),
        "shared memory region 'c1' cannot be used: no driver"
    );
    let fake = Fake::new(1);
    let mut world = world_on(&fake, None);
    let (address, handle) = fake.share(0, &[5; 8]);
    let region = |id, byte_size, device, handle| on_device(id, byte_size, device, handle);
    let none = [0; CUDA_HANDLE];
    world.send(
        &[
            region(1, 8, 0, handle),
            region(2, 9, 0, handle),
            region(3, 8, 0, none),
            region(4, 8, 7, handle),
        ],
        &[],
    );
    world.regions.open(1).unwrap();
    world.regions.open(1).unwrap();
    assert_eq!(fake.open_count(), 1);
    let mut two = [0; 2];
    world.regions.read(1, 6, &mut two).unwrap();
    assert_eq!(two, [5; 2]);
    world.regions.write(1, 1, &[1, 2]).unwrap();
    assert_eq!(fake.content(address), [5, 1, 2, 5, 5, 5, 5, 5]);
    world.regions.check(1).unwrap();
    assert!(world.regions.in_place(range(1, 0, 1)).is_none());
    assert_eq!(world.regions.on_device(range(1, 2, 6)), Some(DeviceMemory::new(0, address + 2, 6)));
    assert!(
        world.regions.on_device(range(1, 2, 7)).is_none()
            && world.regions.on_device(range(1, u64::MAX, 2)).is_none()
    );
    assert!(text(world.regions.read(1, 7, &mut two)).contains("not in shared memory region 1"));
    assert!(
        text(world.regions.open(2)).ends_with("was registered with 9 bytes, of which 8 are left")
    );
    assert!(text(world.regions.open(3)).ends_with("invalid handle"));
    assert!(text(world.regions.open(4)).ends_with("invalid handle"));
    world.regions.unmap(&[1, 2, 3, 4]);
    assert_eq!(fake.open_count(), 0);
}

#[test]
fn device_numbers_of_the_machine_are_converted_to_those_of_the_process() {
    let fake = Fake::new(2);
    let device = Device { number: 3, uuid: "GPU-3".into(), visible: vec![3, 0], pinned: 0 };
    let mut world = world_on(&fake, Some(device));
    let own = fake.share(0, &[3; 4]);
    let other = fake.share(1, &[7; 4]);
    world.send(
        &[on_device(1, 4, 3, own.1), on_device(2, 4, 0, other.1), on_device(3, 4, 1, own.1)],
        &[],
    );
    world.regions.open(1).unwrap();
    world.regions.open(2).unwrap();
    assert_eq!(world.regions.on_device(range(1, 0, 4)), Some(DeviceMemory::new(0, own.0, 4)));
    assert_eq!(world.regions.on_device(range(2, 0, 4)), Some(DeviceMemory::new(1, other.0, 4)));
    let unseen = "shared memory region 'c3' cannot be used: it is on GPU 1, which is not visible \
                  to an instance on GPU 3; visible: [3, 0]";
    assert_eq!(text(world.regions.open(3)), unseen);
}

#[test]
fn no_further_calls_are_made_to_a_lost_device() {
    let fake = Fake::new(1);
    let mut world = world_on(&fake, None);
    let (_, handle) = fake.share(0, &[5; 8]);
    world.send(&[on_device(1, 8, 0, handle)], &[]);
    world.regions.open(1).unwrap();
    assert_eq!(world.regions.cuda.broken(), None);
    fake.fail("read", 0, Fault::Permanent("ECC".into()));
    assert!(text(world.regions.read(1, 0, &mut [0])).ends_with("cannot be used: ECC"));
    assert!(text(world.regions.write(1, 0, &[0])).ends_with("cannot be used: ECC"));
    assert_eq!(fake.count("write"), 0);
    let sentence = "a GPU is no longer usable: ECC; the worker process must be replaced";
    assert_eq!(world.regions.cuda.broken().as_deref(), Some(sentence));
}

#[test]
fn memory_on_a_device_stays_open_while_it_is_held() {
    let fake = Fake::new(1);
    let mut world = world_on(&fake, None);
    let (address, handle) = fake.share(0, &[5; 8]);
    world.send(&[on_device(1, 8, 0, handle)], &[]);
    world.regions.open(1).unwrap();
    let kept = world.regions.kept_on_device(range(1, 2, 4)).unwrap();
    let other = kept.clone();
    assert!(
        world.regions.kept_on_device(range(1, 6, 4)).is_none()
            && world.regions.kept_on_device(range(2, 0, 1)).is_none()
    );
    world.regions.unmap(&[1]);
    assert!(world.regions.on_device(range(1, 2, 4)).is_none());
    drop(other);
    assert_eq!((fake.open_count(), kept.memory()), (1, DeviceMemory::new(0, address + 2, 4)));
    drop(kept);
    assert_eq!(fake.open_count(), 0);
}

#[test]
fn the_instances_device_is_current_again_after_each_call() {
    let fake = Fake::new(2);
    let device = Device { number: 3, uuid: "GPU-3".into(), visible: vec![3, 0], pinned: 0 };
    let mut world = world_on(&fake, Some(device));
    let own = fake.share(0, &[3; 4]);
    let other = fake.share(1, &[7; 4]);
    world.send(&[on_device(1, 4, 3, own.1), on_device(2, 4, 0, other.1)], &[]);
    world.regions.open(1).unwrap();
    world.regions.read(1, 0, &mut [0; 4]).unwrap();
    assert_eq!(fake.count("enter"), 0);
    world.regions.open(2).unwrap();
    world.regions.read(2, 0, &mut [0; 4]).unwrap();
    world.regions.write(2, 0, &[0; 4]).unwrap();
    world.regions.unmap(&[1, 2]);
    assert_eq!(fake.count("enter"), 4);
}
