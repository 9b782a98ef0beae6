//! The query of a URL as text.

use percent_encoding::percent_decode_str;

/// Returns the decoded pairs of a query, in their order. A part without `=` is left out.
pub fn pairs(query: &str) -> Vec<(String, String)> {
    let decode =
        |text: &str| percent_decode_str(&text.replace('+', " ")).decode_utf8_lossy().into_owned();
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (decode(key), decode(value))).collect()
}
