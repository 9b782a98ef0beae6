//! Images and audio in messages. They are part of the request, as base64: the server fetches no URL
//! of a client, which may lead into the network of the server.

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::json::{invalid, invalid_value};

/// The most images and clips of audio in a request.
pub const MAX_MEDIA: usize = 64;
/// The largest image or clip, in bytes.
pub const MAX_MEDIA_BYTES: usize = 20 << 20;

/// The types of parts that no model here can take.
const REFUSED: [&str; 2] = ["video_url", "file"];

/// What a medium is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediaKind {
    /// An image.
    Image,
    /// A clip of audio.
    Audio,
}

impl MediaKind {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Image, Self::Audio];

    /// Returns the name of the model's input, which is also the type of a part for chat templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Audio => "audio",
        }
    }
}

/// An image or a clip of audio.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Media {
    /// What it is.
    pub kind: MediaKind,
    /// The dotted name of the field that has it.
    pub path: String,
    /// The bytes of its file as base64.
    pub base64: String,
}

impl Media {
    /// Takes the medium out of a content part; `None` for a part of another type. `path` is the
    /// dotted name of the part.
    ///
    /// # Errors
    ///
    /// 400 with the dotted name of the field at fault.
    pub(crate) fn take_from(
        part: &mut Map<String, Value>,
        path: &str,
    ) -> Result<Option<Self>, ApiError> {
        let name = part.get("type").and_then(Value::as_str).unwrap_or_default();
        let kind = match name {
            "image_url" => MediaKind::Image,
            "audio_url" | "input_audio" => MediaKind::Audio,
            _ if REFUSED.contains(&name) => {
                let message =
                    format!("{name} is not supported: a message has text, images or audio");
                return Err(ApiError::invalid_field(format!("{path}.type"), message));
            }
            _ => return Ok(None),
        };
        let name = name.to_owned();
        let path = format!("{path}.{name}");
        let value = part.get_mut(&name).map(Value::take).unwrap_or_default();
        let base64 = match name.as_str() {
            "input_audio" => text(value, &path, "data")?,
            _ => of_url(text(value, &path, "url")?, kind, &path)?,
        };
        check(&base64, &path)?;
        Ok(Some(Self { kind, path, base64 }))
    }
}

/// Returns the text of a value: the value itself, or the member `name` of an object.
fn text(value: Value, path: &str, name: &str) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Object(mut members) => match members.remove(name) {
            Some(Value::String(text)) => Ok(text),
            other => {
                let path = format!("{path}.{name}");
                Err(invalid_value(&path, &other.unwrap_or(Value::Null), "a string"))
            }
        },
        other => {
            let allowed = format_args!("an object with {name}, which is a string");
            Err(invalid_value(path, &other, allowed))
        }
    }
}

/// Returns the base64 in a data URL.
fn of_url(mut url: String, kind: MediaKind, path: &str) -> Result<String, ApiError> {
    let kind = kind.as_str();
    let is_data = url.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"));
    let head = url.split_once(',').map(|(head, _)| head.to_ascii_lowercase());
    match head.filter(|_| is_data) {
        Some(head)
            if head.ends_with(";base64")
                && head.get(5..).is_some_and(|kinds| kinds.starts_with(&format!("{kind}/"))) =>
        {
            Ok(url.split_off(head.len() + 1))
        }
        _ => {
            let allowed = format_args!(
                "a URL that has the data, \"data:{kind}/...;base64,...\"; others are not fetched"
            );
            Err(invalid(path, &format!("\"{url}\""), allowed))
        }
    }
}

/// Checks that a text is base64 with padding, of at most [`MAX_MEDIA_BYTES`].
fn check(base64: &str, path: &str) -> Result<(), ApiError> {
    let digits = base64.trim_end_matches('=');
    let padding = base64.len() - digits.len();
    let is_digit = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'+' || byte == b'/';
    let is_whole = base64.len().is_multiple_of(4) && padding <= 2 && !digits.is_empty();
    if !is_whole || !digits.bytes().all(is_digit) {
        let message = format!("{path} is not base64: expected its digits with padding");
        return Err(ApiError::invalid_field(path, message));
    }
    let size = base64.len() / 4 * 3 - padding;
    if size > MAX_MEDIA_BYTES {
        let message =
            format!("{path} has {size} bytes; at most {MAX_MEDIA_BYTES} bytes are allowed");
        return Err(ApiError::invalid_field(path, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn take(part: Value) -> Result<Option<Media>, ApiError> {
        let Value::Object(mut part) = part else { panic!("an object") };
        Media::take_from(&mut part, "p")
    }

    #[test]
    fn media_have_several_forms() {
        let url = |kind: &str| format!("data:{kind};base64,aGk=");
        for (part, kind) in [
            (
                json!({"type": "image_url", "image_url": {"url": url("image/png"), "detail": "low"}}),
                MediaKind::Image,
            ),
            (json!({"type": "image_url", "image_url": url("image/jpeg;x=y")}), MediaKind::Image),
            (
                json!({"type": "image_url", "image_url": "DATA:Image/PNG;BASE64,aGk="}),
                MediaKind::Image,
            ),
            (
                json!({"type": "audio_url", "audio_url": {"url": url("audio/wav")}}),
                MediaKind::Audio,
            ),
            (
                json!({"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}),
                MediaKind::Audio,
            ),
        ] {
            let media = take(part.clone()).unwrap().unwrap();
            assert_eq!((media.kind, media.base64.as_str()), (kind, "aGk="), "{part}");
        }
        assert_eq!(take(json!({"type": "text", "text": "a"})).unwrap(), None);
    }

    #[test]
    fn what_is_not_in_the_request_is_refused() {
        let url = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
        for (part, param, why) in [
            (url("http://127.0.0.1/x"), "p.image_url", "others are not fetched"),
            (url("file:///etc/passwd"), "p.image_url", "others are not fetched"),
            (url("data:image/png,aGk="), "p.image_url", "base64"),
            (url("data:text/html;base64,aGk="), "p.image_url", "data:image/"),
            (url("data:image/png;base64,"), "p.image_url", "not base64"),
            (url("data:image/png;base64,aGk"), "p.image_url", "not base64"),
            (url("data:image/png;base64,a-_="), "p.image_url", "not base64"),
            (url("data:image/png;base64,a==="), "p.image_url", "not base64"),
            (json!({"type": "image_url"}), "p.image_url", "null"),
            (json!({"type": "image_url", "image_url": {"url": 1}}), "p.image_url.url", "a string"),
            (json!({"type": "input_audio", "input_audio": {}}), "p.input_audio.data", "a string"),
            (json!({"type": "video_url", "video_url": {}}), "p.type", "video_url is not supported"),
            (json!({"type": "file", "file": {}}), "p.type", "file is not supported"),
        ] {
            let error = take(part.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{part}: {error}");
            assert!(error.message.contains(why), "{part}: {error}");
        }
    }

    #[test]
    fn large_media_are_refused() {
        let part = |size: usize| {
            let digits = "A".repeat(size.div_ceil(3) * 4);
            json!({"type": "image_url", "image_url": format!("data:image/png;base64,{digits}")})
        };
        assert!(take(part(MAX_MEDIA_BYTES / 3 * 3)).is_ok());
        let error = take(part(MAX_MEDIA_BYTES + 1)).unwrap_err();
        assert!(error.message.contains("at most 20971520 bytes"), "{error}");
    }
}
