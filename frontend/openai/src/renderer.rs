//! Renders chat templates in processes with limits, one for each model.
//!
//! A template comes with a model, and can compute without end, fill the memory or overflow the
//! stack. Such a template ends its own process; the request fails, and the next one starts another
//! process. The frontend writes and reads frames and never waits for a process on an event loop.
//!
//! A task owns the process of a model and renders one prompt after the other. The process ends when
//! it is idle, when the model is replaced, and when others need its place.

mod frames;
mod places;
mod server;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::metrics::log_throttle::Throttle;
use pharos_os::{blocking, clock};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::{mpsc, oneshot};

use crate::answer::Failure;
use crate::chat::ChatRequest;
use crate::error::ApiError;
use crate::template::{CivilTime, Expectations, TemplateSource, refused};
use frames::{Answer, Setup};
use places::{Place, Places};
pub use server::serve;

/// The limit of the memory of a process, in bytes.
pub const MEMORY_BYTES: u64 = 512 << 20;
/// The processor time of one rendering, in seconds.
pub const PROCESSOR_SECONDS: u64 = 2;
/// The processor time to find out what a template expects, in seconds.
pub const PROBE_SECONDS: u64 = 1;

/// The most processes at a time.
const MAX_PROCESSES: usize = 32;
/// A process without requests for this time ends.
const IDLE: Duration = Duration::from_secs(60);
/// The time limit of one rendering on a machine whose processors are busy.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// The time limit for the end of a process that has closed its output.
const END_LIMIT: Duration = Duration::from_secs(1);
/// The requests that wait in the queue of a model; others wait before it.
const QUEUE: usize = 64;
/// The longest input of a template, in bytes. The process keeps it beside the values made of it.
const MAX_INPUT_BYTES: usize = 128 << 20;

/// Starts processes that render chat templates: each reads and writes what [`serve`] does.
pub trait Launch: Send + Sync {
    /// Starts a process. Runs on a blocking thread of the runtime that uses the pipes.
    ///
    /// # Errors
    /// Processes or descriptors are exhausted.
    fn launch(&self) -> io::Result<Process>;
}

/// A process that renders the template of one model.
pub struct Process {
    /// Its standard input.
    pub input: Pin<Box<dyn AsyncWrite + Send>>,
    /// Its standard output.
    pub output: Pin<Box<dyn AsyncRead + Send>>,
    /// Resolves when the process has ended. Dropping it kills the process.
    pub end: Pin<Box<dyn Future<Output = End> + Send>>,
}

/// How a process has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// It exceeded a limit: processor time, memory or stack.
    LimitExceeded,
    /// In another way, for logs: `exit status: 1`.
    Other(String),
}

/// The processes of all models.
pub(crate) struct Renderers {
    launch: Arc<dyn Launch>,
    places: Arc<Places>,
    warnings: Mutex<Throttle>,
}

impl fmt::Debug for Renderers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renderers").field("places", &self.places).finish_non_exhaustive()
    }
}

/// Why there is no [`Renderer`] of a template.
#[derive(Debug)]
pub(crate) enum NotCompiled {
    /// What is wrong with the template, for logs.
    Invalid(String),
    /// Its process failed. A template that exceeds the limits with the short chats that find out
    /// what it expects does so with every chat.
    Failed(Failure),
}

/// Why there is no prompt.
#[derive(Debug)]
enum Fault {
    /// The template cannot be compiled.
    Invalid(String),
    /// The template refuses the messages or cannot render them.
    Refused(String),
    /// The process exceeded its limits.
    LimitExceeded,
    /// The process did not answer in time.
    TimedOut,
    /// The process ended otherwise, for logs and clients.
    Ended(String),
    /// The process cannot be started.
    NotStarted(String),
}

impl Renderers {
    pub(crate) fn new(launch: Arc<dyn Launch>) -> Arc<Self> {
        let places = Places::new(MAX_PROCESSES);
        Arc::new(Self { launch, places, warnings: Mutex::default() })
    }

