//! Which backends a worker has: those of this crate, those that a user's program adds, and the shared library that the
//! frontend has found for the model.

use pharos::error::InferError;

use super::{Backend, Context, builtin, load_error, native, onnxruntime, tract};

/// Makes a backend for the model that the context describes.
///
/// # Errors
/// The model cannot be loaded; the message is for the user who wrote it.
pub type Create = fn(&Context<'_>) -> Result<Box<dyn Backend>, InferError>;

/// Backends by the name that a configuration's `backend` says.
pub(crate) struct Registry {
    backends: Vec<(&'static str, Create)>,
    /// For names that are not among them.
    otherwise: Option<Create>,
}

impl Default for Registry {
    /// The backends of this crate.
    fn default() -> Self {
        let backends: Vec<(_, Create)> =
            vec![("builtin", builtin::create), ("onnxruntime", onnx), ("tract", tract::create)];
        Self { backends, otherwise: None }
    }
}

impl Registry {
    /// Adds a backend, in place of one that has the name already.
    pub(crate) fn add(&mut self, name: &'static str, create: Create) {
        match self.backends.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = create,
            None => self.backends.push((name, create)),
        }
    }

    /// Sets what makes the backends whose names nobody has added.
    pub(crate) fn set_otherwise(&mut self, create: Create) {
        self.otherwise = Some(create);
    }

    /// Makes the backend that the configuration names.
    ///
    /// # Errors
    /// There is none of this name, or it cannot load the model; the message is for the user who wrote the model.
    pub(crate) fn create(&self, context: &Context<'_>) -> Result<Box<dyn Backend>, InferError> {
        let name = context.config.backend.as_str();
        if let Some((_, create)) = self.backends.iter().find(|(known, _)| *known == name) {
            return create(context);
        }
        if let Some(library) = native::library() {
            return native::create(context, &library);
        }
        if let Some(create) = self.otherwise {
            return create(context);
        }
        Err(load_error(format!("unknown backend '{name}'; this worker has: {}", self.names().join(", "))))
    }

    fn names(&self) -> Vec<&'static str> {
        self.backends.iter().map(|(name, _)| *name).collect()
    }
}

/// ONNX files: on ONNX Runtime if its library is named, else on tract.
fn onnx(context: &Context<'_>) -> Result<Box<dyn Backend>, InferError> {
    match onnxruntime::library() {
        Some(library) => onnxruntime::create(context, &library),
        None if context.is_on_gpu() => Err(load_error("tract computes on CPUs only; on a GPU, ONNX Runtime is needed")),
        None => tract::create(context),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_given_again_replaces_the_one_before() {
        let own: Create = |_| Err(load_error("own"));
        let mut registry = Registry::default();
        for name in ["mine", "tract", "mine"] {
            registry.add(name, own);
        }
        assert_eq!(registry.names(), ["builtin", "onnxruntime", "tract", "mine"]);
        let is_own =
            |name| registry.backends.iter().any(|(known, create)| *known == name && std::ptr::fn_addr_eq(*create, own));
        assert_eq!(["builtin", "tract", "mine"].map(is_own), [false, true, true]);
    }
}
