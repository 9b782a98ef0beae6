//! Checks that a request fits its model, before it enters a queue.
//!
//! The order of the checks and the error texts are Triton's. So is the order in which inputs are
//! visited (the client's, backwards), because it determines which of two errors is reported.

use std::hash::{BuildHasher, Hash, Hasher};

use super::{ModelConfig, Scheduling, TensorSpec};
use crate::data::Data;
use crate::error::InferError;
use crate::infer::{InferInput, InferRequest};
use crate::tensor::{
    DataType, StringsError, Tensor, byte_size, check_strings, element_count, format_shape,
    push_bytes_element,
};

const BATCH_NOTE: &str = "NOTE: Setting a non-zero max_batch_size in the model config requires a \
                          batch dimension to be prepended to each input shape. If you want to \
                          specify the full shape including the batch dim in your input dims \
                          config, try setting max_batch_size to zero. See the model configuration \
                          docs for more info on max_batch_size.";

/// The most inputs that an error names: a request may have thousands, with names of any length.
const MAX_NAMES: usize = 64;

/// The properties of a valid request that the scheduler needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The number of items in the request; 1 if the model does not batch.
    pub batch_size: u64,
    /// Equal for requests that may share a batch: they have the same inputs, and equal shapes for
    /// inputs that have variable dimensions and are not ragged. Only comparable between requests
    /// checked by the same configuration object.
    pub shape_key: u64,
}

/// An error, and whether its text starts with the request's id. Triton does not add this prefix
/// when it looks up names.
struct Refusal {
    error: InferError,
    prefixed: bool,
}

impl From<String> for Refusal {
    fn from(message: String) -> Self {
        Self { error: InferError::invalid(message), prefixed: true }
    }
}

impl From<StringsError> for Refusal {
    fn from(wrong: StringsError) -> Self {
        Self { error: InferError::invalid(wrong.message), prefixed: wrong.prefixed }
    }
}

fn bare(message: String) -> Refusal {
    Refusal { error: InferError::invalid(message), prefixed: false }
}

impl ModelConfig {
    /// Checks `request` and prepares it: converts a raw body to the model's only input, and sorts
    /// the inputs in the order of the configuration. For a valid request, allocates memory only for
    /// the raw body of a BYTES model and, if the inputs are not in that order, for
    /// [`InferRequest::input_order`].
    ///
    /// # Errors
    /// `InvalidArg` with Triton's text, prefixed with the request's id where Triton does so.
    pub fn check(&self, request: &mut InferRequest) -> Result<Checked, InferError> {
        self.check_all(request).map_err(|refusal| match refusal.prefixed {
            true => refusal.error.with_request_id(&request.id),
            false => refusal.error,
        })
    }

    fn check_all(&self, request: &mut InferRequest) -> Result<Checked, Refusal> {
        if let Some(body) = request.raw_body.take() {
            request.inputs = vec![self.deduce(body)?];
        }
        self.check_outputs(request)?;
        self.check_names(&request.inputs)?;
        let batch_size = self.check_batch(&request.inputs)?;
        for (position, input) in request.inputs.iter().enumerate().rev() {
            if let Some(spec) = self.spec(position, &input.name) {
                self.check_tensor(spec, &input.tensor, batch_size)?;
            }
        }
        if self.batches() && batch_size == 0 {
            return Err(format!(
                "inference request batch-size must be 1 or more for '{}', got 0",
                self.name
            )
            .into());
        }
        self.sort_inputs(request);
        if let Scheduling::Sequence(sequence) = &self.scheduling {
            self.check_sequence(request, batch_size, sequence.iterative)?;
        }
        Ok(Checked { batch_size: batch_size.max(1), shape_key: self.shape_key(&request.inputs) })
    }

