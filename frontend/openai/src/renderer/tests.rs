//! Tests of the frontend's half, with threads in place of processes.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::os::unix::net::UnixStream as Socket;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::json;
use tokio::net::UnixStream;

use super::*;
use crate::template::CHATML;

/// A prompt with this text ends the thread, and how.
const DEADLY: [(&str, End); 2] =
    [("limit", End::LimitExceeded), ("crash", End::Other(String::new()))];

/// Renders in threads, which serve as processes do.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    /// How many have started.
    started: AtomicUsize,
    /// The next ones end at once.
    broken: AtomicUsize,
}

impl Launch for Arc<Threads> {
    fn launch(&self) -> io::Result<Process> {
        let (ours, theirs) = Socket::pair()?;
        self.started.fetch_add(1, Ordering::Relaxed);
        let is_broken = self
            .broken
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        let (ended, end) = oneshot::channel();
        thread::spawn(move || {
            let input = theirs.try_clone().unwrap();
            let how = match is_broken {
                Ok(_) => End::Other("broken".to_owned()),
                Err(_) => end_of(serve(Deadly(input), &theirs, |_| Ok(()))),
            };
            drop(theirs);
            let _ = ended.send(how);
        });
        ours.set_nonblocking(true)?;
        let (output, input) = UnixStream::from_std(ours)?.into_split();
        let end = Box::pin(async move { end.await.unwrap() });
        Ok(Process { input: Box::pin(input), output: Box::pin(output), end })
    }
}

/// The input of a thread, with errors in place of deadly prompts.
struct Deadly(Socket);

impl io::Read for Deadly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read(buffer)?;
        let text = String::from_utf8_lossy(&buffer[..count]);
        match DEADLY.iter().find(|(word, _)| text.contains(&format!("\"deadly {word}\""))) {
            Some((word, _)) => Err(io::Error::other(*word)),
            None => Ok(count),
        }
    }
}

fn end_of(served: io::Result<()>) -> End {
    let word = served.err().map(|error| error.to_string()).unwrap_or_default();
    let known = DEADLY.into_iter().find(|(name, _)| *name == word);
    known.map_or(End::Other(word), |(_, end)| end)
}

/// Returns models whose templates are rendered in threads.
pub(crate) fn models() -> Arc<crate::Models> {
    Arc::new(crate::Models::new(Arc::new(Arc::<Threads>::default())))
}

fn new() -> (Arc<Threads>, Arc<Renderers>) {
    let threads = Arc::<Threads>::default();
    (threads.clone(), Renderers::new(Arc::new(threads)))
}

async fn compile(renderers: &Arc<Renderers>, source: &str) -> Result<Renderer, String> {
    let source = TemplateSource::Single(source.to_owned());
    renderers.compile("m", source, BTreeMap::new()).await.map_err(|error| match error {
        NotCompiled::Invalid(why) => why,
        NotCompiled::Failed(failure) => failure.error.message,
    })
}

async fn render(renderer: &Renderer, text: &str) -> Result<String, Failure> {
    let body = json!({"messages": [{"role": "user", "content": text}]});
    let request = ChatRequest::parse(body.to_string().as_bytes()).unwrap();
    let input = renderer.input(&request, CivilTime::from_unix(0)).unwrap();
    let text = renderer.render(input).await?;
    Ok(renderer.prompt(&request, text).unwrap())
}

#[tokio::test]
async fn renders_many_prompts_in_one_process() {
    let (threads, renderers) = new();
    let renderer = compile(&renderers, CHATML).await.unwrap();
    for number in 0..3 {
        let text = "x".repeat(1 << (10 * number));
        let expected = format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
        assert_eq!(render(&renderer, &text).await.unwrap(), expected);
    }
    assert_eq!(threads.started.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn errors_of_a_template_are_the_clients() {
    let (_, renderers) = new();
    let why = compile(&renderers, "{% for").await.unwrap_err();
    assert!(why.contains("invalid chat template"), "{why}");
    let renderer = compile(&renderers, "{{ raise_exception('no ' + messages[0].content) }}").await;
    let renderer = renderer.unwrap();
    for _ in 0..2 {
        let failure = render(&renderer, "x").await.unwrap_err();
        assert_eq!((failure.error.status, failure.error.message.as_str()), (400, "no x"));
    }
}

#[tokio::test]
async fn a_process_that_ends_fails_one_request() {
    let (threads, renderers) = new();
    let renderer = compile(&renderers, CHATML).await.unwrap();
    let failure = render(&renderer, "deadly limit").await.unwrap_err();
    assert_eq!(failure.error.status, 400);
    let message = "the chat template of the model 'm' exceeds the limits of its process \
                   (2 s of processor time, 512 MiB)";
    assert_eq!(failure.error.message, message);
    assert!(render(&renderer, "x").await.is_ok());
    assert_eq!(threads.started.load(Ordering::Relaxed), 2);
    // One that has ended otherwise may have been killed while it was idle: a second attempt.
    let failure = render(&renderer, "deadly crash").await.unwrap_err();
    assert_eq!(failure.error.status, 500);
    assert_eq!(threads.started.load(Ordering::Relaxed), 3);
    assert!(render(&renderer, "x").await.is_ok());
}

#[tokio::test]
async fn a_process_that_cannot_compile_is_tried_twice() {
    let (threads, renderers) = new();
    threads.broken.store(1, Ordering::Relaxed);
    assert!(compile(&renderers, CHATML).await.is_ok());
    threads.broken.store(2, Ordering::Relaxed);
    let why = compile(&renderers, CHATML).await.unwrap_err();
    assert_eq!(why, "the process of the chat template of the model 'm' ended: broken");
}

#[tokio::test]
async fn more_models_than_places_are_served() {
    let (threads, renderers) = new();
    let mut all = Vec::new();
    for _ in 0..MAX_PROCESSES + 3 {
        all.push(compile(&renderers, CHATML).await.unwrap());
    }
    for renderer in &all {
        assert!(render(renderer, "x").await.is_ok());
    }
    assert!(threads.started.load(Ordering::Relaxed) > MAX_PROCESSES + 3);
}

#[tokio::test]
async fn a_client_that_leaves_costs_nothing_else() {
    let (threads, renderers) = new();
    let renderer = compile(&renderers, CHATML).await.unwrap();
    for _ in 0..3 {
        tokio::select! {
            biased;
            _ = render(&renderer, "deadly crash") => panic!("no process answers at once"),
            () = std::future::ready(()) => {}
        }
    }
    assert!(render(&renderer, "x").await.is_ok());
    assert!(threads.started.load(Ordering::Relaxed) <= 2);
}
