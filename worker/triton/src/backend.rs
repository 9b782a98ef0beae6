//! Runs a backend's library for one instance of one model: the order of its entry points, and the
//! requests of each batch.

use std::path::Path;
use std::sync::Arc;

use pharos::error::InferError;
use pharos::timeline::Instant;
use pharos_backend::{
    Backend, Batch, Context, DeviceInputs, Outputs, Readiness, ReceivedPart, in_clients_order,
    load_error,
};

use crate::answer::{Answer, Channel};
use crate::error::{self, ErrorPointer};
use crate::joined;
use crate::kept::{Kept, Releases};
use crate::library::{self, Functions};
use crate::model::{
    Attributes, BackendDescription, BackendObject, InstanceDescription, InstanceObject, Model,
    ModelDescription, ModelObject, PreferredGroup,
};
use crate::object::{self, Object};
use crate::process;
use crate::request::{Input, Request};
use crate::values::{KIND_CPU, KIND_GPU};

/// A library whose backend is initialized.
pub(crate) struct Host {
    functions: Functions,
    backend: *mut Object<BackendObject>,
    attributes: *mut Object<Attributes>,
    /// For messages.
    name: String,
}

/// A model that a backend has initialized.
pub(crate) struct HostedModel {
    host: Host,
    pub(crate) model: *mut Object<ModelObject>,
}

/// An instance that a backend has initialized.
struct Instance {
    model: HostedModel,
    instance: *mut Object<InstanceObject>,
    shared: Arc<Model>,
    on_gpu: bool,
    /// Rescheduled requests, kept until they are executed again: dropping them would fail them.
    rescheduled: Vec<Arc<Answer>>,
    /// Wakes this thread when a request of a model with states is released.
    releases: Arc<Releases>,
}

impl Host {
    /// Loads a library and initializes its backend.
    ///
    /// # Errors
    /// The library is not a backend, or its initialization failed; for the author of the model.
    pub(crate) fn open(
        path: &Path,
        description: &BackendDescription<'_>,
    ) -> Result<Self, InferError> {
        let refused =
            |error: String| load_error(format!("backend library '{}' {error}", path.display()));
        let whole = std::path::absolute(path).map_err(|error| refused(error.to_string()))?;
        let functions = library::open(&whole).map_err(refused)?;
        let host = Self {
            functions,
            backend: object::make(BackendObject::new(description)),
            attributes: object::make(Attributes::default()),
            name: description.name.to_owned(),
        };
        // SAFETY: the contract of this package; the objects live until the process ends.
        let initialized = functions.initialize.map(|call| unsafe { call(host.backend) });
        host.loaded("TRITONBACKEND_Initialize", initialized)?;
        // SAFETY: as above.
        let attributes =
            functions.attributes.map(|call| unsafe { call(host.backend, host.attributes) });
        host.loaded("TRITONBACKEND_GetBackendAttribute", attributes)?;
        Ok(host)
    }

    /// Returns the error of an entry point for the author of the model.
    fn loaded(&self, function: &str, result: Option<ErrorPointer>) -> Result<(), InferError> {
        let Some(failed) = result.filter(|result| !result.is_null()) else { return Ok(()) };
        // SAFETY: the contract of this package.
        let said = unsafe { error::consume(failed) };
        Err(load_error(match said.message.as_str() {
            "" => format!("{function} of the backend '{}' failed without a message", self.name),
            text => text.to_owned(),
        }))
    }

    /// Initializes a model.
    ///
    /// # Errors
    /// The backend's message.
    pub(crate) fn load(
        self,
        description: &ModelDescription<'_>,
    ) -> Result<HostedModel, InferError> {
        let model = object::make(ModelObject::new(description, self.backend));
        // SAFETY: the contract of this package; the object lives until the process ends.
        let initialized = self.functions.model_initialize.map(|call| unsafe { call(model) });
        self.loaded("TRITONBACKEND_ModelInitialize", initialized)?;
        Ok(HostedModel { host: self, model })
    }

    /// Logs the error of an entry point at the end.
    fn ended(&self, function: &str, result: Option<ErrorPointer>) {
        if let Err(said) = self.loaded(function, result) {
            pharos_backend::log('W', &format!("{function}: {}", said.message));
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // SAFETY: the contract of this package; the backend is not used afterwards.
        let finalized = self.functions.finalize.map(|call| unsafe { call(self.backend) });
        self.ended("TRITONBACKEND_Finalize", finalized);
    }
}

impl HostedModel {
    /// Returns the groups of instances that the backend prefers.
    pub(crate) fn preferred_groups(&self) -> Vec<PreferredGroup> {
        // SAFETY: the object lives until the process ends.
        let attributes = unsafe { object::get(self.host.attributes) };
        attributes.map(|attributes| attributes.preferred.lock().clone()).unwrap_or_default()
    }

