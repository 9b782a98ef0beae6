//! The server, as the C interface of backends gives it: safe forms of the functions that this
//! backend uses. Source of the contracts: `pharos_backend.h`.

#[allow(
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    unused_qualifications,
    clippy::all
)]
pub(crate) mod interface {
    include!(concat!(env!("OUT_DIR"), "/interface.rs"));
}

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::slice;

use interface::{pharos_code, pharos_context, pharos_host, pharos_output};

/// Why a request or a load failed, for its client or for the author of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: pharos_code,
    pub(crate) message: String,
}

impl Failure {
    fn new(code: u32, message: impl Into<String>) -> Self {
        Self { code: code as pharos_code, message: message.into() }
    }

    /// The request is wrong: repeating it does not help.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(interface::PHAROS_INVALID_ARG, message)
    }

    /// The backend is at fault.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(interface::PHAROS_INTERNAL, message)
    }
}

/// Returns the text of the server at a pointer; empty for null.
///
/// # Safety
/// The pointer is null, or at a string that ends with a NUL.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the caller guarantees it.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// Returns a text for the server; it ends at the first NUL.
fn c_text(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}

/// Levels of log lines.
#[derive(Clone, Copy)]
pub(crate) enum Level {
    Info = interface::PHAROS_LOG_INFO as isize,
    Warning = interface::PHAROS_LOG_WARNING as isize,
    Verbose = interface::PHAROS_LOG_VERBOSE as isize,
}

/// The functions of the server. They may be called from any thread, as long as the process lives.
#[derive(Clone, Copy)]
pub(crate) struct Host(&'static pharos_host);

/// Calls a function of the server. The tables of all servers have these functions.
macro_rules! call {
    ($host:expr, $function:ident($($argument:expr),*)) => {{
        let function = $host.0.$function.expect("the server has the function");
        // SAFETY: the arguments follow the contract of the function; each caller says why.
        unsafe { function($($argument),*) }
    }};
}

impl Host {
    /// Returns the reason of the last failed call of this thread.
    fn last_error(self) -> String {
        let message = call!(self, last_error());
        // SAFETY: the text is valid until the next failed call of this thread.
        unsafe { text(message) }
    }

    /// Returns the failure of a call with this code, if it failed.
    fn outcome(self, code: pharos_code) -> Result<(), Failure> {
        match code {
            0 => Ok(()),
            code => Err(Failure { code, message: self.last_error() }),
        }
    }

    /// Writes a line to the server's log.
    pub(crate) fn log(self, level: Level, message: &str) {
        // The text is copied before the call returns.
        call!(self, log(level as i32, c_text(message).as_ptr()));
    }
}

/// The data that an instance is created from.
pub(crate) struct Context<'a> {
    raw: &'a pharos_context,
    pub(crate) host: Host,
    /// The directory of the version, with the files of the model.
    pub(crate) directory: String,
    pub(crate) model: String,
    pub(crate) instance: String,
    pub(crate) version: u64,
    /// The threads that one execution may use.
    pub(crate) threads: u32,
    pub(crate) is_decoupled: bool,
}

impl<'a> Context<'a> {
    /// Reads what the server passes to `pharos_backend_create`.
    ///
    /// # Safety
    /// The server has passed the pointer, and `pharos_backend_create` has not returned.
    pub(crate) unsafe fn read(raw: *const pharos_context) -> Option<Self> {
        // SAFETY: the caller guarantees it; the table lives as long as the process.
        let (raw, table) = unsafe {
            let raw = raw.as_ref::<'a>()?;
            (raw, raw.host.as_ref::<'static>()?)
        };
        // SAFETY: the strings of a context end with a NUL.
        let [directory, model, instance] =
            unsafe { [text(raw.directory), text(raw.model), text(raw.instance)] };
        Some(Self {
            raw,
            host: Host(table),
            directory,
            model,
            instance,
            version: raw.version,
            threads: raw.threads,
            is_decoupled: raw.decoupled != 0,
        })
    }

    /// Returns a parameter of the configuration.
    pub(crate) fn parameter(&self, name: &str) -> Option<String> {
        // The context is valid while the model is created.
        let value = call!(self.host, config_parameter(self.raw, c_text(name).as_ptr()));
        // SAFETY: as above.
        (!value.is_null()).then(|| unsafe { text(value) })
    }

    /// Returns the field `default_model_filename` of the configuration; `None` if it has none.
    pub(crate) fn model_file(&self) -> Option<String> {
        // SAFETY: the string of a context ends with a NUL.
        let config: serde_json::Value =
            serde_json::from_str(&unsafe { text(self.raw.config) }).ok()?;
        let name = config.get("default_model_filename")?.as_str()?;
        (!name.is_empty()).then(|| name.to_owned())
    }

    /// Returns the positions of the outputs of the configuration by their names.
    pub(crate) fn outputs(&self) -> Vec<String> {
        let mut names = Vec::new();
        loop {
            let tensor = call!(self.host, config_output(self.raw, names.len()));
            // SAFETY: valid while the model is created.
            match unsafe { tensor.as_ref() } {
                // SAFETY: as above.
                Some(tensor) => names.push(unsafe { text(tensor.name) }),
                None => return names,
            }
        }
    }

    /// Returns a function that reports how much of the model is loaded, from 0 to 1. It has no effect
    /// if the server is older than this report.
    ///
    /// # Safety
    /// The function is called only until `pharos_backend_create` returns.
    pub(crate) unsafe fn progress_reporter(&self) -> impl Fn(f32) + 'static {
        let host = self.host;
        let context = ptr::from_ref(self.raw);
        let has_function =
            host.0.size >= offset_of!(pharos_host, report_load_progress) + size_of::<usize>();
        move |fraction| {
            if has_function {
                // The caller guarantees that the context is valid.
                call!(host, report_load_progress(context, fraction.into()));
            }
        }
    }

