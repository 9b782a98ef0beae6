//! A compiled backend of Triton on a GPU: `device.c` of the tests with real clients, over the memory
//! of the fake driver.

use std::process::Command;
use std::sync::OnceLock;

use pharos::infer::Parameter;
use pharos_backend::Context;

use super::*;

const FILE: &str = "libtriton_device.so";

/// Returns the compiled library.
fn library() -> &'static [u8] {
    static BUILT: OnceLock<Vec<u8>> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = folder(&[("built/by", b"cc")]);
        let built = folder.0.join(FILE);
        let source =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/python/backends/triton/device.c");
        let status =
            Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&built).arg(source).status();
        assert!(status.unwrap().success(), "cannot build the library: is a C compiler installed?");
        std::fs::read(built).unwrap()
    })
}

fn create(context: &Context<'_>) -> Result<Box<dyn Backend>, InferError> {
    pharos_triton::create(context, &context.directory.join(FILE))
}

/// Loads a model with two inputs and two outputs on the device, with a share of pinned memory.
fn world(fake: &Fake) -> World {
    let tensors = ["INPUT", "OUTPUT"].map(|kind| {
        let of = |number| format!("{{ name: '{kind}{number}' data_type: TYPE_FP32 dims: [-1] }}");
        format!("{} [ {}, {} ]", kind.to_lowercase(), of(0), of(1))
    });
    let config = format!("backend: 'device' max_batch_size: 8 {}", tensors.join(" "));
    let mut backends = backends();
    backends.add("device", create);
    let path = format!("1/{FILE}");
    let cuda = Cuda::with(Box::new(fake.clone()), Some(device(1 << 20)));
    load_with(&config, &[(&path, library())], cuda, &backends).unwrap()
}

/// Returns the text parameters of the response to a request.
fn said(done: &Done, request: u32) -> Vec<(&str, &str)> {
    let found = done.parameters.iter().find(|(position, _)| *position == request).unwrap();
    let texts = found.1.iter().filter_map(|(name, value)| match value {
        Parameter::String(text) => Some((name.as_str(), text.as_str())),
        _ => None,
    });
    texts.collect()
}

#[test]
fn inputs_and_outputs_stay_on_the_device() {
    let fake = fake();
    let mut world = world(&fake);
    let content = [floats(&[1., 2., 0., 0., 3., 4.]), vec![0; 40]].concat();
    let (address, handle) = fake.share(0, &content);
    world.cuda_region(1, 3, handle, 64);
    let first = [Part::Region(1, 0, 8)];
    let second = [Part::Region(1, 16, 8)];
    let placed = [to(0, 0, 1, 32, 8), to(0, 1, 1, 48, 8)];
    let execute = world.frame(DataType::Fp32, 2, &[&first, &second], &placed);
    let (done, read) = world.run(&execute);
    assert_eq!((&done.error, &done.failed, read.len()), (&None, &Vec::new(), 0));
    let on_gpu = "input 2, properties 2, output 2";
    assert_eq!(said(&done, 0), [("INPUT0", on_gpu), ("INPUT1", on_gpu), ("report", "ok")]);
    let shared = Parameter::Int(i64::from_le_bytes(handle[..8].try_into().unwrap()));
    assert!(done.parameters[0].1.contains(&("handle".to_owned(), shared)));
    let seen = fake.content(address);
    assert_eq!((&seen[32..40], &seen[48..56]), (&*floats(&[1., 2.]), &*floats(&[3., 4.])));
    // No byte was copied by the driver.
    for call in ["upload", "download", "read", "write", "copy", "copy_peer", "allocate"] {
        assert_eq!(fake.count(call), 0, "{call}");
    }
}

#[test]
fn each_request_of_a_batch_has_its_memory() {
    let fake = fake();
    let mut world = world(&fake);
    let (address, handle) = fake.share(0, &[floats(&[1., 2.]), vec![0; 16]].concat());
    world.cuda_region(1, 3, handle, 24);
    let here = floats(&[5., 6.]);
    let inputs = [Part::Region(1, 0, 8), Part::Arena(&here)];
    let others = [Part::Arena(&here), Part::Arena(&here)];
    // The second request has its first output on the device; the first request has none there.
    let placed = [to(1, 0, 1, 16, 8)];
    let execute = world.frame(DataType::Fp32, 2, &[&inputs, &others], &placed);
    let (done, read) = world.run(&execute);
    assert_eq!((&done.error, &done.failed), (&None, &Vec::new()));
    let first = [
        ("INPUT0", "input 2, properties 0, output 0"),
        ("INPUT1", "input 0, properties 0, output 0"),
        ("report", "ok"),
    ];
    assert_eq!(said(&done, 0), first);
    assert_eq!(said(&done, 1)[0], ("INPUT0", "input 0, properties 2, output 2"));
    assert_eq!(fake.content(address)[16..], floats(&[5., 6.]));
    let of_first = read.iter().find(|block| block.output == 0).unwrap();
    assert_eq!((&of_first.requests, &of_first.data), (&vec![0], &floats(&[1., 2.])));
}

