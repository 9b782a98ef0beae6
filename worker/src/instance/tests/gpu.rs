//! Instances on a GPU over the fake driver: `builtin` on it, pinned arenas, the next batch's
//! inputs, and devices that are absent, refuse calls or are lost.

mod memory;
mod onnx;
mod triton;

use std::io::{IoSlice, Write};

use pharos::error::ErrorCode;
use pharos::region::CUDA_HANDLE;
use pharos::wire::regions::{RegionDescription, RegionLocation, encode};
use pharos::wire::{Device, Piece, Placement, ToFrontend, ToWorker};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::*;
use crate::backend::test_kernel;
use crate::device::Fault;
use crate::device::fake::Fake;

/// The instance runs on GPU 3 of the machine; GPU 0 is visible as well.
fn device(pinned: u64) -> Device {
    Device { number: 3, uuid: "GPU-3".into(), visible: vec![3, 0], pinned }
}

fn fake() -> Fake {
    Fake::new(2).with_kernels(test_kernel)
}

fn on(fake: &Fake, config: &str) -> Result<World, InferError> {
    load_on(config, &[], Cuda::with(Box::new(fake.clone()), Some(device(0))))
}

/// Returns the configuration of `add_sub` for this datatype, with a batch dimension.
fn add_sub(datatype: &str) -> String {
    let tensor = |name: &str| format!("{{ name: '{name}' data_type: {datatype} dims: [-1] }}");
    let inputs = ["A", "B"].map(tensor);
    let outputs = ["SUM", "DIFFERENCE"].map(tensor);
    let tensors = format!("input [ {} ] output [ {} ]", inputs.join(", "), outputs.join(", "));
    builtin("add_sub", &format!("max_batch_size: 8 {tensors}"))
}

fn identity(datatype: &str) -> String {
    let io = format!("data_type: {datatype} dims: [-1]");
    builtin(
        "identity",
        &format!("max_batch_size: 8 input {{ name: 'X' {io} }} output {{ name: 'Y' {io} }}"),
    )
}

fn plain(rows: usize) -> Vec<BatchRequest> {
    vec![BatchRequest { rows: 1, ..BatchRequest::default() }; rows]
}

/// The location of a part of an input: bytes in the arena, or a range of a region.
#[derive(Clone, Copy)]
enum Part<'p> {
    Arena(&'p [u8]),
    Region(u64, u64, u64),
}

impl World {
    /// Announces memory on a device.
    fn cuda_region(&self, id: u64, number: u32, handle: [u8; CUDA_HANDLE], byte_size: u64) {
        let location = RegionLocation::Cuda { device: number, handle: Box::new(handle) };
        let packet =
            encode(&[RegionDescription { id, name: format!("c{id}"), byte_size, location }]);
        let mut nothing = SendAncillaryBuffer::default();
        sendmsg(&self.regions, &[IoSlice::new(&packet)], &mut nothing, SendFlags::empty()).unwrap();
    }

