//! The backend `scale`: multiplies its FP32 input by the configuration parameter `factor`. The
//! program is a worker like `pharos-worker` with one additional backend.

use std::process::ExitCode;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::tensor::DataType;
use pharos_backend::{Backend, Batch, Context, Outputs};
use pharos_worker::Worker;

struct Scale {
    factor: f32,
}

impl Backend for Scale {
    fn engine(&self) -> String {
        concat!("scale ", env!("CARGO_PKG_VERSION")).to_owned()
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let [input] = batch.inputs.as_slice() else {
            return Err(InferError::invalid("scale needs exactly one input"));
        };
        let memory = outputs.allocate_fixed(0, DataType::Fp32, input.shape)?;
        for (value, result) in input.data.as_chunks().0.iter().zip(memory.as_chunks_mut().0) {
            *result = (f32::from_le_bytes(*value) * self.factor).to_le_bytes();
        }
        Ok(())
    }
}

fn create(context: &Context<'_>) -> Result<Box<dyn Backend>, InferError> {
    let text = context.config.parameters.get("factor").map_or("1", String::as_str);
    let factor = text.parse().map_err(|_| {
        let text = format!("parameter 'factor' is '{text}'; expected a number");
        InferError::new(ErrorCode::Unavailable, Reason::Backend, text)
    });
    Ok(Box::new(Scale { factor: factor? }))
}

fn main() -> ExitCode {
    Worker::new().backend("scale", create).run()
}
