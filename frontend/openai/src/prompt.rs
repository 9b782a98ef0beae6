//! Texts of requests, which may be given as tokens.

use serde_json::value::RawValue;

use crate::error::ApiError;
use crate::json::{bounded_list, invalid};

/// One prompt or text, never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

impl Prompt {
    /// Reads one prompt or a list of prompts into typed lists at once: token ids take the space of
    /// the client's text at most twice. `path` is the dotted name of the field, `most` the largest
    /// number of prompts.
    ///
    /// # Errors
    ///
    /// 400 with the name of the field.
    pub(crate) fn read_all(
        value: &RawValue,
        path: &str,
        most: usize,
    ) -> Result<Vec<Self>, ApiError> {
        let text = value.get();
        let first_element = text.strip_prefix('[').unwrap_or_default().trim_start();
        let prompts = if text.starts_with('"') {
            serde_json::from_str(text).ok().map(|text| vec![Self::Text(text)])
        } else if first_element.starts_with('"') {
            bounded_list::<String>(text, most)
                .map(|texts| texts.into_iter().map(Self::Text).collect())
        } else if first_element.starts_with('[') {
            bounded_list::<Vec<u32>>(text, most)
                .map(|lists| lists.into_iter().map(Self::Tokens).collect())
        } else {
            serde_json::from_str(text).ok().map(|tokens| vec![Self::Tokens(tokens)])
        };
        let allowed = format_args!(
            "a string, a list of token ids, or a list of 1 to {most} of either, none of them empty"
        );
        match prompts {
            Some(prompts) if !prompts.is_empty() && !prompts.iter().any(Self::is_empty) => {
                Ok(prompts)
            }
            _ => Err(invalid(path, text, allowed)),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::Tokens(tokens) => tokens.is_empty(),
        }
    }

    /// Returns the text; empty for tokens.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Tokens(_) => "",
        }
    }

    /// Returns the tokens; `None` for a text.
    pub(crate) fn tokens(&self) -> Option<&[u32]> {
        match self {
            Self::Text(_) => None,
            Self::Tokens(tokens) => Some(tokens),
        }
    }
}