    /// Sorts the inputs in the order of the configuration, and keeps the client's order if that is
    /// another.
    fn sort_inputs(&self, request: &mut InferRequest) {
        let inputs = &mut request.inputs;
        let position =
            |input: &InferInput| self.inputs.iter().position(|spec| spec.name == input.name);
        // Most clients give all inputs in the model's order, which takes one comparison for each.
        if inputs.iter().zip(&self.inputs).all(|(input, spec)| input.name == spec.name)
            || inputs.is_sorted_by_key(position)
        {
            return;
        }
        request.input_order =
            inputs.iter().filter_map(|input| u16::try_from(position(input)?).ok()).collect();
        inputs.sort_unstable_by_key(position);
    }

    /// Checks that a step of a sequence is one item with an id of the right type. An iterative
    /// request may omit the id.
    fn check_sequence(
        &self,
        request: &InferRequest,
        batch_size: u64,
        iterative: bool,
    ) -> Result<(), Refusal> {
        let id = &request.correlation_id;
        let model = &self.name;
        if let Some(text) = self.wrong_id_type(id).filter(|_| !id.is_none()) {
            return Err(text.into());
        }
        if batch_size > 1 {
            return Err(bare(format!(
                "inference request to model '{model}' must specify batch-size 1 due to \
                 requirements of sequence batcher"
            )));
        }
        if id.is_none() && !iterative {
            return Err(bare(format!(
                "inference request to model '{model}' must specify a non-zero or non-empty \
                 correlation ID"
            )));
        }
        Ok(())
    }

    /// Returns the specification of a request's input. Most clients keep the model's order, so this
    /// position is tried first.
    fn spec(&self, position: usize, name: &str) -> Option<&TensorSpec> {
        self.inputs.get(position).filter(|spec| spec.name == name).or_else(|| self.input(name))
    }

    fn check_outputs(&self, request: &InferRequest) -> Result<(), Refusal> {
        let outputs = &request.outputs;
        for (position, output) in outputs.iter().enumerate() {
            if self.output(&output.name).is_none() {
                return Err(bare(format!(
                    "unexpected inference output '{}' for model '{}'",
                    output.name, self.name
                )));
            }
            // A short search: unknown names have been refused, so a duplicate comes early.
            if outputs.iter().take(position).any(|earlier| earlier.name == output.name) {
                return Err(format!("output '{}' already exists in request", output.name).into());
            }
        }
        Ok(())
    }

    fn check_names(&self, inputs: &[InferInput]) -> Result<(), Refusal> {
        let limit = self.inputs.len();
        // The first `limit + 1` inputs contain a duplicate, or there are too many.
        for (position, input) in inputs.iter().enumerate().take(limit + 1) {
            if inputs.iter().take(position).any(|earlier| earlier.name == input.name) {
                return Err(format!("input '{}' already exists in request", input.name).into());
            }
        }
        let required = self.inputs.iter().filter(|spec| !spec.optional).count();
        if !(required..=limit).contains(&inputs.len()) {
            return Err(self.wrong_count(inputs, required));
        }
        let mut unknown = inputs
            .iter()
            .enumerate()
            .filter(|(position, input)| self.spec(*position, &input.name).is_none());
        if let Some((_, input)) = unknown.next() {
            let allowed =
                self.inputs.iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>().join(", ");
            let name = &input.name;
            let model = &self.name;
            let text = format!(
                "unexpected inference input '{name}' for model '{model}', allowed inputs are: \
                 {allowed}"
            );
            return Err(bare(text));
        }
        // If all names are known and unique, a full count means that none is missing.
        if inputs.len() < limit && self.missing(inputs).next().is_some() {
            return Err(self.wrong_count(inputs, required));
        }
        Ok(())
    }

    fn missing(&self, inputs: &[InferInput]) -> impl Iterator<Item = &str> {
        self.inputs
            .iter()
            .filter(|spec| !spec.optional)
            .filter(|spec| inputs.iter().all(|input| input.name != spec.name))
            .map(|spec| spec.name.as_str())
    }