    /// Refuses to load the model. Returns what `pharos_backend_create` returns.
    pub(crate) fn fail_load(&self, message: &str) -> pharos_code {
        call!(self.host, fail_load(self.raw, c_text(message).as_ptr()))
    }

    /// Returns a gauge of this instance, with the labels `model`, `version` and `instance`; `None`
    /// if the server does not record it.
    pub(crate) fn gauge(&self, name: &str) -> Option<Gauge> {
        self.gauges(name)?.with(&[])
    }

    /// Returns the gauges of this instance whose further labels have values that become known later;
    /// `None` if the server does not record them.
    pub(crate) fn gauges(&self, name: &str) -> Option<GaugeFamily> {
        let mut metric = ptr::null_mut();
        let kind = interface::PHAROS_GAUGE as i32;
        let name = c_text(name);
        let found =
            call!(self.host, metric_get(self.raw.metrics, kind, name.as_ptr(), &raw mut metric));
        let metric = NonNull::new(metric).filter(|_| found == 0)?;
        let labels =
            [&self.model, &self.version.to_string(), &self.instance].map(|value| c_text(value));
        Some(GaugeFamily { host: self.host, metric, labels })
    }
}

/// Gauges of an instance that differ in the labels after `model`, `version` and `instance`.
pub(crate) struct GaugeFamily {
    host: Host,
    metric: NonNull<interface::pharos_metric>,
    labels: [CString; 3],
}

// SAFETY: metrics may be used on any thread, until the instance is destroyed, which waits for the
// thread of the engine.
unsafe impl Send for GaugeFamily {}

impl GaugeFamily {
    /// Returns the gauge with these values of the further labels; `None` if the metric has other
    /// labels.
    pub(crate) fn with(&self, further: &[&str]) -> Option<Gauge> {
        let further: Vec<CString> = further.iter().map(|value| c_text(value)).collect();
        let values = self.labels.iter().chain(&further);
        let pointers: Vec<_> = values.map(|value| value.as_ptr()).collect();
        let mut series = ptr::null_mut();
        // The values are copied before the call returns.
        let made = call!(
            self.host,
            metric_series(self.metric.as_ptr(), pointers.as_ptr(), pointers.len(), &raw mut series)
        );
        let series = NonNull::new(series).filter(|_| made == 0)?;
        Some(Gauge { host: self.host, series })
    }
}

/// A gauge of an instance.
pub(crate) struct Gauge {
    host: Host,
    series: NonNull<interface::pharos_series>,
}

// SAFETY: a sample may be recorded on any thread, until the instance is destroyed, which waits for
// the thread of the engine.
unsafe impl Send for Gauge {}

impl Gauge {
    /// Records the value.
    pub(crate) fn set(&self, value: f64) {
        let request = i64::from(interface::PHAROS_NO_REQUEST);
        call!(self.host, add_or_update(self.series.as_ptr(), value, request));
    }
}

/// A batch while it is executed.
pub(crate) struct Batch<'a> {
    host: Host,
    batch: &'a interface::pharos_batch,
    outputs: *mut interface::pharos_outputs,
}

/// The value of a parameter of a request.
pub(crate) type ParameterValue = serde_json::Value;

