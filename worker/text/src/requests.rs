//! The requests of a batch: one text or pair of texts in each row.

use pharos::error::InferError;
use pharos::model::generation::{OPERATION, PROMPT_TOKEN_IDS};
use pharos::model::pooling::{
    NORMALIZE, PROMPT_NAME, RAW_SCORES, TEXT, TEXT_PAIR, TOP_K, TRUNCATE,
};
use pharos::model::text_files::TextModel;
use pharos::tensor::{DataType, bytes_elements};
use pharos_backend::{Batch, Input, run_error};

use crate::heads::MAX_PREDICTIONS;
use crate::tokens::{Item, Limit};

/// The input that says whether the special tokens of the model are added.
const ADD_SPECIAL_TOKENS: &str = "add_special_tokens";
/// The predictions for each mask, unless a request says otherwise.
const DEFAULT_PREDICTIONS: i32 = 5;

/// A row of a batch.
#[derive(Clone, Debug)]
pub(crate) struct Row<'a> {
    pub(crate) item: Item<'a>,
    /// What the request wants in place of the task of the model; empty for the task.
    pub(crate) operation: &'a str,
    /// The tokens that the client gives.
    pub(crate) tokens: Option<Vec<u32>>,
    pub(crate) normalize: bool,
    pub(crate) raw_scores: bool,
    pub(crate) predictions: usize,
}

/// The inputs of a batch, with one element for each row.
pub(crate) struct Rows<'a> {
    rows: usize,
    texts: Vec<&'a [u8]>,
    pairs: Option<Vec<&'a [u8]>>,
    operations: Option<Vec<&'a [u8]>>,
    prompts: Option<Vec<&'a [u8]>>,
    truncate: Option<&'a [u8]>,
    normalize: Option<&'a [u8]>,
    raw_scores: Option<&'a [u8]>,
    special: Option<&'a [u8]>,
    predictions: Option<&'a [u8]>,
    tokens: Option<Input<'a>>,
}