    /// Compiles the template of a model and finds out what it expects.
    ///
    /// # Errors
    /// The template is invalid, or its process fails. After a failure with [`Reason::NotReady`],
    /// another attempt may succeed.
    pub(crate) async fn compile(
        self: &Arc<Self>,
        model: &str,
        source: TemplateSource,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Renderer, NotCompiled> {
        let setup = Setup { source, special_tokens, expectations: None };
        let mut owner = Owner {
            renderers: self.clone(),
            model: model.into(),
            setup: Arc::new(setup),
            running: None,
        };
        let started = match owner.start().await {
            // The system may have killed the process.
            Err(Fault::Ended(_)) => owner.start().await,
            started => started,
        };
        match started {
            Ok(running) => owner.keep(running),
            Err(Fault::Invalid(why)) => return Err(NotCompiled::Invalid(why)),
            Err(fault) => return Err(NotCompiled::Failed(self.failure(model, fault))),
        }
        let expectations = owner.setup.expectations.unwrap_or_default();
        let (jobs, queue) = mpsc::channel(QUEUE);
        tokio::spawn(owner.run(queue));
        Ok(Renderer { renderers: self.clone(), model: model.into(), expectations, jobs })
    }

    /// Returns the failure of a request, and logs what is the operator's concern.
    fn failure(&self, model: &str, fault: Fault) -> Failure {
        let template = format!("the chat template of the model '{model}'");
        let failure: Failure = match fault {
            Fault::Refused(why) | Fault::Invalid(why) => return refused(why).into(),
            // As with the limit of steps: the same request would fail again.
            Fault::LimitExceeded => refused(format!("{template} {}", exceeds_limits())).into(),
            Fault::TimedOut => {
                let seconds = TIME_LIMIT.as_secs();
                let why = "the processors of the server are busy";
                unavailable(format!("{template} was not rendered within {seconds} s: {why}"))
            }
            Fault::NotStarted(why) => {
                unavailable(format!("the process of {template} cannot be started: {why}"))
            }
            Fault::Ended(how) => {
                InferError::internal(format!("the process of {template} ended: {how}")).into()
            }
        };
        if let Some(suppressed) = self.warnings.lock().admit(clock::now()) {
            tracing::warn!(model, suppressed, "{}", failure.error.message);
        }
        failure
    }
}

/// Returns the failure of a request that may succeed later.
fn unavailable(message: String) -> Failure {
    InferError::new(ErrorCode::Unavailable, Reason::NotReady, message).into()
}

fn exceeds_limits() -> String {
    format!(
        "exceeds the limits of its process ({PROCESSOR_SECONDS} s of processor time, {} MiB)",
        MEMORY_BYTES >> 20
    )
}

/// The chat template of a model. The process ends with the last of its clones.
#[derive(Clone, Debug)]
pub(crate) struct Renderer {
    renderers: Arc<Renderers>,
    model: Arc<str>,
    expectations: Expectations,
    jobs: mpsc::Sender<Job>,
}

/// A prompt to render.
#[derive(Debug)]
struct Job {
    /// The frame of [`Renderer::input`].
    input: Vec<u8>,
    reply: oneshot::Sender<Result<String, Fault>>,
}

impl Renderer {
    /// Returns what [`Self::render`] takes for a request. Linear in its size.
    ///
    /// # Errors
    /// 400 if the template cannot express media that a message has, or the request is too long.
    pub(crate) fn input(&self, request: &ChatRequest, now: CivilTime) -> Result<Vec<u8>, ApiError> {
        let input = self.expectations.input(request, now)?;
        let size = input.len();
        if size > MAX_INPUT_BYTES {
            return Err(refused(format!(
                "the chat template would read {size} bytes of messages, tools and documents; at \
                 most {MAX_INPUT_BYTES} are allowed"
            )));
        }
        Ok(frames::frame(frames::RENDER, &input))
    }

    /// Renders the prompt of a request, after the requests that came before.
    ///
    /// # Errors
    /// 400 if the template refuses the messages, cannot render them or exceeds a limit; 500 or 503
    /// if its process fails otherwise.
    pub(crate) async fn render(&self, input: Vec<u8>) -> Result<String, Failure> {
        let (reply, answer) = oneshot::channel();
        let ended = || Fault::Ended("the server exits".to_owned());
        let rendered = match self.jobs.send(Job { input, reply }).await {
            Ok(()) => answer.await.unwrap_or_else(|_| Err(ended())),
            Err(_) => Err(ended()),
        };
        rendered.map_err(|fault| self.renderers.failure(&self.model, fault))
    }