    /// Returns the configuration as the backend has left it, as JSON.
    pub(crate) fn config(&self) -> String {
        // SAFETY: the object lives until the process ends.
        unsafe { object::get(self.model) }.map(ModelObject::config).unwrap_or_default()
    }
}

impl Drop for HostedModel {
    fn drop(&mut self) {
        // SAFETY: the contract of this package; the model is not used afterwards.
        let finalized = self.host.functions.model_finalize.map(|call| unsafe { call(self.model) });
        self.host.ended("TRITONBACKEND_ModelFinalize", finalized);
    }
}

/// Loads a library and creates an instance of the model with it.
///
/// # Errors
/// The library is not a backend, or cannot load the model; for the author of the model.
pub fn create(context: &Context<'_>, path: &Path) -> Result<Box<dyn Backend>, InferError> {
    if context.config.decoupled && !context.config.states.is_empty() {
        return Err(load_error(
            "a decoupled model cannot have implicit states (sequence_batching.state)",
        ));
    }
    check_batching(context, path)?;
    process::connect(context.runtime);
    process::set_verbose(context.verbose);
    let directory = path.parent().unwrap_or(Path::new("/")).to_string_lossy();
    let description = BackendDescription {
        name: &context.config.backend,
        config: &crate::settings::backend_config(context.backend_settings, &directory),
        directory: &directory,
        runtime: Some(context.runtime),
    };
    let config = context.config.to_json();
    let group = crate::settings::group(&config, context.instance);
    let host = Host::open(path, &description)?;
    let model = host.load(&ModelDescription {
        name: &context.config.name,
        version: context.version,
        directory: &context.model_directory.to_string_lossy(),
        config: &config,
        completes: false,
    })?;
    let instance = object::make(InstanceObject::new(
        &InstanceDescription {
            name: context.instance,
            kind: if context.on_gpu { KIND_GPU } else { KIND_CPU },
            policy: if context.on_gpu { "gpu_0" } else { "cpu" },
            profiles: &group.profiles,
            passive: group.passive,
        },
        model.model,
    ));
    // SAFETY: the contract of this package; the object lives until the process ends.
    let initialized =
        model.host.functions.instance_initialize.map(|call| unsafe { call(instance) });
    model.host.loaded("TRITONBACKEND_ModelInstanceInitialize", initialized)?;
    let shared = Model::new(context.config, context.runtime);
    Ok(Box::new(Instance {
        model,
        instance,
        shared,
        on_gpu: context.on_gpu,
        rescheduled: Vec::new(),
        releases: Arc::default(),
    }))
}

/// Refuses code of the backend's author that decides about batches: it would run in the server's
/// process, for every request.
fn check_batching(context: &Context<'_>, path: &Path) -> Result<(), InferError> {
    const PARAMETER: &str = "TRITON_BATCH_STRATEGY_PATH";
    const FILE: &str = "batchstrategy.so";
    if let Some(strategy) = context.config.parameters.get(PARAMETER) {
        return Err(load_error(format!(
            "the parameter {PARAMETER} names '{strategy}': libraries that decide about batches are \
             not loaded; remove the parameter"
        )));
    }
    let places = [Some(context.directory), Some(context.model_directory), path.parent()];
    for place in places.into_iter().flatten().filter(|place| place.join(FILE).is_file()) {
        let text = format!(
            "'{}' has no effect: libraries that decide about batches are not loaded",
            place.join(FILE).display()
        );
        pharos_backend::log('W', &text);
    }
    Ok(())
}

impl Instance {
    /// Creates the inputs of each request, in the client's order.
    ///
    /// # Errors
    /// An input contradicts its description.
    fn inputs(&self, batch: &Batch<'_>) -> Result<Vec<Vec<Object<Input>>>, InferError> {
        let mut inputs: Vec<Vec<Object<Input>>> =
            batch.requests.iter().map(|_| Vec::with_capacity(batch.inputs.len())).collect();
        let given = || batch.inputs.iter().enumerate().filter(|(_, input)| batch.has_parts(input));
        for (at, input) in given() {
            let parts = batch.received_parts(at, &self.shared.runtime)?;
            for (inputs, ReceivedPart { shape, bytes }) in inputs.iter_mut().zip(parts) {
                inputs.push(Object::new(Input {
                    model: self.shared.clone(),
                    position: input.index,
                    datatype: input.datatype,
                    shape,
                    data: bytes,
                    attributes: parking_lot::Mutex::new(None),
                }));
            }
        }
        for (inputs, request) in inputs.iter_mut().zip(batch.requests) {
            let order = request.details.as_deref().map_or(&[][..], |details| &details.input_order);
            if !order.is_empty() {
                let positions: Vec<usize> = given().map(|(_, input)| input.index).collect();
                *inputs = in_clients_order(std::mem::take(inputs), &positions, order);
            }
        }
        Ok(inputs)
    }

