//! Client memory on devices: used in place, copied between devices, joined, or invalid.

use parking_lot::Mutex;
use pharos_backend::ReceivedPiece;

use super::*;
use crate::device::DeviceMemory;

#[test]
fn memory_on_the_instances_device_is_used_in_place() {
    let fake = fake();
    let mut world = on(&fake, &add_sub("TYPE_FP32")).unwrap();
    let content = [floats(&[1., 2., 10., 20.]), vec![0; 48]].concat();
    let (address, handle) = fake.share(0, &content);
    world.cuda_region(1, 3, handle, 64);
    let left = [Part::Region(1, 0, 8)];
    let right = [Part::Region(1, 8, 8)];
    let placed = [to(0, 0, 1, 32, 8), to(0, 1, 1, 48, 8)];
    let execute = world.frame(DataType::Fp32, 2, &[&left, &right], &placed);
    let (done, _) = world.run(&execute);
    assert!(
        done.error.is_none()
            && done.failed.is_empty()
            && done.outputs.iter().all(|block| block.in_client_memory)
    );
    let seen = fake.content(address);
    assert_eq!((&seen[32..40], &seen[48..56]), (&*floats(&[11., 22.]), &*floats(&[-9., -18.])));
    // No byte was copied through the process or a buffer.
    for call in ["upload", "download", "read", "write", "copy", "copy_peer", "allocate"] {
        assert_eq!(fake.count(call), 0, "{call}");
    }
    // An output over an input goes through a buffer, so that no written byte is read as input.
    let placed = [to(0, 0, 1, 0, 8), to(0, 1, 1, 8, 8)];
    let execute = world.frame(DataType::Fp32, 2, &[&left, &right], &placed);
    assert!(world.run(&execute).0.failed.is_empty());
    assert_eq!(fake.content(address)[..16], floats(&[11., 22., -9., -18.]));
    // Too little room fails the request without an error of the device.
    let execute = world.frame(DataType::Fp32, 2, &[&left, &right], &[to(0, 0, 1, 32, 4)]);
    let (done, _) = world.run(&execute);
    assert!(done.failed[0].1.message.contains("(4 bytes) should be at least 8 bytes"));
    assert_eq!(fake.open_count(), 1);
    world.instance.regions.table_mut().unmap(&[1]);
    assert_eq!(fake.open_count(), 0);
}

#[test]
fn memory_that_is_not_aligned_is_copied_on_the_device() {
    let fake = fake();
    let mut world = on(&fake, &add_sub("TYPE_FP32")).unwrap();
    let content = [vec![9], floats(&[1., 2., 10., 20.]), vec![0; 47]].concat();
    let (address, handle) = fake.share(0, &content);
    world.cuda_region(1, 3, handle, 64);
    let left = [Part::Region(1, 1, 8)];
    let right = [Part::Region(1, 9, 8)];
    let execute =
        world.frame(DataType::Fp32, 2, &[&left, &right], &[to(0, 0, 1, 33, 8), to(0, 1, 1, 42, 8)]);
    let (done, _) = world.run(&execute);
    assert_eq!((done.error, done.failed.len()), (None, 0));
    let seen = fake.content(address);
    assert_eq!((&seen[33..41], &seen[42..50]), (&*floats(&[11., 22.]), &*floats(&[-9., -18.])));
    assert_eq!((fake.count("copy"), fake.count("upload"), fake.count("download")), (4, 0, 0));
    assert_eq!(world.instance.regions.cuda().broken(), None);
}

#[test]
fn memory_of_another_device_is_copied_between_devices() {
    let fake = fake();
    let mut world = on(&fake, &identity("TYPE_FP32")).unwrap();
    let (theirs, handle) = fake.share(1, &[floats(&[5., 6.]), vec![0; 8]].concat());
    world.cuda_region(1, 0, handle, 16);
    let execute = world.frame(DataType::Fp32, 2, &[&[Part::Region(1, 0, 8)]], &[to(0, 0, 1, 8, 8)]);
    assert_eq!(world.run(&execute).0.error, None);
    assert_eq!(fake.content(theirs)[8..], floats(&[5., 6.]));
    assert_eq!((fake.count("copy_peer"), fake.count("upload"), fake.count("download")), (2, 0, 0));
    // A device that is not visible to the process.
    world.cuda_region(2, 7, handle, 16);
    let execute = world.frame(DataType::Fp32, 2, &[&[Part::Region(2, 0, 8)]], &[]);
    let (done, _) = world.run(&execute);
    let text = "shared memory region 'c2' cannot be used: it is on GPU 7, which is not visible to \
                an instance on GPU 3; visible: [3, 0]";
    assert_eq!(done.failed[0].1.message, text);
}

