//! `TRITONBACKEND_Backend`, `TRITONBACKEND_Model` and `TRITONBACKEND_ModelInstance`: what a backend
//! reads about itself, its model and its instance, and where it keeps its state.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use parking_lot::Mutex;
use pharos::model::ModelConfig;
use pharos_backend::Runtime;

use crate::computation::Reports;
use crate::error::interface;
use crate::fault::Fault;
use crate::foreign::{c_text, list, put};
use crate::memory::{BufferAttributes, MemoryManager};
use crate::message::Message;
use crate::object::{self, Object, kinds};
use crate::values::{KIND_CPU, KIND_GPU};

/// The version of the model configuration's JSON.
const CONFIG_VERSION: u32 = 1;
/// Artifacts are in a directory. `TRITONBACKEND_ArtifactType`.
const FILESYSTEM: c_int = 0;

/// `TRITONBACKEND_Backend`.
pub(crate) struct BackendObject {
    name: CString,
    config: *mut Object<Message>,
    directory: CString,
    memory: *mut Object<MemoryManager>,
    state: AtomicPtr<c_void>,
    /// The execution policy, which the server does not use: an instance is a process.
    policy: Mutex<c_int>,
}

/// `TRITONBACKEND_BackendAttribute`.
#[derive(Default)]
pub(crate) struct Attributes {
    /// The preferred groups of instances, the most preferred first.
    pub(crate) preferred: Mutex<Vec<PreferredGroup>>,
    /// Whether instances may be loaded in parallel. They always are: each is a process.
    parallel: AtomicBool,
}

/// A group of instances that a backend prefers.
#[derive(Clone)]
pub(crate) struct PreferredGroup {
    /// The name of its kind in a configuration.
    pub(crate) kind: &'static str,
    /// 0 for no preference.
    pub(crate) count: u64,
    /// Empty for all GPUs.
    pub(crate) gpus: Vec<u64>,
}

/// `TRITONSERVER_Server`.
pub(crate) struct Server;

/// `TRITONBACKEND_Model`.
pub(crate) struct ModelObject {
    name: CString,
    version: u64,
    directory: CString,
    /// The configuration as JSON; a backend may replace it while it is initialized.
    config: Mutex<String>,
    completes: bool,
    backend: *mut Object<BackendObject>,
    server: *mut Object<Server>,
    state: AtomicPtr<c_void>,
}

/// `TRITONBACKEND_ModelInstance`.
pub(crate) struct InstanceObject {
    name: CString,
    kind: c_int,
    policy: *mut Object<Message>,
    profiles: Vec<CString>,
    passive: bool,
    model: *mut Object<ModelObject>,
    state: AtomicPtr<c_void>,
    /// What the backend reports about the batch that it executes.
    pub(crate) reports: Reports,
}

kinds! {
    BackendObject = 6, "a backend";
    Attributes = 7, "the attributes of a backend";
    Server = 8, "a server";
    ModelObject = 9, "a model";
    InstanceObject = 10, "a model instance";
}

/// What requests and responses need to know about the model.
pub(crate) struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) runtime: Runtime,
    /// The names of the inputs that a backend receives, by position.
    pub(crate) inputs: Vec<CString>,
    /// The names of the configuration's outputs, by position.
    pub(crate) outputs: Vec<CString>,
}

impl Model {
    pub(crate) fn new(config: &ModelConfig, runtime: &Runtime) -> Arc<Self> {
        let inputs = 0..config.backend_inputs();
        Arc::new(Self {
            inputs: inputs.map(|at| c_text(config.input_name(at).unwrap_or_default())).collect(),
            outputs: config.outputs.iter().map(|output| c_text(&output.name)).collect(),
            config: config.clone(),
            runtime: runtime.clone(),
        })
    }

    /// Returns the position of the output with this name in the configuration.
    pub(crate) fn output_at(&self, name: &str) -> Option<usize> {
        self.config.outputs.iter().position(|output| output.name == name)
    }
}

/// What a backend is created from.
pub(crate) struct BackendDescription<'a> {
    pub(crate) name: &'a str,
    /// The settings of the command line, as JSON.
    pub(crate) config: &'a str,
    /// The directory of its library.
    pub(crate) directory: &'a str,
    /// The connection of the process; `None` in one that only completes a configuration.
    pub(crate) runtime: Option<&'a Runtime>,
}

