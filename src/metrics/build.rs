//! Makes a table of the metrics in the shipped `metrics.yaml` for `builtin.rs`.

use std::error::Error;
use std::path::PathBuf;

use serde_yaml::Value;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../../metrics.yaml");
    let metrics = serde_yaml::from_str(&std::fs::read_to_string("../../metrics.yaml")?)?;
    let out = PathBuf::from(
        std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: run this through cargo")?,
    );
    std::fs::write(
        out.join("shipped.rs"),
        shipped(&metrics).ok_or("metrics.yaml has another form")?,
    )?;
    Ok(())
}

/// Returns the constant `SHIPPED` of `builtin.rs`: the metrics of the shipped `metrics.yaml`.
fn shipped(file: &Value) -> Option<String> {
    let mut text = String::from("const SHIPPED: &[Definition] = &[\n");
    for section in ["ts_metrics", "model_metrics"] {
        for (kind, metrics) in file.get(section)?.as_mapping()? {
            let kind = kind.as_str()?;
            for metric in metrics.as_sequence()? {
                let list =
                    |key: &str| metric.get(key).and_then(Value::as_sequence).into_iter().flatten();
                let name = metric.get("name")?.as_str()?;
                let labels: Vec<&str> =
                    list("dimensions").map(Value::as_str).collect::<Option<_>>()?;
                let buckets: Vec<f64> =
                    list("buckets").map(Value::as_f64).collect::<Option<_>>()?;
                let unit = match metric.get("unit")?.as_str()? {
                    unit @ ("Seconds" | "Milliseconds" | "Microseconds")
                        if matches!(kind, "histogram" | "summary") =>
                    {
                        format!("Some(TimeUnit::{unit})")
                    }
                    _ => "None".to_owned(),
                };
                let kind = kind[..1].to_uppercase() + &kind[1..];
                text += &format!(
                    "    Definition {{ name: {name:?}, kind: Kind::{kind}, labels: &{labels:?}, \
                     unit: {unit}, buckets: &{buckets:?} }},\n"
                );
            }
        }
    }
    Some(text + "];\n")
}
