//! `TRITONSERVER_InferenceTrace`: the trace of a request, which a backend passes to the requests that
//! it makes on its behalf, and to other tracers.

use std::ffi::{CString, c_char};

use pharos::timeline::Instant;
use pharos::wire::MAX_ACTIVITY_NAME;

use crate::error::interface;
use crate::fault::Fault;
use crate::foreign::{put, text};
use crate::object::{self, Object, kinds};
use crate::{process, values};

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
        object::give(child, object::get(trace)?.clone())
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

    /// `TRITONSERVER_InferenceTraceReportActivity`: adds a point to the trace of the request, at a
    /// time in nanoseconds of CLOCK_MONOTONIC.
    fn report_activity(trace: *const Object<Trace>, at: u64, name: *const c_char) {
        let trace = object::get(trace)?;
        let name = text(name, "the name of an activity")?;
        if name.len() > MAX_ACTIVITY_NAME {
            return Err(Fault::invalid(format!(
                "the name of an activity has {} bytes; at most {MAX_ACTIVITY_NAME} are allowed",
                name.len()
            )));
        }
        if let Some((batch, request)) = trace.place
            && let Some(runtime) = process::runtime()
        {
            runtime.report_activity(batch, request, name, Instant(at));
        }
        Ok(())
    }
}
