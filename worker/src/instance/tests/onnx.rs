//! Small ONNX files, written field by field; the field numbers come from ONNX's `onnx.proto3`.

/// Encodes a number as a protobuf varint.
fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value > 127 {
        out.push(u8::try_from(value & 127).unwrap() | 128);
        value >>= 7;
    }
    out.push(u8::try_from(value).unwrap());
    out
}

fn number(field: u64, value: i64) -> Vec<u8> {
    [varint(field << 3), varint(value.cast_unsigned())].concat()
}

fn data(field: u64, value: impl AsRef<[u8]>) -> Vec<u8> {
    let value = value.as_ref();
    [varint(field << 3 | 2), varint(value.len() as u64), value.to_vec()].concat()
}

/// Describes a tensor of shape `[rows, dim]`; -1 for a free dimension. INT64, unless the name has
/// another prefix.
fn value_info((name, dim): &(&str, i64)) -> Vec<u8> {
    let dim = if *dim < 0 { data(2, format!("{name}_dim")) } else { number(1, *dim) };
    let shape = [data(1, data(2, "rows")), data(1, dim)].concat();
    let datatype = match name.split_once('_') {
        Some(("FLOAT", _)) => 1,
        Some(("TEXT", _)) => 8,
        Some(("BOOL", _)) => 9,
        _ => 7,
    };
    [data(1, name), data(2, data(1, [number(1, datatype), data(2, shape)].concat()))].concat()
}

/// An operation: its name, inputs, outputs. `Concat` concatenates along the second dimension.
pub(super) type Node<'a> = (&'a str, &'a [&'a str], &'a [&'a str]);

fn node((operator, inputs, outputs): &Node<'_>) -> Vec<u8> {
    let mut out: Vec<u8> = inputs.iter().flat_map(|name| data(1, name)).collect();
    out.extend(outputs.iter().flat_map(|name| data(2, name)));
    out.extend(data(4, operator));
    if *operator == "Concat" {
        out.extend(data(5, [data(1, "axis"), number(3, 1), number(20, 2)].concat()));
    }
    out
}

/// Returns a whole file over INT64 tensors, or other types for names that begin with `FLOAT_`,
/// `TEXT_` or `BOOL_`: inputs and outputs are `(name, dim)`, constants `(name, value)`.
pub(super) fn model(
    nodes: &[Node<'_>],
    inputs: &[(&str, i64)],
    outputs: &[(&str, i64)],
    constants: &[(&str, i64)],
) -> Vec<u8> {
    let mut graph: Vec<u8> = nodes.iter().flat_map(|item| data(1, node(item))).collect();
    graph.extend(data(2, "graph"));
    let constant = |(name, value): &(&str, i64)| {
        [number(1, 1), number(2, 7), data(8, name), data(9, value.to_le_bytes())]
    };
    graph.extend(constants.iter().flat_map(|item| data(5, constant(item).concat())));
    graph.extend(inputs.iter().flat_map(|item| data(11, value_info(item))));
    graph.extend(outputs.iter().flat_map(|item| data(12, value_info(item))));
    [number(1, 8), data(7, graph), data(8, [data(1, ""), number(2, 17)].concat())].concat()
}
