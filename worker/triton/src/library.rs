//! Loads the library of a backend and finds its entry points.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::error::ErrorPointer;
use crate::functions;
use crate::loader::{find, open_library};
use crate::model::{Attributes, BackendObject, InstanceObject, ModelObject};
use crate::needs;
use crate::object::Object;
use crate::placeholder;
use crate::request::Request;

/// The name of the dependency that stands for Triton if a library has none.
const SERVER: &str = "libtritonserver.so";

pub(crate) type OfBackend = unsafe extern "C-unwind" fn(*mut Object<BackendObject>) -> ErrorPointer;
pub(crate) type OfAttributes = unsafe extern "C-unwind" fn(
    *mut Object<BackendObject>,
    *mut Object<Attributes>,
) -> ErrorPointer;
pub(crate) type OfModel = unsafe extern "C-unwind" fn(*mut Object<ModelObject>) -> ErrorPointer;
pub(crate) type OfInstance =
    unsafe extern "C-unwind" fn(*mut Object<InstanceObject>) -> ErrorPointer;
pub(crate) type Execute = unsafe extern "C-unwind" fn(
    *mut Object<InstanceObject>,
    *mut *mut Object<Request>,
    u32,
) -> ErrorPointer;

/// The entry points of a backend's library.
#[derive(Clone, Copy)]
pub(crate) struct Functions {
    pub(crate) initialize: Option<OfBackend>,
    pub(crate) finalize: Option<OfBackend>,
    pub(crate) attributes: Option<OfAttributes>,
    pub(crate) model_initialize: Option<OfModel>,
    pub(crate) model_finalize: Option<OfModel>,
    pub(crate) instance_initialize: Option<OfInstance>,
    pub(crate) instance_finalize: Option<OfInstance>,
    pub(crate) instance_ready: Option<OfInstance>,
    pub(crate) execute: Execute,
}

/// Loads a library.
///
/// # Errors
/// Why the file is not a backend, as the end of a sentence that begins with its path.
pub(crate) fn open(path: &Path) -> Result<Functions, String> {
    let bytes = std::fs::read(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => "does not exist".to_owned(),
        _ => format!("cannot be read: {error}"),
    })?;
    let needs = needs::of_bytes(&bytes)?;
    drop(bytes);
    let table = functions::table();
    let missing: Vec<&str> = needs
        .functions
        .iter()
        .map(String::as_str)
        .filter(|name| !table.iter().any(|(known, _)| known == name))
        .collect();
    if !missing.is_empty() {
        return Err(format!(
            "calls functions that this server does not have: {}; it was built for a newer or \
             different interface",
            missing.join(", ")
        ));
    }
    let mut servers = needs.servers;
    if servers.is_empty() {
        servers.push(SERVER.to_owned());
    }
    for server in servers {
        placeholder::load(&server, &table)?;
    }
    let name = CString::new(path.as_os_str().as_bytes())
        .map_err(|_| "has a NUL byte in its name".to_owned())?;
    let handle = open_library(&name, libc::RTLD_NOW | libc::RTLD_LOCAL).map_err(|reason| {
        // The loader's message begins with a path, usually this one.
        let own = format!("{}: ", path.display());
        format!("cannot be loaded: {}", reason.strip_prefix(&own).unwrap_or(&reason))
    })?;
    let backend = |name| find::<OfBackend>(handle, name);
    let model = |name| find::<OfModel>(handle, name);
    let instance = |name| find::<OfInstance>(handle, name);
    Ok(Functions {
        initialize: backend(c"TRITONBACKEND_Initialize"),
        finalize: backend(c"TRITONBACKEND_Finalize"),
        attributes: find(handle, c"TRITONBACKEND_GetBackendAttribute"),
        model_initialize: model(c"TRITONBACKEND_ModelInitialize"),
        model_finalize: model(c"TRITONBACKEND_ModelFinalize"),
        instance_initialize: instance(c"TRITONBACKEND_ModelInstanceInitialize"),
        instance_finalize: instance(c"TRITONBACKEND_ModelInstanceFinalize"),
        instance_ready: instance(c"TRITONBACKEND_ModelInstanceReady"),
        execute: find(handle, c"TRITONBACKEND_ModelInstanceExecute").ok_or_else(|| {
            "has no function TRITONBACKEND_ModelInstanceExecute: it is not a backend of Triton"
                .to_owned()
        })?,
    })
}