impl BackendObject {
    pub(crate) fn new(description: &BackendDescription<'_>) -> Self {
        Self {
            name: c_text(description.name),
            config: object::make(Message::lent(description.config)),
            directory: c_text(description.directory),
            memory: object::make(MemoryManager::new(description.runtime)),
            state: AtomicPtr::new(ptr::null_mut()),
            policy: Mutex::new(0),
        }
    }
}

/// What a model is created from.
pub(crate) struct ModelDescription<'a> {
    pub(crate) name: &'a str,
    pub(crate) version: u64,
    /// The directory of the model, with its versions.
    pub(crate) directory: &'a str,
    /// The configuration as JSON.
    pub(crate) config: &'a str,
    /// Whether the backend is to complete the configuration.
    pub(crate) completes: bool,
}

impl ModelObject {
    pub(crate) fn new(
        description: &ModelDescription<'_>,
        backend: *mut Object<BackendObject>,
    ) -> Self {
        Self {
            name: c_text(description.name),
            version: description.version,
            directory: c_text(description.directory),
            config: Mutex::new(description.config.to_owned()),
            completes: description.completes,
            backend,
            server: object::make(Server),
            state: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Returns the configuration as JSON.
    pub(crate) fn config(&self) -> String {
        self.config.lock().clone()
    }
}

/// What an instance is created from.
pub(crate) struct InstanceDescription<'a> {
    pub(crate) name: &'a str,
    /// [`KIND_CPU`](crate::values::KIND_CPU) or [`KIND_GPU`](crate::values::KIND_GPU).
    pub(crate) kind: c_int,
    /// The name of its host policy.
    pub(crate) policy: &'a str,
    pub(crate) profiles: &'a [String],
    pub(crate) passive: bool,
}

impl InstanceObject {
    pub(crate) fn new(
        description: &InstanceDescription<'_>,
        model: *mut Object<ModelObject>,
    ) -> Self {
        let policy = format!("{{\"{}\":{{}}}}", description.policy);
        Self {
            name: c_text(description.name),
            kind: description.kind,
            policy: object::make(Message::lent(&policy)),
            profiles: description.profiles.iter().map(|name| c_text(name)).collect(),
            passive: description.passive,
            model,
            state: AtomicPtr::new(ptr::null_mut()),
            reports: Reports::default(),
        }
    }
}

fn check_version(version: u32) -> Result<(), Fault> {
    if version == CONFIG_VERSION {
        return Ok(());
    }
    Err(Fault::unsupported(format!(
        "version {version} of the model configuration is not supported; supported is \
         {CONFIG_VERSION}"
    )))
}

interface! {
    /// `TRITONBACKEND_BackendName`.
    fn backend_name(backend: *const Object<BackendObject>, name: *mut *const c_char) {
        put(name, object::get(backend)?.name.as_ptr())
    }

    /// `TRITONBACKEND_BackendConfig`. The message belongs to the backend object.
    fn backend_config(backend: *const Object<BackendObject>, config: *mut *mut Object<Message>) {
        put(config, object::get(backend)?.config)
    }

    /// `TRITONBACKEND_BackendArtifacts`.
    fn backend_artifacts(
        backend: *const Object<BackendObject>,
        kind: *mut c_int,
        location: *mut *const c_char,
    ) {
        put(kind, FILESYSTEM)?;
        put(location, object::get(backend)?.directory.as_ptr())
    }

    /// `TRITONBACKEND_BackendMemoryManager`.
    fn backend_memory(
        backend: *const Object<BackendObject>,
        manager: *mut *mut Object<MemoryManager>,
    ) {
        put(manager, object::get(backend)?.memory)
    }

    /// `TRITONBACKEND_BackendState`.
    fn backend_state(backend: *const Object<BackendObject>, state: *mut *mut c_void) {
        put(state, object::get(backend)?.state.load(Ordering::Acquire))
    }

    /// `TRITONBACKEND_BackendSetState`.
    fn backend_set_state(backend: *const Object<BackendObject>, state: *mut c_void) {
        object::get(backend)?.state.store(state, Ordering::Release);
        Ok(())
    }

