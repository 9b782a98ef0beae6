//! `TRITONSERVER_Message`: JSON; `TRITONSERVER_Parameter`: a named value.

use std::ffi::{CString, c_char, c_int, c_void};

use pharos::infer::Parameter;

use crate::error::interface;
use crate::fault::Fault;
use crate::foreign::{bytes, c_text, put, text};
use crate::object::{self, Object, kinds};

/// `TRITONSERVER_Message`. Backends read its text up to the size, and some up to a NUL.
pub(crate) struct Message {
    text: CString,
    /// Whether it belongs to a backend or an instance, and so not to the library.
    is_lent: bool,
}

/// `TRITONSERVER_Parameter`.
pub(crate) struct OwnParameter {
    pub(crate) name: String,
    /// `None` for bytes, which are not an inference parameter.
    pub(crate) value: Option<Parameter>,
    /// The content of bytes. Like Triton, this does not copy them: they belong to the library.
    pub(crate) bytes: (*const c_char, usize),
}

kinds! {
    Message = 2, "a message";
    OwnParameter = 3, "a parameter";
}

impl Message {
    pub(crate) fn new(json: &str) -> Self {
        Self { text: c_text(json), is_lent: false }
    }

    /// Creates a message that the library reads and must not delete.
    pub(crate) fn lent(json: &str) -> Self {
        Self { is_lent: true, ..Self::new(json) }
    }

    pub(crate) fn is_lent(&self) -> bool {
        self.is_lent
    }

    pub(crate) fn json(&self) -> &str {
        self.text.to_str().unwrap_or_default()
    }
}

/// The kinds of parameters. `TRITONSERVER_ParameterType`.
pub(crate) const STRING: c_int = 0;
pub(crate) const INT: c_int = 1;
pub(crate) const BOOL: c_int = 2;
pub(crate) const DOUBLE: c_int = 3;

interface! {
    /// `TRITONSERVER_MessageNewFromSerializedJson`.
    fn message_new(message: *mut *mut Object<Message>, base: *const c_char, size: usize) {
        let text = str::from_utf8(bytes(base, size, "the text of a message")?)
            .map_err(|_| Fault::invalid("the text of a message is not UTF-8"))?;
        let parsed: Result<&serde_json::value::RawValue, _> = serde_json::from_str(text.trim_end_matches('\0'));
        parsed.map_err(|error| Fault::invalid(format!("failed to parse the JSON of a message: {error}")))?;
        object::give(message, Message::new(text))
    }

    /// `TRITONSERVER_MessageDelete`.
    fn message_delete(message: *mut Object<Message>) {
        if !message.is_null() && object::get(message)?.is_lent() {
            return Err(Fault::invalid(
                "a message is deleted that belongs to the backend or to the instance",
            ));
        }
        object::delete(message)
    }

    /// `TRITONSERVER_MessageSerializeToJson`. The text ends with a NUL that is not counted.
    fn message_json(message: *const Object<Message>, base: *mut *const c_char, size: *mut usize) {
        let message = object::get(message)?;
        put(base, message.text.as_ptr())?;
        put(size, message.text.as_bytes().len())
    }
}

/// `TRITONSERVER_ParameterNew`; null if the kind is unknown.
///
/// # Safety
/// The contract of this package: the value is a string, or points to a value of the kind.
pub(crate) unsafe extern "C" fn parameter_new(
    name: *const c_char,
    kind: c_int,
    value: *const c_void,
) -> *mut Object<OwnParameter> {
    // SAFETY: the caller guarantees it.
    let parameter = unsafe { text(name, "the name of a parameter") }.and_then(|name| {
        // SAFETY: as above.
        let value = unsafe { value_of(kind, value) }?;
        Ok(OwnParameter { name: name.to_owned(), value: Some(value), bytes: (std::ptr::null(), 0) })
    });
    match parameter {
        Ok(parameter) => object::make(parameter),
        Err(fault) => {
            pharos_backend::log('E', &format!("TRITONSERVER_ParameterNew: {}", fault.text));
            std::ptr::null_mut()
        }
    }
}

/// # Safety
/// As for [`parameter_new`].
unsafe fn value_of(kind: c_int, value: *const c_void) -> Result<Parameter, Fault> {
    if value.is_null() {
        return Err(Fault::invalid("the value of a parameter is NULL"));
    }
    // SAFETY: the caller guarantees it; the values need not be aligned.
    unsafe {
        match kind {
            STRING => text(value.cast(), "the value of a parameter")
                .map(|text| Parameter::String(text.to_owned())),
            INT => Ok(Parameter::Int(value.cast::<i64>().read_unaligned())),
            BOOL => Ok(Parameter::Bool(value.cast::<u8>().read() != 0)),
            DOUBLE => Ok(Parameter::Double(value.cast::<f64>().read_unaligned())),
            kind => Err(Fault::invalid(format!(
                "the type of a parameter is {kind}; 0 (string), 1 (int), 2 (bool) and 3 (double) are allowed"
            ))),
        }
    }
}

/// `TRITONSERVER_ParameterBytesNew`.
///
/// # Safety
/// The contract of this package: the bytes live as long as the parameter.
pub(crate) unsafe extern "C" fn parameter_bytes_new(
    name: *const c_char,
    base: *const c_char,
    size: u64,
) -> *mut Object<OwnParameter> {
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    // SAFETY: the caller guarantees it.
    let name = unsafe { text(name, "the name of a parameter") }.ok();
    name.map_or(std::ptr::null_mut(), |name| {
        object::make(OwnParameter { name: name.to_owned(), value: None, bytes: (base, size) })
    })
}

/// `TRITONSERVER_ParameterDelete`.
///
/// # Safety
/// The contract of this package.
pub(crate) unsafe extern "C" fn parameter_delete(parameter: *mut Object<OwnParameter>) {
    // SAFETY: the caller guarantees it. A pointer that is not valid is ignored: the function cannot
    // report it.
    drop(unsafe { object::take(parameter) });
}