impl<'a> Batch<'a> {
    /// Takes what the server passes to `pharos_backend_execute`.
    ///
    /// # Safety
    /// The server has passed the pointers, and `pharos_backend_execute` has not returned.
    pub(crate) unsafe fn new(
        host: Host,
        batch: *const interface::pharos_batch,
        outputs: *mut interface::pharos_outputs,
    ) -> Option<Self> {
        // SAFETY: the caller guarantees it.
        let batch = unsafe { batch.as_ref::<'a>() }?;
        Some(Self { host, batch, outputs })
    }

    /// Returns the number of requests.
    pub(crate) fn len(&self) -> usize {
        call!(self.host, request_count(self.batch))
    }

    /// Returns an input that has one row for each request; `None` if it is absent.
    pub(crate) fn input(&self, name: &str) -> Option<Input<'a>> {
        for position in 0.. {
            let input = call!(self.host, input(self.batch, position));
            // SAFETY: valid until the execution is over.
            let input = unsafe { input.as_ref::<'a>() }?;
            // SAFETY: as above.
            if unsafe { text(input.name) } == name {
                let data = match input.bytes {
                    0 => &[],
                    // SAFETY: as above; the server gives the length.
                    bytes => unsafe { slice::from_raw_parts(input.data.cast::<u8>(), bytes) },
                };
                return Some(Input { datatype: input.datatype as u32, data });
            }
        }
        None
    }

    /// Returns the parameters of a request by name.
    pub(crate) fn parameters(&self, request: usize) -> serde_json::Map<String, ParameterValue> {
        let mut found = serde_json::Map::new();
        for position in 0.. {
            let parameter = call!(self.host, request_parameter(self.batch, request, position));
            // SAFETY: valid until the execution is over.
            let Some(parameter) = (unsafe { parameter.as_ref() }) else { break };
            let value = match parameter.kind as u32 {
                interface::PHAROS_KIND_BOOL => (parameter.boolean != 0).into(),
                interface::PHAROS_KIND_INT => parameter.integer.into(),
                interface::PHAROS_KIND_UINT => parameter.natural.into(),
                interface::PHAROS_KIND_DOUBLE => parameter.real.into(),
                // SAFETY: as above.
                _ => unsafe { text(parameter.text) }.into(),
            };
            // SAFETY: as above.
            found.insert(unsafe { text(parameter.name) }, value);
        }
        found
    }

    /// Fails a request.
    pub(crate) fn fail(&self, request: usize, failure: &Failure) {
        let message = c_text(&failure.message);
        call!(self.host, fail(self.outputs, request, failure.code, message.as_ptr()));
    }

    /// Takes a request out of the batch, to answer it later.
    pub(crate) fn detach(&self, request: usize) -> Result<Responder, Failure> {
        let mut responder = ptr::null_mut();
        self.host.outcome(call!(self.host, detach(self.outputs, request, &raw mut responder)))?;
        let raw = NonNull::new(responder)
            .ok_or_else(|| Failure::internal("the server gave no responder"))?;
        Ok(Responder { host: self.host, raw })
    }
}

/// An input of a batch.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    pub(crate) datatype: u32,
    /// The elements of all requests.
    pub(crate) data: &'a [u8],
}

impl<'a> Input<'a> {
    /// Returns the text of a request; `None` if the input is not a string for each request.
    pub(crate) fn string(&self, request: usize) -> Option<&'a str> {
        if self.datatype != interface::PHAROS_BYTES {
            return None;
        }
        let mut rest = self.data;
        for position in 0.. {
            let (length, after) = rest.split_first_chunk::<4>()?;
            let (element, after) = after.split_at_checked(u32::from_le_bytes(*length) as usize)?;
            if position == request {
                return std::str::from_utf8(element).ok();
            }
            rest = after;
        }
        None
    }

    /// Returns the elements of a batch of one request; `None` if they are not natural numbers of 32
    /// bits.
    pub(crate) fn naturals(&self) -> Option<Vec<u32>> {
        let chunks = self.data.as_chunks::<4>();
        let is_natural = self.datatype == interface::PHAROS_UINT32 && chunks.1.is_empty();
        is_natural.then(|| chunks.0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    /// Returns the integer of a request; `None` if the input is not an integer of 32 bits for each
    /// request.
    pub(crate) fn integer(&self, request: usize) -> Option<i32> {
        let is_integer = self.datatype == interface::PHAROS_INT32;
        let bytes = self.data.as_chunks::<4>().0.get(request).filter(|_| is_integer)?;
        Some(i32::from_le_bytes(*bytes))
    }

    /// Returns the flag of a request; `None` if the input is not a boolean for each request.
    pub(crate) fn boolean(&self, request: usize) -> Option<bool> {
        let is_boolean = self.datatype == interface::PHAROS_BOOL;
        self.data.get(request).filter(|_| is_boolean).map(|byte| *byte != 0)
    }
}

/// An output of a response.
pub(crate) struct Output<'a> {
    /// Its position in the configuration.
    pub(crate) index: usize,
    pub(crate) data: Elements<'a>,
}

