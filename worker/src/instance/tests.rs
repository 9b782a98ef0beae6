//! Runs sequences on a loaded instance in real shared memory, and compares the results with values
//! computed here.

mod client_memory;
mod gpu;
mod onnx;

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::PathBuf;

use pharos::metrics::channel::{self, Event, Reader};
use pharos::metrics::worker_metrics::WorkerMetrics;
use pharos::model::{Completion, Draft};
use pharos::shm::{self, SharedMemory};
use pharos::tensor::{DataType, push_bytes_element};
use pharos::wire::{BatchRequest, InputBlock, SequenceStep, ToFrontend, ToWorker, flags};
use rustix::pipe::{PipeFlags, pipe_with};

use super::test_connection::{FrontendEnd, connection};
use super::*;
use crate::descriptors::SharedDescriptors;
use crate::device::Cuda;

const ARENA: u64 = 1 << 20;

/// A directory that is removed when this value is dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Creates a model directory with these files.
fn folder(files: &[(&str, &[u8])]) -> Folder {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name =
        format!("pharos-states-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let folder = Folder(std::env::temp_dir().join(name));
    for (name, content) in files {
        let path = folder.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    folder
}

/// An instance, and the frontend's side of its memory.
struct World {
    instance: Instance,
    inputs: SharedMemory,
    outputs: SharedMemory,
    reader: Reader,
    /// The offset at which the frontend puts the next input.
    next: u64,
    batches: u64,
    unread: Vec<u64>,
    /// The frontend's end of the socket of regions.
    regions: std::os::fd::OwnedFd,
    /// The frontend's end of the connection.
    frontend: FrontendEnd,
    _folder: Folder,
}

fn load(config: &str, files: &[(&str, &[u8])]) -> Result<World, InferError> {
    load_on(config, files, Cuda::new(None))
}

/// The values that a worker receives and inherits, and the frontend's side of them.
struct Parts {
    load: Load,
    descriptors: SharedDescriptors,
    inputs: SharedMemory,
    outputs: SharedMemory,
    reader: Reader,
    regions: std::os::fd::OwnedFd,
    folder: Folder,
}

fn load_on(config: &str, files: &[(&str, &[u8])], cuda: Arc<Cuda>) -> Result<World, InferError> {
    load_with(config, files, cuda, &backends())
}

fn load_with(
    config: &str,
    files: &[(&str, &[u8])],
    cuda: Arc<Cuda>,
    backends: &Registry,
) -> Result<World, InferError> {
    let Parts { load, descriptors, inputs, outputs, reader, regions, folder } =
        parts(config, files, &cuda);
    let (worker_reader, sender, frontend) = connection();
    let (runtime, regions_of_worker) =
        crate::open(&load, worker_reader, sender, descriptors, cuda)?;
    let instance = Instance::load(&load, runtime, regions_of_worker, backends)?;
    Ok(World {
        instance,
        inputs,
        outputs,
        reader,
        next: 0,
        batches: 0,
        unread: Vec::new(),
        regions,
        frontend,
        _folder: folder,
    })
}

fn parts(config: &str, files: &[(&str, &[u8])], cuda: &Cuda) -> Parts {
    let folder = folder(files);
    let completion = Completion { directory: "m", ..Completion::default() };
    let config = Draft::from_text(config, "config.pbtxt").unwrap().complete(&completion).unwrap();
    let (ring, reader) = channel::create(0).unwrap();
    let (_, wakeup) = pipe_with(PipeFlags::NONBLOCK).unwrap();
    let inputs = shm::create("inputs", ARENA).unwrap();
    let outputs = shm::create("outputs", ARENA).unwrap();
    let map = |memory| SharedMemory::map(memory, usize::try_from(ARENA).unwrap()).unwrap();
    let our_inputs = map(&inputs);
    let our_outputs = map(&outputs);
    let load = Load {
        wire_version: pharos::wire::VERSION,
        model: "m".into(),
        version: 1,
        instance: "m_0_0".into(),
        directory: folder.0.join("1").to_string_lossy().into_owned(),
        model_directory: String::new(),
        backend_settings: Vec::new(),
        verbose: false,
        config: config.encode(),
        initial_states: folder.0.join("initial_state").to_string_lossy().into_owned(),
        threads: 1,
        spin_us: 0,
        metrics: WorkerMetrics::of(&pharos::metrics::catalog::Catalog::shipped()).encode(),
        auto_detect: false,
        device: cuda.device().cloned(),
    };
    let (announcements, regions) = client_memory::socket();
    let descriptors = SharedDescriptors { inputs, outputs, metrics: ring, wakeup, regions };
    Parts {
        load,
        descriptors,
        inputs: our_inputs,
        outputs: our_outputs,
        reader,
        regions: announcements,
        folder,
    }
}

fn step(key: u64, start: bool, end: bool) -> BatchRequest {
    let sequence = Some(SequenceStep { key, start, end });
    BatchRequest { rows: 1, sequence, ..BatchRequest::default() }
}

fn padding() -> BatchRequest {
    BatchRequest { rows: 1, ..BatchRequest::default() }
}

/// An output as the frontend reads it.
#[derive(Debug, PartialEq)]
struct Read {
    output: u16,
    requests: Vec<u32>,
    shape: Vec<i64>,
    data: Vec<u8>,
}

impl World {
    /// Executes a batch; `inputs` are (position, datatype, shape, bytes).
    fn execute(
        &mut self,
        requests: &[BatchRequest],
        inputs: &[(u16, DataType, Vec<i64>, Vec<u8>)],
        outputs: &[u16],
    ) -> (Done, Vec<Read>) {
        self.next = flags::BYTES.next_multiple_of(64);
        let blocks = inputs.iter().map(|(input, datatype, shape, data)| {
            let offset = self.next;
            let len = data.len() as u64;
            assert!(self.inputs.copy_in(usize::try_from(offset).unwrap(), data));
            self.next = (offset + len).next_multiple_of(64);
            InputBlock {
                input: *input,
                datatype: *datatype,
                shape: shape.clone(),
                offset,
                len,
                pieces: Vec::new(),
            }
        });
        let inputs = blocks.collect();
        self.batches += 1;
        let requests = requests.to_vec();
        let outputs = outputs.to_vec();
        let released = std::mem::take(&mut self.unread);
        let execute = Execute {
            batch: self.batches,
            requests,
            inputs,
            outputs,
            released,
            flags: 0,
            placements: Vec::new(),
            elements: Vec::new(),
            resumed: Vec::new(),
        };
        self.run(&execute)
    }

    /// Executes a frame, and reads its outputs from the arena.
    fn run(&mut self, execute: &Execute) -> (Done, Vec<Read>) {
        let Executed { done, panicked, kept } = self.instance.execute(execute);
        drop(kept);
        assert!(!panicked);
        let in_arena = || done.outputs.iter().filter(|block| !block.in_client_memory);
        let read = in_arena()
            .map(|block| {
                let mut data = vec![0; usize::try_from(block.len).unwrap()];
                assert!(self.outputs.copy_out(usize::try_from(block.offset).unwrap(), &mut data));
                Read {
                    output: block.output,
                    requests: block.requests.clone(),
                    shape: block.shape.clone(),
                    data,
                }
            })
            .collect();
        self.unread = in_arena().map(|block| block.offset).collect();
        (done, read)
    }

    /// Executes a batch with one INT64 input, one row for each request, and asks for all outputs.
    fn numbers(
        &mut self,
        requests: &[BatchRequest],
        shape: Vec<i64>,
        values: &[i64],
    ) -> (Done, Vec<Read>) {
        self.execute(requests, &[(0, DataType::Int64, shape, bytes(values))], &[])
    }

    fn state_bytes(&self) -> u64 {
        self.instance.states.as_ref().unwrap().bytes()
    }

    /// Returns the values of the gauge of the states' size since the last call.
    fn gauge(&mut self) -> Vec<f64> {
        let mut definitions = Vec::new();
        let mut values = Vec::new();
        self.reader
            .drain(|event| match event {
                Event::Series(definition) => definitions.push(definition),
                Event::Metric(_) => {}
                Event::Sample(sample) => values.push((sample.series as usize, sample.value)),
            })
            .unwrap();
        values
            .iter()
            .filter_map(|(series, value)| {
                let definition = &definitions[*series];
                let labels: Vec<_> = definition
                    .labels
                    .iter()
                    .map(|(name, value)| format!("{name}={value}"))
                    .collect();
                (definition.name == pharos::metrics::catalog::STATE_BYTES).then(|| {
                    assert_eq!(labels, ["model=m", "version=1", "instance=m_0_0"]);
                    *value
                })
            })
            .collect()
    }
}

fn bytes(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn numbers(data: &[u8]) -> Vec<i64> {
    data.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
}

fn texts(values: &[&str]) -> Vec<u8> {
    let mut data = Vec::new();
    values.iter().for_each(|text| assert!(push_bytes_element(&mut data, text.as_bytes())));
    data
}

/// Numbers that look random but are reproducible (Knuth's multiplier).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

const X: &str = "input { name: 'X' data_type: TYPE_INT64 dims: [2] } output { name: 'Y' \
                 data_type: TYPE_INT64 dims: [2] }";
const STATE: &str = "input_name: 'S' output_name: 'T' data_type: TYPE_INT64 dims: [2]";

fn builtin(function: &str, rest: &str) -> String {
    format!(
        "backend: 'builtin' parameters {{ key: 'function' value {{ string_value: '{function}' }} \
         }} {rest}"
    )
}

/// Returns the configuration of a function of the tests' backend.
fn test(function: &str, rest: &str) -> String {
    format!(
        "backend: 'test' parameters {{ key: 'function' value {{ string_value: '{function}' }} }} \
         {rest}"
    )
}

/// The backends of this crate and the tests' backend.
pub(super) fn backends() -> Registry {
    let mut backends = Registry::default();
    backends.add("test", pharos_test_backends::create);
    backends
}

/// The engines for ONNX files; ONNX Runtime only if its library is configured.
fn engines() -> Vec<&'static str> {
    match crate::backend::has_onnxruntime() {
        true => vec!["onnxruntime"],
        false => {
            eprintln!("ORT_DYLIB_PATH names no library of ONNX Runtime: its part is skipped");
            Vec::new()
        }
    }
}

/// Random sequences begin, continue and end in random batches with padding between them; each row
/// must be the value that its sequence alone would have produced.
fn interleaved(world: &mut World, next: impl Fn(i64, i64) -> i64, given: impl Fn(i64, i64) -> i64) {
    let mut dice = Dice(7);
    let mut open: BTreeMap<u64, [i64; 2]> = BTreeMap::new();
    let mut keys = 1..;
    for _ in 0..300 {
        let mut free: Vec<u64> = open.keys().copied().collect();
        let mut requests = Vec::new();
        let mut values = Vec::new();
        let mut expected = Vec::new();
        for _ in 0..=dice.below(4) {
            let x = [
                i64::try_from(dice.below(100)).unwrap() - 50,
                i64::try_from(dice.below(9)).unwrap(),
            ];
            values.extend(x);
            let (key, start) = match dice.below(4) {
                0 => {
                    requests.push(padding());
                    expected.push(None);
                    continue;
                }
                1..=2 if !free.is_empty() => {
                    (free.remove(usize::try_from(dice.below(free.len() as u64)).unwrap()), false)
                }
                _ => (keys.next().unwrap(), true),
            };
            let end = dice.below(5) == 0;
            let before = if start { [0, 0] } else { open[&key] };
            let after = [next(before[0], x[0]), next(before[1], x[1])];
            expected.push(Some([given(after[0], x[0]), given(after[1], x[1])]));
            open.insert(key, after);
            if end {
                open.remove(&key);
            }
            requests.push(step(key, start, end));
        }
        let rows = i64::try_from(requests.len()).unwrap();
        let (done, read) = world.numbers(&requests, vec![rows, 2], &values);
        assert_eq!(done.error, None);
        let [read] = read.as_slice() else { panic!("expected only the output Y: {read:?}") };
        let rows: Vec<[i64; 2]> = numbers(&read.data).as_chunks().0.to_vec();
        for (row, expected) in rows.iter().zip(expected) {
            assert!(
                expected.is_none_or(|expected| expected == *row),
                "{row:?} instead of {expected:?}"
            );
        }
    }
    assert!(open.len() > 1 && world.state_bytes() > 0);
    let left: Vec<u64> = open.keys().copied().collect();
    world.instance.sequences_ended(&left);
    assert_eq!(world.state_bytes(), 0);
}

#[test]
fn interleaved_sequences_do_not_mix_in_the_builtin_backend() {
    let config = test(
        "accumulate",
        &format!("max_batch_size: 5 {X} sequence_batching {{ state [ {{ {STATE} }} ] }}"),
    );
    interleaved(&mut load(&config, &[]).unwrap(), i64::wrapping_add, |after, _| after);
}

#[test]
fn interleaved_sequences_do_not_mix_in_onnx_models() {
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
    for engine in engines() {
        let config = format!(
            "backend: '{engine}' max_batch_size: 5 {X} sequence_batching {{ state [ {{ {STATE} }} \
             ] }}"
        );
        let mut world = load(&config, &[("1/model.onnx", &file)]).unwrap();
        interleaved(&mut world, |before, x| before * 3 + x, |after, x| after + x);
    }
}

/// Steps of sequences that grow at different rates: parts of a batch with equal shapes are executed
/// together.
fn growing(world: &mut World) {
    let mut dice = Dice(11);
    let mut open: BTreeMap<u64, Vec<i64>> = BTreeMap::new();
    let mut in_parts = 0;
    for round in 0..200i64 {
        let keys: Vec<u64> = (0..4).filter(|_| dice.below(2) == 0).collect();
        let requests: Vec<_> = keys
            .iter()
            .map(|key| step(*key, !open.contains_key(key), dice.below(8) == 0))
            .collect();
        if requests.is_empty() {
            continue;
        }
        let values: Vec<i64> =
            (0..i64::try_from(keys.len()).unwrap()).map(|row| round * 10 + row).collect();
        for (key, value) in keys.iter().zip(&values) {
            open.entry(*key).or_insert_with(|| vec![0]).push(*value);
        }
        let (done, read) =
            world.numbers(&requests, vec![i64::try_from(keys.len()).unwrap(), 1], &values);
        assert_eq!((done.error, done.failed), (None, Vec::new()));
        let mut answered = 0;
        for part in &read {
            let positions = if part.requests.is_empty() {
                (0u32..).take(keys.len()).collect()
            } else {
                part.requests.clone()
            };
            in_parts += usize::from(!part.requests.is_empty());
            let row = usize::try_from(part.shape[1]).unwrap();
            for (position, row) in positions.iter().zip(numbers(&part.data).chunks(row)) {
                assert_eq!(row, open[&keys[*position as usize]], "{part:?}");
                answered += 1;
            }
        }
        assert_eq!(answered, keys.len());
        let ended = requests.iter().zip(&keys).filter(|(request, _)| request.sequence.unwrap().end);
        ended.for_each(|(_, key)| drop(open.remove(key)));
    }
    assert!(in_parts > 20, "only {in_parts} outputs were for parts of batches");
    world.instance.sequences_ended(&[0, 1, 2, 3]);
    assert_eq!(world.state_bytes(), 0);
}

const GROWS: &str = "max_batch_size: 4 input { name: 'X' data_type: TYPE_INT64 dims: [1] } output \
                     { name: 'Y' data_type: TYPE_INT64 dims: [-1] } sequence_batching { state [ { \
                     input_name: 'S' output_name: 'T' data_type: TYPE_INT64 dims: [-1] } ] }";

#[test]
fn states_of_different_shapes_are_executed_separately() {
    growing(&mut load(&test("append", GROWS), &[]).unwrap());
    let file = onnx::model(
        &[("Concat", &["S", "X"], &["T"]), ("Identity", &["T"], &["Y"])],
        &[("X", 1), ("S", -1)],
        &[("Y", -1), ("T", -1)],
        &[],
    );
    for engine in engines() {
        growing(
            &mut load(&format!("backend: '{engine}' {GROWS}"), &[("1/model.onnx", &file)]).unwrap(),
        );
    }
}

#[test]
fn strings_are_kept_and_padding_is_empty() {
    let rest = "max_batch_size: 4 input { name: 'X' data_type: TYPE_STRING dims: [1] } output { \
                name: 'T' data_type: TYPE_STRING dims: [-1] } sequence_batching { state [ { \
                input_name: 'S' output_name: 'T' data_type: TYPE_STRING dims: [-1] } ] }";
    let mut world = load(&test("append", rest), &[]).unwrap();
    let mut say = |requests: &[BatchRequest], values: &[&str]| {
        let shape = vec![i64::try_from(requests.len()).unwrap(), 1];
        world.execute(requests, &[(0, DataType::Bytes, shape, texts(values))], &[]).1
    };
    say(&[step(1, true, false), step(2, true, false)], &["a", "bcd"]);
    let read = say(
        &[step(2, false, false), padding(), step(3, true, false), step(1, false, true)],
        &["e", "f", "g", "h"],
    );
    let part = |requests: &[u32], shape: &[i64], values: &[&str]| Read {
        output: 0,
        requests: requests.to_vec(),
        shape: shape.to_vec(),
        data: texts(values),
    };
    let first = part(&[0, 1, 3], &[3, 3], &["", "bcd", "e", "", "", "f", "", "a", "h"]);
    assert_eq!(read, [first, part(&[2], &[1, 2], &["", "g"])]);
}

#[test]
fn first_values_are_those_of_the_configuration() {
    let states = "state [ { input_name: 'FILE' output_name: 'F' data_type: TYPE_INT64 dims: [-1] \
                  initial_state { name: 'f' data_type: TYPE_INT64 dims: [2] data_file: \
                  'below/two' } }, { input_name: 'ZERO' output_name: 'Z' data_type: TYPE_INT64 \
                  dims: [1, 2] initial_state { name: 'z' data_type: TYPE_INT64 dims: [1, 2] \
                  zero_data: true } }, { input_name: 'NONE' output_name: 'N' data_type: \
                  TYPE_INT64 dims: [-1, 3] } ]";
    let output = |name: &str, dims: &str| {
        format!("output {{ name: '{name}' data_type: TYPE_INT64 dims: [{dims}] }}")
    };
    let outputs = ["Y", "A", "B", "C"].map(|name| output(name, "-1, -1")).concat();
    let rest = format!(
        "input {{ name: 'X' data_type: TYPE_INT64 dims: [1] }} {outputs} sequence_batching {{ \
         {states} }}"
    );
    // Identity shows the inputs and returns no state: the first value remains. The file is longer
    // than necessary.
    let file = bytes(&[4, -5, 6]);
    let mut world =
        load(&builtin("identity", &rest), &[("initial_state/below/two", &file)]).unwrap();
    for start in [true, false] {
        let (done, read) = world.numbers(&[step(1, start, false)], vec![1], &[9]);
        assert_eq!(done.error, None);
        let values: Vec<_> =
            read.iter().map(|read| (read.shape.clone(), numbers(&read.data))).collect();
        let expected = [
            (vec![1], vec![9]),
            (vec![2], vec![4, -5]),
            (vec![1, 2], vec![0, 0]),
            (vec![1, 3], vec![0, 0, 0]),
        ];
        assert_eq!(values, expected, "start: {start}");
    }
    // A warm-up is not a sequence and sees the same values.
    assert_eq!(numbers(&world.numbers(&[padding()], vec![1], &[9]).1[1].data), [4, -5]);
    let refused = load(&builtin("identity", &rest), &[("initial_state/below/two", &file[..15])])
        .err()
        .unwrap();
    let text = "initial_state setting expects 16 bytes, but the data provided from below/two only \
                has 15 bytes.";
    assert_eq!(refused.message, text);
    let refused = load(&builtin("identity", &rest), &[]).err().unwrap();
    assert!(refused.message.contains("below/two' cannot be read"), "{}", refused.message);
}

#[test]
fn a_state_among_the_outputs_is_returned_on_request() {
    let rest = "max_batch_size: 4 input { name: 'X' data_type: TYPE_INT64 dims: [1] } output [ { \
                name: 'Y' data_type: TYPE_INT64 dims: [1] }, { name: 'T' data_type: TYPE_INT64 \
                dims: [1] } ] sequence_batching { state [ { input_name: 'S' output_name: 'T' \
                data_type: TYPE_INT64 dims: [1] } ] }";
    let mut world = load(&test("accumulate", rest), &[]).unwrap();
    let mut sum = 0;
    for (outputs, expected) in
        [(vec![], vec![0, 1]), (vec![0], vec![0]), (vec![1], vec![1]), (vec![0, 1], vec![0, 1])]
    {
        sum += 5;
        let request = step(1, sum == 5, false);
        let (_, read) =
            world.execute(&[request], &[(0, DataType::Int64, vec![1, 1], bytes(&[5]))], &outputs);
        let mut given: Vec<u16> = read.iter().map(|read| read.output).collect();
        given.sort_unstable();
        assert_eq!(given, expected);
        assert!(read.iter().all(|read| numbers(&read.data) == [sum]));
    }
}

#[test]
fn errors_leave_the_states_unchanged() {
    let rest = "max_batch_size: 4 input { name: 'X' data_type: TYPE_INT64 dims: [-1] } output { \
                name: 'Y' data_type: TYPE_INT64 dims: [-1] } sequence_batching { state [ { \
                input_name: 'S' output_name: 'T' data_type: TYPE_INT64 dims: [1] } ] }";
    let mut world = load(&test("accumulate", rest), &[]).unwrap();
    assert_eq!(numbers(&world.numbers(&[step(1, true, false)], vec![1, 1], &[5]).1[0].data), [5]);
    // The shapes differ: the backend refuses the batch.
    let (done, read) = world.numbers(&[step(1, false, false)], vec![1, 2], &[5, 5]);
    assert!(done.error.is_some() && read.is_empty());
    assert_eq!(numbers(&world.numbers(&[step(1, false, false)], vec![1, 1], &[2]).1[0].data), [7]);
    // A request of an unknown sequence fails alone, and does not create the sequence.
    let (done, read) =
        world.numbers(&[step(8, false, false), step(1, false, true)], vec![2, 1], &[3, 3]);
    assert_eq!(numbers(&read[0].data)[1], 10);
    let failed: Vec<_> =
        done.failed.iter().map(|(position, error)| (*position, error.message.as_str())).collect();
    assert_eq!(failed, [(0, "the state of the sequence was lost; start the sequence again")]);
    assert_eq!(world.state_bytes(), 0, "the last step was an END");
    assert_eq!(world.numbers(&[step(1, false, false)], vec![1, 1], &[1]).0.failed.len(), 1);
    // A value that does not fit the configuration is not stored.
    let mut world = load(&test("append", rest), &[]).unwrap();
    let (done, _) = world.numbers(&[step(1, true, false)], vec![1, 1], &[5]);
    let expected = "state output 'T' of model 'm' has shape [2], but its configured shape is [1]";
    assert_eq!(done.error.unwrap().message, expected);
}

#[test]
fn a_step_is_executed_even_if_it_is_cancelled() {
    let config = test(
        "accumulate",
        &format!("max_batch_size: 5 {X} sequence_batching {{ state [ {{ {STATE} }} ] }}"),
    );
    let mut world = load(&config, &[]).unwrap();
    world.numbers(&[step(1, true, false)], vec![1, 2], &[1, 2]);
    let (word, bit) = flags::bit(0, 0).unwrap();
    world.inputs.words()[word].store(bit, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(world.numbers(&[step(1, false, false)], vec![1, 2], &[10, 20]).0.error, None);
    // A request that is no step of a sequence is not executed.
    let done = world.numbers(&[padding()], vec![1, 2], &[0, 0]).0;
    assert_eq!(done.error.map(InferError::from), Some(InferError::cancelled()));
    world.inputs.words()[word].store(0, std::sync::atomic::Ordering::Relaxed);
    let (_, read) = world.numbers(&[step(1, false, false)], vec![1, 2], &[0, 0]);
    assert_eq!(numbers(&read[0].data), [11, 22]);
}

#[test]
fn the_gauge_reports_the_memory_of_the_states() {
    let rest = "max_batch_size: 4 input { name: 'X' data_type: TYPE_INT64 dims: [1000] } output { \
                name: 'Y' data_type: TYPE_INT64 dims: [1000] } sequence_batching { state [ { \
                input_name: 'S' output_name: 'T' data_type: TYPE_INT64 dims: [1000] \
                use_same_buffer_for_input_output: true } ] }";
    let mut world = load(&test("accumulate", rest), &[]).unwrap();
    let ones = vec![1; 2000];
    world.numbers(&[step(1, true, false), step(2, true, false)], vec![2, 1000], &ones);
    world.numbers(&[step(1, false, false), step(2, false, false)], vec![2, 1000], &ones);
    world.numbers(&[step(2, false, true)], vec![1, 1000], &ones[..1000]);
    // The same key starts again without an end: its old state is dropped.
    world.numbers(&[step(1, true, false)], vec![1, 1000], &ones[..1000]);
    world.instance.sequences_ended(&[1, 77]);
    let values = world.gauge();
    let [zero, two, one, none] = values.as_slice() else { panic!("{values:?}") };
    assert!((*zero, *none) == (0.0, 0.0) && *two == 2.0 * one, "{values:?}");
    assert!((8000.0..8200.0).contains(one), "{one}");
}

#[test]
fn each_percentage_of_a_load_is_sent_once() {
    let World { instance, mut frontend, .. } = load(&builtin("identity", IO), &[]).unwrap();
    let report = |fraction| instance.runtime.report_load_progress(fraction);
    for wrong in [-0.01, 1.01, f64::NAN, f64::INFINITY] {
        let error = report(wrong).unwrap_err().message;
        let expected = "expected a number from 0 to 1";
        assert!(error.contains(&format!("is {wrong}; {expected}")), "{error}");
    }
    for fraction in [0.0, 0.001, 0.29, 0.29, 0.1, 0.2949, 1.0, 1.0] {
        report(fraction).unwrap();
    }
    drop(instance);
    let expected = [0, 29, 100].map(ToFrontend::LoadProgress);
    assert_eq!(frontend.frames_to_the_end(), expected);
}

#[test]
fn a_process_without_a_thread_that_watches_the_frontend_tells_why_it_loads_nothing() {
    let Parts { load, descriptors, folder: _folder, .. } =
        parts(&builtin("identity", IO), &[], &Cuda::new(None));
    let (reader, sender, mut frontend) = connection();
    let mut bytes = Vec::new();
    ToWorker::Load(load).encode(&mut bytes);
    frontend.write_all(&bytes).unwrap();
    let watched = Err(io::Error::from(io::ErrorKind::WouldBlock));
    crate::load_and_run(reader, sender, descriptors, &Registry::default(), |load| {
        crate::cuda_if_watched(watched, load)
    })
    .unwrap();
    let frames = frontend.frames_to_the_end();
    let [ToFrontend::LoadFailed(reason)] = frames.as_slice() else { panic!("{frames:?}") };
    assert!(
        reason.contains("the worker cannot watch the frontend: operation would block"),
        "{reason}"
    );
}

const IO: &str = "input { name: 'X' data_type: TYPE_FP32 dims: [1] } output { name: 'Y' \
                  data_type: TYPE_FP32 dims: [1] }";
