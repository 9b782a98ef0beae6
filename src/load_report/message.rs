//! Encodes load reports as `xds.data.orca.v3.OrcaLoadReport`.

use prost::Message;

use super::Values;

#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all)]
mod proto {
    include!(concat!(env!("OUT_DIR"), "/xds.data.orca.v3.rs"));
}

/// Returns the encoded message.
pub(super) fn encode(values: &Values) -> Vec<u8> {
    let named = values.named_metrics.iter().map(|(name, value)| ((*name).to_owned(), *value));
    let message = proto::OrcaLoadReport {
        cpu_utilization: values.cpu_utilization.unwrap_or_default(),
        mem_utilization: values.mem_utilization.unwrap_or_default(),
        application_utilization: values.application_utilization.unwrap_or_default(),
        rps_fractional: values.rps_fractional.unwrap_or_default(),
        eps: values.eps.unwrap_or_default(),
        named_metrics: named.collect(),
        ..Default::default()
    };
    message.encode_to_vec()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn fields_have_the_published_numbers() {
        let field = |number: u8, value: f64| {
            [vec![(number << 3) | 1], value.to_le_bytes().to_vec()].concat()
        };
        let named = [vec![(8 << 3) | 2, 12, (1 << 3) | 2, 1, b'x'], field(2, 2.0)].concat();
        let expected =
            [field(1, 0.25), field(2, 0.5), field(6, 10.0), field(7, 1.0), named, field(9, 0.75)]
                .concat();
        let values = Values {
            cpu_utilization: Some(0.25),
            mem_utilization: Some(0.5),
            application_utilization: Some(0.75),
            rps_fractional: Some(10.0),
            eps: Some(1.0),
            named_metrics: vec![("x", 2.0)],
        };
        assert_eq!(encode(&values), expected);
        assert_eq!(proto::OrcaLoadReport::decode(&*expected).unwrap().named_metrics["x"], 2.0);
    }
}