#[test]
fn outputs_that_another_memory_holds_are_copied_there() {
    let fake = fake();
    let mut world = world(&fake);
    let (address, handle) = fake.share(0, &[floats(&[1., 2.]), vec![0; 8]].concat());
    world.cuda_region(1, 3, handle, 16);
    let first = [Part::Region(1, 0, 8)];
    // The output replaces its input, which the other output may still be computed from.
    let execute = world.frame(DataType::Fp32, 2, &[&first, &first], &[to(0, 0, 1, 0, 8)]);
    let (done, _) = world.run(&execute);
    assert_eq!((&done.error, &done.failed), (&None, &Vec::new()));
    assert_eq!(said(&done, 0)[0], ("INPUT0", "input 2, properties 0, output 0"));
    assert_eq!(fake.content(address)[..8], floats(&[1., 2.]));
    // Too little room: the client's memory is not used, and the answer is an error.
    let execute = world.frame(DataType::Fp32, 2, &[&first, &first], &[to(0, 0, 1, 8, 4)]);
    let (done, _) = world.run(&execute);
    assert!(done.failed[0].1.message.contains("(4 bytes) should be at least 8 bytes"));
}

#[test]
fn memory_that_is_not_aligned_is_copied() {
    let fake = fake();
    let mut world = world(&fake);
    let (address, handle) = fake.share(0, &[vec![0; 8], floats(&[1., 2.]), vec![0; 8]].concat());
    world.cuda_region(1, 3, handle, 24);
    let first = [Part::Region(1, 8, 8)];
    let here = floats(&[5., 6.]);
    let second = [Part::Arena(&here)];
    // The first output goes to aligned memory, the second one beside it.
    let placed = [to(0, 0, 1, 16, 8), to(0, 1, 1, 0, 8)];
    let execute = world.frame(DataType::Fp32, 2, &[&first, &second], &placed);
    let (done, _) = world.run(&execute);
    assert_eq!((&done.error, &done.failed), (&None, &Vec::new()));
    assert_eq!(said(&done, 0)[0], ("INPUT0", "input 0, properties 2, output 2"));
    assert_eq!(
        fake.content(address),
        [floats(&[5., 6.]), floats(&[1., 2.]), floats(&[1., 2.])].concat()
    );
    let placed = [to(0, 0, 1, 8, 8)];
    let execute = world.frame(DataType::Fp32, 2, &[&second, &second], &placed);
    let (done, _) = world.run(&execute);
    assert_eq!(said(&done, 0)[0], ("INPUT0", "input 0, properties 0, output 0"));
    assert_eq!(fake.content(address)[8..16], here);
}

#[test]
fn a_backend_allocates_memory_of_the_gpu_and_pinned_memory() {
    for kind in ["gpu", "pinned"] {
        let fake = fake();
        let mut world = world(&fake);
        let here = floats(&[5., 6.]);
        let inputs = [Part::Arena(&here)];
        let mut execute = world.frame(DataType::Fp32, 2, &[&inputs, &inputs], &[]);
        execute.requests[0].parameters = vec![("scratch".into(), Parameter::String(kind.into()))];
        let (done, read) = world.run(&execute);
        assert_eq!((&done.error, &done.failed), (&None, &Vec::new()));
        assert_eq!(said(&done, 0).last(), Some(&("report", "ok")));
        assert_eq!(read.iter().map(|block| &block.data).collect::<Vec<_>>(), [&here, &here]);
        let calls = ("allocate", "register");
        let expected = if kind == "gpu" { (1, 0) } else { (0, 1) };
        assert_eq!((fake.count(calls.0), fake.count(calls.1)), expected);
        // The block stays for the next batch.
        assert_eq!((fake.buffers(), fake.registered().len()), expected);
    }
}
