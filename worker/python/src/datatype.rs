//! Datatypes of numpy, DLPack and Triton.

use pharos::tensor::DataType;

/// Returns the datatype of a numpy kind and element size in bytes; `None` for types that the
/// protocol lacks.
pub(crate) fn of_numpy(kind: u8, size: usize) -> Option<DataType> {
    Some(match (kind, size) {
        (b'b', 1) => DataType::Bool,
        (b'u', 1) => DataType::Uint8,
        (b'u', 2) => DataType::Uint16,
        (b'u', 4) => DataType::Uint32,
        (b'u', 8) => DataType::Uint64,
        (b'i', 1) => DataType::Int8,
        (b'i', 2) => DataType::Int16,
        (b'i', 4) => DataType::Int32,
        (b'i', 8) => DataType::Int64,
        (b'f', 2) => DataType::Fp16,
        (b'f', 4) => DataType::Fp32,
        (b'f', 8) => DataType::Fp64,
        (b'O' | b'S', _) => DataType::Bytes,
        _ => return None,
    })
}

/// A numpy type.
#[derive(Clone, Copy)]
pub(crate) struct NumpyType {
    /// The kind letter: `f`, `i`, ...
    pub(crate) kind: u8,
    /// The size of an element in bytes.
    pub(crate) size: usize,
}

/// Returns numpy's type; `None` for BYTES and BF16, for which numpy has none.
pub(crate) fn to_numpy(datatype: DataType) -> Option<NumpyType> {
    let kind = match datatype {
        DataType::Bool => b'b',
        DataType::Uint8 | DataType::Uint16 | DataType::Uint32 | DataType::Uint64 => b'u',
        DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64 => b'i',
        DataType::Fp16 | DataType::Fp32 | DataType::Fp64 => b'f',
        DataType::Bytes | DataType::Bf16 => return None,
    };
    Some(NumpyType { kind, size: datatype.size()? })
}

/// The datatypes of each DLPack type code (`DLDataTypeCode` of dlpack.h): signed, unsigned, float,
/// bfloat, bool.
const DLPACK: [(u8, &[DataType]); 5] = [
    (0, &[DataType::Int8, DataType::Int16, DataType::Int32, DataType::Int64]),
    (1, &[DataType::Uint8, DataType::Uint16, DataType::Uint32, DataType::Uint64]),
    (2, &[DataType::Fp16, DataType::Fp32, DataType::Fp64]),
    (4, &[DataType::Bf16]),
    (6, &[DataType::Bool]),
];

/// Returns the datatype of a DLPack code and bit width.
pub(crate) fn of_dlpack(code: u8, bits: u8) -> Option<DataType> {
    let (_, datatypes) = DLPACK.iter().find(|(known, _)| *known == code)?;
    datatypes
        .iter()
        .copied()
        .find(|datatype| datatype.size() == Some(usize::from(bits / 8)) && bits.is_multiple_of(8))
}

/// Returns DLPack's code and bit width; `None` for BYTES.
pub(crate) fn to_dlpack(datatype: DataType) -> Option<(u8, u8)> {
    let (code, _) = DLPACK.iter().find(|(_, datatypes)| datatypes.contains(&datatype))?;
    Some((*code, u8::try_from(datatype.size()? * 8).ok()?))
}
