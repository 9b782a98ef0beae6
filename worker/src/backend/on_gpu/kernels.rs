//! The kernels of `builtin` on a GPU, as PTX that the driver compiles for its device: compute
//! capability 5.0 or later, with any driver since CUDA 9.

use std::ffi::CString;
use std::fmt::Write;

use pharos::tensor::DataType;

use crate::backend::elements::Operation;

/// The header of all kernels.
const HEAD: &str = ".version 6.0\n.target sm_50\n.address_size 64\n";

/// Iterates over the elements with all threads; `{body}` reads the operands at %d9 and %d10, and
/// writes to %d11.
const KERNEL: &str = "
.visible .entry {name}(.param .u64 left, .param .u64 right, .param .u64 out, .param .u64 count)
{
    .reg .pred %p<3>;
    .reg .b16 %h<4>;
    .reg .b32 %r<8>;
    .reg .b64 %d<15>;
    .reg .f32 %f<4>;
    .reg .f64 %g<4>;
    ld.param.u64 %d1, [left];
    ld.param.u64 %d2, [right];
    ld.param.u64 %d3, [out];
    ld.param.u64 %d4, [count];
    cvta.to.global.u64 %d1, %d1;
    cvta.to.global.u64 %d2, %d2;
    cvta.to.global.u64 %d3, %d3;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %d5, %r1, %r2;
    cvt.u64.u32 %d6, %r3;
    add.u64 %d5, %d5, %d6;
    mul.wide.u32 %d7, %r4, %r2;
NEXT:
    setp.ge.u64 %p1, %d5, %d4;
    @%p1 bra DONE;
    mul.lo.u64 %d8, %d5, {size};
    add.u64 %d9, %d1, %d8;
    add.u64 %d10, %d2, %d8;
    add.u64 %d11, %d3, %d8;
{body}
    add.u64 %d5, %d5, %d7;
    bra NEXT;
DONE:
    ret;
}
";

/// For datatypes that the device supports: `{register}` registers of `{type}`, with `{operation}`.
const PLAIN: &str = "    ld.global.{type} %{register}1, [%d9];
    ld.global.{type} %{register}2, [%d10];
    {operation} %{register}3, %{register}1, %{register}2;
    st.global.{type} [%d11], %{register}3;";

/// Half precision, computed in single precision, which rounds to the same result.
const HALVES: &str = "    ld.global.b16 %h1, [%d9];
    ld.global.b16 %h2, [%d10];
    cvt.f32.f16 %f1, %h1;
    cvt.f32.f16 %f2, %h2;
    {operation} %f3, %f1, %f2;
    cvt.rn.f16.f32 %h3, %f3;
    st.global.b16 [%d11], %h3;";

/// Bfloat16, the upper half of single precision, rounded to even in code: old devices have no
/// instruction for it.
const UPPER_HALVES: &str = "    ld.global.u16 %h1, [%d9];
    ld.global.u16 %h2, [%d10];
    cvt.u32.u16 %r5, %h1;
    cvt.u32.u16 %r6, %h2;
    shl.b32 %r5, %r5, 16;
    shl.b32 %r6, %r6, 16;
    mov.b32 %f1, %r5;
    mov.b32 %f2, %r6;
    {operation} %f3, %f1, %f2;
    mov.b32 %r5, %f3;
    and.b32 %r6, %r5, 0x7fffffff;
    setp.gt.u32 %p2, %r6, 0x7f800000;
    shr.u32 %r6, %r5, 16;
    and.b32 %r7, %r6, 1;
    add.u32 %r7, %r7, 0x7fff;
    add.u32 %r7, %r7, %r5;
    shr.u32 %r7, %r7, 16;
    or.b32 %r6, %r6, 0x40;
    selp.b32 %r7, %r6, %r7, %p2;
    cvt.u16.u32 %h3, %r7;
    st.global.u16 [%d11], %h3;";

/// The arithmetic of a datatype.
struct Arithmetic {
    /// The suffix of kernel names.
    suffix: &'static str,
    size: usize,
    body: &'static str,
    register: &'static str,
    /// The type in memory.
    stored: &'static str,
    /// The type of the computation.
    computed: &'static str,
}

