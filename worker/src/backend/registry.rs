//! The backends of a worker: the engines of this crate, the backends that a program adds, and the
//! shared library that the frontend has selected for the model.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use pharos::error::InferError;
use pharos_backend::{Backend, Context, Create, load_error};

use super::{builtin, library, native, onnxruntime};
use crate::device::Cuda;

/// Like [`Create`], for a backend of this crate, which uses the GPU driver.
type CreateBuiltin = fn(&Context<'_>, &Arc<Cuda>) -> Result<Box<dyn Backend>, InferError>;

#[derive(Clone, Copy)]
enum Creator {
    Builtin(CreateBuiltin),
    Added(Create),
}

/// Backends in libraries whose interface is not `pharos_backend.h`.
#[derive(Clone, Copy)]
pub(crate) struct OtherLibraries {
    /// How the names of their files begin.
    pub(crate) prefix: &'static str,
    pub(crate) create: CreateFromLibrary,
}

impl OtherLibraries {
    /// Whether the library at this path has the other interface.
    fn has(self, path: &Path) -> bool {
        let name = path.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with(self.prefix))
    }
}

/// Like [`Create`], for a backend in the library at a path.
pub type CreateFromLibrary = fn(&Context<'_>, &Path) -> Result<Box<dyn Backend>, InferError>;

/// Backends by the name in a configuration's `backend`.
pub(crate) struct Registry {
    backends: Vec<(&'static str, Creator)>,
    /// Creates backends of all other names.
    fallback: Option<Create>,
    /// Creates backends from libraries whose interface is not `pharos_backend.h`.
    other_libraries: Option<OtherLibraries>,
}

impl Default for Registry {
    /// The backends of this crate.
    fn default() -> Self {
        let builtin: [(_, CreateBuiltin); 2] =
            [("builtin", builtin::create), ("onnxruntime", onnx)];
        let backends = builtin.map(|(name, create)| (name, Creator::Builtin(create))).to_vec();
        Self { backends, fallback: None, other_libraries: None }
    }
}

impl Registry {
    /// Adds a backend; replaces one of the same name.
    pub(crate) fn add(&mut self, name: &'static str, create: Create) {
        match self.backends.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = Creator::Added(create),
            None => self.backends.push((name, Creator::Added(create))),
        }
    }

    /// Sets the function that creates backends for all names that are not added.
    pub(crate) fn set_fallback(&mut self, create: Create) {
        self.fallback = Some(create);
    }

    /// Sets the function that creates backends from libraries whose names begin with a prefix.
    pub(crate) fn set_libraries(&mut self, libraries: OtherLibraries) {
        self.other_libraries = Some(libraries);
    }

    /// Creates the backend that the configuration names.
    ///
    /// # Errors
    /// There is no such backend, or it cannot load the model; the message is meant for the author
    /// of the model.
    pub(crate) fn create(
        &self,
        context: &Context<'_>,
        cuda: &Arc<Cuda>,
    ) -> Result<Box<dyn Backend>, InferError> {
        let name = context.config.backend.as_str();
        let library = library();
        if let (Some(library), Some(other)) = (&library, self.other_libraries)
            && other.has(library)
        {
            return (other.create)(context, library);
        }
        if let Some((_, create)) = self.backends.iter().find(|(known, _)| *known == name) {
            return match create {
                Creator::Builtin(create) => create(context, cuda),
                Creator::Added(create) => create(context),
            };
        }
        if let Some(library) = library {
            return native::create(context, &library);
        }
        if let Some(create) = self.fallback {
            return create(context);
        }
        Err(load_error(format!(
            "unknown backend '{name}'; this worker has: {}",
            self.names().join(", ")
        )))
    }

    fn names(&self) -> Vec<&'static str> {
        self.backends.iter().map(|(name, _)| *name).collect()
    }
}

/// Creates a backend for ONNX files.
fn onnx(context: &Context<'_>, cuda: &Arc<Cuda>) -> Result<Box<dyn Backend>, InferError> {
    match onnxruntime::library() {
        Some(library) => onnxruntime::create(context, cuda, &library),
        None => Err(load_error("the library of ONNX Runtime is not configured")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_added_again_replaces_the_earlier_one() {
        let own: Create = |_| Err(load_error("own"));
        let mut registry = Registry::default();
        for name in ["mine", "onnxruntime", "mine"] {
            registry.add(name, own);
        }
        assert_eq!(registry.names(), ["builtin", "onnxruntime", "mine"]);
        assert_eq!(
            ["builtin", "onnxruntime", "mine"].map(|name| {
                let mut found = registry.backends.iter().filter(|(known, _)| *known == name);
                found
                    .any(|(_, creator)| matches!(creator, Creator::Added(create) if std::ptr::fn_addr_eq(*create, own)))
            }),
            [false, true, true]
        );
    }
}
