//! Functions for the fuzz targets of archives and of TorchServe's texts. The server does not use
//! this module.

use std::fs::File;
use std::path::Path;

use bytes::Bytes;

use crate::archive::unpack::{Limits, unpack};
use crate::form::{FormPart, join, parts};
use crate::properties;
use crate::yaml::ModelYaml;

/// Unpacks a model archive into a directory, at most `bytes` bytes and `pieces` files and
/// directories.
///
/// # Errors
/// The archive is refused.
pub fn unpack_model(archive: &Path, target: &Path, bytes: u64, pieces: u64) -> Result<(), String> {
    let file = File::open(archive).map_err(|error| error.to_string())?;
    unpack(&file, archive, target, &Limits { bytes, pieces })
}

/// Parses a text as config.properties and as model-config.yaml; an error has a text.
pub fn texts(text: &str) {
    match properties::parse(text) {
        Ok(pairs) => {
            for (_, value) in pairs {
                let _ = properties::expand(&value, |name| {
                    (!name.is_empty()).then(|| "value".to_owned())
                });
            }
        }
        Err(error) => assert!(!error.is_empty()),
    }
    let mut warnings = Vec::new();
    match ModelYaml::parse(text, &mut |warning| warnings.push(warning)) {
        Ok(yaml) => assert!(yaml.whole.is_object()),
        Err(error) => assert!(!error.is_empty()),
    }
}

/// Splits a body into parts. The data of all parts together is the element for the worker.
pub async fn form(content_type: &str, body: Bytes) {
    let Ok(parts) = parts(content_type, body).await else { return };
    let Some((element, description)) = join(&parts) else { return };
    let data: Vec<u8> =
        parts.iter().flat_map(|FormPart { data, .. }| data.iter().copied()).collect();
    assert_eq!(element.get(4..), Some(&*data));
    assert_eq!(description.as_array().map(Vec::len), Some(parts.len()));
}