#[test]
fn a_batch_is_joined_on_the_device() {
    let fake = fake();
    let mut world = on(&fake, &add_sub("TYPE_FP32")).unwrap();
    let own = fake.share(0, &floats(&[1., 2., 3., 4.]));
    let other = fake.share(1, &floats(&[5., 6., 7., 8.]));
    let system = world.region(3, &floats(&[9., 10.]));
    world.cuda_region(1, 3, own.1, 16);
    world.cuda_region(2, 0, other.1, 16);
    world.cuda_region(4, 3, [0xff; CUDA_HANDLE], 16);
    let here = floats(&[11., 12.]);
    let (left, right) = mixed(&here);
    let placed = [to(2, 0, 2, 8, 8), to(4, 1, 1, 0, 8)];
    let execute = world.frame(DataType::Fp32, 2, &[&left, &right], &placed);
    let (done, read) = world.run(&execute);
    assert_eq!(done.failed.iter().map(|(request, _)| *request).collect::<Vec<_>>(), [3]);
    // In the first output, the third request's rows are on a device; the others are together here.
    assert_eq!(
        (read[0].requests.as_slice(), read[0].shape.as_slice()),
        ([0, 1, 3, 4].as_slice(), [4, 2].as_slice())
    );
    assert_eq!(read[0].data, floats(&[4., 6., 12., 14., 0., 0., 10., 12.]));
    assert_eq!(fake.content(other.0)[8..], floats(&[6., 8.]));
    assert_eq!(fake.content(own.0)[..8], floats(&[8., 8.]));
    // Each input was copied to the device once: two from this process, zeros for the failed
    // request, the others from their devices.
    assert_eq!((fake.count("upload"), fake.count("zero"), fake.count("copy_peer")), (2, 2, 2));
    // The fifth request's second output replaces its input, which another request may still need:
    // it is written afterwards.
    assert_eq!((fake.count("read"), fake.count("write")), (0, 1));
    drop(system);
}

#[test]
fn the_rows_of_each_request_are_written_to_its_memory() {
    let rows = [1, 2, 1, 3];
    let values: Vec<f32> = (0u8..14).map(f32::from).collect();
    for config in [
        identity("TYPE_FP32"),
        identity("TYPE_FP32").replace("max_batch_size: 8", "max_batch_size: 0"),
    ] {
        let fake = fake();
        let mut world = on(&fake, &config).unwrap();
        let (address, handle) = fake.share(0, &[0; 128]);
        world.cuda_region(1, 3, handle, 128);
        let data = floats(&values);
        let parts = [0..8, 8..24, 24..32, 32..56].map(|range| Part::Arena(&data[range]));
        // One place is too small, and one is also used by another request: both are handled after
        // the batch.
        let placed =
            [to(0, 0, 1, 4, 8), to(1, 0, 1, 64, 8), to(2, 0, 1, 8, 8), to(3, 0, 1, 96, 24)];
        let mut execute = world.frame(DataType::Fp32, 2, &[&parts], &placed);
        execute.requests.iter_mut().zip(rows).for_each(|(request, rows)| request.rows = rows);
        execute.inputs[0].shape = vec![7, 2];
        let (done, read) = world.run(&execute);
        assert_eq!(done.error, None);
        if !config.contains("max_batch_size: 8") {
            // Not split by rows: no part of the output can be attributed to one request.
            assert!(done.outputs.iter().all(|block| !block.in_client_memory));
            continue;
        }
        let why: Vec<_> =
            done.failed.iter().map(|(request, error)| (*request, error.message.as_str())).collect();
        let text = "shared memory size specified with the request for output 'Y' (8 bytes) should \
                    be at least 16 bytes to hold the results";
        assert_eq!(why, [(1, text)]);
        let placed: Vec<_> = done
            .outputs
            .iter()
            .filter(|block| block.in_client_memory)
            .map(|block| (block.requests.clone(), block.shape.clone(), block.len))
            .collect();
        assert_eq!(placed, [(vec![0], vec![1, 2], 8), (vec![3], vec![3, 2], 24)]);
        assert_eq!((read[0].requests.as_slice(), read[0].data.len()), ([1, 2].as_slice(), 24));
        let seen = fake.content(address);
        assert_eq!((&seen[8..16], &seen[96..120]), (&data[24..32], &data[32..56]));
        assert_eq!((&seen[4..8], &seen[64..72]), (&data[..4], &[0; 8][..]));
        assert_eq!((fake.count("copy"), fake.count("download"), fake.count("write")), (2, 2, 1));
    }
}

