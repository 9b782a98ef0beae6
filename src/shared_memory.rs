//! The table of registered regions: checks names, keys and ranges, and tracks unregistered regions
//! while requests use them.
//!
//! Opens and maps no memory: `frontend/engine/src/shared_memory.rs` does after these checks. Texts
//! and codes are Triton's.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Weak};

use crate::error::{ErrorCode, InferError, Reason};
use crate::region::{Kind, MAX_NAME, Memory, Region, Slice};

/// The maximum length of a file name, bytes.
const MAX_FILE_NAME: usize = 255;

/// The prefix of the objects of Triton's Python backend.
const RESERVED: &str = "triton_python_backend_shm_region_";

/// Creates an error of this extension.
pub fn refusal(code: ErrorCode, text: impl Into<String>) -> InferError {
    InferError::new(code, Reason::SharedMemory, text)
}

/// Returns the error of a server that is started without client shared memory.
pub fn disabled() -> InferError {
    let text = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' \
                to enable.";
    refusal(ErrorCode::Unsupported, text)
}

/// Returns the name of the file for a key in the folder of POSIX shared memory objects. It has one
/// component, so that it cannot name a file outside the folder.
///
/// # Errors
/// The key does not name an object, or it names one that clients may not use.
pub fn object_name<'a>(region: &str, key: &'a str) -> Result<&'a str, InferError> {
    // `shm_open` accepts any number of leading slashes too.
    let name = key.trim_start_matches('/');
    if name.starts_with(RESERVED) {
        let text =
            format!("cannot register shared memory region '{region}' - invalid shm key '{key}'");
        return Err(refusal(ErrorCode::InvalidArg, text));
    }
    if matches!(name, "" | "." | "..") || name.contains(['/', '\0']) || name.len() > MAX_FILE_NAME {
        return Err(cannot_open(key));
    }
    Ok(name)
}

