//! ONNX files on a GPU: the real ONNX Runtime on the processor, over the memory of the fake driver.
//! The tests are skipped if no library of ONNX Runtime is configured.

use super::super::onnx::{self, Node};
use super::*;

/// Whether there is no library; prints a message then.
fn skipped() -> bool {
    let skipped = !crate::backend::has_onnxruntime();
    if skipped {
        eprintln!("skipped: ORT_DYLIB_PATH names no library of ONNX Runtime");
    }
    skipped
}

/// Tensors: names, which determine the datatype (see [`onnx::model`]), and columns.
type Tensors<'t> = [(&'t str, i64)];

struct Model {
    config: String,
    file: Vec<u8>,
}

impl Model {
    fn new(nodes: &[Node<'_>], inputs: &Tensors<'_>, outputs: &Tensors<'_>) -> Self {
        let all = |kind: &str, tensors: &Tensors<'_>| -> String {
            tensors
                .iter()
                .map(|(name, columns)| {
                    let datatype = match name.split_once('_') {
                        Some(("BOOL", _)) => "TYPE_BOOL",
                        Some(("TEXT", _)) => "TYPE_STRING",
                        Some(("FLOAT", _)) => "TYPE_FP32",
                        _ => "TYPE_INT64",
                    };
                    format!("{kind} {{ name: '{name}' data_type: {datatype} dims: [{columns}] }} ")
                })
                .collect()
        };
        let tensors = all("input", inputs) + &all("output", outputs);
        let config = format!("backend: 'onnxruntime' max_batch_size: 8 {tensors}");
        Self { config, file: onnx::model(nodes, inputs, outputs, &[]) }
    }

    fn with(mut self, more: &str) -> Self {
        self.config += more;
        self
    }

    fn on(&self, fake: &Fake) -> Result<World, InferError> {
        let cuda = Cuda::with(Box::new(fake.clone()), Some(device(0)));
        load_on(&self.config, &[("1/model.onnx", &self.file)], cuda)
    }

    fn on_processors(&self) -> World {
        load(&self.config, &[("1/model.onnx", &self.file)]).unwrap()
    }
}