#[test]
fn outputs_not_split_by_rows_go_through_the_arena() {
    let fake = fake();
    let mut world = on(&fake, &identity("TYPE_FP32")).unwrap();
    let (address, handle) = fake.share(0, &[0; 32]);
    world.cuda_region(1, 3, handle, 32);
    let data = floats(&[1., 2., 3.]);
    for requests in [1, 2] {
        // Of two requests, the first has one element and the second two.
        let parts = if requests == 1 {
            vec![Part::Arena(&data)]
        } else {
            vec![Part::Arena(&data[..4]), Part::Arena(&data[4..])]
        };
        let placed: Vec<_> = (0u32..)
            .zip([(0, 12), (16, 8)])
            .take(requests)
            .map(|(at, (from, len))| to(at, 0, 1, from, len))
            .collect();
        let mut execute = world.frame(DataType::Fp32, 1, &[&parts], &placed);
        execute.inputs[0].shape = vec![3];
        execute.elements = vec![(0, if requests == 1 { vec![3] } else { vec![1, 2] })];
        let (done, read) = world.run(&execute);
        assert_eq!(
            (done.error, done.failed.len(), done.outputs[0].in_client_memory),
            (None, 0, false)
        );
        assert_eq!((&read[0].shape, &read[0].data), (&vec![3], &data));
    }
    let seen = fake.content(address);
    assert_eq!((&seen[..4], &seen[16..24]), (&data[..4], &data[4..]));
}

#[test]
fn backends_without_device_memory_get_copies() {
    let fake = fake();
    let cuda = Cuda::with(Box::new(fake.clone()), None);
    let mut world = load_on(&identity("TYPE_FP32"), &[], cuda).unwrap();
    let (address, handle) = fake.share(1, &[floats(&[5., 6.]), vec![0; 8]].concat());
    world.cuda_region(1, 1, handle, 16);
    let execute = world.frame(DataType::Fp32, 2, &[&[Part::Region(1, 0, 8)]], &[to(0, 0, 1, 8, 8)]);
    assert_eq!(world.run(&execute).0.error, None);
    assert_eq!(fake.content(address)[8..], floats(&[5., 6.]));
    assert_eq!((fake.count("read"), fake.count("write"), fake.count("stream")), (1, 1, 0));
}

/// Keeps all pieces of its first input.
struct Keeper(Arc<Mutex<Vec<ReceivedPiece>>>);

impl Backend for Keeper {
    fn engine(&self) -> String {
        String::new()
    }

    fn takes_device_memory(&self) -> DeviceInputs {
        DeviceInputs::Pieces
    }

    fn execute(&mut self, batch: &Batch<'_>, _: &mut Outputs<'_>) -> Result<(), InferError> {
        let pieces =
            (0..batch.inputs[0].pieces.len()).map(|piece| batch.received_piece(0, piece).unwrap());
        self.0.lock().extend(pieces);
        assert!(batch.received_piece(0, batch.requests.len()).is_none());
        Ok(())
    }
}

#[test]
fn pieces_stay_valid_after_the_batch_and_the_regions_are_gone() {
    let fake = fake();
    let mut world = on(&fake, &identity("TYPE_FP32")).unwrap();
    let pieces = Arc::new(Mutex::new(Vec::new()));
    let config = world.instance.config.clone();
    let runtime = world.instance.runtime.clone();
    let regions = world.instance.regions.clone();
    world.instance =
        Instance::new(Box::new(Keeper(pieces.clone())), config, runtime.clone(), regions.clone());
    let own = fake.share(0, &floats(&[1., 2., 3., 4.]));
    let other = fake.share(1, &floats(&[5., 6.]));
    let system = world.region(3, &floats(&[9., 10.]));
    world.cuda_region(1, 3, own.1, 16);
    world.cuda_region(2, 0, other.1, 8);
    world.cuda_region(4, 3, [0xff; CUDA_HANDLE], 16);
    let here = floats(&[11., 12.]);
    let parts = [
        Part::Region(1, 8, 8),
        Part::Arena(&here),
        Part::Region(2, 0, 8),
        Part::Region(4, 0, 8),
        Part::Region(3, 0, 8),
    ];
    let execute = world.frame(DataType::Fp32, 2, &[&parts], &[]);
    let (done, _) = world.run(&execute);
    assert_eq!(done.error, None);
    assert_eq!(done.failed.iter().map(|(request, _)| *request).collect::<Vec<_>>(), [3]);
    drop(system);
    regions.table_mut().unmap(&[1, 2, 3, 4]);
    assert_eq!((fake.open_count(), fake.count("read"), fake.count("upload")), (2, 0, 0));
    let mut seen = Vec::new();
    for piece in pieces.lock().iter() {
        match piece {
            ReceivedPiece::Host(bytes) => seen.push((None, bytes.to_vec())),
            ReceivedPiece::Device(kept) => {
                seen.push((
                    Some(kept.memory().device()),
                    runtime.fetch(kept.memory()).unwrap().to_vec(),
                ));
            }
        }
    }
    let expected = [
        (Some(0), [3., 4.]),
        (None, [11., 12.]),
        (Some(1), [5., 6.]),
        (None, [0., 0.]),
        (None, [9., 10.]),
    ];
    assert_eq!(seen, expected.map(|(device, values)| (device, floats(&values))));
    pieces.lock().clear();
    assert_eq!(fake.open_count(), 0);
    let gone = runtime.fetch(DeviceMemory::new(0, 1, 8)).err().unwrap();
    assert!(gone.message.starts_with("cannot copy memory of device 0: "), "{}", gone.message);
}
