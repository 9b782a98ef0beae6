//! Sets up the endpoints of cloud platforms at start.

use crate::cli::Options;
use pharos_engine::engine::Engine;
use pharos_engine::store::Registered;
use pharos_http::cloud::{Platform, SageMaker, VertexAi};

/// The platforms whose endpoints are served.
pub(super) struct Clouds {
    sagemaker: Option<SageMaker>,
    vertex_ai: Option<VertexAi>,
    /// The directories that requests register as models; `None` if models are not loaded by
    /// request.
    registered: Option<Registered>,
    /// Whether TorchServe's endpoints are served in place of the endpoints of Triton and of the
    /// platforms.
    replaced: bool,
}

impl Clouds {
    /// Sets up the platforms that the options enable, from the environment variables of their
    /// containers. With TorchServe's endpoints, no platform is served.
    ///
    /// # Errors
    /// A variable is missing, or has a value that is not allowed.
    pub(super) fn new(options: &Options, torchserve: bool) -> Result<Self, String> {
        let variable = |name: &str| std::env::var(name).ok();
        let has_effect = |flag: &str, allow: bool| {
            if allow && torchserve {
                tracing::info!("{flag} has no effect: TorchServe's endpoints replace Triton's");
            }
            allow && !torchserve
        };
        let sagemaker = has_effect("--allow-sagemaker", options.sagemaker.allow)
            .then(|| SageMaker::new(variable));
        let explicit = options.models.control_mode.by_request();
        let registered = (sagemaker.is_some() && explicit).then(Registered::default);
        let vertex_ai = has_effect("--allow-vertex-ai", options.vertex_ai.allow)
            .then(|| VertexAi::new(options.vertex_ai.default_model.clone(), variable));
        Ok(Self {
            sagemaker: sagemaker.transpose()?,
            vertex_ai: vertex_ai.transpose()?,
            registered,
            replaced: torchserve,
        })
    }

    /// Returns the directories that requests register as models.
    pub(super) fn registered(&self) -> Option<Registered> {
        self.registered.clone()
    }

    /// Returns whether TorchServe's endpoints replace the endpoints of Triton and of the platforms.
    pub(super) fn are_replaced(&self) -> bool {
        self.replaced
    }

    /// Returns the platforms to open listeners for.
    pub(super) fn platforms(&self) -> Vec<Platform> {
        let sagemaker = self.sagemaker.clone().map(Platform::SageMaker);
        sagemaker.into_iter().chain(self.vertex_ai.clone().map(Platform::VertexAi)).collect()
    }

    /// Chooses Vertex AI's default model. Call this after the models of the start are loaded.
    ///
    /// # Errors
    /// Vertex AI has no default model.
    pub(super) async fn models_are_loaded(&self, engine: &Engine) -> Result<(), String> {
        match &self.vertex_ai {
            Some(vertex_ai) => vertex_ai.resolve_default_model(engine).await,
            None => Ok(()),
        }
    }
}