const BOTH: [Node<'_>; 2] = [("Add", &["A", "B"], &["SUM"]), ("Mul", &["A", "B"], &["PRODUCT"])];

/// Sum and product with this number of columns; -1 for any number, in which case outputs are
/// copied.
fn both(columns: i64) -> Model {
    Model::new(&BOTH, &[("A", columns), ("B", columns)], &[("SUM", columns), ("PRODUCT", columns)])
}

fn inputs(shape: [i64; 2], values: [&[i64]; 2]) -> [(u16, DataType, Vec<i64>, Vec<u8>); 2] {
    [0, 1].map(|input| (input, DataType::Int64, shape.to_vec(), bytes(values[usize::from(input)])))
}

#[test]
fn results_of_the_device_equal_those_of_the_processor() {
    if skipped() {
        return;
    }
    for columns in [2, -1] {
        let fake = Fake::new(1);
        let mut dice = Dice(3);
        let mut there = both(columns).on(&fake).unwrap();
        let mut here = both(columns).on_processors();
        assert!(
            there.instance.loaded().engine.ends_with(" on CUDA")
                && !here.instance.loaded().engine.contains("CUDA")
        );
        let mut batches = 0;
        for rows in [1, 3, 8, 2] {
            for wanted in [&[][..], &[1]] {
                let columns = if columns < 0 { rows - 1 } else { columns };
                let len = usize::try_from(rows * columns).unwrap();
                let [left, right] = [0; 2].map(|_| -> Vec<i64> {
                    (0..len).map(|_| dice.below(99).cast_signed()).collect()
                });
                let given = inputs([rows, columns], [&left, &right]);
                let (done, read) =
                    there.execute(&plain(usize::try_from(rows).unwrap()), &given, wanted);
                assert_eq!(done.error, None);
                assert_eq!(
                    read,
                    here.execute(&plain(usize::try_from(rows).unwrap()), &given, wanted).1
                );
                assert!(fake.is_idle());
                batches += usize::from(len > 0);
            }
        }
        let downloads = if columns < 0 { 0 } else { batches / 2 * 3 };
        assert_eq!((fake.count("upload"), fake.count("download")), (2 * batches, downloads));
        drop(there);
        assert_eq!((fake.buffers(), fake.handles()), (0, 0));
    }
}

#[test]
fn stamps_are_the_times_that_the_device_measured() {
    if skipped() {
        return;
    }
    let mut world = both(2).on(&Fake::new(1)).unwrap();
    let (done, _) = world.execute(&plain(1), &inputs([1, 2], [&[1, 2], &[3, 4]]), &[]);
    let stamps = done.stamps;
    // The fake driver's clock: 100 ns plus 1 ns per byte, for a copy and for a run that accesses
    // four tensors of 16 bytes.
    assert!(stamps.input_end - stamps.start >= std::time::Duration::from_nanos(2 * (100 + 16)));
    assert_eq!(
        stamps.output_start - stamps.input_end,
        std::time::Duration::from_nanos(100 + 4 * 16)
    );
    assert!(stamps.end >= stamps.output_start);
}

#[test]
fn client_memory_on_the_device_is_used_in_place() {
    if skipped() {
        return;
    }
    for (by, copies) in [(0, 0), (8, 4)] {
        let fake = Fake::new(1);
        let mut world = both(2).on(&fake).unwrap();
        let mut content = vec![0; 1024];
        let left = bytes(&[3, 4]);
        let right = bytes(&[10, 20]);
        content[by..by + 16].copy_from_slice(&left);
        content[256 + by..272 + by].copy_from_slice(&right);
        let (address, handle) = fake.share(0, &content);
        world.cuda_region(1, 3, handle, 1024);
        let at = by as u64;
        let left = [Part::Region(1, at, 16)];
        let right = [Part::Region(1, 256 + at, 16)];
        let placed = [to(0, 0, 1, 512 + at, 16), to(0, 1, 1, 768 + at, 16)];
        let execute = world.frame(DataType::Int64, 2, &[&left, &right], &placed);
        let (done, _) = world.run(&execute);
        assert!(
            done.error.is_none()
                && done.failed.is_empty()
                && done.outputs.iter().all(|block| block.in_client_memory)
        );
        let seen = fake.content(address);
        assert_eq!(
            (numbers(&seen[512 + by..528 + by]), numbers(&seen[768 + by..784 + by])),
            (vec![13, 24], vec![30, 80])
        );
        // Memory without the alignment that kernels need is copied on the device.
        assert_eq!(fake.count("copy"), copies);
        for call in ["upload", "download", "read", "write", "copy_peer"] {
            assert_eq!(fake.count(call), 0, "{call}");
        }
        // An output over an input goes through a buffer.
        let execute = world.frame(DataType::Int64, 2, &[&left, &right], &[to(0, 0, 1, at, 16)]);
        assert!(world.run(&execute).0.failed.is_empty());
        assert_eq!(numbers(&fake.content(address)[by..by + 16]), [13, 24]);
    }
}

#[test]
fn a_batch_is_joined_on_the_device() {
    if skipped() {
        return;
    }
    let fake = Fake::new(2);
    let mut world = both(2).on(&fake).unwrap();
    let own = fake.share(0, &bytes(&[1, 2, 3, 4]));
    let other = fake.share(1, &bytes(&[5, 6, 0, 0]));
    let _system = world.region(3, &bytes(&[9, 10]));
    world.cuda_region(1, 3, own.1, 32);
    world.cuda_region(2, 0, other.1, 32);
    world.cuda_region(4, 3, [0xff; CUDA_HANDLE], 32);
    let here = bytes(&[11, 12]);
    let (left, right) = mixed(&here);
    let execute = world.frame(DataType::Int64, 2, &[&left, &right], &[to(2, 0, 2, 16, 16)]);
    let (done, read) = world.run(&execute);
    assert_eq!((done.error, done.failed.len(), done.failed[0].0), (None, 1, 3));
    // The third request's rows were written to client memory; the others are together here.
    assert_eq!(numbers(&read[0].data), [4, 6, 12, 14, 0, 0, 10, 12]);
    assert_eq!(numbers(&fake.content(other.0)[16..]), [6, 8]);
    assert_eq!((fake.count("upload"), fake.count("zero"), fake.count("copy_peer")), (2, 2, 2));
    assert_eq!((fake.count("read"), fake.count("write")), (0, 0));
}

#[test]
fn unsupported_tensors_go_through_the_processs_memory() {
    if skipped() {
        return;
    }
    let nodes: [Node<'_>; 3] = [
        ("Equal", &["A", "B"], &["BOOL_SAME"]),
        ("Not", &["BOOL_IN"], &["BOOL_NOT"]),
        ("Identity", &["TEXT_IN"], &["TEXT_OUT"]),
    ];
    let given = [("A", 2), ("B", 2), ("BOOL_IN", 2), ("TEXT_IN", 1)];
    let fake = Fake::new(1);
    let mut world =
        Model::new(&nodes, &given, &[("BOOL_SAME", 2), ("BOOL_NOT", 2), ("TEXT_OUT", 1)])
            .on(&fake)
            .unwrap();
    let mut given = inputs([1, 2], [&[1, 2], &[1, 3]]).to_vec();
    given.push((2, DataType::Bool, vec![1, 2], vec![7, 0]));
    given.push((3, DataType::Bytes, vec![1, 1], texts(&["so"])));
    let (done, read) = world.execute(&plain(1), &given, &[]);
    assert_eq!(done.error, None);
    let data: Vec<_> = read.iter().map(|read| (read.output, read.data.clone())).collect();
    assert_eq!(data, [(0, vec![1, 0]), (1, vec![0, 1]), (2, texts(&["so"]))]);
    assert_eq!((fake.count("upload"), fake.count("download")), (2, 2));
    // In a client's device memory: copied to the process.
    let mut world =
        Model::new(&nodes[1..2], &[("BOOL_IN", 2)], &[("BOOL_NOT", 2)]).on(&fake).unwrap();
    let (address, handle) = fake.share(0, &[0, 9, 5, 5]);
    world.cuda_region(1, 3, handle, 4);
    let execute = world.frame(DataType::Bool, 2, &[&[Part::Region(1, 0, 2)]], &[to(0, 0, 1, 2, 2)]);
    assert!(world.run(&execute).0.failed.is_empty());
    assert_eq!((fake.content(address), fake.count("read")), (vec![0, 9, 1, 0], 1));
}

#[test]
fn an_input_returned_by_the_graph_goes_through_the_processs_memory() {
    if skipped() {
        return;
    }
    let fake = Fake::new(1);
    let model = Model::new(
        &[("Add", &["A", "B"], &["SUM"])],
        &[("A", 2), ("B", 2)],
        &[("A", 2), ("SUM", 2)],
    );
    let mut world = model.on(&fake).unwrap();
    let (_, handle) = fake.share(0, &bytes(&[3, 4]));
    world.cuda_region(1, 3, handle, 16);
    let here = bytes(&[10, 20]);
    let execute =
        world.frame(DataType::Int64, 2, &[&[Part::Region(1, 0, 16)], &[Part::Arena(&here)]], &[]);
    let (done, read) = world.run(&execute);
    assert_eq!(done.error, None);
    let read: BTreeMap<u16, Vec<i64>> =
        read.iter().map(|read| (read.output, numbers(&read.data))).collect();
    assert_eq!(read, BTreeMap::from([(0, vec![3, 4]), (1, vec![13, 24])]));
    assert_eq!((fake.count("read"), fake.count("upload"), fake.count("download")), (1, 1, 1));
}

#[test]
fn after_an_undeclared_shape_the_output_is_always_copied() {
    if skipped() {
        return;
    }
    let nodes: [Node<'_>; 2] =
        [("NonZero", &["A"], &["POSITIONS"]), ("Add", &["A", "A"], &["TWICE"])];
    let fake = Fake::new(1);
    let mut world =
        Model::new(&nodes, &[("A", 2)], &[("POSITIONS", 2), ("TWICE", 2)]).on(&fake).unwrap();
    let cases: [(&[i64], &[i64], usize); 4] = [
        (&[5, 0, 0, 7], &[0, 1, 0, 1], 2),
        (&[5, 0, 6, 7], &[0, 1, 1, 0, 0, 1], 0),
        (&[5, 0, 0, 7], &[0, 1, 0, 1], 1),
        (&[5, 6, 6, 7], &[0, 0, 1, 1, 0, 1, 0, 1], 1),
    ];
    for (values, positions, downloads) in cases {
        let before = fake.count("download");
        let (done, mut read) = world.numbers(&plain(2), vec![2, 2], values);
        assert_eq!(done.error, None);
        read.sort_by_key(|read| read.output);
        assert_eq!(numbers(&read[0].data), positions);
        assert_eq!(read[0].shape, [2, i64::try_from(positions.len() / 2).unwrap()]);
        assert_eq!(
            numbers(&read[1].data),
            values.iter().map(|value| 2 * value).collect::<Vec<_>>()
        );
        assert_eq!(fake.count("download") - before, downloads);
    }
    assert!(fake.is_idle());
}

#[test]
fn a_failing_run_fails_only_its_batch() {
    if skipped() {
        return;
    }
    let nodes: [Node<'_>; 2] = [("Add", &["A", "B"], &["SUM"]), ("Add", &["C", "C"], &["TWICE"])];
    let fake = Fake::new(1);
    let model = Model::new(&nodes, &[("A", -1), ("B", -1), ("C", 2)], &[("SUM", -1), ("TWICE", 2)]);
    let mut world = model.on(&fake).unwrap();
    let mut given = [&[1, 2][..], &[3, 4, 5], &[6, 7]].map(bytes).into_iter().zip(0u16..).map(
        |(data, input)| {
            (input, DataType::Int64, vec![1, i64::try_from(data.len() / 8).unwrap()], data)
        },
    );
    let mut given: Vec<_> = given.by_ref().collect();
    let (done, read) = world.execute(&plain(1), &given, &[]);
    assert!(message(&done).starts_with("onnx runtime error: ") && read.is_empty());
    assert!(fake.is_idle() && fake.count("download") == 0);
    given[1] = (1, DataType::Int64, vec![1, 2], bytes(&[3, 4]));
    for downloads in 1..3 {
        let (done, mut read) = world.execute(&plain(1), &given, &[]);
        assert_eq!(done.error, None);
        read.sort_by_key(|read| read.output);
        assert_eq!((numbers(&read[0].data), numbers(&read[1].data)), (vec![4, 6], vec![12, 14]));
        assert_eq!(fake.count("download"), downloads);
    }
    // An input whose length does not match its shape.
    given[2].3.pop();
    assert!(
        message(&world.execute(&plain(1), &given, &[]).0)
            .contains("input 'C' has 15 bytes instead of 16")
    );
}

#[test]
fn a_failing_driver_call_fails_only_its_batch() {
    if skipped() {
        return;
    }
    let given = inputs([1, 2], [&[1, 2], &[3, 4]]);
    for call in [
        "allocate",
        "upload",
        "foreign_compute",
        "record",
        "wait",
        "wait_here",
        "elapsed",
        "download",
    ] {
        for nth in 0..3 {
            let fake = Fake::new(1);
            let mut world = both(2).on(&fake).unwrap();
            fake.fail(call, nth, Fault::Refused("not now".into()));
            let (done, _) = world.execute(&plain(1), &given, &[]);
            if done.error.is_some() {
                assert_eq!(message(&done), "the GPU has failed: not now");
            } else {
                assert!(call == "allocate" || fake.count(call) <= nth + 1, "{call} {nth}");
            }
            assert!(fake.is_idle(), "{call} {nth}");
            assert_eq!(world.instance.regions.cuda().broken(), None);
            // Run until the failing call has been made.
            (0..2).for_each(|_| drop(world.execute(&plain(1), &given, &[])));
            let (done, read) = world.execute(&plain(1), &given, &[]);
            assert_eq!((done.error, numbers(&read[0].data)), (None, vec![4, 6]));
        }
    }
    let fake = Fake::new(1);
    let mut world = both(2).on(&fake).unwrap();
    fake.fail("download", 1, Fault::Permanent("uncorrectable ECC error encountered".into()));
    let (done, _) = world.execute(&plain(1), &given, &[]);
    assert_eq!(message(&done), "the GPU has failed: uncorrectable ECC error encountered");
    assert!(world.instance.regions.cuda().broken().is_some());
    assert!(world.execute(&plain(1), &given, &[]).0.error.is_some());
    assert_eq!(fake.count("foreign_compute"), 1);
}

#[test]
fn inputs_of_the_next_batch_are_copied_ahead() {
    if skipped() {
        return;
    }
    let fake = Fake::new(1);
    let nodes: [Node<'_>; 1] = [("Add", &["FLOAT_A", "FLOAT_B"], &["FLOAT_SUM"])];
    let mut world = Model::new(&nodes, &[("FLOAT_A", 3), ("FLOAT_B", 3)], &[("FLOAT_SUM", 3)])
        .on(&fake)
        .unwrap();
    inputs_are_copied_ahead(&mut world, &fake);
    drop(world);
    assert_eq!((fake.buffers(), fake.handles()), (0, 0));
}

#[test]
fn a_model_falls_back_to_processors_only_if_configured() {
    if skipped() {
        return;
    }
    let fake = Fake::new(1);
    fake.fail("stream", 1, Fault::Refused("no more".into()));
    assert_eq!(why(both(2).on(&fake)), "the GPU cannot be used: no more");
    fake.fail("stream", 1, Fault::Refused("no more".into()));
    let allowed = "parameters { key: 'allow_cpu_fallback' value { string_value: 'true' } }";
    let mut world = both(2).with(allowed).on(&fake).unwrap();
    assert!(!world.instance.loaded().engine.contains("CUDA"));
    let calls = fake.count("record");
    let (done, read) = world.execute(&plain(1), &inputs([1, 2], [&[1, 2], &[3, 4]]), &[]);
    assert_eq!((done.error, numbers(&read[0].data)), (None, vec![4, 6]));
    assert_eq!(
        (fake.count("upload"), fake.count("download"), fake.count("record") - calls),
        (0, 0, 0)
    );
    // The fallback needs no driver.
    assert!(both(2).on(&Fake::absent()).is_err_and(|why| why.message.contains("no driver")));
    assert!(
        !both(2)
            .with(allowed)
            .on(&Fake::absent())
            .unwrap()
            .instance
            .loaded()
            .engine
            .contains("CUDA")
    );
}

#[test]
fn states_of_sequences_are_copied_to_the_device_too() {
    if skipped() {
        return;
    }
    let file = onnx::model(
        &[
            ("Mul", &["S", "three"], &["tripled"]),
            ("Add", &["tripled", "X"], &["T"]),
            ("Add", &["T", "X"], &["Y"]),
        ],
        &[("X", 2), ("S", 2)],
        &[("Y", 2), ("T", 2)],
        &[("three", 3)],
    );
    let config = format!(
        "backend: 'onnxruntime' max_batch_size: 5 {X} sequence_batching {{ state [ {{ {STATE} }} \
         ] }}"
    );
    let fake = Fake::new(1);
    let cuda = Cuda::with(Box::new(fake.clone()), Some(device(0)));
    let mut world = load_on(&config, &[("1/model.onnx", &file)], cuda).unwrap();
    interleaved(&mut world, |before, x| before * 3 + x, |after, x| after + x);
    assert!(fake.count("download") > 300);
}