    fn wrong_count(&self, inputs: &[InferInput], required: usize) -> Refusal {
        let list = |names: &mut dyn Iterator<Item = &str>| {
            let mut shown: Vec<String> =
                names.take(MAX_NAMES).map(|name| format!("'{name}'")).collect();
            if names.next().is_some() {
                shown.push("...".to_owned());
            }
            format!("[{}]", shown.join(","))
        };
        let expected = match self.inputs.len() {
            all if all == required => format!("expected {all} inputs"),
            all => format!("expected number of inputs between {required} and {all}"),
        };
        format!(
            "{expected} but got {} inputs for model '{}'. Got input(s) {}, but missing required \
             input(s) {}. Please provide all required input(s).",
            inputs.len(),
            self.name,
            list(&mut inputs.iter().map(|input| input.name.as_str())),
            list(&mut self.missing(inputs)),
        )
        .into()
    }

    /// Returns the batch size that all inputs share; 1 if the model does not batch.
    fn check_batch(&self, inputs: &[InferInput]) -> Result<u64, Refusal> {
        if !self.batches() {
            return Ok(1);
        }
        let model = &self.name;
        let mut batch = None;
        for InferInput { name, tensor } in inputs.iter().rev() {
            let Some(&first) = tensor.shape.first() else {
                return Err(format!(
                    "input '{name}' has no shape but model requires batch dimension for '{model}'"
                )
                .into());
            };
            let Ok(first) = u64::try_from(first) else {
                return Err(self.negative(name, &tensor.shape));
            };
            if *batch.get_or_insert(first) != first {
                return Err(format!(
                    "input '{name}' batch size does not match other inputs for '{model}'"
                )
                .into());
            }
        }
        let batch = batch.unwrap_or(1);
        if batch > u64::from(self.max_batch_size) {
            return Err(format!(
                "inference request batch-size must be <= {} for '{model}': send fewer rows in a \
                 request, or raise max_batch_size in the model's config.pbtxt",
                self.max_batch_size
            )
            .into());
        }
        Ok(batch)
    }

    fn negative(&self, name: &str, shape: &[i64]) -> Refusal {
        format!(
            "All input dimensions should be specified for input '{name}' for model '{}', got {}",
            self.name,
            format_shape(shape)
        )
        .into()
    }

    fn check_tensor(
        &self,
        spec: &TensorSpec,
        tensor: &Tensor,
        batch_size: u64,
    ) -> Result<(), Refusal> {
        let name = &spec.name;
        let model = &self.name;
        if tensor.datatype != spec.datatype {
            return Err(format!(
                "inference input '{name}' data-type is '{}', but model '{model}' expects '{}'",
                tensor.datatype, spec.datatype
            )
            .into());
        }
        let dims = tensor.shape.get(usize::from(self.batches())..).unwrap_or_default();
        // Accept a client's -1 here: the check below has a clearer error for missing dimensions.
        if dims.len() != spec.dims.len()
            || !spec
                .dims
                .iter()
                .zip(dims)
                .all(|(&expected, &got)| expected == -1 || got == -1 || expected == got)
        {
            return Err(format!(
                "unexpected shape for input '{name}' for model '{model}'. Expected {}, got {}. {}",
                format_shape(&self.full_shape(spec)),
                format_shape(&tensor.shape),
                if self.batches() { BATCH_NOTE } else { "" }
            )
            .into());
        }
        if dims.iter().any(|&dim| dim < 0) {
            return Err(self.negative(name, &tensor.shape));
        }
        let too_large = || {
            format!(
                "shape {} for input '{name}' for model '{model}' causes total element count to \
                 exceed maximum size of {}",
                format_shape(&tensor.shape),
                i64::MAX
            )
        };
        let items = batch_size.max(1);
        let elements =
            element_count(dims).and_then(|count| count.checked_mul(items)).ok_or_else(too_large)?;
        if spec.datatype == DataType::Bytes {
            return match tensor.data.region() {
                Some(slice) => self.check_unseen_strings(name, slice.len, elements),
                None => Ok(check_strings(name, model, tensor.data.pieces(), elements)?),
            };
        }
        let expected = byte_size(spec.datatype, dims)
            .and_then(|size| size.checked_mul(items))
            .ok_or_else(too_large)?;
        let got = tensor.data.len();
        if expected != got as u64 {
            return Err(format!(
                "input byte size mismatch for input '{name}' for model '{model}'. Expected \
                 {expected}, got {got}"
            )
            .into());
        }
        Ok(())
    }

