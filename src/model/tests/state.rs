//! Implicit states: their configuration, and the tensors that the model file must have.

use super::super::*;
use crate::tensor::DataType;

const STATE: &str = "input_name: 'S' output_name: 'T' data_type: TYPE_FP32 dims: [2, -1]";

/// Completes a model with these states, the input X, the output Y, and further settings.
fn with(states: &str, rest: &str) -> Result<ModelConfig, String> {
    let source = format!(
        "backend: 'builtin' input [ {{ name: 'X' data_type: TYPE_FP32 dims: [1] }} ] output [ {{ \
         name: 'Y' data_type: TYPE_FP32 dims: [1] }} ] sequence_batching {{ {states} }} {rest}"
    );
    let completion = Completion { directory: "m", ..Completion::default() };
    let draft = Draft::from_text(&source, "config.pbtxt").map_err(|error| error.to_string())?;
    draft.complete(&completion).map_err(|error| error.to_string())
}

fn initial(fields: &str) -> String {
    format!("state [ {{ {STATE} initial_state {{ {fields} }} }} ]")
}

#[test]
fn states_follow_all_other_inputs_and_outputs() {
    let states = format!(
        "state [ {{ {STATE} }}, {{ input_name: 'A' output_name: 'Y' data_type: TYPE_FP32 dims: \
         [1] }}, {{ input_name: 'B' output_name: 'C' data_type: TYPE_STRING dims: [3] \
         use_same_buffer_for_input_output: true use_growable_memory: true }} ]"
    );
    let config = with(&states, "").unwrap();
    let inputs: Vec<_> =
        (0..config.backend_inputs()).map(|at| config.input_name(at).unwrap()).collect();
    assert_eq!(inputs, ["X", "S", "A", "B"]);
    assert_eq!((config.state_input(0), config.state_input(2), config.input_name(4)), (1, 3, None));
    let outputs: Vec<_> = config.backend_outputs().collect();
    assert_eq!(outputs, [("Y", DataType::Fp32), ("T", DataType::Fp32), ("C", DataType::Bytes)]);
    let numbers: Vec<usize> = config.states.iter().map(|state| state.output).collect();
    assert_eq!(numbers, [1, 0, 2]);
    // States are hidden from clients.
    assert_eq!((config.inputs.len(), config.outputs.len()), (1, 1));
    let again = ModelConfig::decode(&config.encode()).unwrap();
    assert_eq!(again.states, config.states);
}

#[test]
fn first_values() {
    let no_file = |_: &str| Err("no file is needed".to_owned());
    let of = |states: &str| with(states, "").unwrap().states.remove(0);
    let zeros = |shape: &[i64], bytes: usize| {
        Ok(StateValue { shape: shape.to_vec(), data: vec![0; bytes] })
    };
    assert_eq!(of(&format!("state [ {{ {STATE} }} ]")).first_value(no_file), zeros(&[2, 1], 8));
    let text = "state [ { input_name: 'S' output_name: 'T' data_type: TYPE_STRING dims: [3] } ]";
    assert_eq!(of(text).first_value(no_file), zeros(&[3], 12));
    let zero = of(&initial("name: 'i' data_type: TYPE_FP32 dims: [2, 3] zero_data: true"));
    assert_eq!(zero.first_value(no_file), zeros(&[2, 3], 24));
    let file = of(&initial("name: 'i' data_type: TYPE_FP32 dims: [2, 2] data_file: 'a/b'"));
    let read =
        |len: u8| move |name: &str| Ok(if name == "a/b" { (0..len).collect() } else { Vec::new() });
    assert_eq!(
        file.first_value(read(20)),
        Ok(StateValue { shape: vec![2, 2], data: (0..16).collect() })
    );
    let text =
        "initial_state setting expects 16 bytes, but the data provided from a/b only has 15 bytes.";
    assert_eq!(file.first_value(read(15)), Err(text.to_owned()));
    let strings = "state [ { input_name: 'S' output_name: 'T' data_type: TYPE_STRING dims: [2] \
                   initial_state { name: 'i' data_type: TYPE_STRING dims: [2] data_file: 'f' } } ]";
    let strings = of(strings);
    let framed = b"\x01\0\0\0a\0\0\0\0".to_vec();
    assert_eq!(strings.first_value(|_| Ok(framed.clone())).unwrap().data, framed);
    for (data, found) in [(&framed[..5], "1"), (&framed[..8], "a bad length at byte 5")] {
        let text = format!(
            "initial_state setting expects 2 BYTES elements, but the data provided from f has \
             {found}."
        );
        assert_eq!(strings.first_value(|_| Ok(data.to_vec())), Err(text));
    }
}