    /// Returns the frame of a batch whose inputs have a part for each request.
    fn frame(
        &mut self,
        datatype: DataType,
        columns: i64,
        inputs: &[&[Part<'_>]],
        placed: &[Placement],
    ) -> Execute {
        let mut next = flags::BYTES.next_multiple_of(64);
        let rows = inputs[0].len();
        let mut blocks = Vec::new();
        for (input, parts) in (0u16..).zip(inputs) {
            let pieces = (0u32..).zip(*parts).map(|(request, part)| match *part {
                Part::Arena(bytes) => {
                    assert!(self.inputs.copy_in(usize::try_from(next).unwrap(), bytes));
                    let offset = next;
                    next = (next + bytes.len() as u64).next_multiple_of(64);
                    Piece { region: 0, request, offset, len: bytes.len() as u64, elements: 0 }
                }
                Part::Region(region, offset, len) => {
                    Piece { region, request, offset, len, elements: 0 }
                }
            });
            let pieces: Vec<Piece> = pieces.collect();
            let len = pieces.iter().map(|piece| piece.len).sum();
            let shape = vec![i64::try_from(rows).unwrap(), columns];
            blocks.push(InputBlock { input, datatype, shape, offset: 0, len, pieces });
        }
        self.batches += 1;
        let batch = self.batches;
        let requests = plain(rows);
        let released = std::mem::take(&mut self.unread);
        let placements = placed.to_vec();
        Execute {
            batch,
            requests,
            inputs: blocks,
            outputs: Vec::new(),
            released,
            flags: 0,
            placements,
            elements: Vec::new(),
            resumed: Vec::new(),
        }
    }

    /// Returns a batch of one request with two inputs in the arena, starting at `at`.
    fn pair(&mut self, at: usize, left: &[u8], right: &[u8]) -> Execute {
        self.batches += 1;
        let offsets = [at, at + left.len().next_multiple_of(64)];
        let inputs = (0u16..).zip([left, right]).zip(offsets).map(|((input, data), offset)| {
            assert!(self.inputs.copy_in(offset, data));
            let shape = vec![1, i64::try_from(data.len() / 4).unwrap()];
            let datatype = DataType::Fp32;
            InputBlock {
                input,
                datatype,
                shape,
                offset: offset as u64,
                len: data.len() as u64,
                pieces: Vec::new(),
            }
        });
        let inputs = inputs.collect();
        of(self.batches, inputs)
    }

    fn send(&mut self, frame: &ToWorker) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.frontend.write_all(&bytes).unwrap();
    }
}

/// Returns a batch of one request with its inputs in the arena.
fn of(batch: u64, inputs: Vec<InputBlock>) -> Execute {
    let requests = plain(1);
    Execute {
        batch,
        requests,
        inputs,
        outputs: Vec::new(),
        released: Vec::new(),
        flags: 0,
        placements: Vec::new(),
        elements: Vec::new(),
        resumed: Vec::new(),
    }
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn to(request: u32, output: u16, region: u64, offset: u64, len: u64) -> Placement {
    Placement { request, output, region, offset, len }
}

fn message(done: &Done) -> &str {
    &done.error.as_ref().unwrap().message
}

fn why(result: Result<World, InferError>) -> String {
    result.err().unwrap().message
}

/// Returns bytes that look random and are valid numbers of every type: no float among them is
/// infinite or NaN.
fn random(dice: &mut Dice, len: usize) -> Vec<u8> {
    (0..len).map(|_| u8::try_from(dice.below(0x70)).unwrap()).collect()
}

#[test]
fn results_of_the_device_equal_those_of_the_processor() {
    let mut dice = Dice(5);
    let types = [
        ("TYPE_INT8", DataType::Int8),
        ("TYPE_UINT8", DataType::Uint8),
        ("TYPE_INT16", DataType::Int16),
        ("TYPE_UINT16", DataType::Uint16),
        ("TYPE_INT32", DataType::Int32),
        ("TYPE_UINT32", DataType::Uint32),
        ("TYPE_INT64", DataType::Int64),
        ("TYPE_UINT64", DataType::Uint64),
        ("TYPE_FP16", DataType::Fp16),
        ("TYPE_BF16", DataType::Bf16),
        ("TYPE_FP32", DataType::Fp32),
        ("TYPE_FP64", DataType::Fp64),
    ];
    for (name, datatype) in types {
        let fake = fake();
        let mut there = on(&fake, &add_sub(name)).unwrap();
        let mut here = load(&add_sub(name), &[]).unwrap();
        assert!(there.instance.loaded().engine.ends_with(" on Fake 0"));
        for (rows, columns) in [(1, 3), (2, 1000), (1, 0), (4, 5)] {
            let len = rows * columns * datatype.size().unwrap();
            let shape = vec![i64::try_from(rows).unwrap(), i64::try_from(columns).unwrap()];
            let inputs =
                [0, 1].map(|input| (input, datatype, shape.clone(), random(&mut dice, len)));
            let (done, read) = there.execute(&plain(rows), &inputs, &[]);
            assert_eq!(done.error, None);
            assert_eq!(read, here.execute(&plain(rows), &inputs, &[]).1, "{name} {rows} {columns}");
            assert!(fake.is_idle());
            // Only one output.
            let (_, read) = there.execute(&plain(rows), &inputs, &[1]);
            assert_eq!(read, here.execute(&plain(rows), &inputs, &[1]).1);
        }
    }
    for (name, datatype) in
        types.into_iter().chain([("TYPE_BOOL", DataType::Bool), ("TYPE_STRING", DataType::Bytes)])
    {
        let mut world = on(&fake(), &identity(name)).unwrap();
        let data = if datatype == DataType::Bytes {
            texts(&["one", "", "three"])
        } else {
            random(&mut dice, 24)
        };
        let (done, read) =
            world.execute(&plain(1), &[(0, datatype, vec![1, 3], data.clone())], &[]);
        assert!(done.error.is_none() && read[0].data == data && read[0].shape == [1, 3]);
    }
}

#[test]
fn stamps_are_the_times_that_the_device_measured() {
    let mut world = on(&fake(), &add_sub("TYPE_FP32")).unwrap();
    let inputs = [0, 1].map(|input| (input, DataType::Fp32, vec![1, 4], floats(&[1.0; 4])));
    let (done, _) = world.execute(&plain(1), &inputs, &[]);
    let stamps = done.stamps;
    // The fake driver's clock: 100 ns plus 1 ns per byte for a copy, eight bytes per element for a
    // kernel.
    assert!(stamps.input_end - stamps.start >= std::time::Duration::from_nanos(2 * (100 + 16)));
    assert_eq!(
        stamps.output_start - stamps.input_end,
        std::time::Duration::from_nanos(2 * (100 + 32))
    );
    assert!(stamps.end >= stamps.output_start);
}

#[test]
fn buffers_are_reused_by_the_next_batch_and_freed_at_the_end() {
    let fake = fake();
    let mut world = on(&fake, &add_sub("TYPE_FP32")).unwrap();
    let mut most = 0;
    for round in 0..40u16 {
        let len = 4 * usize::from(round % 7) * 9000;
        let inputs = [0, 1].map(|input| {
            (input, DataType::Fp32, vec![1, i64::try_from(len / 4).unwrap()], vec![0; len])
        });
        assert_eq!(world.execute(&plain(1), &inputs, &[]).0.error, None);
        if round == 6 {
            most = fake.buffers();
        }
    }
    assert!(most > 0 && fake.buffers() == most);
    // The driver has no more room: unused buffers are freed first.
    fake.fail("allocate", 0, Fault::Refused("out of memory".into()));
    let inputs = [0, 1].map(|input| (input, DataType::Fp32, vec![1, 100_000], vec![0; 400_000]));
    assert_eq!(world.execute(&plain(1), &inputs[..2], &[0]).0.error, None);
    assert!(fake.buffers() < most);
    drop(world);
    assert_eq!((fake.buffers(), fake.handles()), (0, 0));
}

#[test]
fn loading_a_model_reports_an_unusable_device() {
    let config = add_sub("TYPE_FP32");
    assert_eq!(why(on(&Fake::absent(), &config)), "GPU 3 (GPU-3) cannot be used: no driver");
    assert_eq!(
        why(on(&Fake::new(0), &config)),
        "GPU 3 (GPU-3) cannot be used: the CUDA driver reports no device"
    );
    let fake = fake();
    fake.fail("enter", 0, Fault::Refused("out of memory".into()));
    assert_eq!(why(on(&fake, &config)), "GPU 3 (GPU-3) cannot be used: out of memory");
    fake.fail("module", 0, Fault::Refused("unsupported PTX version".into()));
    assert_eq!(
        why(on(&fake, &config)),
        "cannot load the kernels on the GPU: unsupported PTX version"
    );
    fake.fail("stream", 1, Fault::Refused("no more".into()));
    assert_eq!(why(on(&fake, &config)), "the GPU cannot be used: no more");
    assert!(on(&fake, &config).is_ok());
    for name in ["TYPE_BOOL", "TYPE_STRING"] {
        assert!(
            why(on(&fake, &add_sub(name))).starts_with("add_sub on a GPU has no arithmetic for ")
        );
    }
    if !crate::backend::has_onnxruntime() {
        let tract = format!("backend: 'onnxruntime' max_batch_size: 5 {X}");
        assert!(why(on(&fake, &tract)).starts_with("tract computes on CPUs only"));
    }
    // Instances on CPUs do not call the driver.
    let cuda = Cuda::with(Box::new(Fake::absent()), None);
    assert!(load_on(&config, &[], cuda).is_ok());
}

#[test]
fn the_beginning_of_both_arenas_is_pinned_if_the_model_uses_the_device() {
    let with = |fake: &Fake, pinned| Cuda::with(Box::new(fake.clone()), Some(device(pinned)));
    let fake = fake();
    let world = load_on(&identity("TYPE_FP32"), &[], with(&fake, 64 << 10)).unwrap();
    assert_eq!((world.instance.loaded().pinned, fake.registered().len()), (128 << 10, 2));
    drop(world);
    assert_eq!(fake.registered(), []);
    // A larger limit than the arena pins all of it.
    let world = load_on(&identity("TYPE_FP32"), &[], with(&fake, 1 << 40)).unwrap();
    assert_eq!(world.instance.loaded().pinned, 2 * ARENA);
    drop(world);
    // A refusal only costs speed.
    fake.fail("register", 1, Fault::Refused("limit of locked memory".into()));
    let mut world = load_on(&identity("TYPE_FP32"), &[], with(&fake, 4096)).unwrap();
    assert_eq!(world.instance.loaded().pinned, 4096);
    let (done, _) =
        world.execute(&plain(1), &[(0, DataType::Fp32, vec![1, 1], floats(&[1.0]))], &[]);
    assert_eq!(done.error, None);
    // For a model that, as far as this process can tell, has loaded nothing on the device, and also
    // without a driver.
    for (fake, expected) in [(Fake::absent(), 0), (Fake::new(1), 0), (Fake::new(1), 8192)] {
        if expected > 0 {
            fake.activate();
        }
        let cuda = with(&fake, 4096);
        let made = parts(&identity("TYPE_FP32"), &[], &cuda);
        let (reader, sender, _frontend) = connection();
        let (runtime, regions) =
            crate::open(&made.load, reader, sender, made.descriptors, cuda).unwrap();
        assert_eq!(crate::pinning::pin(runtime.session(), regions.cuda()), expected);
        assert_eq!(fake.count("enter"), 0);
    }
}

#[test]
fn no_output_is_pinned_partially() {
    let fake = fake();
    let cuda = Cuda::with(Box::new(fake.clone()), Some(device(4 * 4096)));
    let mut world = load_on(&add_sub("TYPE_FP32"), &[], cuda).unwrap();
    assert_eq!(world.instance.loaded().pinned, 8 * 4096);
    let left = floats(&[3.0; 2048]);
    let right = floats(&[1.0; 2048]);
    let execute = world.pair(8 * 4096, &left, &right);
    for _ in 0..2 {
        let (done, read) = world.run(&execute);
        assert_eq!((done.error, done.failed.len()), (None, 0));
        // Two outputs of two pages each lie beside each other before the end of the pinned range,
        // or the second lies behind it.
        assert_eq!((&read[0].data, &read[1].data), (&floats(&[4.0; 2048]), &floats(&[2.0; 2048])));
    }
    let execute = world.pair(8 * 4096, &left[..6000], &right[..6000]);
    let unread = std::mem::take(&mut world.unread);
    for _ in 0..3 {
        // The earlier outputs are still in use, so that each output gets a new place.
        assert_eq!(world.run(&execute).0.error, None);
    }
    world.unread.extend(unread);
}

#[test]
fn a_failing_call_fails_only_its_batch() {
    let inputs =
        [0, 1].map(|input| (input, DataType::Fp32, vec![1, 4], floats(&[2.0, 3.0, 4.0, 5.0])));
    let calls =
        ["allocate", "upload", "launch", "record", "wait", "wait_here", "elapsed", "download"];
    for call in calls {
        for nth in 0..3 {
            let fake = fake();
            let mut world = on(&fake, &add_sub("TYPE_FP32")).unwrap();
            fake.fail(call, nth, Fault::Refused("not now".into()));
            let (done, _) = world.execute(&plain(1), &inputs, &[]);
            if let Some(error) = &done.error {
                assert_eq!(
                    (error.code, &*error.message),
                    (ErrorCode::Internal, "the GPU has failed: not now")
                );
            } else {
                // A failed allocation is repeated; other calls are not.
                assert!(call == "allocate" || fake.count(call) <= nth + 1, "{call} {nth}");
            }
            assert!(fake.is_idle(), "{call} {nth}");
            assert_eq!(world.instance.regions.cuda().broken(), None);
            let (done, read) = world.execute(&plain(1), &inputs, &[]);
            let (done, read) = if done.error.is_some() {
                world.execute(&plain(1), &inputs, &[])
            } else {
                (done, read)
            };
            assert_eq!(
                (done.error, &read[0].data, &read[1].data),
                (None, &floats(&[4., 6., 8., 10.]), &vec![0; 16])
            );
        }
    }
}

#[test]
fn a_device_lost_during_a_run_fails_its_batch_and_gets_no_further_calls() {
    let fake = fake();
    let mut world = on(&fake, &add_sub("TYPE_FP32")).unwrap();
    let inputs = [0, 1].map(|input| (input, DataType::Fp32, vec![1, 1], floats(&[2.0])));
    assert_eq!(world.execute(&plain(1), &inputs, &[]).0.error, None);
    fake.fail("launch", 1, Fault::Permanent("an illegal memory access was encountered".into()));
    let (done, _) = world.execute(&plain(1), &inputs, &[]);
    assert_eq!(message(&done), "the GPU has failed: an illegal memory access was encountered");
    let sentence = "GPU 3 (GPU-3) is no longer usable: an illegal memory access was encountered; \
                    the worker process must be replaced";
    assert_eq!(world.instance.regions.cuda().broken().as_deref(), Some(sentence));
    let launches = fake.count("launch");
    assert!(world.execute(&plain(1), &inputs, &[]).0.error.is_some());
    assert_eq!(fake.count("launch"), launches);
}

#[test]
fn the_process_ends_after_answering_when_its_device_is_lost() {
    let fake = fake();
    let cuda = Cuda::with(Box::new(fake.clone()), Some(device(4096)));
    let Parts { load, descriptors, inputs, outputs: _outputs, regions: _regions, .. } =
        parts(&identity("TYPE_FP32"), &[], &cuda);
    assert!(inputs.copy_in(usize::try_from(flags::BYTES).unwrap(), &[1; 4]));
    let (reader, sender, mut frontend) = connection();
    let process = std::thread::spawn(move || {
        crate::load_and_run(reader, sender, descriptors, &Registry::default(), |_| Ok(cuda))
            .map_err(|e| e.to_string())
    });
    let mut bytes = Vec::new();
    let datatype = DataType::Fp32;
    ToWorker::Load(load).encode(&mut bytes);
    let offset = flags::BYTES;
    let inputs = vec![InputBlock {
        input: 0,
        datatype,
        shape: vec![1, 1],
        offset,
        len: 4,
        pieces: Vec::new(),
    }];
    for batch in [1, 2, 3] {
        ToWorker::Execute(of(batch, inputs.clone())).encode(&mut bytes);
    }
    fake.fail("download", 1, Fault::Permanent("uncorrectable ECC error encountered".into()));
    frontend.write_all(&bytes).unwrap();
    let end = process.join().unwrap();
    let sentence = "GPU 3 (GPU-3) is no longer usable: uncorrectable ECC error encountered; the \
                    worker process must be replaced";
    assert_eq!(end, Err(sentence.to_owned()));
    let frames = frontend.frames_to_the_end();
    let [ToFrontend::Loaded(loaded), ToFrontend::Done(first), ToFrontend::Done(second)] =
        frames.as_slice()
    else {
        panic!("{frames:?}")
    };
    assert_eq!((loaded.pinned, first.batch, &first.error), (8192, 1, &None));
    assert_eq!(
        (second.batch, message(second)),
        (2, "the GPU has failed: uncorrectable ECC error encountered")
    );
}

/// Returns the parts of two inputs of five requests, with as many bytes as `here`. The left ones
/// are in regions of two devices, in the arena, in a region that cannot be opened, and in system
/// memory; the right one is always the same.
fn mixed(here: &[u8]) -> ([Part<'_>; 5], [Part<'_>; 5]) {
    let len = here.len() as u64;
    let left = [(1, len), (2, 0), (4, 0), (3, 0)]
        .map(|(region, offset)| Part::Region(region, offset, len));
    ([left[0], Part::Arena(here), left[1], left[2], left[3]], [Part::Region(1, 0, len); 5])
}

/// Returns the offsets for the inputs of up to three batches, side by side.
fn places() -> [usize; 3] {
    [1, 2, 3].map(|block| usize::try_from(flags::BYTES).unwrap().next_multiple_of(64) * 4 * block)
}

fn three(first: f32) -> Vec<u8> {
    floats(&[first, first + 1., first + 2.])
}

/// Executes five batches of sums. Each has arrived while the previous one is executed, so its
/// inputs are copied ahead. The sixth is cancelled, and another batch uses its place, which must
/// not be mistaken for it.
fn inputs_are_copied_ahead(world: &mut World, fake: &Fake) {
    let mut next = world.pair(places()[0], &three(1.), &three(10.));
    for round in 0..5u8 {
        let this = next;
        let value = f32::from(round) * 100.;
        next = world.pair(places()[usize::from(round + 1) % 3], &three(value + 101.), &three(10.));
        world.send(&ToWorker::Execute(next.clone()));
        let (done, read) = world.run(&this);
        assert_eq!(done.error, None);
        assert_eq!(read[0].data, floats(&[value + 11., value + 13., value + 15.]));
        // The first batch's inputs, and then only those of each next one.
        assert_eq!(fake.count("upload"), 2 * (usize::from(round) + 2));
        assert_eq!(
            world.instance.runtime.session().connection.receive().unwrap(),
            Some(ToWorker::Execute(next.clone()))
        );
    }
    let other = world.pair(places()[2], &three(7.), &three(1.));
    assert_eq!(world.run(&other).1[0].data, floats(&[8., 10., 12.]));
}

#[test]
fn the_inputs_of_the_next_batch_are_copied_while_this_one_is_computed() {
    let fake = fake();
    let mut world = on(&fake, &add_sub("TYPE_FP32")).unwrap();
    inputs_are_copied_ahead(&mut world, &fake);
    let buffers = fake.buffers();
    assert!(buffers <= 8, "{buffers}");
    // Copying the next inputs ahead fails: they are copied when their batch is executed.
    let [first, second, _] = places();
    let this = world.pair(first, &three(1.), &three(1.));
    let next = world.pair(second, &three(2.), &three(2.));
    world.send(&ToWorker::Execute(next.clone()));
    fake.fail("upload", 2, Fault::Refused("not now".into()));
    assert_eq!(world.run(&this).0.error, None);
    assert_eq!(world.run(&next).1[0].data, floats(&[4., 6., 8.]));
    drop(world);
    assert_eq!((fake.buffers(), fake.handles()), (0, 0));
}