    /// Creates the response channel of each request.
    fn answers(
        &self,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<Vec<Arc<Answer>>, InferError> {
        let answers = batch.requests.iter().enumerate().map(|(position, request)| {
            let channel = if batch.config().states.is_empty() {
                Channel::Single(outputs.detach(position)?)
            } else {
                let position = u32::try_from(position).unwrap_or(u32::MAX);
                Channel::Joined(Kept::new((outputs.batch(), position), &self.releases))
            };
            let details = request.details.as_deref();
            let wanted = details.map(|details| details.outputs.clone()).unwrap_or_default();
            Ok(Answer::new(&self.shared, channel, wanted))
        });
        answers.collect()
    }

    fn reports(&self) -> Option<&crate::computation::Reports> {
        // SAFETY: the object lives until the process ends.
        unsafe { object::get(self.instance) }.ok().map(|instance| &instance.reports)
    }
}

impl Backend for Instance {
    fn engine(&self) -> String {
        format!("triton backend {}", self.shared.config.backend)
    }

    fn wants_details(&self) -> bool {
        true
    }

    fn takes_device_memory(&self) -> DeviceInputs {
        if self.on_gpu { DeviceInputs::Pieces } else { DeviceInputs::Never }
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        self.rescheduled.clear();
        if let Some(reports) = self.reports() {
            reports.clear();
        }
        let inputs = self.inputs(batch)?;
        let answers = self.answers(batch, outputs)?;
        let requests = answers.iter().zip(batch.requests).zip(inputs);
        let mut pointers: Vec<*mut Object<Request>> = requests
            .map(|((answer, request), inputs)| {
                object::make(Request::new(answer.clone(), request, inputs))
            })
            .collect();
        let count = u32::try_from(pointers.len()).unwrap_or(u32::MAX);
        outputs.inputs_ready();
        let execute = self.model.host.functions.execute;
        // SAFETY: the contract of this package. On success, the requests belong to the library,
        // which releases each of them at any time.
        let failed = unsafe { execute(self.instance, pointers.as_mut_ptr(), count) };
        let has_states = !self.shared.config.states.is_empty();
        if has_states && failed.is_null() {
            joined::wait(&answers, &self.releases);
        }
        outputs.computed();
        if let Some(computation) = self.reports().and_then(|reports| reports.computation()) {
            outputs.computed_between(Instant(computation.start), Instant(computation.end));
        }
        if !failed.is_null() {
            // SAFETY: as above.
            let said = unsafe { error::consume(failed) };
            for (pointer, answer) in pointers.into_iter().zip(&answers) {
                answer.fail(said.clone());
                if !answer.is_released() {
                    // SAFETY: after an error, the requests belong to this function.
                    drop(unsafe { object::discard(pointer) });
                }
            }
        }
        if has_states {
            joined::join(&answers, batch, outputs)?;
        }
        for (position, answer) in answers.into_iter().enumerate() {
            if answer.is_rescheduled() {
                outputs.reschedule(position)?;
                self.rescheduled.push(answer);
            }
        }
        Ok(())
    }

    fn readiness(&self) -> Option<Readiness> {
        let ready = self.model.host.functions.instance_ready?;
        let instance = Shared(self.instance);
        Some(Box::new(move || {
            // The whole value, which may move to another thread; its field alone may not.
            let Shared(instance) = { instance };
            // SAFETY: the contract of this package: the function may be called on any thread, and
            // the object lives until the process ends.
            let result = unsafe { ready(instance) };
            if result.is_null() {
                return true;
            }
            // SAFETY: as above.
            let said = unsafe { error::consume(result) };
            pharos_backend::log('W', &format!("the model is not ready: {}", said.message));
            false
        }))
    }
}

/// A pointer to the instance, for the thread that answers whether the model is ready.
#[derive(Clone, Copy)]
struct Shared(*mut Object<InstanceObject>);

// SAFETY: objects of the interface may be used from any thread.
unsafe impl Send for Shared {}

impl Drop for Instance {
    fn drop(&mut self) {
        let finalize = self.model.host.functions.instance_finalize;
        // SAFETY: the contract of this package; the instance is not used afterwards.
        let finalized = finalize.map(|call| unsafe { call(self.instance) });
        self.model.host.ended("TRITONBACKEND_ModelInstanceFinalize", finalized);
    }
}