    /// Checks strings in a client's shared memory by length only: the worker reads them once,
    /// because the client may change them until then. A count that cannot fit is refused here, so
    /// that the worker does not reserve memory for it.
    fn check_unseen_strings(&self, name: &str, len: u64, expected: u64) -> Result<(), Refusal> {
        let most = len / 4;
        if expected <= most {
            return Ok(());
        }
        let model = &self.name;
        let at_most = if most > 0 { "at most " } else { "" };
        Err(format!(
            "expected {expected} string elements for inference input '{name}' for model \
             '{model}', got {at_most}{most}"
        )
        .into())
    }

    /// Builds the only input of a raw binary request. Its shape follows from the model's and the
    /// body's length.
    fn deduce(&self, body: Data) -> Result<InferInput, Refusal> {
        let [spec] = self.inputs.as_slice() else {
            return Err(format!(
                "Raw request must only have 1 input (found 1) to be deduced but got {} inputs in \
                 '{}' model configuration",
                self.inputs.len(),
                self.name
            )
            .into());
        };
        if spec.dims.iter().filter(|&&dim| dim == -1).count() > 1 {
            return Err(format!(
                "The shape of the raw input '{}' can not be deduced because there are more than \
                 one variable-sized dimension",
                spec.name
            )
            .into());
        }
        let fixed = spec
            .dims
            .iter()
            .filter(|&&dim| dim != -1)
            .fold(1i64, |product, &dim| product.saturating_mul(dim));
        let (data, variable) = match spec.datatype.size() {
            Some(size) => {
                let elements = i64::try_from(body.len() / size).unwrap_or(i64::MAX);
                // A dimension is 1 or greater in a checked configuration.
                (body, elements / fixed.max(1))
            }
            None => {
                let mut framed = Vec::with_capacity(body.len() + 4);
                if spec.dims != [1] || !push_bytes_element(&mut framed, &body.as_slice()) {
                    return Err(format!(
                        "For BYTE datatype raw input '{}', the model must have input shape [1]",
                        spec.name
                    )
                    .into());
                }
                (Data::from(framed), 1)
            }
        };
        let batch = self.batches().then_some(1);
        let dims = spec.dims.iter().map(|&dim| if dim == -1 { variable } else { dim });
        let shape = batch.into_iter().chain(dims).collect();
        Ok(InferInput {
            name: spec.name.clone(),
            tensor: Tensor { datatype: spec.datatype, shape, data },
        })
    }

    /// Returns the key of [`Checked::shape_key`]. `inputs` are in the order of the configuration.
    fn shape_key(&self, inputs: &[InferInput]) -> u64 {
        let matters = |spec: &TensorSpec| spec.is_variable() && !spec.allow_ragged_batch;
        if inputs.len() == self.inputs.len() && !self.inputs.iter().any(matters) {
            return 0;
        }
        let mut hasher = self.shape_hash.build_hasher();
        let mut given = inputs.iter().peekable();
        for spec in &self.inputs {
            let input = given.next_if(|input| input.name == spec.name);
            input.is_some().hash(&mut hasher);
            if let Some(input) = input.filter(|_| matters(spec)) {
                input.tensor.shape.get(usize::from(self.batches())..).hash(&mut hasher);
            }
        }
        hasher.finish()
    }
}
