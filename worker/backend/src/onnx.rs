//! What backends of ONNX models share: the model's file, the Rust types of datatypes, and the elements
//! of strings.

use std::path::PathBuf;

pub use half::f16;
use pharos::error::InferError;
use pharos::model::onnx::FILE_IN_DIRECTORY;
pub use pharos::tensor::DataType;
use pharos::tensor::{bytes_elements, element_count};
use pharos::wire::BatchRequest;

use crate::{Batch, Context, Input, Outputs, load_error, run_error};

/// Returns the path of the model's file in the version directory: `default_model_filename` of the
/// configuration, or `model.onnx`. If it is a directory, the model is the file `model.onnx` within,
/// as in Triton.
pub fn model_file(context: &Context<'_>) -> Result<PathBuf, InferError> {
    let name = match context.config.default_model_filename.as_str() {
        "" => "model.onnx",
        name => name,
    };
    let mut path = context.directory.join(name);
    if path.is_dir() {
        path.push(FILE_IN_DIRECTORY);
    }
    if path.is_file() {
        Ok(path)
    } else {
        Err(load_error(format!("the model file '{}' does not exist", path.display())))
    }
}

/// Runs `$body` with `$number` as the Rust type of a fixed-size datatype that every runtime
/// supports: all but BOOL and BF16. `also` adds datatypes that only some runtimes support.
#[macro_export]
macro_rules! for_numbers {
    ($datatype:expr, $number:ident => $body:expr, $(also $more:ident = $type:ty,)* otherwise $otherwise:expr) => {
        $crate::for_numbers!(
            @match $datatype, $number => $body, otherwise $otherwise,
            Uint8 = u8, Uint16 = u16, Uint32 = u32, Uint64 = u64, Int8 = i8, Int16 = i16, Int32 = i32, Int64 = i64,
            Fp16 = $crate::onnx::f16, Fp32 = f32, Fp64 = f64, $($more = $type,)*
        )
    };
    (@match $datatype:expr, $number:ident => $body:expr, otherwise $otherwise:expr, $($variant:ident = $type:ty,)*) => {
        match $datatype {
            $($crate::onnx::DataType::$variant => {
                type $number = $type;
                $body
            })*
            _ => $otherwise,
        }
    };
}

/// Returns the elements of a BYTES input as strings. An element that is not UTF-8, or contains a
/// NUL byte, which no ONNX runtime accepts, fails only its request; an empty string replaces it.
///
/// # Errors
/// The input is not framed as BYTES, which the frontend has checked.
pub fn texts(
    input: &Input<'_>,
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Result<Vec<String>, InferError> {
    let elements = bytes_elements(input.data).collect::<Result<Vec<_>, _>>().map_err(|at| {
        run_error(format!("input '{}' is not framed as BYTES at {at}", input.name))
    })?;
    let elements_of = counts(batch, input, elements.len());
    let mut texts = Vec::with_capacity(elements.len());
    let mut rest = elements.into_iter();
    for (position, request) in batch.requests.iter().enumerate() {
        let mut is_valid = true;
        for element in rest.by_ref().take(elements_of(request)) {
            let text = str::from_utf8(element).ok().filter(|text| !text.contains('\0'));
            is_valid &= text.is_some();
            texts.push(text.unwrap_or_default().to_owned());
        }
        if !is_valid {
            let text = format!(
                "input '{}' holds an element that is not UTF-8 text without NUL bytes",
                input.name
            );
            outputs.fail(position, InferError::invalid(text));
        }
    }
    Ok(texts)
}

/// Returns a function for the number of elements that a request has of an input, of which the batch
/// has `elements`. Requests with a ragged input have different shapes, which its
/// [details](BatchRequest::details) contain.
pub fn counts(
    batch: &Batch<'_>,
    input: &Input<'_>,
    elements: usize,
) -> impl Fn(&BatchRequest) -> usize + use<> {
    let index = input.index;
    let per_row = elements / usize::try_from(batch.rows()).unwrap_or(1).max(1);
    move |request| {
        let mut ragged = request.details.iter().flat_map(|details| &details.ragged);
        let shape =
            ragged.find(|(position, _)| usize::from(*position) == index).map(|(_, shape)| shape);
        let own = shape.and_then(|shape| usize::try_from(element_count(shape)?).ok());
        own.unwrap_or(per_row * request.rows as usize)
    }
}
