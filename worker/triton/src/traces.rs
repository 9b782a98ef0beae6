//! `TRITONSERVER_InferenceTrace`: the trace of a request, which a backend passes to the requests that
//! it makes on its behalf, and to other tracers.

use std::ffi::{CString, c_char};

use crate::error::interface;
use crate::foreign::{put, text};
use crate::object::{self, Object, kinds};
use crate::values;

/// `TRITONSERVER_InferenceTrace`.
#[derive(Clone)]
pub(crate) struct Trace {
    /// The batch, and the position in it, of the traced request.
    pub(crate) place: Option<(u64, u32)>,
    /// The W3C trace context as JSON, if a collector receives the trace.
    pub(crate) context: Option<CString>,
}

kinds! { Trace = 23, "a trace"; }

interface! {
    /// `TRITONSERVER_InferenceTraceSpawnChildTrace`.
    fn spawn_child(trace: *const Object<Trace>, child: *mut *mut Object<Trace>) {
        put(child, object::make(object::get(trace)?.clone()))
    }

    /// `TRITONSERVER_InferenceTraceDelete`.
    fn delete(trace: *mut Object<Trace>) {
        object::delete(trace)
    }

    /// `TRITONSERVER_InferenceTraceContext`: JSON, or null.
    fn context(trace: *const Object<Trace>, context: *mut *const c_char) {
        let found = object::get(trace)?.context.as_ref();
        put(context, found.map_or(std::ptr::null(), |found| found.as_ptr()))
    }

    /// `TRITONSERVER_InferenceTraceSetContext`.
    fn set_context(trace: *const Object<Trace>, context: *const c_char) {
        object::get(trace)?;
        text(context, "the context of a trace")?;
        Err(values::unsupported("TRITONSERVER_InferenceTraceSetContext"))
    }

    /// `TRITONSERVER_InferenceTraceReportActivity`.
    fn report_activity(trace: *const Object<Trace>, _at: u64, name: *const c_char) {
        object::get(trace)?;
        text(name, "the name of an activity")?;
        Err(values::unsupported("TRITONSERVER_InferenceTraceReportActivity"))
    }
}