    /// `TRITONBACKEND_BackendExecutionPolicy`.
    fn backend_policy(backend: *const Object<BackendObject>, policy: *mut c_int) {
        put(policy, *object::get(backend)?.policy.lock())
    }

    /// `TRITONBACKEND_BackendSetExecutionPolicy`. Both policies have the same effect: an instance
    /// is a process and executes on one thread.
    fn backend_set_policy(backend: *const Object<BackendObject>, policy: c_int) {
        if !(0..=1).contains(&policy) {
            return Err(Fault::invalid(format!(
                "the execution policy is {policy}; 0 (blocking) and 1 (device blocking) are allowed"
            )));
        }
        *object::get(backend)?.policy.lock() = policy;
        Ok(())
    }

    /// `TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup`.
    fn attributes_add_group(
        attributes: *const Object<Attributes>,
        kind: c_int,
        count: u64,
        devices: *const u64,
        device_count: u64,
    ) {
        let attributes = object::get(attributes)?;
        let kind = match kind {
            0 => "KIND_AUTO",
            KIND_CPU => "KIND_CPU",
            KIND_GPU => "KIND_GPU",
            3 => "KIND_MODEL",
            _ => {
                return Err(Fault::invalid(format!(
                    "the kind of a group is {kind}; 0 to 3 are allowed"
                )));
            }
        };
        let gpus = list(devices, device_count, "the list of devices")?.to_vec();
        attributes.preferred.lock().push(PreferredGroup { kind, count, gpus });
        Ok(())
    }

    /// `TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading`.
    fn attributes_set_parallel(attributes: *const Object<Attributes>, parallel: bool) {
        object::get(attributes)?.parallel.store(parallel, Ordering::Relaxed);
        Ok(())
    }

    /// `TRITONBACKEND_ModelName`.
    fn model_name(model: *const Object<ModelObject>, name: *mut *const c_char) {
        put(name, object::get(model)?.name.as_ptr())
    }

    /// `TRITONBACKEND_ModelVersion`.
    fn model_version(model: *const Object<ModelObject>, version: *mut u64) {
        put(version, object::get(model)?.version)
    }

    /// `TRITONBACKEND_ModelRepository`.
    fn model_repository(
        model: *const Object<ModelObject>,
        kind: *mut c_int,
        location: *mut *const c_char,
    ) {
        put(kind, FILESYSTEM)?;
        put(location, object::get(model)?.directory.as_ptr())
    }

    /// `TRITONBACKEND_ModelConfig`. The message belongs to the caller.
    fn model_config(
        model: *const Object<ModelObject>,
        version: u32,
        config: *mut *mut Object<Message>,
    ) {
        check_version(version)?;
        let json = object::get(model)?.config();
        object::give(config, Message::new(&json))
    }

    /// `TRITONBACKEND_ModelSetConfig`. The message stays with the caller.
    fn model_set_config(
        model: *const Object<ModelObject>,
        version: u32,
        config: *const Object<Message>,
    ) {
        check_version(version)?;
        *object::get(model)?.config.lock() = object::get(config)?.json().to_owned();
        Ok(())
    }

    /// `TRITONBACKEND_ModelAutoCompleteConfig`.
    fn model_completes(model: *const Object<ModelObject>, completes: *mut bool) {
        put(completes, object::get(model)?.completes)
    }

    /// `TRITONBACKEND_ModelServer`.
    fn model_server(model: *const Object<ModelObject>, server: *mut *mut Object<Server>) {
        put(server, object::get(model)?.server)
    }

    /// `TRITONBACKEND_ModelBackend`.
    fn model_backend(model: *const Object<ModelObject>, backend: *mut *mut Object<BackendObject>) {
        put(backend, object::get(model)?.backend)
    }

    /// `TRITONBACKEND_ModelState`.
    fn model_state(model: *const Object<ModelObject>, state: *mut *mut c_void) {
        put(state, object::get(model)?.state.load(Ordering::Acquire))
    }

    /// `TRITONBACKEND_ModelSetState`.
    fn model_set_state(model: *const Object<ModelObject>, state: *mut c_void) {
        object::get(model)?.state.store(state, Ordering::Release);
        Ok(())
    }

