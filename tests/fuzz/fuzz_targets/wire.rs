//! Frames from the other process: decoding never panics, and what decodes encodes to something that decodes equally.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pharos::wire::{PREFIX, decode_to_frontend, decode_to_worker};

fuzz_target!(|data: &[u8]| {
    if let Ok(frame) = decode_to_frontend(data) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        assert_eq!(format!("{:?}", decode_to_frontend(&bytes[PREFIX..])), format!("{:?}", Ok::<_, ()>(frame)));
    }
    if let Ok(frame) = decode_to_worker(data) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        assert_eq!(format!("{:?}", decode_to_worker(&bytes[PREFIX..])), format!("{:?}", Ok::<_, ()>(frame)));
    }
});
