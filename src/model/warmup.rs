//! The requests that a model executes before it is ready (`model_warmup`).

use super::config::{ModelConfig, Warmup, WarmupData, WarmupInput};
use crate::data::Data;
use crate::infer::{CorrelationId, InferInput, InferRequest};
use crate::tensor::{DataType, Tensor, byte_size, element_count, push_bytes_element};

/// The maximum size of one input of a warm-up, in bytes.
const MAX_BYTES: u64 = 1 << 30;

/// One execution of a warm-up.
#[derive(Clone, Debug)]
pub struct WarmupBatch {
    /// Its requests.
    pub requests: Vec<InferRequest>,
    /// The control inputs that the configuration provides, with one element for each request. The
    /// server generates the others.
    pub controls: Vec<InferInput>,
}

impl Warmup {
    /// Builds one run: its requests form one batch. There are as many as the batch size, each with
    /// one item, as in Triton; one for a model that does not batch. `file` returns the bytes of a
    /// file in the model's `warmup` directory.
    ///
    /// # Errors
    /// A text for the operator: too many items, data that does not fit its shape, or an unreadable
    /// file. Whether the inputs are valid for the model is checked by [`ModelConfig::check`].
    pub fn requests(
        &self,
        config: &ModelConfig,
        file: impl Fn(&str) -> Result<Vec<u8>, String>,
    ) -> Result<WarmupBatch, String> {
        let most = config.max_batch_size.max(1);
        if self.batch_size > most {
            return Err(format!(
                "batch_size {} is more than the model's maximum of {most}",
                self.batch_size
            ));
        }
        let count = self.batch_size.max(1) as usize;
        let mut inputs = Vec::with_capacity(self.inputs.len());
        let mut controls = Vec::new();
        for (name, input) in &self.inputs {
            let batch = config.batches().then_some(1);
            let shape: Vec<i64> = batch.into_iter().chain(input.dims.iter().copied()).collect();
            let data =
                input.data(&shape, &file).map_err(|text| format!("input '{name}': {text}"))?;
            let Some(control) = config.controls().iter().find(|control| control.name == *name)
            else {
                let tensor = Tensor { datatype: input.datatype, shape, data };
                inputs.push(InferInput { name: name.clone(), tensor });
                continue;
            };
            if (input.datatype, element_count(&shape)) != (control.datatype, Some(1)) {
                let is = input.datatype;
                let dims = &input.dims;
                let expected = control.datatype;
                return Err(format!(
                    "control input '{name}' has datatype {is} and dims {dims:?}, expected \
                     {expected} and dims [1]"
                ));
            }
            let rows = i64::from(self.batch_size.max(1));
            let shape = std::iter::once(rows).chain(batch).collect();
            let data = Data::from(data.as_slice().repeat(count));
            controls.push(InferInput {
                name: name.clone(),
                tensor: Tensor { datatype: input.datatype, shape, data },
            });
        }
        let text = config.wrong_id_type(&CorrelationId::Uint(1)).is_some();
        let request = InferRequest {
            model_name: config.name.clone(),
            id: self.name.clone(),
            inputs,
            // For a model with sequences, each request is a complete sequence.
            correlation_id: if text {
                CorrelationId::String("1".to_owned())
            } else {
                CorrelationId::Uint(1)
            },
            sequence_start: true,
            sequence_end: true,
            ..InferRequest::default()
        };
        Ok(WarmupBatch { requests: vec![request; count], controls })
    }
}

impl WarmupInput {
    fn data(
        &self,
        shape: &[i64],
        file: impl Fn(&str) -> Result<Vec<u8>, String>,
    ) -> Result<Data, String> {
        let elements = element_count(shape)
            .ok_or_else(|| format!("dims {:?} are not all 0 or greater", self.dims))?;
        let size = byte_size(self.datatype, shape);
        if size.unwrap_or(elements.saturating_mul(5)) > MAX_BYTES {
            return Err(format!("dims {:?} take more than {MAX_BYTES} bytes", self.dims));
        }
        let count = usize::try_from(elements).unwrap_or(usize::MAX);
        let bytes = match &self.data {
            WarmupData::Zero => match size {
                Some(size) => vec![0; usize::try_from(size).unwrap_or(usize::MAX)],
                None => strings(std::iter::repeat_n("", count)),
            },
            WarmupData::Random => random(self.datatype, count),
            WarmupData::File(name) => {
                let bytes = file(name)?;
                let got = bytes.len();
                if let Some(size) = size.filter(|size| *size != got as u64) {
                    return Err(format!(
                        "file '{name}' has {got} bytes, the dims {:?} need {size}",
                        self.dims
                    ));
                }
                bytes
            }
        };
        Ok(bytes.into())
    }
}

fn strings<'a>(elements: impl Iterator<Item = &'a str>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for element in elements {
        push_bytes_element(&mut bytes, element.as_bytes());
    }
    bytes
}

/// Returns values that most models accept: integers from 0 to 9 (also as strings), booleans, and
/// floating-point numbers from 0 to 1. The same for each run, so that failures are reproducible.
fn random(datatype: DataType, count: usize) -> Vec<u8> {
    let mut state = 0u64;
    // SplitMix64 (Steele, Lea and Flood, 2014).
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    let mut bytes = Vec::with_capacity(count * datatype.size().unwrap_or(5));
    for _ in 0..count {
        let digit = (next() % 10) as u8;
        // All 2^24 values are exact in single precision.
        #[allow(clippy::cast_precision_loss)]
        let fraction = (next() >> 40) as f32 / (1u32 << 24) as f32;
        match datatype {
            DataType::Bool => bytes.push(digit % 2),
            DataType::Bytes => {
                push_bytes_element(&mut bytes, &[b'0' + digit]);
            }
            DataType::Fp64 => bytes.extend_from_slice(&f64::from(fraction).to_le_bytes()),
            DataType::Fp32 => bytes.extend_from_slice(&fraction.to_le_bytes()),
            DataType::Fp16 => bytes.extend_from_slice(&half::f16::from_f32(fraction).to_le_bytes()),
            DataType::Bf16 => {
                bytes.extend_from_slice(&half::bf16::from_f32(fraction).to_le_bytes())
            }
            // Little-endian: the digit, then zeros.
            whole => {
                bytes.push(digit);
                bytes.resize(bytes.len() + whole.size().unwrap_or(1) - 1, 0);
            }
        }
    }
    bytes
}