    /// `TRITONBACKEND_ModelReportMemoryUsage`. The server measures the memory of the process
    /// itself, so the report is only checked.
    fn model_report_memory(
        model: *const Object<ModelObject>,
        usage: *const *const Object<BufferAttributes>,
        count: u32,
    ) {
        object::get(model)?;
        for attributes in list(usage, count.into(), "the list of buffer attributes")? {
            object::get(*attributes)?;
        }
        Ok(())
    }

    /// `TRITONBACKEND_ModelInstanceReportMemoryUsage`. As [`model_report_memory`].
    fn instance_report_memory(
        instance: *const Object<InstanceObject>,
        usage: *const *const Object<BufferAttributes>,
        count: u32,
    ) {
        object::get(instance)?;
        for attributes in list(usage, count.into(), "the list of buffer attributes")? {
            object::get(*attributes)?;
        }
        Ok(())
    }

    /// `TRITONBACKEND_ModelInstanceName`.
    fn instance_name(instance: *const Object<InstanceObject>, name: *mut *const c_char) {
        put(name, object::get(instance)?.name.as_ptr())
    }

    /// `TRITONBACKEND_ModelInstanceKind`.
    fn instance_kind(instance: *const Object<InstanceObject>, kind: *mut c_int) {
        put(kind, object::get(instance)?.kind)
    }

    /// `TRITONBACKEND_ModelInstanceDeviceId`. A process sees only the GPUs of its instance, so the
    /// number is always 0.
    fn instance_device(instance: *const Object<InstanceObject>, device: *mut i32) {
        object::get(instance)?;
        put(device, 0)
    }

    /// `TRITONBACKEND_ModelInstanceHostPolicy`. The message belongs to the instance.
    fn instance_policy(
        instance: *const Object<InstanceObject>,
        policy: *mut *mut Object<Message>,
    ) {
        put(policy, object::get(instance)?.policy)
    }

    /// `TRITONBACKEND_ModelInstanceIsPassive`.
    fn instance_is_passive(instance: *const Object<InstanceObject>, passive: *mut bool) {
        put(passive, object::get(instance)?.passive)
    }

    /// `TRITONBACKEND_ModelInstanceProfileCount`.
    fn instance_profiles(instance: *const Object<InstanceObject>, count: *mut u32) {
        let profiles = object::get(instance)?.profiles.len();
        put(count, u32::try_from(profiles).unwrap_or(u32::MAX))
    }

    /// `TRITONBACKEND_ModelInstanceProfileName`.
    fn instance_profile(
        instance: *const Object<InstanceObject>,
        index: u32,
        name: *mut *const c_char,
    ) {
        let profiles = &object::get(instance)?.profiles;
        let found = profiles.get(index as usize).ok_or_else(|| {
            Fault::invalid(format!(
                "the index of a profile is {index}; the instance has {}",
                profiles.len()
            ))
        })?;
        put(name, found.as_ptr())
    }

    /// `TRITONBACKEND_ModelInstanceSecondaryDeviceCount`. The server has no secondary devices.
    fn instance_secondary_devices(instance: *const Object<InstanceObject>, count: *mut u32) {
        object::get(instance)?;
        put(count, 0)
    }

    /// `TRITONBACKEND_ModelInstanceSecondaryDeviceProperties`.
    fn instance_secondary_device(
        instance: *const Object<InstanceObject>,
        index: u32,
        _kind: *mut *const c_char,
        _number: *mut i64,
    ) {
        object::get(instance)?;
        Err(Fault::invalid(format!(
            "the index of a secondary device is {index}; the instance has 0"
        )))
    }

    /// `TRITONBACKEND_ModelInstanceModel`.
    fn instance_model(
        instance: *const Object<InstanceObject>,
        model: *mut *mut Object<ModelObject>,
    ) {
        put(model, object::get(instance)?.model)
    }

    /// `TRITONBACKEND_ModelInstanceState`.
    fn instance_state(instance: *const Object<InstanceObject>, state: *mut *mut c_void) {
        put(state, object::get(instance)?.state.load(Ordering::Acquire))
    }

    /// `TRITONBACKEND_ModelInstanceSetState`.
    fn instance_set_state(instance: *const Object<InstanceObject>, state: *mut c_void) {
        object::get(instance)?.state.store(state, Ordering::Release);
        Ok(())
    }
}