/// Returns the error for bytes that are not a CUDA IPC handle.
pub fn not_a_handle() -> InferError {
    refusal(ErrorCode::InvalidArg, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
}

/// Returns the error for an object that does not exist or cannot be opened.
pub fn cannot_open(key: &str) -> InferError {
    refusal(ErrorCode::Internal, format!("Unable to open shared memory region: '{key}'"))
}

/// Returns the error for a range whose end exceeds 64 bits.
fn overflow(Slice { name, offset, len, .. }: &Slice) -> InferError {
    let text = format!(
        "Integer overflow detected: byte_size ({len}) + offset ({offset}) exceeds maximum value \
         ({}) for region '{name}'",
        u64::MAX
    );
    refusal(ErrorCode::InvalidArg, text)
}

/// Checks that an object of `object` bytes contains a region.
///
/// # Errors
/// The object does not contain the region, or the region is empty.
pub fn check_range(
    region: &str,
    offset: u64,
    byte_size: u64,
    object: u64,
) -> Result<(), InferError> {
    match offset.checked_add(byte_size) {
        Some(end) if byte_size > 0 && end <= object => Ok(()),
        _ => {
            let text = format!("failed to register shared memory region '{region}': invalid args");
            Err(refusal(ErrorCode::InvalidArg, text))
        }
    }
}

/// The status of a region.
#[derive(Clone, Debug)]
pub struct Status {
    /// The region.
    pub region: Arc<Region>,
    /// The number of tensors of requests that use it now.
    pub in_use: u64,
}

/// The regions of both kinds, which share one namespace.
#[derive(Debug)]
pub struct Registry {
    regions: BTreeMap<String, Arc<Region>>,
    /// Unregistered regions that requests keep alive, in the order of unregistration.
    leaving: Vec<Weak<Region>>,
    next: u64,
    most: usize,
}

impl Registry {
    /// Creates an empty table for at most `most` regions.
    pub fn new(most: usize) -> Self {
        Self { regions: BTreeMap::new(), leaving: Vec::new(), next: 1, most }
    }

    /// Checks whether a region of this name can be added.
    ///
    /// # Errors
    /// The name is taken or too long, or there are too many regions.
    pub fn check_new(&self, name: &str) -> Result<(), InferError> {
        if self.regions.contains_key(name) {
            let text = format!("shared memory region '{name}' already in manager");
            return Err(refusal(ErrorCode::AlreadyExists, text));
        }
        if name.len() > MAX_NAME {
            let text = format!(
                "the name of a shared memory region has {} bytes; at most {MAX_NAME} are allowed",
                name.len()
            );
            return Err(refusal(ErrorCode::InvalidArg, text));
        }
        let leaving = self.leaving.iter().filter(|region| region.strong_count() > 0).count();
        if self.regions.len() + leaving >= self.most {
            let text = format!(
                "shared memory region '{name}' cannot be registered: {} regions are registered, \
                 the maximum that the limit of open files allows",
                self.most
            );
            return Err(refusal(ErrorCode::Unavailable, text));
        }
        Ok(())
    }

    /// Adds a region. An unregistered region of the same name that is still in use remains
    /// separate.
    ///
    /// # Errors
    /// The same as for [`Registry::check_new`].
    pub fn insert(&mut self, name: &str, byte_size: u64, memory: Memory) -> Result<(), InferError> {
        self.leaving.retain(|region| region.strong_count() > 0);
        self.check_new(name)?;
        let region = Region::new(self.next, name.to_owned(), byte_size, memory);
        self.next += 1;
        self.regions.insert(name.to_owned(), Arc::new(region));
        Ok(())
    }

    /// Looks up the region of a slice, which keeps it alive until the slice is dropped. As in
    /// Triton, finds an unregistered region too while it is in use.
    ///
    /// # Errors
    /// The name is not registered, or the region does not contain the range.
    pub fn attach(&self, slice: &mut Slice) -> Result<Kind, InferError> {
        let Some(region) = self.find(&slice.name) else {
            let text = format!("Unable to find shared memory region: '{}'", slice.name);
            return Err(refusal(ErrorCode::NotFound, text));
        };
        let wrong = |what: &str| {
            let text = format!("Invalid {what} for shared memory region: '{}'", slice.name);
            Err(refusal(ErrorCode::InvalidArg, text))
        };
        if slice.offset >= region.byte_size {
            return wrong("offset");
        }
        match slice.offset.checked_add(slice.len) {
            // As in Triton, an empty range is valid except at offset 0.
            Some(end) if end > 0 && end <= region.byte_size => {}
            Some(_) => return wrong("offset + byte size"),
            None => return Err(overflow(slice)),
        }
        let kind = region.kind();
        slice.attach(region);
        Ok(kind)
    }

    /// Returns the registered region of this name, otherwise the most recently unregistered one
    /// that is still in use.
    fn find(&self, name: &str) -> Option<Arc<Region>> {
        self.regions.get(name).cloned().or_else(|| {
            self.leaving.iter().rev().filter_map(Weak::upgrade).find(|region| region.name == name)
        })
    }

    /// Unregisters the region of this kind and name, or all regions of the kind. A region in use is
    /// removed after its last user; an unknown region is ignored.
    pub fn unregister(&mut self, kind: Kind, name: Option<&str>) {
        self.leaving.retain(|region| region.strong_count() > 0);
        let leaving = &mut self.leaving;
        let mut leave = |region: Arc<Region>| {
            let weak = Arc::downgrade(&region);
            drop(region);
            if weak.strong_count() > 0 {
                leaving.push(weak);
            }
        };
        match name {
            Some(name) => {
                if let Entry::Occupied(entry) = self.regions.entry(name.to_owned())
                    && entry.get().kind() == kind
                {
                    leave(entry.remove());
                }
            }
            None => self
                .regions
                .extract_if(.., |_, region| region.kind() == kind)
                .for_each(|(_, region)| leave(region)),
        }
    }

    /// Returns the region of this kind and name, or all regions of the kind by name. Includes
    /// unregistered regions that are still in use, unless their names have been registered again.
    ///
    /// # Errors
    /// No region has this name, or it is of the other kind.
    pub fn status(&self, kind: Kind, name: Option<&str>) -> Result<Vec<Status>, InferError> {
        let mut all: BTreeMap<&str, Status> = BTreeMap::new();
        let leaving: Vec<Arc<Region>> = self.leaving.iter().filter_map(Weak::upgrade).collect();
        for region in leaving.iter().chain(self.regions.values()) {
            // The table's reference to a region, or the one above, does not count.
            let in_use = Arc::strong_count(region).saturating_sub(1) as u64;
            all.insert(&region.name, Status { region: Arc::clone(region), in_use });
        }
        let Some(name) = name else {
            return Ok(all.into_values().filter(|status| status.region.kind() == kind).collect());
        };
        let what = |kind: Kind| if kind == Kind::System { "system" } else { "CUDA" };
        match all.remove(name) {
            Some(status) if status.region.kind() == kind => Ok(vec![status]),
            Some(status) => {
                let is = what(status.region.kind());
                let wanted = what(kind);
                let text = format!(
                    "The region named '{name}' is registered as {is} shared memory, not {wanted} \
                     shared memory"
                );
                Err(refusal(ErrorCode::NotFound, text))
            }
            None => {
                let text =
                    format!("Unable to find {} shared memory region: '{name}'", kind.as_str());
                Err(refusal(ErrorCode::NotFound, text))
            }
        }
    }

    /// Returns the number of regions of a kind (unregistered ones in use included), their bytes,
    /// and the tensors that use them now.
    pub fn totals(&self, kind: Kind) -> (u64, u64, u64) {
        let leaving = self.leaving.iter().filter_map(Weak::upgrade);
        let all =
            leaving.chain(self.regions.values().cloned()).filter(|region| region.kind() == kind);
        // The references of the table and of this iteration do not count.
        all.fold((0, 0, 0), |(count, bytes, used), region| {
            let kept = usize::from(
                self.regions.get(&region.name).is_some_and(|kept| kept.id == region.id),
            );
            let users = Arc::strong_count(&region).saturating_sub(1 + kept) as u64;
            (count + 1, bytes + region.byte_size, used + users)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn memory(kind: Kind) -> Memory {
        match kind {
            Kind::System => {
                let file = crate::shm::create("test", 4096).unwrap();
                Memory::System { key: "/k".into(), offset: 0, file }
            }
            Kind::Cuda => Memory::Cuda { device: 0, handle: Box::new([0; 64]) },
        }
    }

    fn refused<T: std::fmt::Debug>(result: Result<T, InferError>) -> (ErrorCode, String) {
        let error = result.unwrap_err();
        (error.code, error.message)
    }

    fn names(registry: &Registry, kind: Kind) -> Vec<(String, u64)> {
        let all = registry.status(kind, None).unwrap();
        all.into_iter().map(|status| (status.region.name.clone(), status.in_use)).collect()
    }

    proptest::proptest! {
        #[test]
        fn accepts_no_key_or_range_outside_an_object(
            numbers in proptest::array::uniform3(proptest::prelude::prop_oneof![0u64..100, proptest::num::u64::ANY]),
            key in "/{0,2}[./a\0]{0,6}",
        ) {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_be_bytes()).chain(key.bytes()).collect();
            crate::fuzzing::shared_memory(&bytes);
        }
    }

    #[test]
    fn a_key_names_a_file_in_the_folder() {
        for (key, name) in [("/a", "a"), ("a", "a"), ("//a", "a"), ("/...", "..."), ("/a b", "a b")]
        {
            assert_eq!(object_name("r", key), Ok(name));
        }
        let long = "k".repeat(256);
        for key in [
            "",
            "/",
            ".",
            "..",
            "/..",
            "a/b",
            "/a/",
            "../shm/a",
            "/dev/shm/a",
            "a\0",
            "/proc/self/fd/3",
            &long,
        ] {
            let text = format!("Unable to open shared memory region: '{key}'");
            assert_eq!(refused(object_name("r", key)), (ErrorCode::Internal, text));
        }
        for key in ["triton_python_backend_shm_region_1", "/triton_python_backend_shm_region_1"] {
            let text =
                format!("cannot register shared memory region 'r' - invalid shm key '{key}'");
            assert_eq!(refused(object_name("r", key)), (ErrorCode::InvalidArg, text));
        }
    }

    #[test]
    fn refuses_ranges_outside_an_object_or_region() {
        for (offset, byte_size, fits) in [
            (0, 10, true),
            (9, 1, true),
            (0, 0, false),
            (10, 0, false),
            (9, 2, false),
            (u64::MAX, 2, false),
            (2, u64::MAX, false),
        ] {
            assert_eq!(
                check_range("r", offset, byte_size, 10).is_ok(),
                fits,
                "{byte_size} bytes at {offset}"
            );
        }
        let mut registry = Registry::new(9);
        registry.insert("r", 10, memory(Kind::System)).unwrap();
        let mut far = Slice::new("r".into(), 9, u64::MAX);
        let text = "Integer overflow detected: byte_size (18446744073709551615) + offset (9) \
                    exceeds maximum value (18446744073709551615) for region 'r'";
        assert_eq!(refused(registry.attach(&mut far)), (ErrorCode::InvalidArg, text.into()));
        for (offset, len, wrong) in [
            (0, 10, None),
            (9, 1, None),
            (1, 0, None),
            (10, 0, Some("offset")),
            (u64::MAX, 2, Some("offset")),
            (9, 2, Some("offset + byte size")),
            (9, u64::MAX - 9, Some("offset + byte size")),
            (0, 0, Some("offset + byte size")),
        ] {
            let expected =
                wrong.map(|what| format!("Invalid {what} for shared memory region: 'r'"));
            let got = registry
                .attach(&mut Slice::new("r".into(), offset, len))
                .err()
                .map(|error| error.message);
            assert_eq!(got, expected, "{offset} {len}");
        }
        let unknown = refused(registry.attach(&mut Slice::new("s".into(), 0, 1)));
        assert_eq!(
            unknown,
            (ErrorCode::NotFound, "Unable to find shared memory region: 's'".into())
        );
    }

    #[test]
    fn an_unregistered_region_is_removed_after_its_last_user() {
        let mut registry = Registry::new(9);
        registry.insert("r", 4096, memory(Kind::System)).unwrap();
        assert_eq!(
            refused(registry.insert("r", 1, memory(Kind::Cuda))).0,
            ErrorCode::AlreadyExists
        );
        let mut slice = Slice::new("r".into(), 0, 8);
        registry.attach(&mut slice).unwrap();
        let copy = slice.clone();
        assert_eq!(names(&registry, Kind::System), [("r".into(), 2)]);
        assert_eq!(registry.totals(Kind::System), (1, 4096, 2));
        registry.unregister(Kind::Cuda, Some("r"));
        registry.unregister(Kind::Cuda, None);
        registry.unregister(Kind::System, Some("nothing"));
        registry.attach(&mut Slice::new("r".into(), 0, 8)).unwrap();
        registry.unregister(Kind::System, Some("r"));
        // Look-ups find it until its last user is done, and the status shows it.
        let mut late = Slice::new("r".into(), 0, 8);
        assert_eq!(registry.attach(&mut late), Ok(Kind::System));
        assert_eq!(names(&registry, Kind::System), [("r".into(), 3)]);
        registry.unregister(Kind::System, Some("r"));
        drop(slice);
        drop(late);
        assert_eq!(names(&registry, Kind::System), [("r".into(), 1)]);
        assert_eq!(registry.totals(Kind::System), (1, 4096, 1));
        // The name can be registered again; the status and look-ups then find the new region.
        registry.insert("r", 100, memory(Kind::System)).unwrap();
        let mut new = Slice::new("r".into(), 0, 8);
        registry.attach(&mut new).unwrap();
        assert_eq!(new.region().unwrap().byte_size, 100);
        drop(new);
        let status = registry.status(Kind::System, Some("r")).unwrap();
        assert_eq!((status.len(), status[0].region.byte_size, status[0].in_use), (1, 100, 0));
        drop(status);
        assert_eq!(registry.totals(Kind::System), (2, 4196, 1));
        drop(copy);
        assert_eq!(registry.totals(Kind::System), (1, 100, 0));
        registry.unregister(Kind::System, None);
        registry.attach(&mut Slice::new("r".into(), 0, 8)).unwrap_err();
        assert!(names(&registry, Kind::System).is_empty());
        assert_eq!(refused(registry.status(Kind::System, Some("r"))).0, ErrorCode::NotFound);
    }

    #[test]
    fn both_kinds_share_one_bounded_namespace() {
        let mut registry = Registry::new(2);
        registry.insert("c", 64, memory(Kind::Cuda)).unwrap();
        let (code, text) = refused(registry.status(Kind::System, Some("c")));
        let expected =
            "The region named 'c' is registered as CUDA shared memory, not system shared memory";
        assert_eq!((code, text.as_str()), (ErrorCode::NotFound, expected));
        let long = "n".repeat(MAX_NAME + 1);
        assert_eq!(refused(registry.insert(&long, 1, memory(Kind::Cuda))).0, ErrorCode::InvalidArg);
        registry.insert(&long[1..], 1, memory(Kind::Cuda)).unwrap();
        assert_eq!(refused(registry.insert("d", 1, memory(Kind::Cuda))).0, ErrorCode::Unavailable);
        // An unregistered region in use counts: its file is open.
        let mut slice = Slice::new("c".into(), 0, 8);
        registry.attach(&mut slice).unwrap();
        registry.unregister(Kind::Cuda, Some("c"));
        assert_eq!(refused(registry.insert("d", 1, memory(Kind::Cuda))).0, ErrorCode::Unavailable);
        drop(slice);
        registry.insert("d", 1, memory(Kind::Cuda)).unwrap();
    }
}
