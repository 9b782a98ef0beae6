//! Requests for the tokens of a text, and for the text of tokens. Each is answered by itself, because
//! the results have different lengths.

use pharos::error::InferError;
use pharos::model::generation::{
    DETOKENIZE, NUM_INPUT_TOKENS, OPERATION, PROMPT_TOKEN_IDS, TEXT_OUTPUT, TOKENIZE,
};
use pharos::tensor::{DataType, push_bytes_element};
use pharos_backend::{Content, Reply, ReplyOutput, Runtime};

use crate::requests::Row;
use crate::results::Places;
use crate::tokens::{Item, Limit, Texts, Tokens, too_long};

/// Computes the response to a request.
///
/// # Errors
/// The operation is unknown, or its input is missing or wrong.
pub(crate) fn reply(
    row: &Row<'_>,
    texts: &Texts,
    places: &Places,
    runtime: &Runtime,
) -> Result<Reply, InferError> {
    let numbers = |values: &[u32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let outputs: Vec<(&str, DataType, usize, Vec<u8>)> = match row.operation {
        TOKENIZE => {
            let item = Item { prompt: "", limit: Limit::Refuse(usize::MAX), ..row.item.clone() };
            let tokens = texts.encode(&item)?;
            let count = u32::try_from(tokens.ids.len()).unwrap_or(u32::MAX);
            let mut pieces = Vec::new();
            for id in &tokens.ids {
                push_bytes_element(&mut pieces, texts.token(*id).as_bytes());
            }
            vec![
                (PROMPT_TOKEN_IDS, DataType::Uint32, tokens.ids.len(), numbers(&tokens.ids)),
                (TEXT_OUTPUT, DataType::Bytes, tokens.ids.len(), pieces),
                (NUM_INPUT_TOKENS, DataType::Uint32, 1, numbers(&[count])),
            ]
        }
        DETOKENIZE => {
            let ids = row.tokens.as_deref().ok_or_else(|| {
                InferError::invalid(format!("the input '{PROMPT_TOKEN_IDS}' is missing"))
            })?;
            check_tokens(ids, texts)?;
            let mut text = Vec::new();
            push_bytes_element(
                &mut text,
                texts.decode(ids, !row.item.add_special_tokens)?.as_bytes(),
            );
            vec![(TEXT_OUTPUT, DataType::Bytes, 1, text)]
        }
        other => {
            return Err(InferError::invalid(format!(
                "the input '{OPERATION}' is '{}'; allowed are {TOKENIZE} and {DETOKENIZE}",
                other.escape_debug()
            )));
        }
    };
    let mut reply = Reply::default();
    for (name, datatype, elements, data) in outputs {
        let Some(output) = places.named(name) else { continue };
        let mut memory = runtime.memory(data.len())?;
        memory.copy_from_slice(&data);
        reply.outputs.push(ReplyOutput {
            output,
            datatype,
            shape: vec![1, i64::try_from(elements).unwrap_or(i64::MAX)],
            content: Content::Memory(memory),
        });
    }
    Ok(reply)
}

/// Checks tokens that a client gives in place of a text.
///
/// # Errors
/// There are too many, or one is not of the vocabulary.
pub(crate) fn given(ids: Vec<u32>, limit: Limit, texts: &Texts) -> Result<Tokens, InferError> {
    check_tokens(&ids, texts)?;
    let (Limit::Refuse(most) | Limit::Truncate(most)) = limit;
    let is_truncated = ids.len() > most;
    if is_truncated && limit == Limit::Refuse(most) {
        return Err(too_long(ids.len(), most));
    }
    let ids: Vec<u32> = ids.into_iter().take(most).collect();
    let zeros = vec![0; ids.len()];
    Ok(Tokens { types: zeros.clone(), special: zeros, ids, is_truncated, ..Tokens::default() })
}

/// Checks that tokens are of the vocabulary.
fn check_tokens(ids: &[u32], texts: &Texts) -> Result<(), InferError> {
    let count = texts.vocabulary();
    match ids.iter().find(|id| **id as usize >= count) {
        None => Ok(()),
        Some(id) => Err(InferError::invalid(format!(
            "the token id {id} is not allowed: the vocabulary of the model has {count} tokens"
        ))),
    }
}