/// A real Triton 2.51 loads all of these: duplicate names (unless both have an `initial_state`),
/// missing fields, and names of inputs that clients send too.
#[test]
fn invalid_states_are_refused() {
    let state = |fields: &str| format!("state [ {{ {fields} }} ]");
    for (states, expected) in [
        (
            format!(
                "state [ {{ {STATE} }}, {{ input_name: 'S' output_name: 'U' data_type: TYPE_FP32 \
                 dims: [1] }} ]"
            ),
            "State input name 'S' specified more than once.",
        ),
        (
            format!(
                "state [ {{ {STATE} }}, {{ input_name: 'R' output_name: 'T' data_type: TYPE_FP32 \
                 dims: [1] }} ]"
            ),
            "State output name 'T' specified more than once.",
        ),
        (state("input_name: 'S'"), "state must specify 'input_name' and 'output_name' for m"),
        (
            state("input_name: 'S' output_name: 'T' dims: [1]"),
            "state 'S' must specify 'data_type' for m",
        ),
        (
            state("input_name: 'S' output_name: 'T' data_type: TYPE_FP32"),
            "state 'S' must specify 'dims' for m",
        ),
        (
            state("input_name: 'S' output_name: 'T' data_type: TYPE_FP32 dims: [0]"),
            "state 'S' dimension must be integer >= 1, or -1 to indicate a variable-size \
             dimension for m: [0] is given",
        ),
        (state(&STATE.replace("'S'", "'X'")), "state 'X' is listed as an input too for m"),
        (
            state("input_name: 'S' output_name: 'Y' data_type: TYPE_INT64 dims: [1]"),
            "state 'S' does not have the data type of the output that gives it for m",
        ),
        (
            state("input_name: 'S' output_name: 'Y' data_type: TYPE_FP32 dims: [7]"),
            "state 'S' has dims [7], but the output 'Y' that gives it has [1] for m",
        ),
        (
            state("input_name: 'S' output_name: 'T' data_type: TYPE_FP32 dims: [1000000, 1000000]"),
            "the initial value of state 'S' takes more than 1073741824 bytes for each sequence \
             for m",
        ),
    ] {
        assert_eq!(with(&states, "").unwrap_err(), expected, "{states}");
    }
    let ragged = "max_batch_size: 2 batch_input { kind: BATCH_ELEMENT_COUNT target_name: 'N' \
                  data_type: TYPE_INT32 source_input: 'X' }";
    let expected =
        "state 'S' has variable dimensions, which cannot be combined with ragged batches for m";
    assert_eq!(with(&state(STATE), ragged).unwrap_err(), expected);
    assert!(with(&state(&STATE.replace("-1", "3")), ragged).is_ok());
}

/// Error texts of a real Triton 2.51 for these configurations. Triton also reads files outside the
/// directory.
#[test]
fn invalid_initial_states_are_refused() {
    let state = |fields: &str| format!("state [ {{ {fields} }} ]");
    let good = "name: 'i' data_type: TYPE_FP32 dims: [2, 3]";
    for (states, expected) in [
        (
            initial("name: 'i' data_type: TYPE_INT32 dims: [2, 3] zero_data: true"),
            "The data type used for 'initial_state' field of state 'S' does not match the state \
             data type.",
        ),
        (
            initial("data_type: TYPE_FP32 dims: [2, 3] zero_data: true"),
            "Field 'name' must be set when using initial_state for state input 'S'.",
        ),
        (
            initial("name: 'i' data_type: TYPE_FP32 dims: [2] zero_data: true"),
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions \
             for state input 'S'. 1 != 2",
        ),
        (
            initial("name: 'i' data_type: TYPE_FP32 dims: [2, -1] zero_data: true"),
            "'initial_state' field for state input name 'S' contains variable dimensions.",
        ),
        (
            initial("name: 'i' data_type: TYPE_FP32 dims: [3, 3] zero_data: true"),
            "'initial_state' dim for input name 'S' doesn't match 'state' dim description. 3 != 2",
        ),
        (initial(good), "initial_state setting expects state'S' to have state_data set"),
        (
            initial(&format!("{good} data_file: '../f'")),
            "'data_file' must stay in the directory 'initial_state' of m, got '../f'",
        ),
        (
            state(&format!(
                "{STATE} initial_state [ {{ {good} zero_data: true }}, {{ {good} zero_data: true \
                 }} ]"
            )),
            "initial_state field for state input 'S' must contain exactly one or zero element. \
             Found '2' elements.",
        ),
    ] {
        assert_eq!(with(&states, "").unwrap_err(), expected, "{states}");
    }
}

