//! Checks for fuzz targets that need more than one public function of a module. Each accepts any
//! bytes and panics if an invariant does not hold. The server does not use this module.

use crate::region::{Memory, Slice};
use crate::shared_memory::{Registry, check_range, object_name};

/// Checks that an accepted key and range of a region stay inside the shared memory object.
pub fn shared_memory(data: &[u8]) {
    let Some((numbers, key)) = data.split_first_chunk::<24>() else { return };
    let number = |at: usize| {
        numbers
            .get(at..at + 8)
            .map_or(0, |bytes| bytes.iter().fold(0, |n, byte| n << 8 | u64::from(*byte)))
    };
    let offset = number(0);
    let byte_size = number(8);
    let object = number(16);
    let key = String::from_utf8_lossy(key);
    if let Ok(name) = object_name("r", &key) {
        assert!(!name.is_empty() && !name.contains('/') && name != "." && name != "..", "{name}");
    }
    if check_range("r", offset, byte_size, object).is_ok() {
        assert!(byte_size > 0 && u128::from(offset) + u128::from(byte_size) <= u128::from(object));
    }
    let mut registry = Registry::new(2);
    let memory = Memory::Cuda { device: 0, handle: Box::new([0; 64]) };
    if registry.insert(&key, object, memory).is_ok() {
        let mut slice = Slice::new(key.into_owned(), offset, byte_size);
        if registry.attach(&mut slice).is_ok() {
            assert!(u128::from(offset) + u128::from(byte_size) <= u128::from(object));
        }
    }
}