    /// Returns the prompt of a request, of what the template has rendered.
    ///
    /// # Errors
    /// As [`Expectations::prompt`].
    pub(crate) fn prompt(&self, request: &ChatRequest, text: String) -> Result<String, ApiError> {
        self.expectations.prompt(request, text)
    }
}

/// Owns the process of a model.
struct Owner {
    renderers: Arc<Renderers>,
    model: Arc<str>,
    setup: Arc<Setup>,
    running: Option<Running>,
}

/// A process that waits for prompts.
struct Running {
    input: Pin<Box<dyn AsyncWrite + Send>>,
    output: BufReader<Pin<Box<dyn AsyncRead + Send>>>,
    end: Pin<Box<dyn Future<Output = End> + Send>>,
    place: Place,
}

impl Owner {
    async fn run(mut self, mut jobs: mpsc::Receiver<Job>) {
        loop {
            let job = match &mut self.running {
                None => jobs.recv().await,
                Some(running) => tokio::select! {
                    biased;
                    job = jobs.recv() => job,
                    () = running.place.wanted() => {
                        self.running = None;
                        continue;
                    }
                    end = &mut running.end => {
                        tracing::debug!(model = &*self.model, ?end, "an idle template process ended");
                        self.running = None;
                        continue;
                    }
                    () = clock::sleep(IDLE) => {
                        self.running = None;
                        continue;
                    }
                },
            };
            let Some(Job { input, reply }) = job else { return };
            // Its client has left.
            if reply.is_closed() {
                continue;
            }
            let rendered = self.render(&input).await;
            // An error if the client has left meanwhile.
            let _ = reply.send(rendered);
        }
    }

    async fn render(&mut self, input: &[u8]) -> Result<String, Fault> {
        let (mut running, was_idle) = match self.running.take() {
            Some(mut running) => {
                running.place.works();
                (running, true)
            }
            None => (self.start().await?, false),
        };
        let answered = match running.ask(input).await {
            // The process has ended while it was idle.
            Err(Fault::Ended(_)) if was_idle => {
                drop(running);
                running = self.start().await?;
                running.ask(input).await
            }
            answered => answered,
        };
        let answer = answered?;
        self.keep(running);
        match answer {
            Answer::Done(text) => String::from_utf8(text)
                .map_err(|_| Fault::Ended("its output is not UTF-8".to_owned())),
            Answer::Failed(why) => Err(Fault::Refused(why)),
        }
    }

    /// Keeps a process for the next prompt, unless its place is wanted.
    fn keep(&mut self, mut running: Running) {
        self.running = running.place.rests().then_some(running);
    }

    /// Starts a process with the template.
    async fn start(&mut self) -> Result<Running, Fault> {
        let place = self.renderers.places.take().await;
        let launch = self.renderers.launch.clone();
        let setup = self.setup.clone();
        let started = blocking::run(move || launch.launch().map(|one| (one, setup.frame()))).await;
        let started = started.map_err(|error| Fault::NotStarted(error.to_string()))?;
        let (process, setup) = started.map_err(|error| Fault::NotStarted(error.to_string()))?;
        let Process { input, output, end } = process;
        let output = BufReader::new(output);
        let mut running = Running { input, output, end, place };
        match running.ask(&setup).await? {
            Answer::Done(json) => {
                let expectations = frames::expectations(&json)
                    .ok_or_else(|| Fault::Ended("its first answer is invalid".to_owned()))?;
                if self.setup.expectations.is_none() {
                    Arc::make_mut(&mut self.setup).expectations = Some(expectations);
                }
                Ok(running)
            }
            Answer::Failed(why) => Err(Fault::Invalid(why)),
        }
    }
}

impl Running {
    /// Sends a frame and returns its answer. After an error, the process is of no use any more.
    async fn ask(&mut self, frame: &[u8]) -> Result<Answer, Fault> {
        let exchange = async {
            self.input.write_all(frame).await?;
            self.input.flush().await?;
            frames::read_answer(&mut self.output).await
        };
        let why = match clock::timeout(TIME_LIMIT, exchange).await {
            Some(Ok(answer)) => return Ok(answer),
            Some(Err(error)) => error.to_string(),
            None => return Err(Fault::TimedOut),
        };
        match clock::timeout(END_LIMIT, &mut self.end).await {
            Some(End::LimitExceeded) => Err(Fault::LimitExceeded),
            Some(End::Other(how)) => Err(Fault::Ended(how)),
            None => Err(Fault::Ended(why)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
