//! Batches with client memory: mixed, split by request, invalid, and truncated while they are
//! executed.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use pharos::error::ErrorCode;
use pharos::wire::regions::{RegionDescription, RegionLocation, encode};
use pharos::wire::{Piece, Placement};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};

use super::*;

const SIZE: u64 = 8192;

/// Both ends of a socket of regions.
pub(super) fn socket() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap()
}

impl World {
    /// Registers a region with this content under a number.
    pub(super) fn region(&self, id: u64, content: &[u8]) -> OwnedFd {
        let file = memfd_create("object", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, SIZE).unwrap();
        assert_eq!(rustix::io::pwrite(&file, content, 0).unwrap(), content.len());
        let location = RegionLocation::System { offset: 0 };
        let packet =
            encode(&[RegionDescription { id, name: format!("r{id}"), byte_size: SIZE, location }]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(&self.regions, &[IoSlice::new(&packet)], &mut control, SendFlags::empty()).unwrap();
        file
    }

    /// Executes a batch of one input, one row for each piece: of a region, or of the arena with
    /// these bytes.
    fn execute_pieces(
        &mut self,
        datatype: DataType,
        shape: Vec<i64>,
        pieces: &[(u64, u64, &[u8], u64)],
        placements: &[Placement],
    ) -> (Done, Vec<Read>) {
        let mut next = flags::BYTES.next_multiple_of(64);
        let pieces = (0..).zip(pieces).map(|(request, (region, offset, bytes, elements))| {
            let mut offset = *offset;
            let len = bytes.len() as u64;
            if *region == 0 {
                assert!(self.inputs.copy_in(usize::try_from(next).unwrap(), bytes));
                offset = next;
                next = (next + len).next_multiple_of(64);
            }
            Piece { region: *region, request, offset, len, elements: *elements }
        });
        let pieces: Vec<Piece> = pieces.collect();
        let requests =
            vec![BatchRequest { rows: 1, id: "q".into(), ..BatchRequest::default() }; pieces.len()];
        let len = pieces.iter().map(|piece| piece.len).sum();
        let inputs = vec![InputBlock { input: 0, datatype, shape, offset: 0, len, pieces }];
        let released = std::mem::take(&mut self.unread);
        let placements = placements.to_vec();
        let execute = Execute {
            batch: 1,
            requests,
            inputs,
            outputs: Vec::new(),
            released,
            flags: 0,
            placements,
            elements: Vec::new(),
            resumed: Vec::new(),
        };
        self.run(&execute)
    }
}

fn content(file: &OwnedFd, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    assert_eq!(rustix::io::pread(file, &mut bytes, offset).unwrap(), len);
    bytes
}

fn identity(datatype: &str, more: &str) -> String {
    let io = format!(
        "input {{ name: 'X' data_type: {datatype} dims: [-1] }} output {{ name: 'Y' data_type: \
         {datatype} dims: [-1] }}"
    );
    builtin("identity", &format!("{io} max_batch_size: 4 {more}"))
}

fn to(request: u32, region: u64, offset: u64, len: u64) -> Placement {
    Placement { request, output: 0, region, offset, len }
}

fn failures(done: &Done) -> Vec<(u32, ErrorCode, &str)> {
    done.failed.iter().map(|(at, error)| (*at, error.code, error.message.as_str())).collect()
}

#[test]
fn rows_are_read_from_and_written_to_their_locations() {
    let mut world = load(&identity("TYPE_INT8", ""), &[]).unwrap();
    let one = world.region(1, b"abcdef");
    let two = world.region(2, b"uvwxyz");
    let pieces: [(u64, u64, &[u8], u64); 4] =
        [(1, 2, &[0; 2], 2), (0, 0, b"12", 2), (2, 4, &[0; 2], 2), (1, 0, &[0; 2], 2)];
    let placements = [to(0, 2, 100, 2), to(1, 1, 200, 50), to(2, 1, 300, 1)];
    let (done, read) = world.execute_pieces(DataType::Int8, vec![4, 2], &pieces, &placements);
    assert_eq!(read[0].data, b"cd12yzab");
    assert_eq!(
        (content(&two, 100, 3), content(&one, 200, 3)),
        (b"cd\0".to_vec(), b"12\0".to_vec())
    );
    assert_eq!(content(&one, 300, 2), [0; 2]);
    let text = "shared memory size specified with the request for output 'Y' (1 bytes) should be \
                at least 2 bytes to hold the results";
    assert_eq!(failures(&done), [(2, ErrorCode::Internal, text)]);
    assert!(done.failed[0].1.of_region);
}

#[test]
fn a_request_alone_in_its_batch_uses_client_memory_in_place() {
    let mut world = load(&identity("TYPE_INT8", ""), &[]).unwrap();
    let file = world.region(1, b"abcdef");
    let (done, _) = world.execute_pieces(
        DataType::Int8,
        vec![1, 6],
        &[(1, 0, &[0; 6], 6)],
        &[to(0, 1, 4096, 8)],
    );
    assert!(done.outputs[0].in_client_memory && done.outputs[0].len == 6 && done.error.is_none());
    assert_eq!(content(&file, 4096, 7), b"abcdef\0");
    // An output over its input goes through the arena, so that no written byte is read as input.
    let (done, _) =
        world.execute_pieces(DataType::Int8, vec![1, 6], &[(1, 0, &[0; 6], 6)], &[to(0, 1, 2, 6)]);
    assert!(!done.outputs[0].in_client_memory && done.failed.is_empty());
    assert_eq!(content(&file, 0, 9), b"ababcdef\0");
    // No room: the request fails alone; here there are no others.
    let (done, _) = world.execute_pieces(
        DataType::Int8,
        vec![1, 6],
        &[(1, 0, &[0; 6], 6)],
        &[to(0, 1, 4096, 5)],
    );
    assert_eq!(failures(&done).len(), 1);
    assert!(done.failed[0].1.message.contains("(5 bytes) should be at least 6 bytes"));
}

#[test]
fn strings_are_checked_in_a_copy_and_invalid_ones_fail_alone() {
    let mut world = load(&identity("TYPE_STRING", ""), &[]).unwrap();
    let good = texts(&["one", "two"]);
    let one = world.region(1, &good);
    let mut two = good.clone();
    two[0] = 200;
    let two = world.region(2, &two);
    let len = good.len();
    let pieces: [(u64, u64, &[u8], u64); 4] =
        [(1, 0, &good, 2), (2, 0, &good, 2), (0, 0, &good, 2), (1, 0, &good[..len - 2], 2)];
    let (done, read) = world.execute_pieces(
        DataType::Bytes,
        vec![4, 2],
        &pieces,
        &[to(0, 1, 1024, 64), to(2, 2, 1024, 13)],
    );
    assert_eq!(read[0].data, [good.as_slice(), &[0; 8], &good, &[0; 8]].concat());
    assert_eq!(content(&one, 1024, len), good);
    assert_eq!(content(&two, 1024, len), [0; 14]);
    let incomplete = "incomplete string data for inference input 'X', expecting string of length";
    let mut found = failures(&done);
    found.sort_unstable_by_key(|failure| failure.0);
    assert_eq!(found.iter().map(|failure| failure.0).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(found[0].2, format!("{incomplete} 200 but only 10 bytes available"));
    assert_eq!(found[2].2, format!("{incomplete} 3 but only 1 bytes available"));
    assert!(found[1].2.contains("(13 bytes) should be at least 14 bytes"));
    // The wrong number of elements; the error has the request's id.
    let (done, _) = world.execute_pieces(DataType::Bytes, vec![1, 1], &[(1, 0, &good, 1)], &[]);
    let wrong = "[request id: q] unexpected number of string elements 2 for inference input 'X' \
                 for model 'm', expecting 1";
    assert_eq!(failures(&done), [(0, ErrorCode::InvalidArg, wrong)]);
}

#[test]
fn a_truncated_region_fails_only_its_request() {
    let mut world = load(&identity("TYPE_INT8", ""), &[]).unwrap();
    let one = world.region(1, b"abcdef");
    let _two = world.region(2, b"uvwxyz");
    let pieces: [(u64, u64, &[u8], u64); 2] = [(1, 4096, &[0; 2], 2), (2, 0, &[0; 2], 2)];
    assert!(world.execute_pieces(DataType::Int8, vec![2, 2], &pieces, &[]).0.failed.is_empty());
    ftruncate(&one, 4096).unwrap();
    let (done, read) = world.execute_pieces(DataType::Int8, vec![2, 2], &pieces, &[]);
    let text = "shared memory region 'r1' was registered with 8192 bytes, of which 4096 are left";
    assert_eq!(failures(&done), [(0, ErrorCode::InvalidArg, text)]);
    assert_eq!(read[0].data, b"\0\0uv");
    // No request is left to execute.
    let (done, read) = world.execute_pieces(DataType::Int8, vec![1, 2], &pieces[..1], &[]);
    assert_eq!((done.failed.len(), read.len(), done.error), (1, 0, None));
    ftruncate(&one, SIZE).unwrap();
    let (done, read) = world.execute_pieces(DataType::Int8, vec![2, 2], &pieces, &[]);
    assert!(done.failed.is_empty() && read[0].data == b"\0\0uv");
}

#[test]
fn an_error_of_the_batch_fails_each_of_its_requests() {
    let io = "input { name: 'X' data_type: TYPE_INT8 dims: [-1] } output { name: 'Y' data_type: \
              TYPE_INT8 dims: [-1] }";
    let mut world = load(&test("fail", &format!("{io} max_batch_size: 4")), &[]).unwrap();
    let one = world.region(1, b"abcdef");
    let _two = world.region(2, b"uvwxyz");
    ftruncate(&one, 1).unwrap();
    let pieces: [(u64, u64, &[u8], u64); 2] = [(1, 0, &[0; 2], 2), (2, 0, &[0; 2], 2)];
    let (done, read) =
        world.execute_pieces(DataType::Int8, vec![2, 2], &pieces, &[to(1, 2, 64, 2)]);
    assert!(done.error.is_none() && read.is_empty());
    let found: Vec<_> = failures(&done)
        .into_iter()
        .map(|(at, _, text)| (at, text.contains("requested failure")))
        .collect();
    assert_eq!(found, [(0, false), (1, true)]);
}

#[test]
fn removed_regions_are_unmapped() {
    let mut world = load(&identity("TYPE_INT8", ""), &[]).unwrap();
    let file = world.region(1, b"abcdef");
    assert!(
        world
            .execute_pieces(DataType::Int8, vec![1, 6], &[(1, 0, &[0; 6], 6)], &[])
            .0
            .failed
            .is_empty()
    );
    world.instance.regions.table_mut().unmap(&[1]);
    let (done, _) = world.execute_pieces(DataType::Int8, vec![1, 6], &[(1, 0, &[0; 6], 6)], &[]);
    assert_eq!(failures(&done), [(0, ErrorCode::Internal, "there is no shared memory region 1")]);
    drop(file);
}