fn tensor(name: &str, dims: &[i64]) -> SignatureTensor {
    SignatureTensor {
        name: name.to_owned(),
        datatype: DataType::Fp32,
        dims: Some(dims.to_vec()),
        first_dim_name: None,
    }
}

/// Completes a configuration for a model file with a state of `[batch, 2, 4]`.
fn completed(source: &str) -> Result<ModelConfig, String> {
    let signature = ModelSignature {
        inputs: vec![tensor("X", &[-1, 3]), tensor("S", &[-1, 2, 4])],
        outputs: vec![tensor("Y", &[-1, 1]), tensor("T", &[-1, 2, 4])],
        omitted_outputs: Vec::new(),
    };
    let files = ["model.onnx".to_owned()];
    let completion = Completion {
        directory: "m",
        files: &files,
        signature: Some(&signature),
        auto_complete: true,
        default_max_batch_size: 4,
        ..Completion::default()
    };
    let draft = Draft::from_text(source, "config.pbtxt").map_err(|error| error.to_string())?;
    draft.complete(&completion).map_err(|error| error.to_string())
}

#[test]
fn states_are_compared_with_the_model_file() {
    let state = |fields: &str| format!("sequence_batching {{ state [ {{ {fields} }} ] }}");
    let good = "input_name: 'S' output_name: 'T' data_type: TYPE_FP32 dims: [2, 4]";
    let names = |tensors: &[TensorSpec]| {
        tensors.iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>()
    };
    let config = completed(&state(good)).unwrap();
    assert_eq!(
        (names(&config.inputs), names(&config.outputs)),
        (vec!["X".to_owned()], vec!["Y".to_owned()])
    );
    assert_eq!(config.max_batch_size, 4, "the state's dims leave out the batch");
    let shown =
        completed(&format!("{} output [ {{ name: 'T' }}, {{ name: 'Y' }} ]", state(good))).unwrap();
    assert_eq!(
        (names(&shown.outputs), shown.states[0].output),
        (vec!["T".to_owned(), "Y".to_owned()], 0)
    );
    assert_eq!(shown.outputs[0].dims, [2, 4]);
    let whole = completed(&state(&good.replace("[2, 4]", "[-1, 2, 4]"))).unwrap();
    assert_eq!(whole.max_batch_size, 0, "the state's dims include the batch");
    for (fields, expected) in [
        (
            good.replace("'S'", "'Q'"),
            "unexpected inference input 'Q' for model 'm', allowed inputs are: X, S",
        ),
        (
            good.replace("'T'", "'Q'"),
            "unexpected inference output 'Q' for model 'm', allowed outputs are: Y, T",
        ),
        (
            good.replace("FP32", "INT32"),
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'S', \
             model provides TYPE_FP32",
        ),
        (
            good.replace("[2, 4]", "[4]"),
            "model 'm', tensor 'S': the model expects 3 dimensions (shape [-1,2,4]) but the model \
             configuration specifies 2 dimensions (an initial batch dimension because \
             max_batch_size > 0 followed by the explicit tensor shape, making complete shape \
             [-1,4])",
        ),
    ] {
        let source = format!("max_batch_size: 4 {}", state(&fields));
        assert_eq!(completed(&source).unwrap_err(), expected, "{fields}");
    }
}