/// The elements of a tensor of one dimension.
pub(crate) enum Elements<'a> {
    Strings(Vec<&'a [u8]>),
    Naturals(&'a [u32]),
    Reals(&'a [f32]),
}

/// Answers a request, from any thread. A request that has not had its last response fails when it
/// is dropped.
pub(crate) struct Responder {
    host: Host,
    raw: NonNull<interface::pharos_responder>,
}

// SAFETY: the functions of a responder may be called from any thread.
unsafe impl Send for Responder {}

impl Responder {
    /// Returns whether the client has left, or its deadline has passed.
    pub(crate) fn is_cancelled(&self) -> bool {
        call!(self.host, responder_is_cancelled(self.raw.as_ptr())) != 0
    }

    /// Returns whether a response can be sent without a wait for the client.
    pub(crate) fn is_ready(&self) -> bool {
        let table = self.host.0;
        let has_function =
            table.size >= offset_of!(pharos_host, responder_ready) + size_of::<usize>();
        !has_function || call!(self.host, responder_ready(self.raw.as_ptr())) != 0
    }

    /// Holds the responses of all requests, or sends them together.
    pub(crate) fn hold_responses(&self, hold: bool) {
        let table = self.host.0;
        if table.size >= offset_of!(pharos_host, responder_hold) + size_of::<usize>() {
            call!(self.host, responder_hold(self.raw.as_ptr(), hold.into()));
        }
    }

    /// Sends a response.
    pub(crate) fn respond(&self, outputs: &[Output<'_>], is_last: bool) -> Result<(), Failure> {
        let mut response = ptr::null_mut();
        self.host
            .outcome(call!(self.host, responder_begin(self.raw.as_ptr(), &raw mut response)))?;
        for output in outputs {
            if let Err(failure) = self.write(response, output) {
                call!(self.host, response_drop(response));
                return Err(failure);
            }
        }
        self.host.outcome(call!(self.host, response_send(response, is_last.into())))
    }

    fn write(
        &self,
        response: *mut interface::pharos_response,
        output: &Output<'_>,
    ) -> Result<(), Failure> {
        let (datatype, elements, bytes) = match &output.data {
            Elements::Strings(strings) => {
                let bytes = strings.iter().map(|string| string.len() + 4).sum();
                (interface::PHAROS_BYTES, strings.len(), bytes)
            }
            Elements::Naturals(numbers) => {
                (interface::PHAROS_UINT32, numbers.len(), size_of_val(*numbers))
            }
            Elements::Reals(numbers) => {
                (interface::PHAROS_FP32, numbers.len(), size_of_val(*numbers))
            }
        };
        let shape = [elements as i64];
        let wanted = pharos_output {
            size: size_of::<pharos_output>(),
            index: output.index,
            shape: shape.as_ptr(),
            rank: shape.len(),
            bytes,
            datatype: datatype as i32,
        };
        let mut memory: *mut c_void = ptr::null_mut();
        self.host.outcome(call!(
            self.host,
            response_allocate(response, &raw const wanted, &raw mut memory)
        ))?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the server has allocated this many bytes, which only this thread writes.
        let memory = unsafe { slice::from_raw_parts_mut(memory.cast::<u8>(), bytes) };
        match &output.data {
            Elements::Strings(strings) => {
                let mut rest = memory;
                for string in strings {
                    let (length, after) = rest.split_at_mut(4);
                    length.copy_from_slice(&(string.len() as u32).to_le_bytes());
                    let (text, after) = after.split_at_mut(string.len());
                    text.copy_from_slice(string);
                    rest = after;
                }
            }
            Elements::Naturals(numbers) => {
                for (place, number) in memory.chunks_exact_mut(4).zip(*numbers) {
                    place.copy_from_slice(&number.to_le_bytes());
                }
            }
            Elements::Reals(numbers) => {
                for (place, number) in memory.chunks_exact_mut(4).zip(*numbers) {
                    place.copy_from_slice(&number.to_le_bytes());
                }
            }
        }
        Ok(())
    }

    /// Ends the request with an error.
    pub(crate) fn fail(&self, failure: &Failure) {
        let message = c_text(&failure.message);
        call!(self.host, responder_fail(self.raw.as_ptr(), failure.code, message.as_ptr()));
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        call!(self.host, responder_drop(self.raw.as_ptr()));
    }
}