impl<'a> Rows<'a> {
    /// Reads the inputs of a batch.
    ///
    /// # Errors
    /// The configuration has inputs of other types or shapes than this backend takes.
    pub(crate) fn of(batch: &Batch<'a>) -> Result<Self, InferError> {
        let rows = usize::try_from(batch.rows()).unwrap_or(usize::MAX);
        let find = |name: &str| batch.inputs.iter().find(|input| input.name == name).copied();
        let wrong = |name: &str, what: &str| {
            run_error(format!("the input '{name}' must have {what} in each row"))
        };
        let strings = |name: &str| -> Result<Option<Vec<&'a [u8]>>, InferError> {
            let Some(input) = find(name) else { return Ok(None) };
            let elements: Result<Vec<&[u8]>, _> = bytes_elements(input.data).collect();
            let one_each = elements.ok().filter(|elements| elements.len() == rows);
            one_each.map(Some).ok_or_else(|| wrong(name, "one string"))
        };
        let fixed = |name: &str, datatype: DataType, size: usize| {
            let Some(input) = find(name) else { return Ok(None) };
            let fits = input.datatype == datatype && input.data.len() == rows.saturating_mul(size);
            fits.then_some(Some(input.data)).ok_or_else(|| wrong(name, "one element"))
        };
        Ok(Self {
            rows,
            texts: strings(TEXT)?.ok_or_else(|| wrong(TEXT, "one string"))?,
            pairs: strings(TEXT_PAIR)?,
            operations: strings(OPERATION)?,
            prompts: strings(PROMPT_NAME)?,
            truncate: fixed(TRUNCATE, DataType::Int32, 4)?,
            normalize: fixed(NORMALIZE, DataType::Bool, 1)?,
            raw_scores: fixed(RAW_SCORES, DataType::Bool, 1)?,
            special: fixed(ADD_SPECIAL_TOKENS, DataType::Bool, 1)?,
            predictions: fixed(TOP_K, DataType::Int32, 4)?,
            tokens: find(PROMPT_TOKEN_IDS),
        })
    }

    /// Reads a row.
    ///
    /// # Errors
    /// The request of the row is invalid.
    pub(crate) fn row(
        &self,
        at: usize,
        model: &'a TextModel,
        auto_truncate: bool,
    ) -> Result<Row<'a>, InferError> {
        let text = |list: &Option<Vec<&'a [u8]>>, name: &str| match list
            .as_ref()
            .and_then(|list| list.get(at))
        {
            None => Ok(None),
            Some(bytes) => utf8(bytes, name).map(Some),
        };
        let flag = |bytes: Option<&[u8]>, default: bool| {
            bytes.and_then(|bytes| bytes.get(at)).map_or(default, |byte| *byte != 0)
        };
        let integer = |bytes: Option<&[u8]>| {
            bytes
                .and_then(|bytes| bytes.as_chunks().0.get(at))
                .map(|bytes| i32::from_le_bytes(*bytes))
        };
        let own = utf8(self.texts.get(at).copied().unwrap_or_default(), TEXT)?;
        let prompt = match text(&self.prompts, PROMPT_NAME)?.filter(|name| !name.is_empty()) {
            None => model.default_prompt.as_deref().and_then(|name| model.prompts.get(name)),
            Some(name) => Some(model.prompts.get(name).ok_or_else(|| {
                let names: Vec<&str> = model.prompts.keys().map(String::as_str).collect();
                InferError::invalid(format!(
                    "{PROMPT_NAME} is '{}'; the prompts of the model are [{}]",
                    name.escape_debug(),
                    names.join(", ")
                ))
            })?),
        };
        let wanted = integer(self.predictions).unwrap_or(DEFAULT_PREDICTIONS);
        let predictions = usize::try_from(wanted)
            .ok()
            .filter(|count| (1..=MAX_PREDICTIONS).contains(count))
            .ok_or_else(|| {
                InferError::invalid(format!(
                    "{TOP_K} is {wanted}; allowed are 1 to {MAX_PREDICTIONS}"
                ))
            })?;
        Ok(Row {
            item: Item {
                prompt: prompt.map_or("", String::as_str),
                text: own,
                pair: text(&self.pairs, TEXT_PAIR)?,
                add_special_tokens: flag(self.special, true),
                limit: limit(integer(self.truncate), model.max_tokens, auto_truncate)?,
            },
            operation: text(&self.operations, OPERATION)?.unwrap_or_default(),
            tokens: self.given_tokens(at),
            normalize: flag(self.normalize, model.normalize),
            raw_scores: flag(self.raw_scores, false),
            predictions,
        })
    }

    /// Returns the tokens that the client gives in a row.
    fn given_tokens(&self, at: usize) -> Option<Vec<u32>> {
        let input = self.tokens.as_ref()?;
        let numbers = input.data.as_chunks::<4>().0;
        let width = numbers.len() / self.rows.max(1);
        let own = numbers.get(at * width..(at + 1) * width)?;
        Some(own.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }
}

fn utf8<'a>(bytes: &'a [u8], name: &str) -> Result<&'a str, InferError> {
    str::from_utf8(bytes).map_err(|error| {
        InferError::invalid(format!(
            "the input '{name}' is not UTF-8 at byte {}",
            error.valid_up_to()
        ))
    })
}

/// Returns what happens to long texts, from the input of a request and the context of the model.
fn limit(truncate: Option<i32>, most: usize, auto: bool) -> Result<Limit, InferError> {
    let wanted = match truncate {
        Some(wanted) => wanted,
        None if auto => -1,
        None => return Ok(Limit::Refuse(most)),
    };
    match usize::try_from(wanted) {
        Err(_) if wanted == -1 => Ok(Limit::Truncate(most)),
        Ok(wanted) if wanted > most => Ok(Limit::Refuse(most)),
        Ok(wanted) if wanted >= 1 => Ok(Limit::Truncate(wanted)),
        _ => Err(InferError::invalid(format!(
            "{TRUNCATE} {wanted} is not allowed: it must be -1, for the context of the model, or a number \
             from 1"
        ))),
    }
}