/// Returns `None` for BOOL and BYTES, which have no arithmetic. Integers wrap, so that signedness
/// does not matter.
fn arithmetic(datatype: DataType) -> Option<Arithmetic> {
    let (suffix, size, body, register, stored, computed) = match datatype {
        DataType::Int8 | DataType::Uint8 => ("i8", 1, PLAIN, "h", "u8", "u16"),
        DataType::Int16 | DataType::Uint16 => ("i16", 2, PLAIN, "h", "u16", "u16"),
        DataType::Int32 | DataType::Uint32 => ("i32", 4, PLAIN, "r", "u32", "u32"),
        DataType::Int64 | DataType::Uint64 => ("i64", 8, PLAIN, "d", "u64", "u64"),
        DataType::Fp32 => ("f32", 4, PLAIN, "f", "f32", "rn.f32"),
        DataType::Fp64 => ("f64", 8, PLAIN, "g", "f64", "rn.f64"),
        DataType::Fp16 => ("f16", 2, HALVES, "", "", "rn.f32"),
        DataType::Bf16 => ("bf16", 2, UPPER_HALVES, "", "", "rn.f32"),
        DataType::Bool | DataType::Bytes => return None,
    };
    Some(Arithmetic { suffix, size, body, register, stored, computed })
}

/// Returns the PTX for a datatype, with the names of its kernels: sum and difference. `None` if it
/// has no arithmetic.
pub(super) fn add_sub(datatype: DataType) -> Option<(CString, [CString; 2])> {
    let of = arithmetic(datatype)?;
    let mut text = HEAD.to_owned();
    let names = [Operation::Add, Operation::Subtract].map(|operation| {
        let verb = match operation {
            Operation::Add => "add",
            Operation::Subtract => "sub",
        };
        // %d1 to %d3 are addresses: 64-bit numbers need other registers.
        let registers = if of.register == "d" {
            of.body.replace("%{register}", "%d1{more}")
        } else {
            of.body.to_owned()
        };
        let body = registers
            .replace("%d1{more}1", "%d12")
            .replace("%d1{more}2", "%d13")
            .replace("%d1{more}3", "%d14")
            .replace("{register}", of.register)
            .replace("{type}", of.stored)
            .replace("{operation}", &format!("{verb}.{}", of.computed));
        let name = format!("{verb}_{}", of.suffix);
        let kernel = KERNEL
            .replace("{name}", &name)
            .replace("{size}", &of.size.to_string())
            .replace("{body}", &body);
        let _ = text.write_str(&kernel);
        CString::new(name).unwrap_or_default()
    });
    Some((CString::new(text).ok()?, names))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ALL: [DataType; 12] = [
        DataType::Int8,
        DataType::Uint8,
        DataType::Int16,
        DataType::Uint16,
        DataType::Int32,
        DataType::Uint32,
        DataType::Int64,
        DataType::Uint64,
        DataType::Fp16,
        DataType::Bf16,
        DataType::Fp32,
        DataType::Fp64,
    ];

    #[test]
    fn every_numeric_type_has_kernels_without_unfilled_placeholders() {
        for datatype in ALL {
            let (text, [add, sub]) = add_sub(datatype).unwrap();
            let text = text.to_str().unwrap();
            assert!(
                text.starts_with(".version")
                    && !text.contains("{register}")
                    && !text.contains("{more}"),
                "{text}"
            );
            for name in [add, sub] {
                assert!(text.contains(&format!(".entry {}(", name.to_str().unwrap())), "{text}");
            }
        }
        assert!(add_sub(DataType::Bool).is_none() && add_sub(DataType::Bytes).is_none());
    }

    /// If an assembler is configured, it must accept all kernels for all generations of devices.
    #[test]
    fn the_assembler_accepts_all_kernels() {
        let Some(assembler) = std::env::var_os("PHAROS_TEST_PTXAS") else { return };
        for datatype in ALL {
            let (text, _) = add_sub(datatype).unwrap();
            let file =
                std::env::temp_dir().join(format!("pharos-{}-{datatype}.ptx", std::process::id()));
            std::fs::write(&file, text.to_bytes()).unwrap();
            for device in ["sm_50", "sm_70", "sm_80", "sm_90", "sm_100"] {
                let mut command = std::process::Command::new(&assembler);
                let output =
                    command.args(["-arch", device, "-o", "/dev/null"]).arg(&file).output().unwrap();
                assert!(
                    output.status.success(),
                    "{datatype} {device}: {}",
                    String::from_utf8_lossy(&output.stderr)
                );
            }
            std::fs::remove_file(file).unwrap();
        }
    }
}
