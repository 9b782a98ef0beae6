//! config.pbtxt: parsing never panics, and a parsed draft survives its own encoding.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pharos::model::{Completion, Draft};

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(draft) = Draft::from_text(text, "config.pbtxt") {
        assert!(Draft::decode(&draft.encode()).is_ok());
        if let Ok(config) = draft.complete(&Completion { directory: "m", auto_complete: true, ..Completion::default() }) {
            let _ = config.to_json();
        }
    }
});
