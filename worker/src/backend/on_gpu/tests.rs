//! The kernels for the fake driver: the processor's arithmetic, selected by the kernel's name.

use pharos::tensor::DataType;

use crate::backend::elements::{self, Operation};
use crate::device::Fault;
use crate::device::fake::Touch;

/// Runs a kernel of [`super::kernels`] in Rust. Like a device, it fails on misaligned addresses.
pub(crate) fn kernel(name: &str, arguments: &[u64], touch: &mut Touch<'_>) -> Result<(), Fault> {
    let (operation, datatype) = name.split_once('_').unwrap();
    let operation = if operation == "add" { Operation::Add } else { Operation::Subtract };
    let datatype = match datatype {
        "i8" => DataType::Int8,
        "i16" => DataType::Uint16,
        "i32" => DataType::Int32,
        "i64" => DataType::Uint64,
        "f16" => DataType::Fp16,
        "bf16" => DataType::Bf16,
        "f32" => DataType::Fp32,
        "f64" => DataType::Fp64,
        _ => return Err(Fault::Refused(format!("there is no kernel {name}"))),
    };
    let &[left, right, out, count] = arguments else {
        return Err(Fault::Refused("wrong parameters".to_owned()));
    };
    let size = datatype.size().unwrap();
    if [left, right, out].iter().any(|address| !address.is_multiple_of(size as u64)) {
        return Err(Fault::Permanent("CUDA driver error: misaligned address".to_owned()));
    }
    let len = size * usize::try_from(count).unwrap();
    let left = touch.read(left, len)?;
    let right = touch.read(right, len)?;
    let mut result = vec![0; len];
    assert!(elements::apply(datatype, operation, &left, &right, &mut result));
    touch.write(out, &result)
}
