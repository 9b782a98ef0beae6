//! Reads `tokenizer_config.json`: the chat template and the special tokens.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// A chat template, or several with names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TemplateSource {
    /// One template: a text of the configuration, or the file `chat_template.jinja`.
    Single(String),
    /// Templates by name: `default`, `tool_use`, `rag`, ...
    Named(BTreeMap<String, String>),
}

/// What a chat needs of `tokenizer_config.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// The chat template; base models have none.
    pub chat_template: Option<TemplateSource>,
    /// Special tokens by the names that templates have for them: `bos_token`, `eos_token`, ...
    pub special_tokens: BTreeMap<String, String>,
    /// Whether the tokenizer adds `bos_token` to texts.
    pub add_bos_token: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Template {
    Single(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Object { content: String },
}

impl Token {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object { content: text } => text,
        }
    }
}

impl TokenizerConfig {
    /// Parses the file. Members of no interest are ignored, whatever they are.
    ///
    /// The format is that of `transformers`: tokens are texts or objects with `content`, and names
    /// of tokens end with `_token`.
    ///
    /// # Errors
    ///
    /// What is wrong with the file, for logs.
    pub fn parse(file: &[u8]) -> Result<Self, String> {
        let members: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(file)
            .map_err(|error| format!("invalid tokenizer_config.json: {error}"))?;
        let mut config = Self::default();
        for (name, value) in &members {
            let value = value.get();
            if value == "null" {
                continue;
            }
            match name.as_str() {
                "chat_template" => config.chat_template = Some(parse_template(value)?),
                "add_bos_token" => config.add_bos_token = serde_json::from_str(value).ok(),
                "extra_special_tokens" => {
                    // Newer files have a list here, whose tokens have no names.
                    let tokens = serde_json::from_str::<BTreeMap<String, Token>>(value);
                    for (name, token) in tokens.unwrap_or_default() {
                        config.special_tokens.entry(name).or_insert(token.into_text());
                    }
                }
                name if name.ends_with("_token") => {
                    if let Ok(token) = serde_json::from_str::<Token>(value) {
                        config.special_tokens.insert(name.to_owned(), token.into_text());
                    }
                }
                _ => {}
            }
        }
        Ok(config)
    }
}

fn parse_template(value: &str) -> Result<TemplateSource, String> {
    let template = serde_json::from_str(value).map_err(|_| {
        "invalid chat_template in tokenizer_config.json: expected a string or a list of objects \
         with name and template"
            .to_owned()
    })?;
    Ok(match template {
        Template::Single(text) => TemplateSource::Single(text),
        Template::Named(list) => TemplateSource::Named(
            list.into_iter().map(|named| (named.name, named.template)).collect(),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_of_tokens() {
        let config = TokenizerConfig::parse(
            br#"{"bos_token":"<s>","eos_token":{"content":"</s>","lstrip":false},"pad_token":null,
            "add_bos_token":true,"add_eos_token":false,"model_max_length":1e30,
            "added_tokens_decoder":{"0":{"content":"<unk>"}},
            "extra_special_tokens":{"image_token":"<image>"},"chat_template":"x"}"#,
        )
        .unwrap();
        let tokens: Vec<_> = config.special_tokens.iter().collect();
        let names: Vec<_> = tokens.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["bos_token", "eos_token", "image_token"]);
        assert_eq!(config.special_tokens["eos_token"], "</s>");
        assert_eq!(config.add_bos_token, Some(true));
        assert_eq!(config.chat_template, Some(TemplateSource::Single("x".to_owned())));
    }

    #[test]
    fn named_templates() {
        let config = TokenizerConfig::parse(
            br#"{"chat_template":[{"name":"default","template":"a"},
                {"name":"tool_use","template":"b"}],"extra_special_tokens":["<x>"]}"#,
        )
        .unwrap();
        let Some(TemplateSource::Named(named)) = config.chat_template else { panic!("not named") };
        assert_eq!(named["tool_use"], "b");
    }

    #[test]
    fn errors() {
        assert!(TokenizerConfig::parse(b"[]").is_err());
        assert!(TokenizerConfig::parse(b"").is_err());
        assert!(TokenizerConfig::parse(br#"{"chat_template":5}"#).is_err());
        assert_eq!(TokenizerConfig::parse(b"{}").unwrap(), TokenizerConfig::default());
    }
}
