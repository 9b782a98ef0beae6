//! The process of a template: compiles it and renders prompts until its input ends.

use std::io::{self, Read, Write};

use super::frames::{ERROR, RENDER, SETUP, Setup, frame, read_request};
use super::{PROBE_SECONDS, PROCESSOR_SECONDS};
use crate::template::ChatTemplate;

/// Reads a template and renders prompts until the input ends. Before each piece of work, `limit`
/// gets the processor time that it may need, in seconds.
///
/// # Errors
/// The input is not from the renderer of a frontend, or a stream or the limit fails.
pub fn serve(
    mut input: impl Read,
    mut output: impl Write,
    limit: impl Fn(u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut template = None;
    while let Some((kind, content)) = read_request(&mut input)? {
        let answer = match (kind, &template) {
            (SETUP, None) => {
                let Setup { source, special_tokens, expectations } =
                    serde_json::from_slice(&content)?;
                let is_known = expectations.is_some();
                limit(if is_known { PROCESSOR_SECONDS } else { PROBE_SECONDS })?;
                let compiled = ChatTemplate::new(source, special_tokens, expectations);
                let answer = match &compiled {
                    Ok(template) => frame(SETUP, &serde_json::to_vec(&template.expectations())?),
                    Err(why) => error(why),
                };
                template = compiled.ok();
                answer
            }
            (RENDER, Some(template)) => {
                limit(PROCESSOR_SECONDS)?;
                match template.render(&content) {
                    Ok(text) => frame(RENDER, text.as_bytes()),
                    Err(why) => error(&why),
                }
            }
            (kind, _) => {
                let what = format!("an unexpected frame of the kind {kind}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
        };
        output.write_all(&answer)?;
        output.flush()?;
    }
    Ok(())
}

/// Returns the frame of an error. Errors of the compiler can quote the template.
fn error(why: &str) -> Vec<u8> {
    const MAX_CHARACTERS: usize = 2048;
    let why: String = why.chars().take(MAX_CHARACTERS).collect();
    frame(ERROR, why.as_bytes())
}
